"""The triton backend: routing, two grouped GEMMs and the final sum, over the checkpoint's own tensors."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
from torch.nn import functional

from flashinfer_compat.backends.base import PreparedLayer
from flashinfer_compat.backends.triton.down import combine
from flashinfer_compat.backends.triton.mlp import Choice, run_mlp
from flashinfer_compat.backends.triton.routing import route_on_gpu
from flashinfer_compat.backends.triton.tiles import Tiles, tiles_for
from flashinfer_compat.backends.triton.weights import Experts, experts_of
from flashinfer_compat.errors import ArgumentError
from flashinfer_compat.inputs import HiddenStates, LogitsRouting, PackedTopKRouting, QuantizedInput, Routing
from flashinfer_compat.numerics.routing import unpack_topk
from flashinfer_compat.options import CallOptions, LayerOptions
from flashinfer_compat.outputs import UnfinalizedOutput
from flashinfer_compat.planning.decision import Plan
from flashinfer_compat.problem import Problem
from flashinfer_compat.vocabulary import Activation
from flashinfer_compat.weights.values import DenseExperts, MoELayerWeights, Nvfp4Experts

__all__ = ["TritonState", "prepare", "run", "run_top_k", "run_unfinalized"]

_COMBINED = 512
"""Values of an output row that one program adds up."""


@dataclass(frozen=True)
class TritonState:
    """The experts as they lie in the checkpoint; nothing but scales is copied."""

    experts: Experts
    """Routed experts, and behind them the shared ones where the strategy is fused."""
    shared: Experts | DenseExperts | None
    """The shared MLP where the strategy is split and this rank adds it."""
    first_expert: int
    """Id of the first routed expert held."""
    input_scale: torch.Tensor
    """float32 []: the largest gate or up input scale of the routed experts."""
    shared_gate: torch.Tensor | None = None
    """[1, H]: the weight of a gate on the shared MLP's output, split only."""


def prepare(weights: MoELayerWeights, plan: Plan, options: LayerOptions) -> TritonState:
    """Look at the weights; it waits for the GPU, to compare input scales.

    Raises:
        ArgumentError: 4over6 rounding was asked for, which these kernels do not have.
        TensorError: the hidden or intermediate size is not a multiple of 32.
    """
    if options.nvfp4_4over6 is not None:
        raise ArgumentError("options.nvfp4_4over6", "None on the triton backend", repr(options.nvfp4_4over6))
    numerics, largest = plan.problem.numerics, weights.routed.gate_up_input_scale.amax()
    shared = weights.shared if weights.adds_shared else None
    if plan.strategy.is_fused:
        # Planning refuses fused strategies for any other format.
        assert isinstance(shared, Nvfp4Experts)
        count = weights.config.num_shared_experts
        experts = experts_of(weights.routed, shared, count, numerics, common_scale=True)
        return TritonState(experts, None, 0, largest)
    experts = experts_of(weights.routed, None, 0, numerics, common_scale=False)
    apart = experts_of(None, shared, 1, numerics, common_scale=False) if isinstance(shared, Nvfp4Experts) else shared
    return TritonState(experts, apart, weights.local_expert_offset, largest, weights.shared_gate)


@torch.no_grad()
def run(hidden_states: HiddenStates, layer: PreparedLayer, routing: Routing, options: CallOptions) -> torch.Tensor:
    """The layer's output. Nothing waits for the GPU, and equal input gives equal output.

    Raises:
        ArgumentError: the input is rounded already, or a LoRA delta is given: these kernels take neither.
    """
    if isinstance(hidden_states, QuantizedInput):
        raise ArgumentError("hidden_states", "a tensor on the triton backend", "a QuantizedInput")
    if options.gemm1_lora_delta is not None:
        raise ArgumentError("options.gemm1_lora_delta", "None on the triton backend", "a tensor")
    problem, output = layer.plan.problem, options.output
    if hidden_states.shape[0] == 0:
        return torch.empty_like(hidden_states) if output is None else output
    if isinstance(routing, LogitsRouting):
        ids, weights = route_on_gpu(problem, routing)
        packed = False
    elif isinstance(routing, PackedTopKRouting):
        ids = weights = routing.packed.contiguous()
        packed = True
    else:
        ids, weights = routing.ids.contiguous(), routing.weights.contiguous()
        packed = False
    if options.routing_replay_out is not None:
        chosen = unpack_topk(ids)[0] if packed else ids
        options.routing_replay_out[: ids.shape[0]].copy_(chosen)
    return run_top_k(hidden_states, layer.state, problem, ids, weights, packed=packed, output=output)


def run_unfinalized(
    hidden_states: HiddenStates, layer: PreparedLayer, routing: Routing, options: CallOptions
) -> UnfinalizedOutput:
    """Not offered.

    Raises:
        ArgumentError: always; the second GEMM's rows are in an order of their own.
    """
    raise ArgumentError("layer", "one on the trtllm or torch backend, without the final sum", "one on triton")


def run_top_k(
    hidden_states: torch.Tensor,
    state: TritonState,
    problem: Problem,
    ids: torch.Tensor,
    weights: torch.Tensor,
    *,
    packed: bool = False,
    output: torch.Tensor | None = None,
    tiles: Tiles | None = None,
    shared_tiles: Tiles | None = None,
) -> torch.Tensor:
    """The layer's output for chosen experts.

    Args:
        hidden_states: [T, hidden_size].
        state: from `prepare`.
        problem: what it was prepared for.
        ids: int32 or int64 [T, top_k], contiguous; ids of experts that are not held add nothing.
        weights: float32 or bfloat16 [T, top_k], contiguous.
        packed: whether `ids` and `weights` are both the packed pairs, int32.
        output: where to write, like `hidden_states` in shape and dtype; None makes a new tensor.
        tiles: other tiles than `tiles_for` chooses.
        shared_tiles: likewise, for a shared MLP apart.
    """
    if hidden_states.shape[0] == 0:
        return torch.empty_like(hidden_states)
    x = hidden_states if hidden_states.stride(1) == 1 else hidden_states.contiguous()
    tokens, experts = x.shape[0], state.experts
    choice = Choice(ids, packed, problem.top_k, state.first_expert)
    y = run_mlp(x, experts, choice, problem, tiles or _tiles(experts, tokens, problem.top_k))
    extra = y
    if isinstance(state.shared, DenseExperts):
        extra = _dense(x, state.shared, problem.activation)
    elif state.shared is not None:
        nobody = Choice(ids, False, 0, 0)
        extra = run_mlp(x, state.shared, nobody, problem, shared_tiles or _tiles(state.shared, tokens, 0))
    if state.shared is not None and state.shared_gate is not None:
        extra = extra.float() * torch.sigmoid(functional.linear(x.float(), state.shared_gate.float()))
    if output is None:
        output = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    combine[(tokens, triton.cdiv(experts.hidden_size, _COMBINED))](
        y,
        extra,
        ids,
        weights,
        output,
        tokens,
        state.first_expert,
        hidden=experts.hidden_size,
        experts=experts.num_routed,
        top_k=problem.top_k,
        appended=experts.num_appended,
        packed=packed,
        has_extra=state.shared is not None,
        width=_COMBINED,
    )
    return output


def _tiles(experts: Experts, tokens: int, top_k: int) -> Tiles:
    return tiles_for(
        tokens, top_k, experts.num_routed, experts.num_appended, experts.hidden_size, experts.intermediate_size
    )


def _dense(x: torch.Tensor, experts: DenseExperts, activation: Activation) -> torch.Tensor:
    """A bf16 shared MLP through torch, the activation in float32."""
    both = functional.linear(x.to(torch.bfloat16), experts.gate_up_weight[0].flatten(0, 1)).float()
    gate, up = both.chunk(2, dim=-1)
    value = (functional.gelu(gate) if activation is Activation.GEGLU else functional.silu(gate)) * up
    return functional.linear(value.to(torch.bfloat16), experts.down_weight[0])
