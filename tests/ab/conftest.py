"""The command on a file of prompts, its JSON checked against the schema."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from server_pairs import PROMPTS

import flashinfer_compat as fc
from flashinfer_compat.cli import main

VALIDATOR = jsonschema.Draft202012Validator(
    json.loads((Path(fc.__file__).parent / "schemas" / "ab-1.json").read_text("utf-8"))
)


@pytest.fixture
def prompts(tmp_path: Path) -> str:
    path = tmp_path / "prompts.txt"
    path.write_text("\n".join(PROMPTS))
    return str(path)


@pytest.fixture
def ab(prompts: str, capsys: pytest.CaptureFixture[str]) -> Callable[..., tuple[int, Any]]:
    """Runs the command with --json; returns its exit code and what it printed."""

    def run(*arguments: str) -> tuple[int, Any]:
        code = main(["ab", *arguments, "--prompts", prompts, "--json"])
        content = json.loads(capsys.readouterr().out)
        if "error" not in content:
            VALIDATOR.validate(content)
            assert content["exit_code"] == code
        return code, content

    return run
