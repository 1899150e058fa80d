"""The trtllm backend: FlashInfer's trtllm-gen kernels, fused, or routed beside a dense shared expert."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from flashinfer_compat.backends.base import PreparedLayer
from flashinfer_compat.backends.trtllm.dense import SharedMlp, prepare_shared
from flashinfer_compat.backends.trtllm.moe import FusedCall, prepare_call
from flashinfer_compat.backends.trtllm.weights import prepare_experts
from flashinfer_compat.errors import BackendUnavailableError, TensorError
from flashinfer_compat.inputs import Routing
from flashinfer_compat.planning.decision import Plan
from flashinfer_compat.weights.values import MoELayerWeights

__all__ = ["TrtllmState", "prepare", "run"]

SIDE_STREAM_TOKENS = 256
"""Up to so many tokens the shared expert runs beside the routed ones; above, either fills the GPU alone."""


@dataclass(frozen=True)
class TrtllmState:
    """One fused call, and the shared expert's own where the strategy is split."""

    fused: FusedCall
    shared: SharedMlp | None
    side_stream: torch.cuda.Stream | None


def prepare(weights: MoELayerWeights, plan: Plan) -> TrtllmState:
    """Bring the weights into the kernels' layout and find the installed functions; this imports flashinfer."""
    if plan.call is None:
        raise BackendUnavailableError("the plan names no FlashInfer kernel to prepare for.")
    shared = None
    if weights.shared is not None and weights.adds_shared and not plan.strategy.is_fused:
        shared = prepare_shared(weights.shared, plan)
    device = weights.routed.down_weight.device
    side_stream = None
    if shared is not None and device.type == "cuda":
        side_stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
    experts = prepare_experts(weights, plan.call)
    fused = prepare_call(plan, plan.call, experts, weights.local_expert_offset)
    return TrtllmState(fused, shared, side_stream)


def run(hidden_states: torch.Tensor, layer: PreparedLayer, routing: Routing) -> torch.Tensor:
    """The layer's output, bfloat16 like its input."""
    if hidden_states.dtype != torch.bfloat16:
        raise TensorError("hidden_states", "bfloat16 on the trtllm backend", str(hidden_states.dtype))
    if hidden_states.shape[0] == 0:
        return torch.empty_like(hidden_states)
    state: TrtllmState = layer.state
    hidden_states = hidden_states.contiguous()
    if state.shared is None:
        return state.fused(hidden_states, routing)
    stream = state.side_stream
    if stream is None or hidden_states.shape[0] > SIDE_STREAM_TOKENS:
        return state.fused(hidden_states, routing) + state.shared(hidden_states)
    # Fork and join by events, which a CUDA graph can capture.
    current = torch.cuda.current_stream(hidden_states.device)
    stream.wait_stream(current)
    with torch.cuda.stream(stream):
        shared = state.shared(hidden_states)
    routed = state.fused(hidden_states, routing)
    current.wait_stream(stream)
    shared.record_stream(current)
    return routed + shared
