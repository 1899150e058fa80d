"""The cutile backend: routed experts in one call of FlashInfer's, the shared ones in it or in a call of their own."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from flashinfer_compat.backends.base import PreparedLayer
from flashinfer_compat.backends.cutile.experts import CutileExperts, prepare_experts
from flashinfer_compat.backends.routing import topk_of
from flashinfer_compat.backends.side_stream import SideStream, run_both, side_stream_for
from flashinfer_compat.backends.trtllm.dense import gated_output, prepare_shared
from flashinfer_compat.errors import ArgumentError
from flashinfer_compat.inputs import HiddenStates, Routing
from flashinfer_compat.numerics.routing import TopK, append_shared_experts
from flashinfer_compat.options import CallOptions, LayerOptions
from flashinfer_compat.outputs import UnfinalizedOutput
from flashinfer_compat.planning.decision import Plan
from flashinfer_compat.weights.shared import split_shared
from flashinfer_compat.weights.values import MoELayerWeights, Nvfp4Experts

__all__ = ["CutileState", "prepare", "run", "run_unfinalized"]


@dataclass(frozen=True)
class CutileState:
    """The experts in the kernels' layout, a copy of the checkpoint's."""

    experts: CutileExperts
    """Routed experts, and behind them the shared ones where the strategy is fused."""
    shared: Callable[[torch.Tensor], torch.Tensor] | None
    """The shared MLP, bfloat16 [T, H] to bfloat16 [T, H], where the strategy is split."""
    shared_gate: torch.Tensor | None
    """bfloat16 [1, H]."""
    side_stream: SideStream | None
    """Where `shared` runs beside the experts."""
    input_scale: torch.Tensor
    """float32 []: the largest gate or up input scale of the routed experts; these kernels have no use for it."""


@dataclass(frozen=True)
class _OneExpert:
    """An MLP that every token goes to, as a layer of one expert: so its weights stay NVFP4."""

    experts: CutileExperts

    def __call__(self, hidden_states: torch.Tensor) -> torch.Tensor:
        shape, device = (hidden_states.shape[0], 1), hidden_states.device
        ids = torch.zeros(shape, dtype=torch.int32, device=device)
        return self.experts(hidden_states, ids, torch.ones(shape, dtype=torch.float32, device=device))


def prepare(weights: MoELayerWeights, plan: Plan, options: LayerOptions) -> CutileState:
    """Bring the weights into the kernels' layout and set up the calls; this imports flashinfer.

    Raises:
        ArgumentError: 4over6 rounding was asked for, and nothing is rounded here.
        BackendUnavailableError: FlashInfer cannot be imported, lacks what the plan found in it, or cannot run it here.
    """
    if options.nvfp4_4over6 is not None:
        raise ArgumentError("options.nvfp4_4over6", "None on the cutile backend", repr(options.nvfp4_4over6))
    problem, routed = plan.problem, weights.routed
    largest, activation = routed.gate_up_input_scale.amax(), problem.activation
    if plan.strategy.is_fused:
        appended = split_shared(weights)
        # Planning refuses fused strategies for any other format.
        assert isinstance(appended, Nvfp4Experts)
        experts = prepare_experts((routed, appended), problem.top_k + problem.num_shared_experts, activation)
        return CutileState(experts, None, None, None, largest)
    shared: Callable[[torch.Tensor], torch.Tensor] | None = None
    if isinstance(weights.shared, Nvfp4Experts):
        shared = _OneExpert(prepare_experts((weights.shared,), 1, activation))
    elif weights.shared is not None:
        shared = prepare_shared(weights.shared, plan)
    gate, device = weights.shared_gate, routed.down_weight.device
    return CutileState(
        prepare_experts((routed,), problem.top_k, activation),
        shared,
        None if gate is None else gate.to(torch.bfloat16),
        None if shared is None else side_stream_for(device, options.side_stream_tokens),
        largest,
    )


@torch.no_grad()
def run(hidden_states: HiddenStates, layer: PreparedLayer, routing: Routing, options: CallOptions) -> torch.Tensor:
    """The layer's output, bfloat16 like its input.

    Raises:
        ArgumentError: an option asks for what these kernels do not have.
    """
    # Nothing rounded passes the checks of a call in w4a16.
    assert isinstance(hidden_states, torch.Tensor)
    if options.gemm1_lora_delta is not None:
        raise ArgumentError("options.gemm1_lora_delta", "None on the cutile backend", "a tensor")
    if options.enable_pdl:
        raise ArgumentError("options.enable_pdl", "False or None on the cutile backend", "True")
    problem = layer.plan.problem
    if hidden_states.shape[0] == 0:
        return torch.empty_like(hidden_states) if options.output is None else options.output
    topk = topk_of(problem, routing)
    if options.routing_replay_out is not None:
        options.routing_replay_out[: topk.ids.shape[0]].copy_(topk.ids)
    if layer.plan.strategy.is_fused:
        topk = append_shared_experts(topk, problem.num_experts, problem.num_shared_experts)
    topk = TopK(topk.ids.to(torch.int32).contiguous(), topk.weights.float().contiguous())
    output = _both(layer.state, hidden_states.contiguous(), topk)
    return output if options.output is None else options.output.copy_(output)


def run_unfinalized(
    hidden_states: HiddenStates, layer: PreparedLayer, routing: Routing, options: CallOptions
) -> UnfinalizedOutput:
    """Not offered.

    Raises:
        ArgumentError: always; FlashInfer's cuTile kernels only give the final sum.
    """
    raise ArgumentError("layer", "one on the trtllm or torch backend, without the final sum", "one on cutile")


def _both(state: CutileState, values: torch.Tensor, topk: TopK) -> torch.Tensor:
    """The routed experts' result and the shared ones'; the former is new memory, which takes up the sum."""
    mlp = state.shared
    if mlp is None:
        return state.experts(values, topk.ids, topk.weights)
    routed, shared = run_both(
        state.side_stream,
        values.shape[0],
        lambda: state.experts(values, topk.ids, topk.weights),
        lambda: gated_output(mlp, values, state.shared_gate),
    )
    return routed.add_(shared)
