from __future__ import annotations

import hashlib
import io
import json
import tarfile
import zipfile
from pathlib import Path

import pytest

pytest.importorskip("pypi_simple")

from flashinfer_compat.signatures.archives import ArchiveSource
from flashinfer_compat.signatures.recorded import RecordedRelease, decode, recorded
from tools import record_signatures
from tools.record_signatures import read_archive

METADATA = (
    "Metadata-Version: 2.4\nName: flashinfer-python\nVersion: 9.0\nRequires-Python: <4.0,>=3.10\n"
    "Requires-Dist: torch\nRequires-Dist: numpy>=2; python_version >= '3.10'\n\nA long description with é.\n"
)
FILES = {
    "flashinfer/__init__.py": "from .gemm import mm_fp4\nfrom .fused_moe import *\n",
    "flashinfer/gemm.py": "import torch\ndef mm_fp4(a, b, alpha=None, out_dtype=torch.bfloat16): ...\n",
    "flashinfer/fused_moe/__init__.py": "try:\n    from .api import MoELayer\nexcept ImportError:\n    pass\n",
    "flashinfer/fused_moe/api.py": "class MoELayer:\n    def __init__(self, config): ...\n",
    "flashinfer/data/notes.txt": "no Python",
}
TEXTS = {
    "MoELayer": "flashinfer.fused_moe.api?(config)",
    "mm_fp4": "flashinfer.gemm(a, b, alpha=None, out_dtype=torch.bfloat16)",
}


def wheel(folder: Path, files: dict[str, str], metadata: str | None = METADATA) -> Path:
    path = folder / "flashinfer_python-9.0-py3-none-any.whl"
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, content in files.items():
            archive.writestr(name, content)
        archive.writestr("other/vendored.dist-info/METADATA.py", "x = 1\n")
        if metadata is not None:
            archive.writestr("flashinfer_python-9.0.dist-info/METADATA", metadata)
    return path


def sdist(folder: Path, files: dict[str, str], metadata: str | None = METADATA) -> Path:
    path = folder / "flashinfer_python-9.0.tar.gz"
    content = {f"flashinfer_python-9.0/{name}": text for name, text in files.items()}
    if metadata is not None:
        content["flashinfer_python-9.0/PKG-INFO"] = metadata
        content["flashinfer_python-9.0/flashinfer_python.egg-info/PKG-INFO"] = "Name: wrong\n"
    with tarfile.open(path, "w:gz") as archive:
        folder_entry = tarfile.TarInfo("flashinfer_python-9.0/flashinfer")
        folder_entry.type = tarfile.DIRTYPE
        archive.addfile(folder_entry)
        link = tarfile.TarInfo("flashinfer_python-9.0/flashinfer/link.py")
        link.type, link.linkname = tarfile.SYMTYPE, "gemm.py"
        archive.addfile(link)
        for name, text in content.items():
            entry = tarfile.TarInfo(name)
            encoded = text.encode()
            entry.size = len(encoded)
            archive.addfile(entry, io.BytesIO(encoded))
    return path


@pytest.mark.parametrize("build", [wheel, sdist])
def test_an_archive_is_read_without_unpacking(build: object, tmp_path: Path) -> None:
    assert build in (wheel, sdist)
    path = wheel(tmp_path, FILES) if build is wheel else sdist(tmp_path, FILES)
    record = read_archive(path, "9.0")
    assert record == RecordedRelease(
        "9.0",
        path.name,
        hashlib.sha256(path.read_bytes()).hexdigest(),
        "<4.0,>=3.10",
        ("torch", "numpy>=2; python_version >= '3.10'"),
        TEXTS,
    )
    assert list(record.texts) == sorted(record.texts)
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize("build", [wheel, sdist], ids=["wheel", "sdist"])
@pytest.mark.parametrize("broken", ["def mm_fp4(a, b = = 1): ...\n", "def (\n", "import enum\nmm_fp4 = enum.auto()\n"])
def test_an_archive_that_cannot_be_read_is_refused(build: object, broken: str, tmp_path: Path) -> None:
    files = {**FILES, "flashinfer/gemm.py": broken}
    path = wheel(tmp_path, files) if build is wheel else sdist(tmp_path, files)
    with pytest.raises(ValueError, match=rf"{path.name}: .*mm_fp4") as caught:
        read_archive(path, "9.0")
    assert "MoELayer" not in str(caught.value)


def test_an_archive_without_metadata_is_refused(tmp_path: Path) -> None:
    with pytest.raises(KeyError):
        read_archive(wheel(tmp_path, FILES, metadata=None), "9.0")
    with pytest.raises(KeyError):
        read_archive(sdist(tmp_path, FILES, metadata=None), "9.0")


def test_metadata_without_requirements(tmp_path: Path) -> None:
    record = read_archive(wheel(tmp_path, FILES, "Name: flashinfer-python\nVersion: 9.0\n"), "9.0")
    assert (record.requires_python, record.requires) == (None, ())


@pytest.mark.parametrize("name", ["x.whl", "x.tar.gz"])
def test_what_is_no_archive_is_refused(name: str, tmp_path: Path) -> None:
    path = tmp_path / name
    path.write_bytes(b"not an archive")
    with pytest.raises((zipfile.BadZipFile, tarfile.ReadError)):
        ArchiveSource(path)


def test_only_python_files_and_metadata_are_held(tmp_path: Path) -> None:
    source = ArchiveSource(wheel(tmp_path, FILES))
    assert source.read("flashinfer/gemm.py") == FILES["flashinfer/gemm.py"].encode()
    assert source.read("flashinfer/data/notes.txt") is None
    assert source.read("flashinfer/absent.py") is None
    assert source.read("flashinfer") is None
    assert ArchiveSource(sdist(tmp_path, FILES)).read("flashinfer/link.py") is None


@pytest.fixture
def data(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    path = tmp_path / "data" / "flashinfer.json"
    path.parent.mkdir()
    monkeypatch.setattr(record_signatures, "DATA", path)
    return path


def test_the_data_file_is_replaced_and_nothing_else_is_left(data: Path, tmp_path: Path) -> None:
    record = read_archive(wheel(tmp_path, FILES), "9.0")
    data.write_text("old", "utf-8")
    old = data.stat().st_ino
    record_signatures._write([record, recorded("0.7.4")])
    assert list(data.parent.iterdir()) == [data]
    assert data.stat().st_ino != old
    assert data.read_text("utf-8").endswith("}\n")
    read = decode(json.loads(data.read_text("utf-8")))
    assert list(read) == ["0.7.4", "9.0"]
    assert (read["0.7.4"], read["9.0"]) == (recorded("0.7.4"), record)


def test_a_failed_write_keeps_the_old_file_and_leaves_nothing(data: Path) -> None:
    data.mkdir()
    (data / "occupied").touch()
    with pytest.raises(OSError, match="flashinfer"):
        record_signatures._write([recorded("0.7.4")])
    assert list(data.parent.iterdir()) == [data]


def test_existing_records_are_kept(data: Path) -> None:
    assert record_signatures._existing() == {}
    record_signatures._write([recorded("0.7.2"), recorded("0.7.4")])
    assert record_signatures._existing() == {"0.7.2": recorded("0.7.2"), "0.7.4": recorded("0.7.4")}
