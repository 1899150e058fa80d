"""Reads the environment variables that bear on FlashInfer, and whether the process was started with them."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import TYPE_CHECKING

from flashinfer_compat.environment.model import EnvironmentVariable, VariableOrigin

if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = ["gather_variables", "initial_environ", "is_relevant"]

_NAMES = frozenset(
    {
        "CUDA_HOME",
        "CUDA_MODULE_LOADING",
        "CUDA_PATH",
        "CUDA_VISIBLE_DEVICES",
        "HOME",
        "LD_LIBRARY_PATH",
        "PYTHONPATH",
        "TORCH_CUDA_ARCH_LIST",
        "TRITON_CACHE_DIR",
        "TRITON_HOME",
        "TRITON_INTERPRET",
        "XDG_CACHE_HOME",
    }
)
_PREFIX = "FLASHINFER_"
_ENGINE_PREFIXES = ("SGLANG_", "VLLM_")
_ENGINE_WORDS = ("FLASHINFER", "MOE", "PLUGINS")
_SECRET_WORDS = ("TOKEN", "KEY", "SECRET", "PASSWORD")
_MASK = "***"


def gather_variables(environ: Mapping[str, str] | None) -> tuple[EnvironmentVariable, ...]:
    """The relevant variables that are set, by name.

    Args:
        environ: The variables; None means the process's own, the only ones whose origin can be known.
    """
    current = os.environ if environ is None else environ
    initial = initial_environ() if environ is None else None
    return tuple(
        EnvironmentVariable(name, _masked(name, current[name]), _origin(name, current[name], initial))
        for name in sorted(filter(is_relevant, current))
    )


def is_relevant(name: str) -> bool:
    """Whether the variable bears on FlashInfer, its caches or its toolchain."""
    return (
        name in _NAMES
        or name.startswith(_PREFIX)
        or (name.startswith(_ENGINE_PREFIXES) and any(word in name for word in _ENGINE_WORDS))
    )


def initial_environ(path: str = "/proc/self/environ") -> dict[str, str] | None:
    """The variables the process was started with, or None where the system does not tell."""
    try:
        entries = [entry for entry in Path(path).read_bytes().split(b"\0") if entry]
    except OSError:
        return None
    if not entries or not all(b"=" in entry for entry in entries):
        return None  # Engines' workers overwrite this memory with their process title.
    # Where a name comes twice, the first counts, as it does for Python.
    return {os.fsdecode(name): os.fsdecode(value) for name, _, value in (e.partition(b"=") for e in reversed(entries))}


def _origin(name: str, value: str, initial: Mapping[str, str] | None) -> VariableOrigin:
    if initial is None:
        return VariableOrigin.UNKNOWN
    return VariableOrigin.INHERITED if initial.get(name) == value else VariableOrigin.SET_IN_PROCESS


def _masked(name: str, value: str) -> str:
    if any(word in name.upper() for word in _SECRET_WORDS):
        return _MASK
    return re.sub(r"(?<=://)[^/@\s]+(?=@)", _MASK, value)  # User and password in a URL.
