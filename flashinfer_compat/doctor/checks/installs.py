"""Is FlashInfer there, once, whole, and the one that is imported?"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from pathlib import Path

from flashinfer_compat.doctor.check import Checks, Found
from flashinfer_compat.doctor.facts import Facts
from flashinfer_compat.doctor.finding import Group, Severity
from flashinfer_compat.doctor.repairs import install_version, newest_release, remove
from flashinfer_compat.environment import Distribution, ImportablePackage, RecordState
from flashinfer_compat.environment.packages import PACKAGES
from flashinfer_compat.signatures.recorded import recorded, releases
from flashinfer_compat.versions import parse_version

__all__ = ["CHECKS"]

CHECKS = Checks(Group.INSTALL)


@CHECKS.add("flashinfer-missing", "FlashInfer brings the kernels that NVFP4 MoE is fast with.")
def _flashinfer_missing(facts: Facts) -> Iterator[Found]:
    target = facts.report.target
    # Where the metadata is there and the package is gone, package-missing says more.
    package = facts.package
    gone = package is None and facts.environment.copies("flashinfer-python")
    # Where something else is in its place, package-shadowed does.
    shadowed = package is not None and package.shadowed and package.owner is None
    if target.flashinfer is None and not gone and not shadowed:
        on_gpu = target.architecture is not None
        yield Found(
            Severity.WARNING if on_gpu else Severity.NOTE,
            target.flashinfer_problem,
            f"pip install flashinfer-python=={newest_release()}" if on_gpu else "",
            f"Rename {package.origin or package.location}, or take its folder off the path." if package else "",
        )


@CHECKS.add("package-missing", "Importing it fails, or loads something else.")
def _package_missing(facts: Facts) -> Iterator[Found]:
    if facts.environment.packages.value is None:
        return
    for package, distributions in PACKAGES.items():
        copy = next((one for name in distributions for one in facts.environment.copies(name)), None)
        if copy is not None and facts.environment.package(package) is None:
            yield Found(
                Severity.ERROR if package in ("flashinfer", "torch") else Severity.WARNING,
                f"{copy.title} has metadata in {copy.location}, but no package {package} can be imported.",
                # pip cannot uninstall by metadata that is broken.
                _replace_metadata(copy)
                if copy.problems
                else install_version(copy.name, copy.version, "--force-reinstall", "--no-deps"),
                subject=copy.name,
            )


def _replace_metadata(copy: Distribution) -> str:
    return f"{remove(copy.metadata_path)} && pip install {copy.name}"


@CHECKS.add("kernel-package-hollow", "FlashInfer takes a folder of that name for the package: import flashinfer fails.")
def _kernel_package_hollow(facts: Facts) -> Iterator[Found]:
    for name, owner in (("flashinfer_cubin", "flashinfer-cubin"), ("flashinfer_jit_cache", "flashinfer-jit-cache")):
        package, copy = facts.environment.package(name), facts.first_copy(owner)
        if package is None or package.origin is not None or package.location is None or not facts.since("0.4.0"):
            continue
        # jit/env.py looks at the variable first since 0.6.16rc3, and then not at the package.
        if name == "flashinfer_cubin" and facts.variable("FLASHINFER_CUBIN_DIR") and facts.since("0.6.16rc3"):
            continue
        yield Found(
            Severity.ERROR,
            f"{package.location} is a folder without an __init__.py: import flashinfer raises AttributeError, "
            f"because {name} has no __version__.",
            install_version(owner, copy.version, "--force-reinstall", "--no-deps")
            if copy
            else remove(package.location),
            "" if copy else "Or rename it, where it is a folder of yours.",
            subject=name,
        )


@CHECKS.add("package-unreadable", "What cannot be parsed cannot be imported either.")
def _package_unreadable(facts: Facts) -> Iterator[Found]:
    if facts.flashinfer is None or facts.package is None or not facts.flashinfer.symbols.problems:
        return
    problems = facts.flashinfer.symbols.problems
    name, reason = next(iter(problems.items()))
    message = f"{len(problems)} entry points of {facts.package.location} cannot be read, {name} among them: {reason}."
    owner = facts.package.owner
    if owner is None:
        yield Found(Severity.ERROR, message, advice="Remove that folder, or take its parent off the path.")
    else:
        yield Found(
            Severity.ERROR,
            message,
            install_version(owner.name, owner.version, "--force-reinstall", "--no-deps"),
            subject=owner.name,
        )


@CHECKS.add("package-shadowed", "The version that pip tells is not the version that runs.")
def _package_shadowed(facts: Facts) -> Iterator[Found]:
    for package in facts.environment.packages.value or ():
        names = PACKAGES[package.name]
        copies = [one for name in names for one in facts.environment.copies(name)]
        if not package.shadowed or not copies:
            continue
        copy, loaded = copies[0], _beside(package, copies)
        if loaded is not None and loaded is not copy:
            yield Found(
                Severity.WARNING,
                f"The metadata of {copy.title} in {copy.location} describes no package there: import "
                f"{package.name} loads {package.location}, which {loaded.title} installed.",
                advice=f"Remove that metadata: the .dist-info folder of {copy.title} in {copy.location}.",
                subject=package.name,
            )
        # Without a record nobody knows which files an install put there.
        elif copy.files.state is not RecordState.NO_RECORD:
            what, holder = ("file", "folder") if package.is_module else ("folder", "parent")
            yield Found(
                Severity.ERROR,
                f"import {package.name} loads {package.origin if package.is_module else package.location}, which is "
                f"not what the installed distribution {copy.name} put there.",
                advice=f"Remove or rename that {what}, or take its {holder} off PYTHONPATH.",
                subject=package.name,
            )


def _beside(package: ImportablePackage, copies: Sequence[Distribution]) -> Distribution | None:
    """The copy whose metadata lies beside the package."""
    if package.location is None:
        return None
    folder = package.location if package.is_module else str(Path(package.location).parent)
    return next((one for one in copies if one.location == folder), None)


@CHECKS.add("installed-twice", "Which copy runs depends on the search path, and pip repairs only one of them.")
def _installed_twice(facts: Facts) -> Iterator[Found]:
    found = facts.environment.distributions.value.found if facts.environment.distributions.value else ()
    for name in dict.fromkeys(one.name for one in found):
        copies = facts.environment.copies(name)
        if len(copies) < 2 or _is_stale(facts, name, copies):
            continue
        places = ", ".join(f"{copy.version or 'an unknown version'} in {copy.location}" for copy in copies)
        keep = (facts.public_version if name == "flashinfer-python" else None) or copies[0].version
        # pip removes the first copy it sees; the second call removes the next one.
        uninstall = " && ".join([f"pip uninstall -y {name}"] * len(copies))
        repair, advice = f"{uninstall} && {install_version(name, keep)}", ""
        outside = [one.location for one in copies if Path(one.location).absolute() in _python_path(facts)]
        if outside:
            again = f", and run: {install_version(name, keep)}" if len(outside) == len(copies) else ""
            advice = f"Take {' and '.join(dict.fromkeys(outside))} off PYTHONPATH, where pip removes nothing{again}."
            repair = ""
        yield Found(
            Severity.WARNING,
            f"{name} is installed {len(copies)} times: {places}. The first one counts.",
            repair,
            advice,
            subject=name,
        )


def _python_path(facts: Facts) -> list[Path]:
    return [Path(one).absolute() for one in facts.variable("PYTHONPATH").split(os.pathsep) if one]


def _is_stale(facts: Facts, name: str, copies: Sequence[Distribution]) -> bool:
    """Whether the first copy is metadata alone, which package-shadowed tells of."""
    for package in facts.environment.packages.value or ():
        if name in PACKAGES[package.name] and package.shadowed:
            loaded = _beside(package, copies)
            return loaded is not None and loaded is not copies[0]
    return False


@CHECKS.add("files-changed", "A half-replaced install mixes the code of two releases.")
def _files_changed(facts: Facts) -> Iterator[Found]:
    found = facts.environment.distributions.value.found if facts.environment.distributions.value else ()
    for one in found:
        if one.files.state is RecordState.DIFFERS:
            wrong = one.files.wrong
            yield Found(
                Severity.ERROR,
                f"{_count(len(wrong), 'file')} of {one.title} {'is' if len(wrong) == 1 else 'are'} "
                f"missing or changed: {wrong[0]}{' among them' if len(wrong) > 1 else ''}.",
                install_version(one.name, one.version, "--force-reinstall", "--no-deps"),
                subject=one.name,
            )


@CHECKS.add("release-incomplete", "What the release is known to have cannot be called here.")
def _release_incomplete(facts: Facts) -> Iterator[Found]:
    flashinfer, package = facts.flashinfer, facts.package
    if flashinfer is None or package is None or facts.made_up:
        return
    version = parse_version(flashinfer.version)
    if version is None or version.public not in releases():
        return
    owner = package.owner
    copies = facts.environment.copies(owner.name) if owner else ()
    table = flashinfer.symbols
    lacking = [
        name for name in recorded(version.public).texts if name not in table.symbols and name not in table.problems
    ]
    # Where its files were compared, files-changed names those that are wrong.
    if not lacking or any(one.files.state is RecordState.DIFFERS for one in copies):
        return
    yield Found(
        Severity.ERROR,
        f"The install of FlashInfer {flashinfer.version} in {package.location} lacks "
        f"{_count(len(lacking), 'entry point')} that this release has, {lacking[0]} among them: files are missing or "
        "cut off.",
        install_version(owner.name, owner.version, "--force-reinstall", "--no-deps") if owner else "",
        "" if owner else "Remove or rename that folder, or take its parent off PYTHONPATH.",
        subject="flashinfer-python",
    )


@CHECKS.add("record-missing", "Without a RECORD nobody can tell whether files were changed, and pip cannot remove it.")
def _record_missing(facts: Facts) -> Iterator[Found]:
    for one in facts.environment.copies("flashinfer-python"):
        # Of metadata that is broken altogether, metadata-broken tells.
        bare = one.files.state is RecordState.NO_RECORD and not one.editable and not one.problems
        if bare and one.metadata_path.endswith(".dist-info"):
            yield Found(
                Severity.NOTE,
                f"{one.metadata_path} has no RECORD of the files that {one.title} installed.",
                install_version(one.name, one.version, "--ignore-installed", "--no-deps"),
                subject=one.name,
            )


@CHECKS.add("metadata-broken", "pip and version checks cannot rely on it.")
def _metadata_broken(facts: Facts) -> Iterator[Found]:
    found = facts.environment.distributions.value.found if facts.environment.distributions.value else ()
    for one in found:
        if one.problems and not _is_missing(facts, one):
            yield Found(
                Severity.WARNING,
                f"{one.metadata_path}: {'; '.join(one.problems)}.",
                _replace_metadata(one),
                subject=one.name,
            )


def _is_missing(facts: Facts, one: Distribution) -> bool:
    """Whether package-missing tells of it: its metadata is the first, and there is no package."""
    if facts.environment.packages.value is None or one is not facts.first_copy(one.name):
        return False
    packages = [package for package, names in PACKAGES.items() if one.name in names]
    return any(facts.environment.package(package) is None for package in packages)


@CHECKS.add("editable-install", "Its code is whatever the project folder holds, not what its version says.")
def _editable(facts: Facts) -> Iterator[Found]:
    copy = facts.first_copy("flashinfer-python")
    if copy is not None and copy.editable:
        where = copy.source or "a project folder"
        yield Found(Severity.NOTE, f"{copy.title} is an editable install of {where}.")


@CHECKS.add("facts-missing", "Checks that need these facts could not run.")
def _facts_missing(facts: Facts) -> Iterator[Found]:
    environment = facts.environment
    sections = {
        "distributions": environment.distributions.reason,
        "packages": environment.packages.reason,
        "environment variables": environment.variables.reason,
        "cache directories": environment.caches.reason,
        "kernel files": environment.kernels.reason,
    }
    for name, reason in sections.items():
        if reason is not None:
            yield Found(Severity.WARNING, f"The {name} could not be read: {reason}.", subject=name)
    unreadable = environment.distributions.value.unreadable if environment.distributions.value else ()
    for one in unreadable:
        yield Found(Severity.WARNING, f"A part of the search path cannot be listed: {one}.", subject="search path")


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"
