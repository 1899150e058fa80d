"""The reference in plain PyTorch: what every other backend is compared with. Clear first, fast second.

out = sum_k w_k R_k(x) + sum_s S_s(x), each expert an MLP `down(act(gate(x), up(x)))`. Everything is float32 until the
one rounding at the end; FlashInfer's kernels round each expert's output to bf16 as well (dev_kernel.cu, finalize).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch.nn import functional

from flashinfer_compat.backends.base import PreparedLayer
from flashinfer_compat.backends.routing import topk_from_logits
from flashinfer_compat.errors import TensorError
from flashinfer_compat.inputs import LogitsRouting, PackedTopKRouting, Routing
from flashinfer_compat.numerics.nvfp4 import Nvfp4Tensor, dequantize_nvfp4, quantize_nvfp4
from flashinfer_compat.numerics.routing import TopK, append_shared_experts, unpack_topk
from flashinfer_compat.planning.decision import Plan
from flashinfer_compat.problem import Problem
from flashinfer_compat.vocabulary import Activation, Numerics
from flashinfer_compat.weights.shared import append_shared, common_input_scale, split_shared
from flashinfer_compat.weights.values import DenseExperts, MoELayerWeights, Nvfp4Experts

__all__ = ["ReferenceState", "prepare", "run"]

_Tensors = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]

_ACTIVATIONS: Mapping[Activation, _Tensors] = {
    Activation.SWIGLU: lambda gate, up: functional.silu(gate) * up,
    Activation.GEGLU: lambda gate, up: functional.gelu(gate) * up,
}


@dataclass(frozen=True)
class ReferenceState:
    """The experts as checkpoint-layout weights; each is dequantized when it is used."""

    experts: Nvfp4Experts
    """Routed experts, and behind them the shared ones where the strategy is fused."""
    shared: Nvfp4Experts | DenseExperts | None
    """The shared MLP where the strategy is split and this rank adds it."""
    local_expert_offset: int
    """Id of the first expert; tokens of other ranks' experts are left out."""


def prepare(weights: MoELayerWeights, plan: Plan) -> ReferenceState:
    """Keep the checkpoint's tensors; a fused strategy gets the shared experts as rows and one common input scale."""
    if not plan.strategy.is_fused:
        return ReferenceState(
            weights.routed, weights.shared if weights.adds_shared else None, weights.local_expert_offset
        )
    shared = split_shared(weights)
    # Planning refuses fused strategies for any other format.
    assert isinstance(shared, Nvfp4Experts)
    return ReferenceState(common_input_scale(append_shared(weights.routed, shared)), None, 0)


@torch.no_grad()
def run(hidden_states: torch.Tensor, layer: PreparedLayer, routing: Routing) -> torch.Tensor:
    """The layer's output.

    Raises:
        TensorError: hidden states or routing weights are not finite, or expert ids are out of range. This looks at
            the values; other backends do not.
    """
    problem, state = layer.plan.problem, layer.state
    _require_finite(hidden_states, "hidden_states")
    topk = _top_k(problem, routing)
    if layer.plan.strategy.is_fused:
        topk = append_shared_experts(topk, problem.num_experts, problem.num_shared_experts)
    # Autocast would run the float32 products in bf16.
    with torch.autocast(hidden_states.device.type, enabled=False):
        values = hidden_states.to(torch.float32)
        output = _routed(values, topk, state, problem)
        if state.shared is not None:
            output += _expert(values, state.shared, 0, problem)
    return output.to(hidden_states.dtype)


def _top_k(problem: Problem, routing: Routing) -> TopK:
    if isinstance(routing, LogitsRouting):
        _require_finite(routing.logits, "logits")
        return topk_from_logits(problem, routing)
    if isinstance(routing, PackedTopKRouting):
        ids, weights = unpack_topk(routing.packed)
    else:
        ids, weights = routing.ids.to(torch.int64), routing.weights.to(torch.float32)
    _require_finite(weights, "topk_weights")
    if ids.numel() and (int(ids.min()) < 0 or int(ids.max()) >= problem.num_experts):
        raise TensorError(
            "topk_ids",
            f"expert ids in 0..{problem.num_experts - 1}",
            f"ids in {int(ids.min())}..{int(ids.max())}",
            "Shared experts are added by fp4_moe and have no ids.",
        )
    return TopK(ids, weights)


def _routed(values: torch.Tensor, topk: TopK, state: ReferenceState, problem: Problem) -> torch.Tensor:
    output = torch.zeros_like(values)
    local = topk.ids - state.local_expert_offset
    held = range(state.experts.num_experts)
    for expert in sorted(set(local.flatten().tolist()).intersection(held)):
        token, slot = (local == expert).nonzero(as_tuple=True)
        weight = topk.weights[token, slot].unsqueeze(-1)
        output.index_add_(0, token, weight * _expert(values[token], state.experts, expert, problem))
    return output


def _expert(values: torch.Tensor, experts: Nvfp4Experts | DenseExperts, index: int, problem: Problem) -> torch.Tensor:
    """One expert's MLP over float32 [T, H]."""
    activation = _ACTIVATIONS[problem.activation]
    if isinstance(experts, DenseExperts):
        gate, up = (functional.linear(values, weight.float()) for weight in experts.gate_up_weight[index])
        return functional.linear(activation(gate, up), experts.down_weight[index].float())
    gate, up = (
        functional.linear(_rounded(values, scale, problem), weight)
        for scale, weight in zip(experts.gate_up_input_scale[index], _gate_up(experts, index), strict=True)
    )
    hidden = _rounded(activation(gate, up), experts.down_input_scale[index], problem)
    return functional.linear(hidden, _down(experts, index))


def _rounded(values: torch.Tensor, input_scale: torch.Tensor, problem: Problem) -> torch.Tensor:
    """Activations as a GEMM sees them."""
    if problem.numerics is Numerics.W4A16:
        return values
    return dequantize_nvfp4(quantize_nvfp4(values, input_scale, check=False))


def _gate_up(experts: Nvfp4Experts, index: int) -> torch.Tensor:
    """float32 [2, I, H]."""
    return dequantize_nvfp4(
        Nvfp4Tensor(
            experts.gate_up_weight[index], experts.gate_up_block_scale[index], experts.gate_up_global_scale[index]
        )
    )


def _down(experts: Nvfp4Experts, index: int) -> torch.Tensor:
    """float32 [H, I]."""
    return dequantize_nvfp4(
        Nvfp4Tensor(experts.down_weight[index], experts.down_block_scale[index], experts.down_global_scale[index])
    )


def _require_finite(tensor: torch.Tensor, name: str) -> None:
    if not bool(torch.isfinite(tensor).all()):
        bad = int((~torch.isfinite(tensor)).sum())
        raise TensorError(name, "finite values", f"{bad} of {tensor.numel()} infinite or NaN")
