"""Does importing FlashInfer work, and give what its source says? Only with --live."""

from __future__ import annotations

from collections.abc import Iterator

from flashinfer_compat.doctor.check import Checks, Found
from flashinfer_compat.doctor.facts import Facts
from flashinfer_compat.doctor.finding import Group, Severity
from flashinfer_compat.doctor.repairs import install_torch

__all__ = ["CHECKS"]

CHECKS = Checks(Group.LIVE)


@CHECKS.add("import-fails", "No engine can use a FlashInfer that cannot be imported.")
def _import_fails(facts: Facts) -> Iterator[Found]:
    if facts.live is not None and facts.live.problem:
        version = f"=={facts.public_version}" if facts.public_version else ""
        yield Found(
            Severity.ERROR,
            f"import flashinfer failed after {facts.live.seconds:.1f} s: {facts.live.problem}.",
            f"pip install --force-reinstall --no-deps flashinfer-python{version}",
            "Other findings may name the cause; repair those first.",
        )


@CHECKS.add("import-hangs", "A server that imports FlashInfer waits just as long before it starts.")
def _import_hangs(facts: Facts) -> Iterator[Found]:
    if facts.live is not None and facts.live.timed_out:
        yield Found(
            Severity.ERROR,
            f"import flashinfer was not done after {facts.live.limit:g} s and was stopped.",
            'timeout -s INT 60 python -X importtime -c "import flashinfer"',
            "That line shows in which module it waits: a file lock, a network folder or the GPU driver.",
        )


@CHECKS.add("signatures-differ", "Plans rest on the signatures in the source; something replaces functions at import.")
def _signatures_differ(facts: Facts) -> Iterator[Found]:
    if facts.live is not None and facts.live.differences:
        number = len(facts.live.differences)
        yield Found(
            Severity.WARNING,
            f"{number} imported function{'s are' if number > 1 else ' is'} not as the source says: "
            f"{facts.live.differences[0]}.",
        )


@CHECKS.add("torch-lacks-architecture", "Every operation fails with 'no kernel image is available for execution'.")
def _torch_lacks_architecture(facts: Facts) -> Iterator[Found]:
    built = facts.live.torch_architectures if facts.live else ()
    if not built or facts.architecture is None:
        return
    if not any(_holds(one, facts.architecture) for one in built):
        torch = facts.environment.torch.value
        yield Found(
            Severity.ERROR,
            f"torch {torch.version if torch else ''} holds code for {', '.join(built)}; none of it runs on "
            f"{facts.architecture}.",
            install_torch(facts),
        )


def _holds(built: str, architecture: str) -> bool:
    """Whether a GPU runs what was built: machine code of its family, or PTX of an older GPU."""
    kind, _, digits = built.partition("_")
    suffix = digits[-1:] if digits[-1:] in ("a", "f") else ""
    number, own = int(digits.rstrip("af")), int(architecture[2:])
    if suffix == "a":
        return number == own
    if kind == "compute":
        return number <= own
    return number // 10 == own // 10 and number <= own
