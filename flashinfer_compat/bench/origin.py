"""When, where and with what a run measures."""

from __future__ import annotations

import datetime
import platform

import torch

from flashinfer_compat.environment import Environment
from flashinfer_compat.machine import gpu_of
from flashinfer_compat.policy import Origin

__all__ = ["origin_of"]

_TOLD = ("flashinfer-python", "triton", "pytorch-triton", "cuda-tile")
"""Distributions that compute, beside torch."""


def origin_of(environment: Environment, device: torch.device) -> Origin:
    """The machine's own names; on a CPU no GPU has a part in it."""
    gpu = gpu_of(environment) if device.type == "cuda" else None
    gpus = environment.gpus.value
    distributions = environment.distributions.value.found if environment.distributions.value else ()
    releases = {one.name: one.version or "" for one in reversed(distributions) if one.name in _TOLD}
    releases |= {"python": platform.python_version(), "torch": torch.__version__}
    return Origin(
        gpu.name if gpu else None,
        gpu.architecture if gpu else None,
        gpus.driver_version if gpus and gpu else None,
        tuple(sorted(releases.items())),
        datetime.datetime.now(datetime.timezone.utc).date().isoformat(),
    )
