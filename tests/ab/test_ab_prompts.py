"""Where prompts come from."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flashinfer_compat.ab.prompts import BUILT_IN, read_prompts
from flashinfer_compat.errors import ArgumentError

LINES = st.text(st.characters(codec="utf-8", exclude_characters="\n\r\ufeff"), min_size=1).filter(str.strip)


def test_those_built_in_differ() -> None:
    assert len(set(BUILT_IN)) == len(BUILT_IN) >= 20
    assert all(prompt.strip() for prompt in BUILT_IN)


@given(st.lists(LINES, min_size=1))
def test_files_give_back_their_prompts(tmp_path_factory: pytest.TempPathFactory, prompts: list[str]) -> None:
    folder = tmp_path_factory.mktemp("prompts")
    plain, lines = folder / "plain.txt", folder / "lines.jsonl"
    plain.write_bytes("\r\n".join([*prompts, ""]).encode())
    lines.write_text("\n\n".join(json.dumps(one) for one in prompts), "utf-8")
    assert read_prompts(plain) == read_prompts(lines) == tuple(prompts)


def test_objects_may_say_more(tmp_path: Path) -> None:
    path = tmp_path / "x.jsonl"
    path.write_text('\ufeff{"prompt": "a\\nb", "id": 7}\n"c"\n', "utf-8")
    assert read_prompts(path) == ("a\nb", "c")


@pytest.mark.parametrize(
    ("name", "content", "text"),
    [
        ("x.txt", b"\n \n", "at least one prompt"),
        ("x.txt", b"\xff\xfe", "UTF-8"),
        ("x.jsonl", b'"a"\n{"prompt": ', "line 2"),
        ("x.jsonl", b'{"text": "a"}', "line 1"),
        ("x.jsonl", b'""', '"prompt"'),
        ("x.jsonl", b"[1]", "line 1"),
        ("x.jsonl", b'"a"\n"b \\ud800 c"', "line 2: expected text without a lone surrogate"),
        ("x.jsonl", b'{"prompt": "\\udfff"}', "line 1: expected text without a lone surrogate"),
        ("x.txt", b"\xed\xa0\x80", "UTF-8"),
    ],
)
def test_a_file_that_cannot_be_used(tmp_path: Path, name: str, content: bytes, text: str) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(ArgumentError, match="--prompts") as caught:
        read_prompts(tmp_path / name)
    assert text in str(caught.value)


def test_a_file_that_is_not_there(tmp_path: Path) -> None:
    for path in (tmp_path / "none.txt", tmp_path):
        with pytest.raises(ArgumentError, match="--prompts"):
            read_prompts(path)
