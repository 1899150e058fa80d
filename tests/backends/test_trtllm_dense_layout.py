"""The shared expert as dense layers: its values, padding and shapes, and what the GEMM cannot take."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")

from layout_undone import close, down_of, gate_up_of, linear_scale  # noqa: E402
from trtllm_layers import SCALARS, random_experts  # noqa: E402

import flashinfer_compat as fc  # noqa: E402
from flashinfer_compat.backends.trtllm.weights import DenseNvfp4Linear, prepare_dense  # noqa: E402
from flashinfer_compat.errors import ArgumentError  # noqa: E402
from flashinfer_compat.numerics import Nvfp4Tensor, dequantize_nvfp4  # noqa: E402
from flashinfer_compat.weights.values import Nvfp4Experts  # noqa: E402


def dense_weight(linear: DenseNvfp4Linear) -> torch.Tensor:
    """float32 [N, K], still divided by alpha's global scale."""
    rows, half = linear.weight.shape
    scale = linear_scale(linear.block_scale, rows, half // 8)
    return dequantize_nvfp4(Nvfp4Tensor(linear.weight, scale, torch.tensor(1.0)))


@pytest.mark.parametrize("sample", ["grouped", "ungrouped-2-shared"])
def test_a_checkpoints_shared_expert_comes_back_from_the_dense_layout(checkpoints: Path, sample: str) -> None:
    shared = fc.load_moe_layer(checkpoints / sample, 1).shared
    assert isinstance(shared, Nvfp4Experts)
    dense = prepare_dense(shared)
    assert dense.fused_gate_up
    (gate_up,) = dense.gate_up
    expected = gate_up_of(shared)[0].flatten(0, 1)
    close(dense_weight(gate_up) * (gate_up.alpha * gate_up.quantize_scale), expected)
    close(dense_weight(dense.down) * (dense.down.alpha * dense.down.quantize_scale), down_of(shared)[0])
    assert gate_up.weight.data_ptr() == shared.gate_up_weight.data_ptr()


def test_gate_and_up_with_their_own_scales_are_two_exact_layers() -> None:
    shared = random_experts(1, 128, 96)
    same = torch.full((1, 2), 2.0**-9)
    alike = replace(shared, gate_up_global_scale=same, gate_up_input_scale=same)
    assert prepare_dense(alike).fused_gate_up
    for other in (
        replace(alike, gate_up_global_scale=shared.gate_up_global_scale),
        replace(alike, gate_up_input_scale=shared.gate_up_input_scale),
    ):
        dense = prepare_dense(other)
        assert not dense.fused_gate_up
        for side, linear in enumerate(dense.gate_up):
            input_scale, global_scale = other.gate_up_input_scale[0, side], other.gate_up_global_scale[0, side]
            assert linear.alpha == input_scale * global_scale
            assert linear.quantize_scale.tolist() == [float(1 / input_scale)]
            close(dense_weight(linear) * global_scale, gate_up_of(other)[0, side])


def test_dense_shapes_and_dtypes_are_the_gemms() -> None:
    shared = random_experts(1, 192, 96)
    dense = prepare_dense(replace(shared, **dict.fromkeys(SCALARS[:2], torch.ones(1, 2))))
    found = [(tuple(one.weight.shape), tuple(one.block_scale.shape)) for one in (*dense.gate_up, dense.down)]
    # 96 / 16 and 192 / 16 columns of scales, rows up to a multiple of 128.
    assert found == [((192, 96), (256, 12)), ((192, 48), (256, 8))]
    for one in (*dense.gate_up, dense.down):
        assert one.weight.dtype == one.block_scale.dtype == torch.uint8
        assert one.alpha.dtype == one.quantize_scale.dtype == torch.float32
        assert one.alpha.shape == ()
        assert one.quantize_scale.shape == (1,)
        assert one.weight.is_contiguous()
        assert one.block_scale.is_contiguous()


def test_a_dense_width_the_gemm_does_not_take_is_padded_with_zeros() -> None:
    shared = random_experts(1, 128, 48)
    fused = prepare_dense(replace(shared, **dict.fromkeys(SCALARS[:2], torch.ones(1, 2))))
    gate_up = dense_weight(fused.gate_up[0]).view(2, 64, 128)
    down = dense_weight(fused.down)
    ones = torch.ones(1)
    assert torch.equal(gate_up[:, :48], gate_up_of(shared, torch.ones(1, 2))[0])
    assert torch.equal(down[:, :48], down_of(shared, ones)[0])
    assert not gate_up[:, 48:].any()
    assert not down[:, 48:].any()
    for side, linear in enumerate(prepare_dense(shared).gate_up):
        assert torch.equal(dense_weight(linear), gate_up[side])


@pytest.mark.parametrize(
    ("experts", "argument"), [(random_experts(2, 128, 64), "shared"), (random_experts(1, 144, 64), "hidden_size")]
)
def test_what_the_dense_gemm_cannot_take_is_refused(experts: Nvfp4Experts, argument: str) -> None:
    with pytest.raises(ArgumentError) as error:
        prepare_dense(experts)
    assert error.value.argument == argument
