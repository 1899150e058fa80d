"""Do torch, the driver and the GPU fit together?"""

from __future__ import annotations

from collections.abc import Iterator

from packaging.version import Version

from flashinfer_compat.doctor.check import Checks, Found
from flashinfer_compat.doctor.facts import Facts
from flashinfer_compat.doctor.finding import Group, Severity
from flashinfer_compat.doctor.repairs import install_release, install_torch, newest_release
from flashinfer_compat.versions import parse_version

__all__ = ["CHECKS"]

CHECKS = Checks(Group.TORCH_AND_CUDA)

_FIRST_CUDA = {
    "sm89": "11.8",
    "sm90": "11.8",
    "sm100": "12.8",
    "sm103": "12.8",
    "sm107": "12.8",
    "sm110": "13.0",
    "sm120": "12.8",
    "sm121": "12.8",
}
"""The first CUDA whose compiler makes code that each GPU runs; sm103 and sm107 run code for sm100, sm121 for sm120."""

_LEAST = "2.6"
"""The first torch that this package requires (setup.cfg)."""
_TRIED = "2.13"
"""The newest torch that its tests have run with (scripts/test.sh)."""


@CHECKS.add("torch-missing", "Nothing can be computed without torch.")
def _torch_missing(facts: Facts) -> Iterator[Found]:
    if facts.report.target.torch_version is None and not facts.environment.copies("torch"):
        why = facts.environment.torch.reason or "torch is not installed"
        yield Found(Severity.ERROR, f"fp4_moe needs torch: {why}.", install_torch(facts) or "pip install torch")


@CHECKS.add("torch-unreadable", "Nobody can tell which CUDA it was built for; importing it probably fails.")
def _torch_unreadable(facts: Facts) -> Iterator[Found]:
    environment = facts.environment
    if environment.torch.reason is not None and environment.package("torch") is not None:
        yield Found(
            Severity.ERROR,
            f"torch is there, but {environment.torch.reason}.",
            install_torch(facts) or "pip install --force-reinstall torch",
        )


@CHECKS.add("torch-too-old", "It lacks types and functions that fp4_moe computes with.")
def _torch_too_old(facts: Facts) -> Iterator[Found]:
    torch, version = _torch(facts)
    if version is not None and version.release < Version(_LEAST).release:
        repair = install_torch(facts) or f"pip install 'torch>={_LEAST}'"
        yield Found(Severity.ERROR, f"torch {torch} is installed; flashinfer-compat needs {_LEAST} or newer.", repair)


@CHECKS.add("torch-untried", "What a release of torch changes shows only when it is used.")
def _torch_untried(facts: Facts) -> Iterator[Found]:
    torch, version = _torch(facts)
    if version is not None and version.release[:2] > Version(_TRIED).release:
        yield Found(Severity.NOTE, f"torch {torch} is newer than {_TRIED}, the newest that was tried.")


def _torch(facts: Facts) -> tuple[str, Version | None]:
    """The version as it is told, and to compare with."""
    torch = facts.environment.torch.value
    return (torch.version, parse_version(torch.version)) if torch is not None else ("", None)


@CHECKS.add("torch-without-cuda", "The GPU lies idle: torch and FlashInfer's kernels cannot use it.")
def _torch_without_cuda(facts: Facts) -> Iterator[Found]:
    torch = facts.environment.torch.value
    if torch is not None and torch.cuda is None and facts.architecture is not None:
        kind = f"for AMD GPUs (ROCm {torch.hip})" if torch.hip else "without CUDA"
        yield Found(
            Severity.WARNING,
            f"torch {torch.version} is built {kind}, but there is a {facts.architecture} GPU.",
            install_torch(facts),
        )


@CHECKS.add("torch-newer-than-driver", "torch.cuda finds no GPU: 'the NVIDIA driver on your system is too old'.")
def _torch_newer_than_driver(facts: Facts) -> Iterator[Found]:
    torch, gpus = facts.environment.torch.value, facts.environment.gpus.value
    built = parse_version(torch.cuda) if torch and torch.cuda else None
    driver = parse_version(gpus.driver_cuda_version) if gpus and gpus.driver_cuda_version else None
    # Within one major version newer builds run on older drivers (CUDA's minor version compatibility).
    if torch and gpus and built and driver and gpus.devices and built.major > driver.major:
        yield Found(
            Severity.ERROR,
            f"torch {torch.version} is built for CUDA {torch.cuda}; driver {gpus.driver_version} runs CUDA up to "
            f"{gpus.driver_cuda_version}.",
            install_torch(facts),
            "Or install a newer NVIDIA driver.",
        )


@CHECKS.add("torch-older-than-gpu", "Every operation fails with 'no kernel image is available for execution'.")
def _torch_older_than_gpu(facts: Facts) -> Iterator[Found]:
    torch, first = facts.environment.torch.value, _FIRST_CUDA.get(facts.architecture or "")
    built = parse_version(torch.cuda) if torch and torch.cuda else None
    if torch is not None and built is not None and first is not None and built < Version(first):
        repair = install_torch(facts)
        yield Found(
            Severity.ERROR,
            f"torch {torch.version} is built for CUDA {torch.cuda}, which cannot make code for {facts.architecture}; "
            f"CUDA {first} is the first that can.",
            repair,
            "" if repair else f"Install a torch that is built for CUDA {first} or newer.",
        )


@CHECKS.add("import-needs-cuda", "import flashinfer raises AssertionError in gdn_kernels; nothing of it can be used.")
def _import_needs_cuda(facts: Facts) -> Iterator[Found]:
    affected = any(issue.id == "import-needs-cuda" for issue in facts.report.known_issues)
    torch = facts.environment.torch.value
    if affected and torch is not None and torch.cuda is None and facts.environment.copies("nvidia-cutlass-dsl"):
        yield Found(
            Severity.ERROR,
            f"FlashInfer {facts.own_version} cannot be imported beside torch {torch.version}, a build without CUDA.",
            install_torch(facts) if facts.architecture else install_release(facts, newest_release()),
        )
