# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators
"""The second grouped GEMM, and the sum over each token's experts."""

from __future__ import annotations

import triton
import triton.language as tl

from flashinfer_compat.backends.triton.overlap import wait_for_launch_before
from flashinfer_compat.backends.triton.pairs import pair_expert
from flashinfer_compat.backends.triton.product import block_of_pairs, load_rows, load_weights, multiply

__all__ = ["combine", "down"]


@triton.jit
def _store(row_at, m, values, wanted, hidden: tl.constexpr, block_m: tl.constexpr):
    mask = wanted[None, :]
    # A mask that varies along a row would cut wide stores to single values.
    if hidden % block_m != 0:
        mask = mask & (m < hidden)[:, None]
    tl.store(row_at + m[:, None], values.to(row_at.dtype.element_ty), mask=mask)


@triton.jit
def down(
    x,
    slot_pair,
    block_expert,
    block_size,
    num_blocks,
    weight,
    block_scale,
    appended_weight,
    appended_block_scale,
    scale,
    out,
    hidden: tl.constexpr,
    intermediate: tl.constexpr,
    appended_intermediate: tl.constexpr,
    experts: tl.constexpr,
    block_m: tl.constexpr,
    block_t: tl.constexpr,
    block_k: tl.constexpr,
    tiles: tl.constexpr,
    interpreted: tl.constexpr,
    overlaps: tl.constexpr,
):
    """`tiles` tiles of `block_m` rows for one block of pairs: `out` [pairs, hidden], scaled but not weighed.

    More than one tile only where `block_k` is all of K: the loop over tiles then keeps loads in flight.
    """
    wait_for_launch_before(overlaps)
    groups: tl.constexpr = (hidden + tiles * block_m - 1) // (tiles * block_m)
    program = tl.program_id(0)
    tile = program % groups * tiles
    block = program // groups
    if block >= tl.load(num_blocks):
        return
    expert, pair, _ = block_of_pairs(block, block_expert, block_size, slot_pair, slot_pair, block_t)
    codes, scales = appended_weight, appended_block_scale
    words = appended_intermediate // 8
    blocks = appended_intermediate // 16
    if experts > 0:
        if appended_intermediate > 0 and expert >= experts:
            skipped = (expert - experts) * intermediate
            codes += skipped // 8
            scales += skipped // 16
        else:
            codes = weight + expert.to(tl.int64) * (hidden * (intermediate // 8))
            scales = block_scale + expert.to(tl.int64) * (hidden * (intermediate // 16))
            words = intermediate // 8
            blocks = intermediate // 16
    factor = tl.load(scale + expert)
    lane = tl.arange(0, block_m)
    row_at = out + pair.to(tl.int64)[None, :] * hidden
    wanted = pair >= 0
    if intermediate == block_k:
        right = load_rows(x, pair, wanted, 0, intermediate, block_k, interpreted)
        for t in range(tile, tl.minimum(tile + tiles, (hidden + block_m - 1) // block_m)):
            m = t * block_m + lane
            line = tl.minimum(m, hidden - 1)
            left = load_weights(codes, scales, line, words, blocks, 0, block_m, block_k, interpreted)
            acc = tl.dot(left, tl.trans(right)) * factor
            _store(row_at, m, acc, wanted, hidden, block_m)
    else:
        m = tile * block_m + lane
        acc = multiply(
            x,
            pair,
            wanted,
            codes,
            scales,
            tl.minimum(m, hidden - 1),
            words,
            blocks,
            0,
            intermediate // block_k,
            intermediate,
            block_m,
            block_t,
            block_k,
            interpreted,
        )
        _store(row_at, m, acc * factor, wanted, hidden, block_m)


@triton.jit(do_not_specialize=["tokens", "first_expert"])
def combine(
    y,
    extra,
    ids,
    weights,
    out,
    tokens,
    first_expert,
    hidden: tl.constexpr,
    experts: tl.constexpr,
    top_k: tl.constexpr,
    appended: tl.constexpr,
    packed: tl.constexpr,
    has_extra: tl.constexpr,
    width: tl.constexpr,
    overlaps: tl.constexpr,
):
    """Weigh and add each token's rows of `y` [pairs, hidden] in float32; `extra` [tokens, hidden] is added as it is."""
    wait_for_launch_before(overlaps)
    token = tl.program_id(0)
    column = tl.program_id(1) * width + tl.arange(0, width)
    inside = column < hidden
    total = tl.zeros((width,), tl.float32)
    for k in tl.static_range(top_k):
        pair = token * top_k + k
        expert = pair_expert(ids, pair, tokens, first_expert, experts, top_k, appended, packed)
        weight = tl.load(weights + pair)
        # A packed pair is (id << 16) | bf16 bits, and bf16 is the upper half of a float32.
        weight = (weight << 16).to(tl.float32, bitcast=True) if packed else weight.to(tl.float32)
        held = tl.where(expert < experts, hidden, 0)
        row = tl.load(y + pair.to(tl.int64) * hidden + column, mask=column < held, other=0.0)
        total += weight * row.to(tl.float32)
    for s in tl.static_range(appended):
        pair = tokens * top_k + s * tokens + token
        total += tl.load(y + pair.to(tl.int64) * hidden + column, mask=inside, other=0.0).to(tl.float32)
    if has_extra:
        total += tl.load(extra + token.to(tl.int64) * hidden + column, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + token.to(tl.int64) * hidden + column, total.to(out.dtype.element_ty), mask=inside)
