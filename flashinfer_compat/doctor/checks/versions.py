"""Do FlashInfer and the packages beside it belong together? The rules are those of the installed release."""

from __future__ import annotations

import re
from collections.abc import Iterator

from packaging.requirements import InvalidRequirement, Requirement
from packaging.version import InvalidVersion, Version

from flashinfer_compat.doctor.check import Checks, Found
from flashinfer_compat.doctor.facts import UNKNOWN_VERSION, Facts
from flashinfer_compat.doctor.finding import Group, Severity
from flashinfer_compat.doctor.repairs import install_cubins, install_jit_cache, install_release, newest_release
from flashinfer_compat.environment.distributions import normalised
from flashinfer_compat.versions import parse_version

__all__ = ["CHECKS"]

CHECKS = Checks(Group.VERSIONS)

_UNCHECKED = "FLASHINFER_DISABLE_VERSION_CHECK"
_IMPORT_FAILS = "import flashinfer raises RuntimeError"


@CHECKS.add("version-conflict", "pip will upgrade or repair a release that is not the one that runs.")
def _version_conflict(facts: Facts) -> Iterator[Found]:
    package = facts.package
    own = parse_version(package.version_from_source or "") if package else None
    if package is None or own is None:
        return
    copy = facts.first_copy("flashinfer-python")
    told = parse_version(copy.version or "") if copy else None
    if copy is not None and told is not None and own != told and not package.shadowed:
        yield Found(
            Severity.ERROR,
            f"The code in {package.location} is FlashInfer {own}; the metadata in {copy.location} says {told}. The "
            "code's own version is believed.",
            f"pip uninstall -y flashinfer-python && pip install flashinfer-python=={own}",
            subject=copy.name,
        )


@CHECKS.add("version-unknown", "FlashInfer then skips its version checks, and all its states share one kernel cache.")
def _version_unknown(facts: Facts) -> Iterator[Found]:
    flashinfer = facts.flashinfer
    if flashinfer is not None and facts.own_version == UNKNOWN_VERSION and flashinfer.behaviour is not None:
        yield Found(
            Severity.NOTE,
            f"The FlashInfer in {facts.package.location if facts.package else '?'} does not say which release it is; "
            f"{flashinfer.behaviour_source}.",
            advice="Build it with pip install, which writes flashinfer/_build_meta.py.",
        )


@CHECKS.add("release-unknown", "Fused strategies are refused, because the rules of this FlashInfer are not known.")
def _release_unknown(facts: Facts) -> Iterator[Found]:
    flashinfer = facts.flashinfer
    # What is in the way of an install, package-shadowed tells of; which release it is, nobody need know.
    shadowed = facts.package is not None and facts.package.shadowed and facts.package.owner is None
    if flashinfer is None or flashinfer.behaviour is not None or flashinfer.symbols.problems or shadowed:
        return
    message = f"{flashinfer.behaviour_source[0].upper()}{flashinfer.behaviour_source[1:]}."
    repair = install_release(facts, newest_release())
    if facts.package is not None and facts.package.owner is None and not facts.environment.copies("flashinfer-python"):
        # Whatever pip installs, this folder would go on being imported.
        yield Found(
            Severity.WARNING,
            f"{facts.package.location} was not installed: {message[0].lower()}{message[1:]}",
            advice=f"Remove or rename that folder, or take its parent off PYTHONPATH; then run: {repair}",
        )
    else:
        yield Found(Severity.WARNING, message, repair)


@CHECKS.add("cubin-version-mismatch", "The kernels in flashinfer-cubin are of exactly one FlashInfer release.")
def _cubin_version_mismatch(facts: Facts) -> Iterator[Found]:
    version, own = facts.package_version("flashinfer_cubin", "flashinfer-cubin"), facts.own_version
    if version is None or own is None or version == own or facts.is_exempt or not facts.since("0.4.0"):
        return
    # jit/env.py looks at the variable first since 0.6.16rc3, and then not at the package.
    if facts.variable("FLASHINFER_CUBIN_DIR") and facts.since("0.6.16rc3"):
        return
    pair = f"flashinfer-cubin is {version}, FlashInfer is {own}"
    repair = install_cubins(facts) or "pip uninstall -y flashinfer-cubin"
    if facts.variable(_UNCHECKED):
        yield Found(
            Severity.WARNING,
            f"{pair}, and {_UNCHECKED} is set: the wrong package is used, and what it lacks is downloaded into it.",
            repair,
        )
    elif facts.since("0.7.2rc3"):
        yield Found(
            Severity.WARNING, f"{pair}: the package is ignored, and kernels are downloaded at the first call.", repair
        )
    else:
        yield Found(Severity.ERROR, f"{pair}: {_IMPORT_FAILS}.", repair)


@CHECKS.add(
    "jit-cache-version-mismatch",
    "Compiled modules of another release take other arguments: calls end in 'Mismatched number of arguments'.",
)
def _jit_cache_version_mismatch(facts: Facts) -> Iterator[Found]:
    version, own = facts.package_version("flashinfer_jit_cache", "flashinfer-jit-cache"), facts.own_version
    if version is None or own is None or facts.is_exempt or not facts.since("0.4.0"):
        return
    accepted = facts.accepts_jit_cache(version)
    if accepted and parse_version(version) == parse_version(own):
        return
    pair = f"flashinfer-jit-cache is {version}, FlashInfer is {own}"
    repair = install_jit_cache(facts) or "pip uninstall -y flashinfer-jit-cache"
    if accepted:
        yield Found(
            Severity.ERROR,
            f"{pair}; FlashInfer's check passes, because it compares only the beginning, and calls fail later.",
            repair,
        )
    elif facts.variable(_UNCHECKED):
        yield Found(
            Severity.ERROR,
            f"{pair}, and {_UNCHECKED} is set: the wrong modules are loaded, and calls fail later.",
            f"unset {_UNCHECKED} && {repair}",
        )
    elif facts.since("0.7.2rc3"):
        yield Found(Severity.WARNING, f"{pair}: the package is ignored, and kernels are compiled here.", repair)
    else:
        yield Found(Severity.ERROR, f"{pair}: {_IMPORT_FAILS}.", repair)


@CHECKS.add("jit-cache-provider-missing", "Kernels are compiled at the first call, which takes minutes and needs nvcc.")
def _jit_cache_provider_missing(facts: Facts) -> Iterator[Found]:
    shim = facts.package_version("flashinfer_jit_cache", "flashinfer-jit-cache")
    if facts.has_kernels and facts.since("0.7.0rc3") and facts.takes_jit_cache and not facts.jit_cache_providers:
        yield Found(
            Severity.WARNING,
            f"flashinfer-jit-cache {shim} is installed, but no part of it with the same version that runs on "
            f"{facts.architecture}.",
            install_jit_cache(facts),
        )


@CHECKS.add("jit-cache-other-cuda", "Its modules need the CUDA runtime they were built with.")
def _jit_cache_other_cuda(facts: Facts) -> Iterator[Found]:
    version = facts.package_version("flashinfer_jit_cache", "flashinfer-jit-cache") or ""
    torch = facts.environment.torch.value
    built = re.search(r"\+cu(\d+)\d$", version)
    if facts.takes_jit_cache and built and torch and torch.cuda and built[1] != torch.cuda.partition(".")[0]:
        yield Found(
            Severity.WARNING,
            f"flashinfer-jit-cache {version} is built for CUDA {built[1]}, torch {torch.version} for {torch.cuda}.",
            install_jit_cache(facts) or "pip uninstall -y flashinfer-jit-cache",
        )


@CHECKS.add("kernel-package-ignored", "This FlashInfer looks for neither package; it downloads or compiles instead.")
def _kernel_package_ignored(facts: Facts) -> Iterator[Found]:
    if facts.flashinfer is None or facts.since("0.4.0"):
        return
    for package, name in (("flashinfer_cubin", "flashinfer-cubin"), ("flashinfer_jit_cache", "flashinfer-jit-cache")):
        version = facts.package_version(package, name)
        if version is not None:
            yield Found(Severity.NOTE, f"{name} {version} is not used by FlashInfer {facts.own_version}.", subject=name)


_IMPORTED_FIRST = "apache-tvm-ffi"
"""jit/cpp_ext.py imports tvm_ffi since 0.5.0: without it nothing works."""


@CHECKS.add("requirement-unmet", "FlashInfer was built for the versions that it requires.")
def _requirement_unmet(facts: Facts) -> Iterator[Found]:
    copy = facts.first_copy("flashinfer-python")
    if copy is None or facts.flashinfer is None:
        return
    distributions = facts.environment.distributions.value
    beside = distributions.beside if distributions else ()
    unmet: dict[str, tuple[str, str]] = {}
    for requirement in _requirements(copy.requires):
        name = normalised(requirement.name)
        if name == "torch":
            continue
        installed = facts.first_copy(name) or next((one for one in beside if one.name == name), None)
        version = _version(installed.version if installed else None)
        if installed is not None and (version is None or requirement.specifier.contains(version, prereleases=True)):
            continue
        unmet[name] = f"{name}{requirement.specifier}", f"{installed.version} is" if installed else "not"
    # One cause, such as an install with --no-deps, usually leaves out several: one finding for all of a severity.
    for severity, names in (
        (Severity.ERROR, [name for name in unmet if name == _IMPORTED_FIRST]),
        (Severity.WARNING, [name for name in unmet if name != _IMPORTED_FIRST]),
    ):
        if names:
            told = ", ".join(f"{unmet[name][0]} ({unmet[name][1]} installed)" for name in names)
            yield Found(
                severity,
                f"{copy.title} requires {told}.",
                " ".join(["pip install", *(f"'{unmet[name][0]}'" for name in names)]),
                subject=" ".join(names),
            )


@CHECKS.add("cutlass-dsl-half-upgraded", "CuTe-DSL kernels fail to import or to compile, and features disappear.")
def _cutlass_dsl_half_upgraded(facts: Facts) -> Iterator[Found]:
    copy = facts.first_copy("nvidia-cutlass-dsl")
    if copy is None or copy.version is None:
        return
    found = facts.environment.distributions.value.found if facts.environment.distributions.value else ()
    libraries = {one.name: one.version for one in found if one.name.startswith("nvidia-cutlass-dsl-libs")}
    required = [one.name for one in _requirements(copy.requires) if one.name.startswith("nvidia-cutlass-dsl-libs")]
    whole = _version(copy.version)
    wrong = [f"{name} is {version}" for name, version in libraries.items() if _version(version) != whole]
    wrong += [f"{name} is not installed" for name in required if name not in libraries]
    if wrong:
        names = sorted({*libraries, *required})
        pinned = " ".join(f"{name}=={copy.version}" for name in ("nvidia-cutlass-dsl", *names))
        yield Found(
            Severity.WARNING,
            f"nvidia-cutlass-dsl is {copy.version}, but {' and '.join(wrong)}.",
            f"pip install --force-reinstall --no-deps {pinned}",
        )


def _requirements(lines: tuple[str, ...]) -> Iterator[Requirement]:
    """Those that hold here without any extra."""
    for line in lines:
        try:
            requirement = Requirement(line)
        except InvalidRequirement:
            continue
        if requirement.marker is None or requirement.marker.evaluate({"extra": ""}):
            yield requirement


def _version(text: str | None) -> Version | None:
    try:
        return Version(text) if text else None
    except InvalidVersion:
        return None
