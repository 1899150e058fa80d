"""What the README says is run."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from tools.strategy_table import main as strategy_table

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text("utf-8")


def blocks(language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", README, re.DOTALL)


def commands() -> list[str]:
    lines = [line for block in blocks("console") for line in block.splitlines()]
    return [line for line in lines if line.startswith("python -m flashinfer_compat")]


@pytest.mark.parametrize("command", commands())
def test_commands_run(command: str) -> None:
    run = subprocess.run(
        [sys.executable, *shlex.split(command)[1:]], capture_output=True, text=True, cwd=ROOT, check=False
    )
    # The doctor's exit code is about the machine.
    assert run.returncode == 0 or ("doctor" in command and run.returncode in (1, 2)), run.stderr
    assert "Traceback" not in run.stderr
    assert run.stdout


def test_the_readme_has_commands_and_scripts() -> None:
    assert len(commands()) >= 3
    for script in ("scripts/try.sh", "scripts/test.sh"):
        assert script in README
        assert os.access(ROOT / script, os.X_OK)


def test_the_example_runs() -> None:
    pytest.importorskip("torch")
    example = blocks("python")[0]
    assert sum(bool(line.strip()) for line in example.splitlines()) <= 10
    run = subprocess.run([sys.executable, "-c", example], capture_output=True, text=True, cwd=ROOT, check=False)
    assert run.returncode == 0, run.stderr


def test_the_strategy_table_is_the_planners() -> None:
    assert strategy_table(["--check"]) == 0


def test_links_lead_somewhere() -> None:
    for page in [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *(ROOT / "docs").glob("*.md")]:
        for target in re.findall(r"\]\(([^)#]+)\)", page.read_text("utf-8")):
            if "://" not in target:
                assert (page.parent / target).exists(), f"{page.name}: {target}"
