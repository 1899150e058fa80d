from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

HERE = Path(__file__).parent


@pytest.fixture(scope="session")
def run_child(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Any]:
    """Run one of the scripts here in a process of its own, with JSON in and its last line of output as JSON out."""

    def run(script: str, question: object = None, **environ: str) -> Any:
        home = tmp_path_factory.mktemp("home")
        paths = [str(HERE), str(HERE.parent), str(HERE.parents[1])]
        child = subprocess.run(
            [sys.executable, str(HERE / script)],
            input=json.dumps(question),
            capture_output=True,
            text=True,
            check=False,
            env={
                "PATH": os.environ["PATH"],
                "HOME": str(home),
                "HF_HOME": str(home / "hf"),
                "HF_HUB_OFFLINE": "1",
                "FLASHINFER_COMPAT_CACHE_DIR": str(home / "cache"),
                "OMP_NUM_THREADS": "1",
                "TORCHDYNAMO_DISABLE": "1",
                "PYTHONPATH": os.pathsep.join(paths),
                **environ,
            },
        )
        assert child.returncode == 0, child.stderr[-4000:]
        return json.loads(child.stdout.splitlines()[-1])

    return run
