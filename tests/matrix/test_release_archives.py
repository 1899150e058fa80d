from __future__ import annotations

import io
import tarfile
import zipfile
from pathlib import Path

import pytest

pytest.importorskip("pypi_simple")

from tools.matrix.archives import unpack

LAUNCHER = "trtllm_fused_moe_kernel_launcher.cu"
METADATA = "Metadata-Version: 2.1\nName: flashinfer-python\nVersion: 9.0\n"


def wheel(folder: Path, files: dict[str, str]) -> Path:
    path = folder / "flashinfer_python-9.0-py3-none-any.whl"
    with zipfile.ZipFile(path, "w") as archive:
        for name, content in files.items():
            archive.writestr(name, content)
    return path


def sdist(folder: Path, files: dict[str, str]) -> Path:
    path = folder / "flashinfer_python-9.0.tar.gz"
    with tarfile.open(path, "w:gz") as archive:
        for name, content in files.items():
            member = tarfile.TarInfo(f"flashinfer_python-9.0/{name}")
            member.size = len(content)
            archive.addfile(member, io.BytesIO(content.encode()))
    return path


def contents(folder: Path) -> dict[str, str]:
    return {
        str(path.relative_to(folder)): path.read_text("utf-8") for path in sorted(folder.rglob("*")) if path.is_file()
    }


EXPECTED = {
    "flashinfer/__init__.py": "top",
    "flashinfer/tuning/a.json": "{}",
    f"flashinfer/data/csrc/{LAUNCHER}": "launcher",
    "flashinfer/data/csrc/nv_internal/tensorrt_llm/thop/fp4Quantize.cpp": "quantizer",
    "flashinfer_python-9.0.dist-info/METADATA": METADATA,
}


def test_a_wheel_is_unpacked_as_far_as_it_is_needed(tmp_path: Path) -> None:
    more = {
        "flashinfer/data/include/kernel.cuh": "not needed",
        "flashinfer/data/csrc/other.cu": "not needed",
        "flashinfer/data/csrc/nv_internal/other/fp4_gemm_cutlass.cu": "not needed",
        "flashinfer_python-9.0.dist-info/RECORD": "not needed",
    }
    unpack(wheel(tmp_path, {**EXPECTED, **more}), "9.0", tmp_path / "site")
    assert contents(tmp_path / "site") == EXPECTED


def test_an_sdist_is_laid_out_as_if_installed(tmp_path: Path) -> None:
    files = {
        "flashinfer/__init__.py": "top",
        "flashinfer/tuning/a.json": "{}",
        f"csrc/{LAUNCHER}": "launcher",
        "csrc/nv_internal/tensorrt_llm/thop/fp4Quantize.cpp": "quantizer",
        "csrc/other.cu": "not needed",
        "PKG-INFO": METADATA,
        "flashinfer_python.egg-info/PKG-INFO": "another",
        "tests/test_moe.py": "not needed",
        "3rdparty/cutlass/setup.py": "not needed",
    }
    unpack(sdist(tmp_path, files), "9.0", tmp_path / "site")
    assert contents(tmp_path / "site") == EXPECTED


def test_nothing_is_written_outside_the_folder(tmp_path: Path) -> None:
    files = {**EXPECTED, "flashinfer/../../evil.py": "x", "/evil.py": "x"}
    unpack(wheel(tmp_path, files), "9.0", tmp_path / "deep" / "site")
    assert contents(tmp_path / "deep") == {f"site/{name}": text for name, text in EXPECTED.items()}


def test_an_archive_without_metadata_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"flashinfer_python-9.0.tar.gz has no METADATA or PKG-INFO"):
        unpack(sdist(tmp_path, {"flashinfer/__init__.py": ""}), "9.0", tmp_path / "site")
