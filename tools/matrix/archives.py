"""Fetch a release's archive and unpack what its Python layer needs, laid out as pip would."""

from __future__ import annotations

import hashlib
import tarfile
import zipfile
from collections.abc import Iterator
from pathlib import Path, PurePosixPath

from pypi_simple import DistributionPackage, PyPISimple

from flashinfer_compat.signatures.recorded import recorded

__all__ = ["SOURCES", "fetch", "kept", "unpack"]

SOURCES = (
    "trtllm_fused_moe_kernel_launcher.cu",
    "nv_internal/tensorrt_llm/thop/fp4Quantize.cpp",
    "fp4_gemm_cutlass.cu",
)
"""The C++ files, below csrc, whose exported functions the stand-in takes the place of."""

_CSRC = PurePosixPath("flashinfer/data/csrc")


def fetch(client: PyPISimple, package: DistributionPackage, folder: Path) -> Path:
    """The archive in `folder`, downloaded unless it is there; whole, or not there.

    Raises:
        pypi_simple.DigestMismatchError: what came is not what the index says.
    """
    archive = folder / package.filename
    if not _is_whole(archive, package.digests.get("sha256")):
        temporary = archive.with_name(f"{archive.name}.part")
        try:
            client.download_package(package, temporary)
            temporary.replace(archive)
        finally:
            temporary.unlink(missing_ok=True)
    return archive


def kept(version: str, folder: Path) -> Path | None:
    """The archive of a recorded release in `folder`, which needs no index to be known as whole; None where it is not.

    Raises:
        UnknownReleaseError: the release is not recorded.
    """
    release = recorded(version)
    archive = folder / release.archive
    return archive if _is_whole(archive, release.sha256) else None


def _is_whole(archive: Path, sha256: str | None) -> bool:
    return archive.is_file() and hashlib.sha256(archive.read_bytes()).hexdigest() == sha256


def unpack(archive: Path, version: str, folder: Path) -> None:
    """Write the Python files, their JSON data, the metadata and `SOURCES` below `folder`, which then is a search path.

    Raises:
        ValueError: the archive has no metadata.
    """
    found = False
    for name, content in _files(archive):
        path = _wanted(PurePosixPath(name), version)
        if path is None:
            continue
        found = found or path.name == "METADATA"
        target = folder / path
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_bytes(content())
    if not found:
        raise ValueError(f"{archive.name} has no METADATA or PKG-INFO")


def _wanted(path: PurePosixPath, version: str) -> PurePosixPath | None:
    """Where a file of the archive belongs; None where it is not needed."""
    if ".." in path.parts or path.is_absolute():
        return None
    if path.name == "METADATA" or path.parts == ("PKG-INFO",):
        return PurePosixPath(f"flashinfer_python-{version}.dist-info", "METADATA")
    inside = _CSRC / path.relative_to("csrc") if path.parts[0] == "csrc" else path
    if inside.is_relative_to(_CSRC):
        return inside if str(inside.relative_to(_CSRC)) in SOURCES else None
    # An sdist has tests, benchmarks and third-party code beside the package.
    return inside if inside.parts[0] == "flashinfer" and inside.suffix in (".py", ".json") else None


def _files(archive: Path) -> Iterator[tuple[str, _Content]]:
    if archive.suffix == ".whl":
        with zipfile.ZipFile(archive) as wheel:
            for name in wheel.namelist():
                yield name, _Content(wheel, name)
    else:
        with tarfile.open(archive) as sdist:
            for member in sdist:
                if member.isfile():
                    # An sdist has one folder around everything.
                    yield member.name.partition("/")[2], _Content(sdist, member)


class _Content:
    """A file's bytes, read when they are asked for."""

    def __init__(self, archive: zipfile.ZipFile | tarfile.TarFile, name: str | tarfile.TarInfo) -> None:
        self._archive, self._name = archive, name

    def __call__(self) -> bytes:
        if isinstance(self._archive, zipfile.ZipFile):
            assert isinstance(self._name, str)
            return self._archive.read(self._name)
        stream = self._archive.extractfile(self._name)
        assert stream is not None
        return stream.read()
