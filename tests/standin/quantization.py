"""The quantizers and the gated activation of the dense path.

The arithmetic is `numerics.quantize_nvfp4`, ModelOpt's, so that results can be compared with recorded ones exactly.
The real kernel multiplies by (approximate) reciprocals and may differ from it where a value lies on a rounding
boundary.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch.nn import functional

from flashinfer_compat.numerics import interleave_block_scale, shuffle_permutation
from flashinfer_compat.numerics.nvfp4 import E2M1_MAX, E4M3_MAX
from standin.calls import UNSET, Call, Era, Kernel
from standin.faults import need
from standin.recipe import NVFP44Over6Config, check_per_token_scale, quantize, quantize_per_token, resolve

__all__ = ["KERNELS"]

_LAYOUT_128X4, _LAYOUT_8X4, _LAYOUT_LINEAR = 0, 1, 2
"""`SfLayout`, the same numbers in every release."""
_PER_TOKEN_BACKENDS: Mapping[str, str] = {"cuda": "0.6.11", "cute-dsl": "0.6.13", "cake": "0.7.2"}
"""Backends that quantize each row with its own scale, and the release from which each does."""


def _fp4_quantize(era: Era, call: Call) -> tuple[torch.Tensor, torch.Tensor]:
    recipe = _recipe(call, call["sf_vec_size"] != 16 or bool(call["sf_use_ue8m0"]))
    if call["sf_vec_size"] not in (16, 32):
        raise NotImplementedError("sf_vec_size can only be 16 or 32")
    if call["sf_use_ue8m0"] or call["sf_vec_size"] == 32:
        raise NotImplementedError("MXFP4 is not modelled")
    backend = call.get("backend") or "cuda"
    if backend not in ("cuda", "cute-dsl", *(("auto",) if era.since("0.7.4") else ())):
        raise ValueError(f"Unknown backend: {backend}. Must be 'cuda' or 'cute-dsl'.")
    values = call.tensor("input")
    need(call["global_scale"] is not None, "globalScale is required when sfUseUE8M0 is false")
    inverse = bool(call.get("is_global_scale_inversed"))
    codes, scale = _quantized(era, values, call.tensor("global_scale"), recipe, inverse=inverse)
    if not call["is_sf_swizzled_layout"]:
        return codes, scale
    return codes, _swizzled(era, scale, small_tile=bool(call.get("is_sf_8x4_layout")))


def _nvfp4_quantize(era: Era, call: Call) -> tuple[torch.Tensor, ...]:
    recipe = _recipe(call)
    if call.get("per_token_activation"):
        return _per_token(era, call, recipe)
    for name in ("expanded_idx_to_permuted_idx", "out_scale"):
        if call.get(name) is not None:
            raise ValueError(f"{name} is only supported with per_token_activation=True")
    if call["sf_vec_size"] != 16:
        raise NotImplementedError("sf_vec_size other than 16 is not modelled")
    layout = int(call["sfLayout"])
    codes, scale = _quantized(era, call.tensor("a"), call.tensor("a_global_sf"), recipe)
    if call["do_shuffle"]:
        assert layout == _LAYOUT_128X4
        codes, scale, _ = _shuffled(codes, scale)
        return codes, scale
    if layout == _LAYOUT_LINEAR and era.since("0.6.7"):
        return codes, scale
    # Before 0.6.7 the linear layout can be asked for, and 128x4 comes back.
    return codes, _swizzled(era, scale, small_tile=layout == _LAYOUT_8X4)


def _per_token(era: Era, call: Call, recipe: NVFP44Over6Config | None) -> tuple[torch.Tensor, ...]:
    """Codes uint8 [M, K/2], block scales, and float32 [M]."""
    backend = _per_token_backend(era, call)
    if call["sf_vec_size"] != 16:
        raise ValueError("Per-token NVFP4 quantization only supports sf_vec_size=16")
    if call["expanded_idx_to_permuted_idx"] is not None:
        if backend != "cuda":
            raise ValueError(f"{backend} per-token NVFP4 quantization does not support expanded_idx_to_permuted_idx")
        raise NotImplementedError("nvfp4_quantize(expanded_idx_to_permuted_idx=...) is not modelled")
    given: Any = call["a_global_sf"]
    scale_inv = float(given.item() if isinstance(given, torch.Tensor) else given)
    # A tensor is read on the host by the CUDA backend alone.
    is_read = backend == "cuda" or not isinstance(given, torch.Tensor)
    if call.arguments.get("nvfp4_4over6", UNSET) is not UNSET and backend != "cake" and is_read:
        check_per_token_scale(scale_inv, recipe)
    values, layout = call.tensor("a"), int(call["sfLayout"])
    _, _ = values.shape  # A ValueError for anything but two axes.
    _check_values(values)
    codes, block_scale, per_token = quantize_per_token(values, scale_inv, recipe)
    scale = block_scale.view(torch.uint8)
    if call.get("out_scale") is not None:
        per_token = per_token * call.tensor("out_scale").reshape(())
    if call["do_shuffle"]:
        assert layout == _LAYOUT_128X4
        codes, scale, index = _shuffled(codes, scale)
        return codes, scale, per_token[index]
    if layout != _LAYOUT_LINEAR:
        scale = _swizzled(era, scale, small_tile=layout == _LAYOUT_8X4)
    return codes, scale, per_token


def _per_token_backend(era: Era, call: Call) -> str:
    backend = str(call["backend"])
    backend = "cuda" if backend == "auto" and era.since("0.7.4") else backend
    since = _PER_TOKEN_BACKENDS.get(backend)
    if since is None or era.before(since):
        raise ValueError(f"Per-token NVFP4 quantization does not support backend={backend!r}")
    if call.get("out_scale") is not None and backend == "cuda":
        raise ValueError("out_scale is only supported with backend='cute-dsl' or 'cake'")
    if backend == "cake" and (call["do_shuffle"] or int(call["sfLayout"]) != _LAYOUT_128X4):
        raise ValueError("the cake per-token NVFP4 quantization takes layout_128x4 and no shuffle")
    return backend


def _shuffled(codes: torch.Tensor, scale: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    index = shuffle_permutation(codes.shape[0], codes.device)
    assert scale.shape[0] % 128 == 0
    assert scale.shape[1] % 4 == 0
    return codes[index], interleave_block_scale(scale[index]).reshape(scale.shape), index


def _silu_and_mul(era: Era, call: Call) -> torch.Tensor:
    values = call.tensor("input")
    if values.shape[-1] * values.element_size() % 16 != 0:
        raise ValueError("The pointers must be multiple of 16 bytes.")
    call.misread(not values.is_contiguous(), "input is not contiguous")
    result = _gated(values).to(values.dtype)
    if call.garbage:
        result.fill_(torch.nan)
    out = call.get("out")
    if out is None:
        return result
    assert out.shape == result.shape, f"{out.shape} != {result.shape}"
    found: torch.Tensor = out.copy_(result)
    return found


def _silu_and_mul_nvfp4_quantize(era: Era, call: Call) -> tuple[torch.Tensor, torch.Tensor]:
    recipe = _recipe(call)
    if call["sf_vec_size"] != 16:
        raise NotImplementedError("sf_vec_size can only be 16 for silu_and_mul_nvfp4_quantize")
    values = call.tensor("input")
    assert values.is_contiguous(), "input must be row-major contiguous"
    assert values.shape[-1] % 32 == 0
    # The kernel rounds the product to the input's dtype before it quantizes (`_silu_and_mul_bfloat2`).
    gated = _gated(values).to(values.dtype).flatten(0, -2)
    scale = call.tensor("global_scale").to(torch.float32)
    codes, block_scale = _quantized(era, gated, scale, recipe)
    if not call["is_sf_swizzled_layout"]:
        return codes, block_scale
    return codes, _swizzled(era, block_scale, small_tile=bool(call["is_sf_8x4_layout"]))


def _recipe(call: Call, is_mxfp4: bool = False) -> NVFP44Over6Config | None:
    recipe = resolve(call.get("nvfp4_4over6"))
    if call.get("batch_invariant"):
        raise NotImplementedError("batch_invariant is not modelled")
    if recipe is not None and is_mxfp4:
        raise ValueError("nvfp4_4over6 applies to NVFP4 only (sf_vec_size=16, sf_use_ue8m0=False)")
    return recipe


def _gated(values: torch.Tensor) -> torch.Tensor:
    gate, up = values.to(torch.float32).chunk(2, dim=-1)
    return functional.silu(gate) * up


def _quantized(
    era: Era,
    values: torch.Tensor,
    global_scale: torch.Tensor,
    recipe: NVFP44Over6Config | None,
    *,
    inverse: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Codes uint8 [.., K/2] and row-major block scales uint8 [M, K/16], M being all rows."""
    _check_values(values)
    # Read as raw float32 before 0.6.13, converted since.
    need(global_scale.dtype == torch.float32 or era.since("0.6.13"), "globalScale must be float32")
    need(global_scale.device == values.device, "globalScale must be on the input's device")
    rows = values.numel() // values.shape[-1]
    need(rows > 0, "a grid of no blocks is an invalid configuration")
    need(global_scale.numel() in (1, rows), "globalScale should have shape [1] or [num_tokens]")
    scale = global_scale.to(torch.float32).reshape(-1)
    multiplier = scale if inverse else _reciprocal(scale)
    result = quantize(values.reshape(rows, -1), multiplier, recipe)
    codes = result.codes.reshape(*values.shape[:-1], -1)
    return codes, result.block_scale.view(torch.uint8)


def _check_values(values: torch.Tensor) -> None:
    need(values.ndim >= 2, "Input should be >=2D tensor.")
    if values.stride(-2) == 1 and values.stride(-1) != 1:
        raise NotImplementedError("column-major input is not modelled")
    need(values.is_contiguous(), "self must be contiguous")
    if values.dtype not in (torch.bfloat16, torch.float16):
        raise NotImplementedError("fp4_quantize only supports input tensor with dtypes fp16/bf16/e4m3.")
    assert values.shape[-1] % 16 == 0


def _reciprocal(global_scale: torch.Tensor) -> torch.Tensor:
    """The checkpoint's multiplier, of which FlashInfer's global scale is the reciprocal.

    Rounding makes several float32 numbers share a reciprocal, and bf16 values quantized with one of them lie on
    rounding boundaries so often that another shows. A checkpoint's is a bf16 amax over 6 * 448: take that one if it is
    among them.
    """
    most = torch.full_like(global_scale, E2M1_MAX * E4M3_MAX)
    from_amax = (most / global_scale).to(torch.bfloat16).to(torch.float32) / most
    return torch.where(1.0 / from_amax == global_scale, from_amax, 1.0 / global_scale)


def _swizzled(era: Era, scale: torch.Tensor, *, small_tile: bool) -> torch.Tensor:
    if small_tile:
        raise NotImplementedError("the 8x4 layout is not modelled")
    padded = interleave_block_scale(scale)
    # Up to 0.6.7 the padded buffer is given the unpadded number of columns, which fails where it does not divide it.
    return padded if era.since("0.6.8") else padded.reshape(-1, scale.shape[1])


KERNELS: Mapping[str, Kernel] = {
    "fp4_quantize": _fp4_quantize,
    "nvfp4_quantize": _nvfp4_quantize,
    "silu_and_mul": _silu_and_mul,
    "silu_and_mul_nvfp4_quantize": _silu_and_mul_nvfp4_quantize,
}
