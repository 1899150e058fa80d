"""How long the doctor takes: the whole command in a new process, and an examination in a process that did one before.

    python -m benchmarks.doctor_speed [--repeat N] [--with-flashinfer VERSION]

By default it looks at this machine. `--with-flashinfer` puts a fake install of that release before it on the search
path: real folders with the release's entry points, as the tests make them. Prints a table of medians in milliseconds.
"""

from __future__ import annotations

import argparse
import importlib
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from flashinfer_compat.doctor.examination import examine_environment
from flashinfer_compat.environment import FileCheck, collect

_ROOT = Path(__file__).parents[1]


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.doctor_speed", description=__doc__)
    parser.add_argument("--repeat", type=int, default=11)
    parser.add_argument("--with-flashinfer", metavar="VERSION")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        if options.with_flashinfer:
            _install(Path(folder), options.with_flashinfer)
            sys.path.insert(0, folder)
        print("| what | median, ms |")
        print("| --- | --- |")
        for title, seconds in _measurements(folder, options.repeat):
            print(f"| {title} | {seconds * 1e3:.1f} |", flush=True)


def _measurements(folder: str, repeat: int) -> list[tuple[str, float]]:
    def examination(level: FileCheck) -> Callable[[], float]:
        return lambda: _timed(lambda: examine_environment(collect(check_files=level)).to_dict())

    return [
        ("doctor, whole command, new process", _median(lambda: _command(folder, []), repeat)),
        ("the same with --check-files none", _median(lambda: _command(folder, ["--check-files", "none"]), repeat)),
        ("examination in process, warm", _median(examination(FileCheck.MOE), repeat)),
        ("the same, sizes of all files compared", _median(examination(FileCheck.SIZES), repeat)),
        ("the same, files not compared", _median(examination(FileCheck.NONE), repeat)),
    ]


def _command(folder: str, arguments: Sequence[str]) -> float:
    command = [sys.executable, "-m", "flashinfer_compat", "doctor", *arguments]
    environ = {**os.environ, "PYTHONPATH": os.pathsep.join([folder, str(_ROOT)])}
    return _timed(lambda: subprocess.run(command, stdout=subprocess.DEVNULL, check=False, env=environ))


def _install(folder: Path, version: str) -> None:
    sys.path.insert(0, str(_ROOT / "tests"))
    importlib.import_module("fakes").install_flashinfer(folder, version)


def _timed(action: Callable[[], object]) -> float:
    started = time.perf_counter()
    action()
    return time.perf_counter() - started


def _median(measure: Callable[[], float], repeat: int) -> float:
    measure()
    return statistics.median(measure() for _ in range(repeat))


if __name__ == "__main__":
    main()
