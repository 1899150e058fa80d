"""The choice of strategy and backend: a pure function of a problem and a target."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from flashinfer_compat.errors import ExpertParallelismError, StrategyUnavailableError
from flashinfer_compat.features.table import TRTLLM_GEN
from flashinfer_compat.features.target import Target
from flashinfer_compat.planning.cutile import cutile_answer
from flashinfer_compat.planning.decision import Plan, Rejection
from flashinfer_compat.planning.policy import NO_ADVICE, Advice, advice
from flashinfer_compat.planning.portable import torch_answer, triton_answer
from flashinfer_compat.planning.rules import problem_reasons
from flashinfer_compat.planning.trtllm import Answer, answer
from flashinfer_compat.problem import Problem
from flashinfer_compat.reasons import Reason, ReasonCode
from flashinfer_compat.self_checks import CheckedKind
from flashinfer_compat.vocabulary import Backend, Evidence, Strategy, parse

__all__ = ["ALTERNATIVES", "AUTO", "assess", "plan"]

AUTO = "auto"

ALTERNATIVES: tuple[tuple[Backend, Strategy], ...] = (
    (Backend.TRTLLM, Strategy.NATIVE),
    (Backend.TRTLLM, Strategy.EXPANDED),
    (Backend.TRTLLM, Strategy.SPLIT),
    # Measured on an H200: fused is faster up to 64 tokens and as fast beyond (docs/triton.md).
    (Backend.TRITON, Strategy.NATIVE),
    (Backend.TRITON, Strategy.EXPANDED),
    (Backend.TRITON, Strategy.SPLIT),
    # Measured on an H200: 8 to 20 times as long as Triton's (docs/triton.md).
    (Backend.CUTILE, Strategy.NATIVE),
    (Backend.CUTILE, Strategy.EXPANDED),
    (Backend.CUTILE, Strategy.SPLIT),
    # Fusing gains nothing in the reference, and split needs no common input scale.
    (Backend.TORCH, Strategy.SPLIT),
    (Backend.TORCH, Strategy.NATIVE),
    (Backend.TORCH, Strategy.EXPANDED),
)
"""In order of preference."""

_ANSWERS: Mapping[Backend, Callable[[Problem, Target, Strategy], Answer]] = {
    Backend.TRTLLM: answer,
    Backend.TRITON: triton_answer,
    Backend.CUTILE: cutile_answer,
    Backend.TORCH: torch_answer,
}


def plan(
    problem: Problem,
    target: Target,
    *,
    strategy: Strategy | str = AUTO,
    backend: Backend | str = AUTO,
    require: Evidence | str | None = None,
) -> Plan:
    """How `problem` will run on `target`.

    Args:
        problem: the layer.
        target: the FlashInfer, GPU and libraries.
        strategy: `auto`, or the one to use.
        backend: `auto`, or the one to use. With a strategy named and a GPU present, `auto` means FlashInfer's kernels
            on the GPUs that have some, and Triton's or cuTile's on others; the torch backend must then be asked for by
            name.
        require: the least evidence to accept. None accepts a fused strategy when eligible, split when present.

    Raises:
        ExpertParallelismError: a fused strategy was asked for with ep_size > 1.
        StrategyUnavailableError: the asked-for strategy or backend, or every one of them, is refused.
        UnknownNameError: a name is not a strategy's, backend's or evidence's.
    """
    wanted_strategy = None if strategy == AUTO else parse(Strategy, strategy, "strategy", AUTO)
    wanted_backend = None if backend == AUTO else parse(Backend, backend, "backend", AUTO)
    least = None if require is None else parse(Evidence, require, "require")
    if wanted_strategy is not None and wanted_strategy.is_fused and problem.ep_size > 1:
        reason = Reason(
            ReasonCode.EXPERT_PARALLELISM,
            f"strategy={wanted_strategy.value!r} cannot run under expert parallelism (ep_size={problem.ep_size}): "
            "every rank would add the shared expert.",
            "Use strategy='split' and say shared_placement, or ep_size=1.",
        )
        refused = [Rejection(wanted_strategy, one, reason).to_dict() for one in Backend]
        raise ExpertParallelismError(str(reason), refused)
    chosen: tuple[Backend, Strategy, Answer] | None = None
    advised = NO_ADVICE
    rejected: list[Rejection] = []
    for one_backend, one_strategy in ALTERNATIVES:
        given = assess(problem, target, one_strategy, one_backend, least)
        reasons = given.reasons
        if not reasons and not _asked_for(one_strategy, one_backend, wanted_strategy, wanted_backend, target):
            reasons = (Reason(ReasonCode.NOT_ASKED_FOR, "It would run, but another was asked for."),)
        elif not reasons and chosen is not None:
            preferred = f"{chosen[1].value} on {chosen[0].value}"
            reasons = (Reason(ReasonCode.NOT_PREFERRED, f"It would run; {preferred} is preferred."),)
        elif not reasons and wanted_strategy is None and one_strategy.is_fused:
            advised = _advice(problem, target, one_strategy, one_backend, least)
            reasons = (advised.against_fused,) if advised.against_fused else ()
        if reasons:
            rejected.extend(Rejection(one_strategy, one_backend, reason) for reason in reasons)
        else:
            chosen = one_backend, one_strategy, given
    if chosen is None:
        raise _unavailable(rejected, wanted_strategy, wanted_backend, target)
    found_backend, found_strategy, found = chosen
    return Plan(
        problem,
        found_strategy,
        found_backend,
        found.status,
        found.call,
        found.dense,
        tuple(rejected),
        (*found.notes, *advised.notes),
        advised.split_from_tokens,
    )


def _advice(problem: Problem, target: Target, strategy: Strategy, backend: Backend, least: Evidence | None) -> Advice:
    """What was measured against split, where split may run as well."""
    if not target.policy or assess(problem, target, Strategy.SPLIT, backend, least).reasons:
        return NO_ADVICE
    return advice(problem, target, strategy, backend)


def assess(
    problem: Problem, target: Target, strategy: Strategy, backend: Backend, least: Evidence | None = None
) -> Answer:
    """Whether one alternative can run `problem` on `target`, whatever else can; see `plan` for `least`."""
    broken = tuple(problem_reasons(problem, strategy, backend))
    given = _ANSWERS[backend](problem, target, strategy)
    reasons = (*broken, *given.reasons)
    if not reasons:
        given = _as_checked(given, problem, target, strategy, backend)
    needed = least or (Evidence.ELIGIBLE if strategy.is_fused else Evidence.PRESENT)
    if not reasons and given.status.rank < needed.rank:
        reasons = (_too_little(given, needed),)
    return replace(Answer(reasons), status=_refuted_or_absent(given)) if reasons else given


def _as_checked(given: Answer, problem: Problem, target: Target, strategy: Strategy, backend: Backend) -> Answer:
    """The answer with what a self-check of its kind found here."""
    kind = CheckedKind.of(problem, strategy, backend)
    check = next((one for one in target.self_checks if one.kind == kind), None)
    if check is None:
        return given
    notes = given.notes
    if check.verdict is Evidence.REFUTED:
        notes = (*notes, f"A self-check refuted it here: {check.problem}")
    return replace(given, status=check.verdict, notes=notes)


def _too_little(given: Answer, needed: Evidence) -> Reason:
    if given.status is Evidence.REFUTED:
        message = f"{given.notes[-1]}"
        return Reason(ReasonCode.REFUTED, message, "To run it all the same, ask with require='refuted'.")
    message = f"{needed.value} was required; this is {given.status.value}."
    return Reason(ReasonCode.EVIDENCE, message, "Require less.")


def _refuted_or_absent(given: Answer) -> Evidence:
    return Evidence.REFUTED if given.status is Evidence.REFUTED else Evidence.ABSENT


def _asked_for(
    strategy: Strategy,
    backend: Backend,
    wanted_strategy: Strategy | None,
    wanted_backend: Backend | None,
    target: Target,
) -> bool:
    if wanted_strategy not in (None, strategy) or wanted_backend not in (None, backend):
        return False
    if wanted_strategy is None or wanted_backend is not None or target.architecture is None:
        return True
    # Who names a strategy on a GPU that has trtllm-gen kernels means those, and elsewhere Triton's or cuTile's; the
    # reference must not slip in at its speed.
    if target.architecture in TRTLLM_GEN:
        return backend is Backend.TRTLLM
    return backend in (Backend.TRITON, Backend.CUTILE)


def _unavailable(
    rejected: Sequence[Rejection], strategy: Strategy | None, backend: Backend | None, target: Target
) -> StrategyUnavailableError:
    concerned = [
        one
        for one in rejected
        if _asked_for(one.strategy, one.backend, strategy, backend, target)
        and one.reason.code is not ReasonCode.NOT_ASKED_FOR
    ]
    what = " ".join(
        ["strategy", strategy.value if strategy else AUTO, "on backend", backend.value if backend else AUTO]
    )
    # What only the caller can say comes first: with it said, split runs.
    unsaid = [one.reason for one in concerned if one.reason.code is ReasonCode.SHARED_PLACEMENT]
    head = f"{what} cannot run" + (f". {unsaid[0]} All reasons:" if unsaid else ":")
    lines = "\n".join(f"  {one}" for one in concerned)
    return StrategyUnavailableError(f"{head}\n{lines}", [one.to_dict() for one in concerned])
