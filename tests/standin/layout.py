"""The functions that bring weights into the kernels' layout, and the tuner, which has nothing to tune here."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch

from flashinfer_compat.numerics import (
    gate_up_permutation,
    interleave_block_scale,
    shuffle_permutation,
    w2_permutation,
    w13_permutation,
)
from standin.calls import Call, Era, Kernel

__all__ = ["KERNELS", "interleaved"]


def interleaved(scale: torch.Tensor) -> torch.Tensor:
    """uint8 or bf16 [.., R, C] to the flat 128x4 layout, padded."""
    if scale.dtype == torch.bfloat16:
        raise NotImplementedError("block_scale_interleave of bfloat16 is not modelled")
    return interleave_block_scale(scale).flatten()


def _block_scale_interleave(era: Era, call: Call) -> torch.Tensor:
    scale = call.tensor("unswizzled_sf")
    accepted = (torch.uint8, torch.bfloat16) if era.since("0.6.0") else (torch.uint8,)
    assert scale.dtype in accepted, f"Input dtype must be uint8 or bfloat16, got {scale.dtype}"
    result = interleaved(scale.contiguous())
    out = call.get("out")
    if out is None:
        return result
    if out.dtype != scale.dtype or out.shape != result.shape or not out.is_contiguous():
        raise ValueError(f"block_scale_interleave out must be a contiguous flat tensor of shape ({result.numel()},)")
    found: torch.Tensor = out.copy_(result)
    return found


def _shuffle_matrix_a(era: Era, call: Call) -> torch.Tensor:
    matrix = call.tensor("input_tensor")
    return _rows(matrix, shuffle_permutation(_checked_rows(matrix, call["epilogue_tile_m"])))


def _shuffle_matrix_sf_a(era: Era, call: Call) -> torch.Tensor:
    scale = call.tensor("input_tensor")
    _check_scale(era, scale, call["num_elts_per_sf"])
    return interleaved(_rows(scale, shuffle_permutation(_checked_rows(scale, call["epilogue_tile_m"]))))


def _reorder_rows(era: Era, call: Call) -> torch.Tensor:
    matrix = call.tensor("x")
    return _rows(matrix, gate_up_permutation(matrix.shape[0]))


def _w13_indices(era: Era, call: Call) -> torch.Tensor:
    weight = call.tensor("dst_w3_w1_weight")
    gated = call.arguments.get("is_gated_act_gemm", True)
    return _cached(era, call, "w3_w1", weight, w13_permutation if gated else shuffle_permutation, gated)


def _w2_indices(era: Era, call: Call) -> torch.Tensor:
    weight = call.tensor("dst_w2_weight")
    return _cached(era, call, "w2", weight, w2_permutation, call.get("is_gated_act_gemm"))


def _cached(era: Era, call: Call, kind: str, weight: torch.Tensor, permutation: object, gated: object) -> torch.Tensor:
    """By the release's own cache key, whose collisions are part of its behaviour; the device is in none of them."""
    tile, per_scale = call["epilogue_tile_m"], call["num_elts_per_sf"]
    key: tuple[object, ...] = (kind, weight.shape, tile, per_scale, gated)
    if era.before("0.6.18"):
        key = (kind, weight.shape)
    cache = call["_cache_permute_indices"]
    chosen = weight.shape if era.before("0.5.0") else key
    if chosen not in cache:
        if per_scale is not None:
            _check_scale(era, weight, per_scale)
        assert callable(permutation)
        cache[chosen] = permutation(_checked_rows(weight, tile)).to(weight.device)
    found: torch.Tensor = cache[chosen]
    return found


def _check_scale(era: Era, scale: torch.Tensor, per_scale: int) -> None:
    assert scale.dtype == torch.uint8
    assert per_scale in ((16, 32) if era.since("0.6.0") else (16,))
    assert scale.ndim == 2
    assert scale.shape[0] % 128 == 0
    assert scale.shape[1] % 4 == 0 or era.since("0.6.12")


def _checked_rows(matrix: torch.Tensor, tile: int) -> int:
    if tile != 128:
        raise NotImplementedError(f"epilogue_tile_m={tile} is not modelled")
    assert matrix.ndim == 2, f"input_tensor should be a 2D tensor, not {matrix.ndim}"
    rows: int = matrix.shape[0]
    assert rows % 32 == 0
    return rows


def _rows(matrix: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
    # PyTorch does not index float8 on the CPU; the bytes are what is moved.
    raw = matrix.view(torch.uint8) if matrix.element_size() == 1 else matrix
    return raw[index.to(matrix.device)].view(matrix.dtype)


@contextmanager
def _nothing_to_tune() -> Iterator[None]:
    yield


def _autotune(era: Era, call: Call) -> object:
    return _nothing_to_tune()


KERNELS: Mapping[str, Kernel] = {
    "block_scale_interleave": _block_scale_interleave,
    "nvfp4_block_scale_interleave": _block_scale_interleave,
    "shuffle_matrix_a": _shuffle_matrix_a,
    "shuffle_matrix_sf_a": _shuffle_matrix_sf_a,
    "reorder_rows_for_gated_act_gemm": _reorder_rows,
    "_maybe_get_cached_w3_w1_permute_indices": _w13_indices,
    "get_w2_permute_indices_with_cache": _w2_indices,
    "autotune": _autotune,
}
