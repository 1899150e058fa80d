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
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from referencing import Registry, Resource

import flashinfer_compat as fc
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
    report, policy, cache = tmp_path / "report.json", tmp_path / "policy.json", tmp_path / "cache"
    plot = ["--plot", tmp_path / "times.svg"] if importlib.util.find_spec("matplotlib") else []
    rates = ["--bandwidth", "0.01", "--flops", "0.05"]
    run = bench(cache, *FEW, "--json", report, "--write-policy", policy, *rates, *plot)
    assert run.returncode == 0, run.stderr
    assert "hidden_size 64, intermediate_size 32, 4 experts, top-2, 1 shared, weights 17.4 kB" in run.stdout
    assert "medians of the wall clock on a CPU" in run.stdout
    assert f"Kept in {policy}" in " ".join(run.stdout.split())
    found = checked(json.loads(report.read_text()))
    assert found["policy_file"] == str(policy)
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
    # The same rows are in the file, and planning on this machine sees them.
    rows = json.loads(policy.read_text())["rows"]
    assert rows == found["policy"]
    assert len(rows) == 1
    code = "import flashinfer_compat as fc; print(fc.this_machine().policy[0].to_dict()['times'])"
    ask = [sys.executable, "-c", code]
    seen = subprocess.check_output(ask, text=True, env=environ(cache, FLASHINFER_COMPAT_POLICY=str(policy)))
    assert seen.strip() == str(rows[0]["times"])
    assert not list(tmp_path.glob("**/*.tmp"))
    assert not plot or (tmp_path / "times.svg").read_text().count("torch expanded w4a16") >= 1


def test_a_policy_in_the_cache_is_found_there(tmp_path: Path) -> None:
    run = bench(tmp_path, *FEW, "--write-policy", "--json")
    found = checked(json.loads(run.stdout))
    assert Path(found["policy_file"]).parent == tmp_path
    assert "30" in run.stderr
    ask = [sys.executable, "-c", "import flashinfer_compat as fc; print(len(fc.this_machine().policy))"]
    assert subprocess.check_output(ask, text=True, env=environ(tmp_path)) == "1\n"


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
    arguments = command("bench", *TINY, "--tokens", *tokens, "--json", report, "--write-policy")
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
    assert "No policy was written" in " ".join(found["notes"])
    assert not list(tmp_path.glob("**/*policy*"))


NONSENSE = {
    "a token count": (("--tokens", "0"), "--tokens: expected positive numbers"),
    "a size": (("--hidden-size", "100"), "hidden_size: expected a multiple of 16"),
    "more experts a token than there are": (("--top-k", "9"), "top_k: expected at most num_experts=4"),
    "a backend": (("--backend", "tritno"), "Did you mean 'triton'?"),
    "an input": (("--input", "logit"), "Did you mean 'logits'?"),
    "numerics": (("--numerics", "w4a8"), "--numerics: expected one of"),
    "a device": (("--device", "tpu"), "--device: expected a device"),
    "half a floor": (("--bandwidth", "4.3"), "--flops: expected a rate beside --bandwidth"),
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
    assert "notes.json: expected a policy file" in capsys.readouterr().err
    assert file.read_text() == "[]"


def test_a_file_that_cannot_be_written_loses_no_times(tmp_path: Path) -> None:
    # The cache's folder is a file.
    (tmp_path / "cache").write_text("")
    run = bench(tmp_path / "cache", *FEW, "--write-policy")
    assert run.returncode == 2
    assert "time, us" in run.stdout
    assert "error: " in run.stderr


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
