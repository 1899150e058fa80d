"""From which number of tokens on split is preferred."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from measured_values import H200, R1, point, row, way

from flashinfer_compat.bench.derivation import ADVISED, NOISE, pairs_of, policy_rows, split_from
from flashinfer_compat.bench.results import Point
from flashinfer_compat.policy import PolicyRow, Times
from flashinfer_compat.vocabulary import Backend

# How much of fused's time split takes: about the noise as often as anything.
FACTORS = st.sampled_from([0.5, 0.9, 0.969, 0.971, 1.0, 1.2]) | st.floats(0.1, 10.0)


def all_times() -> st.SearchStrategy[tuple[Times, ...]]:
    pairs = st.dictionaries(st.integers(1, 10_000), st.tuples(st.floats(1.0, 1e6), FACTORS), min_size=1, max_size=6)
    return pairs.map(_in_order)


def _in_order(pairs: dict[int, tuple[float, float]]) -> tuple[Times, ...]:
    return tuple(Times(tokens, fused, fused * part) for tokens, (fused, part) in sorted(pairs.items()))


@given(all_times())
def test_it_is_the_smallest_where_split_is_faster_and_slower_at_no_larger_one(times: tuple[Times, ...]) -> None:
    gain = {one.tokens: (one.fused - one.split) / one.fused for one in times}
    holding = [one for one in gain if gain[one] > NOISE and all(gain[more] >= -NOISE for more in gain if more > one)]
    assert split_from(times) == (min(holding) if holding else None)


@pytest.mark.parametrize(
    ("pairs", "expected"),
    [
        ({1: (23, 36), 8: (79, 93), 64: (256, 270), 512: (421, 401), 4096: (1478, 1525)}, None),
        ({1: (23, 29), 8: (79, 97), 64: (256, 242), 512: (421, 401), 4096: (1478, 1500)}, 64),
        ({1: (90, 103), 64: (1705, 1640), 512: (2883, 2687)}, 64),
        ({1: (100, 90)}, 1),
        ({1: (100, 97.5)}, None),
        ({1: (100, 104), 8: (100, 99), 64: (100, 96)}, 64),
        ({1: (100, 50), 8: (100, 99), 64: (100, 96)}, 1),
    ],
)
def test_cases_by_hand(pairs: dict[int, tuple[float, float]], expected: int | None) -> None:
    assert split_from([Times(tokens, *pair) for tokens, pair in pairs.items()]) == expected


def points_of(pairs: dict[int, tuple[float | None, float | None]], numerics: str = "w4a16") -> list[Point]:
    fused, split = (way(strategy, numerics=numerics) for strategy in ("expanded", "split"))
    return [point(one, tokens, pairs[tokens][side]) for side, one in enumerate((fused, split)) for tokens in pairs]


def test_a_row_for_each_fused_way_beside_split() -> None:
    points = points_of({1: (90.0, 103.0), 512: (2883.0, 2687.0)}) + points_of({1: (80.0, 90.0)}, "w4a4")
    assert policy_rows(points, H200) == (
        row({1: (90.0, 103.0), 512: (2883.0, 2687.0)}, 512),
        row({1: (80.0, 90.0)}, None, numerics="w4a4"),
    )


@pytest.mark.parametrize("missing", [(None, 100.0), (100.0, None), (None, None)])
def test_without_a_time_at_some_number_of_tokens_nothing_follows(missing: tuple[float | None, float | None]) -> None:
    assert policy_rows(points_of({1: (90.0, 80.0), 512: missing}), H200) == ()


def test_one_way_alone_gives_no_row() -> None:
    points = points_of({1: (90.0, 80.0)})
    assert policy_rows(points[:1], H200) == policy_rows(points[1:], H200) == ()
    # Split of other sizes is not the one beside it.
    other = replace(points[1], way=replace(points[1].way, sizes=replace(R1, intermediate_size=256)))
    assert policy_rows([points[0], other], H200) == ()


def test_where_plan_takes_fused_only_by_name_nothing_follows() -> None:
    # docs/plans.md: the torch backend prefers split.
    assert set(Backend) - ADVISED == {Backend.TORCH}
    fused, split = way("expanded", "torch"), way("split", "torch")
    assert policy_rows([point(fused, 1, 90.0), point(split, 1, 80.0)], H200) == ()
    assert pairs_of([fused, split]) == ()
    assert pairs_of([way("split"), way("expanded")]) == ((way("expanded"), way("split")),)


@given(all_times())
def test_a_row_survives_json(times: tuple[Times, ...]) -> None:
    one = row({t.tokens: (t.fused, t.split) for t in times}, split_from(times))
    assert PolicyRow.from_dict(one.to_dict()) == one
    assert one.split_always is (one.split_from_tokens == times[0].tokens)
