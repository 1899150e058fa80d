"""Two helpers with which an engine adopts shared-expert fusion in about three lines, keeping its own FlashInfer calls.

if supports_fp4_shared(num_experts=256, num_shared=1, top_k=8, n_group=8, topk_group=4).ok: ...
trtllm_fp4_block_scale_moe(..., **fused_shared_kwargs(trtllm_fp4_block_scale_moe, num_shared))
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from flashinfer_compat.errors import ArgumentError, StrategyUnavailableError
from flashinfer_compat.features.target import Target
from flashinfer_compat.machine import this_machine
from flashinfer_compat.planning.plan import assess
from flashinfer_compat.problem import Problem
from flashinfer_compat.reasons import Reason, ReasonCode
from flashinfer_compat.vocabulary import (
    Backend,
    Evidence,
    RoutedScaling,
    RoutingInput,
    RoutingMethod,
    SharedExpertFormat,
    Strategy,
    parse,
)

__all__ = ["SharedFusion", "fused_shared_kwargs", "supports_fp4_shared"]

KEYWORD = "num_fused_shared_experts"


@dataclass(frozen=True)
class SharedFusion:
    """Whether the shared experts can run inside the routed kernel, how, and how well that is known."""

    ok: bool
    strategy: Strategy | None
    status: Evidence
    reasons: tuple[Reason, ...]
    """Why not; empty where it is ok."""

    def __bool__(self) -> bool:
        return self.ok


def supports_fp4_shared(
    *,
    num_experts: int,
    num_shared: int,
    top_k: int,
    n_group: int = 1,
    topk_group: int = 1,
    shared_format: SharedExpertFormat | str = SharedExpertFormat.NVFP4,
    routing_method: RoutingMethod | str = RoutingMethod.DEEPSEEK_V3,
    routing_input: RoutingInput | str = RoutingInput.LOGITS,
    ep_size: int = 1,
    routed_scaling_factor: float = 2.5,
    apply_scale_to_output: bool = False,
    hidden_size: int = 7168,
    intermediate_size: int = 2048,
    target: Target | None = None,
) -> SharedFusion:
    """Whether FlashInfer can fuse the shared experts of an NVFP4 MoE layer here; neither it nor torch is imported.

    Args:
        num_experts: routed experts of the whole layer.
        num_shared: shared experts.
        top_k: routed experts per token.
        n_group: expert groups; 1 is none.
        topk_group: groups a token may choose from.
        shared_format: how the checkpoint stores the shared experts.
        routing_method: by name.
        routing_input: what the engine hands to the kernel.
        ep_size: ranks the routed experts are spread over.
        routed_scaling_factor: of the layer.
        apply_scale_to_output: whether the engine multiplies the whole output by routed_scaling_factor.
        hidden_size: of the layer.
        intermediate_size: of one routed expert on this rank.
        target: another machine than this one.

    Raises:
        ArgumentError: the sizes make no layer.
        UnknownNameError: a name is not known.
    """
    shared = parse(SharedExpertFormat, shared_format, "shared_format") if num_shared else SharedExpertFormat.NONE
    problem = Problem(
        hidden_size=hidden_size,
        intermediate_size=intermediate_size,
        num_experts=num_experts,
        top_k=top_k,
        num_shared_experts=num_shared,
        shared_format=shared,
        routing_method=parse(RoutingMethod, routing_method, "routing_method"),
        routing_input=parse(RoutingInput, routing_input, "routing_input"),
        n_group=n_group,
        topk_group=topk_group,
        routed_scaling_factor=routed_scaling_factor,
        routed_scaling=RoutedScaling.OUTPUT if apply_scale_to_output else RoutedScaling.ROUTING_WEIGHTS,
        ep_size=ep_size,
    )
    strategy = Strategy.NATIVE if problem.routing_input is RoutingInput.LOGITS else Strategy.EXPANDED
    found = assess(problem, target or this_machine(), strategy, Backend.TRTLLM)
    ok = not found.reasons
    return SharedFusion(ok, strategy if ok else None, found.status, found.reasons)


def fused_shared_kwargs(function: Callable[..., Any], num_shared: int) -> dict[str, int]:
    """The keyword argument that fuses shared experts into a FlashInfer call; empty for none.

    Args:
        function: `trtllm_fp4_block_scale_moe`, as imported.
        num_shared: shared experts whose rows are appended to the weights.

    Raises:
        ArgumentError: `num_shared` is not a number of experts, or `function` no function.
        StrategyUnavailableError: the function does not take the keyword, or takes it and computes wrong numbers.
    """
    if not isinstance(num_shared, int) or isinstance(num_shared, bool) or num_shared < 0:
        raise ArgumentError("num_shared", "an integer of at least 0", repr(num_shared))
    if not callable(function):
        raise ArgumentError("function", "trtllm_fp4_block_scale_moe, as imported", type(function).__name__)
    if num_shared == 0:
        return {}
    name = getattr(function, "__name__", repr(function))
    if "routed" in name:
        reason = Reason(
            ReasonCode.KNOWN_ISSUE,
            f"{name} accepts {KEYWORD} in newer FlashInfer releases, but computes from slots that nothing has written.",
            "Append the shared experts to the top-k with weight 1.0 instead.",
        )
        raise StrategyUnavailableError(str(reason), [reason.to_dict()])
    if KEYWORD not in inspect.signature(function).parameters:
        reason = Reason(
            ReasonCode.KEYWORD_MISSING,
            f"{name} of the installed FlashInfer takes no {KEYWORD}.",
            "Use FlashInfer 0.6.17 or newer, or run the shared expert apart.",
        )
        raise StrategyUnavailableError(str(reason), [reason.to_dict()])
    return {KEYWORD: num_shared}
