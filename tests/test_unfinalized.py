"""The layer's output before the sum: its slots, and that the sum is the output."""

from __future__ import annotations

from pathlib import Path

import pytest

torch = pytest.importorskip("torch")

import standin  # noqa: E402
from comparison import error  # noqa: E402
from safetensors.torch import load_file  # noqa: E402

import flashinfer_compat as fc  # noqa: E402

T, H, K, S = 33, 256, 4, 1
CASES = [
    (release, *way)
    for release in ("0.2.10", "0.5.2", "0.5.3", "0.6.12", "0.6.14", "0.6.17", "0.7.4")
    for way in (("native", "logits"), ("expanded", "topk"), ("split", "logits"), ("split", "topk"))
    if not (way[0] == "native" and release < "0.6.17")
]


def routing(io: dict[str, torch.Tensor], kind: str) -> fc.LogitsRouting | fc.TopKRouting:
    if kind == "topk":
        return fc.TopKRouting(io["topk_ids"], io["topk_weights"])
    return fc.LogitsRouting(io["router_logits"], io["e_score_correction_bias"])


@pytest.fixture(scope="module")
def sample(checkpoints: Path) -> tuple[dict[str, torch.Tensor], fc.MoELayerWeights]:
    folder = checkpoints / "grouped"
    return load_file(folder / "moe_io.safetensors"), fc.load_moe_layer(folder, 1)


@pytest.mark.parametrize(("release", "strategy", "kind"), CASES)
def test_the_sum_of_the_kernels_rows_is_the_output(
    sample: tuple[dict[str, torch.Tensor], fc.MoELayerWeights], release: str, strategy: str, kind: str
) -> None:
    io, weights = sample
    plan = fc.plan(weights.problem(kind), fc.Target.from_release(release, "sm100"), strategy=strategy)
    with standin.installed(release):
        layer = fc.prepare(weights, plan)
        result = fc.fp4_moe_unfinalized(io["hidden_states"], layer, routing(io, kind))
        expected = fc.fp4_moe(io["hidden_states"], layer, routing(io, kind))
    slots = K + (S if plan.strategy.is_fused else 0)
    assert tuple(result.expert_weights.shape) == tuple(result.expanded_idx_to_permuted_idx.shape) == (T, slots)
    assert result.expanded_idx_to_permuted_idx.dtype == torch.int32
    assert result.expert_weights.dtype in (torch.bfloat16, torch.float32)
    assert (result.shared_output is None) == plan.strategy.is_fused
    if plan.strategy.is_fused:
        assert bool((result.expert_weights[:, K:] == 1.0).all())
    # The kernel rounds the routed sum before the shared expert is added; finalize rounds once.
    assert error(result.finalize(), expected) <= 5e-3


@pytest.mark.parametrize("strategy", ["split", "expanded"])
def test_the_reference_gives_it_too(sample: tuple[dict[str, torch.Tensor], fc.MoELayerWeights], strategy: str) -> None:
    io, weights = sample
    layer = fc.prepare(weights, fc.plan(weights.problem("topk"), backend="torch", strategy=strategy))
    result = fc.fp4_moe_unfinalized(io["hidden_states"], layer, routing(io, "topk"))
    assert result.expert_weights.shape == (T, K + (strategy == "expanded"))
    assert error(result.finalize(), fc.fp4_moe(io["hidden_states"], layer, routing(io, "topk"))) <= 5e-3


@pytest.mark.parametrize("backend", ["torch", "trtllm"])
def test_slots_of_other_ranks_have_no_row(checkpoints: Path, backend: str) -> None:
    folder = checkpoints / "grouped"
    io = load_file(folder / "moe_io.safetensors")
    total = torch.zeros(T, H)
    with standin.installed("0.7.4"):
        target = fc.Target.from_release("0.7.4", "sm100")
        for rank in range(2):
            weights = fc.load_moe_layer(folder, 1, ep_rank=rank, ep_size=2, shared_placement="replicated")
            layer = fc.prepare(weights, fc.plan(weights.problem("topk"), target, backend=backend, strategy="split"))
            result = fc.fp4_moe_unfinalized(io["hidden_states"], layer, routing(io, "topk"))
            assert torch.equal(result.expanded_idx_to_permuted_idx >= 0, io["topk_ids"] // 8 == rank)
            assert (result.shared_output is None) == (rank == 1)
            total += result.finalize().float()
    assert error(total, io["output_w4a4"]) <= 3e-2


@pytest.mark.parametrize("backend", ["torch", "trtllm"])
def test_no_tokens(sample: tuple[dict[str, torch.Tensor], fc.MoELayerWeights], backend: str) -> None:
    io, weights = sample
    with standin.installed("0.7.4"):
        target = fc.Target.from_release("0.7.4", "sm100")
        layer = fc.prepare(weights, fc.plan(weights.problem("topk"), target, backend=backend, strategy="expanded"))
        empty = fc.TopKRouting(io["topk_ids"][:0], io["topk_weights"][:0])
        result = fc.fp4_moe_unfinalized(io["hidden_states"][:0], layer, empty)
    assert tuple(result.expert_weights.shape) == (0, K + S)
    assert tuple(result.finalize().shape) == (0, H)


def test_a_buffer_for_the_sum_is_refused(sample: tuple[dict[str, torch.Tensor], fc.MoELayerWeights]) -> None:
    io, weights = sample
    layer = fc.prepare(weights, fc.plan(weights.problem("topk"), backend="torch"))
    options = fc.CallOptions(output=torch.zeros_like(io["hidden_states"]))
    with pytest.raises(fc.ArgumentError, match="final sum"):
        fc.fp4_moe_unfinalized(io["hidden_states"], layer, routing(io, "topk"), options)
