"""Ctrl-C ends a command in one line, with the exit code of shells, and leaves no process behind."""

from __future__ import annotations

from pathlib import Path

import pytest
from processes import interrupted, started, wait_for


def test_verify(tmp_path: Path) -> None:
    pytest.importorskip("torch")
    with started("verify", "--device", "cpu", FLASHINFER_COMPAT_CACHE_DIR=str(tmp_path)) as process:
        assert process.stdout is not None
        assert process.stdout.readline().startswith("verified ")
        assert interrupted(process) == (130, "interrupted\n")
    assert not list(tmp_path.glob("self-checks-*"))


def test_doctor_live_stops_the_import_too(tmp_path: Path) -> None:
    (tmp_path / "flashinfer").mkdir()
    source = f"import os, time\nopen({str(tmp_path / 'pid')!r}, 'w').write(str(os.getpid()))\ntime.sleep(60)\n"
    (tmp_path / "flashinfer" / "__init__.py").write_text(source, "utf-8")
    pid = tmp_path / "pid"
    with started("doctor", "--live", before=str(tmp_path), FLASHINFER_COMPAT_CACHE_DIR=str(tmp_path)) as process:
        wait_for(lambda: pid.exists() and pid.read_text("utf-8") != "")
        assert interrupted(process) == (130, "interrupted\n")
    assert not Path("/proc", pid.read_text("utf-8")).exists()
