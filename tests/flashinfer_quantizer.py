"""FlashInfer 0.7.4's NVFP4 quantizer, value by value, from its CUDA source.

data/csrc/nv_internal/tensorrt_llm/kernels/quantization_utils.cuh, `cvt_warp_fp16_to_fp4`, the branch without UE8M0
scales, 4over6 and FLASHINFER_DISABLE_FP4_QUANT_FAST_MATH; line numbers stand beside the steps.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Sequence
from fractions import Fraction

E2M1 = [Fraction(one) for one in ("0", "0.5", "1", "1.5", "2", "3", "4", "6")]
# cvt.rn.satfinite.e4m3x2.f32, for numbers that are not negative: codes 0 to 126 ascend.
E4M3 = [Fraction(m, 512) for m in range(8)] + [
    Fraction(8 + m, 8) * Fraction(2) ** (e - 7) for e in range(1, 16) for m in range(8) if (e, m) != (15, 7)
]


def float32(value: float) -> float:
    return float(struct.unpack("f", struct.pack("f", value))[0])


def correct_reciprocal(value: float) -> float:
    # A float64 quotient of float32 numbers, rounded again, is the float32 quotient.
    return float32(1.0 / value)


def nearest_even(value: float, grid: Sequence[Fraction]) -> int:
    """The index of the nearest of the grid's numbers, the even one of two; the last one for what is beyond."""
    exact = min(Fraction(value), grid[-1])
    return min(range(len(grid)), key=lambda index: (abs(grid[index] - exact), index % 2))


def quantize_block(
    block: Sequence[float], global_scale: float, reciprocal: Callable[[float], float] = correct_reciprocal
) -> tuple[int, list[int]]:
    """The byte of the E4M3 block scale, and a code for each value.

    Args:
        block: 16 numbers that float32 holds.
        global_scale: FlashInfer's, the reciprocal of a checkpoint's.
        reciprocal: rcp.approx.ftz.f32.
    """
    vec_max = max(abs(value) for value in block)  # 455 to 473
    reciprocal_of_scale = reciprocal(global_scale)  # 507
    sf_value = float32(global_scale * float32(vec_max * reciprocal(6.0)))  # 508
    byte = nearest_even(sf_value, E4M3)  # 511, 512
    sf_value = float(E4M3[byte])  # 513
    output_scale = reciprocal(float32(sf_value * reciprocal_of_scale)) if byte != 0 else 0.0  # 517
    codes = []
    for value in block:
        scaled = float32(value * output_scale)  # 689
        # The sign of a zero is kept: the product of a negative number and 0 is -0.
        sign = 8 if struct.pack("f", scaled)[3] & 0x80 else 0
        codes.append(nearest_even(abs(scaled), E2M1) | sign)
    return byte, codes
