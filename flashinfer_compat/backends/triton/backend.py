"""The triton backend: routing, two grouped GEMMs and the final sum, over the checkpoint's own tensors."""

from __future__ import annotations

from dataclasses import replace

import torch
import triton

from flashinfer_compat.backends.base import PreparedLayer
from flashinfer_compat.backends.side_stream import side_stream_for
from flashinfer_compat.backends.triton.autotune import autotuned
from flashinfer_compat.backends.triton.layer import TritonState, run_top_k
from flashinfer_compat.backends.triton.mlp import INTERPRETED
from flashinfer_compat.backends.triton.overlap import can_overlap
from flashinfer_compat.backends.triton.routing import route_on_gpu
from flashinfer_compat.backends.triton.tiles import HOPPER_SHARED_MEMORY
from flashinfer_compat.backends.triton.weights import Experts, contiguous, experts_of
from flashinfer_compat.errors import ArgumentError, BackendUnavailableError
from flashinfer_compat.inputs import HiddenStates, LogitsRouting, PackedTopKRouting, QuantizedInput, Routing
from flashinfer_compat.numerics.routing import unpack_topk
from flashinfer_compat.options import CallOptions, LayerOptions
from flashinfer_compat.outputs import UnfinalizedOutput
from flashinfer_compat.planning.decision import Plan
from flashinfer_compat.problem import Problem
from flashinfer_compat.vocabulary import QuantizerArithmetic
from flashinfer_compat.weights.values import DenseExperts, MoELayerWeights, Nvfp4Experts

__all__ = ["TritonState", "prepare", "run", "run_top_k", "run_unfinalized"]

_OWN_ARITHMETIC = QuantizerArithmetic.MODELOPT
"""The reference's."""


def prepare(weights: MoELayerWeights, plan: Plan, options: LayerOptions) -> TritonState:
    """Look at the weights; it waits for the GPU, to compare input scales and, where asked to, to measure tiles.

    Raises:
        ArgumentError: 4over6 rounding was asked for, which these kernels do not have.
        BackendUnavailableError: the weights are on no GPU.
        TensorError: the hidden or intermediate size is not a multiple of 32.
    """
    if options.nvfp4_4over6 is not None:
        raise ArgumentError("options.nvfp4_4over6", "None on the triton backend", repr(options.nvfp4_4over6))
    device = weights.routed.down_weight.device
    if device.type != "cuda" and not INTERPRETED:
        raise BackendUnavailableError(
            f"The triton backend computes on an NVIDIA GPU; the weights are on {device}. Load them with "
            "device='cuda:0', or plan with backend='torch'."
        )
    shared = weights.shared if weights.adds_shared else None
    shared = contiguous(shared) if isinstance(shared, Nvfp4Experts) else shared
    weights, tokens = replace(weights, routed=contiguous(weights.routed)), options.autotune_tokens
    if not plan.strategy.is_fused:
        return autotuned(_split(weights, shared, plan.problem, options), plan.problem, tokens)
    fused, switch = _fused(weights, shared, plan.problem, options), plan.split_from_tokens
    if switch is None:
        return autotuned(fused, plan.problem, tokens)
    split = _split(weights, shared, plan.problem, options)
    return replace(
        autotuned(fused, plan.problem, [one for one in tokens if one < switch]),
        split=autotuned(split, plan.problem, [one for one in tokens if one >= switch]),
        split_from_tokens=switch,
    )


def _fused(
    weights: MoELayerWeights, shared: Nvfp4Experts | DenseExperts | None, problem: Problem, options: LayerOptions
) -> TritonState:
    # Planning refuses fused strategies for any other format.
    assert isinstance(shared, Nvfp4Experts)
    experts = experts_of(
        weights.routed,
        shared,
        weights.config.num_shared_experts,
        problem.numerics,
        common_scale=True,
        arithmetic=options.quantizer or _OWN_ARITHMETIC,
    )
    common = experts.gate_up_input_scale[0, 0]
    device = common.device
    return TritonState(experts, None, 0, common, shared_memory=_shared_memory(device), overlaps=can_overlap(device))


def _split(
    weights: MoELayerWeights, shared: Nvfp4Experts | DenseExperts | None, problem: Problem, options: LayerOptions
) -> TritonState:
    arithmetic = options.quantizer or _OWN_ARITHMETIC
    experts = experts_of(weights.routed, None, 0, problem.numerics, common_scale=False, arithmetic=arithmetic)
    apart: Experts | DenseExperts | None
    if isinstance(shared, Nvfp4Experts):
        apart = experts_of(None, shared, 1, problem.numerics, common_scale=False, arithmetic=arithmetic)
    else:
        apart = shared
    largest = weights.routed.gate_up_input_scale.amax()
    if weights.routed_input_scale is not None:
        largest = torch.full_like(largest, weights.routed_input_scale)
    return TritonState(
        experts,
        apart,
        weights.local_expert_offset,
        largest,
        weights.shared_gate,
        None if apart is None else side_stream_for(largest.device, options.side_stream_tokens),
        shared_memory=_shared_memory(largest.device),
        overlaps=can_overlap(largest.device),
    )


def _shared_memory(device: torch.device) -> int:
    if device.type != "cuda":
        return HOPPER_SHARED_MEMORY
    return int(triton.runtime.driver.active.utils.get_device_properties(device.index)["max_shared_mem"])


@torch.no_grad()
def run(hidden_states: HiddenStates, layer: PreparedLayer, routing: Routing, options: CallOptions) -> torch.Tensor:
    """The layer's output. Nothing waits for the GPU, and equal input gives equal output.

    Raises:
        ArgumentError: the input is rounded already, or a LoRA delta is given: these kernels take neither.
    """
    if isinstance(hidden_states, QuantizedInput):
        way_out = "Pass the values before rounding, or plan with backend='torch' or 'trtllm'."
        raise ArgumentError("hidden_states", "a tensor on the triton backend", "a QuantizedInput", way_out)
    if options.gemm1_lora_delta is not None:
        raise ArgumentError("options.gemm1_lora_delta", "None on the triton backend", "a tensor")
    problem, output = layer.plan.problem, options.output
    if hidden_states.shape[0] == 0:
        return torch.empty_like(hidden_states) if output is None else output
    state = layer.state.for_tokens(hidden_states.shape[0])
    if options.enable_pdl is False:
        state = replace(state, overlaps=False)
    if isinstance(routing, LogitsRouting):
        ids, weights = route_on_gpu(problem, routing, state.overlaps)
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
    return run_top_k(hidden_states, state, problem, ids, weights, packed=packed, output=output)


def run_unfinalized(
    hidden_states: HiddenStates, layer: PreparedLayer, routing: Routing, options: CallOptions
) -> UnfinalizedOutput:
    """Not offered.

    Raises:
        ArgumentError: always; the second GEMM's rows are in an order of their own.
    """
    raise ArgumentError("layer", "one on the trtllm or torch backend, without the final sum", "one on triton")
