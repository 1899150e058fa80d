"""Whether block scales have values that kernels can use."""

from __future__ import annotations

import torch

from flashinfer_compat.errors import TensorError
from flashinfer_compat.weights.values import MoELayerWeights, Nvfp4Experts

__all__ = ["check_block_scales"]

_LARGEST = 0x7E
"""The byte of E4M3's 448. Above are NaN and, with the sign bit, negative numbers."""


def check_block_scales(weights: MoELayerWeights) -> None:
    """Require E4M3 block scales of 0 to 448. FP4 kernels read no sign (tensor cores take UE4M3), and not all read NaN.

    It reads every block scale, and waits for the GPU.

    Raises:
        TensorError: a block scale is negative or NaN.
    """
    for part in ("routed", "shared"):
        experts = getattr(weights, part)
        if not isinstance(experts, Nvfp4Experts):
            continue
        for name in ("gate_up_block_scale", "down_block_scale"):
            codes = getattr(experts, name).view(torch.uint8)
            if int(codes.max()) > _LARGEST:
                bad = int((codes > _LARGEST).sum())
                expected = "E4M3 numbers from 0 to 448"
                raise TensorError(f"weights.{part}.{name}", expected, f"{bad} of {codes.numel()} negative or NaN")
