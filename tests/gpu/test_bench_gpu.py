"""Times and memory on a GPU, of a small layer; and a measured policy at work."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("triton", minversion="3.5")

if not torch.cuda.is_available():
    pytest.skip("needs a CUDA GPU", allow_module_level=True)

from measured_values import row  # noqa: E402

import flashinfer_compat as fc  # noqa: E402
from flashinfer_compat.bench.reference import deviation_of, expected  # noqa: E402
from flashinfer_compat.bench.run import Asked, measure, ways_of  # noqa: E402
from flashinfer_compat.bench.shapes import Sizes  # noqa: E402
from flashinfer_compat.bench.workload import make_inputs, make_layer  # noqa: E402
from flashinfer_compat.machine import architecture_of, this_environment, this_machine  # noqa: E402
from flashinfer_compat.vocabulary import Backend, Numerics, RoutingInput, Strategy  # noqa: E402

pytestmark = pytest.mark.gpu

DEVICE = torch.device("cuda", 0)
SIZES = Sizes(512, 256, 16, 4, 1)


def test_every_way_of_triton_is_timed_in_a_graph() -> None:
    asked = Asked((SIZES,), tuple(RoutingInput), (Backend.TRITON,), tuple(Strategy), tuple(Numerics))
    ways, refusals = ways_of(asked, this_machine())
    assert len(ways) == 8
    assert refusals == []
    for point in measure(ways, (1, 64, 300), this_machine(), DEVICE, None):
        assert point.problem == ""
        assert point.found is not None
        assert point.found.timing == "cuda_graph"
        assert 0 < point.found.microseconds < 1e5
        # A bf16 output of its own, at least.
        assert point.found.peak_bytes >= point.tokens * SIZES.hidden_size * 2
        # Weights lie as the checkpoint has them; scales are copied.
        assert point.found.beyond_bytes < 0.05 * point.found.weight_bytes


def test_the_reference_is_timed_by_the_clock() -> None:
    asked = Asked((SIZES,), (RoutingInput.TOPK,), (Backend.TORCH,), (Strategy.SPLIT,), (Numerics.W4A16,))
    (point,) = measure(ways_of(asked, this_machine())[0], (3,), this_machine(), DEVICE, None)
    assert point.found is not None
    assert (point.problem, point.found.timing) == ("", "wall_clock")


@pytest.mark.parametrize("tokens", [1, 63, 64, 200])
def test_a_layer_that_switches_is_right_on_both_sides(tokens: int) -> None:
    origin = replace(row({1: (1, 2)}, None).origin, architecture=architecture_of(this_environment()))
    policy = (row({1: (10, 20), 64: (20, 10)}, 64, origin=origin, sizes=SIZES),)
    problem = SIZES.problem(RoutingInput.TOPK, Numerics.W4A16)
    plan = fc.plan(problem, replace(this_machine(), policy=policy), backend="triton")
    assert (plan.strategy, plan.split_from_tokens) == (Strategy.EXPANDED, 64)
    layer, inputs = make_layer(SIZES, DEVICE), make_inputs(SIZES, tokens, DEVICE)
    output = fc.fp4_moe(inputs.hidden_states, fc.prepare(layer, plan), inputs.routings(RoutingInput.TOPK)[0])
    right = expected(layer, inputs.hidden_states, inputs.chosen[0], Numerics.W4A16)
    assert deviation_of(output, right).relative < 5e-3


def test_the_command_tunes_measures_and_writes_what_planning_reads(tmp_path: Path) -> None:
    report, policy, cache = tmp_path / "report.json", tmp_path / "policy.json", tmp_path / "cache"
    layer = ["--hidden-size", "512", "--intermediate-size", "256", "--num-experts", "16", "--top-k", "4"]
    what = ["--numerics", "w4a16", "--backend", "triton"]
    environ = {**os.environ, "FLASHINFER_COMPAT_CACHE_DIR": str(cache)}

    def command(*arguments: str, **more: str) -> str:
        command = [sys.executable, "-m", "flashinfer_compat", *arguments]
        run = subprocess.run(command, capture_output=True, text=True, env={**environ, **more}, check=False)
        assert run.returncode == 0, run.stderr
        return run.stdout

    command("bench", *layer, *what, "--tokens", "8", "--autotune", "--json", str(report), "--write-policy", str(policy))
    points = json.loads(report.read_text("utf-8"))["points"]
    assert {(one["strategy"], one["tokens"]) for one in points} == {("expanded", 8), ("split", 8)}
    assert all(0 < one["found"]["microseconds"] < 1e4 for one in points)
    # Tiles of both forms.
    tuned = [json.loads(path.read_text("utf-8")) for path in cache.glob("triton-tiles*")]
    assert [list(one["tokens"]) for one in tuned] == [["8"]] * 2
    (row,) = json.loads(policy.read_text("utf-8"))["rows"]
    asked = ["plan", *layer, *what, "--input", "topk", "--json"]
    planned = json.loads(command(*asked, FLASHINFER_COMPAT_POLICY=str(policy)))
    # One number of tokens was measured: split is faster there and taken from there on, or nowhere.
    assert row["split_from_tokens"] in (None, 8)
    assert (planned["strategy"], planned["split_from_tokens"]) == ("expanded", row["split_from_tokens"])
