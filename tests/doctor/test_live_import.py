"""The live import runs in a process of its own, whatever that process does."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
from doctor_machines import build, flashinfer, torch, write
from fakes import install_flashinfer

from flashinfer_compat.doctor.live import LiveImport, import_flashinfer
from flashinfer_compat.machine import read_flashinfer
from flashinfer_compat.signatures.live import is_imported

ROOT = Path(__file__).parents[2]


def imported(tmp_path: Path, source: str, limit: float = 30.0) -> LiveImport:
    (tmp_path / "flashinfer").mkdir()
    (tmp_path / "flashinfer" / "__init__.py").write_text(source)
    return import_flashinfer(None, limit, search_path=[str(tmp_path)])


def test_an_exception_is_told(tmp_path: Path) -> None:
    # Another test may have imported the installed one.
    before = is_imported()
    found = imported(tmp_path, "raise RuntimeError('flashinfer-cubin version (1) does not match')\n")
    assert found.problem == "RuntimeError: flashinfer-cubin version (1) does not match"
    assert not found.timed_out
    assert is_imported() == before


@pytest.mark.parametrize(
    ("source", "problem"),
    [
        ("import os; os.abort()\n", "the process was killed by SIGABRT"),
        ("import os; os.write(2, b'first\\nlast words\\n'); os._exit(7)\n", "exited with code 7: first / last words"),
        ("raise SystemExit('no GPU')\n", "SystemExit: no GPU"),
    ],
)
def test_a_process_that_dies_is_told(tmp_path: Path, source: str, problem: str) -> None:
    assert problem in imported(tmp_path, source).problem


def test_a_hanging_import_is_stopped_with_what_it_started(tmp_path: Path) -> None:
    source = f"""
import subprocess, sys, time
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
open({str(tmp_path / "pid")!r}, "w").write(str(child.pid))
time.sleep(60)
"""
    started = time.perf_counter()
    found = imported(tmp_path, source, limit=2.0)
    assert found.timed_out
    assert time.perf_counter() - started < 20
    pid = int((tmp_path / "pid").read_text())
    for _ in range(50):
        state = Path(f"/proc/{pid}/stat")
        if not state.exists() or state.read_text().split(") ")[1][0] == "Z":
            break
        time.sleep(0.1)
    else:
        pytest.fail("the process that the import started still runs")


def test_what_works_is_told_with_its_version_and_time(tmp_path: Path) -> None:
    found = imported(tmp_path, "print('noise'); __version__ = '0.7.4'\n")
    assert (found.problem, found.version, found.timed_out) == ("", "0.7.4", False)
    assert 0 <= found.seconds < 30
    json.dumps(found.to_dict())


def test_replaced_functions_are_told(tmp_path: Path) -> None:
    package = tmp_path / "flashinfer" / "fused_moe"
    package.mkdir(parents=True)
    (package.parent / "__init__.py").write_text("from .fused_moe import trtllm_fp4_block_scale_moe\n")
    source = "def trtllm_fp4_block_scale_moe(routing_logits, *, top_k): ...\n"
    (package / "__init__.py").write_text(source)
    machine = build(tmp_path / "m", torch())
    environment = machine.collect()
    assert read_flashinfer(environment) is None
    from flashinfer_compat.signatures.source import DirectorySource
    from flashinfer_compat.signatures.static import read_source

    static = read_source(DirectorySource(tmp_path))
    assert import_flashinfer(static, 30.0, search_path=[str(tmp_path)]).differences == ()
    (package / "__init__.py").write_text(f"{source}trtllm_fp4_block_scale_moe = lambda routing_logits: None\n")
    (difference,) = import_flashinfer(static, 30.0, search_path=[str(tmp_path)]).differences
    assert "trtllm_fp4_block_scale_moe" in difference


def doctor(machine_root: Path, *arguments: str, **environ: str) -> subprocess.CompletedProcess[str]:
    """The command in a Python that sees only this package, `packaging` and the machine's search path."""
    import packaging

    seen = os.pathsep.join([str(machine_root / "site"), str(ROOT), str(machine_root / "shared")])
    (machine_root / "shared").mkdir(exist_ok=True)
    link = machine_root / "shared" / "packaging"
    if not link.exists():
        link.symlink_to(Path(packaging.__file__).parent)
    command = [sys.executable, "-S", "-m", "flashinfer_compat", "doctor", "--json", *arguments]
    kept = {name: value for name, value in os.environ.items() if name in ("PATH", "LD_LIBRARY_PATH")}
    variables = {**kept, "HOME": str(machine_root / "home"), "PYTHONPATH": seen, **environ}
    return subprocess.run(command, capture_output=True, text=True, check=False, env=variables, cwd=machine_root)


def found_by(done: subprocess.CompletedProcess[str]) -> list[str]:
    assert done.stderr == ""
    answer = json.loads(done.stdout)
    assert done.returncode == answer["exit_code"]
    return [one["code"] for one in answer["findings"]]


def test_the_doctor_needs_neither_torch_nor_flashinfer(tmp_path: Path) -> None:
    machine = build(tmp_path / "m")
    found = found_by(doctor(machine.root))
    assert {"torch-missing", "flashinfer-missing"} <= set(found)


def test_the_doctor_works_where_flashinfer_cannot_be_imported(tmp_path: Path) -> None:
    machine = build(tmp_path / "m", flashinfer("0.7.4"), torch())
    assert "import-fails" not in found_by(doctor(machine.root))
    done = doctor(machine.root, "--live")
    assert "import-fails" in found_by(done)
    assert "flashinfer must not be imported" in json.loads(done.stdout)["live"]["problem"]


def test_the_doctor_works_where_importing_flashinfer_hangs(tmp_path: Path) -> None:
    machine = build(tmp_path / "m", torch())
    install_flashinfer(machine.site, "0.7.4")
    write("site/flashinfer/__init__.py", "import time\ntime.sleep(600)\n")(machine)
    started = time.perf_counter()
    found = found_by(doctor(machine.root, "--live", "--live-limit", "2"))
    assert "import-hangs" in found
    assert time.perf_counter() - started < 30


def test_a_limit_must_be_positive(tmp_path: Path) -> None:
    for value in ("0", "-1", "nan"):
        done = doctor(build(tmp_path / value).root, "--live", f"--live-limit={value}")
        assert done.returncode == 2
        assert "--live-limit" in done.stdout + done.stderr


def test_the_doctor_works_with_a_home_that_cannot_be_written(tmp_path: Path) -> None:
    machine = build(tmp_path / "m", flashinfer("0.7.4"), torch())
    machine.home.chmod(0o555)
    # As root every folder can be written; another user has the modules only if they are loaded before.
    code = f"""
import io, os, sys
from contextlib import redirect_stdout
from flashinfer_compat.cli import main
with redirect_stdout(io.StringIO()):
    main(["doctor", "--json"])
if os.getuid() == 0:
    os.setuid(54321)
os.environ["HOME"] = {str(machine.home)!r}
sys.path.insert(0, {str(machine.site)!r})
raise SystemExit(main(["doctor", "--json"]))
"""
    for folder in (tmp_path, *tmp_path.parents[:3]):
        if folder.owner() == Path(tmp_path).owner():
            folder.chmod(folder.stat().st_mode | 0o755)
    variables = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), *filter(None, sys.path)])}
    variables.pop("FLASHINFER_COMPAT_CACHE_DIR", None)
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=variables, cwd=machine.root)
    found = found_by(done)
    assert {"cache-unwritable", "cache-not-kept"} <= set(found)
    assert list(machine.home.iterdir()) == []
