"""Tile shapes found by measuring: what is tried, what is kept and what a call takes. Nothing here needs a GPU."""

from __future__ import annotations

import json
import math
from dataclasses import asdict, replace
from pathlib import Path

import pytest

pytest.importorskip("torch")
pytest.importorskip("triton", minversion="3.5")

from hypothesis import given
from hypothesis import strategies as st

from flashinfer_compat.backends.triton.autotune import search
from flashinfer_compat.backends.triton.candidates import STEPS, fits
from flashinfer_compat.backends.triton.tiles import Product, Tiles, tiles_for
from flashinfer_compat.backends.triton.tuned import Cut, Measured, load, nearest, store

TILES = Tiles(16, Product(64, 128, 4, 3, split_k=4), Product(64, 256, 4, 3, tiles=8))
FACTS = {"gpu": "NVIDIA H200", "triton": "3.6.0", "experts": [256, 1, 7168, 256, False, 1, "modelopt"]}
FOUND = {8: Measured(Cut(TILES, None), 70.5, 78.0), 64: Measured(Cut(TILES, replace(TILES, block_t=32)), 250.0, 256.0)}


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("FLASHINFER_COMPAT_CACHE_DIR", str(tmp_path / "cache"))
    return tmp_path / "cache"


@given(
    tokens=st.integers(1, 20000),
    top_k=st.integers(0, 10),
    experts=st.integers(1, 512),
    appended=st.integers(0, 2),
    hidden=st.integers(1, 256).map(lambda n: 32 * n),
    intermediate=st.integers(1, 128).map(lambda n: 32 * n),
)
def test_every_candidate_can_run(
    tokens: int, top_k: int, experts: int, appended: int, hidden: int, intermediate: int
) -> None:
    if top_k + appended == 0:
        return
    start = tiles_for(tokens, top_k, experts, appended, hidden, intermediate)
    assert fits(start, hidden, intermediate)
    for step in STEPS:
        tried = step(start, hidden, intermediate)
        assert start not in tried
        assert len(set(tried)) == len(tried) <= 10
        for tiles in tried:
            first, second = tiles.gate_up, tiles.down
            assert hidden % first.block_k == 0 and intermediate % second.block_k == 0  # noqa: PT018
            # A part of K that were empty, or cut short, is not one the sweeps of `tiles_for` ran.
            assert (hidden // first.block_k) % first.split_k == 0
            assert second.tiles == 1 or second.block_k == intermediate
            assert tiles.block_t in (8, 16, 32, 64, 128)
            for product in (first, second):
                assert product.block_k in (32, 64, 128, 256)
                assert product.block_m in (32, 64, 128, 256)
                # A warp's share is at least the tensor cores' 16 rows.
                assert 16 * product.warps <= product.block_m


def test_all_numbers_of_a_tile_shape_are_tried() -> None:
    tried = [one for step in STEPS for one in step(TILES, 7168, 256)]
    changed = set()
    for tiles in tried:
        changed |= {"block_t"} if tiles.block_t != TILES.block_t else set()
        for name in ("gate_up", "down"):
            before, after = asdict(getattr(TILES, name)), asdict(getattr(tiles, name))
            changed |= {f"{name}.{one}" for one in before if before[one] != after[one]}
    of_both = ("block_m", "block_k", "warps", "stages")
    assert changed == {"block_t", "gate_up.split_k", "down.tiles"} | {
        f"{name}.{one}" for name in ("gate_up", "down") for one in of_both
    }


@pytest.mark.parametrize(
    "broken",
    [
        replace(TILES, block_t=12),
        replace(TILES, block_t=256),
        replace(TILES, gate_up=replace(TILES.gate_up, block_k=16)),
        replace(TILES, gate_up=replace(TILES.gate_up, block_k=512)),
        replace(TILES, gate_up=replace(TILES.gate_up, split_k=5)),
        replace(TILES, gate_up=replace(TILES.gate_up, split_k=0)),
        replace(TILES, gate_up=replace(TILES.gate_up, warps=8)),
        replace(TILES, gate_up=replace(TILES.gate_up, stages=1)),
        replace(TILES, gate_up=replace(TILES.gate_up, tiles=2)),
        replace(TILES, down=replace(TILES.down, block_m=48)),
        replace(TILES, down=replace(TILES.down, block_k=128)),
        replace(TILES, down=replace(TILES.down, split_k=2)),
        replace(TILES, down=replace(TILES.down, tiles=3)),
    ],
    ids=str,
)
def test_tiles_that_cannot_run_do_not_fit(broken: Tiles) -> None:
    assert fits(TILES, 7168, 256)
    assert not fits(broken, 7168, 256)


def test_what_was_found_is_read_back(cache: Path) -> None:
    assert load(FACTS) == {}
    store(FACTS, FOUND)
    assert load(FACTS) == FOUND
    assert load({**FACTS, "triton": "3.7.0"}) == {}
    more = {512: FOUND[8]}
    store(FACTS, more)
    assert load(FACTS) == {**FOUND, **more}
    assert [path.suffix for path in cache.iterdir()] == [".json"]


@pytest.mark.parametrize("damage", ["", "[]", "{", "null", '{"facts": 1}', "tokens", "number", "name", "\udcff"])
def test_a_file_that_cannot_be_read_is_ignored(cache: Path, damage: str) -> None:
    store(FACTS, FOUND)
    (path,) = cache.iterdir()
    stored = json.loads(path.read_text("utf-8"))
    tiles = stored["tokens"]["8"]["cut"]["experts"]
    if damage == "tokens":
        stored["tokens"] = {"eight": stored["tokens"]["8"]}
    elif damage == "number":
        tiles["gate_up"]["block_m"] = 64.0
    elif damage == "name":
        tiles["down"]["block_n"] = tiles["down"].pop("block_m")
    known = damage in ("tokens", "number", "name")
    path.write_bytes((json.dumps(stored) if known else damage).encode("utf-8", "surrogateescape"))
    assert load(FACTS) == {}
    store(FACTS, FOUND)
    assert load(FACTS) == FOUND


def test_a_file_in_place_of_the_folder_keeps_nothing(cache: Path) -> None:
    cache.write_text("")
    store(FACTS, FOUND)
    assert load(FACTS) == {}


def test_a_call_takes_what_was_measured_for_the_nearest_number_of_tokens() -> None:
    cuts = {tokens: Cut(replace(TILES, block_t=tokens), None) for tokens in (1, 8, 16, 64)}
    taken = {tokens: found.experts.block_t for tokens in range(1, 200) if (found := nearest(cuts, tokens))}
    # 11 over 8 is less than 16 over 11; 12 is as near to 8 as 24 to 16; 2 is twice 1, and 97 over 1.5 times 64.
    assert taken == {
        1: 1,
        **dict.fromkeys(range(6, 12), 8),
        **dict.fromkeys(range(12, 25), 16),
        **dict.fromkeys(range(43, 97), 64),
    }
    assert nearest({}, 8) is None
    assert nearest({4: cuts[1], 9: cuts[8]}, 6) is cuts[1]


def step(*others: Cut) -> object:
    return lambda cut: (one for one in others if one != cut)


CUTS = [Cut(replace(TILES, block_t=block_t), None) for block_t in (8, 16, 32, 64, 128)]


def test_the_fastest_is_found_step_by_step() -> None:
    times = dict(zip(CUTS, (100.0, 90.0, math.inf, 80.0, 85.0), strict=True))
    start, first, wrong, second, slower = CUTS
    asked = []

    def time(cut: Cut) -> float:
        asked.append(cut)
        return times[cut]

    found = search(start, [step(first, wrong), lambda cut: [second, slower] if cut == first else []], time)
    assert found == (second, 80.0, 100.0)
    # The winner and the first one are timed again, side by side.
    assert asked[-2:] == [start, second]


@pytest.mark.parametrize(("again", "won"), [(98.1, False), (97.9, True), (120.0, False)])
def test_what_wins_by_luck_or_by_less_than_two_percent_is_not_taken(again: float, won: bool) -> None:
    start, other = CUTS[:2]
    readings = {start: iter((100.0, 100.0)), other: iter((50.0, again))}
    found = search(start, [step(other)], lambda cut: next(readings[cut]))
    assert found == ((other, again, 100.0) if won else (start, 100.0, 100.0))
