"""What holds for every plan, whatever the layer, the release and the GPU."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import HealthCheck, event, given, settings
from hypothesis import strategies as st
from packaging.version import Version
from problem_fields import changed

from flashinfer_compat.architectures import ARCHITECTURES
from flashinfer_compat.errors import ArgumentError, FlashInferCompatError
from flashinfer_compat.features.target import FlashInfer, Target, behaviour_of
from flashinfer_compat.planning.decision import KernelCall, Plan
from flashinfer_compat.planning.plan import AUTO, plan
from flashinfer_compat.problem import DEEPSEEK_R1, Problem
from flashinfer_compat.signatures.recorded import recorded, releases
from flashinfer_compat.vocabulary import (
    Activation,
    Backend,
    Evidence,
    Numerics,
    RoutedScaling,
    RoutingInput,
    RoutingMethod,
    SharedExpertFormat,
    SharedExpertPlacement,
    Strategy,
)

LOGITS_ENTRY = "trtllm_fp4_block_scale_moe"
ROUTED_ENTRY = "trtllm_fp4_block_scale_routed_moe"
RELEASES = tuple(release for release in releases() if not Version(release).is_prerelease)

# Sizes of real layers, sizes next to limits, and any.
SIZES = {
    "hidden_size": st.sampled_from([128, 1024, 7168, 7168 + 64, 7168 + 8, 16]),
    "intermediate_size": st.sampled_from([16, 64, 1408, 2048, 2000, 2050]),
    "num_experts": st.sampled_from([4, 8, 16, 60, 64, 128, 160, 256, 260, 384, 512, 1024]) | st.integers(-1, 2100),
    "top_k": st.sampled_from([1, 4, 6, 8, 9, 10, 22, 32]) | st.integers(-1, 40),
    "num_shared_experts": st.sampled_from([0, 1, 2]) | st.integers(-1, 33),
    "n_group": st.sampled_from([1, 2, 4, 8]) | st.integers(-1, 12),
    "topk_group": st.sampled_from([1, 2, 4]) | st.integers(-1, 12),
    "routed_scaling_factor": st.sampled_from([1.0, 2.5, 0.0, -1.0, float("nan"), float("inf")]),
    "norm_topk_prob": st.booleans(),
    "ep_size": st.sampled_from([1, 1, 2, 8]) | st.integers(-1, 9),
}
NAMES = {
    "shared_format": st.sampled_from(SharedExpertFormat),
    "routing_method": st.sampled_from(RoutingMethod),
    "routing_input": st.sampled_from(RoutingInput),
    "routed_scaling": st.sampled_from(RoutedScaling),
    "activation": st.sampled_from(Activation),
    "numerics": st.sampled_from(Numerics),
    "shared_placement": st.sampled_from(SharedExpertPlacement) | st.none(),
}
ANY_FIELDS: dict[str, st.SearchStrategy[Any]] = {**SIZES, **NAMES}
ORDINARY_FIELDS: dict[str, st.SearchStrategy[Any]] = {
    "intermediate_size": st.sampled_from([64, 1408, 2000, 2048]),
    "num_experts": st.sampled_from([32, 64, 104, 128, 160, 256, 384]),
    "top_k": st.sampled_from([1, 4, 6, 7, 8, 9, 10, 22]),
    "num_shared_experts": st.sampled_from([0, 1, 2, 4]),
    "shared_format": st.sampled_from([SharedExpertFormat.NVFP4, SharedExpertFormat.BF16]),
    "routing_method": NAMES["routing_method"],
    "n_group": st.sampled_from([1, 2, 4, 8]),
    "topk_group": st.sampled_from([1, 2, 4]),
    "norm_topk_prob": st.booleans(),
    "activation": st.sampled_from([Activation.SWIGLU, Activation.GEGLU]),
    "ep_size": st.sampled_from([1, 2, 8]),
    "shared_placement": NAMES["shared_placement"],
}


@st.composite
def valid_problems(draw: st.DrawFn) -> Problem:
    """DeepSeek-R1's layer with a few fields changed at a time, so that most are possible and many runnable."""
    changes: dict[str, Any] = {"routing_input": draw(NAMES["routing_input"])}
    fields = draw(st.sampled_from([ORDINARY_FIELDS, ORDINARY_FIELDS, ANY_FIELDS]))
    for name in draw(st.lists(st.sampled_from(sorted(fields)), max_size=4)):
        changes[name] = draw(fields[name])
    if changes.get("routing_method", RoutingMethod.DEEPSEEK_V3) is not RoutingMethod.DEEPSEEK_V3:
        changes |= {"n_group": 1, "topk_group": 1}
    if changes.get("ep_size", 1) > 1:
        changes["shared_placement"] = draw(NAMES["shared_placement"])
    if "num_shared_experts" in changes or "shared_format" in changes:
        count, kind = max(0, changes.get("num_shared_experts", 1)), changes.get("shared_format")
        none = count == 0 or kind is SharedExpertFormat.NONE
        changes["num_shared_experts"] = 0 if none else count
        changes["shared_format"] = SharedExpertFormat.NONE if none else kind or SharedExpertFormat.NVFP4
    try:
        return changed(DEEPSEEK_R1, **changes)
    except ArgumentError:
        return changed(DEEPSEEK_R1, routing_input=changes["routing_input"])


@st.composite
def targets(draw: st.DrawFn) -> Target:
    """Recorded releases, builds whose number and signatures disagree, and no FlashInfer at all."""
    architecture = draw(st.sampled_from([*["sm100", "sm103", "sm107"] * 5, *ARCHITECTURES, None]))
    torch_version = draw(st.sampled_from([*["2.13.0"] * 9, None]))
    release = draw(st.sampled_from([*releases(), *["0.6.12", "0.6.17", "0.7.0", "0.7.4"] * 25]))
    kind = draw(st.sampled_from([*["recorded"] * 6, *["mixed"] * 3, "none"]))
    if kind == "none":
        return Target(None, "flashinfer is not installed.", architecture, torch_version)
    if kind == "recorded":
        return Target.from_release(release, architecture, torch_version)
    symbols = recorded(release).symbols
    version = draw(st.sampled_from([*RELEASES, "0.6.16.dev1", "0.7.0.dev1", "0.9.0", "0.0.0+unknown", "strange"]))
    return Target(FlashInfer(version, symbols, *behaviour_of(version, symbols)), "", architecture, torch_version)


CHOICES = {
    "strategy": st.sampled_from([*[AUTO] * 9, *Strategy]),
    "backend": st.sampled_from([*[AUTO] * 6, *Backend]),
    "require": st.sampled_from([*[None] * 12, *Evidence]),
}
FEW = settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.too_slow])


@given(st.fixed_dictionaries(ANY_FIELDS))
@FEW
def test_any_fields_make_a_problem_or_an_argument_error(fields: dict[str, Any]) -> None:
    try:
        problem = Problem(**fields)
    except ArgumentError as error:
        refusal: ArgumentError = error
    else:
        event("made")
        assert Problem(**problem.to_dict()) == problem
        json.dumps(problem.to_dict(), allow_nan=False)
        return
    assert refusal.argument in fields
    assert str(refusal).startswith(f"{refusal.argument}: expected ")


@pytest.mark.parametrize("name", NAMES)
def test_an_unknown_name_in_a_problem_is_an_argument_error(name: str) -> None:
    with pytest.raises(ArgumentError, match=name):
        changed(DEEPSEEK_R1, **{name: "nonsense"})


def _outcome(problem: Problem, target: Target, choices: dict[str, Any]) -> Plan | FlashInferCompatError:
    try:
        return plan(problem, target, **choices)
    except FlashInferCompatError as error:
        return error


@given(valid_problems(), targets(), st.fixed_dictionaries(CHOICES))
@FEW
def test_planning_gives_a_plan_or_an_error_of_ours_and_the_same_every_time(
    problem: Problem, target: Target, choices: dict[str, Any]
) -> None:
    first = _outcome(problem, target, choices)
    again = _outcome(problem, target, choices)
    if isinstance(first, FlashInferCompatError):
        assert (type(again), str(again)) == (type(first), str(first))
        return
    assert again == first
    assert choices["strategy"] in (AUTO, first.strategy)
    assert choices["backend"] in (AUTO, first.backend)
    assert choices["require"] is None or first.status.rank >= choices["require"].rank
    written = json.loads(json.dumps(first.to_dict(), allow_nan=False))
    assert written == first.to_dict()
    assert (written["strategy"], written["backend"]) == (first.strategy.value, first.backend.value)


@given(valid_problems(), targets(), st.fixed_dictionaries(CHOICES))
@FEW
def test_a_plan_breaks_no_rule(problem: Problem, target: Target, choices: dict[str, Any]) -> None:
    decision = _outcome(problem, target, choices)
    if isinstance(decision, FlashInferCompatError):
        event("refused")
        return
    event(f"{decision.strategy.value} on {decision.backend.value}")
    _check_any_plan(decision, target)
    if decision.backend is Backend.TRTLLM:
        assert decision.call is not None
        _check_install(decision.call, target, problem.activation)
        _check_problem(decision)
        _check_sizes(decision, decision.call)
        _check_routing(decision, decision.call, target)
    else:
        assert decision.call is None


def _check_any_plan(decision: Plan, target: Target) -> None:
    problem = decision.problem
    assert len(set(decision.rejected)) == len(decision.rejected)
    assert target.torch_version is not None
    assert problem.routed_scaling is RoutedScaling.ROUTING_WEIGHTS or problem.num_shared_experts == 0
    assert problem.activation in (Activation.SWIGLU, Activation.GEGLU)
    if decision.strategy.is_fused:
        assert problem.ep_size == 1
        assert problem.num_shared_experts > 0
        assert problem.shared_format is SharedExpertFormat.NVFP4
        assert decision.status is Evidence.ELIGIBLE
    else:
        assert problem.ep_size == 1 or problem.num_shared_experts == 0 or problem.shared_placement is not None


def _check_install(call: KernelCall, target: Target, activation: Activation) -> None:
    assert target.flashinfer is not None
    assert target.architecture in ("sm100", "sm103", "sm107")
    symbols = target.flashinfer.symbols
    assert symbols.get(call.entry_point) is not None
    assert symbols.get("fp4_quantize") is not None
    if call.num_fused_shared_experts:
        assert call.entry_point == LOGITS_ENTRY
        assert symbols.has_parameter(LOGITS_ENTRY, "num_fused_shared_experts")
    if call.topk_format == "tuple":
        assert symbols.has_member("RoutingInputMode", "UnpackedPrecomputed")
    if call.entry_point == LOGITS_ENTRY:
        assert symbols.has_member("RoutingMethodType", call.routing_method.flashinfer_name)
    if activation is Activation.GEGLU:
        gate = symbols.has_parameter(call.entry_point, "gated_act_type"), symbols.has_member("GatedActType", "GeGlu")
        kind = symbols.has_parameter(call.entry_point, "activation_type"), symbols.has_member("ActivationType", "Geglu")
        assert all(gate) or all(kind)


def _check_problem(decision: Plan) -> None:
    problem = decision.problem
    assert problem.numerics is Numerics.W4A4
    assert problem.hidden_size % 128 == 0
    if decision.strategy is Strategy.NATIVE:
        assert problem.routing_input is RoutingInput.LOGITS
        assert problem.routing_method is RoutingMethod.DEEPSEEK_V3
        assert problem.n_group > 1
        assert problem.norm_topk_prob
    if decision.strategy is Strategy.EXPANDED:
        assert problem.routing_input is RoutingInput.TOPK


def _check_sizes(decision: Plan, call: KernelCall) -> None:
    problem = decision.problem
    experts, top_k, shared = problem.num_experts, problem.top_k, problem.num_shared_experts
    expected = {
        # (weight_rows, local_num_experts, top_k, num_fused_shared_experts)
        Strategy.NATIVE: (experts + shared, experts, top_k, shared),
        Strategy.EXPANDED: (experts + shared, experts + shared, top_k + shared, 0),
        Strategy.SPLIT: (experts // problem.ep_size, experts // problem.ep_size, top_k, 0),
    }[decision.strategy]
    assert (call.weight_rows, call.local_num_experts, call.top_k, call.num_fused_shared_experts) == expected
    padding = call.num_experts - call.local_num_experts * problem.ep_size
    assert 0 <= padding < 32
    assert not padding or (call.entry_point == ROUTED_ENTRY and problem.ep_size == 1)
    assert bool(padding) is any("ids that are never chosen" in note for note in decision.notes)
    assert 0 <= call.intermediate_size - problem.intermediate_size < 64
    assert call.intermediate_size % 64 == 0
    if decision.status is Evidence.ELIGIBLE:
        assert call.top_k <= 32
        assert call.num_experts <= 2048
        assert call.top_k <= call.num_experts


def _check_routing(decision: Plan, call: KernelCall, target: Target) -> None:
    problem = decision.problem
    if call.entry_point == ROUTED_ENTRY:
        assert call.num_fused_shared_experts == 0
        assert (call.routing_method, call.n_group, call.topk_group) == (RoutingMethod.RENORMALIZE, None, None)
        assert call.topk_format in ("packed", "tuple")
        assert call.routed_before is (problem.routing_input is RoutingInput.LOGITS)
    else:
        assert problem.routing_input is RoutingInput.LOGITS
        assert (call.topk_format, call.routed_before) == ("", False)
        _check_logits(problem, call)
    if decision.status is Evidence.ELIGIBLE and call.routing_method is RoutingMethod.DEEPSEEK_V3:
        assert target.flashinfer is not None
        assert target.flashinfer.behaviour is not None
        _check_deepseek_v3(call, target.flashinfer.behaviour)


def _check_logits(problem: Problem, call: KernelCall) -> None:
    assert call.routing_method is problem.routing_method
    deepseek = problem.routing_method is RoutingMethod.DEEPSEEK_V3
    scales = problem.routed_scaling_factor != 1.0 and problem.routed_scaling is RoutedScaling.ROUTING_WEIGHTS
    if deepseek or problem.routing_method is RoutingMethod.MINIMAX2:
        assert problem.norm_topk_prob
    else:
        assert not scales
    # Before 0.5.3 other methods refuse groups; before 0.6.8 DeepSeekV3 divides by n_group.
    groups = (problem.n_group, problem.topk_group) if deepseek else (None, None)
    assert (call.n_group, call.topk_group) == groups


def _check_deepseek_v3(call: KernelCall, version: Version) -> None:
    # 0.4.0 and 0.4.1 sort registers that nothing has written.
    assert not Version("0.4.0rc0") <= version <= Version("0.4.1")
    assert call.n_group is not None
    assert call.topk_group is not None
    if call.n_group > 1:
        assert call.num_experts <= 256
        assert call.num_experts // call.n_group <= 32
        assert call.n_group <= 8
        assert call.topk_group <= 4
        assert call.top_k <= 22
        # Up to 0.6.2 the kernel does not read topk_group.
        assert version >= Version("0.6.3") or call.topk_group == min(4, call.n_group)
    if call.num_fused_shared_experts:
        assert call.n_group > 1
        assert call.num_experts % 4 == 0
        assert call.top_k + call.num_fused_shared_experts <= 32
        assert call.num_experts + call.num_fused_shared_experts <= 512
