"""How the Triton kernels read weights and round activations."""

from __future__ import annotations

from dataclasses import replace

import pytest

torch = pytest.importorskip("torch")
triton = pytest.importorskip("triton", minversion="3.5")

import triton.language as tl  # noqa: E402
from triton_layers import DEVICE, INTERPRETED  # noqa: E402

from flashinfer_compat.backends.triton.decode import WEIGHT_UNIT, dequantize  # noqa: E402
from flashinfer_compat.backends.triton.rounding import ROUNDINGS, quantize, round_to_nvfp4  # noqa: E402
from flashinfer_compat.numerics import Nvfp4Tensor, decode_e2m1, dequantize_nvfp4, quantize_nvfp4, unpack_e2m1  # noqa: E402
from flashinfer_compat.vocabulary import QuantizerArithmetic  # noqa: E402


@triton.jit
def _dequantize(words, scales, out, rows: tl.constexpr, block_k: tl.constexpr, interpreted: tl.constexpr):
    row = tl.arange(0, rows)[:, None]
    word = tl.load(words + row * (block_k // 8) + tl.arange(0, block_k // 8)[None, :])
    scale = tl.load(scales + row * (block_k // 16) + tl.arange(0, block_k // 16)[None, :])
    values = dequantize(word, scale, rows, block_k, interpreted)
    tl.store(out + row * block_k + tl.arange(0, block_k)[None, :], values.to(tl.float32))


def test_every_code_with_every_scale_is_decoded_exactly() -> None:
    scales = torch.arange(128, dtype=torch.uint8).repeat(1, 2).reshape(128, 2)
    scales[127] = 0  # 0x7F is NaN.
    scales[:, 1] = scales[:, 0].flip(0)
    codes = torch.tensor([0x10, 0x32, 0x54, 0x76, 0x98, 0xBA, 0xDC, 0xFE] * 2, dtype=torch.uint8).repeat(128, 1)
    codes[::2] = codes[::2].flip(1)
    expected = dequantize_nvfp4(Nvfp4Tensor(codes, scales.view(torch.float8_e4m3fn), torch.ones(128)))
    out = torch.empty(128, 32, device=DEVICE)
    words = codes.to(DEVICE).view(torch.int32)
    _dequantize[(1,)](words, scales.to(DEVICE), out, rows=128, block_k=32, interpreted=INTERPRETED)
    # Plane j holds value j of each of the four words.
    natural = out.cpu().reshape(128, 8, 4).transpose(1, 2).reshape(128, 32) * WEIGHT_UNIT
    assert torch.equal(natural, expected)


@triton.jit
def _round(
    values, scale, out, numbers, block_scale, blocks: tl.constexpr, rounding: tl.constexpr, interpreted: tl.constexpr
):
    block = tl.arange(0, blocks)[:, None]
    at = block * 16 + tl.arange(0, 16)[None, :]
    given = tl.load(values + at)
    tl.store(out + at, round_to_nvfp4(given, tl.load(scale), rounding, interpreted))
    own_numbers, own_scale = quantize(given, tl.load(scale), rounding, interpreted)
    tl.store(numbers + at, own_numbers)
    tl.store(block_scale + block, own_scale)


@pytest.mark.parametrize("arithmetic", QuantizerArithmetic)
@pytest.mark.parametrize("blocks", [1, 4, 256])
@pytest.mark.parametrize("scale", [2.0**-9, 0.013, 7.1, 71 / 16 / 2688])
def test_values_are_rounded_as_quantize_nvfp4_rounds_them(
    scale: float, blocks: int, arithmetic: QuantizerArithmetic
) -> None:
    if arithmetic is QuantizerArithmetic.FLASHINFER and not INTERPRETED:
        pytest.skip("a GPU's reciprocals are approximate; tests/gpu has their test")
    random = torch.Generator().manual_seed(3)
    values = torch.randn(256, 16, generator=random) * torch.logspace(-6, 6, 256).unsqueeze(1)
    values[:64] = values[:64].bfloat16().float()
    values[7] = 0
    # Multiples of an E2M1 step lie on its ties.
    values[64:96] = torch.randint(-24, 25, (32, 16), generator=random) * 0.25 * scale
    # The block scales of these are subnormal, the last zero.
    values[96:128] = torch.randn(32, 16, generator=random) * scale * torch.logspace(-2, -4, 32).unsqueeze(1)
    # bf16 multiples of 1/128 under a global scale of an amax lie on ties of the block scale: 213/128 over 71/16.
    values[128:160] = torch.randint(-568, 569, (32, 16), generator=random) / 128
    values[0, 0], values[1, 0] = 213 / 128, 71 / 16
    input_scale = torch.tensor(scale)
    expected = quantize_nvfp4(values, input_scale, arithmetic=arithmetic)
    exact = dequantize_nvfp4(replace(expected, global_scale=torch.ones(())))
    out, numbers = (torch.empty(blocks, 16, device=DEVICE) for _ in range(2))
    block_scale = torch.empty(blocks, device=DEVICE)
    _round[(1,)](
        values.to(DEVICE),
        input_scale.to(DEVICE),
        out,
        numbers,
        block_scale,
        blocks=blocks,
        rounding=ROUNDINGS[arithmetic],
        interpreted=INTERPRETED,
    )
    assert torch.equal(out.cpu(), exact[:blocks])
    scales = expected.block_scale[:blocks].float()
    assert torch.equal(block_scale.cpu(), scales.flatten())
    kept = (scales != 0).flatten()
    codes = decode_e2m1(unpack_e2m1(expected.codes))[:blocks]
    assert torch.equal(numbers.cpu()[kept], codes[kept])
    if blocks == 256:
        assert not kept.all()
