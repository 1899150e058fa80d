"""The processes of the matrix: on packages that break, and on real releases."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("pypi_simple")
pytest.importorskip("torch")

from pypi_simple import PyPISimple

from tools.matrix.archives import fetch, unpack
from tools.matrix.results import Cell, State
from tools.matrix.run import MODULES, look_at
from tools.matrix.selection import CI_RELEASES
from tools.record_signatures import archives

ROOT = Path(__file__).parents[2]
PLAIN = MODULES[:1]
TABLES = {"release", "grouped", "ungrouped-2-shared", "shared-bf16", "grouped, other calls"}


def package(folder: Path, text: str) -> None:
    (folder / "site" / "flashinfer").mkdir(parents=True)
    (folder / "site" / "flashinfer" / "__init__.py").write_text(text, "utf-8")


def by_column(cells: list[Cell]) -> dict[str, tuple[State, str]]:
    return {cell.column: (cell.state, cell.detail.splitlines()[-1] if cell.detail else "") for cell in cells}


def test_an_import_failure_that_is_known_is_told_and_only_on_this_machine(tmp_path: Path) -> None:
    package(tmp_path, "raise AssertionError('Torch not compiled with CUDA enabled')\n")
    found = by_column(look_at("0.7.0", tmp_path))
    assert found["import"][0] is State.KNOWN
    assert found["import"][1].startswith("import-needs-cuda: AssertionError(")
    assert found["signatures"][0] is State.ABSENT
    assert found["import as on SM100"][0] is State.FAILED


def test_any_other_import_failure_fails(tmp_path: Path) -> None:
    package(tmp_path, "print('noise')\nimport a_missing_dependency\n")
    missing = "ModuleNotFoundError: No module named 'a_missing_dependency'"
    assert by_column(look_at("0.7.0", tmp_path, PLAIN))["import"] == (State.FAILED, missing)


def test_a_process_that_dies_is_a_failed_cell(tmp_path: Path) -> None:
    package(tmp_path, "import os, sys\nprint('about to die', file=sys.stderr, flush=True)\nos._exit(7)\n")
    (cell,) = look_at("0.7.0", tmp_path, PLAIN)
    assert cell.state is State.FAILED
    assert cell.detail.startswith("exit code 7\nabout to die")


def test_another_flashinfer_is_not_mistaken_for_the_release(tmp_path: Path) -> None:
    package(tmp_path, "import os\n__file__ = os.__file__\n")
    state, detail = by_column(look_at("0.7.4", tmp_path, PLAIN))["import"]
    assert state is State.FAILED
    assert detail.startswith("another flashinfer was imported")


@pytest.mark.archives
def test_the_releases_of_every_change_hold(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "tools.matrix", "ci", "--output", str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, env=os.environ, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout
    releases = json.loads((tmp_path / "matrix.json").read_text("utf-8"))["releases"]
    assert tuple(one["version"] for one in releases) == CI_RELEASES
    for release in releases:
        cells = [Cell.from_dict(cell) for cell in release["cells"]]
        assert {cell.table for cell in cells} == TABLES
        passed = {(cell.table, cell.column) for cell in cells if cell.state is State.PASSED}
        # A guard: a run must not pass by refusing.
        assert {(table, "split, topk") for table in ("grouped", "ungrouped-2-shared", "shared-bf16")} <= passed
        assert {("grouped", "expanded, topk"), ("grouped, other calls", "unfinalized expanded, topk")} <= passed
        native = ("grouped", "native, logits")
        assert (native in passed) == (release["version"] in ("0.6.17", "0.7.0", "0.7.4"))
        assert (("release", "experts reference") in passed) == (release["version"] not in ("0.5.3", "0.6.7.post3"))


@pytest.mark.archives
def test_a_mistake_in_the_order_of_the_bindings_arguments_is_found(tmp_path: Path) -> None:
    """Both are integers, so only what they mean gives them away."""
    with PyPISimple() as client:
        archive = fetch(client, archives(client)["0.5.3"], tmp_path)
    unpack(archive, "0.5.3", tmp_path / "site")
    core = tmp_path / "site" / "flashinfer" / "fused_moe" / "core.py"
    text, call = core.read_text("utf-8"), "intermediate_output = moe_op.trtllm_fp4_block_scale_moe("
    head, tail = text.split(call)
    right, wrong = ("num_experts,\n            top_k,\n", "top_k,\n            num_experts,\n")
    assert right in tail
    core.write_text(head + call + tail.replace(right, wrong, 1), "utf-8")
    cells = look_at("0.5.3", tmp_path)
    states = {(cell.table, cell.column): cell.state for cell in cells}
    assert states["release", "import as on SM100"] is State.PASSED
    assert states["grouped", "split, topk"] is State.FAILED
    assert State.PASSED not in {state for (table, _), state in states.items() if table != "release"}
