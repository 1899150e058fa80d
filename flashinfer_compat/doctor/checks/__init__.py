"""Every check, by group. To add one, write a function in its group's module under `@CHECKS.add(code, why)`."""

from __future__ import annotations

from flashinfer_compat.doctor.check import Check
from flashinfer_compat.doctor.checks import (
    caches,
    engines,
    gpus,
    installs,
    kernels,
    live,
    torch_and_cuda,
    variables,
    versions,
)

__all__ = ["CHECKS"]

CHECKS: tuple[Check, ...] = (
    *live.CHECKS,
    *installs.CHECKS,
    *versions.CHECKS,
    *torch_and_cuda.CHECKS,
    *gpus.CHECKS,
    *kernels.CHECKS,
    *caches.CHECKS,
    *variables.CHECKS,
    *engines.CHECKS,
)
"""In the order in which findings of one severity are told."""
