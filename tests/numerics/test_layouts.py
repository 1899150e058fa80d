from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from flashinfer_compat.errors import ArgumentError, FlashInferCompatError, TensorError
from flashinfer_compat.numerics import (
    deinterleave_block_scale,
    deinterleave_gate_up,
    gate_up_permutation,
    interleave_block_scale,
    interleave_gate_up,
    inverse_permutation,
    permute_rows,
    shuffle_block_scale,
    shuffle_permutation,
    shuffle_rows,
    unshuffle_block_scale,
    unshuffle_rows,
    w2_permutation,
    w13_permutation,
)

PERMUTATIONS = [shuffle_permutation, gate_up_permutation, w13_permutation, w2_permutation]
DTYPES = [torch.uint8, torch.float8_e4m3fn]

leading = st.lists(st.integers(1, 3), max_size=2).map(tuple)
dtypes = st.sampled_from(DTYPES)
seeds = st.integers(0, 2**16)


def random_bytes(shape: tuple[int, ...], dtype: torch.dtype, seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, 256, shape, dtype=torch.uint8, generator=generator).view(dtype)


def same_bytes(a: torch.Tensor, b: torch.Tensor) -> bool:
    return a.dtype == b.dtype and torch.equal(a.view(torch.uint8), b.view(torch.uint8))


def offset_128x4(row: int, col: int, cols: int) -> int:
    """FlashInfer 0.7.4, get_sf_out_offset_128x4, for one matrix of `cols` scales a row."""
    col_tiles = (cols + 3) // 4
    return (row // 128 * col_tiles + col // 4) * 512 + row % 32 * 16 + row % 128 // 32 * 4 + col % 4


@given(leading, st.integers(1, 300), st.integers(1, 10), dtypes, seeds)
def test_interleaving_block_scales_can_be_undone(
    lead: tuple[int, ...], rows: int, cols: int, dtype: torch.dtype, seed: int
) -> None:
    scale = random_bytes((*lead, rows, cols), dtype, seed)
    interleaved = interleave_block_scale(scale)
    assert interleaved.shape == (*lead, -(-rows // 128) * 128, -(-cols // 4) * 4)
    assert interleaved.is_contiguous()
    assert same_bytes(deinterleave_block_scale(interleaved, rows, cols), scale)


@given(st.integers(1, 300), st.integers(1, 10), seeds)
def test_each_block_scale_lands_where_the_kernels_look(rows: int, cols: int, seed: int) -> None:
    scale = random_bytes((rows, cols), torch.uint8, seed)
    flat = interleave_block_scale(scale).flatten()
    offsets = torch.tensor([[offset_128x4(row, col, cols) for col in range(cols)] for row in range(rows)])
    assert torch.equal(flat[offsets], scale)
    rest = torch.ones_like(flat, dtype=torch.bool)
    rest[offsets.flatten()] = False
    assert int(flat[rest].sum()) == 0
    assert int(rest.sum()) == flat.numel() - rows * cols


def test_experts_are_interleaved_one_by_one() -> None:
    scale = random_bytes((3, 2, 130, 5), torch.float8_e4m3fn, 0)
    together = interleave_block_scale(scale)
    assert all(
        same_bytes(together[e, h].contiguous(), interleave_block_scale(scale[e, h])) for e in range(3) for h in range(2)
    )


def test_a_strided_view_is_interleaved_by_its_values() -> None:
    scale = random_bytes((8, 256), torch.float8_e4m3fn, 0).T
    assert same_bytes(interleave_block_scale(scale), interleave_block_scale(scale.contiguous()))


def test_layers_without_experts_stay_empty() -> None:
    empty = torch.empty(0, 130, 5, dtype=torch.uint8)
    assert interleave_block_scale(empty).shape == (0, 256, 8)
    assert deinterleave_block_scale(interleave_block_scale(empty), 130, 5).shape == (0, 130, 5)


@pytest.mark.parametrize("permutation", PERMUTATIONS)
@given(blocks=st.integers(1, 9))
def test_every_permutation_is_a_bijection_with_an_inverse(permutation, blocks: int) -> None:  # type: ignore[no-untyped-def]
    rows = 32 * blocks
    index = permutation(rows)
    assert index.dtype == torch.int64
    assert torch.equal(index.sort().values, torch.arange(rows))
    assert torch.equal(index[inverse_permutation(index)], torch.arange(rows))
    assert torch.equal(inverse_permutation(inverse_permutation(index)), index)


def test_the_shuffle_stays_within_32_rows() -> None:
    first = [8 * (r % 4) + r // 4 for r in range(32)]  # where FlashInfer's srcToDstBlk32RowMap sends row r
    assert first[:6] == [0, 8, 16, 24, 1, 9]
    index = shuffle_permutation(96)
    assert inverse_permutation(index).tolist() == [32 * block + row for block in range(3) for row in first]


def test_up_and_gate_rows_alternate() -> None:
    assert gate_up_permutation(6).tolist() == [0, 3, 1, 4, 2, 5]


def test_w13_alternates_and_then_shuffles() -> None:
    rows = torch.arange(64).view(64, 1)
    expected = shuffle_rows(interleave_gate_up(rows))
    assert torch.equal(permute_rows(rows, w13_permutation(64)), expected)
    assert torch.equal(permute_rows(rows, w2_permutation(64)), shuffle_rows(rows))


@given(leading, st.integers(1, 4), st.integers(1, 9), st.sampled_from([*DTYPES, torch.bfloat16]), seeds)
def test_row_orders_can_be_undone(lead: tuple[int, ...], blocks: int, cols: int, dtype: torch.dtype, seed: int) -> None:
    width = 2 if dtype == torch.bfloat16 else 1
    matrix = random_bytes((*lead, 32 * blocks, cols * width), torch.uint8, seed).view(dtype)
    assert same_bytes(unshuffle_rows(shuffle_rows(matrix)), matrix)
    assert same_bytes(deinterleave_gate_up(interleave_gate_up(matrix)), matrix)
    index = w13_permutation(32 * blocks)
    assert same_bytes(permute_rows(permute_rows(matrix, index), inverse_permutation(index)), matrix)


@given(leading, st.integers(1, 3), st.integers(1, 9), dtypes, seeds)
def test_shuffled_block_scales_can_be_undone(
    lead: tuple[int, ...], tiles: int, cols: int, dtype: torch.dtype, seed: int
) -> None:
    scale = random_bytes((*lead, 128 * tiles, cols), dtype, seed)
    shuffled = shuffle_block_scale(scale)
    assert same_bytes(shuffled, interleave_block_scale(shuffle_rows(scale)))
    assert same_bytes(unshuffle_block_scale(shuffled, cols), scale)


@pytest.mark.parametrize(
    ("call", "kind", "subject"),
    [
        (lambda: interleave_block_scale(torch.zeros(128, 4)), TensorError, "scale"),
        (lambda: interleave_block_scale(torch.zeros(4, dtype=torch.uint8)), TensorError, "scale"),
        (lambda: deinterleave_block_scale(torch.zeros(128, 4, dtype=torch.uint8), 129, 4), TensorError, "interleaved"),
        (lambda: deinterleave_block_scale(torch.zeros(128, 4, dtype=torch.uint8), 128, 5), TensorError, "interleaved"),
        (lambda: shuffle_rows(torch.zeros(48, 4)), ArgumentError, "rows"),
        (lambda: shuffle_rows(torch.zeros(32)), TensorError, "matrix"),
        (lambda: interleave_gate_up(torch.zeros(3, 4)), ArgumentError, "rows"),
        (lambda: shuffle_permutation(0), ArgumentError, "rows"),
        (lambda: permute_rows(torch.zeros(3, 4), shuffle_permutation(32)), TensorError, "matrix"),
        (lambda: shuffle_block_scale(torch.zeros(96, 4, dtype=torch.uint8)), ArgumentError, "rows"),
        (lambda: unshuffle_block_scale(torch.zeros(96, 4, dtype=torch.uint8), 4), ArgumentError, "rows"),
    ],
)
def test_what_cannot_be_laid_out_is_refused(call, kind: type[FlashInferCompatError], subject: str) -> None:  # type: ignore[no-untyped-def]
    with pytest.raises(kind) as caught:
        call()
    assert caught.value.argument == subject  # type: ignore[attr-defined]
