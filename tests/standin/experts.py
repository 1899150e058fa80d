"""The two GEMMs of the experts on weights in the kernels' layout, and the sum over each token's experts."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch.nn import functional

from flashinfer_compat.numerics import (
    Nvfp4Tensor,
    deinterleave_gate_up,
    dequantize_nvfp4,
    quantize_nvfp4,
    unshuffle_block_scale,
    unshuffle_rows,
)
from standin.calls import Call
from standin.faults import need
from standin.launch import Launch
from standin.routing import Chosen

__all__ = ["Unfinalized", "finalize", "run_experts"]

_TILE = 8
"""Tokens of one expert are padded to the tile the tuner chooses; this is the smallest."""


@dataclass(frozen=True)
class Unfinalized:
    """What the experts leave for the finalizing kernel."""

    gemm2_output: torch.Tensor
    """bf16 [permuted rows, H]; rows that nothing was written to are NaN."""
    permuted: torch.Tensor
    """int32 [T * slots]: the row of each slot, -1 for an expert that is not here."""


def run_experts(launch: Launch, chosen: Chosen) -> Unfinalized:
    """Each chosen expert on its tokens.

    Raises:
        LaunchError, NotImplementedError: the activation is not one of the kernel's, or of the stand-in's.
    """
    activation = _activation(launch.call)
    rows = chosen.experts - launch.sizes.local_offset
    here = (rows >= 0) & (rows < launch.rows)
    permuted = torch.full_like(rows, -1, dtype=torch.int32)
    device = rows.device
    output = torch.full((_most_rows(launch), launch.hidden), torch.nan, dtype=torch.bfloat16, device=device)
    values = _input(launch)
    start = 0
    for row in sorted(set(rows[here].tolist())):
        slots = (rows == row).nonzero().flatten()
        where = torch.arange(start, start + len(slots), device=device)
        output[where] = _expert(launch, row, values[chosen.tokens[slots]], activation)
        permuted[slots] = where.to(torch.int32)
        start += -(-len(slots) // _TILE) * _TILE
    return Unfinalized(output, permuted)


def finalize(launch: Launch, chosen: Chosen, experts: Unfinalized) -> torch.Tensor:
    """bf16 [T, H]: the weighted rows in slot order, summed in float32, rounded once."""
    permuted = experts.permuted.reshape(launch.tokens, launch.slots).to(torch.int64)
    unwritten = (chosen.experts < 0).reshape(permuted.shape)
    total = torch.zeros(launch.tokens, launch.hidden, device=permuted.device)
    for slot in range(launch.slots):
        index = permuted[:, slot]
        row = chosen.weights[:, slot, None].float() * experts.gemm2_output[index.clamp(min=0)].float()
        total += torch.where(index[:, None] >= 0, row, 0.0)
        # The index itself was never written; whatever row it names.
        total.masked_fill_(unwritten[:, slot, None], torch.nan)
    return total.to(torch.bfloat16)


_Tensors = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


def _swiglu(gate: torch.Tensor, alpha: torch.Tensor) -> torch.Tensor:
    return gate * torch.sigmoid(alpha * gate)


def _geglu(gate: torch.Tensor, alpha: torch.Tensor) -> torch.Tensor:
    return functional.gelu(gate)


_GATED_ACT_TYPES: Mapping[int, _Tensors] = {0: _swiglu, 1: _geglu}
_ACTIVATION_TYPES: Mapping[int, _Tensors] = {3: _swiglu, 4: _geglu}


def _activation(call: Call) -> _Tensors:
    if "gated_act_type" in call.arguments:
        number = int(call["gated_act_type"])
        need(number in _GATED_ACT_TYPES, f"invalid gated act type {number}")
        return _GATED_ACT_TYPES[number]
    number = int(call.arguments.get("activation_type", 3))
    if number not in _ACTIVATION_TYPES:
        raise NotImplementedError(f"activation_type={number} is not modelled")
    return _ACTIVATION_TYPES[number]


def _input(launch: Launch) -> torch.Tensor:
    """float32 [T, H]: codes times block scales, without the global scale, which is in the output scalars."""
    codes, scale = launch.call.tensor("hidden_states"), launch.call.tensor("hidden_states_scale")
    linear = scale.flatten().view(torch.uint8)[: launch.tokens * launch.hidden // 16]
    linear = linear.view(torch.float8_e4m3fn).reshape(launch.tokens, launch.hidden // 16)
    return _raw(codes, linear)


def _expert(launch: Launch, row: int, values: torch.Tensor, activation: _Tensors) -> torch.Tensor:
    """bf16 [n, H] of float32 [n, H]: GEMM1, gated activation, NVFP4, GEMM2, and no routing weight."""
    call = launch.call
    scale_up, scale_gate, scale_down = (
        call[name][row] for name in ("output1_scale_scalar", "output1_scale_gate_scalar", "output2_scale_scalar")
    )
    gate_up = deinterleave_gate_up(_weight(launch, "gemm1", row, 2 * launch.intermediate, launch.hidden))
    accumulated = values @ gate_up.T
    if call.get("gemm1_bias") is not None:
        # The bias lies in the order of the weights' rows, and is added to the raw accumulator.
        bias = deinterleave_gate_up(unshuffle_rows(call["gemm1_bias"][row].unsqueeze(1)))
        accumulated = accumulated + bias.flatten()
    up, gate = accumulated.chunk(2, dim=-1)
    if call.get("gemm1_clamp_limit") is not None:
        limit = call["gemm1_clamp_limit"][row]
        up, gate = up.clamp(-limit, limit), gate.clamp(max=limit)
    alpha = call["gemm1_alpha"][row] if call.get("gemm1_alpha") is not None else torch.ones_like(scale_up)
    beta = call["gemm1_beta"][row] if call.get("gemm1_beta") is not None else torch.zeros_like(scale_up)
    hidden = scale_up * (up + beta) * activation(scale_gate * gate, alpha)
    # The epilogue quantizes with a global scale of 1: the real one is part of output1_scale_scalar.
    quantized = quantize_nvfp4(hidden, 1.0, check=False)
    accumulated = (
        _raw(quantized.codes, quantized.block_scale)
        @ _weight(launch, "gemm2", row, launch.hidden, launch.intermediate).T
    )
    if call.get("gemm2_bias") is not None:
        accumulated = accumulated + unshuffle_rows(call["gemm2_bias"][row].unsqueeze(1)).flatten()
    output: torch.Tensor = scale_down * accumulated
    return output.to(torch.bfloat16)


def _weight(launch: Launch, gemm: str, row: int, rows: int, columns: int) -> torch.Tensor:
    """float32 [rows, columns] in the order before the shuffle, without the global scale.

    The order is FlashInfer 0.7.4's description: `shuffle_matrix_a` of the codes, `shuffle_matrix_sf_a` of the scales,
    with epilogue_tile_m=128.
    """
    codes = launch.call.tensor(f"{gemm}_weights")[row].reshape(rows, columns // 2)
    count = rows * columns // 16
    scale = launch.call.tensor(f"{gemm}_weights_scale").flatten().view(torch.uint8)
    scale = scale[row * count : (row + 1) * count].reshape(rows, columns // 16).view(torch.float8_e4m3fn)
    return _raw(unshuffle_rows(codes), unshuffle_block_scale(scale, columns // 16))


def _raw(codes: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    return dequantize_nvfp4(Nvfp4Tensor(codes, scale, torch.ones((), device=codes.device)))


def _most_rows(launch: Launch) -> int:
    """FlashInfer 0.6.12, `getMaxPermutedPaddedCount`: one tile for each expert, then full ones."""
    slots = launch.tokens * launch.slots
    filled = min(launch.sizes.num_experts + launch.sizes.shared, slots)
    return (filled + (slots - filled) // _TILE) * _TILE
