"""The trtllm backend: FlashInfer's trtllm-gen kernels, fused, or routed beside a dense shared expert."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

import torch

from flashinfer_compat.backends.base import PreparedLayer
from flashinfer_compat.backends.side_stream import SideStream, run_both, side_stream_for
from flashinfer_compat.backends.trtllm.dense import SharedMlp, gated_output, prepare_shared
from flashinfer_compat.backends.trtllm.given import check_given
from flashinfer_compat.backends.trtllm.moe import FusedCall, prepare_call
from flashinfer_compat.backends.trtllm.weights import TrtllmExperts, prepare_experts
from flashinfer_compat.errors import ArgumentError, BackendUnavailableError
from flashinfer_compat.inputs import HiddenStates, QuantizedInput, Routing
from flashinfer_compat.options import CallOptions, LayerOptions
from flashinfer_compat.outputs import UnfinalizedOutput
from flashinfer_compat.planning.decision import Plan
from flashinfer_compat.vocabulary import QuantizerArithmetic
from flashinfer_compat.weights.values import MoELayerWeights

__all__ = ["TrtllmState", "prepare", "run", "run_unfinalized"]

_T = TypeVar("_T")


@dataclass(frozen=True)
class TrtllmState:
    """One fused call, and the shared expert's own where the strategy is split."""

    fused: FusedCall
    shared: SharedMlp | None
    shared_gate: torch.Tensor | None
    """bfloat16 [1, H]."""
    side_stream: SideStream | None
    input_scale: torch.Tensor


def prepare(weights: MoELayerWeights | TrtllmExperts, plan: Plan, options: LayerOptions) -> TrtllmState:
    """Bring the weights into the kernels' layout and find the installed functions; this imports flashinfer.

    Raises:
        ArgumentError: ModelOpt's arithmetic was asked for, which the kernels do not have.
        BackendUnavailableError: see `prepare_call` and `prepare_shared`.
    """
    if options.quantizer is QuantizerArithmetic.MODELOPT:
        expected = "flashinfer or None on the trtllm backend, whose kernels have no other arithmetic"
        raise ArgumentError("options.quantizer", expected, options.quantizer.value)
    if plan.call is None:
        raise BackendUnavailableError("the plan names no FlashInfer kernel to prepare for.")
    if isinstance(weights, TrtllmExperts):
        check_given(weights, plan, plan.call)
        return TrtllmState(prepare_call(plan, plan.call, weights, options), None, None, None, weights.input_scale)
    shared = None
    if weights.shared is not None and weights.adds_shared and not plan.strategy.is_fused:
        shared = prepare_shared(weights.shared, plan)
    experts = prepare_experts(weights, plan.call)
    gate = weights.shared_gate
    return TrtllmState(
        prepare_call(plan, plan.call, experts, options),
        shared,
        None if gate is None else gate.to(torch.bfloat16),
        None if shared is None else side_stream_for(weights.routed.down_weight.device, options.side_stream_tokens),
        experts.input_scale,
    )


def run(hidden_states: HiddenStates, layer: PreparedLayer, routing: Routing, options: CallOptions) -> torch.Tensor:
    """The layer's output, bfloat16 like its input."""
    state: TrtllmState = layer.state
    first = hidden_states.codes if isinstance(hidden_states, QuantizedInput) else hidden_states
    if first.shape[0] == 0:
        size = layer.plan.problem.hidden_size
        return first.new_empty((0, size), dtype=torch.bfloat16) if options.output is None else options.output
    routed, shared = _both(state, hidden_states, lambda given: state.fused(given, routing, options))
    if shared is None:
        return routed
    # Into the caller's buffer where there is one, which the kernel has written.
    return routed + shared if options.output is None else routed.add_(shared)


def run_unfinalized(
    hidden_states: HiddenStates, layer: PreparedLayer, routing: Routing, options: CallOptions
) -> UnfinalizedOutput:
    """The kernel's three tensors, and the shared experts' part on split."""
    state: TrtllmState = layer.state
    first = hidden_states.codes if isinstance(hidden_states, QuantizedInput) else hidden_states
    if first.shape[0] == 0:
        return state.fused.nothing(first, shared=state.shared is not None)
    rows, shared = _both(state, hidden_states, lambda given: state.fused.unfinalized(given, routing, options))
    return UnfinalizedOutput(*rows, shared)


def _both(
    state: TrtllmState, hidden_states: HiddenStates, routed: Callable[[HiddenStates], _T]
) -> tuple[_T, torch.Tensor | None]:
    """The routed experts' result and the shared experts'; both have read their input when this stream goes on."""
    if not isinstance(hidden_states, QuantizedInput):
        hidden_states = hidden_states.contiguous()
    if state.shared is None:
        return routed(hidden_states), None
    values = hidden_states.hidden_states if isinstance(hidden_states, QuantizedInput) else hidden_states
    assert values is not None
    return run_both(state.side_stream, values.shape[0], lambda: routed(hidden_states), lambda: _shared(state, values))


def _shared(state: TrtllmState, values: torch.Tensor) -> torch.Tensor:
    assert state.shared is not None
    return gated_output(state.shared, values, state.shared_gate)
