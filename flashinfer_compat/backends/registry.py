"""The module of each backend. To add a backend, add its module here and its rows to planning."""

from __future__ import annotations

import importlib
from typing import cast

from flashinfer_compat.backends.base import BackendModule
from flashinfer_compat.vocabulary import Backend

__all__ = ["MODULES", "backend_module"]

MODULES: dict[Backend, str] = {
    Backend.TRTLLM: "flashinfer_compat.backends.trtllm.backend",
    Backend.TRITON: "flashinfer_compat.backends.triton.backend",
    Backend.CUTILE: "flashinfer_compat.backends.cutile.backend",
    Backend.TORCH: "flashinfer_compat.backends.reference",
}
"""By backend: the module that offers `BackendModule`'s functions."""


def backend_module(backend: Backend) -> BackendModule:
    """The code of a backend; it is imported when it is first asked for."""
    return cast("BackendModule", importlib.import_module(MODULES[backend]))
