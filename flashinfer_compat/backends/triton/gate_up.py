# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators
"""The first grouped GEMM, gate and up at once, and the gated activation."""

from __future__ import annotations

import triton
import triton.language as tl

from flashinfer_compat.backends.triton.activations import gated, to_plane_order
from flashinfer_compat.backends.triton.overlap import wait_for_launch_before
from flashinfer_compat.backends.triton.pairs import pair_expert
from flashinfer_compat.backends.triton.product import block_of_pairs, multiply
from flashinfer_compat.backends.triton.rounding import UNROUNDED, round_to_nvfp4

__all__ = ["activate", "gate_up"]

_UNROUNDED = tl.constexpr(UNROUNDED)


@triton.jit
def _sides(acc, block_m: tl.constexpr, block_t: tl.constexpr):
    """Rows as `gate_up` takes them, to gate and up [block_m / 16, 8, block_t]; no value changes its thread."""
    return tl.split(tl.permute(tl.reshape(acc, (block_m // 16, 2, 8, block_t)), (0, 2, 3, 1)))


@triton.jit(do_not_specialize=["rows", "pairs"])
def gate_up(
    x,
    slot_pair,
    slot_row,
    block_expert,
    block_size,
    num_blocks,
    weight,
    block_scale,
    appended_weight,
    appended_block_scale,
    scale,
    down_input_scale,
    out,
    partial,
    rows,
    pairs,
    hidden: tl.constexpr,
    intermediate: tl.constexpr,
    appended_intermediate: tl.constexpr,
    experts: tl.constexpr,
    geglu: tl.constexpr,
    rounding: tl.constexpr,
    sides: tl.constexpr,
    block_m: tl.constexpr,
    block_t: tl.constexpr,
    block_k: tl.constexpr,
    down_block_k: tl.constexpr,
    split_k: tl.constexpr,
    interpreted: tl.constexpr,
    overlaps: tl.constexpr,
):
    """One tile of block_m / 2 gate rows and as many up rows, over one of `split_k` parts of K, for one block of pairs.

    Without split_k the activation follows at once: `out` is bf16 [pairs, intermediate] in plane order of
    `down_block_k`, rounded but for its input scale as `rounding` says. With it `partial` gets float32
    [split_k, pairs, 2, intermediate], which `activate` sums. `scale` is float32 [experts, 2].
    """
    wait_for_launch_before(overlaps)
    tiles: tl.constexpr = (2 * intermediate + block_m - 1) // block_m
    program = tl.program_id(0)
    tile = program % tiles
    part = program // tiles % split_k
    block = program // (tiles * split_k)
    if block >= tl.load(num_blocks):
        return
    expert, pair, row = block_of_pairs(block, block_expert, block_size, slot_pair, slot_row, block_t)

    # Eight gate rows, then their eight up rows: gate and up of one value end in one thread.
    m = tl.arange(0, block_m)
    side = m // 8 % 2
    first: tl.constexpr = block_m // 2
    i = tl.minimum(tile * first + m // 16 * 8 + m % 8, intermediate - 1)
    words: tl.constexpr = hidden // 8
    blocks: tl.constexpr = hidden // 16
    if experts == 0:
        line = side * appended_intermediate + expert * intermediate + i
        codes, scales = appended_weight, appended_block_scale
    else:
        line = side * intermediate + i
        codes = weight + expert.to(tl.int64) * (2 * intermediate * words)
        scales = block_scale + expert.to(tl.int64) * (2 * intermediate * blocks)
        if appended_intermediate > 0 and expert >= experts:
            codes, scales = appended_weight, appended_block_scale
            line = side * appended_intermediate + (expert - experts) * intermediate + i

    tile_count: tl.constexpr = hidden // block_k
    per_part: tl.constexpr = (tile_count + split_k - 1) // split_k
    begin = part * per_part
    end = tl.minimum(begin + per_part, tile_count)
    for given in tl.static_range(sides):
        acc = multiply(
            x + (given * rows).to(tl.int64) * hidden,
            row,
            pair >= 0,
            codes,
            scales,
            line,
            words,
            blocks,
            begin,
            end,
            hidden,
            block_m,
            block_t,
            block_k,
            interpreted,
        )
        of_gate, up = _sides(acc, block_m, block_t)
        if given == 0:
            gate = of_gate

    group = tl.arange(0, block_m // 16)[:, None, None]
    lane = tl.arange(0, 8)[None, :, None]
    value = tile * first + group * 8 + lane
    target = pair[None, None, :]
    inside = target >= 0
    # A mask that varies along a row would cut wide stores to single values.
    if intermediate % first != 0:
        inside = inside & (value < intermediate)
    if split_k > 1:
        place = partial + ((part * pairs + target).to(tl.int64) * 2) * intermediate + value
        tl.store(place, gate, mask=inside)
        tl.store(place + intermediate, up, mask=inside)
    else:
        gate *= tl.load(scale + 2 * expert)
        up *= tl.load(scale + 2 * expert + 1)
        hidden_value = gated(gate, up, geglu)
        if rounding != _UNROUNDED:
            blocks_of_16 = tl.reshape(hidden_value, (block_m // 32, 16, block_t))
            rounded = round_to_nvfp4(blocks_of_16, tl.load(down_input_scale + expert), rounding, interpreted)
            hidden_value = tl.reshape(rounded, (block_m // 16, 8, block_t))
        down_words: tl.constexpr = down_block_k // 8
        word = tile * (first // 8) + group
        order = word // down_words * down_block_k + lane * down_words + word % down_words
        place = out + target.to(tl.int64) * intermediate + order
        tl.store(place, hidden_value.to(tl.bfloat16), mask=inside)


@triton.jit(do_not_specialize=["tokens", "first_expert"])
def activate(
    partial,
    ids,
    scale,
    down_input_scale,
    out,
    tokens,
    first_expert,
    intermediate: tl.constexpr,
    experts: tl.constexpr,
    top_k: tl.constexpr,
    appended: tl.constexpr,
    packed: tl.constexpr,
    geglu: tl.constexpr,
    rounding: tl.constexpr,
    down_block_k: tl.constexpr,
    split_k: tl.constexpr,
    width: tl.constexpr,
    interpreted: tl.constexpr,
    overlaps: tl.constexpr,
):
    """Sum the parts of `gate_up`, then its activation, `width` values of a pair a program."""
    wait_for_launch_before(overlaps)
    pair = tl.program_id(0)
    pairs = tokens * (top_k + appended)
    expert = pair_expert(ids, pair, tokens, first_expert, experts, top_k, appended, packed)
    if expert >= experts + appended:
        return
    value = tl.program_id(1) * width + tl.arange(0, width)
    inside = value < intermediate
    gate = tl.zeros((width,), tl.float32)
    up = tl.zeros((width,), tl.float32)
    for part in tl.static_range(split_k):
        place = partial + ((part * pairs + pair).to(tl.int64) * 2) * intermediate + value
        gate += tl.load(place, mask=inside, other=0.0)
        up += tl.load(place + intermediate, mask=inside, other=0.0)
    result = gated(gate * tl.load(scale + 2 * expert), up * tl.load(scale + 2 * expert + 1), geglu)
    if rounding != _UNROUNDED:
        blocks = tl.reshape(result, (width // 16, 16))
        rounded = round_to_nvfp4(blocks, tl.load(down_input_scale + expert), rounding, interpreted)
        result = tl.reshape(rounded, (width,))
    ordered = to_plane_order(result.to(tl.bfloat16), width, down_block_k)
    tl.store(out + pair.to(tl.int64) * intermediate + value, ordered, mask=inside)
