"""What docs/doctor.md says of files that are written and of validating."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from doctor_machines import build, healthy

from flashinfer_compat.environment import FileCheck

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "doctor.md").read_text("utf-8")


def run(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    environ = {**os.environ, "FLASHINFER_COMPAT_CACHE_DIR": str(folder / "cache")}
    path = os.pathsep.join(filter(None, [str(folder / "m" / "site"), str(ROOT), os.environ.get("PYTHONPATH")]))
    command = [sys.executable, *arguments]
    return subprocess.run(
        command, capture_output=True, text=True, cwd=folder, env={**environ, "PYTHONPATH": path}, check=False
    )


def test_it_writes_the_cache_that_the_page_names_and_nothing_else(tmp_path: Path) -> None:
    build(tmp_path / "m", *healthy())
    before = {path for path in tmp_path.rglob("*") if "__pycache__" not in path.parts}
    assert run(tmp_path, "-m", "flashinfer_compat", "doctor", "--json").stderr == ""
    written = {path for path in tmp_path.rglob("*") if "__pycache__" not in path.parts} - before
    (entry,) = written - {tmp_path / "cache"}
    assert entry.match("cache/signatures-*.json")
    assert "`signatures-*.json`" in PAGE


@pytest.mark.parametrize("change", [{}, {"exit_code": 3}, {"capabilities": {}}])
def test_the_lines_that_validate_do(tmp_path: Path, change: dict[str, object]) -> None:
    pytest.importorskip("jsonschema")
    (lines,) = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
    report = json.loads(run(tmp_path, "-m", "flashinfer_compat", "doctor", "--json").stdout)
    (tmp_path / "doctor.json").write_text(json.dumps({**report, **change}), "utf-8")
    done = run(tmp_path, "-c", lines)
    assert (done.returncode, done.stderr) == (0, "") if not change else "ValidationError" in done.stderr


def test_it_names_every_level_of_comparing_files() -> None:
    assert re.findall(r"^\| `(\w+)`", PAGE.partition("## Which files")[2], re.MULTILINE)[: len(FileCheck)] == [
        level.value for level in FileCheck
    ]
