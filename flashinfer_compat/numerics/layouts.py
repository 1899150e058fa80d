"""The orders in which FlashInfer's FP4 kernels want rows and block scales, each with its exact inverse.

A permutation is an int64 index: row i of the result is row index[i] of the input. Nothing here computes: bytes move, so
every function is bit-exact on any device and dtype. Leading axes (experts) are carried along. The trtllm kernels use an
epilogue tile of 128 rows, the only one here.
"""

from __future__ import annotations

import math

import torch

from flashinfer_compat.errors import ArgumentError, TensorError

__all__ = [
    "SCALE_COLS",
    "SCALE_ROWS",
    "SHUFFLE_ROWS",
    "deinterleave_block_scale",
    "deinterleave_gate_up",
    "gate_up_permutation",
    "interleave_block_scale",
    "interleave_gate_up",
    "inverse_permutation",
    "permute_rows",
    "shuffle_block_scale",
    "shuffle_permutation",
    "shuffle_rows",
    "unshuffle_block_scale",
    "unshuffle_rows",
    "w2_permutation",
    "w13_permutation",
]

SCALE_ROWS, SCALE_COLS = 128, 4
"""The tile of the 128x4 block scale layout."""
SHUFFLE_ROWS = 32
"""The rows the trtllm row shuffle moves among themselves."""

_ROW_GROUPS = SCALE_ROWS // 32
_SCALE_DTYPES = (torch.uint8, torch.float8_e4m3fn)


def interleave_block_scale(scale: torch.Tensor) -> torch.Tensor:
    """Row-major block scales to the 128x4 layout.

    Scale (r, c) lands at byte `(r//128 * C'/4 + c//4) * 512 + r%32 * 16 + r%128//32 * 4 + c%4` of its matrix, where R'
    and C' are R and C rounded up to 128 and 4; the padding is zero. Source: FlashInfer 0.7.4, `block_scale_interleave`
    (`get_sf_out_offset_128x4`), which returns the same bytes flat.

    Args:
        scale: uint8 or float8_e4m3fn [..., R, C].

    Returns:
        The same dtype, [..., R', C'], contiguous.

    Raises:
        TensorError: Another dtype, or fewer than two axes.
    """
    _require_scale(scale, "scale")
    rows, cols = scale.shape[-2:]
    padded_rows, padded_cols = _round_up(rows, SCALE_ROWS), _round_up(cols, SCALE_COLS)
    padded = torch.nn.functional.pad(scale.view(torch.uint8), (0, padded_cols - cols, 0, padded_rows - rows))
    tiles = padded.reshape(
        math.prod(scale.shape[:-2]),
        padded_rows // SCALE_ROWS,
        _ROW_GROUPS,
        SCALE_ROWS // _ROW_GROUPS,
        padded_cols // SCALE_COLS,
        SCALE_COLS,
    )
    interleaved = tiles.permute(0, 1, 4, 3, 2, 5).reshape(*scale.shape[:-2], padded_rows, padded_cols)
    return interleaved.contiguous().view(scale.dtype)


def deinterleave_block_scale(interleaved: torch.Tensor, rows: int, cols: int) -> torch.Tensor:
    """The inverse of `interleave_block_scale`, without the padding.

    Args:
        interleaved: uint8 or float8_e4m3fn [..., R', C'].
        rows: R, of the matrix before padding.
        cols: C, likewise.

    Returns:
        The same dtype, [..., R, C], contiguous.

    Raises:
        TensorError: Another dtype, or a shape that is not `rows` and `cols` rounded up to 128 and 4.
    """
    _require_scale(interleaved, "interleaved")
    padded_rows, padded_cols = _round_up(rows, SCALE_ROWS), _round_up(cols, SCALE_COLS)
    if tuple(interleaved.shape[-2:]) != (padded_rows, padded_cols):
        expected = f"[..., {padded_rows}, {padded_cols}] for {rows} rows and {cols} columns"
        raise TensorError("interleaved", expected, f"shape {tuple(interleaved.shape)}")
    tiles = interleaved.view(torch.uint8).reshape(
        math.prod(interleaved.shape[:-2]),
        padded_rows // SCALE_ROWS,
        padded_cols // SCALE_COLS,
        SCALE_ROWS // _ROW_GROUPS,
        _ROW_GROUPS,
        SCALE_COLS,
    )
    padded = tiles.permute(0, 1, 4, 3, 2, 5).reshape(*interleaved.shape[:-2], padded_rows, padded_cols)
    return padded[..., :rows, :cols].contiguous().view(interleaved.dtype)


def shuffle_permutation(rows: int, device: torch.device | str | None = None) -> torch.Tensor:
    """The trtllm row shuffle: in each 32 rows, row 8a + b of the result (a < 4) is row 4b + a of the input.

    Source: FlashInfer 0.7.4, `get_shuffle_matrix_a_row_indices` with epilogue_tile_m=128.

    Args:
        rows: A multiple of 32.
        device: Where the index lies; the CPU by default.

    Returns:
        int64 [rows].

    Raises:
        ArgumentError: `rows` is not a positive multiple of 32.
    """
    _require_multiple(rows, SHUFFLE_ROWS)
    return torch.arange(rows, device=device).view(-1, SHUFFLE_ROWS // 4, 4).transpose(1, 2).reshape(-1)


def gate_up_permutation(rows: int, device: torch.device | str | None = None) -> torch.Tensor:
    """Stacked halves [up; gate] to alternating rows up 0, gate 0, up 1, gate 1, ...

    Source: FlashInfer 0.7.4, `reorder_rows_for_gated_act_gemm`.

    Args:
        rows: 2 * intermediate_size.
        device: Where the index lies; the CPU by default.

    Returns:
        int64 [rows].

    Raises:
        ArgumentError: `rows` is not a positive even number.
    """
    _require_multiple(rows, 2)
    return torch.arange(rows, device=device).view(2, -1).T.reshape(-1)


def w13_permutation(rows: int, device: torch.device | str | None = None) -> torch.Tensor:
    """Stacked [up; gate] rows to the rows of the trtllm kernels' gemm1_weights: alternate, then shuffle.

    The same index serves weights and block scales. Source: FlashInfer 0.7.4, `_maybe_get_cached_w3_w1_permute_indices`
    with epilogue_tile_m=128.

    Args:
        rows: 2 * intermediate_size, a multiple of 32.
        device: Where the index lies; the CPU by default.

    Returns:
        int64 [rows].

    Raises:
        ArgumentError: `rows` is not a positive multiple of 32.
    """
    return gate_up_permutation(rows, device)[shuffle_permutation(rows, device)]


def w2_permutation(rows: int, device: torch.device | str | None = None) -> torch.Tensor:
    """The rows of a down projection to those of the trtllm kernels' gemm2_weights: the shuffle alone.

    The same index serves weights and block scales. Source: FlashInfer 0.7.4, `get_w2_permute_indices_with_cache` with
    epilogue_tile_m=128.

    Args:
        rows: hidden_size, a multiple of 32.
        device: Where the index lies; the CPU by default.

    Returns:
        int64 [rows].

    Raises:
        ArgumentError: `rows` is not a positive multiple of 32.
    """
    return shuffle_permutation(rows, device)


def inverse_permutation(index: torch.Tensor) -> torch.Tensor:
    """The permutation that undoes `index`, an int64 [rows]."""
    return torch.empty_like(index).scatter_(0, index, torch.arange(index.shape[0], device=index.device))


def permute_rows(matrix: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
    """`matrix[..., index, :]`, for any dtype.

    Args:
        matrix: [..., R, C].
        index: int64 [R], on the same device.

    Returns:
        The same dtype and shape, contiguous.

    Raises:
        TensorError: `matrix` has fewer than two axes, or not as many rows as `index`.
    """
    if matrix.ndim < 2 or matrix.shape[-2] != index.shape[0]:
        raise TensorError("matrix", f"shape [..., {index.shape[0]}, C]", f"shape {tuple(matrix.shape)}")
    # PyTorch has no index_select for float8 on the CPU.
    as_bytes = matrix.view(torch.uint8) if matrix.element_size() == 1 else matrix
    return as_bytes.index_select(-2, index).view(matrix.dtype)


def shuffle_rows(matrix: torch.Tensor) -> torch.Tensor:
    """FlashInfer's `shuffle_matrix_a(matrix, 128)` on [..., R, C], R a multiple of 32."""
    return permute_rows(matrix, shuffle_permutation(_rows(matrix), matrix.device))


def unshuffle_rows(matrix: torch.Tensor) -> torch.Tensor:
    """The inverse of `shuffle_rows`."""
    return permute_rows(matrix, inverse_permutation(shuffle_permutation(_rows(matrix), matrix.device)))


def interleave_gate_up(matrix: torch.Tensor) -> torch.Tensor:
    """FlashInfer's `reorder_rows_for_gated_act_gemm(matrix)` on [..., R, C]: [up; gate] to alternating rows."""
    return permute_rows(matrix, gate_up_permutation(_rows(matrix), matrix.device))


def deinterleave_gate_up(matrix: torch.Tensor) -> torch.Tensor:
    """The inverse of `interleave_gate_up`."""
    return permute_rows(matrix, inverse_permutation(gate_up_permutation(_rows(matrix), matrix.device)))


def shuffle_block_scale(scale: torch.Tensor) -> torch.Tensor:
    """Row-major block scales to the trtllm kernels' weight scales: row shuffle, then the 128x4 layout.

    Source: FlashInfer 0.7.4, `shuffle_matrix_sf_a(scale, 128)`, which returns the same bytes flat.

    Args:
        scale: uint8 or float8_e4m3fn [..., R, C], R a multiple of 128.

    Returns:
        The same dtype, [..., R, C'], C' being C rounded up to 4.

    Raises:
        ArgumentError: R is not a positive multiple of 128.
        TensorError: Another dtype, or fewer than two axes.
    """
    _require_scale(scale, "scale")
    _require_multiple(scale.shape[-2], SCALE_ROWS)
    return interleave_block_scale(shuffle_rows(scale))


def unshuffle_block_scale(shuffled: torch.Tensor, cols: int) -> torch.Tensor:
    """The inverse of `shuffle_block_scale`.

    Args:
        shuffled: uint8 or float8_e4m3fn [..., R, C'], R a multiple of 128.
        cols: C, before padding.

    Returns:
        The same dtype, [..., R, C].

    Raises:
        ArgumentError: R is not a positive multiple of 128.
        TensorError: Another dtype, or C' is not `cols` rounded up to 4.
    """
    _require_scale(shuffled, "shuffled")
    rows = shuffled.shape[-2]
    _require_multiple(rows, SCALE_ROWS)
    return unshuffle_rows(deinterleave_block_scale(shuffled, rows, cols))


def _rows(matrix: torch.Tensor) -> int:
    if matrix.ndim < 2:
        raise TensorError("matrix", "shape [..., R, C]", f"shape {tuple(matrix.shape)}")
    return matrix.shape[-2]


def _require_scale(scale: torch.Tensor, argument: str) -> None:
    if scale.dtype not in _SCALE_DTYPES:
        raise TensorError(argument, "uint8 or float8_e4m3fn", str(scale.dtype))
    if scale.ndim < 2:
        raise TensorError(argument, "shape [..., R, C]", f"shape {tuple(scale.shape)}")


def _require_multiple(rows: int, of: int) -> None:
    if rows < of or rows % of:
        raise ArgumentError("rows", f"a positive multiple of {of}", str(rows), "Pad the matrix with zero rows.")


def _round_up(length: int, step: int) -> int:
    return -(-length // step) * step
