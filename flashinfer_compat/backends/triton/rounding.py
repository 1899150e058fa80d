# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators
"""`numerics.nvfp4.quantize_nvfp4` inside a kernel, in the same float32 arithmetic, on any GPU."""

from __future__ import annotations

import triton
import triton.language as tl

__all__ = ["round_to_nvfp4"]

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
def round_to_nvfp4(values, input_scale):
    """Code * block scale for float32 blocks [N, 16] or [N, 16, M], blocks along axis 1; exact in bf16.

    `input_scale` is left out of the result: the product's epilogue multiplies by it.
    """
    largest = tl.max(tl.abs(values), axis=1, keep_dims=True)
    block_scale = _to_e4m3(tl.minimum(tl.div_rn(largest, tl.zeros_like(largest) + 6.0 * input_scale), 448.0))
    step = block_scale * input_scale
    quotient = tl.div_rn(values, tl.broadcast_to(tl.where(step != 0, step, 1.0), values.shape))
    return tl.where(step != 0, _to_e2m1(quotient) * block_scale, 0.0)
