"""A file is written whole or not at all."""

from __future__ import annotations

from pathlib import Path

import pytest

from flashinfer_compat.files import write_whole


@pytest.mark.parametrize("content", ["ä\n", b"\x00\xff", ""])
def test_it_is_there_and_nothing_else_is(tmp_path: Path, content: str | bytes) -> None:
    path = tmp_path / "a.json"
    path.write_text("old")
    write_whole(path, content)
    assert path.read_bytes() == (content.encode() if isinstance(content, str) else content)
    assert list(tmp_path.iterdir()) == [path]


def test_a_failure_leaves_what_was_there(tmp_path: Path) -> None:
    folder = tmp_path / "folder"
    folder.mkdir()
    with pytest.raises(OSError, match="folder"):
        write_whole(folder, "x")
    with pytest.raises(FileNotFoundError):
        write_whole(tmp_path / "none" / "a.json", "x")
    assert list(tmp_path.iterdir()) == [folder]
