"""Finds nvcc and ninja the way FlashInfer does, and reads their versions from files instead of running them."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import TYPE_CHECKING

from flashinfer_compat.environment.distributions import scan
from flashinfer_compat.environment.model import Tool, Toolchain
from flashinfer_compat.environment.reading import NotAvailableError, gather, read_regular
from flashinfer_compat.environment.records import recorded_paths

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

__all__ = ["DEFAULT_CUDA_HOME", "gather_toolchain"]

DEFAULT_CUDA_HOME = "/usr/local/cuda"

_HEADER_BYTES = 1 << 16
"""How much of cuda.h is read: CUDA_VERSION stands at about byte 14,000 of 1.1 million."""


def gather_toolchain(
    environ: Mapping[str, str], search_path: Sequence[str] | None, default_cuda_home: str = DEFAULT_CUDA_HOME
) -> Toolchain:
    """The tools FlashInfer would compile with.

    Args:
        environ: Gives CUDA_HOME, CUDA_PATH and PATH.
        search_path: Where to look for the Python distribution `ninja`; None means `sys.path`.
        default_cuda_home: The toolkit taken where neither a variable nor PATH names one.
    """
    return Toolchain(
        nvcc=gather(lambda: _find_nvcc(environ, default_cuda_home)),
        ninja=gather(lambda: _find_ninja(environ, search_path)),
    )


def _find_nvcc(environ: Mapping[str, str], default_cuda_home: str) -> Tool:
    """The order of FlashInfer 0.7.4's `jit.cpp_ext.get_cuda_path`: a set CUDA_HOME is final, nvcc there or not."""
    variable = next((name for name in ("CUDA_HOME", "CUDA_PATH") if environ.get(name)), None)
    if variable is not None:
        return _nvcc(Path(environ[variable], "bin", "nvcc"), f"{variable}={environ[variable]}")
    on_path = _which("nvcc", environ)
    if on_path is not None:
        return _nvcc(Path(on_path), "on PATH")
    return _nvcc(Path(default_cuda_home, "bin", "nvcc"), f"the default, {default_cuda_home}")


def _nvcc(path: Path, origin: str) -> Tool:
    if not path.is_file():
        raise NotAvailableError(f"no nvcc at {path} ({origin})")
    version, source = _toolkit_version(path)
    return Tool(str(path), version, source, origin)


def _toolkit_version(nvcc: Path) -> tuple[str | None, str]:
    """The version of the toolkit around `nvcc`, also of the one a link points into, and where it was read."""
    roots = list(dict.fromkeys(path.parent.parent for path in (nvcc, nvcc.resolve())))
    for root in roots:
        description = root / "version.json"
        version = _version_in_json(description)
        if version is not None:
            return version, str(description)
        for header in _headers(root):
            version = _version_in_header(header)
            if version is not None:
                return version, str(header)
    return None, f"unknown: no version.json or include/cuda.h in {' or '.join(map(str, roots))}"


def _version_in_json(path: Path) -> str | None:
    import json

    try:
        parts = json.loads(read_regular(path))
        version = (parts.get("cuda_nvcc") or parts["cuda"])["version"]
    except (OSError, ValueError, AttributeError, KeyError, TypeError):
        return None
    return version if isinstance(version, str) else None


def _headers(root: Path) -> list[Path]:
    """Where cuda.h can be: conda keeps the headers of each target apart."""
    return [root / "include" / "cuda.h", *sorted(root.glob("targets/*/include/cuda.h"))]


def _version_in_header(path: Path) -> str | None:
    try:
        match = re.search(rb"^#define\s+CUDA_VERSION\s+(\d+)", read_regular(path, _HEADER_BYTES), re.MULTILINE)
    except OSError:
        return None
    if match is None:
        return None
    number = int(match[1])
    return f"{number // 1000}.{number % 1000 // 10}"


def _find_ninja(environ: Mapping[str, str], search_path: Sequence[str] | None) -> Tool:
    script = _ninja_script(search_path)
    on_path = _which("ninja", environ)
    if on_path is not None:
        if script is not None and script[0].resolve() == Path(on_path).resolve():
            return Tool(on_path, script[1], "the Python distribution ninja", "on PATH")
        return Tool(on_path, None, "unknown: no file states it", "on PATH")
    if script is not None:
        path, version = script
        # FlashInfer runs "ninja" by name, so this one is of no use until its folder is on PATH.
        return Tool(str(path), version, "the Python distribution ninja", "the Python distribution ninja; not on PATH")
    raise NotAvailableError("no ninja on PATH, and the Python distribution ninja is not installed")


def _ninja_script(search_path: Sequence[str] | None) -> tuple[Path, str | None] | None:
    """The executable the Python distribution `ninja` installed, and its version."""
    for distribution in scan(search_path, lambda name: name == "ninja"):
        for recorded in recorded_paths(distribution.metadata_path):
            path = Path(distribution.location, recorded)
            if path.name == "ninja" and path.is_file() and os.access(path, os.X_OK):
                return path.resolve(), distribution.version
    return None


def _which(name: str, environ: Mapping[str, str]) -> str | None:
    import shutil

    return shutil.which(name, path=environ.get("PATH", os.defpath))
