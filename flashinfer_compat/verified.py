"""The self-checks of this machine, kept in the user's cache under everything that their outcome may depend on."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

from flashinfer_compat import __version__
from flashinfer_compat.environment import Environment, cache_directory
from flashinfer_compat.environment.reading import read_regular
from flashinfer_compat.errors import FlashInferCompatError
from flashinfer_compat.files import write_whole
from flashinfer_compat.self_checks import SelfCheck

__all__ = ["facts", "file_for", "file_of", "fingerprint", "load", "store"]

_FORMAT = 1
_DECIDING = ("flashinfer", "torch", "triton", "cuda", "cutlass", "tvm", "nvidia-cudnn", "nvidia-cublas", "tileiras")
"""Distributions whose names contain one of these may change a result."""
_OWN = Path(__file__).parent


def facts(environment: Environment) -> dict[str, Any]:
    """Everything that a result may depend on, as plain JSON values: releases, files, GPU, driver, torch, variables."""
    distributions = environment.distributions.value.found if environment.distributions.value else ()
    gpus = environment.gpus.value
    torch = environment.torch.value
    package = environment.package("flashinfer")
    variables = environment.variables.value or ()
    return {
        "flashinfer_compat": [__version__, _folder_identity(_OWN)],
        "distributions": sorted(
            [one.name, one.version or "", one.location]
            for one in distributions
            if any(part in one.name for part in _DECIDING)
        ),
        "flashinfer": package and [package.location, package.version_from_source, *_package_identity(package.location)],
        "torch": torch and [torch.version, torch.cuda, torch.git],
        "gpus": gpus and [[gpu.name, gpu.architecture] for gpu in gpus.devices],
        "visible": gpus and gpus.visible,
        "driver": gpus and gpus.driver_version,
        "variables": sorted([one.name, one.value] for one in variables if _counts(one.name)),
    }


def fingerprint(known: dict[str, Any]) -> str:
    """The facts as one short text; equal for equal facts."""
    return hashlib.sha256(json.dumps(known, sort_keys=True).encode()).hexdigest()[:24]


def file_for(environment: Environment, name: Callable[[str], str]) -> tuple[Path, dict[str, Any]] | None:
    """The file in the user's cache that holds for exactly this machine, and the facts; None without a cache directory.

    Args:
        environment: this machine's.
        name: the fingerprint of the facts to the file's name.
    """
    folder = cache_directory().value
    if folder is None:
        return None
    known = facts(environment)
    return Path(folder) / name(fingerprint(known)), known


def file_of(environment: Environment, name: Callable[[str], str]) -> tuple[Path, dict[str, Any]] | None:
    """`file_for`, where anything was kept; before that, starting up need not look at every file that counts."""
    folder = cache_directory().value
    if folder is None or not any(Path(folder).glob(name("*"))):
        return None
    return file_for(environment, name)


def load(environment: Environment) -> tuple[SelfCheck, ...]:
    """What was found here before, with exactly these facts; nothing where nothing was, or it cannot be read."""
    found = file_of(environment, _name)
    if found is None:
        return ()
    path, known = found
    try:
        stored = json.loads(read_regular(path))
        if stored["facts"] != known:
            return ()
        return tuple(SelfCheck.from_dict(one) for one in stored["checks"])
    except (OSError, ValueError, KeyError, TypeError, FlashInferCompatError):
        return ()


def store(environment: Environment, checks: Iterable[SelfCheck]) -> Path | None:
    """Keep the checks; the file they are in, or None where there is no cache directory.

    Raises:
        OSError: the directory cannot be written.
    """
    found = file_for(environment, _name)
    if found is None:
        return None
    path, known = found
    path.parent.mkdir(parents=True, exist_ok=True)
    content = json.dumps({"facts": known, "checks": [one.to_dict() for one in checks]}, indent=2)
    write_whole(path, content)
    return path


def _counts(variable: str) -> bool:
    of_flashinfer = variable.startswith("FLASHINFER_") and not variable.startswith("FLASHINFER_COMPAT_")
    return of_flashinfer or variable == "TRITON_INTERPRET"


def _name(print_of_facts: str) -> str:
    return f"self-checks-{_FORMAT}-{print_of_facts}.json"


def _package_identity(location: str | None) -> Iterator[str]:
    """Of the files that run; compiled kernels come with distributions, which are named beside."""
    if location is not None:
        for part in ("fused_moe", "quantization", "gemm"):
            yield _folder_identity(Path(location) / part)


def _folder_identity(folder: Path) -> str:
    """What changes with any Python file below `folder`."""
    digest = hashlib.sha256()
    for path in sorted(folder.rglob("*.py")):
        status = path.stat()
        digest.update(f"{path.relative_to(folder)} {status.st_size} {status.st_mtime_ns}\n".encode())
    return digest.hexdigest()[:16]
