from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import torch
from checkpoint_variants import MLP, SAMPLES, dense_weights, layer_output, same_bits, sample_tensors
from safetensors.torch import load_file

from flashinfer_compat.errors import ArgumentError
from flashinfer_compat.weights.checkpoint import load_moe_layer

if TYPE_CHECKING:
    from pathlib import Path

    from flashinfer_compat.weights.values import MoELayerWeights


def ranks(sample: Path, size: int) -> list[MoELayerWeights]:
    return [load_moe_layer(sample, 1, tp_rank=rank, tp_size=size) for rank in range(size)]


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("sample", SAMPLES, ids=lambda path: path.name)
def test_rank_outputs_add_up_to_the_layer(sample: Path, size: int) -> None:
    recorded = load_file(sample / "moe_io.safetensors")
    inputs = recorded["hidden_states"][:9], recorded["topk_ids"][:9], recorded["topk_weights"][:9]
    whole = layer_output(load_moe_layer(sample, 1), *inputs)
    parts = torch.stack([layer_output(weights, *inputs) for weights in ranks(sample, size)])
    assert float(parts[0].abs().max()) > 0
    torch.testing.assert_close(parts.sum(0), whole, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("sample", SAMPLES, ids=lambda path: path.name)
def test_rank_slices_join_to_the_whole_weights(sample: Path, size: int) -> None:
    whole = load_moe_layer(sample, 1)
    parts = ranks(sample, size)
    assert [(part.tp_rank, part.tp_size) for part in parts] == [(rank, size) for rank in range(size)]
    for name in ("routed", "shared"):
        gate_up, down = dense_weights(getattr(whole, name))
        slices = [dense_weights(getattr(part, name)) for part in parts]
        assert torch.equal(torch.cat([part[0] for part in slices], 2), gate_up)
        assert torch.equal(torch.cat([part[1] for part in slices], 2), down)


def test_a_rank_holds_the_stored_rows_columns_and_whole_scales() -> None:
    sample = SAMPLES[0]
    stored = sample_tensors(sample)
    routed = load_moe_layer(sample, 1, tp_rank=3, tp_size=4).routed
    whole = load_moe_layer(sample, 1)
    name = MLP + "experts.9."
    assert same_bits(routed.gate_up_weight[9, 1], stored[name + "up_proj.weight"][96:128])
    assert same_bits(routed.gate_up_block_scale[9, 1], stored[name + "up_proj.weight_scale"][96:128])
    assert same_bits(routed.down_weight[9], stored[name + "down_proj.weight"][:, 48:64])
    assert same_bits(routed.down_block_scale[9], stored[name + "down_proj.weight_scale"][:, 6:8])
    for scale in ("gate_up_global_scale", "gate_up_input_scale", "down_global_scale", "down_input_scale"):
        assert torch.equal(getattr(routed, scale), getattr(whole.routed, scale))


def test_router_is_whole_on_every_rank() -> None:
    whole, part = load_moe_layer(SAMPLES[0], 1), load_moe_layer(SAMPLES[0], 1, tp_rank=1, tp_size=2)
    assert same_bits(part.router.weight, whole.router.weight)
    assert part.config == whole.config


def test_slices_are_contiguous() -> None:
    weights = load_moe_layer(SAMPLES[2], 1, tp_rank=1, tp_size=2)
    tensors = [*vars(weights.routed).values(), *vars(weights.shared).values()]
    assert all(tensor.is_contiguous() for tensor in tensors)


@pytest.mark.parametrize("size", [0, -1, 3, 16])
def test_size_that_does_not_fit_names_those_that_do(size: int) -> None:
    with pytest.raises(ArgumentError) as caught:
        load_moe_layer(SAMPLES[0], 1, tp_size=size)
    assert caught.value.argument == "tp_size"
    assert caught.value.expected.endswith("multiples of 16: 1, 2, 4, 8")
    assert caught.value.actual == str(size)


@pytest.mark.parametrize("rank", [-1, 2])
def test_rank_out_of_range_is_refused(rank: int) -> None:
    with pytest.raises(ArgumentError) as caught:
        load_moe_layer(SAMPLES[0], 1, tp_rank=rank, tp_size=2)
    assert caught.value.argument == "tp_rank"
