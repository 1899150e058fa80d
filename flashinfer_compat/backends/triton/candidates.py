"""Tile shapes worth trying in place of a given one: each differs from it in one number, and every one can run."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace

from flashinfer_compat.backends.triton.tiles import Product, Tiles

__all__ = ["STEPS", "Step", "fits"]

Step = Callable[[Tiles, int, int], tuple[Tiles, ...]]
"""Tiles, hidden_size and intermediate_size of an MLP to other tiles for it."""

_DOUBLED = ("block_m", "block_k", "warps")
_BLOCK_M, _BLOCK_K, _BLOCK_T = (32, 256), (32, 256), (8, 128)
_WARPS, _STAGES, _TILES = (1, 8), (2, 5), (1, 16)
_ROWS_OF_WARP = 16
"""Rows of the tensor cores' smallest product."""


def fits(tiles: Tiles, hidden: int, intermediate: int) -> bool:
    """Whether the kernels can be cut so, for these sizes of an MLP."""
    first, second = tiles.gate_up, tiles.down
    return (
        _within(tiles.block_t, _BLOCK_T)
        and _fits(first, hidden)
        and _fits(second, intermediate)
        and first.tiles == 1
        and second.split_k == 1
        and first.split_k >= 1
        and hidden // first.block_k % first.split_k == 0
        and _within(second.tiles, _TILES)
        and (second.tiles == 1 or second.block_k == intermediate)
    )


def _fits(product: Product, size: int) -> bool:
    return (
        _within(product.block_m, _BLOCK_M)
        and _within(product.block_k, _BLOCK_K)
        and size % product.block_k == 0
        and _within(product.warps, _WARPS)
        and product.block_m >= _ROWS_OF_WARP * product.warps
        and _STAGES[0] <= product.stages <= _STAGES[1]
    )


def _within(value: int, limits: tuple[int, int]) -> bool:
    return limits[0] <= value <= limits[1] and value & (value - 1) == 0


def _gate_up(tiles: Tiles, hidden: int, intermediate: int) -> Iterator[Tiles]:
    for product in _neighbours(tiles.gate_up):
        yield replace(tiles, gate_up=product)
    steps, parts = hidden // tiles.gate_up.block_k, tiles.gate_up.split_k
    fewer = [part for part in range(1, parts) if steps % part == 0][-1:]
    more = [part for part in range(parts + 1, steps + 1) if steps % part == 0][:1]
    for part in (*fewer, *more):
        yield replace(tiles, gate_up=replace(tiles.gate_up, split_k=part))


def _down(tiles: Tiles, hidden: int, intermediate: int) -> Iterator[Tiles]:
    for product in _neighbours(tiles.down):
        yield replace(tiles, down=product if product.block_k == intermediate else replace(product, tiles=1))
    for several in (tiles.down.tiles * 2, tiles.down.tiles // 2):
        yield replace(tiles, down=replace(tiles.down, tiles=several))


def _block_t(tiles: Tiles, hidden: int, intermediate: int) -> Iterator[Tiles]:
    for pairs in (tiles.block_t * 2, tiles.block_t // 2):
        yield replace(tiles, block_t=pairs)


def _neighbours(product: Product) -> Iterator[Product]:
    for name in _DOUBLED:
        value = getattr(product, name)
        for other in (value * 2, value // 2):
            yield replace(product, **{name: other})
    for stages in (product.stages + 1, product.stages - 1):
        yield replace(product, stages=stages)


def _runnable(step: Callable[[Tiles, int, int], Iterator[Tiles]]) -> Step:
    return lambda tiles, hidden, intermediate: tuple(
        one for one in step(tiles, hidden, intermediate) if fits(one, hidden, intermediate)
    )


STEPS: tuple[Step, ...] = tuple(map(_runnable, (_gate_up, _down, _block_t)))
"""What differs in the first GEMM, in the second, and in the size of a block of pairs."""
