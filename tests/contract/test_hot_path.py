"""A call of fp4_moe looks at nothing but its arguments: no file, no import, no environment variable, no process."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("torch")

CODE = """
import os, sys
import torch, standin
import flashinfer_compat as fc
from safetensors.torch import load_file

folder, backend = sys.argv[1:]
io = load_file(folder + "/moe_io.safetensors")
weights = fc.load_moe_layer(folder, 1)
seen, watching = [], False

def watch(event, arguments):
    if watching and event.split(".")[0] in ("open", "import", "os", "subprocess", "socket", "glob", "shutil"):
        seen.append((event, str(arguments)[:80]))

class Watched(dict):
    def __getitem__(self, name):
        if watching:
            seen.append(("environ", name))
        return super().__getitem__(name)

    def get(self, name, default=None):
        if watching:
            seen.append(("environ", name))
        return super().get(name, default)

sys.addaudithook(watch)
with standin.installed("0.7.4"):
    plan = fc.plan(weights.problem("topk"), fc.Target.from_release("0.7.4", "sm100"), backend=backend, strategy="split")
    layer = fc.prepare(weights, plan)
    routing = fc.TopKRouting(io["topk_ids"], io["topk_weights"])
    for _ in range(2):
        fc.fp4_moe(io["hidden_states"], layer, routing)
    os.environ = Watched(os.environ)
    watching = True
    fc.fp4_moe(io["hidden_states"], layer, routing)
    watching = False
assert not seen, seen
"""


@pytest.mark.parametrize("backend", ["torch", "trtllm"])
def test_a_call_looks_at_its_arguments_only(checkpoints: Path, backend: str) -> None:
    command = [sys.executable, "-c", CODE, str(checkpoints / "grouped"), backend]
    tests = Path(__file__).parents[1]
    environ = {**os.environ, "PYTHONPATH": f"{tests}{os.pathsep}{tests.parent}"}
    run = subprocess.run(command, capture_output=True, text=True, env=environ, check=False)
    assert run.returncode == 0, run.stderr
