from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from fakes import install, install_flashinfer, install_torch

import flashinfer_compat as fc
from flashinfer_compat.environment import Environment, FileCheck, Gpu, Gpus, Section, Tool, Toolchain, collect
from flashinfer_compat.features.target import Target
from flashinfer_compat.machine import architecture_of, read_flashinfer, target_of
from flashinfer_compat.problem import DEEPSEEK_R1

B200 = Gpu(0, "NVIDIA B200", (10, 0), "GPU-b2", 192 << 30)
H200 = Gpu(1, "NVIDIA H200", (9, 0), "GPU-c3", 144 << 30)


def facts(site: Path, *gpus: Gpu, visible: str | None = None) -> Environment:
    found = collect([str(site)], {"HOME": str(site)}, FileCheck.NONE)
    return replace(found, gpus=Section(Gpus("580.1", "13.0", gpus, visible)))


def target(site: Path, *gpus: Gpu) -> Target:
    environment = facts(site, *gpus)
    return target_of(environment, read_flashinfer(environment))


@pytest.mark.parametrize("version", ["0.5.3", "0.6.15.post1", "0.6.17", "0.7.4"])
def test_an_installed_release_plans_like_the_recorded_one(tmp_path: Path, version: str) -> None:
    install_flashinfer(tmp_path, version)
    install_torch(tmp_path)
    found = target(tmp_path, B200)
    assert found.flashinfer is not None
    assert (found.flashinfer.version, str(found.flashinfer.behaviour), found.architecture) == (
        version,
        version,
        "sm100",
    )
    for routing_input in ("logits", "topk"):
        problem = replace(DEEPSEEK_R1, routing_input=routing_input)
        here, there = fc.plan(problem, found), fc.plan(problem, Target.from_release(version, "sm100"))
        assert (here.strategy, here.backend, here.call) == (there.strategy, there.backend, there.call)


def test_a_local_version_part_is_kept_and_ignored(tmp_path: Path) -> None:
    install_flashinfer(tmp_path, "0.7.4+cu130", like="0.7.4")
    found = target(tmp_path, B200).flashinfer
    assert found is not None
    assert (found.version, str(found.behaviour)) == ("0.7.4+cu130", "0.7.4")


def test_a_nightly_newer_than_its_number_is_judged_by_its_signature(tmp_path: Path) -> None:
    """The keyword is there although 0.6.16 has none; the rules are those of the version."""
    install_flashinfer(tmp_path, "0.6.16.dev20260601", like="0.6.17")
    install_torch(tmp_path)
    assert fc.plan(DEEPSEEK_R1, target(tmp_path, B200)).strategy is fc.Strategy.NATIVE


def test_a_source_checkout_is_recognised_by_its_signatures(tmp_path: Path) -> None:
    install_flashinfer(tmp_path, "0.0.0+unknown", like="0.7.4")
    install_torch(tmp_path)
    found = target(tmp_path, B200)
    assert found.flashinfer is not None
    assert "0.7" in str(found.flashinfer.behaviour)
    assert fc.plan(DEEPSEEK_R1, found).strategy is fc.Strategy.NATIVE


def test_no_flashinfer_means_torch(tmp_path: Path) -> None:
    install_torch(tmp_path)
    found = target(tmp_path, B200)
    assert found.flashinfer is None
    assert fc.plan(DEEPSEEK_R1, found).backend is fc.Backend.TORCH


def test_a_folder_named_flashinfer_is_not_flashinfer(tmp_path: Path) -> None:
    (tmp_path / "flashinfer" / "csrc").mkdir(parents=True)
    found = target(tmp_path, B200)
    assert found.flashinfer is None
    assert "__init__.py" in found.flashinfer_problem


def test_nothing_at_all_is_an_error_with_a_way_out(tmp_path: Path) -> None:
    with pytest.raises(fc.StrategyUnavailableError, match="pip install torch"):
        fc.plan(DEEPSEEK_R1, target(tmp_path, B200))


@pytest.mark.parametrize(
    ("visible", "expected"),
    [(None, "sm100"), ("0", "sm100"), ("1,0", "sm90"), ("GPU-c3", "sm90"), ("", None), ("-1", None), ("7", None)],
)
def test_cuda_visible_devices_chooses_the_gpu(tmp_path: Path, visible: str | None, expected: str | None) -> None:
    assert architecture_of(facts(tmp_path, B200, H200, visible=visible)) == expected


def test_libraries_decide_the_cutile_feature(tmp_path: Path) -> None:
    install_flashinfer(tmp_path, "0.7.4")
    install_torch(tmp_path)
    from flashinfer_compat.report import capabilities_of

    assert capabilities_of(target(tmp_path, H200)).features["cutile_nvfp4_bf16"].evidence is fc.Evidence.PRESENT
    install(tmp_path, "cuda-tile", "1.7.0")
    assert capabilities_of(target(tmp_path, H200)).features["cutile_nvfp4_bf16"].evidence is fc.Evidence.PRESENT
    install(tmp_path, "nvidia-cuda-tileiras", "13.4.92")
    assert capabilities_of(target(tmp_path, H200)).features["cutile_nvfp4_bf16"].evidence is fc.Evidence.ELIGIBLE


def test_a_toolkit_has_the_compiler_of_cutile_beside_nvcc(tmp_path: Path) -> None:
    found = facts(tmp_path, H200)
    nvcc = tmp_path / "cuda" / "bin" / "nvcc"
    nvcc.parent.mkdir(parents=True)
    nvcc.touch()
    tools = Toolchain(Section(Tool(str(nvcc), None, "", "")), Section(reason="not looked for"))
    found = replace(found, toolchain=Section(tools))
    assert "nvidia-cuda-tileiras" not in target_of(found, None).libraries
    nvcc.with_name("tileiras").touch()
    assert "nvidia-cuda-tileiras" in target_of(found, None).libraries


def test_the_whole_of_it_in_a_process_of_its_own(tmp_path: Path) -> None:
    """An install whose flashinfer and torch cannot be imported is still described."""
    install_flashinfer(tmp_path, "0.7.0")
    install_torch(tmp_path)
    code = (
        "import flashinfer_compat as fc; print(fc.this_machine().flashinfer.version, fc.this_machine().torch_version)"
    )
    root = str(Path(__file__).parents[1])
    import os

    environ = {**os.environ, "PYTHONPATH": f"{tmp_path}{os.pathsep}{root}"}
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environ, check=True)
    assert run.stdout.split() == ["0.7.0", "2.13.0+cu130"]
