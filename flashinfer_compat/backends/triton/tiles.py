"""Tile shapes by problem size, from sweeps on one H200 (times: `benchmarks/results/triton_moe_h200.json`)."""

from __future__ import annotations

from dataclasses import dataclass, replace

__all__ = ["HOPPER_SHARED_MEMORY", "Product", "Tiles", "tiles_for"]

HOPPER_SHARED_MEMORY = 232_448
"""Bytes that one program may have there; 166,912 on SM80, 101,376 on SM86, SM89 and SM120."""


@dataclass(frozen=True)
class Product:
    """How one grouped GEMM is cut and run."""

    block_m: int
    """Weight rows of a tile; gate and up rows together in the first GEMM."""
    block_k: int
    """Values of K a step, at least 32; it divides K."""
    warps: int
    stages: int
    """Steps whose loads are in flight."""
    split_k: int = 1
    """Parts of K, each a program; first GEMM only."""
    tiles: int = 1
    """Tiles of a program; second GEMM only, and only where a step is all of K."""


@dataclass(frozen=True)
class Tiles:
    """Both GEMMs of a grouped MLP."""

    block_t: int
    """Pairs of a block."""
    gate_up: Product
    down: Product


@dataclass(frozen=True)
class _Row:
    most_pairs: float
    """For up to so many pairs an expert."""
    narrow: Tiles
    """For an intermediate size up to `_NARROW`, as tensor parallelism leaves it."""
    wide: Tiles


_NARROW = 512
_ROWS = (
    _Row(
        4.0,
        Tiles(8, Product(32, 256, 2, 3), Product(64, 256, 4, 3, tiles=8)),
        Tiles(8, Product(64, 256, 4, 3), Product(128, 256, 4, 3)),
    ),
    _Row(
        10.0,
        Tiles(16, Product(64, 256, 4, 3), Product(64, 256, 4, 3, tiles=8)),
        Tiles(16, Product(128, 256, 4, 3), Product(128, 128, 4, 3)),
    ),
    _Row(
        32.0,
        Tiles(32, Product(128, 256, 4, 3), Product(64, 256, 4, 3, tiles=8)),
        Tiles(32, Product(128, 256, 4, 3), Product(128, 128, 4, 3)),
    ),
    _Row(
        64.0,
        Tiles(64, Product(128, 64, 4, 3), Product(128, 64, 4, 3)),
        Tiles(64, Product(128, 128, 4, 3), Product(128, 128, 8, 3)),
    ),
    _Row(
        float("inf"),
        Tiles(64, Product(128, 64, 4, 3), Product(128, 64, 4, 3)),
        Tiles(128, Product(128, 128, 8, 3), Product(256, 128, 8, 3)),
    ),
)
_FULL_SMALL, _FULL, _BUSY = 500, 250, 200
"""Programs that keep a large GPU's memory busy: of the first GEMM with few and with many pairs a block, where splitting
K gives them, and of the second, where smaller tiles do."""
_SHARED_MEMORY = 180_000
"""With less, layers of any width take the narrow tiles for many pairs: the wide ones need up to 168,000 bytes."""
_FEW_BLOCKS = 128
"""Below so many blocks one tile a program is better than several."""


def tiles_for(
    tokens: int,
    top_k: int,
    experts: int,
    appended: int,
    hidden: int,
    intermediate: int,
    shared_memory: int = HOPPER_SHARED_MEMORY,
) -> Tiles:
    """The tiles for one call of `experts` routed experts and `appended` ones, of one intermediate size."""
    pairs = tokens * (top_k + appended)
    density = pairs / (experts + appended)
    row = next(row for row in _ROWS if density <= row.most_pairs)
    is_narrow = intermediate <= _NARROW or (row is _ROWS[-1] and shared_memory < _SHARED_MEMORY)
    tiles = row.narrow if is_narrow else row.wide
    blocks = min(tokens * top_k, experts) + appended * -(-tokens // tiles.block_t)
    return Tiles(
        tiles.block_t,
        _fit_gate_up(tiles.gate_up, tiles.block_t, blocks, hidden, intermediate),
        _fit_down(tiles.down, blocks, hidden, intermediate),
    )


def _fit_gate_up(product: Product, block_t: int, blocks: int, hidden: int, intermediate: int) -> Product:
    product = replace(product, block_k=min(product.block_k, _power_of_two_in(hidden)))
    programs = blocks * -(-2 * intermediate // product.block_m)
    full = _FULL_SMALL if block_t <= 16 else _FULL
    if programs >= full or block_t > 64:
        return product
    if product.block_m < 64:
        product = replace(product, block_m=64, warps=4)
        programs = blocks * -(-2 * intermediate // 64)
    steps = hidden // product.block_k
    # Each part keeps a few steps, to have loads in flight.
    parts = [part for part in range(1, steps // 3 + 1) if steps % part == 0] or [1]
    enough = [part for part in parts if programs * part >= full]
    return replace(product, split_k=enough[0] if enough else parts[-1])


def _fit_down(product: Product, blocks: int, hidden: int, intermediate: int) -> Product:
    product = replace(product, block_k=min(product.block_k, _power_of_two_in(intermediate)))
    if product.tiles > 1 and (product.block_k != intermediate or blocks < _FEW_BLOCKS):
        product = replace(product, tiles=4 if product.block_k == intermediate and blocks >= _FEW_BLOCKS // 4 else 1)
    while product.block_m > 32 and blocks * hidden // product.block_m < _BUSY:
        product = replace(product, block_m=product.block_m // 2, warps=max(product.warps // 2, 2))
    return product


def _power_of_two_in(size: int) -> int:
    """The largest power of two that divides `size`."""
    return size & -size
