"""Facts about this machine and what is installed on it, read without importing FlashInfer or PyTorch."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from flashinfer_compat.environment.caches import cache_directory
    from flashinfer_compat.environment.collection import collect
    from flashinfer_compat.environment.model import (
        Beside,
        CacheDirectory,
        CachePurpose,
        CompiledModule,
        CubinFolder,
        Distribution,
        Distributions,
        Environment,
        EnvironmentVariable,
        FileCheck,
        Gpu,
        Gpus,
        ImportablePackage,
        KernelFiles,
        Owner,
        PythonRuntime,
        RecordCheck,
        RecordState,
        Section,
        Tool,
        Toolchain,
        TorchBuild,
        VariableOrigin,
    )

__all__ = [
    "Beside",
    "CacheDirectory",
    "CachePurpose",
    "CompiledModule",
    "CubinFolder",
    "Distribution",
    "Distributions",
    "Environment",
    "EnvironmentVariable",
    "FileCheck",
    "Gpu",
    "Gpus",
    "ImportablePackage",
    "KernelFiles",
    "Owner",
    "PythonRuntime",
    "RecordCheck",
    "RecordState",
    "Section",
    "Tool",
    "Toolchain",
    "TorchBuild",
    "VariableOrigin",
    "cache_directory",
    "collect",
]

_FUNCTIONS = {"cache_directory": "caches", "collect": "collection"}


def __getattr__(name: str) -> Any:
    """Load an exported name when it is first used: building this many dataclasses takes longer than the rest."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    module = importlib.import_module(f"{__name__}.{_FUNCTIONS.get(name, 'model')}")
    value = globals()[name] = getattr(module, name)
    return value
