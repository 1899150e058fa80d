"""The result of a run as markdown, for people, and as JSON, for programs."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path

from flashinfer_compat.files import write_whole
from tools.matrix.results import Cell, ReleaseResult, State

__all__ = ["SCHEMA_VERSION", "markdown", "progress", "summary", "write_tables"]

SCHEMA_VERSION = 1
"""Of matrix.json; raised when a field changes its meaning or goes."""


def write_tables(results: Sequence[ReleaseResult], folder: Path) -> None:
    """Write `matrix.md` and `matrix.json` into `folder`, which is made where there is none."""
    folder.mkdir(parents=True, exist_ok=True)
    content = {"schema_version": SCHEMA_VERSION, "releases": [result.to_dict() for result in results]}
    write_whole(folder / "matrix.json", json.dumps(content, indent=1) + "\n")
    write_whole(folder / "matrix.md", markdown(results))


def markdown(results: Sequence[ReleaseResult]) -> str:
    """A table for the releases themselves, one for each sample checkpoint, and what failed, each text once."""
    lines = [summary(results), ""]
    for table in dict.fromkeys(cell.table for result in results for cell in result.cells):
        lines += [f"## {table}", "", *_table(results, table), ""]
    failures: dict[str, list[str]] = {}
    for result in results:
        for cell in result.failures:
            failures.setdefault(cell.detail, []).append(f"{result.version} ({cell.table}: {cell.column})")
    for detail, places in failures.items():
        lines += [f"## Failed in {len(places)} cells", "", "; ".join(places), "", *_indented(detail), ""]
    return "\n".join(lines)


def summary(results: Sequence[ReleaseResult]) -> str:
    """How many cells of how many releases came out how, in one line."""
    return f"{len(results)} releases: {_counts([cell for result in results for cell in result.cells])}"


def progress(result: ReleaseResult, number: int, total: int, elapsed: float) -> str:
    """One line for a release that is done."""
    minutes, seconds = divmod(int(elapsed), 60)
    done = f"{result.version}: {_counts(result.cells)} in {result.seconds:.0f} s"
    return f"[{number}/{total}] {done} ({minutes}:{seconds:02d} elapsed)"


def _counts(cells: Sequence[Cell]) -> str:
    found = Counter(cell.state for cell in cells)
    return ", ".join(f"{found[state]} {state.value}" for state in State if found[state])


def _table(results: Sequence[ReleaseResult], table: str) -> Iterator[str]:
    columns = dict.fromkeys(cell.column for result in results for cell in result.cells if cell.table == table)
    yield "| FlashInfer | " + " | ".join(columns) + " |"
    yield "| --- " * (len(columns) + 1) + "|"
    for result in results:
        cells = {cell.column: cell for cell in result.cells if cell.table == table}
        row = [_shown(cells[column]) if column in cells else "" for column in columns]
        yield f"| {result.version} | " + " | ".join(row) + " |"


def _shown(cell: Cell) -> str:
    if cell.state is State.PASSED:
        return "ok" if cell.error is None else f"{cell.error:.1e}"
    if cell.state is State.FAILED:
        return "**failed**"
    # A code says enough; what follows it is in the JSON.
    return f"{cell.state.value}: {cell.detail.partition(': ')[0]}".replace("|", "\\|")


def _indented(text: str) -> list[str]:
    return [f"    {line}" for line in text.splitlines()]
