"""The verify command, and that what it found is what plan and capabilities then say."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("torch")


def run(cache: Path, *arguments: str, **more: str) -> tuple[int, str]:
    command = [sys.executable, "-m", "flashinfer_compat", *arguments]
    environ = {**os.environ, "FLASHINFER_COMPAT_CACHE_DIR": str(cache), **more}
    done = subprocess.run(command, capture_output=True, text=True, env=environ, check=False)
    assert "Traceback" not in done.stderr
    return done.returncode, done.stdout


def status(cache: Path, *more: str, **environ: str) -> str:
    code, text = run(cache, "plan", "--json", "--backend", "torch", "--input", "topk", *more, **environ)
    assert code == 0
    return json.loads(text)["status"]


def test_what_it_verified_is_verified_from_then_on(tmp_path: Path) -> None:
    assert status(tmp_path) == "eligible"
    code, text = run(tmp_path, "verify", "--device", "cpu", "--json")
    found = json.loads(text)
    assert code == 0
    assert {one["verdict"] for one in found["checks"]} == {"verified"}
    assert found["stored_in"] is None or Path(found["stored_in"]).parent == tmp_path
    # On a machine with a GPU a run on the CPU is not kept.
    assert status(tmp_path) == ("eligible" if found["stored_in"] is None else "verified")
    # Nor does it say anything of another GPU or release, and a policy does as little.
    for other in (("--arch", "sm75"), ("--flashinfer", "0.7.4")):
        assert status(tmp_path, *other, FLASHINFER_COMPAT_POLICY=str(tmp_path / "none.json")) == "eligible"
    _, text = run(tmp_path, "doctor", "--json")
    strategies = json.loads(text)["capabilities"]["fp4_moe"]["strategies"]
    assert found["stored_in"] is None or "verified" in {one["status"] for one in strategies}


def test_what_cannot_be_checked_is_code_2(tmp_path: Path) -> None:
    code, text = run(tmp_path, "verify", "--device", "cpu", "--backend", "trtllm")
    assert code == 2
    assert "0 of 0 verified" in text
    assert "Not kept: only some backends" in text


def test_a_backend_that_nothing_runs_on_comes_with_the_reason(tmp_path: Path) -> None:
    environ = {"PYTHONPATH": str(Path(__file__).parents[2]), "HOME": str(tmp_path), "CUDA_VISIBLE_DEVICES": ""}
    _, text = run(tmp_path, "verify", "--device", "cpu", "--backend", "triton", **environ)
    assert " ".join(text.split()).startswith("not run on triton: There is no NVIDIA GPU; ")
    _, text = run(tmp_path, "verify", "--device", "cpu", "--backend", "triton", "--json", **environ)
    found = json.loads(text)
    assert found["checks"] == []
    assert [one["code"] for one in found["not_run"]["triton"]] == ["no_gpu"]


def test_an_unknown_backend_is_named(tmp_path: Path) -> None:
    code, text = run(tmp_path, "verify", "--backend", "cuda", "--json")
    assert code == 2
    assert "--backend" in json.loads(text)["error"]["message"]


@pytest.mark.parametrize("device", ["foo", "meta", "cuda:99"])
def test_a_device_that_cannot_compute_is_named(tmp_path: Path, device: str) -> None:
    code, text = run(tmp_path, "verify", "--device", device, "--json")
    assert code == 2
    assert "--device" in json.loads(text)["error"]["message"]
