"""From times to a policy: from how many tokens on split is the faster way; pure."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import asdict, replace

from flashinfer_compat.bench.results import Point, Way
from flashinfer_compat.policy import Origin, PolicyRow, Times
from flashinfer_compat.vocabulary import Strategy

__all__ = ["NOISE", "policy_rows", "split_from"]

NOISE = 0.03
"""Of fused's time: what split differs by less counts as equal; times vary by about that from run to run."""


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


def policy_rows(points: Iterable[Point], origin: Origin) -> tuple[PolicyRow, ...]:
    """A row for each fused way that has a time, as split beside it, at every number of tokens that was measured."""
    by_way: dict[Way, dict[int, float | None]] = {}
    for point in points:
        by_way.setdefault(point.way, {})[point.tokens] = point.microseconds
    rows = []
    for way, fused in by_way.items():
        split = by_way.get(replace(way, strategy=Strategy.SPLIT))
        if not way.strategy.is_fused or split is None:
            continue
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
