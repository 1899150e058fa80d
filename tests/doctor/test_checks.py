"""Every check, on machines that have the fault and on machines that almost have it."""

from __future__ import annotations

import os
import re
from dataclasses import replace
from pathlib import Path

import pytest
from doctor_cases import CASES, Case
from doctor_machines import B200, H200, build, delete, distribution, flashinfer, gpu, healthy, torch, write
from fakes import install_flashinfer
from packaging.version import Version

from flashinfer_compat.doctor.checks import CHECKS, torch_and_cuda
from flashinfer_compat.doctor.examination import Examination, examine, examine_environment
from flashinfer_compat.doctor.finding import Finding, Group, Severity
from flashinfer_compat.environment import CachePurpose, FileCheck, Section, collect
from flashinfer_compat.problem import DEEPSEEK_R1
from flashinfer_compat.self_checks import CheckedKind, SelfCheck
from flashinfer_compat.signatures.recorded import releases
from flashinfer_compat.vocabulary import Backend, Evidence, Strategy

ROOT = Path(__file__).parents[2]
# Some are about machines that folders cannot make; they are tested below.
ELSEWHERE = {"cache-on-network", "strategy-refuted"}


def codes(examination: Examination) -> list[str]:
    return [finding.code for finding in examination.findings]


@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case.about}: {case.title}")
def test_a_machine_gets_exactly_its_findings(tmp_path: Path, case: Case) -> None:
    examination = build(tmp_path / "machine", *case.steps).examine()
    found = [code for code in codes(examination) if code != "known-issue" or "known-issue" in case.expected]
    assert sorted(set(found)) == sorted(case.expected)


def test_there_are_enough_cases() -> None:
    assert len(CASES) >= 40
    assert len({(case.about, case.title) for case in CASES}) == len(CASES)


@pytest.mark.parametrize("code", sorted({check.code for check in CHECKS} - ELSEWHERE))
def test_every_code_has_a_case_that_triggers_it_and_one_that_almost_does(code: str) -> None:
    about = [case for case in CASES if case.about == code]
    assert any(code in case.expected for case in about)
    assert any(code not in case.expected for case in about)


def test_checks_are_declared_once_and_in_groups() -> None:
    names = [check.code for check in CHECKS]
    assert len(set(names)) == len(names)
    assert {check.group for check in CHECKS} == set(Group)
    for check in CHECKS:
        assert re.fullmatch(r"[a-z0-9-]+", check.code)
        assert check.why.endswith(".")


def test_findings_can_be_read_and_pasted(tmp_path: Path) -> None:
    for number, case in enumerate(CASES):
        for finding in build(tmp_path / str(number), *case.steps).examine().findings:
            assert finding.message.endswith(".")
            assert finding.message[0] == finding.message[0].upper() or finding.message.split()[0] in finding.message
            assert "\n" not in finding.message + finding.repair + finding.advice
            assert finding.repair == finding.repair.strip()
            assert finding.advice == "" or finding.advice[0].isupper()
            if finding.severity is Severity.ERROR:
                assert finding.repair or finding.advice, finding


def on_a_network(tmp_path: Path, *, is_network: bool) -> Examination:
    environment = build(tmp_path, healthy()).collect()
    caches = tuple(
        replace(one, is_network=is_network, filesystem="nfs4") if one.purpose is CachePurpose.FLASHINFER else one
        for one in environment.caches.value or ()
    )
    return examine_environment(replace(environment, caches=Section(caches)))


def checked(tmp_path: Path, verdict: Evidence) -> Examination:
    kind = CheckedKind.of(DEEPSEEK_R1, Strategy.NATIVE, Backend.TRTLLM)
    problem = "relative error 1.00e-01 with 130 tokens" if verdict is Evidence.REFUTED else ""
    check = SelfCheck(kind, verdict, 0.1, 0.01, 10.0, problem)
    return examine_environment(build(tmp_path, healthy()).collect(), None, (check,))


def test_what_a_self_check_refuted_is_told(tmp_path: Path) -> None:
    examination = checked(tmp_path / "a", Evidence.REFUTED)
    (finding,) = [one for one in examination.findings if one.code == "strategy-refuted"]
    assert finding.severity is Severity.WARNING
    assert "relative error 1.00e-01" in finding.message
    assert "native" not in examination.summary
    assert "native on trtllm from logits (verified)" in checked(tmp_path / "b", Evidence.VERIFIED).summary
    assert "strategy-refuted" not in codes(checked(tmp_path / "c", Evidence.VERIFIED))


def test_a_workspace_on_a_network_is_noted(tmp_path: Path) -> None:
    assert "cache-on-network" in codes(on_a_network(tmp_path / "a", is_network=True))
    assert "cache-on-network" not in codes(on_a_network(tmp_path / "b", is_network=False))


@pytest.mark.parametrize("release", [one for one in releases() if "rc" not in one][::-4])
def test_no_release_gives_a_false_alarm_on_a_sound_machine(tmp_path: Path, release: str) -> None:
    blackwell = build(tmp_path / "b200", healthy(release)).examine()
    alarms = {finding.code for finding in blackwell.findings if finding.severity is not Severity.NOTE}
    # Before 0.5.0 the launchers take no layer of DeepSeek-R1's sizes.
    assert alarms <= ({"release-unusable"} if Version(release) < Version("0.5.0") else set())
    hopper = build(tmp_path / "h200", gpu(H200), flashinfer(release), torch()).examine()
    assert {one.code for one in hopper.findings if one.severity is not Severity.NOTE} <= {"no-fp4-moe-kernel"}
    laptop = build(tmp_path / "laptop", flashinfer(release), torch("2.13.0", None)).examine()
    assert all(finding.severity is Severity.NOTE for finding in laptop.findings)


def of(examination: Examination, code: str) -> list[Finding]:
    return [finding for finding in examination.findings if finding.code == code]


def test_what_one_cause_left_out_is_one_finding(tmp_path: Path) -> None:
    requires = ("apache-tvm-ffi>=0.1.11", "cuda-tile>=1.4", "nvidia-cudnn-frontend>=1.32", "nvidia-cutlass-dsl>=4.8")
    machine = build(
        tmp_path, gpu(B200), flashinfer("0.7.4", requires=requires), torch(), distribution("nvidia-cutlass-dsl", "4.4")
    )
    error, warning = of(machine.examine(), "requirement-unmet")
    assert (error.severity, error.subject) == (Severity.ERROR, "apache-tvm-ffi")
    assert error.message == "flashinfer-python 0.7.4 requires apache-tvm-ffi>=0.1.11 (not installed)."
    assert warning.message == (
        "flashinfer-python 0.7.4 requires cuda-tile>=1.4 (not installed), nvidia-cudnn-frontend>=1.32 (not installed), "
        "nvidia-cutlass-dsl>=4.8 (4.4 is installed)."
    )
    assert warning.repair == "pip install 'cuda-tile>=1.4' 'nvidia-cudnn-frontend>=1.32' 'nvidia-cutlass-dsl>=4.8'"


def test_no_finding_prints_none_of_metadata_without_a_version(tmp_path: Path) -> None:
    folder = "site/flashinfer_python-0.7.4.dist-info"
    machine = build(tmp_path, *healthy(), delete(f"{folder}/RECORD"), delete(f"{folder}/METADATA"))
    assert [one.code for one in machine.examine().findings if one.severity is not Severity.NOTE] == ["metadata-broken"]
    assert not of(machine.examine(), "record-missing")
    for finding in machine.examine().findings:
        assert "None" not in finding.message + finding.repair + finding.advice


def test_a_file_in_the_way_of_the_package_is_named(tmp_path: Path) -> None:
    machine = build(tmp_path, *healthy(), write("before/flashinfer.py"))
    environment = collect([str(tmp_path / "before"), str(machine.site)], machine.environ, FileCheck.NONE)
    (shadowed,) = of(examine_environment(environment), "package-shadowed")
    assert f"import flashinfer loads {tmp_path}/before/flashinfer.py, which is not" in shadowed.message
    assert shadowed.advice == "Remove or rename that file, or take its folder off PYTHONPATH."
    # Which release such a file is of is no question.
    assert not of(examine_environment(environment), "release-unknown")


def test_the_torch_releases_that_checks_name_are_those_required_and_tried() -> None:
    assert f"torch>={torch_and_cuda._LEAST}\n" in (ROOT / "setup.cfg").read_text("utf-8")
    assert f"torch=={torch_and_cuda._TRIED}." in (ROOT / "scripts" / "test.sh").read_text("utf-8")


def test_a_policy_file_that_cannot_be_used_is_told_and_stops_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FLASHINFER_COMPAT_POLICY", str(tmp_path / "absent.json"))
    (finding,) = of(examine(FileCheck.NONE), "policy-unusable")
    assert finding.severity is Severity.ERROR
    assert finding.message.startswith(f"FLASHINFER_COMPAT_POLICY={tmp_path}/absent.json: expected a policy file")
    assert finding.repair == "unset FLASHINFER_COMPAT_POLICY"
    assert examine(FileCheck.NONE).summary.startswith("NVFP4 MoE is not expected to work here until")
    (tmp_path / "absent.json").write_text("[]")
    assert of(examine(FileCheck.NONE), "policy-unusable")
    monkeypatch.delenv("FLASHINFER_COMPAT_POLICY")
    assert not of(examine(FileCheck.NONE), "policy-unusable")


def test_of_two_installed_releases_only_one_finding_has_a_repair(tmp_path: Path) -> None:
    machine = build(tmp_path, *healthy(), delete("site/flashinfer/artifacts.py"))
    install_flashinfer(machine.lower, "0.6.17")
    found = machine.examine()
    (twice,) = of(found, "installed-twice")
    assert twice.repair.startswith("pip uninstall -y flashinfer-python && pip uninstall")
    (changed,) = of(found, "files-changed")
    assert (changed.repair, changed.advice) == ("", "First do what installed-twice says.")
    machine.environ["PYTHONPATH"] = str(machine.lower)
    (twice,) = of(machine.examine(), "installed-twice")
    assert (twice.repair, twice.advice) == ("", f"Take {machine.lower} off PYTHONPATH, where pip removes nothing.")


def test_a_folder_that_nobody_installed_goes_before_pip_can_help(tmp_path: Path) -> None:
    machine = build(tmp_path, gpu(B200), torch(), write("site/flashinfer/__init__.py"))
    (unknown,) = of(machine.examine(), "release-unknown")
    assert unknown.repair == ""
    assert unknown.message.startswith(f"{machine.site}/flashinfer was not installed: version")
    assert unknown.advice.startswith("Remove or rename that folder, or take its parent off PYTHONPATH; then run: pip")


def test_a_pipe_in_place_of_a_source_file_is_unreadable(tmp_path: Path) -> None:
    machine = build(tmp_path, *healthy(), delete("site/flashinfer/fused_moe/core.py"))
    os.mkfifo(machine.site / "flashinfer" / "fused_moe" / "core.py")
    (unreadable,) = of(machine.examine(), "package-unreadable")
    assert "core.py is no regular file" in unreadable.message


def test_a_feature_that_files_are_missing_for_is_not_denied_to_the_release(tmp_path: Path) -> None:
    machine = build(tmp_path, *healthy(), write("site/flashinfer/fused_moe/core.py", "import torch\n"))
    (reason,) = machine.examine().capabilities.features["fp4_moe_logits"].reasons
    assert reason.message == "This install of FlashInfer 0.7.4 has no trtllm_fp4_block_scale_moe."
    assert reason.way_out == "The release has it; reinstall FlashInfer."
    # What the release itself lacks is said of it.
    old = build(tmp_path / "old", *healthy("0.5.0")).examine().capabilities.features["fused_shared_logits"]
    assert "of FlashInfer 0.5.0 takes no" in old.reasons[0].message
    assert "install" not in old.reasons[0].message


def test_requirements_that_fp4_moe_does_not_need_are_named_too(tmp_path: Path) -> None:
    requires = ("cuda-python>=12", "einops", "nccl4py>=0.4.1")
    machine = build(tmp_path, gpu(B200), flashinfer("0.7.4", requires=requires), torch())
    for folder in ("einops-0.8.2.dist-info", "nccl4py-0.4.0.dist-info"):
        (machine.site / folder).mkdir()
    (unmet,) = of(machine.examine(), "requirement-unmet")
    assert unmet.message == (
        "flashinfer-python 0.7.4 requires cuda-python>=12 (not installed), nccl4py>=0.4.1 (0.4.0 is installed)."
    )
