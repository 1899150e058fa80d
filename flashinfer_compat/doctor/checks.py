"""The checks: each looks at facts and yields findings. To add a check, write a function and add it to `CHECKS`."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from flashinfer_compat.doctor.finding import Finding, Severity
from flashinfer_compat.environment import Environment, RecordState
from flashinfer_compat.features.known_issues import Effect
from flashinfer_compat.reasons import ReasonCode
from flashinfer_compat.report import Capabilities
from flashinfer_compat.signatures.recorded import releases
from flashinfer_compat.versions import parse_version
from flashinfer_compat.vocabulary import Backend

__all__ = ["CHECKS", "Check"]

Check = Callable[[Environment, Capabilities], Iterator[Finding]]

_DISTRIBUTIONS = {"flashinfer": "flashinfer-python"}
"""Of packages that are named unlike their distribution."""
_INSTALL = "pip install flashinfer-python"


def flashinfer_missing(environment: Environment, report: Capabilities) -> Iterator[Finding]:
    """A GPU that FlashInfer has FP4 kernels for, and no FlashInfer."""
    if report.target.flashinfer is None:
        serious = report.target.architecture is not None
        yield Finding(
            "flashinfer-missing",
            Severity.WARNING if serious else Severity.NOTE,
            f"{report.target.flashinfer_problem} fp4_moe runs on the torch backend, which is a reference.",
            _INSTALL if serious else "",
        )


def torch_missing(environment: Environment, report: Capabilities) -> Iterator[Finding]:
    """Nothing can be computed without torch."""
    if report.target.torch_version is None:
        why = environment.torch.reason or "torch is not installed"
        yield Finding("torch-missing", Severity.ERROR, f"fp4_moe needs torch: {why}.", "pip install torch")


def package_missing(environment: Environment, report: Capabilities) -> Iterator[Finding]:
    """Metadata of an install whose package is gone."""
    for name, package in (("flashinfer-python", "flashinfer"), ("torch", "torch")):
        copies = environment.copies(name)
        if copies and environment.packages.value is not None and environment.package(package) is None:
            version = f"=={copies[0].version}" if copies[0].version else ""
            yield Finding(
                "package-missing",
                Severity.ERROR,
                f"{name} {copies[0].version or 'of unknown version'} has metadata in {copies[0].location}, but no "
                f"package {package} can be imported.",
                f"pip install --force-reinstall --no-deps {name}{version}",
            )


def package_unreadable(environment: Environment, report: Capabilities) -> Iterator[Finding]:
    """A FlashInfer whose source is no Python."""
    package, flashinfer = environment.package("flashinfer"), report.target.flashinfer
    if package is not None and flashinfer is not None and flashinfer.symbols.problems:
        name, reason = next(iter(flashinfer.symbols.problems.items()))
        count = len(flashinfer.symbols.problems)
        yield Finding(
            "package-unreadable",
            Severity.ERROR,
            f"{count} entry points of {package.location} cannot be read, {name} among them: {reason}.",
            "pip install --force-reinstall --no-deps flashinfer-python"
            if package.owner
            else f"Remove {package.location}, or take its parent off the path.",
        )


def version_conflict(environment: Environment, report: Capabilities) -> Iterator[Finding]:
    """Metadata of one release beside the code of another."""
    package = environment.package("flashinfer")
    if package is None or package.version_from_source is None:
        return
    own = parse_version(package.version_from_source)
    for copy in environment.copies("flashinfer-python"):
        told = parse_version(copy.version or "")
        if own is not None and told is not None and own != told:
            yield Finding(
                "version-conflict",
                Severity.ERROR,
                f"The code in {package.location} is FlashInfer {own}; the metadata in {copy.location} says {told}. "
                "The code's own version is believed.",
                f"pip uninstall -y flashinfer-python && pip install flashinfer-python=={own}",
            )


def release_unknown(environment: Environment, report: Capabilities) -> Iterator[Finding]:
    """A FlashInfer whose rules nobody has read."""
    flashinfer = report.target.flashinfer
    if flashinfer is not None and flashinfer.behaviour is None and not flashinfer.symbols.problems:
        yield Finding(
            "release-unknown",
            Severity.WARNING,
            f"{flashinfer.behaviour_source}. Fused strategies are refused, because its rules are not known.",
            f"pip install flashinfer-python=={releases()[-1]}",
        )


def package_shadowed(environment: Environment, report: Capabilities) -> Iterator[Finding]:
    """Another folder is imported than the one that was installed."""
    for package in environment.packages.value or ():
        copies = environment.copies(_DISTRIBUTIONS.get(package.name, package.name.replace("_", "-")))
        # Without a record nobody knows which files an install put there.
        if package.shadowed and copies and copies[0].files.state is not RecordState.NO_RECORD:
            yield Finding(
                "package-shadowed",
                Severity.ERROR,
                f"import {package.name} loads {package.location}, which is not what the installed distribution "
                f"{copies[0].name} put there.",
                "Remove that folder, or take its parent off PYTHONPATH.",
            )


def installed_twice(environment: Environment, report: Capabilities) -> Iterator[Finding]:
    """Two copies of one distribution on the path."""
    found = environment.distributions.value.found if environment.distributions.value else ()
    for name in dict.fromkeys(one.name for one in found):
        copies = environment.copies(name)
        if len(copies) > 1:
            places = ", ".join(f"{copy.version} in {copy.location}" for copy in copies)
            package = environment.package("flashinfer") if name == "flashinfer-python" else None
            keep = (package and package.version_from_source) or copies[0].version
            yield Finding(
                "installed-twice",
                Severity.WARNING,
                f"{name} is installed {len(copies)} times: {places}. The first one counts.",
                f"pip uninstall -y {name} && pip uninstall -y {name} && pip install {name}=={keep}",
            )


def files_changed(environment: Environment, report: Capabilities) -> Iterator[Finding]:
    """Installed files that are not what the distribution installed."""
    found = environment.distributions.value.found if environment.distributions.value else ()
    for one in found:
        if one.files.state is RecordState.DIFFERS:
            wrong = (*one.files.missing, *one.files.changed)
            yield Finding(
                "files-changed",
                Severity.ERROR,
                f"{len(wrong)} files of {one.name} {one.version} are missing or changed, {wrong[0]} among them.",
                f"pip install --force-reinstall --no-deps {one.name}=={one.version}",
            )


def no_fp4_kernels(environment: Environment, report: Capabilities) -> Iterator[Finding]:
    """A GPU on which FlashInfer's FP4 MoE cannot run, although its symbols import."""
    target = report.target
    if target.flashinfer is None or target.architecture is None:
        return
    on_kernels = [one for one in report.strategies if one.backend is not Backend.TORCH]
    wrong_gpu = [
        next((reason for reason in one.reasons if reason.code is ReasonCode.ARCHITECTURE), None) for one in on_kernels
    ]
    if wrong_gpu and wrong_gpu[0] is not None and all(wrong_gpu):
        yield Finding(
            "no-fp4-moe-kernel",
            Severity.WARNING,
            f"{wrong_gpu[0].message} fp4_moe runs on the torch backend, which is a reference.",
        )


def known_issues(environment: Environment, report: Capabilities) -> Iterator[Finding]:
    """Defects of this release that cannot be worked around."""
    for issue in report.known_issues:
        if issue.effect is Effect.TOLD and issue.id != "import-needs-cuda":
            yield Finding(
                f"known-issue-{issue.id}", Severity.NOTE, f"{issue.title[0].upper()}{issue.title[1:]}.", issue.way_out
            )


def import_needs_cuda(environment: Environment, report: Capabilities) -> Iterator[Finding]:
    """The releases that cannot be imported beside a CPU build of torch."""
    affected = any(issue.id == "import-needs-cuda" for issue in report.known_issues)
    torch = environment.torch.value
    if affected and torch is not None and torch.cuda is None and environment.copies("nvidia-cutlass-dsl"):
        yield Finding(
            "import-needs-cuda",
            Severity.ERROR,
            f"import flashinfer raises AssertionError: torch {torch.version} is a CPU build.",
            "pip install --force-reinstall torch",
        )


def unreadable(environment: Environment, report: Capabilities) -> Iterator[Finding]:
    """Facts that could not be gathered."""
    sections = {
        "distributions": environment.distributions.reason,
        "packages": environment.packages.reason,
        "environment variables": environment.variables.reason,
        "cache directories": environment.caches.reason,
    }
    for name, reason in sections.items():
        if reason is not None:
            yield Finding("facts-missing", Severity.WARNING, f"The {name} could not be read: {reason}")


CHECKS: tuple[Check, ...] = (
    flashinfer_missing,
    torch_missing,
    package_missing,
    package_unreadable,
    version_conflict,
    release_unknown,
    package_shadowed,
    installed_twice,
    files_changed,
    import_needs_cuda,
    no_fp4_kernels,
    known_issues,
    unreadable,
)
