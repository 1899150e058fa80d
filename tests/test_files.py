"""A file is written whole or not at all."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from flashinfer_compat.files import write_named, write_whole


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


def test_a_link_is_followed_and_permissions_stay(tmp_path: Path) -> None:
    target, link = tmp_path / "target.json", tmp_path / "link.json"
    target.write_text("old")
    target.chmod(0o600)
    link.symlink_to(target.name)
    write_named(link, "new")
    assert link.is_symlink()
    assert target.read_text() == "new"
    assert target.stat().st_mode & 0o777 == 0o600
    # A link to nothing yet is followed too.
    target.unlink()
    write_named(link, "again")
    assert link.is_symlink()
    assert target.read_text() == "again"


def test_a_name_may_be_as_long_as_the_system_takes(tmp_path: Path) -> None:
    write_whole(tmp_path / ("a" * 255), "x")
    assert [len(one.name) for one in tmp_path.iterdir()] == [255]


def test_a_named_pipe_is_written_to_and_stays_one(tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    with subprocess.Popen(["cat", pipe], stdout=subprocess.PIPE) as reader:
        write_named(pipe, "x")
        assert reader.communicate()[0] == b"x"
    assert pipe.is_fifo()


def test_standard_output_is_written_to() -> None:
    code = "from pathlib import Path; from flashinfer_compat.files import write_named as w; w(Path('/dev/stdout'), 'x')"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (0, "x", "")


def test_a_full_device_says_so() -> None:
    with pytest.raises(OSError, match="No space left"):
        write_named(Path("/dev/full"), "x")
    assert not Path("/dev/full").is_file()
