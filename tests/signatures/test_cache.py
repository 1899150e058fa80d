from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
from source_packages import write

import flashinfer_compat
from flashinfer_compat.signatures import cache
from flashinfer_compat.signatures.cache import read_installed

FILES: dict[str, str | bytes] = {
    "flashinfer/__init__.py": "from .gemm import mm_fp4\nfrom .activation import silu_and_mul\n",
    "flashinfer/gemm.py": "def mm_fp4(a, b): ...\n",
    "flashinfer/activation.py": "def silu_and_mul(input, out=None): ...\n",
    "flashinfer/fused_moe/__init__.py": "from .core import RoutingMethodType\n",
    "flashinfer/fused_moe/core.py": "import enum\nclass RoutingMethodType(enum.IntEnum):\n    Default = (0,)\n",
}
EXPECTED = {
    "mm_fp4": "flashinfer.gemm(a, b)",
    "silu_and_mul": "flashinfer.activation(input, out=None)",
    "RoutingMethodType": "flashinfer.fused_moe.core{Default=0}",
}

# Prints the symbols and the Python files under `root` that were opened for it.
TRACED = """
import json, sys
from pathlib import Path
from flashinfer_compat.signatures.cache import read_installed
root, cache = Path(sys.argv[1]), Path(sys.argv[2])
opened = []
sys.addaudithook(lambda event, args: opened.append(str(args[0])) if event == "open" else None)
table = read_installed(root, cache)
print(json.dumps([{name: one.to_text() for name, one in table.symbols.items()},
                  [path for path in opened if path.startswith(str(root))]]))
"""

ENVIRONMENT = {**os.environ, "PYTHONPATH": str(Path(flashinfer_compat.__file__).parents[1])}


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return write(tmp_path / "site-packages", FILES)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "cache"


def texts(root: Path, folder: Path | None) -> dict[str, str]:
    table = read_installed(root, folder)
    assert not table.problems
    return {name: symbol.to_text() for name, symbol in table.symbols.items()}


def the_entry(folder: Path) -> Path:
    (entry,) = folder.iterdir()
    assert entry.suffix == ".json"
    return entry


def traced(root: Path, folder: Path) -> tuple[dict[str, str], list[str]]:
    command = [sys.executable, "-c", TRACED, str(root), str(folder)]
    done = subprocess.run(command, env=ENVIRONMENT, capture_output=True, text=True, check=True)
    symbols, opened = json.loads(done.stdout)
    return symbols, opened


def change_in_place(path: Path, old: str, new: str) -> None:
    # A file system keeps change times in steps of some milliseconds.
    time.sleep(0.05)
    content = path.read_text("utf-8")
    assert content.count(old) == 1
    path.write_text(content.replace(old, new), "utf-8")


def test_a_second_reading_opens_no_source_file(root: Path, folder: Path) -> None:
    first, opened_first = traced(root, folder)
    second, opened_second = traced(root, folder)
    assert first == second == EXPECTED
    assert {path for path in opened_first if Path(path).exists()} == {str(root / path) for path in FILES}
    assert opened_second == []


def test_without_a_folder_nothing_is_kept(root: Path, tmp_path: Path) -> None:
    before = sorted(tmp_path.rglob("*"))
    assert texts(root, None) == EXPECTED
    assert sorted(tmp_path.rglob("*")) == before


def test_a_change_of_the_same_size_and_time_is_noticed(root: Path, folder: Path) -> None:
    assert texts(root, folder) == EXPECTED
    path = root / "flashinfer/gemm.py"
    before = path.stat()
    change_in_place(path, "a, b", "x, y")
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
    after = path.stat()
    assert (after.st_size, after.st_mtime_ns, after.st_ino) == (before.st_size, before.st_mtime_ns, before.st_ino)
    assert texts(root, folder)["mm_fp4"] == "flashinfer.gemm(x, y)"
    assert texts(root, folder)["mm_fp4"] == "flashinfer.gemm(x, y)"


def test_a_replaced_file_is_noticed(root: Path, folder: Path) -> None:
    assert texts(root, folder) == EXPECTED
    path = root / "flashinfer/gemm.py"
    before = path.stat()
    other = path.with_name("gemm.new")
    other.write_text("def mm_fp4(x, y): ...\n", "utf-8")
    os.utime(other, ns=(before.st_atime_ns, before.st_mtime_ns))
    other.replace(path)
    assert texts(root, folder)["mm_fp4"] == "flashinfer.gemm(x, y)"


def test_a_new_package_that_shadows_a_module_is_noticed(root: Path, folder: Path) -> None:
    assert texts(root, folder) == EXPECTED
    write(root, {"flashinfer/gemm/__init__.py": "def mm_fp4(a, b, c): ...\n"})
    assert texts(root, folder)["mm_fp4"] == "flashinfer.gemm(a, b, c)"


def test_a_new_module_that_is_asked_first_is_noticed(root: Path, folder: Path) -> None:
    assert texts(root, folder) == EXPECTED
    write(root, {"flashinfer/tllm_enums.py": "import enum\nclass RoutingMethodType(enum.IntEnum):\n    Default = 7\n"})
    assert texts(root, folder)["RoutingMethodType"] == "flashinfer.tllm_enums{Default=7}"


def test_a_removed_module_is_noticed(root: Path, folder: Path) -> None:
    assert texts(root, folder) == EXPECTED
    (root / "flashinfer/gemm.py").unlink()
    assert set(texts(root, folder)) == {"silu_and_mul", "RoutingMethodType"}


def test_a_package_that_appears_is_noticed(tmp_path: Path, folder: Path) -> None:
    assert texts(tmp_path / "site-packages", folder) == {}
    assert texts(write(tmp_path / "site-packages", FILES), folder) == EXPECTED


def test_a_file_that_is_not_read_may_change(root: Path, folder: Path) -> None:
    write(root, {"flashinfer/unrelated.py": "x = 1\n"})
    traced(root, folder)
    write(root, {"flashinfer/unrelated.py": "x = 2\n", "flashinfer/another.py": ""})
    assert traced(root, folder) == (EXPECTED, [])


def test_a_reading_with_problems_is_not_kept(root: Path, folder: Path) -> None:
    write(root, {"flashinfer/gemm.py": "def (\n"})
    table = read_installed(root, folder)
    assert set(table.problems) == {"mm_fp4"}
    assert not folder.exists()
    write(root, {"flashinfer/gemm.py": FILES["flashinfer/gemm.py"]})
    assert texts(root, folder) == EXPECTED


def test_two_installs_have_an_entry_each(tmp_path: Path, folder: Path) -> None:
    one = write(tmp_path / "one", FILES)
    two = write(tmp_path / "two", {**FILES, "flashinfer/gemm.py": "def mm_fp4(z): ...\n"})
    for _ in range(2):
        assert texts(one, folder) == EXPECTED
        assert texts(two, folder)["mm_fp4"] == "flashinfer.gemm(z)"
    assert len(list(folder.iterdir())) == 2


def test_another_version_of_this_package_does_not_use_the_entry(
    root: Path, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    texts(root, folder)
    monkeypatch.setattr(cache, "__version__", "99.0")
    texts(root, folder)
    assert len(list(folder.iterdir())) == 2


def signed(content: str) -> bytes:
    encoded = content.encode()
    return hashlib.sha256(encoded).hexdigest().encode() + b"\n" + encoded


SYMBOL: list[object] = ["mm_fp4", "wrong", [], None, False]
DAMAGED = {
    "empty": b"",
    "not JSON": b"{",
    "binary": bytes(range(256)),
    "without a digest": json.dumps({"files": {}, "symbols": [SYMBOL]}).encode(),
    "a wrong digest": b"0" * 64 + b"\n" + json.dumps({"files": {}, "symbols": [SYMBOL]}).encode(),
    "too deep": b"[" * 100_000,
    **{
        f"signed {content}": signed(content)
        for content in (
            "",
            "null",
            "[]",
            "3",
            '"text"',
            "{}",
            '{"files": {}}',
            '{"files": [], "symbols": []}',
            '{"files": {}, "symbols": null}',
            '{"files": {}, "symbols": ["mm_fp4"]}',
            '{"files": {}, "symbols": [[["mm_fp4"], "m", null, null, false]]}',
            '{"files": {}, "symbols": [["mm_fp4", "m", [["a"]], null, false]]}',
            '{"files": {}, "symbols": [["mm_fp4", "m", null, [1], false]]}',
            '{"files": {"flashinfer/__init__.py": 3}, "symbols": []}',
        )
    },
}


@pytest.mark.parametrize("damage", DAMAGED)
def test_a_damaged_entry_is_read_again_and_replaced(damage: str, root: Path, folder: Path) -> None:
    texts(root, folder)
    entry = the_entry(folder)
    entry.write_bytes(DAMAGED[damage])
    assert texts(root, folder) == EXPECTED
    assert the_entry(folder).read_bytes() != DAMAGED[damage]
    assert traced(root, folder) == (EXPECTED, [])


@pytest.mark.parametrize("kept", [0, 1, 64, 65, 66, 200, -1])
def test_a_truncated_entry_is_read_again(kept: int, root: Path, folder: Path) -> None:
    texts(root, folder)
    entry = the_entry(folder)
    whole = entry.read_bytes()
    entry.write_bytes(whole[:kept])
    assert texts(root, folder) == EXPECTED
    assert entry.read_bytes() == whole


def test_any_changed_byte_of_an_entry_is_noticed(root: Path, folder: Path) -> None:
    texts(root, folder)
    entry = the_entry(folder)
    whole = entry.read_bytes()
    for position in range(0, len(whole), 37):
        entry.write_bytes(whole[:position] + bytes([whole[position] ^ 1]) + whole[position + 1 :])
        assert texts(root, folder) == EXPECTED
        assert entry.read_bytes() == whole


def test_a_folder_in_place_of_the_entry(root: Path, folder: Path) -> None:
    texts(root, folder)
    entry = the_entry(folder)
    entry.unlink()
    entry.mkdir()
    (entry / "occupied").touch()
    assert texts(root, folder) == EXPECTED
    assert the_entry(folder).is_dir()


def test_a_file_in_place_of_the_folder(root: Path, folder: Path) -> None:
    folder.write_text("a file", "utf-8")
    assert texts(root, folder) == EXPECTED
    assert texts(root, folder / "below" / "it") == EXPECTED
    assert folder.read_text("utf-8") == "a file"


def test_a_missing_parent_is_made(root: Path, folder: Path) -> None:
    assert texts(root, folder / "one" / "two") == EXPECTED
    assert traced(root, folder / "one" / "two") == (EXPECTED, [])


@pytest.mark.skipif(not Path("/proc/self/mem").exists(), reason="needs /proc")
def test_a_folder_where_nobody_can_write(root: Path) -> None:
    assert texts(root, Path("/proc/self/flashinfer_compat")) == EXPECTED


def test_processes_writing_at_once_leave_a_readable_entry(root: Path, folder: Path) -> None:
    code = (
        "import sys, pathlib\n"
        "from flashinfer_compat.signatures.cache import read_installed\n"
        "root, folder = map(pathlib.Path, sys.argv[1:])\n"
        "for _ in range(40):\n"
        "    table = read_installed(root, folder)\n"
        "    assert len(table.symbols) == 3 and not table.problems, table\n"
        "    for entry in folder.glob('*.json'):\n"
        "        entry.unlink(missing_ok=True)\n"
    )
    command = [sys.executable, "-c", code, str(root), str(folder)]
    processes = [subprocess.Popen(command, env=ENVIRONMENT, stderr=subprocess.PIPE) for _ in range(3)]
    errors = [process.communicate()[1].decode() for process in processes]
    assert errors == ["", "", ""]
    assert [process.returncode for process in processes] == [0, 0, 0]
    assert list(folder.iterdir()) == []
    assert texts(root, folder) == EXPECTED
    assert traced(root, folder) == (EXPECTED, [])


def test_a_pipe_in_place_of_an_entry_is_not_waited_for(root: Path, folder: Path) -> None:
    assert texts(root, folder) == EXPECTED
    (entry,) = folder.iterdir()
    entry.unlink()
    os.mkfifo(entry)
    assert texts(root, folder) == EXPECTED
    assert entry.is_file()
