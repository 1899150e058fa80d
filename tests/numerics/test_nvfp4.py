from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import pytest
import torch
from flashinfer_quantizer import quantize_block
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from safetensors.torch import load_file

from flashinfer_compat.errors import TensorError
from flashinfer_compat.numerics import (
    Nvfp4Tensor,
    decode_e2m1,
    dequantize_nvfp4,
    encode_e2m1,
    nvfp4_global_scale,
    pack_e2m1,
    quantize_nvfp4,
    unpack_e2m1,
)
from flashinfer_compat.vocabulary import QuantizerArithmetic

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

MAGNITUDES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
E4M3 = [float(v) for v in torch.arange(127, dtype=torch.uint8).view(torch.float8_e4m3fn).float()]
ALL_CODES = torch.arange(16, dtype=torch.uint8)

blocks = hnp.arrays(
    np.float32,
    st.tuples(st.integers(1, 3), st.integers(1, 3).map(lambda n: 16 * n)),
    elements=st.floats(-1e4, 1e4, width=32, allow_subnormal=False),
)
global_scales = st.floats(2.0**-20, 2.0**20, width=32)


def nearest_even(value: float, table: tuple[float, ...] | list[float]) -> int:
    """Index of the entry nearest to `value` (not negative), the even index at a tie, the last one beyond the end."""
    return min(range(len(table)), key=lambda i: (abs(table[i] - value), i % 2))


def slow_quantize(row: np.ndarray, global_scale: np.float32) -> tuple[list[int], list[float]]:
    """One row, element by element, in numpy float32 scalars: codes and block scales."""
    codes, scales = [], []
    for start in range(0, len(row), 16):
        block = row[start : start + 16]
        largest = np.float32(max(abs(v) for v in block))
        wanted = np.float32(largest / np.float32(np.float32(6) * global_scale))
        scale = np.float32(E4M3[nearest_even(min(float(wanted), 448.0), E4M3)])
        step = np.float32(scale * global_scale)
        scales.append(float(scale))
        for v in block:
            scaled = np.float32(v / step) if step else np.float32(v * np.float32(0))
            codes.append(nearest_even(abs(float(scaled)), MAGNITUDES) | (8 if np.signbit(scaled) else 0))
    return codes, scales


def test_every_code_survives_decoding_and_encoding() -> None:
    assert torch.equal(encode_e2m1(decode_e2m1(ALL_CODES)), ALL_CODES)
    assert decode_e2m1(ALL_CODES).tolist() == [*MAGNITUDES, *(-m for m in MAGNITUDES)]


def test_negative_zero_keeps_its_sign() -> None:
    assert encode_e2m1(torch.tensor([-0.0, 0.0, -0.1])).tolist() == [8, 0, 8]
    assert torch.signbit(decode_e2m1(torch.tensor([8, 0], dtype=torch.uint8))).tolist() == [True, False]


@pytest.mark.parametrize(
    ("value", "rounded"),
    [(0.25, 0.0), (0.75, 1.0), (1.25, 1.0), (1.75, 2.0), (2.5, 2.0), (3.5, 4.0), (5.0, 4.0), (6.1, 6.0), (1e38, 6.0)],
)
@pytest.mark.parametrize("sign", [1, -1])
def test_ties_go_to_the_even_code_and_large_values_saturate(value: float, rounded: float, sign: int) -> None:
    assert decode_e2m1(encode_e2m1(torch.tensor([sign * value]))).item() == sign * rounded


@given(st.floats(-8, 8, width=32))
def test_encoding_is_the_nearest_code(value: float) -> None:
    code = int(encode_e2m1(torch.tensor([value])))
    assert code & 7 == nearest_even(abs(value), MAGNITUDES)


@pytest.mark.parametrize("tie", [0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0])
def test_encoding_turns_exactly_at_the_midpoints(tie: float) -> None:
    point = torch.tensor(tie)
    around = torch.stack((torch.nextafter(point, torch.tensor(0.0)), torch.nextafter(point, torch.tensor(9.0))))
    below, above = decode_e2m1(encode_e2m1(around)).tolist()
    assert (below + above) / 2 == tie


@given(hnp.arrays(np.uint8, hnp.array_shapes(min_dims=1, max_dims=3, max_side=6), elements=st.integers(0, 255)))
def test_pack_is_the_inverse_of_unpack(packed: np.ndarray) -> None:
    data = torch.from_numpy(packed)
    codes = unpack_e2m1(data)
    assert codes.shape == (*data.shape[:-1], 2 * data.shape[-1])
    assert int(codes.max()) < 16
    assert torch.equal(pack_e2m1(codes), data)


def test_the_first_code_is_in_the_low_nibble() -> None:
    assert pack_e2m1(torch.tensor([1, 7, 8, 15], dtype=torch.uint8)).tolist() == [0x71, 0xF8]


@given(blocks, global_scales)
@settings(max_examples=60)
def test_quantization_agrees_with_a_slow_rewrite(array: np.ndarray, global_scale: float) -> None:
    result = quantize_nvfp4(torch.from_numpy(array), global_scale)
    for row, codes, scales in zip(array, unpack_e2m1(result.codes), result.block_scale.float(), strict=True):
        expected_codes, expected_scales = slow_quantize(row, np.float32(global_scale))
        assert scales.tolist() == expected_scales
        assert codes.tolist() == expected_codes


@given(blocks, global_scales)
def test_each_error_is_within_half_a_step_of_its_block(array: np.ndarray, global_scale: float) -> None:
    values = torch.from_numpy(array)
    result = quantize_nvfp4(values, global_scale)
    step = (result.block_scale.double() * global_scale).repeat_interleave(16, dim=-1)
    error = (dequantize_nvfp4(result).double() - values.double()).abs()
    # Magnitudes 4 and 6 are two steps apart, so one step is half their distance; beyond 6 steps values saturate.
    beyond = (values.double().abs() - 6 * step).clamp(min=0)
    assert bool((error <= (step + beyond) * (1 + 1e-5)).all())


@given(blocks)
def test_a_fitting_global_scale_bounds_the_error_by_the_block(array: np.ndarray) -> None:
    values = torch.from_numpy(array)
    scale = nvfp4_global_scale(values)
    error = (dequantize_nvfp4(quantize_nvfp4(values, scale)) - values).abs().unflatten(-1, (-1, 16)).amax(dim=-1)
    largest = values.abs().unflatten(-1, (-1, 16)).amax(dim=-1)
    # A normal block scale is within 1/16 of largest / 6, a subnormal one within 2^-10; half a step is one scale.
    bound = largest / 6 * (1 + 1 / 16) + 6 * 2.0**-10 * scale
    assert bool((error <= bound * (1 + 1e-5)).all())


@given(
    hnp.arrays(np.uint8, (2, 32), elements=st.integers(0, 15)),
    hnp.arrays(np.uint8, (2, 2), elements=st.integers(1, 126)),
    global_scales,
)
def test_representable_values_come_back_unchanged(codes: np.ndarray, scales: np.ndarray, global_scale: float) -> None:
    codes[:, ::16] |= 7  # a block that reaches 6 determines its own scale
    original = Nvfp4Tensor(
        pack_e2m1(torch.from_numpy(codes)),
        torch.from_numpy(scales).view(torch.float8_e4m3fn),
        torch.tensor(global_scale),
    )
    again = quantize_nvfp4(dequantize_nvfp4(original), global_scale)
    assert torch.equal(again.codes, original.codes)
    assert torch.equal(again.block_scale.view(torch.uint8), original.block_scale.view(torch.uint8))


def test_dequantizing_multiplies_code_block_scale_and_global_scale() -> None:
    codes = torch.tensor([[7] * 16 + [9] * 16], dtype=torch.uint8)
    tensor = Nvfp4Tensor(pack_e2m1(codes), torch.tensor([[448.0, 2.0**-9]]).to(torch.float8_e4m3fn), torch.tensor(0.5))
    assert tensor.shape == (1, 32)
    assert dequantize_nvfp4(tensor).tolist() == [[6 * 448 * 0.5] * 16 + [-0.5 * 2.0**-9 * 0.5] * 16]


def test_zero_rows_give_zeros() -> None:
    values = torch.zeros(2, 32)
    values[1, 0] = 5.0
    result = quantize_nvfp4(values, nvfp4_global_scale(values))
    assert result.codes[0].tolist() == [0] * 16
    assert result.block_scale[0].float().tolist() == [0.0, 0.0]
    assert dequantize_nvfp4(result).isfinite().all()
    assert dequantize_nvfp4(result)[1, 0] == 5.0


@pytest.mark.parametrize("shape", [(3, 32), (0, 32), (2, 0)])
def test_all_zero_and_empty_tensors_can_be_scaled_and_quantized(shape: tuple[int, int]) -> None:
    values = torch.zeros(shape)
    back = dequantize_nvfp4(quantize_nvfp4(values, nvfp4_global_scale(values)))
    assert torch.equal(back, values)


def test_a_block_scale_above_448_saturates() -> None:
    values = torch.full((1, 16), 1000.0)
    result = quantize_nvfp4(values, 1e-3)
    assert result.block_scale.float().item() == 448.0
    assert dequantize_nvfp4(result)[0].tolist() == pytest.approx([6 * 448 * 1e-3] * 16)


def test_a_block_whose_scale_rounds_to_zero_becomes_zero() -> None:
    values = torch.tensor([[1.0] + [0.0] * 15 + [6 * 2.0**-10, -6 * 2.0**-10] + [0.0] * 14])
    result = quantize_nvfp4(values, 1.0)
    assert result.block_scale.float()[0, 1].item() == 0.0
    assert dequantize_nvfp4(result)[0, 16:].abs().max() == 0.0


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_narrow_inputs_are_widened_exactly(dtype: torch.dtype) -> None:
    values = torch.randn(4, 64, generator=torch.Generator().manual_seed(0)).to(dtype)
    narrow, wide = quantize_nvfp4(values, 1e-3), quantize_nvfp4(values.float(), 1e-3)
    assert torch.equal(narrow.codes, wide.codes)


def test_a_global_scale_lines_up_with_the_first_axes() -> None:
    values = torch.randn(3, 2, 5, 32, generator=torch.Generator().manual_seed(1))
    scales = torch.rand(3, 2, generator=torch.Generator().manual_seed(2)) + 0.01
    together = quantize_nvfp4(values, scales)
    back = dequantize_nvfp4(together)
    for expert in range(3):
        for half in range(2):
            alone = quantize_nvfp4(values[expert, half], scales[expert, half])
            assert torch.equal(together.codes[expert, half], alone.codes)
            assert torch.equal(back[expert, half], dequantize_nvfp4(alone))


def test_skipping_the_check_changes_nothing_else() -> None:
    values = torch.randn(4, 64, generator=torch.Generator().manual_seed(3))
    assert torch.equal(quantize_nvfp4(values, 0.1, check=False).codes, quantize_nvfp4(values, 0.1).codes)


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_values_that_are_not_finite_are_refused(bad: float) -> None:
    values = torch.zeros(2, 16)
    values[1, 3] = bad
    with pytest.raises(TensorError, match="values: expected finite values, got 1 of 32"):
        quantize_nvfp4(values, 1.0)


@pytest.mark.parametrize("bad", [0.0, -1.0, float("nan"), float("inf"), 1e-40, 1e36])
def test_unusable_global_scales_are_refused(bad: float) -> None:
    with pytest.raises(TensorError, match="global_scale"):
        quantize_nvfp4(torch.ones(2, 16), torch.tensor([1.0, bad]))


@pytest.mark.parametrize("edge", [2.0**-117, 1.2e35])
def test_the_edges_of_the_global_scale_stay_finite(edge: float) -> None:
    values = torch.tensor([[6 * edge] + [0.0] * 15])
    back = dequantize_nvfp4(quantize_nvfp4(values, edge))
    assert back[0, 0].item() == pytest.approx(6 * edge, rel=1e-6)
    assert back[0, 1:].tolist() == [0.0] * 15


@pytest.mark.parametrize(
    ("values", "global_scale", "argument"),
    [
        (torch.zeros(2, 15), torch.tensor(1.0), "values"),
        (torch.zeros(2, 16, dtype=torch.float64), torch.tensor(1.0), "values"),
        (torch.zeros(2, 16), torch.ones(3), "global_scale"),
        (torch.zeros(2, 16), torch.ones(2, 16), "global_scale"),
        (torch.zeros(2, 16), torch.tensor(1.0, dtype=torch.float64), "global_scale"),
    ],
)
def test_tensors_that_do_not_fit_are_refused(values: torch.Tensor, global_scale: torch.Tensor, argument: str) -> None:
    with pytest.raises(TensorError) as caught:
        quantize_nvfp4(values, global_scale)
    assert caught.value.argument == argument


def test_mismatched_block_scales_are_refused() -> None:
    codes = torch.zeros(2, 16, dtype=torch.uint8)
    with pytest.raises(TensorError, match=r"block_scale: expected shape \(2, 2\)"):
        dequantize_nvfp4(Nvfp4Tensor(codes, torch.zeros(2, 3).to(torch.float8_e4m3fn), torch.tensor(1.0)))
    with pytest.raises(TensorError, match="float8_e4m3fn"):
        dequantize_nvfp4(Nvfp4Tensor(codes, torch.zeros(2, 2, dtype=torch.uint8), torch.tensor(1.0)))


def test_codes_of_a_wrong_dtype_or_length_are_refused() -> None:
    with pytest.raises(TensorError, match="uint8"):
        decode_e2m1(torch.zeros(2, dtype=torch.int32))
    with pytest.raises(TensorError, match="uint8"):
        unpack_e2m1(torch.zeros(2, dtype=torch.int32))
    with pytest.raises(TensorError, match="even length"):
        pack_e2m1(torch.zeros(3, dtype=torch.uint8))
    with pytest.raises(TensorError, match="bfloat16"):
        nvfp4_global_scale(torch.zeros(3, dtype=torch.int32))


def flashinfer_quantize(values: torch.Tensor, global_scale: torch.Tensor) -> Nvfp4Tensor:
    return quantize_nvfp4(values, global_scale, arithmetic=QuantizerArithmetic.FLASHINFER)


def awkward_blocks(largest: float) -> torch.Tensor:
    """bf16 numbers [33, 16] up to `largest`, zeros, and numbers too small for a normal block scale, or for any."""
    random = torch.Generator().manual_seed(11)
    values = torch.randn(33, 16, generator=random)
    values = (values / values.abs().amax() * largest).bfloat16().float()
    values[0] = 0.0
    values[1] = torch.tensor([0.0, -0.0] * 8)
    # Block scales below 2^-6 are subnormal, below 2^-10 zero.
    for row, power in ((2, -12), (3, -15), (4, -17), (5, -18), (6, -19), (7, -21)):
        values[row] *= 2.0**power
    # Half way between two codes, of a block whose scale is a power of two times the global one.
    ties = torch.tensor([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0, 6.0])
    values[8] = torch.cat((ties, -ties)) * 2.0**-3
    values[9] = values[8] * largest / 6
    return values


@pytest.mark.parametrize("global_scale", [71 / 16 / 2688, 2.0**-9, 3.3e-3, 1.7e4, 2.0**-117])
def test_flashinfers_arithmetic_is_that_of_its_source(global_scale: float) -> None:
    scale = torch.tensor(global_scale, dtype=torch.float32)
    values = awkward_blocks(float(scale) * 2688)
    result = flashinfer_quantize(values, scale)
    inverse = float(1.0 / scale)
    for row, block in enumerate(values.tolist()):
        byte, codes = quantize_block(block, inverse)
        assert result.block_scale[row].view(torch.uint8).item() == byte
        assert unpack_e2m1(result.codes[row]).tolist() == codes
    assert result.block_scale.float().unique().numel() > 10


def test_a_quotient_on_a_rounding_boundary_tells_the_arithmetics_apart() -> None:
    # 213/128 over 71/16, times 448, is 168, half way between the E4M3 numbers 160 and 176.
    scale = torch.tensor(71 / 16) / 2688
    values = torch.tensor([[213 / 128] + [0.0] * 15, [71 / 16] + [0.0] * 15])
    divided, multiplied = quantize_nvfp4(values, scale), flashinfer_quantize(values, scale)
    assert [divided.block_scale[0].item(), multiplied.block_scale[0].item()] == [176.0, 160.0]
    assert [divided.block_scale[1].item(), multiplied.block_scale[1].item()] == [448.0, 448.0]
    away = quantize_nvfp4(values, 2.0**-9), flashinfer_quantize(values, torch.tensor(2.0**-9))
    assert torch.equal(away[0].codes, away[1].codes)
    assert torch.equal(away[0].block_scale.float(), away[1].block_scale.float())


@given(values=blocks, global_scale=global_scales)
def test_the_arithmetics_differ_by_one_step_at_most(values: np.ndarray, global_scale: float) -> None:
    tensor = torch.from_numpy(values)
    divided, multiplied = quantize_nvfp4(tensor, global_scale), flashinfer_quantize(tensor, torch.tensor(global_scale))
    bytes_of = [one.block_scale.view(torch.uint8).int() for one in (divided, multiplied)]
    assert (bytes_of[0] - bytes_of[1]).abs().max() <= 1


@dataclass(frozen=True)
class Block:
    """The MoE block of a sample checkpoint, computed expert by expert with this package's NVFP4."""

    tensors: dict[str, torch.Tensor]
    quantize: Callable[[torch.Tensor, torch.Tensor], Nvfp4Tensor] | None

    def weight(self, name: str) -> torch.Tensor:
        stored = self.tensors[f"{name}.weight"]
        if stored.dtype != torch.uint8:
            return stored.float()
        return dequantize_nvfp4(
            Nvfp4Tensor(stored, self.tensors[f"{name}.weight_scale"], self.tensors[f"{name}.weight_scale_2"])
        )

    def linear(self, x: torch.Tensor, name: str) -> torch.Tensor:
        scale = self.tensors.get(f"{name}.input_scale")
        if self.quantize is not None and scale is not None:
            x = dequantize_nvfp4(self.quantize(x, scale.float()))
        return x @ self.weight(name).T

    def mlp(self, x: torch.Tensor, name: str) -> torch.Tensor:
        hidden = torch.nn.functional.silu(self.linear(x, f"{name}.gate_proj")) * self.linear(x, f"{name}.up_proj")
        return self.linear(hidden, f"{name}.down_proj")

    def __call__(self, x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        out = self.mlp(x, "shared_experts")
        for expert in ids.unique().tolist():
            token, slot = (ids == expert).nonzero(as_tuple=True)
            out[token] += weights[token, slot, None] * self.mlp(x[token], f"experts.{expert}")
        return out


def load_block(folder: Path) -> dict[str, torch.Tensor]:
    prefix = "model.layers.1.mlp."
    tensors = load_file(folder / "model.safetensors")
    return {name.removeprefix(prefix): t for name, t in tensors.items() if name.startswith(prefix)}


SAMPLES = ["grouped", "shared-bf16", "ungrouped-2-shared"]


@pytest.mark.parametrize("name", SAMPLES)
@pytest.mark.parametrize(
    ("output", "quantize", "tolerance"),
    [
        ("output_w4a16", None, 1e-6),
        ("output_w4a4", quantize_nvfp4, 1e-6),
        # Many of these bf16 inputs put a block scale exactly on a tie, where the last bit of the arithmetic decides
        # between neighbours 10% apart; FlashInfer's arithmetic and ModelOpt's then choose differently.
        ("output_w4a4", flashinfer_quantize, 0.1),
    ],
)
def test_recorded_outputs_of_modelopt_are_reproduced(
    checkpoints: Path,
    name: str,
    output: str,
    quantize: Callable[[torch.Tensor, torch.Tensor], Nvfp4Tensor] | None,
    tolerance: float,
) -> None:
    io = load_file(checkpoints / name / "moe_io.safetensors")
    ours = Block(load_block(checkpoints / name), quantize)(
        io["hidden_states"].float(), io["topk_ids"], io["topk_weights"]
    )
    assert ours[3].abs().max() == 0
    assert (ours - io[output]).norm() / io[output].norm() < tolerance


def distance_to_a_midpoint(values: torch.Tensor, table: list[float]) -> torch.Tensor:
    """How far each value is, relative to itself, from the nearest point where rounding to `table` turns."""
    entries = torch.tensor(table, dtype=torch.float64)
    midpoints = (entries[1:] + entries[:-1]) / 2
    return (values.unsqueeze(-1) - midpoints).abs().amin(dim=-1) / values


@pytest.mark.parametrize("name", SAMPLES)
def test_flashinfer_is_left_only_where_a_value_lies_on_a_rounding_boundary(checkpoints: Path, name: str) -> None:
    values = load_file(checkpoints / name / "moe_io.safetensors")["hidden_states"].float()
    scales = [t for key, t in load_block(checkpoints / name).items() if key.endswith("gate_proj.input_scale")]
    for global_scale in {float(t): t.float() for t in scales}.values():
        ours, theirs = quantize_nvfp4(values, global_scale), flashinfer_quantize(values, global_scale)
        wanted = values.double().unflatten(-1, (-1, 16)).abs().amax(dim=-1) / (6 * global_scale.double())
        other_scale = (ours.block_scale.float() != theirs.block_scale.float()) & (wanted > 0)
        assert bool((distance_to_a_midpoint(wanted[other_scale], E4M3) < 1e-6).all())

        step = (ours.block_scale.double() * global_scale.double()).unsqueeze(-1)
        scaled = values.double().unflatten(-1, (-1, 16)) / step
        codes_differ = (unpack_e2m1(ours.codes) != unpack_e2m1(theirs.codes)).unflatten(-1, (-1, 16))
        other_code = codes_differ & ~other_scale.unsqueeze(-1)
        assert bool((distance_to_a_midpoint(scaled[other_code].abs(), list(MAGNITUDES)) < 1e-6).all())


@pytest.mark.parametrize("name", SAMPLES)
def test_checkpoint_weights_are_fixed_points(checkpoints: Path, name: str) -> None:
    tensors = load_block(checkpoints / name)
    stems = [key.removesuffix(".weight_scale_2") for key in tensors if key.endswith(".weight_scale_2")]
    assert len(stems) >= 48
    for stem in stems:
        original = Nvfp4Tensor(*(tensors[f"{stem}.{part}"] for part in ("weight", "weight_scale", "weight_scale_2")))
        values = dequantize_nvfp4(original)
        assert torch.equal(dequantize_nvfp4(quantize_nvfp4(values, original.global_scale)), values)
