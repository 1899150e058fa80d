"""The two GEMMs of the experts on weights in the kernels' layout, and the sum over each token's experts."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from flashinfer_compat.numerics import (
    Nvfp4Tensor,
    deinterleave_gate_up,
    dequantize_nvfp4,
    unshuffle_block_scale,
    unshuffle_rows,
)
from standin.activation import Activation, Scalars, activation
from standin.launch import Launch
from standin.optional import recipe_of
from standin.recipe import per_token_scale_inv, quantize, quantize_per_token
from standin.routing import Chosen

__all__ = ["Unfinalized", "finalize", "run_experts", "unwritten"]

_TILE = 8
"""Tokens of one expert are padded to the tile the tuner chooses; this is the smallest."""


@dataclass(frozen=True)
class Unfinalized:
    """What the experts leave for the finalizing kernel."""

    gemm2_output: torch.Tensor
    """bf16 [permuted rows, H]; rows that nothing was written to are NaN."""
    permuted: torch.Tensor
    """int32 [T * slots]: the row of each slot, -1 for an expert that is not here."""
    gemm1_output: torch.Tensor
    """What GEMM2 reads, with a row for each row of its output: NVFP4 codes, uint8 [.., I/2], or bf16 [.., I] that have
    still to be quantized, with per-token scales. Unwritten rows are NaN, or bytes of one."""


@dataclass(frozen=True)
class _Rows:
    """The tokens of one expert."""

    values: torch.Tensor
    """float32 [n, H], codes times block scales."""
    scale: torch.Tensor | None
    """float32 [n, 1]: per_token_scale."""
    delta: torch.Tensor | None
    """float32 [n, 2 I]: of LoRA, in the units of the accumulator, up before gate."""


def run_experts(launch: Launch, chosen: Chosen) -> Unfinalized:
    """Each chosen expert on its tokens.

    Raises:
        LaunchError, NotImplementedError: the activation is not one of the kernel's, or of the stand-in's.
    """
    curve = activation(launch.era, launch.call)
    rows = chosen.experts - launch.sizes.local_offset
    here = (rows >= 0) & (rows < launch.rows)
    permuted = torch.full_like(rows, -1, dtype=torch.int32)
    found = unwritten(launch, _most_rows(launch), permuted)
    values = _input(launch)
    start = 0
    for row in sorted(set(rows[here].tolist())):
        slots = (rows == row).nonzero().flatten()
        where = torch.arange(start, start + len(slots), device=rows.device)
        hidden = _gemm1(launch, row, _rows(launch, row, values, chosen.tokens[slots], slots), curve)
        found.gemm2_output[where], found.gemm1_output[where] = _gemm2(launch, row, hidden)
        permuted[slots] = where.to(torch.int32)
        start += -(-len(slots) // _TILE) * _TILE
    return found


def unwritten(launch: Launch, count: int, permuted: torch.Tensor) -> Unfinalized:
    """`count` rows that no kernel has written."""
    device = permuted.device
    output = torch.full((count, launch.hidden), torch.nan, dtype=torch.bfloat16, device=device)
    if launch.per_token is None:
        codes = torch.full((count, launch.intermediate // 2), 0xFF, dtype=torch.uint8, device=device)
        return Unfinalized(output, permuted, codes)
    hidden = torch.full((count, launch.intermediate), torch.nan, dtype=torch.bfloat16, device=device)
    return Unfinalized(output, permuted, hidden)


def finalize(launch: Launch, chosen: Chosen, experts: Unfinalized) -> torch.Tensor:
    """bf16 [T, H]: the weighted rows in slot order, summed in float32, rounded once."""
    permuted = experts.permuted.reshape(launch.tokens, launch.slots).to(torch.int64)
    unknown = (chosen.experts < 0).reshape(permuted.shape)
    total = torch.zeros(launch.tokens, launch.hidden, device=permuted.device)
    for slot in range(launch.slots):
        index = permuted[:, slot]
        row = chosen.weights[:, slot, None].float() * experts.gemm2_output[index.clamp(min=0)].float()
        total += torch.where(index[:, None] >= 0, row, 0.0)
        # The index itself was never written; whatever row it names.
        total.masked_fill_(unknown[:, slot, None], torch.nan)
    return total.to(torch.bfloat16)


def _input(launch: Launch) -> torch.Tensor:
    """float32 [T, H]: codes times block scales, without the global scale, which is in the output scalars."""
    codes, scale = launch.call.tensor("hidden_states"), launch.call.tensor("hidden_states_scale")
    linear = scale.flatten().view(torch.uint8)[: launch.tokens * launch.hidden // 16]
    linear = linear.view(torch.float8_e4m3fn).reshape(launch.tokens, launch.hidden // 16)
    return _raw(codes, linear)


def _rows(launch: Launch, row: int, values: torch.Tensor, tokens: torch.Tensor, slots: torch.Tensor) -> _Rows:
    scale, delta = launch.per_token, launch.lora
    if delta is not None:
        # The Python wrapper divides, and rounds, because the kernel adds the numbers to the raw accumulator.
        raw = delta.flatten(0, 1)[slots].float() / launch.call["output1_scale_gate_scalar"][row]
        delta = raw.to(delta.dtype).float()
    return _Rows(values[tokens], None if scale is None else scale.flatten()[tokens, None], delta)


def _gemm1(launch: Launch, row: int, rows: _Rows, curve: Activation) -> torch.Tensor:
    """float32 [n, I]: what the epilogue stores, before it is rounded to what it is stored as."""
    call = launch.call
    gate_up = deinterleave_gate_up(_weight(launch, "gemm1", row, 2 * launch.intermediate, launch.hidden))
    accumulated = rows.values @ gate_up.T
    if rows.scale is not None:
        accumulated = accumulated * rows.scale
    if rows.delta is not None:
        accumulated = accumulated + rows.delta
    elif call.get("gemm1_bias") is not None:
        # The bias lies in the order of the weights' rows, and is added to the raw accumulator.
        bias = deinterleave_gate_up(unshuffle_rows(call["gemm1_bias"][row].unsqueeze(1)))
        accumulated = accumulated + bias.flatten()
    up, gate = accumulated.chunk(2, dim=-1)
    given = (call.get("gemm1_alpha"), call.get("gemm1_beta"), call.get("gemm1_clamp_limit"))
    alpha, beta, clamp = (None if one is None else one[row] for one in given)
    scalars = Scalars(call["output1_scale_scalar"][row], call["output1_scale_gate_scalar"][row], alpha, beta, clamp)
    return curve(up, gate, scalars)


def _gemm2(launch: Launch, row: int, hidden: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """bf16 [n, H] without the routing weight, and what GEMM1 has left for it."""
    call, weight = launch.call, _weight(launch, "gemm2", row, launch.hidden, launch.intermediate)
    if launch.per_token is None:
        # The epilogue quantizes with a global scale of 1: the real one is part of output1_scale_scalar.
        quantized = quantize(hidden, 1.0, None)
        codes, block_scale, left = quantized.codes, quantized.block_scale, quantized.codes
        accumulated = _raw(codes, block_scale) @ weight.T
    else:
        left, recipe = hidden.to(torch.bfloat16), recipe_of(launch)
        codes, block_scale, scale = quantize_per_token(left, per_token_scale_inv(recipe), recipe)
        accumulated = scale[:, None] * (_raw(codes, block_scale) @ weight.T)
    if call.get("gemm2_bias") is not None:
        accumulated = accumulated + unshuffle_rows(call["gemm2_bias"][row].unsqueeze(1)).flatten()
    output: torch.Tensor = call["output2_scale_scalar"][row] * accumulated
    return output.to(torch.bfloat16), left


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
