"""How FlashInfer's trtllm-gen kernels would be called for a strategy, or why they cannot be."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from packaging.version import Version

from flashinfer_compat.features.known_issues import KNOWN_ISSUES, Effect
from flashinfer_compat.features.model import FeatureState
from flashinfer_compat.features.table import FEATURES, feature_states
from flashinfer_compat.features.target import FlashInfer, Target
from flashinfer_compat.planning.decision import DenseCall, KernelCall
from flashinfer_compat.planning.limits import (
    DEEPSEEK_V3_GROUPED,
    DEEPSEEK_V3_UNGROUPED,
    FUSED_SHARED,
    METHODS,
    REPLAY_FUSED_SHARED,
    REPLAY_GROUPED,
    REPLAY_LLAMA4,
    REPLAY_OTHER,
    ROUTED,
    WEIGHTS_LABELLED,
    Limits,
    Sizes,
    limits_for,
    violations,
)
from flashinfer_compat.problem import Problem
from flashinfer_compat.reasons import Reason, ReasonCode
from flashinfer_compat.versions import at_least, parse_version
from flashinfer_compat.vocabulary import (
    Activation,
    ActivationScaling,
    Evidence,
    RoutedScaling,
    RoutingInput,
    RoutingMethod,
    SharedExpertFormat,
    Strategy,
)

__all__ = ["Answer", "answer"]

LOGITS_ENTRY = "trtllm_fp4_block_scale_moe"
ROUTED_ENTRY = "trtllm_fp4_block_scale_routed_moe"
_FEATURES = {row.name: row for row in FEATURES}
_DENSE_BACKENDS = ("cutlass", "cudnn", "cute-dsl")
"""`mm_fp4` backends in order of preference; cutlass needs no other library, and trtllm another weight layout."""
_INTERMEDIATE_MULTIPLE = 64
"""2 * intermediate_size rows are shuffled in tiles of 128."""

_BIASED = frozenset({RoutingMethod.DEEPSEEK_V3, RoutingMethod.MINIMAX2})
"""Methods whose kernels apply routed_scaling_factor, and divide by the sum of weights whatever norm_topk_prob says."""


@dataclass(frozen=True)
class Answer:
    """A call, or the reasons there is none."""

    reasons: tuple[Reason, ...] = ()
    call: KernelCall | None = None
    dense: DenseCall | None = None
    status: Evidence = Evidence.ABSENT
    notes: tuple[str, ...] = ()


def answer(problem: Problem, target: Target, strategy: Strategy) -> Answer:
    """How `strategy` calls FlashInfer on `target`; the problem's own rules are not looked at here."""
    given = _moe_answer(problem, target, strategy)
    if given.call is None or not _needs_dense_nvfp4(problem, strategy):
        return given
    return replace(given, dense=_dense(target)[0])


def _moe_answer(problem: Problem, target: Target, strategy: Strategy) -> Answer:
    reasons = tuple(dict.fromkeys(_install_reasons(problem, target, strategy)))
    flashinfer = target.flashinfer
    if reasons or flashinfer is None:
        return Answer(reasons)
    if flashinfer.behaviour is None:
        return _answer_by_presence(problem, flashinfer, strategy)
    if strategy is Strategy.NATIVE:
        return _with_issues(_native(problem, flashinfer), problem, flashinfer, strategy)
    if strategy is Strategy.EXPANDED or problem.routing_input is RoutingInput.TOPK:
        return _with_issues(_routed(problem, flashinfer, strategy), problem, flashinfer, strategy)
    from_logits = _with_issues(_logits(problem, flashinfer), problem, flashinfer, strategy)
    if not from_logits.reasons:
        return from_logits
    routed = _with_issues(_routed(problem, flashinfer, strategy), problem, flashinfer, strategy)
    if routed.reasons:
        return Answer(tuple(dict.fromkeys((*from_logits.reasons, *routed.reasons))))
    return replace(routed, notes=(*_why_outside(from_logits.reasons), *routed.notes))


def _install_reasons(problem: Problem, target: Target, strategy: Strategy) -> Iterator[Reason]:
    """What the strategy needs of the install and the GPU; unknown behaviour is judged later."""
    needed = tuple(_needed_features(problem, strategy))
    states = feature_states(target, [_FEATURES[name] for name in needed])
    for name in needed:
        yield from _obstacles(states[name])
        # One missing install is one reason, not one for each feature.
        if target.flashinfer is None or target.architecture is None:
            return
    if _needs_dense_nvfp4(problem, strategy):
        dense, passed_over = _dense(target)
        if dense is None:
            yield passed_over[0]


def _dense(target: Target) -> tuple[DenseCall | None, list[Reason]]:
    """The preferred `mm_fp4` backend that works on `target`, and why each before it does not."""
    passed_over: list[Reason] = []
    for backend in _DENSE_BACKENDS:
        row = _FEATURES["mm_fp4_" + backend.replace("-", "_")]
        obstacles = _obstacles(feature_states(target, [row])[row.name])
        if not obstacles:
            return DenseCall(backend, tuple(str(reason) for reason in passed_over)), passed_over
        passed_over.append(obstacles[0])
    return None, passed_over


def _obstacles(state: FeatureState) -> list[Reason]:
    return [reason for reason in state.reasons if reason.code is not ReasonCode.BEHAVIOUR_UNKNOWN]


def _needs_dense_nvfp4(problem: Problem, strategy: Strategy) -> bool:
    return strategy is Strategy.SPLIT and problem.shared_format is SharedExpertFormat.NVFP4


def _needed_features(problem: Problem, strategy: Strategy) -> Iterator[str]:
    if strategy is Strategy.NATIVE:
        yield "fused_shared_logits"
    elif strategy is Strategy.EXPANDED or problem.routing_input is RoutingInput.TOPK:
        yield "fp4_moe_routed"
    else:
        yield "fp4_moe_logits"
    if problem.activation_scaling is ActivationScaling.PER_TOKEN:
        yield "per_token_scale"
        yield "per_token_quantize"
    if problem.activation_scaling is ActivationScaling.CHECKPOINT or _needs_dense_nvfp4(problem, strategy):
        yield "fp4_quantize"


def _answer_by_presence(problem: Problem, flashinfer: FlashInfer, strategy: Strategy) -> Answer:
    """A release whose rules are not known: no fused kernel is trusted, an ordinary call is offered as present."""
    if strategy.is_fused:
        return Answer((Reason(ReasonCode.BEHAVIOUR_UNKNOWN, f"{flashinfer.behaviour_source}.", "Use split."),))
    from_topk = problem.routing_input is RoutingInput.TOPK
    ignored = () if from_topk else tuple(_logits_violations(problem, flashinfer))
    entry = ROUTED_ENTRY if from_topk or ignored else LOGITS_ENTRY
    missing = [_activation_reason(problem, flashinfer), _entry_reason(flashinfer, entry)]
    reasons = tuple(reason for reason in missing if reason is not None)
    if reasons:
        return Answer((*ignored, *reasons))
    call = _call(problem, strategy, entry, problem.num_experts, flashinfer, bool(ignored))
    notes = (f"The rules of this release are not known: {flashinfer.behaviour_source}.", *_why_outside(ignored))
    return Answer(call=call, status=Evidence.PRESENT, notes=notes)


def _why_outside(reasons: tuple[Reason, ...]) -> Iterator[str]:
    return (f"Routing runs outside the kernel: {reason.message}" for reason in reasons)


def _entry_reason(flashinfer: FlashInfer, entry_point: str) -> Reason | None:
    if flashinfer.symbols.get(entry_point) is not None:
        return None
    message = f"FlashInfer {flashinfer.version} has no {entry_point}."
    return Reason(ReasonCode.ENTRY_POINT_MISSING, message, "Use FlashInfer 0.2.10 or newer.")


def _native(problem: Problem, flashinfer: FlashInfer) -> Answer:
    slots = problem.top_k + problem.num_shared_experts
    rows = problem.num_experts + problem.num_shared_experts
    reasons = list(_logits_violations(problem, flashinfer))
    if slots > FUSED_SHARED.max_slots:
        message = f"The kernel takes top_k + num_shared_experts of at most {FUSED_SHARED.max_slots}, got {slots}."
        reasons.append(Reason(ReasonCode.NUM_SHARED_EXPERTS, message, "Use split."))
    if rows > FUSED_SHARED.max_rows:
        message = f"The kernel takes num_experts + num_shared_experts of at most {FUSED_SHARED.max_rows}, got {rows}."
        reasons.append(Reason(ReasonCode.NUM_EXPERTS, message, "Use split."))
    if reasons:
        return Answer(tuple(reasons))
    call = _call(problem, Strategy.NATIVE, LOGITS_ENTRY, problem.num_experts, flashinfer, False)
    return Answer(call=call, status=Evidence.ELIGIBLE)


def _logits(problem: Problem, flashinfer: FlashInfer) -> Answer:
    reasons = tuple(_logits_violations(problem, flashinfer))
    if reasons:
        return Answer(reasons)
    call = _call(problem, Strategy.SPLIT, LOGITS_ENTRY, problem.num_experts, flashinfer, False)
    return Answer(call=call, status=Evidence.ELIGIBLE)


def _logits_violations(problem: Problem, flashinfer: FlashInfer) -> Iterator[Reason]:
    """Why the kernel cannot route from logits, or would ignore a setting; sizes where the release is known."""
    method, version = problem.routing_method, flashinfer.behaviour
    scales = problem.routed_scaling_factor != 1.0 and problem.routed_scaling is RoutedScaling.ROUTING_WEIGHTS
    if scales and method not in _BIASED:
        message = f"The kernel ignores routed_scaling_factor with {method.flashinfer_name} routing."
        yield Reason(ReasonCode.ROUTED_SCALING, message, "Pass top-k.")
    if not problem.norm_topk_prob and method in _BIASED:
        yield Reason(ReasonCode.NORM_TOPK_PROB, "The kernel always normalises top-k weights.", "Pass top-k.")
    if not flashinfer.symbols.has_member("RoutingMethodType", method.flashinfer_name):
        message = f"FlashInfer {flashinfer.version} has no {method.flashinfer_name} routing."
        yield Reason(ReasonCode.MEMBER_MISSING, message, "Pass top-k.")
    if version is None:
        return
    if method is RoutingMethod.DEEPSEEK_V3:
        table = DEEPSEEK_V3_GROUPED if problem.is_grouped else DEEPSEEK_V3_UNGROUPED
    else:
        table = METHODS[method]
    rows = limits_for(table, version)
    if not rows:
        message = f"FlashInfer {version} does not implement {method.flashinfer_name} routing from logits."
        yield Reason(ReasonCode.ROUTING_METHOD, message, "Pass top-k.")
    sizes = Sizes(problem.num_experts, problem.top_k, problem.n_group, problem.topk_group)
    yield from _violations(rows, sizes, f"{method.flashinfer_name} routing from logits in FlashInfer {version}")


def _violations(rows: tuple[Limits, ...], sizes: Sizes, kernel: str) -> Iterator[Reason]:
    seen = set()
    for row in rows:
        for reason in violations(row, sizes, kernel):
            if reason not in seen:
                seen.add(reason)
                yield reason


def _routed(problem: Problem, flashinfer: FlashInfer, strategy: Strategy) -> Answer:
    assert flashinfer.behaviour is not None
    version = flashinfer.behaviour
    missing = _entry_reason(flashinfer, ROUTED_ENTRY)
    if missing is not None:
        return Answer((missing,))
    shared = problem.num_shared_experts if strategy is Strategy.EXPANDED else 0
    rows = limits_for(ROUTED, version)
    if not rows:
        message = f"The limits of {ROUTED_ENTRY} before FlashInfer {ROUTED[0].since} are not known."
        return Answer((Reason(ReasonCode.BEHAVIOUR_UNKNOWN, message, "Use a newer FlashInfer."),))
    multiple = max(row.multiple for row in rows)
    num_experts = -(-(problem.num_experts + shared) // multiple) * multiple
    if problem.ep_size > 1:
        num_experts = problem.num_experts
    kernel = f"The routed entry of FlashInfer {version}"
    reasons = tuple(_violations(rows, Sizes(num_experts, problem.top_k + shared), kernel))
    if reasons:
        return Answer(reasons)
    routed_before = problem.routing_input is RoutingInput.LOGITS
    call = _call(problem, strategy, ROUTED_ENTRY, num_experts, flashinfer, routed_before)
    return Answer(call=call, status=Evidence.ELIGIBLE)


def _topk_format(flashinfer: FlashInfer, entry_point: str) -> str:
    """Packed top-k works in every release; (ids, weights) keeps float32 weights, from 0.6.16 on."""
    if entry_point != ROUTED_ENTRY:
        return ""
    behaviour = flashinfer.behaviour
    exact = behaviour is not None and behaviour >= Version("0.6.16")
    return "tuple" if exact and flashinfer.symbols.has_member("RoutingInputMode", "UnpackedPrecomputed") else "packed"


def _call(
    problem: Problem,
    strategy: Strategy,
    entry_point: str,
    num_experts: int,
    flashinfer: FlashInfer,
    routed_before: bool,
) -> KernelCall:
    expanded = problem.num_shared_experts if strategy is Strategy.EXPANDED else 0
    native = problem.num_shared_experts if strategy is Strategy.NATIVE else 0
    from_topk = entry_point == ROUTED_ENTRY
    routes_by_group = not from_topk and problem.routing_method is RoutingMethod.DEEPSEEK_V3
    local = (problem.num_experts + expanded) // problem.ep_size
    version = flashinfer.behaviour
    return KernelCall(
        entry_point=entry_point,
        num_experts=num_experts,
        local_num_experts=local,
        weight_rows=local + native,
        top_k=problem.top_k + expanded,
        # With precomputed top-k the method only selects a kernel; Renormalize works in every release.
        routing_method=RoutingMethod.RENORMALIZE if from_topk else problem.routing_method,
        # Other methods refuse groups before 0.5.3; DeepSeekV3 divides by n_group before 0.6.8.
        n_group=problem.n_group if routes_by_group else None,
        topk_group=problem.topk_group if routes_by_group else None,
        intermediate_size=-(-problem.intermediate_size // _INTERMEDIATE_MULTIPLE) * _INTERMEDIATE_MULTIPLE,
        num_fused_shared_experts=native,
        routed_before=routed_before,
        topk_format=_topk_format(flashinfer, entry_point),
        logits_dtype=_logits_dtype(problem.routing_method, flashinfer.behaviour),
        bias_dtype=_bias_dtype(flashinfer.behaviour),
        flat_scale=flashinfer.behaviour is not None and flashinfer.behaviour < Version("0.2.13"),
        per_token_scale=problem.activation_scaling is ActivationScaling.PER_TOKEN,
        writes_replay=not from_topk and _writes_replay(problem, strategy, flashinfer.behaviour),
        mislabels_weights=not from_topk and not (version is None or at_least(version, WEIGHTS_LABELLED)),
    )


def _writes_replay(problem: Problem, strategy: Strategy, version: Version | None) -> bool:
    if version is None:
        return False
    since = REPLAY_GROUPED if problem.is_grouped else REPLAY_OTHER
    if problem.routing_method is RoutingMethod.LLAMA4:
        since = REPLAY_LLAMA4
    if strategy is Strategy.NATIVE:
        since = REPLAY_FUSED_SHARED
    return at_least(version, since)


def _logits_dtype(method: RoutingMethod, version: Version | None) -> str:
    """DeepSeekV3 reads float32 in every release; the others read bf16 before 0.6.8, and either since."""
    reads_either = version is None or at_least(version, "0.6.8")
    return "float32" if reads_either or method is RoutingMethod.DEEPSEEK_V3 else "bfloat16"


def _bias_dtype(version: Version | None) -> str:
    """float32 is understood from 0.5.0 on, but for 0.6.7, which takes it and reads bf16."""
    understands = (
        version is None
        or at_least(version, "0.6.8")
        or (at_least(version, "0.5.0") and version < Version("0.6.7.dev0"))
    )
    return "float32" if understands else "bfloat16"


def _with_issues(given: Answer, problem: Problem, flashinfer: FlashInfer, strategy: Strategy) -> Answer:
    """Refuse a call that meets a known issue, and note what the caller should know."""
    if given.call is None or flashinfer.behaviour is None:
        return given
    refused, notes = [], list(given.notes)
    if flashinfer.behaviour != parse_version(flashinfer.version):
        notes.append(
            f"FlashInfer {flashinfer.version} is taken for {flashinfer.behaviour}: {flashinfer.behaviour_source}."
        )
    for issue in KNOWN_ISSUES:
        meets = (
            given.call.entry_point in issue.entry_points
            and strategy in issue.strategies
            and issue.affects(flashinfer.behaviour)
            and issue.condition(problem)
        )
        if meets and issue.effect is Effect.REFUSED:
            refused.append(Reason(ReasonCode.KNOWN_ISSUE, f"{issue.id}: {issue.title}.", issue.way_out))
        elif meets and issue.effect is Effect.TOLD:
            notes.append(f"Known issue {issue.id}: {issue.title}. {issue.way_out} See {issue.source}")
    missing = _activation_reason(problem, flashinfer)
    if missing:
        refused.append(missing)
    if refused:
        return Answer(tuple(refused))
    if not given.call.topk_format and given.call.logits_dtype == "bfloat16":
        notes.append("Router logits are rounded to bf16, all this release reads; that can change the chosen experts.")
    if given.call.intermediate_size != problem.intermediate_size:
        notes.append(f"intermediate_size {problem.intermediate_size} is padded to {given.call.intermediate_size}.")
    if given.call.num_experts > given.call.local_num_experts * problem.ep_size:
        padding = given.call.num_experts - given.call.local_num_experts * problem.ep_size
        notes.append(f"num_experts is raised by {padding} ids that are never chosen, to a multiple the kernel takes.")
    return replace(given, notes=tuple(notes))


def _activation_reason(problem: Problem, flashinfer: FlashInfer) -> Reason | None:
    """SwiGLU is the default of every release; another activation needs a keyword and a member."""
    if problem.activation is not Activation.GEGLU:
        return None
    symbols = flashinfer.symbols
    by_type = symbols.has_parameter(LOGITS_ENTRY, "activation_type") and symbols.has_member("ActivationType", "Geglu")
    by_gate = symbols.has_parameter(LOGITS_ENTRY, "gated_act_type") and symbols.has_member("GatedActType", "GeGlu")
    if by_type or by_gate:
        return None
    message = f"FlashInfer {flashinfer.version} has no GeGLU for its FP4 MoE."
    return Reason(ReasonCode.ACTIVATION, message, "FlashInfer has it since 0.2.14.")
