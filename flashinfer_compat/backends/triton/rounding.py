# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators
"""`numerics.nvfp4.quantize_nvfp4` inside a kernel, in the same float32 arithmetic, on any GPU."""

from __future__ import annotations

from collections.abc import Mapping

import triton
import triton.language as tl

from flashinfer_compat.vocabulary import QuantizerArithmetic

__all__ = ["ROUNDINGS", "UNROUNDED", "quantize", "round_to_nvfp4"]

UNROUNDED, _DIVIDED, _MULTIPLIED = range(3)
"""What kernels do to activations, their constant `rounding`: nothing, or one of `ROUNDINGS`."""
ROUNDINGS: Mapping[QuantizerArithmetic, int] = {
    QuantizerArithmetic.MODELOPT: _DIVIDED,
    QuantizerArithmetic.FLASHINFER: _MULTIPLIED,
}

_MULTIPLY = tl.constexpr(_MULTIPLIED)
_E4M3_LEAST_NORMAL = tl.constexpr(2.0**-6)
# float32 numbers just above this are 2^-9 apart, as are subnormal E4M3 numbers.
_E4M3_SUBNORMAL_GRID = tl.constexpr(2.0**14)


@triton.jit
def _to_e4m3(values):
    """The nearest E4M3 numbers of float32 values in 0..448, ties to even (SM80 has no such conversion)."""
    bits = values.to(tl.int32, bitcast=True)
    normal = ((bits + 0x7FFFF + ((bits >> 20) & 1)) & -0x100000).to(tl.float32, bitcast=True)
    subnormal = (values + _E4M3_SUBNORMAL_GRID) - _E4M3_SUBNORMAL_GRID
    return tl.where(values < _E4M3_LEAST_NORMAL, subnormal, normal)


@triton.jit
def _to_e2m1(values):
    """The nearest E2M1 numbers, ties to the even code, at most 6."""
    size = tl.abs(values)
    # Each midpoint that is passed adds a step.
    half = (
        (size > 0.25).to(tl.float32)
        + (size >= 0.75).to(tl.float32)
        + (size > 1.25).to(tl.float32)
        + (size >= 1.75).to(tl.float32)
    )
    whole = (size > 2.5).to(tl.float32) + (size >= 3.5).to(tl.float32)
    rounded = half * 0.5 + whole + (size > 5.0).to(tl.float32) * 2.0
    return tl.where(values < 0, -rounded, rounded)


@triton.jit
def _reciprocal(values, interpreted: tl.constexpr):
    if interpreted:
        return tl.div_rn(tl.zeros_like(values) + 1.0, values)
    return tl.inline_asm_elementwise(
        "rcp.approx.ftz.f32 $0, $1;", "=f,f", [values], dtype=tl.float32, is_pure=True, pack=1
    )


@triton.jit
def quantize(values, input_scale, rounding: tl.constexpr, interpreted: tl.constexpr):
    """E2M1 numbers and E4M3 block scales, both as float32, of float32 blocks [N, 16] or [N, 16, M] along axis 1.

    `rounding` is one of `ROUNDINGS`; a block whose scale is 0 has numbers without meaning.
    """
    largest = tl.max(tl.abs(values), axis=1, keep_dims=True)
    scale = tl.zeros_like(largest) + input_scale
    if rounding == _MULTIPLY:
        # FlashInfer is given the reciprocal of the input scale, and takes that one's.
        inverse = tl.div_rn(tl.zeros_like(largest) + 1.0, scale)
        sixth = _reciprocal(tl.zeros_like(largest) + 6.0, interpreted)
        block_scale = _to_e4m3(tl.minimum(inverse * (largest * sixth), 448.0))
        step = block_scale * _reciprocal(inverse, interpreted)
        quotient = values * tl.broadcast_to(_reciprocal(tl.where(step != 0, step, 1.0), interpreted), values.shape)
    else:
        block_scale = _to_e4m3(tl.minimum(tl.div_rn(largest, 6.0 * scale), 448.0))
        step = block_scale * scale
        quotient = tl.div_rn(values, tl.broadcast_to(tl.where(step != 0, step, 1.0), values.shape))
    return _to_e2m1(quotient), block_scale


@triton.jit
def round_to_nvfp4(values, input_scale, rounding: tl.constexpr, interpreted: tl.constexpr):
    """Number * block scale of `quantize`, exact in bf16.

    `input_scale` is left out of the result: the product's epilogue multiplies by it.
    """
    numbers, block_scale = quantize(values, input_scale, rounding, interpreted)
    return tl.where(block_scale != 0, numbers * block_scale, 0.0)
