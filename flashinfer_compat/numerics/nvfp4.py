"""NVFP4 in plain PyTorch: E2M1 codes, an E4M3 scale for every 16 of them, and one float32 multiplier.

A value is `code * block_scale * global_scale`. `global_scale` is the multiplier a ModelOpt checkpoint stores
(`weight_scale_2`, `input_scale`), amax / (6 * 448). FlashInfer's `fp4_quantize` takes its reciprocal.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from flashinfer_compat.errors import TensorError
from flashinfer_compat.vocabulary import QuantizerArithmetic

__all__ = [
    "BLOCK_SIZE",
    "E2M1_MAX",
    "E4M3_MAX",
    "Nvfp4Tensor",
    "check_nvfp4_input",
    "decode_e2m1",
    "dequantize_nvfp4",
    "encode_e2m1",
    "nvfp4_global_scale",
    "pack_e2m1",
    "per_token_scale",
    "quantize_nvfp4",
    "unpack_e2m1",
]

BLOCK_SIZE = 16
"""Values that share one block scale."""
E2M1_MAX = 6.0
"""The largest E2M1 value."""
E4M3_MAX = 448.0
"""The largest float8_e4m3fn value."""

_FLOAT32_MAX = torch.finfo(torch.float32).max
# A scale in this range times any block scale (2^-9 is the least), its reciprocal (FlashInfer's argument), and the
# largest value it can stand for are all normal float32 numbers.
_GLOBAL_SCALE_MIN = torch.finfo(torch.float32).tiny * 2.0**9
_GLOBAL_SCALE_MAX = _FLOAT32_MAX / (E2M1_MAX * E4M3_MAX)

# The midpoints between neighbouring E2M1 magnitudes, by where a tie goes: to the even code, below or above.
_TIES_DOWN = (0.25, 1.25, 2.5, 5.0)
_TIES_UP = (0.75, 1.75, 3.5)

_FLOATS = (torch.float32, torch.bfloat16, torch.float16)


@dataclass(frozen=True)
class Nvfp4Tensor:
    """A tensor `[..., K]` in NVFP4."""

    codes: torch.Tensor
    """uint8 [..., K/2], two E2M1 codes a byte, low nibble first."""
    block_scale: torch.Tensor
    """float8_e4m3fn [..., K/16], row-major."""
    global_scale: torch.Tensor
    """float32; one number, or axes that line up with the first axes of `codes`."""

    @property
    def shape(self) -> torch.Size:
        """The shape of the values, `[..., K]`."""
        return torch.Size((*self.codes.shape[:-1], self.codes.shape[-1] * 2))


def encode_e2m1(values: torch.Tensor) -> torch.Tensor:
    """The nearest E2M1 codes: ties to the even code, magnitudes above 6 become 6, the sign is kept (-0.0 is code 8).

    This is PTX `cvt.rn.satfinite.e2m1x2.f32` (FlashInfer 0.7.4, `fp32_vec_to_e2m1`), but for NaN.

    Args:
        values: float32, bfloat16 or float16, any shape.

    Returns:
        uint8 of the same shape, one code (0..15) an element; bit 3 is the sign.

    Raises:
        TensorError: The dtype is another one.
    """
    values = _float32(values, "values")
    magnitude = values.abs()
    # A magnitude's code is the number of midpoints it has passed.
    passed = torch.zeros_like(values, dtype=torch.uint8)
    for midpoint in _TIES_DOWN:
        passed += magnitude > midpoint
    for midpoint in _TIES_UP:
        passed += magnitude >= midpoint
    return passed | (torch.signbit(values).to(torch.uint8) << 3)


def decode_e2m1(codes: torch.Tensor) -> torch.Tensor:
    """The values of E2M1 codes.

    Args:
        codes: uint8, one code (0..15) an element.

    Returns:
        float32 of the same shape.

    Raises:
        TensorError: `codes` is not uint8.
    """
    _require_dtype(codes, "codes", torch.uint8)
    # E2M1 bits are the upper bits of a float16 (sign, exponent, mantissa) but for the exponent's bias, 1 and not 15.
    wide = codes.to(torch.int16)
    return (((wide & 8) << 12) | ((wide & 7) << 9)).view(torch.float16).to(torch.float32) * 2.0**14


def pack_e2m1(codes: torch.Tensor) -> torch.Tensor:
    """Two codes a byte, the first in the low nibble.

    Args:
        codes: uint8 [..., K], one code (0..15) an element, K even.

    Returns:
        uint8 [..., K/2].

    Raises:
        TensorError: `codes` is not uint8, or K is odd.
    """
    _require_dtype(codes, "codes", torch.uint8)
    if codes.ndim == 0 or codes.shape[-1] % 2:
        raise TensorError("codes", "a last axis of even length", f"shape {tuple(codes.shape)}")
    return codes[..., 0::2] | (codes[..., 1::2] << 4)


def unpack_e2m1(packed: torch.Tensor) -> torch.Tensor:
    """The inverse of `pack_e2m1`: uint8 [..., K/2] to uint8 [..., K].

    Raises:
        TensorError: `packed` is not uint8.
    """
    _require_dtype(packed, "packed", torch.uint8)
    return torch.stack((packed & 0xF, packed >> 4), dim=-1).flatten(-2)


def nvfp4_global_scale(values: torch.Tensor) -> torch.Tensor:
    """The multiplier that lets NVFP4 reach the largest magnitude: amax / (6 * 448).

    It is ModelOpt's `NVFP4QTensor.get_weights_scaling_factor_2`, except that tensors with an amax too small for it (all
    zeros, say) get the smallest scale `quantize_nvfp4` takes, not zero.

    Args:
        values: float32, bfloat16 or float16, any shape, finite.

    Returns:
        A float32 tensor without axes.

    Raises:
        TensorError: The dtype is another one.
    """
    values = _float32(values, "values")
    amax = values.abs().amax() if values.numel() else values.new_zeros(())
    # Division by a Python number is a multiplication by its reciprocal on a GPU, one ulp off.
    return (amax / amax.new_full((), E2M1_MAX * E4M3_MAX)).clamp(min=_GLOBAL_SCALE_MIN)


def check_nvfp4_input(values: torch.Tensor, global_scale: torch.Tensor) -> None:
    """Refuses numbers NVFP4 cannot hold. It reads both tensors, so on a GPU it waits for it.

    Raises:
        TensorError: `values` holds an infinity or NaN, or `global_scale` a number that is not finite and positive, or
            one so small or large (outside 2^-117 .. 1.26e35) that its products or its reciprocal leave float32.
    """
    finite = torch.isfinite(values)
    if not bool(finite.all()):
        actual = f"{int((~finite).sum())} of {values.numel()} infinite or NaN"
        raise TensorError("values", "finite values", actual, "Find the layer before this one that overflows.")
    usable = (global_scale >= _GLOBAL_SCALE_MIN) & (global_scale <= _GLOBAL_SCALE_MAX)
    if not bool(usable.all()):
        worst = float(global_scale[~usable].flatten()[0])
        expected = f"finite positive numbers in {_GLOBAL_SCALE_MIN:.3g} .. {_GLOBAL_SCALE_MAX:.3g}"
        raise TensorError("global_scale", expected, f"{worst:g}", "nvfp4_global_scale(values) gives one.")


def per_token_scale(values: torch.Tensor) -> torch.Tensor:
    """A global scale for each row, amax / (6 * 448): float32 [T] of float32 [T, K]; 1 for a row of zeros.

    Source: FlashInfer 0.7.4, quantization.cuh, per-token quantization; it gives a row of zeros the scale 0.
    """
    scale = values.to(torch.float32).abs().amax(-1) / (E2M1_MAX * E4M3_MAX)
    return torch.where(scale > 0, scale, 1.0)


def quantize_nvfp4(
    values: torch.Tensor,
    global_scale: torch.Tensor | float,
    *,
    arithmetic: QuantizerArithmetic = QuantizerArithmetic.MODELOPT,
    check: bool = True,
) -> Nvfp4Tensor:
    """Rounds values to NVFP4, all in float32.

    ModelOpt's arithmetic, with which checkpoints are made and recorded: block scale = E4M3(vecmax / (6 *
    global_scale)), at most 448; codes = E2M1(value / (block scale * global_scale)), or 0 where the block scale is 0.
    Source: ModelOpt 0.47, `NVFP4QTensor.quantize`.

    FlashInfer's, with s = 1 / global_scale: block scale = E4M3(s * (vecmax * (1 / 6))), at most 448; codes =
    E2M1(value * (1 / (block scale * (1 / s)))), or 0 likewise. Source: FlashInfer 0.7.4, `cvt_warp_fp16_to_fp4`, lines
    507 to 517 and 689 of quantization_utils.cuh. Reciprocals are rounded correctly here; the kernel's,
    rcp.approx.ftz.f32, may differ in the last bit.

    The two differ only where a quotient lies on a rounding boundary; bf16 inputs with a global scale taken from their
    own amax lie there often, and then differ by a whole step.

    A block whose scale rounds to zero (vecmax / (6 * global_scale) up to 2^-10) becomes zeros, as in FlashInfer;
    ModelOpt gives such a block the scale 2^-9.

    Args:
        values: float32, bfloat16 or float16 [..., K], K a multiple of 16.
        global_scale: The checkpoint's multiplier: one number, or a float32 tensor whose axes line up with the first
            axes of `values` (an axis of length 1 stretches).
        arithmetic: Whether to divide or to multiply by reciprocals.
        check: Whether to refuse unusable numbers (`check_nvfp4_input`). False reads no values, so nothing waits for a
            GPU; unusable numbers then give unspecified codes.

    Returns:
        The codes, block scales and `global_scale`, as a float32 tensor.

    Raises:
        TensorError: A dtype, shape or device does not fit, or see `check_nvfp4_input`.
    """
    values = _float32(values, "values")
    if values.ndim == 0 or values.shape[-1] % BLOCK_SIZE:
        raise TensorError("values", f"a last axis that is a multiple of {BLOCK_SIZE}", f"shape {tuple(values.shape)}")
    multiplier = _as_global_scale(global_scale, values.device)
    aligned = _align(multiplier, values.shape)
    if check:
        check_nvfp4_input(values, multiplier)

    blocks = _blocks(values)
    largest = blocks.abs().amax(dim=-1)
    block_scale, quotients = _QUOTIENTS[arithmetic](blocks, largest, aligned)
    codes = encode_e2m1(torch.where((block_scale != 0).unsqueeze(-1), quotients, blocks * 0.0).flatten(-2))
    return Nvfp4Tensor(pack_e2m1(codes), block_scale.to(torch.float8_e4m3fn), multiplier)


def _divide(
    blocks: torch.Tensor, largest: torch.Tensor, global_scale: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Block scales, as float32, and what the codes are rounded from."""
    block_scale = _e4m3(largest / (E2M1_MAX * global_scale))
    return block_scale, blocks / (block_scale * global_scale).unsqueeze(-1)


def _multiply(
    blocks: torch.Tensor, largest: torch.Tensor, global_scale: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    inverse = global_scale.reciprocal()
    block_scale = _e4m3(inverse * (largest * (1.0 / E2M1_MAX)))
    return block_scale, blocks * (block_scale * inverse.reciprocal()).reciprocal().unsqueeze(-1)


_QUOTIENTS = {QuantizerArithmetic.MODELOPT: _divide, QuantizerArithmetic.FLASHINFER: _multiply}


def _e4m3(scale: torch.Tensor) -> torch.Tensor:
    # PyTorch's cast makes NaN of anything above 448.
    return scale.clamp(max=E4M3_MAX).to(torch.float8_e4m3fn).to(torch.float32)


def dequantize_nvfp4(tensor: Nvfp4Tensor) -> torch.Tensor:
    """The values: code * block scale, which is exact, times global scale, rounded once to float32.

    Args:
        tensor: Codes and block scales of matching shape.

    Returns:
        float32 [..., K].

    Raises:
        TensorError: A dtype or shape does not fit.
    """
    _require_dtype(tensor.block_scale, "block_scale", torch.float8_e4m3fn)
    _require_dtype(tensor.global_scale, "global_scale", torch.float32)
    values = decode_e2m1(unpack_e2m1(tensor.codes))
    blocks_shape = (*values.shape[:-1], values.shape[-1] // BLOCK_SIZE)
    if values.shape[-1] % BLOCK_SIZE or tensor.block_scale.shape != blocks_shape:
        expected = f"shape {blocks_shape}, one scale for 8 bytes of codes {tuple(tensor.codes.shape)}"
        raise TensorError("block_scale", expected, f"shape {tuple(tensor.block_scale.shape)}")
    scaled = (_blocks(values) * tensor.block_scale.to(torch.float32).unsqueeze(-1)).flatten(-2)
    return scaled * _align(tensor.global_scale, values.shape)


def _blocks(values: torch.Tensor) -> torch.Tensor:
    """[..., K] as [..., K/16, 16]."""
    return values.reshape(*values.shape[:-1], values.shape[-1] // BLOCK_SIZE, BLOCK_SIZE)


def _as_global_scale(global_scale: torch.Tensor | float, device: torch.device) -> torch.Tensor:
    if not isinstance(global_scale, torch.Tensor):
        return torch.tensor(global_scale, dtype=torch.float32, device=device)
    _require_dtype(global_scale, "global_scale", torch.float32)
    if global_scale.device != device:
        raise TensorError("global_scale", f"a tensor on {device}, as values", f"one on {global_scale.device}")
    return global_scale


def _align(global_scale: torch.Tensor, shape: torch.Size) -> torch.Tensor:
    """`global_scale` with the axes it lacks, so that it broadcasts over `[..., K]` from the first axis on."""
    if global_scale.numel() == 1:
        return global_scale.reshape(())
    leading = tuple(shape[:-1])
    own = tuple(global_scale.shape)
    if len(own) > len(leading) or any(a not in (1, b) for a, b in zip(own, leading, strict=False)):
        expected = f"one number, or the first axes of {leading} (an axis may be 1)"
        raise TensorError("global_scale", expected, f"shape {own}")
    return global_scale.reshape(own + (1,) * (len(shape) - len(own)))


def _float32(values: torch.Tensor, argument: str) -> torch.Tensor:
    if values.dtype not in _FLOATS:
        raise TensorError(argument, "float32, bfloat16 or float16", str(values.dtype))
    return values.to(torch.float32)


def _require_dtype(tensor: torch.Tensor, argument: str, dtype: torch.dtype) -> None:
    if tensor.dtype != dtype:
        raise TensorError(argument, str(dtype), str(tensor.dtype))
