from __future__ import annotations

from pathlib import Path

import pytest

from flashinfer_compat.doctor.checks import CHECKS
from flashinfer_compat.doctor.finding import DOCS
from tools.findings_index import INDEX, page

FOLDER = Path(__file__).parents[2] / DOCS


def test_there_is_exactly_one_page_for_each_code() -> None:
    assert {path.stem for path in FOLDER.glob("*.md")} == {"index", *(check.code for check in CHECKS)}


@pytest.mark.parametrize("code", [check.code for check in CHECKS])
def test_a_page_has_its_code_as_title_and_says_something(code: str) -> None:
    text = (FOLDER / f"{code}.md").read_text("utf-8")
    assert text.startswith(f"# {code}\n\n")
    assert len(text.split()) >= 20
    for line in text.splitlines():
        assert len(line) <= 120 or line.startswith("|")


def test_links_between_pages_lead_somewhere() -> None:
    import re

    for path in FOLDER.glob("*.md"):
        for target in re.findall(r"\]\(([^)#:]+)", path.read_text("utf-8")):
            assert (path.parent / target).exists(), f"{path.name}: {target}"


def test_the_index_is_up_to_date() -> None:
    assert INDEX.read_text("utf-8") == page()
