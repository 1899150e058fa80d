"""One release, from its archive to its cells: unpacked into a temporary folder, looked at by two fresh processes."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from tools.matrix.archives import unpack
from tools.matrix.child import read
from tools.matrix.results import Cell, ReleaseResult, State, failed

__all__ = ["MODULES", "look_at", "run_release"]

_ROOT = Path(__file__).absolute().parents[2]
MODULES = ("tools.matrix.plain", "tools.matrix.driven")
_TIMEOUT = 600
"""Seconds for one process; it takes about 10 where nothing else runs."""
_TAIL = 2000


def run_release(version: str, filename: str, fetch: Callable[[Path], Path]) -> ReleaseResult:
    """Every cell of one release; whatever goes wrong is a failed cell.

    Args:
        version: the release.
        filename: its archive's name.
        fetch: gives the archive; what it is handed is a folder that goes away with the run.
    """
    started = time.monotonic()
    cells: list[Cell] = []
    with tempfile.TemporaryDirectory() as name:
        temporary = Path(name)
        try:
            unpack(fetch(temporary), version, temporary / "site")
        except Exception as error:
            cells += failed("release", ["archive"], error)
        else:
            cells += look_at(version, temporary)
    return ReleaseResult(version, filename, time.monotonic() - started, tuple(cells))


def look_at(version: str, temporary: Path, modules: Sequence[str] = MODULES) -> list[Cell]:
    """The cells of the release that is unpacked in `temporary / "site"`; other files in `temporary` are left behind."""
    return [cell for module in modules for cell in _process(module, version, temporary)]


def _process(module: str, version: str, temporary: Path) -> list[Cell]:
    site, output = temporary / "site", temporary / f"{module}.json"
    command = [sys.executable, "-m", module, version, str(site), str(output)]
    try:
        # `-m` puts the working directory first on the search path.
        done = subprocess.run(
            command,
            env=_environment(site, temporary),
            cwd=site,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=_TIMEOUT,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return [Cell("release", module, State.FAILED, f"no answer within {_TIMEOUT} s")]
    if done.returncode != 0 or not output.exists():
        return [Cell("release", module, State.FAILED, f"exit code {done.returncode}\n{done.stderr[-_TAIL:]}")]
    return read(output)


def _environment(site: Path, temporary: Path) -> dict[str, str]:
    """This process's environment without FlashInfer's settings, so that a run depends on the release alone."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("FLASHINFER_")}
    return {
        **kept,
        "PYTHONPATH": os.pathsep.join(map(str, (site, _ROOT, _ROOT / "tests"))),
        # What FlashInfer and this package write goes away with the release.
        "FLASHINFER_WORKSPACE_BASE": str(temporary),
        "FLASHINFER_COMPAT_CACHE_DIR": str(temporary / "cache"),
        # Releases run side by side; one's tensors are too small to share among cores.
        "OMP_NUM_THREADS": "1",
    }
