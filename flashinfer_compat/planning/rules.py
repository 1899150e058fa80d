"""Why a strategy on a backend cannot run a problem, whatever the release.

Each rule looks at the problem alone and says which alternatives it concerns. To add a rule, add a row.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from flashinfer_compat.problem import Problem
from flashinfer_compat.reasons import Reason, ReasonCode
from flashinfer_compat.vocabulary import (
    Activation,
    ActivationScaling,
    Backend,
    Numerics,
    RoutedScaling,
    RoutingInput,
    RoutingMethod,
    SharedExpertFormat,
    Strategy,
)

__all__ = ["PROBLEM_RULES", "Rule", "problem_reasons"]

_ALL = frozenset(Strategy)
_FUSED = frozenset(strategy for strategy in Strategy if strategy.is_fused)
_BACKENDS = frozenset(Backend)
_GATED = frozenset({Activation.SWIGLU, Activation.GEGLU})


@dataclass(frozen=True)
class Rule:
    """One condition that a problem must meet, and what is said when it does not."""

    code: ReasonCode
    strategies: frozenset[Strategy]
    backends: frozenset[Backend]
    holds: Callable[[Problem], bool]
    message: str
    """May use the problem's fields, as in `{top_k}`."""
    way_out: str = ""


PROBLEM_RULES: tuple[Rule, ...] = (
    Rule(
        ReasonCode.NO_SHARED_EXPERTS,
        _FUSED,
        _BACKENDS,
        lambda problem: problem.num_shared_experts > 0,
        "There is no shared expert to fuse.",
        "Use split, which then is one routed call.",
    ),
    Rule(
        ReasonCode.SHARED_FORMAT,
        _FUSED,
        _BACKENDS,
        lambda problem: problem.shared_format is not SharedExpertFormat.BF16,
        "A fused kernel needs the shared expert in the routed experts' format, NVFP4; it is stored in bf16.",
        "Use split.",
    ),
    Rule(
        ReasonCode.SHARED_GATE,
        _FUSED,
        _BACKENDS,
        lambda problem: not problem.shared_gate,
        "A fused kernel adds shared experts with weight 1.0; this layer's shared experts have a gate.",
        "Use split.",
    ),
    Rule(
        ReasonCode.EXPERT_PARALLELISM,
        _FUSED,
        _BACKENDS,
        lambda problem: problem.ep_size == 1,
        "Under expert parallelism (ep_size={ep_size}) every rank would add the shared expert.",
        "Use split.",
    ),
    Rule(
        ReasonCode.SHARED_PLACEMENT,
        frozenset({Strategy.SPLIT}),
        _BACKENDS,
        lambda problem: problem.ep_size == 1 or problem.num_shared_experts == 0 or problem.shared_placement is not None,
        "Under expert parallelism it must be said whether each rank holds the whole shared expert or a slice.",
        "Set shared_placement to 'replicated' or 'sharded'.",
    ),
    Rule(
        ReasonCode.ROUTED_SCALING,
        _ALL,
        _BACKENDS,
        lambda problem: (
            problem.routed_scaling is RoutedScaling.ROUTING_WEIGHTS
            or problem.num_shared_experts == 0
            or problem.routed_scaling_factor == 1.0
        ),
        "The caller scales the whole output by routed_scaling_factor; that would scale the shared expert too.",
        "Let the factor enter through the routing weights (routed_scaling='routing_weights').",
    ),
    Rule(
        ReasonCode.NEEDS_LOGITS,
        frozenset({Strategy.NATIVE}),
        _BACKENDS,
        lambda problem: problem.routing_input is RoutingInput.LOGITS,
        "The native kernel adds the shared experts only while it routes from logits; top-k was given.",
        "Pass router logits, or use expanded.",
    ),
    Rule(
        ReasonCode.NEEDS_TOPK,
        frozenset({Strategy.EXPANDED}),
        _BACKENDS,
        lambda problem: problem.routing_input is RoutingInput.TOPK,
        "Shared experts are appended to a top-k; router logits were given.",
        "Route first and pass top-k, or use native or split.",
    ),
    Rule(
        ReasonCode.ROUTING_METHOD,
        frozenset({Strategy.NATIVE}),
        frozenset({Backend.TRTLLM}),
        lambda problem: problem.routing_method is RoutingMethod.DEEPSEEK_V3,
        "num_fused_shared_experts works with DeepSeekV3 routing only, not {routing_method.flashinfer_name}.",
        "Pass top-k and use expanded, or use split.",
    ),
    Rule(
        ReasonCode.NO_EXPERT_GROUPS,
        frozenset({Strategy.NATIVE}),
        frozenset({Backend.TRTLLM}),
        lambda problem: problem.is_grouped,
        "num_fused_shared_experts works with expert groups only (n_group > 1); n_group is {n_group}.",
        "Pass top-k and use expanded, or use split.",
    ),
    Rule(
        ReasonCode.ACTIVATION,
        _ALL,
        _BACKENDS,
        lambda problem: problem.activation in _GATED,
        "Only swiglu and geglu can be run; the activation is {activation.value}.",
    ),
    Rule(
        ReasonCode.NUMERICS,
        _ALL,
        frozenset({Backend.TRTLLM}),
        lambda problem: problem.numerics is Numerics.W4A4,
        "FlashInfer's trtllm-gen kernels round activations to NVFP4 (w4a4); w4a16 was asked for.",
        "Use numerics='w4a4', or the triton or torch backend.",
    ),
    Rule(
        ReasonCode.NUMERICS,
        _ALL,
        frozenset({Backend.CUTILE}),
        lambda problem: problem.numerics is Numerics.W4A16,
        "FlashInfer's cuTile kernels keep activations in bf16 (w4a16); w4a4 was asked for.",
        "Use numerics='w4a16', or another backend.",
    ),
    Rule(
        ReasonCode.NO_ROUTER,
        frozenset({Strategy.NATIVE}),
        frozenset({Backend.CUTILE}),
        lambda problem: False,
        "FlashInfer's cuTile kernels do not route, so they add no shared experts of their own.",
        "Pass top-k and use expanded, or use split.",
    ),
    Rule(
        ReasonCode.EXPERT_PARALLELISM,
        frozenset({Strategy.SPLIT}),
        frozenset({Backend.CUTILE}),
        lambda problem: problem.ep_size == 1,
        "FlashInfer's cuTile kernels have no expert parallelism (ep_size={ep_size}).",
        "Use ep_size=1, or another backend.",
    ),
    Rule(
        ReasonCode.ACTIVATION_SCALING,
        _ALL,
        frozenset({Backend.TRITON}),
        lambda problem: problem.activation_scaling is ActivationScaling.CHECKPOINT,
        "The Triton kernels have no per-token activation scales.",
        "Use activation_scaling='checkpoint', or the torch backend.",
    ),
    Rule(
        ReasonCode.HIDDEN_SIZE,
        _ALL,
        frozenset({Backend.TRITON}),
        lambda problem: problem.hidden_size % 32 == 0,
        "The Triton kernels need hidden_size in multiples of 32, got {hidden_size}.",
    ),
    Rule(
        ReasonCode.INTERMEDIATE_SIZE,
        _ALL,
        frozenset({Backend.TRITON}),
        lambda problem: problem.intermediate_size % 32 == 0,
        "The Triton kernels need intermediate_size in multiples of 32, got {intermediate_size}.",
    ),
    Rule(
        ReasonCode.HIDDEN_SIZE,
        _ALL,
        frozenset({Backend.CUTILE}),
        lambda problem: problem.hidden_size % 64 == 0,
        "FlashInfer's cuTile kernels need hidden_size in multiples of 64, got {hidden_size}.",
    ),
    Rule(
        ReasonCode.INTERMEDIATE_SIZE,
        _ALL,
        frozenset({Backend.CUTILE}),
        lambda problem: problem.intermediate_size % 64 == 0,
        "FlashInfer's cuTile kernels need intermediate_size in multiples of 64, got {intermediate_size}.",
    ),
    Rule(
        ReasonCode.HIDDEN_SIZE,
        _ALL,
        frozenset({Backend.TRTLLM}),
        lambda problem: problem.hidden_size % 256 == 0,
        # FlashInfer 0.7.4, fused_moe/core.py: multiples of 128 alone give wrong numbers in NVFP4.
        "The kernel needs hidden_size in multiples of 256, got {hidden_size}.",
    ),
)


def problem_reasons(problem: Problem, strategy: Strategy, backend: Backend) -> Iterator[Reason]:
    """The rules that `strategy` on `backend` breaks for `problem`."""
    for rule in PROBLEM_RULES:
        if strategy in rule.strategies and backend in rule.backends and not rule.holds(problem):
            yield Reason(rule.code, rule.message.format_map(_Fields(problem)), rule.way_out)


class _Fields(dict[str, object]):
    """A problem's fields by name, for `str.format_map`."""

    def __init__(self, problem: Problem) -> None:
        super().__init__()
        self._problem = problem

    def __missing__(self, name: str) -> object:
        return getattr(self._problem, name)
