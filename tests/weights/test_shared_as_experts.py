from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

import pytest
import torch
from checkpoint_variants import GROUPED, SAMPLES, SHARED_BF16, TWO_SHARED, expert_outputs, same_bits
from safetensors.torch import load_file

from flashinfer_compat.errors import ArgumentError, TensorError
from flashinfer_compat.weights.checkpoint import load_moe_layer
from flashinfer_compat.weights.shared import append_shared, common_input_scale, split_shared
from flashinfer_compat.weights.values import DenseExperts, MoELayerWeights, Nvfp4Experts

if TYPE_CHECKING:
    from pathlib import Path


def two_shared_bf16() -> MoELayerWeights:
    """A layer whose two shared experts are bf16."""
    weights = load_moe_layer(TWO_SHARED, 1)
    generator = torch.Generator().manual_seed(0)
    gate_up = torch.randn(1, 2, 256, 256, generator=generator).bfloat16()
    down = torch.randn(1, 256, 256, generator=generator).bfloat16()
    return dataclasses.replace(weights, shared=DenseExperts(gate_up, down))


def nvfp4_shared(weights: MoELayerWeights) -> Nvfp4Experts:
    shared = split_shared(weights)
    assert isinstance(shared, Nvfp4Experts)
    return shared


@pytest.mark.parametrize("tp_size", [1, 2, 4])
def test_split_experts_add_up_to_the_wide_mlp(tp_size: int) -> None:
    x = load_file(TWO_SHARED / "moe_io.safetensors")["hidden_states"]
    for rank in range(tp_size):
        weights = load_moe_layer(TWO_SHARED, 1, tp_rank=rank, tp_size=tp_size)
        assert weights.shared is not None
        split = split_shared(weights)
        assert (split.num_experts, split.intermediate_size) == (2, 128 // tp_size)
        wide = expert_outputs(weights.shared, x)[0]
        torch.testing.assert_close(expert_outputs(split, x).sum(0), wide, rtol=1e-10, atol=1e-12)


def test_split_of_bf16_experts_adds_up_to_the_wide_mlp() -> None:
    x = load_file(TWO_SHARED / "moe_io.safetensors")["hidden_states"]
    weights = two_shared_bf16()
    assert weights.shared is not None
    split = split_shared(weights)
    assert isinstance(split, DenseExperts)
    torch.testing.assert_close(
        expert_outputs(split, x).sum(0), expert_outputs(weights.shared, x)[0], rtol=1e-10, atol=1e-10
    )


def test_split_cuts_rows_and_columns_and_repeats_scales() -> None:
    weights = load_moe_layer(TWO_SHARED, 1)
    wide = weights.shared
    assert isinstance(wide, Nvfp4Experts)
    split = nvfp4_shared(weights)
    for expert, rows in enumerate((slice(0, 128), slice(128, 256))):
        assert same_bits(split.gate_up_weight[expert], wide.gate_up_weight[0, :, rows])
        assert same_bits(split.gate_up_block_scale[expert], wide.gate_up_block_scale[0, :, rows])
        assert same_bits(split.down_weight[expert], wide.down_weight[0, :, rows.start // 2 : rows.stop // 2])
        assert same_bits(
            split.down_block_scale[expert], wide.down_block_scale[0, :, rows.start // 16 : rows.stop // 16]
        )
        for scale in ("gate_up_global_scale", "gate_up_input_scale", "down_global_scale", "down_input_scale"):
            assert torch.equal(getattr(split, scale)[expert], getattr(wide, scale)[0])
    assert all(tensor.is_contiguous() for tensor in vars(split).values())


@pytest.mark.parametrize("sample", [GROUPED, SHARED_BF16], ids=lambda path: path.name)
def test_one_shared_expert_is_not_copied(sample: Path) -> None:
    weights = load_moe_layer(sample, 1)
    assert weights.shared is not None
    split = split_shared(weights)
    assert split.gate_up_weight.data_ptr() == weights.shared.gate_up_weight.data_ptr()
    assert split.down_weight.data_ptr() == weights.shared.down_weight.data_ptr()


def test_split_needs_shared_experts() -> None:
    weights = load_moe_layer(GROUPED, 1)
    config = dataclasses.replace(weights.config, num_shared_experts=0)
    with pytest.raises(ArgumentError, match="layer 1, which has none"):
        split_shared(dataclasses.replace(weights, config=config, shared=None))


@pytest.mark.parametrize("sample", [GROUPED, TWO_SHARED], ids=lambda path: path.name)
def test_appended_experts_come_last_and_keep_their_scales(sample: Path) -> None:
    weights = load_moe_layer(sample, 1)
    shared = nvfp4_shared(weights)
    together = append_shared(weights.routed, shared)
    assert together.num_experts == 16 + shared.num_experts
    for name, tensor in vars(together).items():
        assert same_bits(tensor[:16], getattr(weights.routed, name))
        assert same_bits(tensor[16:], getattr(shared, name))


def test_wide_shared_mlp_cannot_be_appended_unsplit() -> None:
    weights = load_moe_layer(TWO_SHARED, 1)
    assert isinstance(weights.shared, Nvfp4Experts)
    with pytest.raises(TensorError, match=r"intermediate_size 128, got 256\. split_shared"):
        append_shared(weights.routed, weights.shared)


def test_appending_from_another_device_is_refused() -> None:
    weights = load_moe_layer(GROUPED, 1)
    with pytest.raises(TensorError, match="device cpu, got meta"):
        append_shared(weights.routed, nvfp4_shared(load_moe_layer(GROUPED, 1, device="meta")))


def test_common_input_scale_is_the_largest_and_leaves_the_rest() -> None:
    weights = load_moe_layer(GROUPED, 1)
    together = append_shared(weights.routed, nvfp4_shared(weights))
    scale = together.gate_up_input_scale.clone()
    scale[3, 1] *= 4
    scale[16, 0] *= 8
    unequal = dataclasses.replace(together, gate_up_input_scale=scale)
    common = common_input_scale(unequal)
    assert torch.equal(common.gate_up_input_scale, torch.full((17, 2), float(scale.max())))
    assert torch.equal(unequal.gate_up_input_scale, scale)
    for name, tensor in vars(common).items():
        if name != "gate_up_input_scale":
            assert tensor is getattr(unequal, name)


@pytest.mark.parametrize("sample", SAMPLES, ids=lambda path: path.name)
def test_samples_already_share_one_input_scale(sample: Path) -> None:
    weights = load_moe_layer(sample, 1)
    assert weights.input_scale_spread == 1.0
    assert torch.equal(common_input_scale(weights.routed).gate_up_input_scale, weights.routed.gate_up_input_scale)
