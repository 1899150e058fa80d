"""How long facts take: importing the package, reading FlashInfer's signatures, the capabilities report, the doctor.

    python -m benchmarks.facts_speed [--flashinfer FOLDER] [--repeat N]

FOLDER holds the flashinfer package to read (default: the installed one). Prints a table of medians in milliseconds.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from flashinfer_compat.environment import FileCheck, collect
from flashinfer_compat.machine import read_flashinfer, target_of
from flashinfer_compat.report import capabilities_of
from flashinfer_compat.signatures.cache import read_installed

_IMPORT = "import time; t = time.perf_counter(); import {}; print(time.perf_counter() - t)"


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.facts_speed", description=__doc__)
    parser.add_argument("--flashinfer", type=Path, default=_installed())
    parser.add_argument("--repeat", type=int, default=11)
    options = parser.parse_args()
    print("| what | median, ms |")
    print("| --- | --- |")
    for title, seconds in _measurements(options.flashinfer, options.repeat):
        print(f"| {title} | {seconds * 1e3:.1f} |", flush=True)


def _measurements(flashinfer: Path | None, repeat: int) -> list[tuple[str, float]]:
    results = [
        (
            "`import flashinfer_compat`, new process",
            _median(lambda: _fresh(_IMPORT.format("flashinfer_compat")), repeat),
        ),
        ("`import argparse`, new process, to compare", _median(lambda: _fresh(_IMPORT.format("argparse")), repeat)),
    ]
    if flashinfer is not None:
        with tempfile.TemporaryDirectory() as folder:
            cold = _median(lambda: _timed(lambda: read_installed(flashinfer, None)), repeat)
            read_installed(flashinfer, Path(folder))
            warm = _median(lambda: _timed(lambda: read_installed(flashinfer, Path(folder))), repeat)
        results += [("static reading, cold", cold), ("static reading, warm", warm)]
    results += [
        ("capabilities report, facts gathered anew", _median(lambda: _timed(_report), repeat)),
        ("capabilities report, new process", _median(lambda: _fresh(_CAPABILITIES), repeat)),
        ("doctor, new process, whole command", _median(_doctor, repeat)),
    ]
    return results


_CAPABILITIES = """
import time
t = time.perf_counter()
import flashinfer_compat
flashinfer_compat.capabilities().to_json()
print(time.perf_counter() - t)
"""


def _report() -> None:
    environment = collect(check_files=FileCheck.NONE)
    capabilities_of(target_of(environment, read_flashinfer(environment))).to_json()


def _doctor() -> float:
    command = [sys.executable, "-m", "flashinfer_compat", "doctor", "--json"]
    return _timed(lambda: subprocess.run(command, stdout=subprocess.DEVNULL, check=False))


def _fresh(code: str) -> float:
    """What `code` prints, in a new process with warm files."""
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, env=dict(os.environ))
    return float(run.stdout)


def _timed(action: Callable[[], object]) -> float:
    started = time.perf_counter()
    action()
    return time.perf_counter() - started


def _median(measure: Callable[[], float], repeat: int) -> float:
    measure()
    return statistics.median(measure() for _ in range(repeat))


def _installed() -> Path | None:
    spec = importlib.util.find_spec("flashinfer")
    return Path(spec.origin).parents[1] if spec and spec.origin else None


if __name__ == "__main__":
    main()
