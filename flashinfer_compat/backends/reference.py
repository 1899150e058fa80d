"""The reference in plain PyTorch: what every other backend is compared with. Clear first, fast second.

out = sum_k w_k R_k(x) + sum_s S_s(x), each expert an MLP `down(act(gate(x), up(x)))`. Everything is float32 until the
one rounding at the end; FlashInfer's kernels round each expert's output to bf16 as well (dev_kernel.cu, finalize).
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace

import torch
from torch.nn import functional

from flashinfer_compat.backends.activation import ACTIVATIONS
from flashinfer_compat.backends.base import PreparedLayer
from flashinfer_compat.backends.routing import topk_of
from flashinfer_compat.errors import ArgumentError, TensorError
from flashinfer_compat.inputs import HiddenStates, LogitsRouting, QuantizedInput, Routing
from flashinfer_compat.numerics.nvfp4 import Nvfp4Tensor, dequantize_nvfp4, per_token_scale, quantize_nvfp4
from flashinfer_compat.numerics.routing import TopK, append_shared_experts
from flashinfer_compat.options import CallOptions, LayerOptions
from flashinfer_compat.outputs import UnfinalizedOutput
from flashinfer_compat.planning.decision import Plan
from flashinfer_compat.problem import Problem
from flashinfer_compat.vocabulary import ActivationScaling, Numerics, QuantizerArithmetic
from flashinfer_compat.weights.shared import append_shared, common_input_scale, split_shared
from flashinfer_compat.weights.values import DenseExperts, MoELayerWeights, Nvfp4Experts

__all__ = ["ReferenceState", "prepare", "run", "run_unfinalized"]


@dataclass(frozen=True)
class ReferenceState:
    """The experts as checkpoint-layout weights; each is dequantized when it is used."""

    experts: Nvfp4Experts
    """Routed experts, and behind them the shared ones where the strategy is fused."""
    shared: Nvfp4Experts | DenseExperts | None
    """The shared MLP where the strategy is split and this rank adds it."""
    shared_gate: torch.Tensor | None
    local_expert_offset: int
    """Id of the first expert; tokens of other ranks' experts are left out."""
    input_scale: torch.Tensor
    """float32 []: of the codes in a `QuantizedInput`."""
    arithmetic: QuantizerArithmetic
    """How activations are rounded in w4a4."""


def prepare(weights: MoELayerWeights, plan: Plan, options: LayerOptions) -> ReferenceState:
    """Keep the checkpoint's tensors; a fused strategy gets the shared experts as rows and one common input scale.

    Raises:
        ArgumentError: 4over6 rounding was asked for, which this backend does not have.
    """
    if options.nvfp4_4over6 is not None:
        raise ArgumentError("options.nvfp4_4over6", "None on the torch backend", repr(options.nvfp4_4over6))
    arithmetic = options.quantizer or QuantizerArithmetic.MODELOPT
    if not plan.strategy.is_fused:
        largest = weights.routed.gate_up_input_scale.amax()
        if weights.routed_input_scale is not None:
            largest = torch.full_like(largest, weights.routed_input_scale)
        shared = weights.shared if weights.adds_shared else None
        offset = weights.local_expert_offset
        return ReferenceState(weights.routed, shared, weights.shared_gate, offset, largest, arithmetic)
    appended = split_shared(weights)
    # Planning refuses fused strategies for any other format.
    assert isinstance(appended, Nvfp4Experts)
    experts = common_input_scale(append_shared(weights.routed, appended))
    return ReferenceState(experts, None, None, 0, experts.gate_up_input_scale[0, 0], arithmetic)


def run(hidden_states: HiddenStates, layer: PreparedLayer, routing: Routing, options: CallOptions) -> torch.Tensor:
    """The layer's output.

    Raises:
        TensorError: hidden states or routing weights are not finite, or expert ids are out of range. This looks at
            the values; other backends do not.
    """
    call = _Call.of(hidden_states, layer, routing, options)
    with call.exact():
        output = torch.zeros_like(call.values, memory_format=torch.contiguous_format)
        for token, slot, rows in _expert_rows(call):
            output.index_add_(0, token, call.topk.weights[token, slot].unsqueeze(-1) * rows)
        if layer.state.shared is not None:
            output += _shared(call)
        result = output.to(torch.bfloat16 if isinstance(hidden_states, QuantizedInput) else hidden_states.dtype)
        return result if options.output is None else options.output.copy_(result)


def run_unfinalized(
    hidden_states: HiddenStates, layer: PreparedLayer, routing: Routing, options: CallOptions
) -> UnfinalizedOutput:
    """The rows of the experts held, in the order of their slots, in bfloat16."""
    call = _Call.of(hidden_states, layer, routing, options)
    tokens, slots = call.topk.ids.shape
    with call.exact():
        device = call.values.device
        rows = torch.zeros(tokens * slots, call.values.shape[1], dtype=torch.bfloat16, device=device)
        index = torch.full((tokens, slots), -1, dtype=torch.int32, device=device)
        for token, slot, values in _expert_rows(call):
            row = token * slots + slot
            rows[row] = values.to(torch.bfloat16)
            index[token, slot] = row.to(torch.int32)
        shared = _shared(call).to(torch.bfloat16) if layer.state.shared is not None else None
    return UnfinalizedOutput(rows, call.topk.weights, index, shared)


@dataclass(frozen=True)
class _Call:
    """One call's inputs in float32."""

    problem: Problem
    state: ReferenceState
    values: torch.Tensor
    """[T, H]: the routed experts' input."""
    is_rounded: bool
    """Whether `values` are what a `QuantizedInput` holds."""
    shared_values: torch.Tensor
    """[T, H]: the input of a shared MLP beside them."""
    topk: TopK
    lora_delta: torch.Tensor | None
    """[T, slots, 2I], up then gate."""

    @classmethod
    def of(cls, given: HiddenStates, layer: PreparedLayer, routing: Routing, options: CallOptions) -> _Call:
        problem, state = layer.plan.problem, layer.state
        values, is_rounded = _dequantized(given, state), isinstance(given, QuantizedInput)
        if isinstance(given, QuantizedInput):
            _require_finite(given.block_scale.view(torch.float8_e4m3fn).to(torch.float32), "block_scale")
            if given.per_token_scale is not None:
                _require_finite(given.per_token_scale, "per_token_scale")
        _require_finite(values, "hidden_states")
        shared = given.hidden_states if isinstance(given, QuantizedInput) else given
        topk = _top_k(problem, routing)
        if options.routing_replay_out is not None:
            options.routing_replay_out[: topk.ids.shape[0]].copy_(topk.ids)
        delta = options.gemm1_lora_delta
        if layer.plan.strategy.is_fused:
            topk = append_shared_experts(topk, problem.num_experts, problem.num_shared_experts)
            delta = None if delta is None else functional.pad(delta, (0, 0, 0, problem.num_shared_experts))
        return cls(
            problem,
            state,
            values,
            is_rounded,
            values if shared is None else shared.to(torch.float32),
            topk,
            None if delta is None else delta.to(torch.float32),
        )

    @contextmanager
    def exact(self) -> Iterator[None]:
        """No gradients, and no autocast, which would run the float32 products in bf16."""
        with torch.no_grad(), torch.autocast(self.values.device.type, enabled=False):
            yield


def _dequantized(given: HiddenStates, state: ReferenceState) -> torch.Tensor:
    if not isinstance(given, QuantizedInput):
        return given.to(torch.float32)
    scale = state.input_scale if given.per_token_scale is None else given.per_token_scale
    return dequantize_nvfp4(Nvfp4Tensor(given.codes, given.block_scale.view(torch.float8_e4m3fn), scale))


def _top_k(problem: Problem, routing: Routing) -> TopK:
    if isinstance(routing, LogitsRouting):
        _require_finite(routing.logits, "logits")
        if routing.bias is not None:
            _require_finite(routing.bias, "bias")
        return topk_of(problem, routing)
    given = topk_of(problem, routing)
    ids, weights = given.ids.to(torch.int64), given.weights.to(torch.float32)
    _require_finite(weights, "topk_weights")
    if ids.numel() and (int(ids.min()) < 0 or int(ids.max()) >= problem.num_experts):
        raise TensorError(
            "topk_ids",
            f"expert ids in 0..{problem.num_experts - 1}",
            f"ids in {int(ids.min())}..{int(ids.max())}",
            "Shared experts are added by fp4_moe and have no ids.",
        )
    return TopK(ids, weights)


def _expert_rows(call: _Call) -> Iterator[tuple[torch.Tensor, torch.Tensor, torch.Tensor]]:
    """For each expert held: its tokens and their slots [n], and its outputs [n, H] without the routing weights."""
    local = call.topk.ids - call.state.local_expert_offset
    for expert in sorted(set(local.flatten().tolist()).intersection(range(call.state.experts.num_experts))):
        token, slot = (local == expert).nonzero(as_tuple=True)
        delta = None if call.lora_delta is None else call.lora_delta[token, slot]
        yield token, slot, _nvfp4_expert(call.values[token], call, call.state.experts, expert, delta)


def _shared(call: _Call) -> torch.Tensor:
    """What the shared MLP adds; it keeps its input scales whatever the routed experts' scaling is."""
    shared, values = call.state.shared, call.shared_values
    assert shared is not None
    if isinstance(shared, DenseExperts):
        gate, up = (functional.linear(values, weight.float()) for weight in shared.gate_up_weight[0])
        output = functional.linear(ACTIVATIONS[call.problem.activation](gate, up), shared.down_weight[0].float())
    else:
        apart = replace(call.problem, activation_scaling=ActivationScaling.CHECKPOINT)
        output = _nvfp4_expert(values, replace(call, problem=apart, is_rounded=False), shared, 0)
    if call.state.shared_gate is not None:
        output = output * torch.sigmoid(functional.linear(values, call.state.shared_gate.float()))
    return output


def _nvfp4_expert(
    values: torch.Tensor, call: _Call, experts: Nvfp4Experts, index: int, delta: torch.Tensor | None = None
) -> torch.Tensor:
    """One expert's MLP over float32 [n, H]; `delta` [n, 2I] is added before the activation."""
    problem, arithmetic = call.problem, call.state.arithmetic
    gate, up = (
        functional.linear(values if call.is_rounded else _rounded(values, scale, problem, arithmetic), weight)
        for scale, weight in zip(experts.gate_up_input_scale[index], _gate_up(experts, index), strict=True)
    )
    if delta is not None:
        up, gate = (one + part for one, part in zip((up, gate), delta.chunk(2, dim=-1), strict=True))
    hidden = ACTIVATIONS[problem.activation](gate, up)
    hidden = _rounded(hidden, experts.down_input_scale[index], problem, arithmetic)
    return functional.linear(hidden, _down(experts, index))


def _rounded(
    values: torch.Tensor, input_scale: torch.Tensor, problem: Problem, arithmetic: QuantizerArithmetic
) -> torch.Tensor:
    """Activations as a GEMM sees them."""
    if problem.numerics is Numerics.W4A16:
        return values
    if problem.activation_scaling is ActivationScaling.PER_TOKEN:
        input_scale = per_token_scale(values)
    return dequantize_nvfp4(quantize_nvfp4(values, input_scale, arithmetic=arithmetic, check=False))


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
