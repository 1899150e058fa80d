# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators
"""The product that both grouped GEMMs share: weight rows of one expert times the activations of one block of pairs."""

from __future__ import annotations

import triton
import triton.language as tl

from flashinfer_compat.backends.triton.decode import dequantize

__all__ = ["block_of_pairs", "load_rows", "load_weights", "multiply"]


@triton.jit
def block_of_pairs(block, block_expert, block_size, slot_pair, slot_row, block_t: tl.constexpr):
    """The expert of a block, its pairs (-1: none) and the rows of their activations."""
    lane = tl.arange(0, block_t)
    slot = block * block_t + lane
    # Loads first: none of them waits for another.
    pair, row, size = tl.load(slot_pair + slot), tl.load(slot_row + slot), tl.load(block_size + block)
    return tl.load(block_expert + block), tl.where(lane < size, pair, -1), tl.where(lane < size, row, 0)


@triton.jit
def load_weights(
    codes,
    scales,
    line,
    line_words,
    line_blocks,
    step,
    block_m: tl.constexpr,
    block_k: tl.constexpr,
    interpreted: tl.constexpr,
):
    """Weights [block_m, block_k] of K step `step`; `line_words` and `line_blocks` are the strides of a weight line."""
    words: tl.constexpr = block_k // 8
    blocks: tl.constexpr = block_k // 16
    code_at = codes + (line * line_words)[:, None] + (step * words + tl.arange(0, words))[None, :]
    scale_at = scales + (line * line_blocks)[:, None] + (step * blocks + tl.arange(0, blocks))[None, :]
    return dequantize(tl.load(code_at), tl.load(scale_at), block_m, block_k, interpreted)


@triton.jit
def load_rows(x, row, wanted, step, size: tl.constexpr, block_k: tl.constexpr, interpreted: tl.constexpr):
    """Activations [rows, block_k] of K step `step`, zero where not wanted; `size` is the length of a row."""
    at = x + row.to(tl.int64)[:, None] * size + (step * block_k + tl.arange(0, block_k))[None, :]
    values = tl.load(at, mask=wanted[:, None], other=0.0)
    return values.to(tl.float32) if interpreted else values


@triton.jit
def multiply(
    x,
    row,
    wanted,
    codes,
    scales,
    line,
    line_words,
    line_blocks,
    begin,
    end,
    size: tl.constexpr,
    block_m: tl.constexpr,
    block_t: tl.constexpr,
    block_k: tl.constexpr,
    interpreted: tl.constexpr,
):
    """Float32 [block_m, block_t]: weight lines times activation rows, over the K steps begin..end.

    Weights are the left operand: dequantized in registers, they go into the tensor cores without passing through
    shared memory.
    """
    acc = tl.zeros((block_m, block_t), tl.float32)
    for step in range(begin, end):
        left = load_weights(codes, scales, line, line_words, line_blocks, step, block_m, block_k, interpreted)
        right = load_rows(x, row, wanted, step, size, block_k, interpreted)
        acc = tl.dot(left, tl.trans(right), acc)
    return acc
