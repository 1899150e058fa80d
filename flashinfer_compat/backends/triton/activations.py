# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators
"""The activation between the GEMMs, and the order in which the GEMMs read their activations."""

from __future__ import annotations

import triton
import triton.language as tl

__all__ = ["gated", "to_plane_order"]


@triton.jit
def gated(gate, up, geglu: tl.constexpr):
    """silu(gate) * up, or gelu(gate) * up with the exact gelu, in float32."""
    if geglu:
        return 0.5 * gate * (1.0 + tl.math.erf(gate * 0.7071067811865476)) * up
    return gate / (1.0 + tl.exp(-gate)) * up


@triton.jit
def to_plane_order(values, size: tl.constexpr, tile: tl.constexpr):
    """[size] in natural order to the order of `decode`, within each run of `tile` values."""
    words: tl.constexpr = tile // 8
    return tl.reshape(tl.permute(tl.reshape(values, (size // tile, words, 8)), (0, 2, 1)), (size,))
