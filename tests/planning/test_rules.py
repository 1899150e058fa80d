from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from problem_fields import changed

from flashinfer_compat.errors import ExpertParallelismError, StrategyUnavailableError, UnknownNameError
from flashinfer_compat.features.target import Target
from flashinfer_compat.planning.plan import plan
from flashinfer_compat.planning.rules import PROBLEM_RULES, problem_reasons
from flashinfer_compat.problem import DEEPSEEK_R1, Problem
from flashinfer_compat.reasons import Reason, ReasonCode
from flashinfer_compat.signatures.recorded import releases
from flashinfer_compat.vocabulary import Backend, Strategy

R1_LOGITS = DEEPSEEK_R1
R1_TOPK = changed(DEEPSEEK_R1, routing_input="topk")
NO_SHARED: dict[str, Any] = {"num_shared_experts": 0, "shared_format": "none"}
UNGROUPED: dict[str, Any] = {"n_group": 1, "topk_group": 1}

EVERY_STRATEGY = ("native", "expanded", "split")
EVERY_BACKEND = ("trtllm", "triton", "cutile", "torch")
# cuTile has no expert parallelism at all.
PARALLEL = ("trtllm", "triton", "torch")

CASES: list[tuple[str, tuple[str, ...], tuple[str, ...], dict[str, Any]]] = [
    # The code that must be the only one, the strategies and backends it concerns, and the change that causes it.
    ("no_shared_experts", ("native", "expanded"), EVERY_BACKEND, NO_SHARED),
    ("shared_format", ("native", "expanded"), EVERY_BACKEND, {"shared_format": "bf16"}),
    ("expert_parallelism", ("native", "expanded"), EVERY_BACKEND, {"ep_size": 8}),
    ("shared_gate", ("native", "expanded"), EVERY_BACKEND, {"shared_gate": True}),
    ("expert_parallelism", ("split",), ("cutile",), {"ep_size": 8, "shared_placement": "sharded"}),
    ("shared_placement", ("split",), PARALLEL, {"ep_size": 8}),
    ("routed_scaling", EVERY_STRATEGY, EVERY_BACKEND, {"routed_scaling": "output"}),
    ("needs_logits", ("native",), EVERY_BACKEND, {"routing_input": "topk"}),
    ("needs_topk", ("expanded",), EVERY_BACKEND, {"routing_input": "logits"}),
    ("no_expert_groups", ("native",), ("trtllm",), UNGROUPED),
    ("activation", EVERY_STRATEGY, EVERY_BACKEND, {"activation": "relu2"}),
    ("numerics", EVERY_STRATEGY, ("trtllm",), {"numerics": "w4a16"}),
    ("numerics", EVERY_STRATEGY, ("cutile",), {"numerics": "w4a4"}),
    ("activation_scaling", EVERY_STRATEGY, ("triton",), {"activation_scaling": "per_token"}),
    ("hidden_size", EVERY_STRATEGY, ("trtllm",), {"hidden_size": 7168 + 64}),
    ("hidden_size", EVERY_STRATEGY, ("triton",), {"hidden_size": 7168 + 16}),
    ("intermediate_size", EVERY_STRATEGY, ("triton",), {"intermediate_size": 2048 + 16}),
    ("hidden_size", EVERY_STRATEGY, ("cutile",), {"hidden_size": 7168 + 32}),
    ("intermediate_size", EVERY_STRATEGY, ("cutile",), {"intermediate_size": 2048 + 32}),
]

KEPT: list[tuple[str, tuple[str, ...], tuple[str, ...], dict[str, Any]]] = [
    # What the strategies still take though it looks like a case above.
    ("bf16 beside the routed experts", ("split",), EVERY_BACKEND, {"shared_format": "bf16"}),
    ("no shared experts", ("split",), EVERY_BACKEND, NO_SHARED),
    ("one rank of eight, slices", ("split",), PARALLEL, {"ep_size": 8, "shared_placement": "sharded"}),
    ("one rank of eight, copies", ("split",), PARALLEL, {"ep_size": 8, "shared_placement": "replicated"}),
    ("one rank of eight, nothing to place", ("split",), PARALLEL, {"ep_size": 8, **NO_SHARED}),
    ("caller scales, nothing shared", ("split",), EVERY_BACKEND, {"routed_scaling": "output", **NO_SHARED}),
    ("another method scales", ("split",), EVERY_BACKEND, {**UNGROUPED, "routing_method": "renormalize"}),
    ("weights as they are", ("split",), EVERY_BACKEND, {"norm_topk_prob": False}),
    ("a gate of the shared experts", ("split",), EVERY_BACKEND, {"shared_gate": True}),
    ("geglu", EVERY_STRATEGY, EVERY_BACKEND, {"activation": "geglu"}),
    ("weights only", EVERY_STRATEGY, ("triton", "cutile", "torch"), {"numerics": "w4a16"}),
    ("a scale for each token", EVERY_STRATEGY, ("trtllm", "torch"), {"activation_scaling": "per_token"}),
    ("a hidden size of two NVFP4 blocks", EVERY_STRATEGY, ("triton",), {"hidden_size": 7168 + 32}),
    ("four NVFP4 blocks", EVERY_STRATEGY, ("cutile",), {"hidden_size": 7168 + 64, "intermediate_size": 2048 + 64}),
    ("a hidden size of NVFP4 blocks", EVERY_STRATEGY, ("torch",), {"hidden_size": 7168 + 16}),
]


def _base(strategy: Strategy, backend: Backend | None = None) -> Problem:
    problem = R1_TOPK if strategy is Strategy.EXPANDED else R1_LOGITS
    return changed(problem, numerics="w4a16") if backend is Backend.CUTILE else problem


def _always(strategy: Strategy, backend: Backend) -> set[str]:
    """What refuses every layer."""
    return {"no_router"} if (strategy, backend) == (Strategy.NATIVE, Backend.CUTILE) else set()


def _each(
    cases: list[tuple[str, tuple[str, ...], tuple[str, ...], dict[str, Any]]],
) -> Iterator[tuple[str, Strategy, Backend, Problem]]:
    for name, strategies, backends, change in cases:
        for strategy in map(Strategy, strategies):
            for backend in map(Backend, backends):
                yield name, strategy, backend, changed(_base(strategy, backend), **change)


def _codes(problem: Problem, strategy: Strategy, backend: Backend) -> set[str]:
    return {reason.code.value for reason in problem_reasons(problem, strategy, backend)}


@pytest.mark.parametrize("strategy", Strategy)
@pytest.mark.parametrize("backend", Backend)
def test_deepseek_r1_breaks_no_rule(strategy: Strategy, backend: Backend) -> None:
    assert _codes(_base(strategy, backend), strategy, backend) == _always(strategy, backend)


@pytest.mark.parametrize(("code", "strategy", "backend", "problem"), list(_each(CASES)))
def test_a_rule_alone_refuses(code: str, strategy: Strategy, backend: Backend, problem: Problem) -> None:
    assert _codes(problem, strategy, backend) == {code} | _always(strategy, backend)


@pytest.mark.parametrize(("name", "strategy", "backend", "problem"), list(_each(KEPT)))
def test_what_looks_refused_is_kept(name: str, strategy: Strategy, backend: Backend, problem: Problem) -> None:
    assert _codes(problem, strategy, backend) == _always(strategy, backend), name


@pytest.mark.parametrize("method", ["default", "renormalize", "llama4", "topk", "minimax2", "topk_sigmoid"])
def test_native_needs_deepseek_v3_routing(method: str) -> None:
    # A method without groups breaks the rule about groups as well.
    problem = changed(R1_LOGITS, routing_method=method, **UNGROUPED)
    assert _codes(problem, Strategy.NATIVE, Backend.TRTLLM) == {"routing_method", "no_expert_groups"}
    assert "routing_method" not in _codes(problem, Strategy.NATIVE, Backend.TORCH)


def test_the_cases_cover_every_rule() -> None:
    covered = {(code, strategy, backend) for code, strategy, backend, _ in _each(CASES)}
    covered.add(("routing_method", Strategy.NATIVE, Backend.TRTLLM))
    covered.add(("no_router", Strategy.NATIVE, Backend.CUTILE))
    # Never alone: what it asks to be said is of no use to cuTile.
    covered.add(("shared_placement", Strategy.SPLIT, Backend.CUTILE))
    ruled = {
        (rule.code.value, one, backend)
        for rule in PROBLEM_RULES
        for one in rule.strategies
        for backend in rule.backends
    }
    assert covered == ruled


def test_sentences_are_filled_in() -> None:
    for _, strategy, backend, problem in _each(CASES):
        for reason in problem_reasons(problem, strategy, backend):
            _check_sentence(reason)
            assert "{" not in reason.message


def _check_sentence(reason: Reason) -> None:
    assert isinstance(reason.code, ReasonCode)
    assert reason.message.endswith(".")
    assert len(reason.message.split()) >= 4
    assert not reason.way_out or reason.way_out.endswith(".") or reason.way_out.startswith("Run: ")


@pytest.mark.parametrize("release", ["0.2.9", "0.4.1", "0.5.0", "0.6.18.post1", "0.7.4"])
@pytest.mark.parametrize("architecture", ["sm100", "sm90", None])
def test_every_rejection_has_a_code_and_a_sentence_once(release: str, architecture: str | None) -> None:
    target = Target.from_release(release, architecture)
    for _, _, _, problem in [*_each(CASES), *_each(KEPT)]:
        try:
            rejected = plan(problem, target).rejected
        except StrategyUnavailableError as error:
            unknown = set(error.codes) - {code.value for code in ReasonCode}
            assert (unknown, bool(error.codes)) == (set(), True)  # noqa: PT017
            continue
        assert len(set(rejected)) == len(rejected)
        for rejection in rejected:
            _check_sentence(rejection.reason)
            assert f"[{rejection.reason.code.value}]" in str(rejection)


def test_the_plan_says_what_became_of_every_alternative() -> None:
    decision = plan(R1_LOGITS, Target.from_release("0.7.4", "sm100"))
    told = {(one.backend, one.strategy) for one in decision.rejected}
    assert told == {(one, other) for one in Backend for other in Strategy} - {(Backend.TRTLLM, Strategy.NATIVE)}
    by_alternative = {(one.backend.value, one.strategy.value): one.reason.code.value for one in decision.rejected}
    assert by_alternative == {
        ("trtllm", "expanded"): "needs_topk",
        ("trtllm", "split"): "not_preferred",
        ("triton", "native"): "not_preferred",
        ("triton", "expanded"): "needs_topk",
        ("triton", "split"): "not_preferred",
        ("cutile", "native"): "architecture",
        ("cutile", "expanded"): "architecture",
        ("cutile", "split"): "architecture",
        ("torch", "split"): "not_preferred",
        ("torch", "native"): "not_preferred",
        ("torch", "expanded"): "needs_topk",
    }


# What a kernel would ignore is done before the call.


@pytest.mark.parametrize(
    ("release", "change", "inside"),
    [
        ("0.7.4", {}, True),
        ("0.7.4", {"norm_topk_prob": False}, False),
        ("0.7.4", UNGROUPED, True),
        ("0.7.4", {**UNGROUPED, "norm_topk_prob": False}, False),
        # Only DeepSeekV3 and, since 0.6.13, MiniMax2 kernels scale.
        ("0.7.4", {**UNGROUPED, "routing_method": "minimax2"}, True),
        ("0.6.13", {**UNGROUPED, "routing_method": "minimax2"}, True),
        ("0.6.12", {**UNGROUPED, "routing_method": "minimax2"}, False),
        ("0.6.12", {**UNGROUPED, "routing_method": "minimax2", "routed_scaling_factor": 1.0}, True),
        ("0.7.4", {**UNGROUPED, "routing_method": "minimax2", "norm_topk_prob": False}, False),
        ("0.7.4", {**UNGROUPED, "routing_method": "renormalize"}, False),
        ("0.7.4", {**UNGROUPED, "routing_method": "renormalize", "routed_scaling_factor": 1.0}, True),
        ("0.7.4", {**UNGROUPED, "routing_method": "renormalize", "routed_scaling": "output", **NO_SHARED}, True),
        # Only SigmoidRenorm kernels read norm_topk_prob.
        (
            "0.7.4",
            {**UNGROUPED, "routing_method": "sigmoid_renorm", "routed_scaling_factor": 1.0, "norm_topk_prob": False},
            True,
        ),
        # Up to 0.6.2 the kernel keeps four groups, or all if fewer, whatever topk_group says.
        ("0.6.2", {}, True),
        ("0.6.2", {"topk_group": 2}, False),
        ("0.6.3", {"topk_group": 2}, True),
        ("0.6.2", {"n_group": 2, "num_experts": 64, "topk_group": 1}, False),
        ("0.6.2", {"n_group": 2, "num_experts": 64, "topk_group": 2}, True),
    ],
)
def test_what_a_kernel_would_ignore_is_done_before_the_call(release: str, change: dict[str, Any], inside: bool) -> None:
    decision = plan(changed(R1_LOGITS, **change), Target.from_release(release, "sm100"), strategy="split")
    assert decision.call is not None
    assert decision.call.routed_before is not inside
    assert any("Routing runs outside the kernel" in note for note in decision.notes) is not inside


def test_a_reason_of_both_entry_points_is_given_once() -> None:
    small = changed(R1_LOGITS, num_experts=64, top_k=4, activation="geglu")
    with pytest.raises(StrategyUnavailableError, match="no GeGLU") as caught:
        plan(small, Target.from_release("0.2.13", "sm100"), strategy="split")
    assert caught.value.codes == ("activation",)
    assert plan(small, Target.from_release("0.2.14", "sm100"), strategy="split").call is not None


# What it means to name a strategy or a backend.


@pytest.mark.parametrize("release", ["0.7.4", "0.6.17", "0.6.15.post1", "0.5.0"])
@pytest.mark.parametrize("given", ["logits", "topk"])
@pytest.mark.parametrize("strategy", ["native", "expanded", "split"])
def test_a_named_strategy_is_the_one_or_an_error(release: str, given: str, strategy: str) -> None:
    runs = {
        ("native", "logits"): release in ("0.7.4", "0.6.17"),
        ("native", "topk"): False,
        ("expanded", "logits"): False,
        ("expanded", "topk"): True,
        ("split", "logits"): True,
        ("split", "topk"): True,
    }[strategy, given]
    problem, target = changed(R1_LOGITS, routing_input=given), Target.from_release(release, "sm100")
    if runs:
        decision = plan(problem, target, strategy=strategy)
        assert (decision.strategy.value, decision.backend) == (strategy, Backend.TRTLLM)
    else:
        with pytest.raises(StrategyUnavailableError) as caught:
            plan(problem, target, strategy=strategy)
        assert f"strategy {strategy}" in str(caught.value)


@pytest.mark.parametrize(
    ("release", "change", "codes"),
    [
        ("0.6.15.post1", {}, ["keyword_missing"]),
        ("0.7.4", {"routing_input": "topk"}, ["needs_logits"]),
        ("0.7.4", UNGROUPED, ["no_expert_groups"]),
        ("0.7.4", {"shared_format": "bf16"}, ["shared_format"]),
        ("0.7.4", NO_SHARED, ["no_shared_experts"]),
        # Here FlashInfer itself is silently wrong, which is said besides.
        ("0.6.18.post1", UNGROUPED, ["no_expert_groups", "known_issue"]),
    ],
)
def test_a_refused_native_strategy_raises_with_the_codes(
    release: str, change: dict[str, Any], codes: list[str]
) -> None:
    with pytest.raises(StrategyUnavailableError) as caught:
        plan(changed(R1_LOGITS, **change), Target.from_release(release, "sm100"), strategy="native")
    assert list(caught.value.codes) == codes
    assert all(f"[{code}]" in str(caught.value) for code in codes)


@pytest.mark.parametrize("strategy", ["native", "expanded"])
@pytest.mark.parametrize("architecture", ["sm100", None])
def test_a_fused_strategy_under_expert_parallelism_is_not_implemented(strategy: str, architecture: str | None) -> None:
    problem = changed(_base(Strategy(strategy)), ep_size=8, shared_placement="replicated")
    with pytest.raises(NotImplementedError, match="expert parallel") as caught:
        plan(problem, Target.from_release("0.7.4", architecture), strategy=strategy)
    assert isinstance(caught.value, ExpertParallelismError)
    assert isinstance(caught.value, StrategyUnavailableError)
    assert set(caught.value.codes) == {"expert_parallelism"}


@pytest.mark.parametrize(("architecture", "backend"), [("sm100", Backend.TRTLLM), ("sm90", Backend.TRITON)])
def test_a_named_strategy_means_the_kernels_for_that_gpu(architecture: str, backend: Backend) -> None:
    for release in releases():
        target = Target.from_release(release, architecture)
        for problem in (R1_LOGITS, R1_TOPK):
            for strategy in Strategy:
                try:
                    decision = plan(problem, target, strategy=strategy)
                except StrategyUnavailableError:
                    continue
                assert decision.backend is backend


@pytest.mark.parametrize("strategy", Strategy)
def test_without_a_gpu_a_named_strategy_may_be_the_torch_backend(strategy: Strategy) -> None:
    decision = plan(_base(strategy), Target.from_release("0.7.4", None), strategy=strategy)
    assert (decision.strategy, decision.backend, decision.call) == (strategy, Backend.TORCH, None)


@pytest.mark.parametrize("strategy", Strategy)
@pytest.mark.parametrize("architecture", ["sm100", "sm90", None])
def test_the_torch_backend_runs_where_it_is_named(strategy: Strategy, architecture: str | None) -> None:
    target = Target.from_release("0.7.4", architecture)
    decision = plan(_base(strategy), target, strategy=strategy, backend="torch")
    assert (decision.strategy, decision.backend, decision.call) == (strategy, Backend.TORCH, None)
    assert plan(_base(strategy), target, backend=Backend.TORCH).strategy is Strategy.SPLIT


@pytest.mark.parametrize(("architecture", "codes"), [("sm90", {"architecture"}), (None, {"no_gpu"})])
def test_a_named_trtllm_backend_never_becomes_another(architecture: str | None, codes: set[str]) -> None:
    with pytest.raises(StrategyUnavailableError) as caught:
        plan(R1_LOGITS, Target.from_release("0.7.4", architecture), backend="trtllm", strategy="split")
    assert set(caught.value.codes) == codes


def test_without_flashinfer_the_torch_backend_runs() -> None:
    target = Target(None, "flashinfer is not installed.", "sm100", "2.13.0")
    assert plan(R1_LOGITS, target).backend is Backend.TORCH
    with pytest.raises(StrategyUnavailableError) as caught:
        plan(R1_LOGITS, target, backend="trtllm")
    assert set(caught.value.codes) == {"flashinfer_missing", "needs_topk"}


def test_without_torch_nothing_runs() -> None:
    with pytest.raises(StrategyUnavailableError) as caught:
        plan(R1_LOGITS, Target.from_release("0.7.4", "sm100", torch_version=None))
    assert set(caught.value.codes) == {"torch_missing", "needs_topk", "architecture", "numerics", "no_router"}


@pytest.mark.parametrize(
    ("arguments", "nearest"),
    [
        ({"strategy": "nativ"}, "native"),
        ({"strategy": "splitt"}, "split"),
        ({"strategy": "expand"}, "expanded"),
        ({"backend": "trt-llm"}, "trtllm"),
        ({"backend": "pytorch"}, "torch"),
        ({"require": "eligable"}, "eligible"),
    ],
)
def test_an_unknown_name_gives_the_nearest(arguments: dict[str, str], nearest: str) -> None:
    with pytest.raises(UnknownNameError, match=f"Did you mean '{nearest}'") as caught:
        plan(R1_LOGITS, Target.from_release("0.7.4", "sm100"), **arguments)
    assert caught.value.argument == next(iter(arguments))
    assert caught.value.nearest == nearest


def test_an_unknown_name_is_told_before_anything_else() -> None:
    with pytest.raises(UnknownNameError):
        plan(changed(R1_LOGITS, ep_size=8), Target(None, "none", None, None), strategy="fused")
