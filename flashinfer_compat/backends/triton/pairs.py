# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators
"""(token, expert) pairs, and the blocks of pairs of one expert that the GEMMs run over.

Pair t * top_k + k is token t's k-th routed expert; behind those, pair tokens * top_k + s * tokens + t is token t's
appended expert s, which has id `experts + s` here.
"""

from __future__ import annotations

import triton
import triton.language as tl

from flashinfer_compat.backends.triton.overlap import wait_for_launch_before

__all__ = ["align_pairs", "count_pairs", "pair_expert", "pair_token"]

_COUNTED_LINES = tl.constexpr(16)
_COMPARED = tl.constexpr(16)
_SCANNED = tl.constexpr(512)


@triton.jit
def pair_token(pair, tokens, top_k: tl.constexpr):
    """The token of a pair."""
    appended = pair - tokens * top_k
    if top_k == 0:
        return appended % tokens
    return tl.where(appended < 0, pair // top_k, appended % tokens)


@triton.jit
def pair_expert(
    ids,
    pair,
    tokens,
    first_expert,
    experts: tl.constexpr,
    top_k: tl.constexpr,
    appended: tl.constexpr,
    packed: tl.constexpr,
):
    """The expert of each pair as it is counted here, or experts + appended for no pair and for other ranks' experts."""
    routed = pair < tokens * top_k
    expert = experts + (pair - tokens * top_k) // tokens
    if top_k > 0:
        chosen = tl.load(ids + pair, mask=routed, other=0).to(tl.int32)
        if packed:
            chosen = chosen >> 16
        chosen -= first_expert
        here = (chosen >= 0) & (chosen < experts)
        expert = tl.where(routed, tl.where(here, chosen, experts + appended), expert)
    return tl.where(pair < tokens * (top_k + appended), expert, experts + appended)


@triton.jit
def _count(
    ids, begin, end, first_expert, experts: tl.constexpr, packed: tl.constexpr, bins: tl.constexpr, step: tl.constexpr
):
    """How many of the routed pairs begin..end each expert has."""
    total = tl.zeros((bins,), tl.int32)
    for start in range(begin, end, step):
        pair = start + tl.arange(0, step)
        chosen = tl.load(ids + pair, mask=pair < end, other=-1).to(tl.int32)
        if packed:
            chosen = chosen >> 16
        chosen -= first_expert
        here = (pair < end) & (chosen >= 0) & (chosen < experts)
        total += tl.histogram(tl.where(here, chosen, 0), bins, mask=here)
    return total


@triton.jit(do_not_specialize=["tokens", "first_expert"])
def count_pairs(
    ids,
    counts,
    tokens,
    first_expert,
    experts: tl.constexpr,
    top_k: tl.constexpr,
    packed: tl.constexpr,
    bins: tl.constexpr,
    chunk_size: tl.constexpr,
    overlaps: tl.constexpr,
):
    """`counts` [chunks, bins] for many pairs, so that `align_pairs` need not read all of them in every program."""
    wait_for_launch_before(overlaps)
    begin = tl.program_id(0) * chunk_size
    end = tl.minimum(begin + chunk_size, tokens * top_k)
    found = _count(ids, begin, end, first_expert, experts, packed, bins, chunk_size)
    tl.store(counts + tl.program_id(0) * bins + tl.arange(0, bins), found)


@triton.jit
def align_pairs(
    chunk,
    ids,
    counts,
    slot_pair,
    slot_row,
    block_expert,
    block_size,
    num_blocks,
    tokens,
    first_expert,
    experts: tl.constexpr,
    top_k: tl.constexpr,
    appended: tl.constexpr,
    packed: tl.constexpr,
    counted: tl.constexpr,
    row_is_pair: tl.constexpr,
    bins: tl.constexpr,
    chunk_size: tl.constexpr,
    block_t: tl.constexpr,
):
    """Give each pair of one chunk its slot; the first chunk also describes the blocks.

    Pairs are sorted by expert, pairs of an expert in their order, each expert's in blocks of `block_t` slots of their
    own; `block_size` says how many slots of a block hold a pair. Few pairs are counted by every program, many by
    `count_pairs` before (`counted`); either way there are no atomics whose order could show. `bins` is a power of two
    above experts + appended, the number of what is no pair here.
    """
    routed = tokens * top_k
    first = chunk * chunk_size
    number = tl.arange(0, bins)
    before = tl.zeros((bins,), tl.int32)
    total = tl.zeros((bins,), tl.int32)
    if counted:
        line = tl.arange(0, _COUNTED_LINES)[:, None]
        chunks = (routed + chunk_size - 1) // chunk_size
        for start in range(0, chunks, _COUNTED_LINES):
            at = counts + (start + line) * bins + number[None, :]
            found = tl.load(at, mask=(start + line < chunks) & (number < bins)[None, :], other=0)
            total += tl.sum(found, 0)
            before += tl.sum(tl.where(start + line < chunk, found, 0), 0)
    elif top_k > 0:
        middle = tl.minimum(first, routed)
        before += _count(ids, 0, middle, first_expert, experts, packed, bins, _SCANNED)
        total += before + _count(ids, middle, routed, first_expert, experts, packed, bins, _SCANNED)
    is_appended = (number >= experts) & (number < experts + appended)
    earlier_appended = tl.minimum(tl.maximum(first - routed - (number - experts) * tokens, 0), tokens)
    before = tl.where(is_appended, earlier_appended, before)
    total = tl.where(is_appended, tokens, total)
    blocks = (total + block_t - 1) // block_t
    block_start = tl.cumsum(blocks, 0) - blocks

    lane = tl.arange(0, chunk_size)
    pair = first + lane
    expert = pair_expert(ids, pair, tokens, first_expert, experts, top_k, appended, packed)
    rank = tl.zeros((chunk_size,), tl.int32)
    # The whole square at once would not fit into registers; unrolled, all loads are in flight at once.
    for part in tl.static_range(0, chunk_size, _COMPARED):
        other = part + tl.arange(0, _COMPARED)
        other_expert = pair_expert(ids, first + other, tokens, first_expert, experts, top_k, appended, packed)
        earlier = (expert[:, None] == other_expert[None, :]) & (other[None, :] < lane[:, None])
        rank += tl.sum(earlier.to(tl.int32), 1)
    slot = tl.gather(block_start * block_t + before, expert, 0) + rank
    placed = expert < experts + appended
    tl.store(slot_pair + slot, pair, mask=placed)
    row = pair if row_is_pair else pair_token(pair, tokens, top_k)
    tl.store(slot_row + slot, row, mask=placed)

    if chunk == 0:
        tl.store(num_blocks, tl.sum(blocks))
        for index in range(tl.max(tl.where(is_appended, 0, blocks))):
            at = block_start + index
            described = (index < blocks) & (number < experts)
            tl.store(block_expert + at, number, mask=described)
            tl.store(block_size + at, tl.minimum(total - index * block_t, block_t), mask=described)
        for s in tl.static_range(appended):
            own = tl.sum(tl.where(number == experts + s, block_start, 0))
            for first_block in range(0, (tokens + block_t - 1) // block_t, bins):
                later = first_block + number
                described = later * block_t < tokens
                tl.store(block_expert + own + later, experts + s, mask=described)
                tl.store(block_size + own + later, tl.minimum(tokens - later * block_t, block_t), mask=described)
