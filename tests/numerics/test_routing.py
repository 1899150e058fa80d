from __future__ import annotations

import dataclasses
import itertools
import json
import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file

from flashinfer_compat.errors import ArgumentError, TensorError
from flashinfer_compat.numerics import ROUTING_RULES, TopK, append_shared_experts, pack_topk, route, unpack_topk
from flashinfer_compat.vocabulary import RoutingMethod

if TYPE_CHECKING:
    from collections.abc import Iterable
    from pathlib import Path

M = RoutingMethod
SIGMOID_FIRST = {M.DEEPSEEK_V3, M.MINIMAX2, M.SIGMOID_RENORM, M.SIGMOID}
NORMALISING = [M.DEEPSEEK_V3, M.MINIMAX2, M.SIGMOID_RENORM, M.RENORMALIZE, M.RENORMALIZE_NAIVE]


@dataclass(frozen=True)
class Case:
    logits: list[list[float]]
    bias: list[float] | None
    method: RoutingMethod
    top_k: int
    n_group: int
    topk_group: int
    routed_scaling_factor: float
    norm_topk_prob: bool

    def route(self) -> TopK:
        bias = None if self.bias is None else torch.tensor(self.bias)
        return route(
            torch.tensor(self.logits),
            bias,
            method=self.method,
            top_k=self.top_k,
            n_group=self.n_group,
            topk_group=self.topk_group,
            routed_scaling_factor=self.routed_scaling_factor,
            norm_topk_prob=self.norm_topk_prob,
        )


@st.composite
def cases(draw: st.DrawFn, methods: Iterable[RoutingMethod] = RoutingMethod, min_groups: int = 0) -> Case:
    """A method on coarse grids of logits and biases, so that ties are common and everything else is well apart."""
    method = draw(st.sampled_from(list(methods)))
    n_group = draw(st.integers(min_groups, 4))
    groups = max(n_group, 1)
    num_experts = groups * draw(st.integers(2, 6))
    topk_group = draw(st.integers(1, groups))
    reachable = topk_group * num_experts // groups
    top_k = 1 if method is M.LLAMA4 else draw(st.integers(1, reachable))
    logit = st.integers(-8, 8).map(lambda n: n / 2)
    row = st.lists(logit, min_size=num_experts, max_size=num_experts)
    bias = st.lists(st.integers(-16, 16).map(lambda n: n / 32), min_size=num_experts, max_size=num_experts)
    return Case(
        logits=draw(st.lists(row, min_size=1, max_size=3)),
        bias=draw(st.none() | bias),
        method=method,
        top_k=top_k,
        n_group=n_group,
        topk_group=topk_group,
        routed_scaling_factor=draw(st.sampled_from([1.0, 2.5])),
        norm_topk_prob=draw(st.booleans()),
    )


def best(scores: list[float], count: int) -> list[int]:
    """Indices of the largest, the lower index first at a tie; rejects scores too close for float32 to order."""
    finite = sorted(s for s in scores if s > -math.inf)
    assume(all(a == b or b - a > 1e-6 * max(abs(a), abs(b)) for a, b in itertools.pairwise(finite)))
    return sorted(range(len(scores)), key=lambda i: (-scores[i], i))[:count]


def sigmoid(x: float) -> float:
    return 1 / (1 + math.exp(-x))


def slow_route(case: Case, logits: list[float]) -> tuple[list[int], list[float]]:
    """One token in Python floats, written from the kernels' description and not from the code under test."""
    experts = range(len(logits))
    top = max(logits)
    softmax_sum = sum(math.exp(x - top) for x in logits)
    if case.method in SIGMOID_FIRST:
        score = [sigmoid(x) for x in logits]
    elif case.method is M.DEFAULT:
        score = [math.exp(x - top) / softmax_sum for x in logits]
    else:
        score = list(logits)
    choice = list(score)
    if case.method in (M.DEEPSEEK_V3, M.MINIMAX2) and case.bias is not None:
        choice = [score[e] + case.bias[e] for e in experts]
    if case.method is M.DEEPSEEK_V3 and case.n_group > 1:
        size = len(logits) // case.n_group
        groups = [choice[g * size : (g + 1) * size] for g in range(case.n_group)]
        kept = best([sum(sorted(group, reverse=True)[:2]) for group in groups], case.topk_group)
        choice = [choice[e] if e // size in kept else -math.inf for e in experts]
    ids = best(choice, case.top_k)
    chosen = [score[e] for e in ids]
    if case.method in (M.RENORMALIZE, M.RENORMALIZE_NAIVE):
        total = sum(math.exp(x) for x in chosen)
        return ids, [math.exp(x) / total for x in chosen]
    if case.method in (M.LLAMA4, M.TOPK_SIGMOID):
        return ids, [sigmoid(x) for x in chosen]
    if case.method in (M.DEEPSEEK_V3, M.MINIMAX2):
        total = sum(chosen) if case.norm_topk_prob else 1.0
        return ids, [x / total for x in chosen]
    if case.method is M.SIGMOID_RENORM and case.norm_topk_prob:
        return ids, [x / sum(chosen) for x in chosen]
    return ids, chosen


@given(cases())
@settings(max_examples=300)
def test_routing_agrees_with_a_slow_rewrite(case: Case) -> None:
    rows = [slow_route(case, row) for row in case.logits]
    expected = [(ids, [x * case.routed_scaling_factor for x in weights]) for ids, weights in rows]
    ours = case.route()
    assert ours.ids.tolist() == [ids for ids, _ in expected]
    assert torch.allclose(ours.weights, torch.tensor([weights for _, weights in expected]), rtol=1e-5, atol=1e-7)


@given(cases())
def test_ids_are_distinct_in_range_and_typed(case: Case) -> None:
    ours = case.route()
    assert ours.ids.dtype == torch.int64
    assert ours.weights.dtype == torch.float32
    assert ours.ids.shape == ours.weights.shape == (len(case.logits), case.top_k)
    for row in ours.ids.tolist():
        assert len(set(row)) == case.top_k
        assert set(row) <= set(range(len(case.logits[0])))


@given(cases(methods=NORMALISING))
def test_weights_of_normalising_methods_sum_to_the_scale(case: Case) -> None:
    total = case.routed_scaling_factor
    assert dataclasses.replace(case, norm_topk_prob=True).route().weights.sum(dim=1).tolist() == pytest.approx(
        [total] * len(case.logits), rel=1e-5
    )


@given(cases(methods=[M.DEEPSEEK_V3], min_groups=2))
def test_only_topk_group_groups_are_used(case: Case) -> None:
    size = len(case.logits[0]) // case.n_group
    for row in case.route().ids.tolist():
        assert len({expert // size for expert in row}) <= case.topk_group


@pytest.mark.parametrize("method", RoutingMethod)
@pytest.mark.parametrize("num_experts", [13, 16, 37])
def test_among_equal_logits_the_lower_index_wins_anywhere_in_a_row(method: RoutingMethod, num_experts: int) -> None:
    logits = torch.randn(50, 1, generator=torch.Generator().manual_seed(0)).expand(-1, num_experts).contiguous()
    for row in logits:
        top_k = 1 if method is M.LLAMA4 else 3
        ours = route(row[None], None, method=method, top_k=top_k)
        assert ours.ids.tolist() == [list(range(top_k))]


def test_among_equal_groups_the_lower_index_wins() -> None:
    ours = route(torch.zeros(1, 12), None, method=M.DEEPSEEK_V3, top_k=6, n_group=4, topk_group=2)
    assert ours.ids.tolist() == [[0, 1, 2, 3, 4, 5]]


def test_a_bias_chooses_but_does_not_weigh() -> None:
    logits = torch.tensor([[2.0, 0.0, -2.0, 0.0]])
    bias = torch.tensor([-10.0, 0.0, 10.0, 0.0])
    ours = route(logits, bias, method=M.DEEPSEEK_V3, top_k=2, routed_scaling_factor=3.0)
    low, middle = sigmoid(-2.0), 0.5
    assert ours.ids.tolist() == [[2, 1]]
    assert ours.weights[0].tolist() == pytest.approx([3 * low / (low + middle), 3 * middle / (low + middle)], rel=1e-6)


def test_a_group_counts_by_its_two_best_biased_scores() -> None:
    # Group 0 has the best expert, group 1 the better pair.
    logits = torch.tensor([[4.0, -9.0, -9.0, 1.0, 1.0, -9.0]])
    ours = route(logits, None, method=M.DEEPSEEK_V3, top_k=2, n_group=2, topk_group=1)
    assert ours.ids.tolist() == [[3, 4]]


@pytest.mark.parametrize("method", [m for m in RoutingMethod if not ROUTING_RULES[m].uses_bias])
def test_bias_and_groups_have_no_effect_where_a_method_has_none(method: RoutingMethod) -> None:
    logits = torch.randn(5, 8, generator=torch.Generator().manual_seed(1))
    top_k = 1 if method is M.LLAMA4 else 3
    plain = route(logits, None, method=method, top_k=top_k)
    loaded = route(logits, torch.full((8,), 5.0), method=method, top_k=top_k, n_group=4, topk_group=1)
    assert torch.equal(plain.ids, loaded.ids)
    assert torch.equal(plain.weights, loaded.weights)


def test_every_method_has_a_rule() -> None:
    assert set(ROUTING_RULES) == set(RoutingMethod)


@pytest.mark.parametrize("method", [M.DEEPSEEK_V3, M.MINIMAX2, M.SIGMOID_RENORM])
def test_scores_that_underflow_give_zero_weights_not_nan(method: RoutingMethod) -> None:
    ours = route(torch.full((1, 4), -200.0), None, method=method, top_k=2)
    assert ours.weights.tolist() == [[0.0, 0.0]]


@pytest.mark.parametrize("method", RoutingMethod)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_no_tokens_give_empty_results(method: RoutingMethod, dtype: torch.dtype) -> None:
    ours = route(torch.empty(0, 8, dtype=dtype), None, method=method, top_k=1, n_group=4, topk_group=2)
    assert ours.ids.shape == ours.weights.shape == (0, 1)
    assert append_shared_experts(ours, 8, 2).ids.shape == (0, 3)


@pytest.mark.parametrize(
    ("arguments", "culprit"),
    [
        ({"top_k": 0}, "top_k"),
        ({"top_k": 9}, "top_k"),
        ({"top_k": 2, "method": M.LLAMA4}, "top_k"),
        ({"top_k": 2, "n_group": 3}, "n_group"),
        ({"top_k": 2, "n_group": 8}, "n_group"),
        ({"top_k": 2, "n_group": 4, "topk_group": 0}, "topk_group"),
        ({"top_k": 2, "n_group": 4, "topk_group": 5}, "topk_group"),
        ({"top_k": 3, "n_group": 4, "topk_group": 1}, "top_k"),
        ({"top_k": 2, "routed_scaling_factor": math.nan}, "routed_scaling_factor"),
        ({"top_k": 2, "routed_scaling_factor": 0.0}, "routed_scaling_factor"),
    ],
)
def test_numbers_out_of_range_are_refused(arguments: dict[str, object], culprit: str) -> None:
    with pytest.raises(ArgumentError) as caught:
        route(torch.zeros(2, 8), None, **{"method": M.DEEPSEEK_V3, **arguments})  # type: ignore[arg-type]
    assert caught.value.argument == culprit


@pytest.mark.parametrize(
    ("logits", "bias", "culprit"),
    [
        (torch.zeros(8), None, "logits"),
        (torch.zeros(2, 0), None, "logits"),
        (torch.zeros(2, 8, dtype=torch.float64), None, "logits"),
        (torch.zeros(2, 8), torch.zeros(7), "bias"),
        (torch.zeros(2, 8), torch.zeros(1, 8), "bias"),
        (torch.zeros(2, 8), torch.zeros(8, dtype=torch.int32), "bias"),
    ],
)
def test_tensors_that_do_not_fit_are_refused(logits: torch.Tensor, bias: torch.Tensor | None, culprit: str) -> None:
    with pytest.raises(TensorError) as caught:
        route(logits, bias, method=M.DEEPSEEK_V3, top_k=1)
    assert caught.value.argument == culprit


@pytest.mark.parametrize("name", ["grouped", "shared-bf16", "ungrouped-2-shared"])
def test_recorded_choices_of_transformers_are_reproduced(checkpoints: Path, name: str) -> None:
    config = json.loads((checkpoints / name / "config.json").read_text())
    io = load_file(checkpoints / name / "moe_io.safetensors")
    ours = route(
        io["router_logits"],
        io["e_score_correction_bias"],
        method=M.DEEPSEEK_V3,
        top_k=config["num_experts_per_tok"],
        n_group=config["n_group"],
        topk_group=config["topk_group"],
        routed_scaling_factor=config["routed_scaling_factor"],
        norm_topk_prob=config["norm_topk_prob"],
    )
    recorded = io["topk_ids"].sort(dim=1)
    mine = ours.ids.sort(dim=1)
    assert torch.equal(mine.values, recorded.values)
    expected = io["topk_weights"].gather(1, recorded.indices)
    assert torch.allclose(ours.weights.gather(1, mine.indices), expected, rtol=1e-5, atol=1e-5)


def test_shared_experts_follow_with_weight_one() -> None:
    topk = TopK(torch.tensor([[3, 1], [0, 2]]), torch.tensor([[0.25, 0.5], [2.0, 0.5]]))
    both = append_shared_experts(topk, 4, 2)
    assert both.ids.tolist() == [[3, 1, 4, 5], [0, 2, 4, 5]]
    assert both.weights.tolist() == [[0.25, 0.5, 1.0, 1.0], [2.0, 0.5, 1.0, 1.0]]
    assert both.ids.dtype == torch.int64
    none = append_shared_experts(topk, 4, 0)
    assert torch.equal(none.ids, topk.ids)
    assert torch.equal(none.weights, topk.weights)


@pytest.mark.parametrize(("num_experts", "num_shared"), [(0, 1), (4, -1)])
def test_impossible_numbers_of_experts_are_refused(num_experts: int, num_shared: int) -> None:
    with pytest.raises(ArgumentError):
        append_shared_experts(TopK(torch.zeros(1, 1, dtype=torch.int64), torch.ones(1, 1)), num_experts, num_shared)


@given(st.lists(st.tuples(st.integers(-1, 32767), st.integers(0, 0xFFFF)), min_size=1, max_size=8))
def test_packing_keeps_every_id_and_every_bf16_weight(pairs: list[tuple[int, int]]) -> None:
    ids = torch.tensor([i for i, _ in pairs])
    weights = torch.tensor([w for _, w in pairs], dtype=torch.int32).to(torch.int16).view(torch.bfloat16)
    packed = pack_topk(ids, weights)
    assert packed.dtype == torch.int32
    assert [(p >> 16, p & 0xFFFF) for p in packed.tolist()] == pairs
    back_ids, back_weights = unpack_topk(packed)
    assert back_ids.dtype == torch.int64
    assert torch.equal(back_ids, ids)
    torch.testing.assert_close(back_weights, weights.float(), rtol=0, atol=0, equal_nan=True)


def test_packing_rounds_float32_weights_to_bf16() -> None:
    _, weights = unpack_topk(pack_topk(torch.tensor([[7, 300]]), torch.tensor([[-0.3, 0.1]])))
    assert torch.equal(weights, torch.tensor([[-0.3, 0.1]]).bfloat16().float())


def test_what_cannot_be_packed_is_refused() -> None:
    ids, weights = torch.zeros(2, 2, dtype=torch.int64), torch.zeros(2, 2)
    with pytest.raises(TensorError, match="ids"):
        pack_topk(ids.float(), weights)
    with pytest.raises(TensorError, match="weights: expected float32"):
        pack_topk(ids, weights.half())
    with pytest.raises(TensorError, match="weights: expected shape"):
        pack_topk(ids, weights[:1])
    with pytest.raises(TensorError, match="packed"):
        unpack_topk(ids)
