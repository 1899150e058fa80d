"""Hidden states to NVFP4 for the fused call, by FlashInfer's quantizers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from flashinfer_compat.backends.trtllm.kernels import Optional, find, find_member
from flashinfer_compat.numerics.nvfp4 import E2M1_MAX, E4M3_MAX
from flashinfer_compat.options import LayerOptions
from flashinfer_compat.planning.decision import KernelCall

__all__ = ["Quantizer", "prepare_quantizer"]

Quantizer = Callable[[torch.Tensor], "tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]"]
"""bfloat16 [T, H] to codes, linear block scales and, where each token has its own, scales."""


def prepare_quantizer(call: KernelCall, quantize_scale: torch.Tensor, options: LayerOptions) -> Quantizer:
    """The installed quantizer, fitted.

    Raises:
        BackendUnavailableError: FlashInfer cannot be imported or lacks the function.
        ArgumentError: 4over6 rounding was asked for, which this release does not have.
    """
    return _per_token(options) if call.per_token_scale else _static(quantize_scale, options)


def _static(quantize_scale: torch.Tensor, options: LayerOptions) -> Quantizer:
    kernel = find("fp4_quantize")
    wanted = {
        "global_scale": quantize_scale,
        "sf_vec_size": 16,
        "sf_use_ue8m0": False,
        "is_sf_swizzled_layout": False,
        # None: off, not what an environment variable says.
        "nvfp4_4over6": Optional(options.nvfp4_4over6),
    }
    function, arguments = kernel.function, kernel.fit(wanted, later=("input",))

    def quantize(values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, None]:
        codes, scale = function(input=values, **arguments)
        return codes, scale, None

    return quantize


def _per_token(options: LayerOptions) -> Quantizer:
    """Source: FlashInfer 0.6.11 to 0.7.4, `nvfp4_quantize(per_token_activation=True)`."""
    kernel = find("nvfp4_quantize")
    recipe = options.nvfp4_4over6
    largest_scale = E4M3_MAX if recipe is None else float(recipe.e4m3_max)
    wanted: dict[str, Any] = {
        # A number: a tensor would be read back from the GPU.
        "a_global_sf": 1.0 / (E2M1_MAX * largest_scale),
        "sfLayout": find_member("SfLayout", "layout_linear"),
        "do_shuffle": False,
        "sf_vec_size": 16,
        "per_token_activation": True,
        "nvfp4_4over6": Optional(recipe),
    }
    function, arguments = kernel.function, kernel.fit(wanted, later=("a",))

    def quantize(values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        codes, scale, per_token = function(a=values, **arguments)
        return codes, scale, per_token

    return quantize
