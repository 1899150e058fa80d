"""The report as lines of text; pure."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import groupby

from flashinfer_compat.bench.results import Point, Refusal, Report, Way
from flashinfer_compat.policy import PolicyRow
from flashinfer_compat.vocabulary import Backend, RoutingInput, Strategy

__all__ = ["point_line", "policy_sentence", "refusal_lines", "tables"]

_HEADER = ("tokens", "backend", "strategy", "numerics", "input", "time, us", "x floor", "error", "beyond", "peak")
_LEFT = 5
"""Columns of text; the first is a number all the same."""


def tables(report: Report) -> Iterator[str]:
    """For each layer a heading and a table; what has no time gives the reason in its place."""
    for sizes, group in groupby(report.points, key=lambda one: one.way.sizes):
        points = sorted(group, key=lambda one: one.tokens)
        weights = next((f", weights {_size(one.found.weight_bytes)}" for one in points if one.found), "")
        yield ""
        yield f"{sizes}{weights}"
        yield from _aligned([_HEADER, *(_row(one) for one in points)])


def point_line(point: Point) -> str:
    """One measurement, while others go on."""
    way, time = point.way, point.microseconds
    floor = point.found and point.found.floor_microseconds
    times = f", {time / floor:.2f} x floor" if time is not None and floor else ""
    told = point.problem if time is None else f"{time:.1f} us{times}"
    return f"{way.name}, I={way.sizes.intermediate_size}, T={point.tokens}: {told}"


def policy_sentence(row: PolicyRow) -> str:
    """What one row says."""
    fused = row.fused.value
    taken = RoutingInput.LOGITS if row.fused is Strategy.NATIVE else RoutingInput.TOPK
    of = f"{row.backend.value} {row.numerics.value}, intermediate_size {row.intermediate_size}, input {taken.value}"
    times = row.at_switch
    if times is None:
        return f"{of}: {fused}, whatever the number of tokens."
    faster = f"{times.split:.0f} us instead of {times.fused:.0f} at {times.tokens}"
    return f"{of}: split in place of {fused} from {times.tokens} tokens on ({faster})."


def refusal_lines(refusals: Sequence[Refusal], ways: Sequence[Way]) -> Iterator[str]:
    """Of every strategy and backend that runs nothing: what stands in its way where least does."""
    running = {(one.backend, one.strategy) for one in ways}
    by_pair: dict[tuple[Backend, Strategy], Refusal] = {}
    for one in sorted(refusals, key=lambda refusal: len(refusal.reasons)):
        by_pair.setdefault((one.way.backend, one.way.strategy), one)
    for (backend, strategy), one in by_pair.items():
        if (backend, strategy) not in running:
            yield f"{strategy.value} on {backend.value}: {one.reasons[0]}"


def _row(point: Point) -> tuple[str, ...]:
    way, found = point.way, point.found
    head = (str(point.tokens), way.backend.value, way.strategy.value, way.numerics.value, way.routing_input.value)
    if found is None or found.microseconds is None:
        return (*head, point.problem)
    floor = found.floor_microseconds
    return (
        *head,
        f"{found.microseconds:.1f}",
        f"{found.microseconds / floor:.2f}" if floor else "-",
        f"{found.relative_error:.1e}",
        _size(found.beyond_bytes),
        "-" if found.peak_bytes is None else _size(found.peak_bytes),
    )


def _size(size: int) -> str:
    """Decimal units, three digits."""
    value, unit = float(size), "B"
    for larger in ("kB", "MB", "GB"):
        if value < 1000:
            break
        value, unit = value / 1000, larger
    return f"{value:.3g} {unit}"


def _aligned(rows: list[tuple[str, ...]]) -> Iterator[str]:
    """Text to the left, numbers to the right; a reason takes the place of all of a row's numbers."""
    full = [row for row in rows if len(row) == len(_HEADER)]
    widths = [max(len(row[one]) for row in (rows if one < _LEFT else full)) for one in range(len(_HEADER))]
    for row in rows:
        text = [cell.ljust(width) for cell, width in zip(row[1:_LEFT], widths[1:_LEFT], strict=True)]
        numbers = [cell.rjust(width) for cell, width in zip(row[_LEFT:], widths[_LEFT:], strict=False)]
        rest = numbers if len(row) == len(_HEADER) else row[_LEFT:]
        yield "  ".join([row[0].rjust(widths[0]), *text, *rest])
