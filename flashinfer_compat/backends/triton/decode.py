# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators
"""NVFP4 weights to bf16 inside a kernel, without moving a value between threads.

A checkpoint's row is read as int32 words of eight codes. Nibble j of every word makes plane j; the planes side by side
are the K axis of the product. So K is permuted within a tile, and activations are stored in the same order
(`activations.to_plane_order`): value 8 * w + j of a tile lies at j * (tile / 8) + w.
"""

from __future__ import annotations

import triton
import triton.language as tl

__all__ = ["WEIGHT_UNIT", "dequantize"]

WEIGHT_UNIT = 2.0**8
"""`dequantize` returns code * block scale / WEIGHT_UNIT: undivided, a scale's exponent would leave bf16."""

# E4M3 bits in bf16 or float32 position stand for scale * 2^-120, E2M1 bits for code * 2^-126.
_SCALE_STEP = tl.constexpr(2.0**119)
_SCALE_FLOAT = tl.constexpr(2.0**112)
_CODE_FLOAT = tl.constexpr(2.0**126)


def _decode_two_words() -> str:
    """PTX: two words ($8, $9) and their bf16 scales ($10) to eight bf16 pairs ($0..$7), one for each nibble.

    Sign and magnitude are masked into bf16 position in both halves of a register at once.
    """
    lines = [".reg .b32 q, t, u;"]
    for half, selector in enumerate(("0x5410", "0x7632")):
        lines.append(f"prmt.b32 q, $8, $9, {selector};")
        for nibble in range(4):
            to_sign, to_magnitude = 12 - 4 * nibble, 6 - 4 * nibble
            lines.append(f"shl.b32 t, q, {to_sign};")
            shift = "shl" if to_magnitude > 0 else "shr"
            lines.append(f"{shift}.b32 u, q, {abs(to_magnitude)};")
            lines.append("and.b32 u, u, 0x01C001C0;")
            lines.append("lop3.b32 t, t, 0x80008000, u, 0xEA;")
            # mul.bf16x2 needs SM90; a fused product and minus zero is the same on SM80.
            lines.append(f"fma.rn.bf16x2 ${4 * half + nibble}, t, $10, v;")
    lines.insert(1, ".reg .b32 v;")
    lines.insert(2, "mov.b32 v, 0x80008000;")
    return "{\n" + "\n".join(lines) + "\n}"


_DECODE = tl.constexpr(_decode_two_words())
_DECODE_REGISTERS = tl.constexpr(",".join(["=&r"] * 8 + ["r"] * 3))


@triton.jit
def _side_by_side(p, rows: tl.constexpr, words: tl.constexpr):
    """Eight planes [rows, words] to [rows, 8 * words], plane after plane."""
    even = tl.join(tl.join(p[0], p[4]), tl.join(p[2], p[6]))
    odd = tl.join(tl.join(p[1], p[5]), tl.join(p[3], p[7]))
    # The last joined axis is the lowest bit of the plane's number.
    return tl.reshape(tl.permute(tl.join(even, odd), (0, 2, 3, 4, 1)), (rows, 8 * words))


@triton.jit
def _plane_float(words, scale, plane: tl.constexpr):
    code = words >> (4 * plane)
    bits = ((code & 8) << 28) | ((code & 7) << 22)
    return bits.to(tl.float32, bitcast=True) * _CODE_FLOAT * scale


@triton.jit
def dequantize(words, scales, rows: tl.constexpr, block_k: tl.constexpr, interpreted: tl.constexpr):
    """Codes int32 [rows, block_k / 8] and E4M3 bytes [rows, block_k / 16] to [rows, block_k], planes side by side.

    Exact bf16 (float32 in the interpreter, which has no bf16 arithmetic), in units of 1 / WEIGHT_UNIT. The byte of NaN
    reads as 480.
    """
    n: tl.constexpr = block_k // 8
    if interpreted:
        scale = ((scales.to(tl.int32) & 0x7F) << 20).to(tl.float32, bitcast=True) * _SCALE_FLOAT
        scale = tl.reshape(tl.broadcast_to(scale[:, :, None], (rows, n // 2, 2)), (rows, n))
        planes = (
            _plane_float(words, scale, 0),
            _plane_float(words, scale, 1),
            _plane_float(words, scale, 2),
            _plane_float(words, scale, 3),
            _plane_float(words, scale, 4),
            _plane_float(words, scale, 5),
            _plane_float(words, scale, 6),
            _plane_float(words, scale, 7),
        )
    else:
        scale = ((scales.to(tl.int16) & 0x7F) << 4).to(tl.bfloat16, bitcast=True) * _SCALE_STEP * _SCALE_STEP
        scale = tl.reshape(tl.broadcast_to(scale[:, :, None], (rows, n // 2, 2)), (rows, n))
        planes = tl.inline_asm_elementwise(
            _DECODE, _DECODE_REGISTERS, [words, scale], dtype=(tl.bfloat16,) * 8, is_pure=True, pack=2
        )
    return _side_by_side(planes, rows, n)
