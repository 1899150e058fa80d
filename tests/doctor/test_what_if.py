"""Machines that are not this one. Expectations are read in FlashInfer's sources, release by release."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from doctor_machines import B200, H200, build, delete, flashinfer, gpu, healthy, torch, variable
from test_examination import VALIDATOR

from flashinfer_compat.architectures import ARCHITECTURES
from flashinfer_compat.cli import main
from flashinfer_compat.doctor.examination import Examination, examine_asked
from flashinfer_compat.doctor.made_up import made_up_target
from flashinfer_compat.doctor.question import Asked, Premise, Source, question_of
from flashinfer_compat.environment import TorchBuild
from flashinfer_compat.features.target import Target
from flashinfer_compat.problem import DEEPSEEK_R1
from flashinfer_compat.report import capabilities_of
from flashinfer_compat.self_checks import CheckedKind, SelfCheck
from flashinfer_compat.signatures.recorded import releases
from flashinfer_compat.vocabulary import Backend, Evidence, Strategy

SNAPSHOT = Path(__file__).parent / "snapshots" / "what-if.txt"


def asked(flashinfer: str | None = None, arch: str | None = None, torch: str | None = None, cuda: str | None = None):
    return Asked(flashinfer, arch, torch, cuda)


def codes(examination: Examination) -> list[str]:
    return sorted({one.code for one in examination.findings} - {"known-issue"})


@pytest.mark.parametrize(
    ("question", "expected"),
    [
        # CUDA 12.8 is the first that makes code for SM100; FlashInfer compiles SM103 with its own name, from 12.9 on.
        (asked("0.7.4", "sm100", "2.9.0", "12.8"), ""),
        (asked("0.7.4", "sm100", "2.9.0", "12.6"), "nvcc-too-old torch-older-than-gpu"),
        (asked("0.7.4", "sm103", "2.9.0", "12.8"), "nvcc-too-old"),
        (asked("0.7.4", "sm103", "2.9.0", "12.9"), ""),
        # What torch was built with is no toolkit.
        (asked("0.7.4", "sm103", "2.9.0+cu128"), ""),
        (asked("0.7.4", "sm100", "2.7.1+cu126"), "torch-older-than-gpu"),
        (asked("0.7.4", "sm110", "2.9.0", "12.9"), "no-fp4-moe-kernel torch-older-than-gpu"),
        # GPUs and when trtllm-gen began to run on them.
        (asked("0.7.4", "sm90", "2.9.0"), "no-fp4-moe-kernel"),
        (asked("0.7.4", "sm120", "2.9.0"), "no-fp4-moe-kernel"),
        (asked("0.3.0", "sm103", "2.9.0"), "no-fp4-moe-kernel"),
        (asked("0.3.1", "sm103", "2.9.0"), "release-unusable"),
        (asked("0.6.15", "sm107", "2.9.0"), "no-fp4-moe-kernel"),
        (asked("0.6.16", "sm107", "2.9.0"), ""),
        # 0.4 and older take no layer of 256 experts from top-k, and 0.4 none from logits.
        (asked("0.4.1", "sm100", "2.9.0"), "release-unusable"),
        (asked("0.5.0", "sm100", "2.9.0"), ""),
        # import flashinfer on CPU builds of torch fails in 0.6.8 to 0.7.0, but not in 0.6.12 and 0.6.13.
        (asked("0.6.7", "none", "2.13.0+cpu"), "no-gpu"),
        (asked("0.6.8", "none", "2.13.0+cpu"), "import-needs-cuda no-gpu"),
        (asked("0.6.13", "none", "2.13.0+cpu"), "no-gpu"),
        (asked("0.7.0", "none", "2.13.0+cpu"), "import-needs-cuda no-gpu"),
        (asked("0.7.0", "none", "2.13.0+cu130"), "no-gpu"),
        (asked("0.7.1", "none", "2.13.0+cpu"), "no-gpu"),
        # torch itself.
        (asked("0.7.4", "sm100", "1.0"), "torch-too-old"),
        (asked("0.7.4", "sm100", "99"), "torch-untried"),
        (asked("0.7.4", "sm100", "none"), "torch-missing"),
        (asked("0.7.4", "sm100", "2.9.0+cpu"), "torch-without-cuda"),
        (asked("0.7.4", "sm100", "2.9.0", "none"), "torch-without-cuda"),
    ],
)
def test_release_gpu_torch_and_cuda_speak(tmp_path: Path, question: Asked, expected: str) -> None:
    anywhere = build(tmp_path / "m", torch("2.13.0+cpu", None)).collect()
    assert codes(examine_asked(question, anywhere)) == expected.split()


def test_known_issues_of_the_release_are_told(tmp_path: Path) -> None:
    anywhere = build(tmp_path / "m").collect()
    found = examine_asked(asked("0.6.17", "sm100", "2.9.0"), anywhere).findings
    # Without groups the keyword gives garbage in 0.6.17 and 0.6.18; kernels of tile 192 fail until 0.6.18.
    assert {one.subject for one in found} >= {"ungrouped-fused-shared", "per-token-tile-192"}
    found = examine_asked(asked("0.7.4", "sm100", "2.9.0"), anywhere).findings
    assert not {one.subject for one in found} & {"ungrouped-fused-shared", "per-token-tile-192"}


# Checks that look at files, variables, caches, engines or the driver must have nothing to say.
JUDGED = {
    *("import-needs-cuda", "known-issue", "no-fp4-moe-kernel", "no-gpu", "nvcc-too-old", "release-unusable"),
    *("torch-missing", "torch-older-than-gpu", "torch-too-old", "torch-untried", "torch-without-cuda"),
}


@pytest.mark.parametrize("release", releases()[::7])
def test_what_only_files_tell_stays_silent(tmp_path: Path, release: str) -> None:
    broken = build(
        tmp_path / "m", *healthy("0.6.12"), delete("tools/ninja"), delete("home"), variable("FLASHINFER_CUBIN_DRI", "x")
    ).collect()
    for architecture in (*ARCHITECTURES, "none"):
        examination = examine_asked(asked(release, architecture), broken)
        assert {one.code for one in examination.findings} <= JUDGED
        assert examination.environment.variables.value == ()
        assert examination.live is None


def test_the_capabilities_are_those_of_the_recorded_release(tmp_path: Path) -> None:
    examination = examine_asked(asked("0.7.4", "sm100", "2.9.0"), build(tmp_path / "m").collect())
    assert (
        examination.capabilities.to_dict() == capabilities_of(Target.from_release("0.7.4", "sm100", "2.9.0")).to_dict()
    )
    assert "native on trtllm from logits (eligible)" in examination.summary


def test_an_error_is_told_of_there_and_not_of_here(tmp_path: Path) -> None:
    examination = examine_asked(asked("0.7.4", "sm100", "2.9.0", "12.6"), build(tmp_path / "m").collect())
    assert examination.summary.startswith("NVFP4 MoE is not expected to work there until the 2 errors below")
    assert examination.exit_code == 2
    for one in examination.findings:
        assert one.repair or one.advice
        assert not one.advice.startswith("Or ") or one.repair


# What is not asked.
def test_the_rest_is_taken_from_this_machine(tmp_path: Path) -> None:
    server = build(tmp_path / "m", *healthy("0.6.17")).collect()
    question = examine_asked(asked(cuda="12.6"), server).question
    assert question is not None
    assert question.flashinfer == Premise("0.6.17", Source.THIS_MACHINE)
    assert question.architecture == Premise("sm100", Source.THIS_MACHINE)
    # Its local part, +cu130, would contradict the question.
    assert question.torch == Premise("2.13.0", Source.THIS_MACHINE)
    assert question.cuda == Premise("12.6", Source.ASKED)
    assert "torch-older-than-gpu" in codes(examine_asked(asked(cuda="12.6"), server))
    question = examine_asked(asked("0.7.4"), server).question
    assert question is not None
    assert question.torch == Premise("2.13.0+cu130", Source.THIS_MACHINE)
    assert question.cuda == Premise("13.0", Source.THIS_MACHINE)


def test_an_installed_flashinfer_is_asked_about_with_its_own_signatures(tmp_path: Path) -> None:
    nightly = build(tmp_path / "m", gpu(B200), flashinfer("0.6.17.dev20260801", "0.6.17"), torch()).collect()
    examination = examine_asked(asked(arch="sm103"), nightly)
    assert examination.capabilities.target.flashinfer is not None
    assert examination.capabilities.target.flashinfer.version == "0.6.17.dev20260801"
    assert examination.capabilities.target.architecture == "sm103"
    assert examination.capabilities.features["fused_shared_logits"].evidence is Evidence.ELIGIBLE
    assert {one.code for one in examination.findings} <= JUDGED


def test_what_this_machine_lacks_is_assumed(tmp_path: Path) -> None:
    question = examine_asked(asked(arch="sm100"), build(tmp_path / "m").collect()).question
    assert question is not None
    assert question.flashinfer == Premise("0.7.4", Source.ASSUMED)
    assert question.torch == question.cuda == Premise("any", Source.ASSUMED)


def test_a_cpu_build_of_torch_is_not_carried_to_a_gpu(tmp_path: Path) -> None:
    laptop = build(tmp_path / "m", torch("2.13.0+cpu", None)).collect()
    for architecture, expected in (("sm100", Premise("any", Source.ASSUMED)), ("none", None), (None, None)):
        question = examine_asked(asked("0.7.4", architecture), laptop).question
        assert question is not None
        assert question.torch == (expected or Premise("2.13.0+cpu", Source.THIS_MACHINE))


def test_self_checks_of_this_machine_prove_nothing_about_another() -> None:
    kind = CheckedKind.of(DEEPSEEK_R1, Strategy.SPLIT, Backend.TORCH)
    check = SelfCheck(kind, Evidence.VERIFIED, 1e-3, 1e-2, 5.0, "")
    here = replace(Target.from_release("0.7.4", "sm100"), self_checks=(check,))
    question = question_of(asked(arch="sm103"), here, TorchBuild("2.9.0+cu129", "12.9", None, None))
    assert made_up_target(question, here).self_checks == ()


# The report.
@pytest.mark.parametrize(
    "question",
    [
        *(asked("0.7.4", "sm100", "2.9.0", "12.6"), asked(arch="none"), asked(torch="none"), asked(cuda="none")),
        *(asked("0.2.9"), asked(torch="2.9.0+cu129"), asked("0.7.0", "none", "2.13.0+cpu")),
    ],
)
def test_every_report_follows_the_schema(tmp_path: Path, question: Asked) -> None:
    for name, steps in (("bare", ()), ("h200", (gpu(H200), flashinfer("0.6.17"), torch()))):
        examination = examine_asked(question, build(tmp_path / name, *steps).collect())
        report = json.loads(json.dumps(examination.to_dict()))
        VALIDATOR.validate(report)
        assert set(report["question"]) == {"flashinfer", "architecture", "torch", "cuda"}


def test_a_real_examination_has_no_question(tmp_path: Path) -> None:
    assert build(tmp_path / "m", *healthy()).examine().to_dict()["question"] is None


EVERYTHING = ["doctor", "--flashinfer", "0.6.17", "--arch", "sm103", "--torch", "2.9.0", "--cuda", "12.8"]


def test_the_output_is_as_recorded(capsys: pytest.CaptureFixture[str]) -> None:
    """To renew the snapshot, delete it and run this test twice."""
    assert main(EVERYTHING) == 2
    head, title, table = capsys.readouterr().out.partition("Features of FlashInfer\n")
    text = head + title + "".join(table.splitlines(keepends=True)[:3])
    if not SNAPSHOT.exists():
        SNAPSHOT.write_text(text, "utf-8")
        pytest.fail(f"{SNAPSHOT} was not there and has been written")
    assert text == SNAPSHOT.read_text("utf-8")


def test_the_first_line_says_that_it_is_a_question(capsys: pytest.CaptureFixture[str]) -> None:
    main(["doctor", "--flashinfer", "0.7.4", "--arch", "sm100"])
    text = capsys.readouterr().out
    first = text.splitlines()[0]
    assert first.startswith("What if (not this machine): FlashInfer 0.7.4, sm100, ")
    assert "Not known, so not judged: files" in text
    assert "\nEnvironment\n" not in text
    assert all(len(line) <= 80 for line in text.splitlines())


def test_json_says_the_same(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*EVERYTHING, "--json"]) == 2
    report = json.loads(capsys.readouterr().out)
    VALIDATOR.validate(report)
    assert report["question"]["cuda"] == {"value": "12.8", "source": "asked"}
    assert [one["code"] for one in report["findings"] if one["severity"] == "error"] == ["nvcc-too-old"]
    assert report["capabilities"]["target"]["architecture"] == "sm103"


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["--flashinfer", "0.7.3"], "0.7.2.post1"),
        (["--flashinfer", "newest"], "flashinfer version"),
        (["--arch", "sm1000"], "'sm100'"),
        (["--torch", "new"], "2.9.0"),
        (["--cuda", "130"], "12.8"),
        (["--torch", "2.9.0+cu129", "--cuda", "13.0"], "12.9"),
        (["--torch", "2.9.0+cpu", "--cuda", "13.0"], "none"),
        (["--arch", "sm101"], "'sm110'"),
        (["--arch", "sm100", "--live"], "--live"),
        (["--arch", "sm100", "--check-files", "sizes"], "--check-files"),
        (["--compare", "0.7.2", "0.7.4", "--check-files", "moe"], "--check-files"),
        (["--live-limit", "3"], "--live-limit"),
    ],
)
def test_a_question_without_sense_is_exit_code_2(
    arguments: list[str], text: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["doctor", *arguments]) == 2
    printed = capsys.readouterr()
    assert text in printed.err
    assert printed.out == ""


def test_versions_that_say_the_same_do_not_contradict(tmp_path: Path) -> None:
    question = examine_asked(asked("0.7.4", "sm100", "2.9.0+cu129", "12.9.1"), build(tmp_path / "m").collect()).question
    assert question is not None
    assert question.cuda == Premise("12.9.1", Source.ASKED)
