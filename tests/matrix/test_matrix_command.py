"""The matrix's own command line, where nothing can be run."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from flashinfer_compat.signatures.recorded import recorded

ROOT = Path(__file__).parents[2]
WITHOUT = "raise ModuleNotFoundError(\"No module named 'pypi_simple'\", name='pypi_simple')\n"
UNREACHABLE = """
class DistributionPackage: pass
class PyPISimple:
    def __enter__(self): raise ConnectionError("no route to the index")
    def __exit__(self, *_): pass
"""


def matrix(folder: Path, *arguments: str, pypi_simple: str = UNREACHABLE) -> subprocess.CompletedProcess[str]:
    """The command with another pypi-simple before the installed one."""
    before = folder / "before"
    before.mkdir(exist_ok=True)
    (before / "pypi_simple.py").write_text(pypi_simple, "utf-8")
    path = os.pathsep.join(filter(None, [str(before), os.environ.get("PYTHONPATH")]))
    return subprocess.run(
        [sys.executable, "-m", "tools.matrix", "--output", str(folder / "out"), *arguments],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": path},
        capture_output=True,
        text=True,
        check=False,
    )


def last_line(done: subprocess.CompletedProcess[str]) -> str:
    assert (done.returncode, done.stdout) == (2, "")
    return done.stderr.splitlines()[-1].removeprefix("python -m tools.matrix: error: ")


def test_a_missing_package_is_told_with_the_line_that_installs_it(tmp_path: Path) -> None:
    expected = "pypi_simple is not installed; pip install -r tools/matrix/requirements.txt"
    assert last_line(matrix(tmp_path, pypi_simple=WITHOUT)) == expected


@pytest.mark.parametrize("jobs", ["0", "-2"])
def test_at_least_one_release_runs_at_a_time(tmp_path: Path, jobs: str) -> None:
    expected = f"argument --jobs: must be at least 1, but is {jobs}"
    assert last_line(matrix(tmp_path, "--jobs", jobs)) == expected


@pytest.mark.parametrize("option", ["--output", "--archives"])
def test_a_folder_that_cannot_be_written_is_told_before_anything_runs(tmp_path: Path, option: str) -> None:
    (tmp_path / "file").write_text("", "utf-8")
    told = last_line(matrix(tmp_path, option, str(tmp_path / "file" / "folder")))
    assert told.startswith(f"argument {option}: {tmp_path}/file/folder cannot be written: ")


def test_an_index_that_cannot_be_asked_is_told(tmp_path: Path) -> None:
    assert last_line(matrix(tmp_path, "newest")) == "the package index cannot be asked: no route to the index"


def test_an_archive_that_is_not_the_recorded_one_is_not_taken(tmp_path: Path) -> None:
    (tmp_path / recorded("0.7.4").archive).write_bytes(b"half of it")
    told = last_line(matrix(tmp_path, "0.7.4", "--archives", str(tmp_path)))
    assert told == "the package index cannot be asked: no route to the index"


@pytest.mark.archives
def test_with_its_archive_at_hand_a_release_runs_without_the_index(tmp_path: Path) -> None:
    from pypi_simple import PyPISimple

    from tools.matrix.archives import fetch
    from tools.record_signatures import archives

    with PyPISimple() as client:
        fetch(client, archives(client)["0.5.3"], tmp_path)
    done = matrix(tmp_path, "0.5.3", "--archives", str(tmp_path))
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stderr.startswith("[1/1] 0.5.3: ")
