from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flashinfer_compat.backends.triton.tiles import HOPPER_SHARED_MEMORY, tiles_for


@given(
    tokens=st.integers(1, 20000),
    top_k=st.integers(0, 10),
    experts=st.integers(0, 512),
    appended=st.integers(0, 2),
    hidden=st.integers(1, 512).map(lambda n: 32 * n),
    intermediate=st.integers(1, 256).map(lambda n: 32 * n),
)
def test_tiles_fit_every_layer(
    tokens: int, top_k: int, experts: int, appended: int, hidden: int, intermediate: int
) -> None:
    if experts + appended == 0 or (experts == 0) != (top_k == 0):
        return
    tiles = tiles_for(tokens, top_k, experts, appended, hidden, intermediate)
    assert hidden % tiles.gate_up.block_k == 0
    assert intermediate % tiles.down.block_k == 0
    assert tiles.gate_up.split_k <= hidden // tiles.gate_up.block_k
    assert tiles.down.tiles == 1 or tiles.down.block_k == intermediate
    for product in (tiles.gate_up, tiles.down):
        assert product.block_k >= 32
        # A warp's share of a tile is at least the tensor cores' 16 rows; gate_up rounds runs of 16 values.
        assert product.block_m >= 32
        assert product.block_m & (product.block_m - 1) == 0


def test_few_tokens_split_k_and_many_do_not() -> None:
    few, many = (tiles_for(tokens, 8, 256, 1, 7168, 256) for tokens in (1, 4096))
    assert few.gate_up.split_k > 1
    assert many.gate_up.split_k == 1
    assert few.block_t < many.block_t


@pytest.mark.parametrize("tokens", [1, 64, 512, 8192])
def test_less_shared_memory_changes_tiles_for_many_pairs_of_wide_layers_only(tokens: int) -> None:
    for intermediate in (256, 2048):
        large, small = (
            tiles_for(tokens, 8, 256, 1, 7168, intermediate, memory) for memory in (HOPPER_SHARED_MEMORY, 166_912)
        )
        assert (large != small) == (tokens == 8192 and intermediate == 2048)
