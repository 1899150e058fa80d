from __future__ import annotations

import json
from pathlib import Path

import pytest

pytest.importorskip("pypi_simple")

from flashinfer_compat.files import write_whole
from tools.matrix.__main__ import report
from tools.matrix.child import read
from tools.matrix.results import Cell, ReleaseResult, State, failed
from tools.matrix.tables import markdown, progress

OK = Cell("release", "import", State.PASSED)
NUMBER = Cell("grouped", "split, topk", State.PASSED, "mm_fp4", 0.0123)
REFUSED = Cell("grouped", "native, logits", State.REFUSED, "keyword_missing")
KNOWN = Cell("release", "import", State.KNOWN, "import-needs-cuda: AssertionError('a|b')")
BROKEN = Cell("grouped", "split, topk", State.FAILED, "first line\nsecond line", 0.5)


def result(version: str, *cells: Cell) -> ReleaseResult:
    return ReleaseResult(version, f"flashinfer_python-{version}.whl", 1.26, cells)


GOOD = [result("0.6.17", KNOWN, NUMBER), result("0.7.4", OK, REFUSED, NUMBER)]


def test_the_tables_have_a_row_for_each_release_and_a_column_for_each_thing_tried() -> None:
    assert markdown(GOOD).splitlines() == [
        "2 releases: 3 passed, 1 refused, 1 known",
        "",
        "## release",
        "",
        "| FlashInfer | import |",
        "| --- | --- |",
        "| 0.6.17 | known: import-needs-cuda |",
        "| 0.7.4 | ok |",
        "",
        "## grouped",
        "",
        "| FlashInfer | split, topk | native, logits |",
        "| --- | --- | --- |",
        "| 0.6.17 | 1.2e-02 |  |",
        "| 0.7.4 | 1.2e-02 | refused: keyword_missing |",
    ]


def test_a_failure_is_told_in_full_once() -> None:
    lines = markdown([result("0.7.0", BROKEN), result("0.7.4", BROKEN)]).splitlines()
    assert lines[lines.index("## Failed in 2 cells") :] == [
        "## Failed in 2 cells",
        "",
        "0.7.0 (grouped: split, topk); 0.7.4 (grouped: split, topk)",
        "",
        "    first line",
        "    second line",
    ]
    assert "| 0.7.0 | **failed** |" in lines


def test_the_exit_code_says_whether_what_must_hold_does(tmp_path: Path) -> None:
    assert report(GOOD, tmp_path / "new" / "folder") == 0
    assert report([*GOOD, result("0.7.5", BROKEN)], tmp_path) == 1
    assert report([], tmp_path) == 0


def test_the_files_hold_every_cell_and_nothing_else_is_left(tmp_path: Path) -> None:
    report(GOOD, tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["matrix.json", "matrix.md"]
    assert (tmp_path / "matrix.md").read_text("utf-8") == markdown(GOOD)
    content = json.loads((tmp_path / "matrix.json").read_text("utf-8"))
    assert content["schema_version"] == 1
    data = content["releases"]
    assert [one["version"] for one in data] == ["0.6.17", "0.7.4"]
    assert data[1]["archive"] == "flashinfer_python-0.7.4.whl"
    assert data[1]["seconds"] == 1.3
    assert [Cell.from_dict(cell) for cell in data[1]["cells"]] == [OK, REFUSED, NUMBER]


def test_a_process_hands_its_cells_over_in_a_file(tmp_path: Path) -> None:
    path = tmp_path / "cells.json"
    write_whole(path, json.dumps([cell.to_dict() for cell in (BROKEN, NUMBER)]))
    assert read(path) == [BROKEN, NUMBER]


def test_progress_counts_and_tells_the_time() -> None:
    assert progress(GOOD[1], 2, 96, 125.9) == "[2/96] 0.7.4: 2 passed, 1 refused in 1 s (2:05 elapsed)"


def test_a_failed_cell_ends_with_the_exception() -> None:
    try:
        raise KeyError("gone")
    except KeyError as error:
        (cell, other) = failed("release", ["import", "signatures"], error)
    assert (cell.column, other.column, cell.state) == ("import", "signatures", State.FAILED)
    assert cell.detail.endswith("KeyError: 'gone'")
