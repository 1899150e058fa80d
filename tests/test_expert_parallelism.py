"""Under expert parallelism the ranks' outputs add up to one rank's: R + S, never R + n * S."""

from __future__ import annotations

from pathlib import Path

import pytest

torch = pytest.importorskip("torch")

import standin  # noqa: E402
from comparison import error  # noqa: E402
from safetensors.torch import load_file  # noqa: E402

import flashinfer_compat as fc  # noqa: E402

SAMPLES = ("grouped", "shared-bf16", "ungrouped-2-shared")
PLACEMENTS = ("replicated", "sharded")


def ranks(folder: Path, size: int, placement: str) -> list[fc.MoELayerWeights]:
    return [fc.load_moe_layer(folder, 1, ep_rank=one, ep_size=size, shared_placement=placement) for one in range(size)]


def routing(folder: Path, kind: str) -> fc.LogitsRouting | fc.TopKRouting:
    io = load_file(folder / "moe_io.safetensors")
    if kind == "topk":
        return fc.TopKRouting(io["topk_ids"], io["topk_weights"])
    return fc.LogitsRouting(io["router_logits"], io["e_score_correction_bias"])


@pytest.mark.parametrize("kind", ["logits", "topk"])
@pytest.mark.parametrize("placement", PLACEMENTS)
@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("name", SAMPLES)
def test_ranks_of_the_torch_backend_add_up(checkpoints: Path, name: str, size: int, placement: str, kind: str) -> None:
    folder = checkpoints / name
    x = load_file(folder / "moe_io.safetensors")["hidden_states"].float()

    def run(weights: fc.MoELayerWeights) -> torch.Tensor:
        layer = fc.prepare(weights, fc.plan(weights.problem(kind), backend="torch", strategy="split"))
        return fc.fp4_moe(x, layer, routing(folder, kind))

    parts = [run(weights) for weights in ranks(folder, size, placement)]
    assert all(float(part.abs().max()) > 0 for part in parts)
    # In w4a4 the cut of a bf16 or NVFP4 shared expert changes nothing but the order of sums.
    assert error(torch.stack(parts).sum(0), run(fc.load_moe_layer(folder, 1))) <= 1e-6


@pytest.mark.parametrize("kind", ["logits", "topk"])
@pytest.mark.parametrize("placement", PLACEMENTS)
@pytest.mark.parametrize("release", ["0.5.3", "0.6.12", "0.7.4"])
@pytest.mark.parametrize("name", ["grouped", "shared-bf16"])
def test_ranks_of_the_kernels_add_up(checkpoints: Path, name: str, release: str, placement: str, kind: str) -> None:
    folder = checkpoints / name
    x = load_file(folder / "moe_io.safetensors")["hidden_states"]
    target = fc.Target.from_release(release, "sm100")
    offsets = []

    def run(weights: fc.MoELayerWeights) -> torch.Tensor:
        with standin.installed(release) as flashinfer:
            layer = fc.prepare(weights, fc.plan(weights.problem(kind), target, strategy="split"))
            output = fc.fp4_moe(x, layer, routing(folder, kind))
        assert not any(call.garbage for call in flashinfer.calls)
        call = next(one for one in flashinfer.calls if one.name.startswith("trtllm_fp4"))
        offsets.append((call.arguments["local_expert_offset"], call.arguments["local_num_experts"]))
        return output

    parts = [run(weights) for weights in ranks(folder, 2, placement)]
    assert offsets == [(0, 8), (8, 8)]
    # Each rank rounds its part to bf16.
    assert error(torch.stack(parts).float().sum(0), run(fc.load_moe_layer(folder, 1))) <= 5e-3


def test_a_replicated_shared_expert_is_added_by_one_rank_only(checkpoints: Path) -> None:
    assert [one.adds_shared for one in ranks(checkpoints / "grouped", 4, "replicated")] == [True, False, False, False]
    assert all(one.adds_shared for one in ranks(checkpoints / "grouped", 4, "sharded"))


def test_every_rank_quantizes_with_the_scale_of_all(checkpoints: Path) -> None:
    whole = fc.load_moe_layer(checkpoints / "grouped", 1)
    largest = float(whole.routed.gate_up_input_scale.max())
    assert {one.routed_input_scale for one in ranks(checkpoints / "grouped", 4, "sharded")} == {largest}


def test_ranks_hold_the_checkpoints_experts_in_order(checkpoints: Path) -> None:
    whole = fc.load_moe_layer(checkpoints / "grouped", 1)
    parts = ranks(checkpoints / "grouped", 4, "sharded")
    assert torch.equal(torch.cat([one.routed.down_weight for one in parts]), whole.routed.down_weight)
    assert [one.local_expert_offset for one in parts] == [0, 4, 8, 12]
    assert torch.equal(torch.cat([one.shared.gate_up_weight for one in parts], 2), whole.shared.gate_up_weight)


def test_tensor_and_expert_parallelism_together(checkpoints: Path) -> None:
    folder = checkpoints / "grouped"
    x = load_file(folder / "moe_io.safetensors")["hidden_states"].float()
    for placement in PLACEMENTS:
        total = torch.zeros_like(x)
        for ep_rank in range(2):
            for tp_rank in range(2):
                weights = fc.load_moe_layer(
                    folder, 1, tp_rank=tp_rank, tp_size=2, ep_rank=ep_rank, ep_size=2, shared_placement=placement
                )
                layer = fc.prepare(weights, fc.plan(weights.problem("topk"), backend="torch"))
                total += fc.fp4_moe(x, layer, routing(folder, "topk"))
        whole = fc.load_moe_layer(folder, 1)
        layer = fc.prepare(whole, fc.plan(whole.problem("topk"), backend="torch", strategy="split"))
        assert error(total, fc.fp4_moe(x, layer, routing(folder, "topk"))) <= 1e-6


@pytest.mark.parametrize(
    ("arguments", "argument"),
    [
        ({"ep_size": 2}, "shared_placement"),
        ({"ep_size": 3, "shared_placement": "sharded"}, "ep_size"),
        ({"ep_size": 0}, "ep_size"),
        ({"ep_size": 2, "ep_rank": 2, "shared_placement": "sharded"}, "ep_rank"),
        ({"ep_size": 2, "shared_placement": "halved"}, "shared_placement"),
        ({"ep_size": 16, "shared_placement": "sharded"}, "ep_size * tp_size"),
    ],
)
def test_what_cannot_be_loaded_is_named(checkpoints: Path, arguments: dict[str, object], argument: str) -> None:
    with pytest.raises((fc.ArgumentError, fc.UnknownNameError)) as caught:
        fc.load_moe_layer(checkpoints / "grouped", 1, **arguments)
    assert caught.value.argument == argument


def test_fused_strategies_are_refused(checkpoints: Path) -> None:
    weights = ranks(checkpoints / "grouped", 2, "replicated")[0]
    for strategy in ("native", "expanded"):
        with pytest.raises(fc.ExpertParallelismError):
            fc.plan(weights.problem("logits"), fc.Target.from_release("0.7.4", "sm100"), strategy=strategy)
