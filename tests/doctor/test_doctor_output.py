"""What people read: snapshots of three machines, and the form of every report."""

from __future__ import annotations

import shlex
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from doctor_cases import CASES
from doctor_machines import B200, H200, build, delete, distribution, flashinfer, gpu, healthy, torch, variable

from flashinfer_compat.cli.console import command
from flashinfer_compat.cli.doctor import print_examination
from flashinfer_compat.doctor.examination import Examination, examine_environment
from flashinfer_compat.environment import Section

SNAPSHOTS = Path(__file__).parent / "snapshots"
MACHINES = {
    "b200": healthy(),
    "h200": (
        *(gpu(*[H200] * 8), flashinfer("0.6.17"), torch("2.11.0+cu130")),
        distribution("vllm", "0.33.0", "flashinfer-python==0.7.2.post1"),
    ),
    "broken-cpu-box": (
        *(flashinfer("0.7.0"), torch("2.13.0+cpu", None), distribution("nvidia-cutlass-dsl", "4.6.2")),
        *(distribution("apache-tvm-ffi", "0.1.9"), distribution("flashinfer-jit-cache", "0.6.18+cu129")),
        *(variable("FLASHINFER_CUBIN_DRI", "/data/cubins"), variable("FLASHINFER_CACHE_DIR", "/data")),
        *(delete("home"), delete("tools")),
    ),
}


def printed(examination: Examination, capsys: pytest.CaptureFixture[str], *, verbose: bool = False) -> str:
    print_examination(examination, verbose=verbose)
    return capsys.readouterr().out


@pytest.fixture
def root() -> Iterator[Path]:
    """A folder whose path is always as long, so that lines break at the same words."""
    folder = Path(tempfile.mkdtemp(prefix="m-", dir="/tmp"))
    yield folder
    shutil.rmtree(folder)


@pytest.mark.parametrize("name", MACHINES)
def test_the_output_is_as_recorded(name: str, root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """To renew the snapshots, delete their folder and run this test twice."""
    environment = build(root / "x", *MACHINES[name]).collect()
    assert environment.python.value is not None
    python = replace(environment.python.value, version="3.12.4")
    text = printed(examine_environment(replace(environment, python=Section(python))), capsys)
    # Of the table of features only the beginning: it changes whenever one is added.
    head, title, table = text.partition("Features of FlashInfer\n")
    text = head + title + "".join(table.splitlines(keepends=True)[:3])
    text = text.replace(str(root), "/tmp/m-machine_".ljust(len(str(root)), "_")[: len(str(root))])
    path = SNAPSHOTS / f"{name}.txt"
    if not path.exists():
        path.parent.mkdir(exist_ok=True)
        path.write_text(text, "utf-8")
        pytest.fail(f"{path} was not there and has been written")
    assert text == path.read_text("utf-8")


@pytest.mark.parametrize("case", CASES[1::3], ids=lambda case: f"{case.about}: {case.title}")
def test_every_report_fits_80_columns(case, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    examination = build(tmp_path / "m", *case.steps).examine()
    for verbose in (False, True):
        text = printed(examination, capsys, verbose=verbose)
        assert "\x1b" not in text
        for line in text.splitlines():
            assert len(line) <= 80 or " " not in line.strip().removesuffix(" \\"), line


def test_findings_name_their_page_and_say_why(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    examination = build(tmp_path, *healthy(), delete("tools/ninja")).examine()
    text = " ".join(printed(examination, capsys).split())
    for finding in examination.findings:
        assert f"{finding.severity.value} [{finding.code}] {finding.message} {finding.why}" in text
        assert f"More: docs/findings/{finding.code}.md" in text
    assert "Findings: 1 error, 1 note" in text


def test_verbose_tells_every_fact(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    examination = build(tmp_path, *healthy(), variable("FLASHINFER_LOGLEVEL", "3")).examine()
    short, full = (printed(examination, capsys, verbose=verbose) for verbose in (False, True))
    for fact in ("FLASHINFER_LOGLEVEL=3", "GPU 0: NVIDIA B200, sm100", "nvcc 13.0.88 at", "cache cubins:"):
        assert fact in full
        assert fact not in short
    assert "driver 580.95.05 for CUDA 13.0" in " ".join(short.split())


def test_a_machine_of_eight_gpus_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    machine = build(tmp_path, *healthy(), gpu(*[B200] * 8))
    assert "8 x NVIDIA B200 (sm100)" in " ".join(printed(machine.examine(), capsys).split())


@pytest.mark.parametrize(
    "line",
    [
        "pip install ninja",
        "pip install flashinfer-jit-cache==0.7.4+cu130 --index-url https://flashinfer.ai/whl/cu130 && pip check",
        "rm -r '/a folder with spaces/that is long enough to be broken somewhere' && echo \"$(mktemp -d)\" 'x y'",
        "pip install --force-reinstall --no-deps " + " ".join(f"package-{number}==1.0" for number in range(20)),
    ],
)
def test_commands_can_be_pasted_as_they_are_printed(line: str, capsys: pytest.CaptureFixture[str]) -> None:
    command(line)
    text = capsys.readouterr().out
    assert shlex.split(text.replace("\\\n", "")) == shlex.split(line)
    for one in text.splitlines():
        assert len(one) <= 80 or "'" in one
    done = subprocess.run(["sh", "-n"], input=text, text=True, capture_output=True, check=False)
    assert done.returncode == 0, done.stderr
