"""Ctrl-C ends a command in one line, with the exit code of shells, and leaves no process behind."""

from __future__ import annotations

import signal
import threading
from pathlib import Path

import pytest
from processes import interrupted, started, wait_for

from flashinfer_compat.cli.interrupts import raise_if_interrupted, remembered_interrupts

SMALL = ("--hidden-size", "64", "--intermediate-size", "32", "--num-experts", "4", "--top-k", "2", "--tokens", "4")

# Sends Ctrl-C while a module is being imported, once the command line is at work.
ON_IMPORT = """
import os, signal, sys
class Hook:
    def find_spec(self, name, path=None, target=None):
        if name == {module!r} and "flashinfer_compat.cli" in sys.modules:
            sys.meta_path.remove(self)
            try:
                os.kill(os.getpid(), signal.SIGINT)
            except KeyboardInterrupt:
                {then}
sys.meta_path.insert(0, Hook())
"""


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


@pytest.mark.parametrize("command", ["bench", "verify"])
def test_a_library_that_swallows_it_does_not_lose_it(tmp_path: Path, command: str) -> None:
    pytest.importorskip("torch")
    (tmp_path / "sitecustomize.py").write_text(ON_IMPORT.format(module="torch", then="pass"), "utf-8")
    arguments = (command, "--device", "cpu", *(SMALL if command == "bench" else ()))
    with started(*arguments, before=str(tmp_path), FLASHINFER_COMPAT_CACHE_DIR=str(tmp_path)) as process:
        output, errors = process.communicate(timeout=60)
    assert (process.returncode, output, errors) == (130, "", "interrupted\n")


def test_while_commands_are_imported(tmp_path: Path) -> None:
    source = ON_IMPORT.format(module="flashinfer_compat.cli.bench", then="raise")
    (tmp_path / "sitecustomize.py").write_text(source, "utf-8")
    with started("plan", before=str(tmp_path)) as process:
        output, errors = process.communicate(timeout=60)
    assert (process.returncode, output, errors) == (130, "", "interrupted\n")


def test_it_is_remembered_within_and_forgotten_after() -> None:
    with remembered_interrupts():
        raise_if_interrupted()
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)
        with pytest.raises(KeyboardInterrupt):
            raise_if_interrupted()
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    with remembered_interrupts():
        raise_if_interrupted()


def test_a_handler_of_the_caller_stays() -> None:
    seen: list[int] = []
    before = signal.signal(signal.SIGINT, lambda number, _frame: seen.append(number))
    try:
        with remembered_interrupts():
            signal.raise_signal(signal.SIGINT)
            raise_if_interrupted()
    finally:
        signal.signal(signal.SIGINT, before)
    assert seen == [signal.SIGINT]


def test_another_thread_installs_nothing() -> None:
    found: list[object] = []

    def look() -> None:
        with remembered_interrupts():
            found.append(signal.getsignal(signal.SIGINT))

    thread = threading.Thread(target=look)
    thread.start()
    thread.join()
    assert found == [signal.getsignal(signal.SIGINT)]
