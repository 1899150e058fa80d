from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("torch")
pytest.importorskip("triton", minversion="3.5")

NAMES = ("test_triton_rounding", "test_triton", "test_triton_calls")


def test_the_kernels_are_right_in_tritons_interpreter() -> None:
    """Triton must see the variable before its first import, so the tests run in a process of their own."""
    tests = [Path(__file__).with_name(f"{name}.py") for name in NAMES]
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", *map(str, tests)]
    run = subprocess.run(
        command,
        env={**os.environ, "TRITON_INTERPRET": "1", "CUDA_VISIBLE_DEVICES": ""},
        cwd=tests[0].parents[2],
        capture_output=True,
        text=True,
        check=False,
    )
    assert run.returncode == 0, run.stdout[-4000:]
    passed = re.search(r"(\d+) passed", run.stdout)
    assert passed is not None
    assert int(passed[1]) >= 30
