from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from fakes import install, install_flashinfer, install_torch

from flashinfer_compat.doctor.examination import Examination, examine_environment
from flashinfer_compat.environment import FileCheck, Gpu, Gpus, Section, collect

B200 = Gpu(0, "NVIDIA B200", (10, 0), None, None)
H200 = Gpu(0, "NVIDIA H200", (9, 0), None, None)
A100 = Gpu(0, "NVIDIA A100", (8, 0), None, None)


def examine(site: Path, gpu: Gpu | None, *more: Path) -> Examination:
    environment = collect([str(site), *map(str, more)], {"HOME": str(site)}, FileCheck.SIZES)
    found = Section(Gpus("580", "13.0", (gpu,), None)) if gpu else Section(None, "no NVIDIA driver library")
    return examine_environment(replace(environment, gpus=found))


def healthy(site: Path, version: str = "0.7.4") -> None:
    install_flashinfer(site, version)
    install_torch(site)


def codes(examination: Examination) -> list[str]:
    return [finding.code for finding in examination.findings]


def test_a_healthy_blackwell_machine_is_clean(tmp_path: Path) -> None:
    healthy(tmp_path)
    examination = examine(tmp_path, B200)
    assert codes(examination) == ["known-issue-routed-batch-dependent"]
    assert examination.exit_code == 0
    assert "native on trtllm from logits (eligible)" in examination.summary
    assert "expanded on trtllm from topk (eligible)" in examination.summary
    json.dumps(examination.to_dict())


def test_a_machine_without_a_gpu_is_no_problem(tmp_path: Path) -> None:
    install_torch(tmp_path, "2.13.0+cpu", None)
    examination = examine(tmp_path, None)
    assert codes(examination) == ["flashinfer-missing"]
    assert examination.exit_code == 0
    assert "split on torch" in examination.summary


def shadow(site: Path) -> None:
    healthy(site / "lower")
    (site / "flashinfer").mkdir()
    (site / "flashinfer" / "__init__.py").write_text("")


def twice(site: Path) -> None:
    healthy(site)
    install_flashinfer(site / "lower", "0.6.17")


def tampered(site: Path) -> None:
    healthy(site)
    (site / "flashinfer" / "fused_moe" / "core.py").write_text("# gone\n")


def newer(site: Path) -> None:
    install_flashinfer(site, "9.0.0", like="0.7.4", extra={"flashinfer/tllm_enums.py": "class SfLayout: pass\n"})
    install_torch(site)


def cpu_torch_with_cutlass(site: Path) -> None:
    install_flashinfer(site, "0.7.0")
    install_torch(site, "2.13.0+cpu", None)
    install(site, "nvidia-cutlass-dsl", "4.6.2")


def cuda_torch_with_cutlass(site: Path) -> None:
    healthy(site, "0.7.0")
    install(site, "nvidia-cutlass-dsl", "4.6.2")


def metadata_only(site: Path) -> None:
    install_torch(site)
    install(site, "flashinfer-python", "0.7.4")


def metadata_of_another(site: Path) -> None:
    healthy(site)
    (site / "flashinfer" / "_build_meta.py").write_text('__version__ = "0.7.4"\n')
    (site / "flashinfer_python-0.7.4.dist-info").rename(site / "flashinfer_python-0.6.10.dist-info")
    metadata = site / "flashinfer_python-0.6.10.dist-info" / "METADATA"
    metadata.write_text("Metadata-Version: 2.1\nName: flashinfer-python\nVersion: 0.6.10\n")
    (site / "flashinfer_python-0.6.10.dist-info" / "RECORD").unlink()


def no_python(site: Path) -> None:
    install_torch(site)
    (site / "flashinfer").mkdir()
    (site / "flashinfer" / "__init__.py").write_text("def (:\n")


@pytest.mark.parametrize(
    ("build", "gpu", "expected", "exit_code"),
    [
        (lambda site: None, B200, ["torch-missing", "flashinfer-missing"], 2),
        (install_torch, B200, ["flashinfer-missing"], 1),
        (install_torch, H200, ["flashinfer-missing"], 1),
        (lambda site: install_flashinfer(site, "0.7.4"), B200, ["torch-missing"], 2),
        (healthy, H200, ["no-fp4-moe-kernel"], 1),
        (healthy, A100, ["no-fp4-moe-kernel"], 1),
        (lambda site: healthy(site, "0.6.1"), B200, ["known-issue-negative-bias-misroutes"], 0),
        (lambda site: healthy(site, "0.6.8"), B200, [], 0),
        (shadow, B200, ["package-shadowed", "release-unknown"], 2),
        (twice, B200, ["installed-twice"], 1),
        (tampered, B200, ["files-changed"], 2),
        (metadata_only, B200, ["package-missing", "flashinfer-missing"], 2),
        (metadata_of_another, B200, ["version-conflict"], 2),
        (no_python, B200, ["package-unreadable"], 2),
        (newer, B200, ["release-unknown"], 1),
        (cpu_torch_with_cutlass, B200, ["import-needs-cuda"], 2),
        (cuda_torch_with_cutlass, B200, [], 0),
    ],
)
def test_each_broken_machine_gets_its_finding(
    tmp_path: Path, build: Callable[[Path], object], gpu: Gpu, expected: list[str], exit_code: int
) -> None:
    (tmp_path / "lower").mkdir()
    build(tmp_path)
    examination = examine(tmp_path, gpu, tmp_path / "lower")
    found = [code for code in codes(examination) if code in expected or not code.startswith("known-issue")]
    assert found == expected
    assert examination.exit_code == exit_code
    for finding in examination.findings:
        assert finding.message.endswith(".")
