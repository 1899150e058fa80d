"""What self-checks found is kept, read again, and forgotten when anything it depends on changes."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from fakes import install, install_flashinfer, install_torch

from flashinfer_compat import verified
from flashinfer_compat.environment import Environment, FileCheck, collect
from flashinfer_compat.environment.model import Gpu, Gpus, Section
from flashinfer_compat.self_checks import CheckedKind, SelfCheck
from flashinfer_compat.vocabulary import Evidence

KIND = CheckedKind(
    "trtllm", "native", "logits", "deepseek_v3", True, "nvfp4", False, "swiglu", "w4a4", "checkpoint", False
)
CHECKS = (
    SelfCheck(KIND, Evidence.VERIFIED, 1.5e-3, 1e-2, 42.0, ""),
    SelfCheck(replace(KIND, strategy="split"), Evidence.REFUTED, None, 3e-2, None, "it raised RuntimeError: no kernel"),
)


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("FLASHINFER_COMPAT_CACHE_DIR", str(tmp_path / "cache"))
    site = tmp_path / "site"
    install_flashinfer(site, "0.7.4")
    install_torch(site)
    install(site, "flashinfer-cubin", "0.7.4")
    return site


def look(site: Path, **changes: object) -> Environment:
    found = collect(search_path=[str(site)], check_files=FileCheck.NONE)
    gpu = Gpu(0, "NVIDIA B200", (10, 0), "GPU-1", 2**37)
    values = {"driver_version": "580.95", "driver_cuda_version": "13.0", "devices": (gpu,), "visible": None}
    return replace(found, gpus=Section(Gpus(**{**values, **changes})))


def test_they_are_read_as_they_were_kept(site: Path) -> None:
    assert verified.load(look(site)) == ()
    path = verified.store(look(site), CHECKS)
    assert path is not None
    assert verified.load(look(site)) == CHECKS
    assert [one.name for one in path.parent.iterdir()] == [path.name]


def touch_flashinfer(site: Path) -> Environment:
    path = site / "flashinfer" / "fused_moe" / "core.py"
    path.write_text(path.read_text() + "\n")
    return look(site)


def other_cubins(site: Path) -> Environment:
    for path in (site / "flashinfer_cubin-0.7.4.dist-info").iterdir():
        path.unlink()
    install(site, "flashinfer-cubin", "0.7.4.post1")
    return look(site)


def other_torch(site: Path) -> Environment:
    version = site / "torch" / "version.py"
    version.write_text(version.read_text().replace("git_version = 'x'", "git_version = 'y'"))
    return look(site)


def another_gpu(site: Path) -> Environment:
    return look(site, devices=(Gpu(0, "NVIDIA B300", (10, 3), "GPU-1", 2**38),))


@pytest.mark.parametrize(
    "change",
    [
        touch_flashinfer,
        other_cubins,
        other_torch,
        another_gpu,
        lambda site: look(site, driver_version="590.10"),
        lambda site: look(site, visible="1"),
    ],
)
def test_they_hold_for_exactly_this_machine(site: Path, change: Callable[[Path], Environment]) -> None:
    verified.store(look(site), CHECKS)
    changed = change(site)
    assert verified.load(changed) == ()
    # What is found for the changed machine stands beside what was found before.
    verified.store(changed, CHECKS[:1])
    assert verified.load(changed) == CHECKS[:1]


def test_a_variable_that_changes_results_counts_and_another_does_not(
    site: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    verified.store(look(site), CHECKS)
    monkeypatch.setenv("EDITOR", "ed")
    assert verified.load(look(site)) == CHECKS
    for name in ("FLASHINFER_NVFP4_4OVER6", "TRITON_INTERPRET"):
        monkeypatch.setenv(name, "1")
        assert verified.load(look(site)) == ()
        monkeypatch.delenv(name)


@pytest.mark.parametrize("damage", ["", "{", "[]", "{}", '{"facts": 1, "checks": []}'])
def test_a_damaged_file_is_as_none(site: Path, damage: str) -> None:
    path = verified.store(look(site), CHECKS)
    assert path is not None
    path.write_text(damage)
    assert verified.load(look(site)) == ()


def test_a_check_of_another_form_is_as_none(site: Path) -> None:
    path = verified.store(look(site), CHECKS)
    assert path is not None
    path.write_text(path.read_text().replace('"verified"', '"certain"'))
    assert verified.load(look(site)) == ()


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
def test_a_folder_that_cannot_be_written_is_told(site: Path, tmp_path: Path) -> None:
    (tmp_path / "cache").mkdir()
    (tmp_path / "cache").chmod(0o500)
    with pytest.raises(OSError, match="Permission"):
        verified.store(look(site), CHECKS)


def test_a_file_in_the_folders_place_is_told(site: Path, tmp_path: Path) -> None:
    (tmp_path / "cache").write_text("")
    with pytest.raises(OSError, match="cache"):
        verified.store(look(site), CHECKS)
    assert verified.load(look(site)) == ()


def test_a_pipe_in_its_place_is_as_none(site: Path) -> None:
    path = verified.store(look(site), CHECKS)
    assert path is not None
    path.unlink()
    os.mkfifo(path)
    assert verified.load(look(site)) == ()
