"""The whole command on a CPU: what it prints, writes and answers when it is interrupted or asked nonsense."""

from __future__ import annotations

import importlib.util
import json
import os
import pty
import signal
import subprocess
import sys
import threading
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from measured_values import H200, point, way
from referencing import Registry, Resource

import flashinfer_compat as fc
from flashinfer_compat.bench.results import Report
from flashinfer_compat.cli import main

pytest.importorskip("torch")

SCHEMAS = Path(fc.__file__).parent / "schemas"
BENCH, POLICY = (json.loads((SCHEMAS / f"{name}-1.json").read_text("utf-8")) for name in ("bench", "policy"))
REGISTRY: Registry = Registry().with_resources([(POLICY["$id"], Resource.from_contents(POLICY))])
VALIDATOR = jsonschema.Draft202012Validator(BENCH, registry=REGISTRY)
TINY = ("--hidden-size", "64", "--intermediate-size", "32", "--num-experts", "4", "--top-k", "2")
FEW = (*TINY, "--tokens", "30", "60", "--numerics", "w4a16")


def environ(cache: Path, **more: str) -> dict[str, str]:
    # Without a GPU wherever this runs.
    own = {"FLASHINFER_COMPAT_CACHE_DIR": str(cache), "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
    return {**os.environ, **own, **more}


def command(*arguments: str | Path) -> list[str]:
    return [sys.executable, "-m", "flashinfer_compat", *map(str, arguments)]


def bench(cache: Path, *arguments: str | Path, **more: str) -> subprocess.CompletedProcess[str]:
    run = subprocess.run(
        command("bench", *arguments), capture_output=True, text=True, env=environ(cache, **more), check=False
    )
    assert "Traceback" not in run.stderr, run.stderr
    return run


def checked(report: Mapping[str, Any]) -> Mapping[str, Any]:
    VALIDATOR.validate(report)
    return report


def test_the_schema_is_one() -> None:
    jsonschema.Draft202012Validator.check_schema(BENCH)


def test_a_run_from_end_to_end(tmp_path: Path) -> None:
    report, cache = tmp_path / "report.json", tmp_path / "cache"
    plot = ["--plot", tmp_path / "times.svg"] if importlib.util.find_spec("matplotlib") else []
    rates = ["--bandwidth", "0.01", "--flops", "0.05"]
    run = bench(cache, *FEW, "--json", report, *rates, *plot)
    assert run.returncode == 0, run.stderr
    assert "hidden_size 64, intermediate_size 32, 4 experts, top-2, 1 shared, weights 17.4 kB" in run.stdout
    assert "medians of the wall clock on a CPU" in run.stdout
    assert "What planning should prefer" not in run.stdout
    found = checked(json.loads(report.read_text()))
    # Plan takes torch's fused strategies only by name.
    assert (found["policy"], found["policy_file"]) == ([], None)
    assert (found["machine"]["gpu"], found["device"], found["interrupted"]) == (None, "cpu", False)
    assert {(one["strategy"], one["tokens"]) for one in found["points"]} == {
        (strategy, tokens) for strategy in ("split", "expanded") for tokens in (30, 60)
    }
    for one in found["points"]:
        assert one["problem"] is None
        assert one["found"]["microseconds"] > 0
        assert one["found"]["relative_error"] < 5e-3
        assert f"{one['found']['microseconds']:.1f}" in run.stdout
        # Five experts' bytes over 1e10 bytes/s, or 2 * 3 * 64 * 32 * 3 pairs over 5e10 operations/s.
        operations = 2 * 3 * 64 * 32 * 3 * one["tokens"]
        assert one["found"]["floor_microseconds"] == pytest.approx(max(5 * 3456 / 1e4, operations / 5e4))
    assert not list(tmp_path.glob("**/*.tmp"))
    assert not plot or (tmp_path / "times.svg").read_text().count("torch expanded w4a16") >= 1


def test_a_broken_policy_stops_nothing(tmp_path: Path) -> None:
    run = bench(tmp_path, *FEW, "--json", FLASHINFER_COMPAT_POLICY=str(tmp_path / "none.json"))
    assert run.returncode == 0, run.stderr
    assert len(checked(json.loads(run.stdout))["points"]) == 4
    assert "30" in run.stderr


@pytest.mark.parametrize("strategy", [("split",), ("expanded",), ("split", "expanded")])
def test_a_policy_that_cannot_follow_is_refused_before_measuring(tmp_path: Path, strategy: tuple[str, ...]) -> None:
    run = bench(tmp_path, *FEW, "--strategy", *strategy, "--write-policy", tmp_path / "policy.json")
    assert (run.returncode, run.stdout) == (2, "")
    assert "--write-policy: expected split and" in run.stderr
    assert "T=30" not in run.stderr
    assert f"got only {strategy[0]} on torch" in run.stderr
    assert not (tmp_path / "policy.json").exists()


def test_a_policy_that_was_asked_for_and_not_written_is_exit_code_1() -> None:
    points = (point(way("expanded"), 1, 90.0), point(way("split"), 1, 80.0))
    report = Report("cuda:0", H200, (1,), None, points, (), (), None, (), interrupted=False, policy_asked=True)
    assert report.exit_code == 1
    assert replace(report, policy_asked=False).exit_code == replace(report, policy_file="policy.json").exit_code == 0
    assert replace(report, interrupted=True).exit_code == 130


def test_router_logits_are_another_question(capsys: pytest.CaptureFixture[str]) -> None:
    asked = ["--device", "cpu", "--backend", "torch", "--input", "logits", "topk", "--strategy", "native", "expanded"]
    assert main(["bench", *FEW, *asked, "--json"]) == 0
    found = checked(json.loads(capsys.readouterr().out))
    assert {(one["routing_input"], one["strategy"]) for one in found["points"]} == {
        ("logits", "native"),
        ("topk", "expanded"),
    }
    assert found["policy"] == []
    assert found["rates"] is None


def test_ctrl_c_keeps_what_was_measured(tmp_path: Path) -> None:
    report = tmp_path / "report.json"
    tokens = [str(one) for one in range(30, 400)]
    arguments = command("bench", *TINY, "--tokens", *tokens, "--json", report)
    run = subprocess.Popen(
        arguments, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environ(tmp_path / "cache")
    )
    assert run.stderr is not None
    first = run.stderr.readline()
    run.send_signal(signal.SIGINT)
    output, errors = run.communicate(timeout=60)
    assert "T=30" in first
    assert run.returncode == 130, errors
    assert "Traceback" not in errors
    assert "Interrupted" in output
    found = checked(json.loads(report.read_text()))
    assert (found["interrupted"], found["exit_code"]) == (True, 130)
    assert 1 <= len(found["points"]) < len(tokens)
    assert found["policy_file"] is None


NONSENSE = {
    "a token count": (("--tokens", "0"), "--tokens: expected positive numbers"),
    "a size": (("--hidden-size", "100"), "hidden_size: expected a multiple of 16"),
    "more experts a token than there are": (("--top-k", "9"), "top_k: expected at most num_experts=4"),
    "a backend": (("--backend", "tritno"), "Did you mean 'triton'?"),
    "an input": (("--input", "logit"), "Did you mean 'logits'?"),
    "numerics": (("--numerics", "w4a8"), "--numerics: expected one of"),
    "a device": (("--device", "tpu"), "--device: expected a device"),
    "half a floor": (("--bandwidth", "4.3"), "--flops: expected a rate beside --bandwidth"),
    "a device that only other builds know": (("--device", "mps"), "got 'mps' (it has no kernels for that)."),
    "no name": (("--json", ""), "--json: expected a file name, got an empty one."),
    "no name of a policy": (("--write-policy", ""), "--write-policy: expected a file name, got an empty one."),
    "one name twice": (("--json", "a.svg", "--plot", "./a.svg"), "--plot: expected another file than --json's"),
    "a long name": (("--json", 256 * "a"), "--json: expected a file name of at most 255 bytes, got 256 bytes"),
    "a folder": (("--json", "/"), "--json: expected a file name, got the folder /."),
    "a folder for a policy": (("--write-policy", "/"), "--write-policy: expected a file name, got the folder /."),
    "a missing folder": (("--json", "no/such/folder/x.json"), "--json: expected a file name in an existing folder"),
    "a plot without a kind": (("--plot", "x.pdf"), "--plot: expected a name that ends in .svg or .png"),
}


@pytest.mark.parametrize(("arguments", "said"), NONSENSE.values(), ids=NONSENSE)
def test_nonsense_is_exit_code_2(capsys: pytest.CaptureFixture[str], arguments: tuple[str, ...], said: str) -> None:
    if "--plot" in arguments:
        pytest.importorskip("matplotlib")
    assert main(["bench", *FEW, "--device", "cpu", *arguments]) == 2
    found = capsys.readouterr()
    assert said in found.err
    assert found.out == ""


def test_what_planning_refuses_is_exit_code_1(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["bench", *FEW, "--device", "cpu", "--backend", "triton"]
    assert main(arguments) == 1
    assert "expanded on triton: There is no NVIDIA GPU" in capsys.readouterr().err
    assert main([*arguments, "--json"]) == 1
    assert {one["code"] for one in json.loads(capsys.readouterr().out)["rejected"]} == {"no_gpu"}
    assert main(["bench", *FEW, "--device", "cpu", "--backend", "torch", "--strategy", "native"]) == 1
    assert "needs --input logits" in capsys.readouterr().err


def test_a_file_that_is_no_policy_is_not_overwritten(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "notes.json"
    file.write_text("[]")
    assert main(["bench", *FEW, "--write-policy", str(file)]) == 2
    said = capsys.readouterr().err
    assert "notes.json: expected a policy file" in said
    assert "Remove it, or name another file." in said
    assert file.read_text() == "[]"


def test_a_file_that_cannot_be_written_loses_no_times(tmp_path: Path) -> None:
    run = bench(tmp_path / "cache", *FEW, "--json", "/dev/full")
    assert run.returncode == 2
    assert "time, us" in run.stdout
    assert "error: --json: expected a file that can be written, got /dev/full (No space left" in run.stderr


@pytest.mark.skipif(os.geteuid() == 0, reason="root writes everywhere")
def test_a_folder_that_cannot_be_written_is_named_first(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    tmp_path.chmod(0o500)
    assert main(["bench", *FEW, "--device", "cpu", "--json", str(tmp_path / "x.json")]) == 2
    found = capsys.readouterr()
    assert "--json: expected a file name in a folder that can be written" in found.err
    assert found.out == ""


def test_a_terminal_gets_a_bar(tmp_path: Path) -> None:
    pytest.importorskip("rich")
    ours, theirs = pty.openpty()
    seen = bytearray()

    def read() -> None:
        while True:
            try:
                part = os.read(ours, 4096)
            except OSError:
                return
            if not part:
                return
            seen.extend(part)

    reader = threading.Thread(target=read)
    reader.start()
    arguments = command("bench", *FEW, "--json", tmp_path / "report.json")
    run = subprocess.run(
        arguments, stdout=subprocess.PIPE, stderr=theirs, env=environ(tmp_path, TERM="xterm"), check=False
    )
    os.close(theirs)
    reader.join()
    os.close(ours)
    assert run.returncode == 0
    assert b"4/4" in seen
