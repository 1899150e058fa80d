"""What a measured policy does to a plan."""

from __future__ import annotations

from dataclasses import replace

import pytest
from measured_values import H200, row
from problem_fields import changed

from flashinfer_compat.features.target import Target
from flashinfer_compat.planning.decision import Plan
from flashinfer_compat.planning.plan import plan
from flashinfer_compat.policy import PolicyRow
from flashinfer_compat.problem import DEEPSEEK_R1
from flashinfer_compat.reasons import ReasonCode
from flashinfer_compat.self_checks import CheckedKind, SelfCheck
from flashinfer_compat.vocabulary import Backend, Evidence, Strategy

TOPK = changed(DEEPSEEK_R1, routing_input="topk", numerics="w4a16")
SM90 = Target.from_release("0.7.4", "sm90")
SM100 = Target.from_release("0.7.4", "sm100")
LATER = row({1: (90, 103), 512: (300, 270)}, 512)
ALWAYS = row({1: (90, 80), 512: (300, 270)}, 1)
NEVER = row({1: (90, 103), 512: (300, 320)}, None)


def told(*rows: PolicyRow, target: Target = SM90) -> Target:
    return replace(target, policy=rows)


def on_trtllm(one: PolicyRow) -> PolicyRow:
    origin = replace(H200, gpu="NVIDIA B200", architecture="sm100")
    return replace(one, backend=Backend.TRTLLM, numerics=TOPK_W4A4.numerics, origin=origin)


TOPK_W4A4 = changed(TOPK, numerics="w4a4")


def policy_rejections(found: Plan) -> list[tuple[Strategy, Backend]]:
    return [(one.strategy, one.backend) for one in found.rejected if one.reason.code is ReasonCode.POLICY]


def test_triton_switches_at_the_measured_number_of_tokens() -> None:
    found = plan(TOPK, told(LATER))
    assert (found.strategy, found.backend, found.split_from_tokens) == (Strategy.EXPANDED, Backend.TRITON, 512)
    assert found.to_dict()["split_from_tokens"] == 512
    (note,) = found.notes
    assert "Measured on NVIDIA H200, 2026-11-30: split is preferred from 512 tokens on" in note
    assert "270 us" in note
    assert "300" in note
    assert policy_rejections(found) == []


def test_from_one_token_on_split_is_chosen() -> None:
    found = plan(TOPK, told(ALWAYS))
    assert (found.strategy, found.backend, found.split_from_tokens) == (Strategy.SPLIT, Backend.TRITON, None)
    assert policy_rejections(found) == [(Strategy.EXPANDED, Backend.TRITON)]
    assert any("split is preferred from 1 tokens on" in note for note in found.notes)


def test_where_fused_is_faster_nothing_changes() -> None:
    assert plan(TOPK, told(NEVER)) == plan(TOPK, SM90)


def test_fewer_tokens_than_were_measured_stay_fused() -> None:
    found = plan(TOPK, told(row({64: (100, 90), 512: (300, 270)}, 64)))
    assert (found.strategy, found.split_from_tokens) == (Strategy.EXPANDED, 64)


@pytest.mark.parametrize("strategy", ["expanded", "split"])
def test_a_strategy_that_is_named_is_taken(strategy: str) -> None:
    for one in (LATER, ALWAYS):
        assert plan(TOPK, told(one), strategy=strategy) == plan(TOPK, SM90, strategy=strategy)


def test_a_backend_that_is_named_is_still_advised() -> None:
    assert plan(TOPK, told(LATER), backend="triton").split_from_tokens == 512


@pytest.mark.parametrize(
    "change",
    [
        {"hidden_size": 6144},
        {"intermediate_size": 256},
        {"num_experts": 128},
        {"top_k": 6},
        {"num_shared_experts": 2},
        {"numerics": "w4a4"},
        {"routing_input": "logits"},
    ],
)
def test_it_speaks_of_exactly_what_was_measured(change: dict[str, object]) -> None:
    problem = changed(TOPK, **change)
    assert plan(problem, told(LATER)) == plan(problem, SM90)
    assert plan(problem, told(ALWAYS)) == plan(problem, SM90)


def test_a_row_of_another_architecture_says_nothing() -> None:
    elsewhere = replace(SM90, architecture="sm80")
    assert plan(TOPK, told(LATER, target=elsewhere)) == plan(TOPK, elsewhere)


def test_a_backend_with_one_layout_keeps_fused_and_says_so() -> None:
    found = plan(TOPK_W4A4, told(on_trtllm(LATER), target=SM100))
    plain = plan(TOPK_W4A4, SM100)
    assert (found.strategy, found.backend, found.split_from_tokens) == (Strategy.EXPANDED, Backend.TRTLLM, None)
    (note,) = set(found.notes) - set(plain.notes)
    assert "preferred from 512 tokens on" in note
    assert "strategy='split'" in note


@pytest.mark.parametrize("first", [1, 64])
def test_a_backend_with_one_layout_takes_split_where_it_was_always_faster(first: int) -> None:
    one = on_trtllm(row({first: (90, 80), 512: (300, 270)}, first))
    found = plan(TOPK_W4A4, told(one, target=SM100))
    assert (found.strategy, found.backend) == (Strategy.SPLIT, Backend.TRTLLM)
    assert found.call == plan(TOPK_W4A4, SM100, strategy="split").call
    assert policy_rejections(found) == [(Strategy.EXPANDED, Backend.TRTLLM)]


def test_rounding_that_differs_is_told_in_w4a4_only() -> None:
    for one in (LATER, ALWAYS):
        plain = plan(TOPK, told(one))
        rounded = plan(TOPK_W4A4, told(replace(one, numerics=TOPK_W4A4.numerics)))
        assert rounded.strategy is plain.strategy
        assert any("round activations differently" in note for note in rounded.notes)
        assert not any("round activations differently" in note for note in plain.notes)


def test_a_refuted_split_is_not_run_for_its_speed() -> None:
    kind = CheckedKind.of(TOPK, Strategy.SPLIT, Backend.TRITON)
    check = SelfCheck(kind, Evidence.REFUTED, 0.5, 1e-2, 10.0, "it is wrong")
    for one in (LATER, ALWAYS):
        found = plan(TOPK, replace(told(one), self_checks=(check,)))
        assert (found.strategy, found.split_from_tokens) == (Strategy.EXPANDED, None)


def test_requiring_more_evidence_than_split_has_keeps_fused() -> None:
    kind = CheckedKind.of(TOPK, Strategy.EXPANDED, Backend.TRITON)
    target = replace(told(ALWAYS), self_checks=(SelfCheck(kind, Evidence.VERIFIED, 1e-3, 1e-2, 10.0, ""),))
    found = plan(TOPK, target, require="verified")
    assert (found.strategy, found.split_from_tokens, found.status) == (Strategy.EXPANDED, None, Evidence.VERIFIED)
