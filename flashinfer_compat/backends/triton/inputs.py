# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators
"""The first launch: hidden states as the GEMMs read them, and the pairs sorted by expert."""

from __future__ import annotations

import triton
import triton.language as tl

from flashinfer_compat.backends.triton.activations import to_plane_order
from flashinfer_compat.backends.triton.overlap import wait_for_launch_before
from flashinfer_compat.backends.triton.pairs import align_pairs, pair_expert, pair_token
from flashinfer_compat.backends.triton.rounding import UNROUNDED, round_to_nvfp4

__all__ = ["prepare_inputs"]

_UNROUNDED = tl.constexpr(UNROUNDED)


@triton.jit(do_not_specialize=["tokens", "first_expert"])
def prepare_inputs(
    x,
    x_stride,
    ids,
    counts,
    input_scale,
    slot_pair,
    slot_row,
    block_expert,
    block_size,
    num_blocks,
    rows,
    tokens,
    first_expert,
    hidden: tl.constexpr,
    experts: tl.constexpr,
    top_k: tl.constexpr,
    appended: tl.constexpr,
    packed: tl.constexpr,
    counted: tl.constexpr,
    rounding: tl.constexpr,
    sides: tl.constexpr,
    row_is_pair: tl.constexpr,
    bins: tl.constexpr,
    chunk_size: tl.constexpr,
    block_t: tl.constexpr,
    block_k: tl.constexpr,
    width: tl.constexpr,
    interpreted: tl.constexpr,
    overlaps: tl.constexpr,
):
    """Sort pairs in the first programs; in each other one, round and permute `width` values of a row.

    A row is a token, or a pair where experts have input scales of their own (`row_is_pair`); `sides` is 2 where gate
    and up have. `rows` is bf16 [sides, R, hidden].
    """
    wait_for_launch_before(overlaps)
    pairs = tokens * (top_k + appended)
    chunks = (pairs + chunk_size - 1) // chunk_size
    program = tl.program_id(0)
    if program < chunks:
        align_pairs(
            program,
            ids,
            counts,
            slot_pair,
            slot_row,
            block_expert,
            block_size,
            num_blocks,
            tokens,
            first_expert,
            experts,
            top_k,
            appended,
            packed,
            counted,
            row_is_pair,
            bins,
            chunk_size,
            block_t,
        )
        return
    tiles: tl.constexpr = (hidden + width - 1) // width
    row = (program - chunks) // tiles
    column = (program - chunks) % tiles * width + tl.arange(0, width)
    token = pair_token(row, tokens, top_k) if row_is_pair else row
    values = tl.load(x + token.to(tl.int64) * x_stride + column, mask=column < hidden, other=0.0).to(tl.float32)
    count = pairs if row_is_pair else tokens
    for side in tl.static_range(sides):
        rounded = values
        if rounding != _UNROUNDED:
            expert = 0
            if row_is_pair:
                expert = pair_expert(ids, row, tokens, first_expert, experts, top_k, appended, packed)
                # Rows of other ranks' experts are never read.
                expert = tl.minimum(expert, experts + appended - 1)
            scale = tl.load(input_scale + 2 * expert + side)
            blocks = tl.reshape(values, (width // 16, 16))
            rounded = tl.reshape(round_to_nvfp4(blocks, scale, rounding, interpreted), (width,))
        target = rows + (side * count + row).to(tl.int64) * hidden + column
        tl.store(target, to_plane_order(rounded.to(tl.bfloat16), width, block_k), mask=column < hidden)
