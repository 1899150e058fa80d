"""The command line, run as people run it."""

from __future__ import annotations

import importlib.metadata
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from packaging.version import Version

ROOT = Path(__file__).parents[2]
OLD_TRITON = any(
    one.name == "triton" and Version(one.version) < Version("3.5") for one in importlib.metadata.distributions()
)


def run(*arguments: str, **environ: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "flashinfer_compat", *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=False, cwd=ROOT, env={**os.environ, **environ})


R1 = ["--num-experts", "256", "--top-k", "8", "--n-group", "8", "--topk-group", "4", "--routing", "deepseek_v3"]
R1 += ["--shared-experts", "1", "--shared-format", "nvfp4"]


@pytest.mark.parametrize(
    ("arguments", "strategy", "backend", "status"),
    [
        (["--flashinfer", "0.7.4", "--arch", "sm100", "--input", "logits"], "native", "trtllm", "eligible"),
        (["--flashinfer", "0.7.4", "--arch", "sm100", "--input", "topk"], "expanded", "trtllm", "eligible"),
        (["--flashinfer", "0.6.15.post1", "--arch", "sm100", "--input", "logits"], "split", "trtllm", "eligible"),
        (["--flashinfer", "0.7.4", "--arch", "sm90", "--input", "logits"], "native", "triton", "eligible"),
        (["--flashinfer", "0.7.4", "--arch", "sm75", "--input", "logits"], "split", "torch", "eligible"),
        pytest.param(
            ["--arch", "sm90", "--backend", "triton"],
            *("native", "triton", "eligible"),
            marks=pytest.mark.skipif(OLD_TRITON, reason="the installed Triton is refused"),
        ),
        (["--flashinfer", "0.7.4+cu130", "--arch", "10.0"], "native", "trtllm", "eligible"),
        (["--flashinfer", "0.7.4", "--arch", "sm100", "--strategy", "split"], "split", "trtllm", "eligible"),
        (
            ["--flashinfer", "0.7.4", "--arch", "sm100", "--ep-size", "8", "--shared-placement", "replicated"],
            "split",
            "trtllm",
            "eligible",
        ),
    ],
)
def test_plan_answers_in_json(arguments: list[str], strategy: str, backend: str, status: str) -> None:
    done = run("plan", *R1, *arguments, "--json")
    assert done.returncode == 0, done.stderr
    answer = json.loads(done.stdout)
    assert (answer["strategy"], answer["backend"], answer["status"]) == (strategy, backend, status)
    assert answer["rejected"]
    for one in answer["rejected"]:
        assert {"strategy", "backend", "code", "message"} <= one.keys()
        assert one["message"]


def test_plan_refuses_with_exit_code_1_and_the_reason() -> None:
    arguments = ["plan", *R1, "--flashinfer", "0.6.15.post1", "--arch", "sm100", "--strategy", "native"]
    done = run(*arguments)
    assert done.returncode == 1
    assert "num_fused_shared_experts" in done.stderr
    assert "0.6.17" in done.stderr
    answer = json.loads(run(*arguments, "--json").stdout)
    assert {"strategy": "native", "backend": "trtllm", "code": "keyword_missing"}.items() <= answer["rejected"][
        0
    ].items()


def test_fused_under_expert_parallelism_names_it() -> None:
    done = run("plan", *R1, "--flashinfer", "0.7.4", "--arch", "sm100", "--strategy", "native", "--ep-size", "8")
    assert done.returncode == 1
    assert "expert parallelism" in done.stderr


def test_what_must_be_said_under_expert_parallelism_comes_before_the_reasons() -> None:
    done = run("plan", *R1, "--flashinfer", "0.7.4", "--arch", "sm100", "--ep-size", "4")
    assert done.returncode == 1
    first, *reasons = done.stderr.splitlines()
    assert first.endswith("Set shared_placement to 'replicated' or 'sharded'. All reasons:")
    assert len(reasons) > 10


def test_the_gemm_of_a_shared_expert_beside_the_kernel_is_told() -> None:
    arguments = ["plan", *R1, "--flashinfer", "0.7.4", "--arch", "sm100", "--strategy"]
    assert "\ndense     mm_fp4 backend=cutlass\n" in run(*arguments, "split").stdout
    assert "mm_fp4" not in run(*arguments, "native").stdout


@pytest.mark.parametrize("option", ["--strategy", "--backend"])
def test_auto_is_among_the_names_that_an_error_lists(option: str) -> None:
    done = run("plan", option, "autoo")
    assert done.returncode == 2
    assert "expected one of auto, " in done.stderr
    assert "Did you mean 'auto'?" in done.stderr


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["plan", "--flashinfer", "0.7.3"], "0.7.2.post1"),
        (["plan", "--routing", "deepseekv3"], "deepseek_v3"),
        (["plan", "--arch", "sm1000"], "sm100"),
        (["plan", "--top-k", "999"], "top_k"),
        (["plan", "--strategy", "nativ"], "native"),
        (["plan", "--num-experts", "10", "--n-group", "4"], "n_group"),
    ],
)
def test_a_question_without_sense_is_exit_code_2_with_the_nearest_name(arguments: list[str], text: str) -> None:
    done = run(*arguments)
    assert done.returncode == 2
    assert text in done.stderr
    assert "Traceback" not in done.stderr


def test_doctor_prints_a_summary_first_and_fits_80_columns() -> None:
    done = run("doctor")
    assert done.stdout.startswith("NVFP4 MoE")
    assert all(len(line) <= 80 or " " not in line.strip() for line in done.stdout.splitlines())
    as_json = run("doctor", "--json")
    answer = json.loads(as_json.stdout)
    assert as_json.returncode == done.returncode == answer["exit_code"]
    assert answer["findings"] is not None


def test_usage_errors_are_json_where_json_was_asked_for() -> None:
    done = run("plan", "--num-experts", "many", "--json")
    assert done.returncode == 2
    assert "many" in json.loads(done.stdout)["error"]["message"]


def test_a_reader_that_leaves_does_not_change_the_exit_code(tmp_path: Path) -> None:
    (tmp_path / "flashinfer").mkdir()
    (tmp_path / "flashinfer" / "__init__.py").write_text("def (:\n")
    environ = {**os.environ, "PYTHONPATH": f"{tmp_path}{os.pathsep}{ROOT}"}
    command = [sys.executable, "-m", "flashinfer_compat", "doctor", "--json"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=environ, cwd=tmp_path)
    assert process.stdout is not None
    process.stdout.close()
    _, errors = process.communicate()
    assert process.returncode == 2
    assert errors == b""


def test_output_that_cannot_be_written_is_an_error_of_one_line() -> None:
    with Path("/dev/full").open("w") as full:
        command = [sys.executable, "-m", "flashinfer_compat", "plan", "--flashinfer", "0.7.4", "--arch", "sm100"]
        done = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, text=True, cwd=ROOT, check=False)
    assert done.returncode == 2
    assert done.stderr.count("\n") == 1


def test_plain_text_needs_no_rich(tmp_path: Path) -> None:
    (tmp_path / "rich.py").write_text("raise ImportError('rich is not installed')\n")
    done = run("plan", "--flashinfer", "0.7.4", "--arch", "sm100", PYTHONPATH=f"{tmp_path}{os.pathsep}{ROOT}")
    assert done.returncode == 0, done.stderr
    assert "\x1b" not in done.stdout


SAMPLES = ("grouped", "shared-bf16", "ungrouped-2-shared")


@pytest.fixture(scope="module", autouse=True)
def needs_torch() -> None:
    pytest.importorskip("torch")


def layer(checkpoints: Path, name: str, *more: str) -> subprocess.CompletedProcess[str]:
    folder = checkpoints / name
    return run("run-layer", str(folder), "--layer", "1", "--input", str(folder / "moe_io.safetensors"), *more)


@pytest.mark.parametrize("name", SAMPLES)
@pytest.mark.parametrize("numerics", ["w4a4", "w4a16"])
def test_run_layer_reproduces_the_samples(checkpoints: Path, name: str, numerics: str) -> None:
    done = layer(checkpoints, name, "--strategy", "split", "--numerics", numerics, "--json")
    assert done.returncode == 0, done.stderr
    answer = json.loads(done.stdout)
    assert answer["compared_with"] == f"output_{numerics}"
    assert answer["relative_error"] <= 5e-3


@pytest.mark.parametrize("strategy", ["native", "expanded"])
@pytest.mark.parametrize("name", ["grouped", "ungrouped-2-shared"])
def test_run_layer_fused_forms(checkpoints: Path, name: str, strategy: str) -> None:
    answer = json.loads(layer(checkpoints, name, "--strategy", strategy, "--json").stdout)
    assert answer["strategy"] == strategy
    assert answer["relative_error"] <= 5e-3


def test_run_layer_without_topk_routes_itself_and_writes_the_output(checkpoints: Path, tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    io = load_file(checkpoints / "grouped" / "moe_io.safetensors")
    given = tmp_path / "x.safetensors"
    save_file({"hidden_states": io["hidden_states"]}, given)
    for strategy, routed in (("auto", "logits"), ("expanded", "topk")):
        written = tmp_path / f"{strategy}.safetensors"
        arguments = ["--layer", "1", "--input", str(given), "--output", str(written), "--strategy", strategy, "--json"]
        done = run("run-layer", str(checkpoints / "grouped"), *arguments)
        assert done.returncode == 0, done.stderr
        answer = json.loads(done.stdout)
        assert (answer["routing_input"], answer["relative_error"]) == (routed, None)
        output = load_file(written)["output"].float()
        assert (output - io["output_w4a4"]).norm() / io["output_w4a4"].norm() <= 5e-3
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "auto.safetensors",
        "expanded.safetensors",
        "x.safetensors",
    ]


def test_run_layer_can_be_a_check(checkpoints: Path) -> None:
    assert layer(checkpoints, "grouped", "--tolerance", "5e-3").returncode == 0
    assert layer(checkpoints, "grouped", "--tolerance", "1e-5").returncode == 1


def test_run_layer_of_a_shared_expert_in_bf16_refuses_fused(checkpoints: Path) -> None:
    done = layer(checkpoints, "shared-bf16", "--strategy", "expanded")
    assert done.returncode == 1
    assert "bf16" in done.stderr


def test_run_layer_names_what_is_wrong(checkpoints: Path, tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    folder = checkpoints / "grouped"
    io = load_file(folder / "moe_io.safetensors")
    cases = {
        "no-input": ({}, "hidden_states"),
        "narrow": ({"hidden_states": io["hidden_states"][:, :128].contiguous()}, "hidden_states"),
        "half": ({"hidden_states": io["hidden_states"], "topk_ids": io["topk_ids"]}, "topk_weights"),
        "wide": ({**io, "topk_ids": io["topk_ids"] + 16}, "topk_ids"),
        "nan": ({**io, "output_w4a4": io["output_w4a4"] * float("nan")}, "output_w4a4"),
        "other": ({**io, "output_w4a4": io["output_w4a4"][:5].contiguous()}, "output_w4a4"),
    }
    for name, (tensors, text) in cases.items():
        path = tmp_path / f"{name}.safetensors"
        save_file({**tensors, "unused": io["topk_ids"][:1].clone()}, path)
        written = tmp_path / "written"
        done = run("run-layer", str(folder), "--layer", "1", "--input", str(path), "--output", str(written))
        assert done.returncode == 2, name
        assert text in done.stderr
        assert "Traceback" not in done.stderr
        assert not written.exists()
    save_file({"hidden_states": io["hidden_states"]}, tmp_path / "unrecorded.safetensors")
    truncated = tmp_path / "truncated.safetensors"
    truncated.write_bytes((folder / "moe_io.safetensors").read_bytes()[:-7])
    broken = tmp_path / "broken"
    shutil.copytree(folder, broken)
    (broken / "model.safetensors").unlink()
    given = [str(folder), "--layer", "1", "--input", str(folder / "moe_io.safetensors")]
    for arguments, text in (
        ([*given, "--device", "meta"], "--device"),
        ([*given, "--tolerance", "nan"], "--tolerance"),
        ([*given, "--tolerance", "-1"], "--tolerance"),
        ([*given[:-1], str(tmp_path / "unrecorded.safetensors"), "--tolerance", "1"], "output_w4a4"),
        ([*given, "--device", "cuda:99"], "device"),
        ([*given, "--output", str(tmp_path / "no" / "folder")], "no/folder"),
        ([*given, "--output", str(tmp_path)], "file name"),
        ([str(folder), "--layer", "1", "--input", str(truncated)], "truncated.safetensors"),
        ([str(folder), "--layer", "1", "--input", str(tmp_path / "none")], "no such file"),
        ([str(folder), "--layer", "0", "--input", str(folder / "moe_io.safetensors")], "dense"),
        ([str(folder), "--layer", "7", "--input", str(folder / "moe_io.safetensors")], "layer"),
        ([str(tmp_path / "nowhere"), "--layer", "1", "--input", str(folder / "moe_io.safetensors")], "nowhere"),
        ([str(broken), "--layer", "1", "--input", str(folder / "moe_io.safetensors")], "expected this tensor"),
    ):
        done = run("run-layer", *arguments)
        assert done.returncode == 2, arguments
        assert text in done.stderr
        assert "Traceback" not in done.stderr


@pytest.mark.parametrize("option", ["--arch", "--flashinfer"])
def test_an_empty_name_is_not_this_machine(option: str) -> None:
    done = run("plan", option, "")
    assert (done.returncode, done.stderr.startswith(f"error: {option}: expected a name, got an empty one.")) == (
        2,
        True,
    )
