"""One grouped MLP: four or five launches from hidden states to a row of output for each (token, expert) pair."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton

from flashinfer_compat.backends.triton.down import down
from flashinfer_compat.backends.triton.gate_up import activate, gate_up
from flashinfer_compat.backends.triton.inputs import prepare_inputs
from flashinfer_compat.backends.triton.overlap import launch_options
from flashinfer_compat.backends.triton.pairs import count_pairs
from flashinfer_compat.backends.triton.rounding import ROUNDINGS, UNROUNDED
from flashinfer_compat.backends.triton.tiles import Tiles
from flashinfer_compat.backends.triton.weights import Experts
from flashinfer_compat.problem import Problem
from flashinfer_compat.vocabulary import Activation, Numerics

__all__ = ["INTERPRETED", "Choice", "run_mlp"]

INTERPRETED = bool(triton.knobs.runtime.interpret)
"""Whether kernels run in Triton's interpreter (TRITON_INTERPRET=1 before the first import), on CPU tensors."""

_CHUNK, _COUNTED_CHUNK = 128, 256
"""Pairs that one program sorts: fewer where it also counts them."""
_LEAST_WIDTH, _WIDTH = 256, 1024
"""Values of a row that one program reads. With fewer values than threads Triton 3.6 carries the layout of a permutation
back into a reduction, and that one is then wrong."""
_COUNTED_PAIRS = 2048
"""From so many routed pairs on, a launch of its own counts them."""
_BF16_ROWS = 2048
"""From so many pairs on, rows of output are kept in bf16, not float32: then their traffic counts."""


@dataclass(frozen=True)
class Choice:
    """The experts chosen for each token."""

    ids: torch.Tensor
    """int32 or int64 [T, top_k], or packed int32; any tensor where top_k is 0."""
    packed: bool
    top_k: int
    first_expert: int
    """Id of the first routed expert held."""


def run_mlp(
    x: torch.Tensor, experts: Experts, choice: Choice, problem: Problem, tiles: Tiles, overlaps: bool
) -> torch.Tensor:
    """Each pair's row of output, scaled but not weighed: [T * top_k + num_appended * T, hidden_size].

    float32, or bfloat16 for many pairs; in the order of `pairs`. Rows of experts that are not held are not written.

    Args:
        x: [T, hidden_size], T > 0, last axis contiguous.
        experts: what to multiply by.
        choice: which experts each token goes to.
        problem: the activation and numerics.
        tiles: how to cut the products.
        overlaps: whether each launch is made ready while the one before runs.
    """
    tokens, device = x.shape[0], x.device
    hidden, intermediate = experts.hidden_size, experts.intermediate_size
    pairs = tokens * (choice.top_k + experts.num_appended)
    count = experts.num_routed + experts.num_appended
    rows = pairs if experts.scale_per_pair else tokens
    blocks = _most_blocks(tokens, experts, choice.top_k, tiles.block_t)
    rounding = ROUNDINGS[experts.arithmetic] if problem.numerics is Numerics.W4A4 else UNROUNDED
    geglu = problem.activation is Activation.GEGLU
    first, second = tiles.gate_up, tiles.down

    ordered = x.new_empty((experts.scale_sides, rows, hidden), dtype=torch.bfloat16)
    # A multiple of 4 keeps every table aligned to 16 bytes; Triton compiles a kernel anew for another alignment.
    length = (blocks + 3) // 4 * 4
    slots = torch.empty((2 * blocks * tiles.block_t + 2 * length + 1,), dtype=torch.int32, device=device)
    slot_pair, slot_row, block_expert, block_size, num_blocks = slots.split(  # type: ignore[no-untyped-call]
        (blocks * tiles.block_t, blocks * tiles.block_t, length, length, 1)
    )
    between = x.new_empty((pairs, intermediate), dtype=torch.bfloat16)
    partial = x.new_empty((first.split_k, pairs, 2, intermediate), dtype=torch.float32) if first.split_k > 1 else x
    y = x.new_empty((pairs, hidden), dtype=torch.float32 if pairs < _BF16_ROWS else torch.bfloat16)

    which = {
        "experts": experts.num_routed,
        "top_k": choice.top_k,
        "appended": experts.num_appended,
        "packed": choice.packed,
    }
    options = launch_options(overlaps)
    width = _width(first.block_k, hidden)
    bins = triton.next_power_of_2(count + 1)
    routed = tokens * choice.top_k
    counted, counts = routed >= _COUNTED_PAIRS, slots
    chunk = _COUNTED_CHUNK if counted else min(_CHUNK, triton.next_power_of_2(max(pairs, 16)))
    if counted:
        chunks = triton.cdiv(routed, chunk)
        counts = torch.empty((chunks, bins), dtype=torch.int32, device=device)
        count_pairs[(chunks,)](
            choice.ids,
            counts,
            tokens,
            choice.first_expert,
            experts=experts.num_routed,
            top_k=choice.top_k,
            packed=choice.packed,
            bins=bins,
            chunk_size=chunk,
            **options,
        )
    prepare_inputs[(triton.cdiv(pairs, chunk) + rows * triton.cdiv(hidden, width),)](
        x,
        x.stride(0),
        choice.ids,
        counts,
        experts.gate_up_input_scale,
        slot_pair,
        slot_row,
        block_expert,
        block_size,
        num_blocks,
        ordered,
        tokens,
        choice.first_expert,
        hidden=hidden,
        **which,
        counted=counted,
        rounding=rounding,
        sides=experts.scale_sides,
        row_is_pair=experts.scale_per_pair,
        bins=bins,
        chunk_size=chunk,
        block_t=tiles.block_t,
        block_k=first.block_k,
        width=width,
        interpreted=INTERPRETED,
        **options,
    )
    weights, shared = experts.routed, experts.appended
    shared_width = experts.num_appended * intermediate
    gate_up[(blocks * first.split_k * triton.cdiv(2 * intermediate, first.block_m),)](
        ordered,
        slot_pair,
        slot_row,
        block_expert,
        block_size,
        num_blocks,
        weights.gate_up_weight,
        weights.gate_up_block_scale,
        shared.gate_up_weight,
        shared.gate_up_block_scale,
        experts.gate_up_scale,
        experts.down_input_scale,
        between,
        partial,
        rows,
        pairs,
        hidden=hidden,
        intermediate=intermediate,
        appended_intermediate=shared_width,
        experts=experts.num_routed,
        geglu=geglu,
        rounding=rounding,
        sides=experts.scale_sides,
        block_m=first.block_m,
        block_t=tiles.block_t,
        block_k=first.block_k,
        down_block_k=second.block_k,
        split_k=first.split_k,
        interpreted=INTERPRETED,
        **options,
        num_warps=first.warps,
        num_stages=first.stages,
    )
    if first.split_k > 1:
        width = _width(second.block_k, intermediate)
        activate[(pairs, triton.cdiv(intermediate, width))](
            partial,
            choice.ids,
            experts.gate_up_scale,
            experts.down_input_scale,
            between,
            tokens,
            choice.first_expert,
            intermediate=intermediate,
            **which,
            geglu=geglu,
            rounding=rounding,
            down_block_k=second.block_k,
            split_k=first.split_k,
            width=width,
            interpreted=INTERPRETED,
            **options,
        )
    down[(blocks * triton.cdiv(hidden, second.block_m * second.tiles),)](
        between,
        slot_pair,
        block_expert,
        block_size,
        num_blocks,
        weights.down_weight,
        weights.down_block_scale,
        shared.down_weight,
        shared.down_block_scale,
        experts.down_scale,
        y,
        hidden=hidden,
        intermediate=intermediate,
        appended_intermediate=shared_width,
        experts=experts.num_routed,
        block_m=second.block_m,
        block_t=tiles.block_t,
        block_k=second.block_k,
        tiles=second.tiles,
        interpreted=INTERPRETED,
        **options,
        num_warps=second.warps,
        num_stages=second.stages,
    )
    return y


def _most_blocks(tokens: int, experts: Experts, top_k: int, block_t: int) -> int:
    """How many blocks the pairs can need at most, whatever was chosen."""
    routed = tokens * top_k
    if routed > experts.num_routed:
        routed = experts.num_routed + (routed - experts.num_routed) // block_t
    return routed + experts.num_appended * -(-tokens // block_t)


def _width(block: int, size: int) -> int:
    """How many values of a row of `size` one program takes: a power of two, a multiple of `block`."""
    return max(block, _LEAST_WIDTH, min(_WIDTH, int(triton.next_power_of_2(size))))
