# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators
"""Programmatic dependent launch: a kernel's launch is made ready while the one before it runs (SM90 and newer)."""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_wait

__all__ = ["can_overlap", "launch_options", "wait_for_launch_before"]

_FIRST_CAPABILITY = (9, 0)


def can_overlap(device: torch.device) -> bool:
    """Whether this GPU can."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device) >= _FIRST_CAPABILITY


def launch_options(overlaps: bool) -> dict[str, Any]:
    """What every kernel is launched with; Triton's interpreter knows no `launch_pdl`."""
    return {"overlaps": True, "launch_pdl": True} if overlaps else {"overlaps": False}


@triton.jit
def wait_for_launch_before(overlaps: tl.constexpr):
    """The first line of every kernel: what earlier launches wrote is there after it.

    No launch lets the next one start before its own programs have ended (`gdc_launch_dependents`): the next one's would
    gather on the multiprocessors that are free first, which cost up to 10% on an H200.
    """
    if overlaps:
        gdc_wait()
