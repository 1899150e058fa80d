"""From times to a policy: from how many tokens on split is the faster way; pure."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import asdict, replace

from flashinfer_compat.bench.results import Point, Way
from flashinfer_compat.planning.plan import ALTERNATIVES
from flashinfer_compat.policy import NOISE, Origin, PolicyRow, Times
from flashinfer_compat.vocabulary import Backend, Strategy

__all__ = ["ADVISED", "pairs_of", "policy_rows", "split_from"]

ADVISED = frozenset(
    backend
    for backend in Backend
    if next(strategy for one, strategy in ALTERNATIVES if one is backend) is not Strategy.SPLIT
)
"""Backends whose fused strategies plan takes by itself; on the others a row would say nothing."""


def split_from(times: Sequence[Times]) -> int | None:
    """The smallest number of tokens at which split is faster by more than the noise, and slower at no larger one.

    Args:
        times: by ascending tokens.
    """
    smallest = None
    for one in reversed(times):
        if one.split > (1 + NOISE) * one.fused:
            break
        if one.split < (1 - NOISE) * one.fused:
            smallest = one.tokens
    return smallest


def pairs_of(ways: Iterable[Way]) -> tuple[tuple[Way, Way], ...]:
    """Each fused way that plan may take by itself, with the split beside it; a policy needs one at least."""
    there = dict.fromkeys(ways)
    pairs = ((way, replace(way, strategy=Strategy.SPLIT)) for way in there if way.strategy.is_fused)
    return tuple((fused, split) for fused, split in pairs if split in there and fused.backend in ADVISED)


def policy_rows(points: Iterable[Point], origin: Origin) -> tuple[PolicyRow, ...]:
    """A row for each of `pairs_of` that has both times at every number of tokens that was measured."""
    by_way: dict[Way, dict[int, float | None]] = {}
    for point in points:
        by_way.setdefault(point.way, {})[point.tokens] = point.microseconds
    rows = []
    for way, beside in pairs_of(by_way):
        fused, split = by_way[way], by_way[beside]
        pairs = [(tokens, fused.get(tokens), split.get(tokens)) for tokens in sorted({*fused, *split})]
        times = tuple(Times(tokens, one, other) for tokens, one, other in pairs if one and other)
        if len(times) == len(pairs):
            sizes = asdict(way.sizes)
            rows.append(
                PolicyRow(
                    way.backend,
                    way.numerics,
                    **sizes,
                    fused=way.strategy,
                    split_from_tokens=split_from(times),
                    times=times,
                    origin=origin,
                )
            )
    return tuple(rows)
