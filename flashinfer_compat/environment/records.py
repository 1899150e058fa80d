"""Compares installed files with the RECORD of their distribution."""

from __future__ import annotations

import os
import stat
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING

from flashinfer_compat.environment.model import FileCheck, RecordCheck, RecordState
from flashinfer_compat.environment.reading import read_regular

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["check_record", "record_lists", "recorded_paths"]

_CHUNK_BYTES = 1 << 20
_FLASHINFER = "flashinfer"
"""What the paths of its distributions begin with: flashinfer/, flashinfer_cubin/, flashinfer_jit_cache/."""
_MOE_SOURCES = (
    "flashinfer/data/csrc/trtllm",
    "flashinfer/data/csrc/fused_moe/trtllm",
    "flashinfer/data/csrc/nv_internal/",
    "flashinfer/data/include/flashinfer/trtllm/",
)
"""What FP4 MoE and its quantizer are compiled from (FlashInfer 0.7.4, jit/fused_moe.py and jit/fp4_quantization.py)."""
_MOE_CUBINS = "/batched_gemm"
"""In the paths of its cubins (FlashInfer 0.7.4, artifacts.py, `ArtifactPath.TRTLLM_GEN_BMM`)."""
_APART = ("flashinfer/data/", "flashinfer/experimental/", "flashinfer/moe_ep/")
"""Where more than half of FlashInfer's Python files are; import flashinfer loads three of them (0.7.4)."""

_Row = tuple[str, str, str]


def check_record(metadata_path: str, location: str, level: FileCheck) -> RecordCheck:
    """Compare the files under `location` with `metadata_path`/RECORD, at `level`."""
    if level is FileCheck.NONE:
        return RecordCheck(RecordState.NOT_CHECKED, level, reason="not asked for")
    try:
        rows = _rows(metadata_path, _wanted(metadata_path) if level is FileCheck.MOE else _is_kept)
    except (FileNotFoundError, NotADirectoryError):
        return RecordCheck(RecordState.NO_RECORD, level, reason=f"{metadata_path} has no RECORD")
    except Exception as error:
        return RecordCheck(RecordState.NOT_CHECKED, level, reason=f"RECORD cannot be read: {error}")
    missing, changed = [], []
    for path, digest, size in rows:
        agrees = _agrees(_absolute(location, path), digest if level is FileCheck.HASHES else "", size)
        if agrees is None:
            missing.append(path)
        elif not agrees:
            changed.append(path)
    state = RecordState.DIFFERS if missing or changed else RecordState.MATCHES
    return RecordCheck(state, level, len(rows), tuple(missing), tuple(changed))


def recorded_paths(metadata_path: str) -> tuple[str, ...]:
    """The paths RECORD lists, as written; none where it is missing or cannot be read."""
    try:
        return tuple(path for path, _, _ in _rows(metadata_path, _is_kept))
    except Exception:
        return ()


def record_lists(metadata_path: str, path: str) -> bool | None:
    """Whether RECORD lists `path`, or None without a readable RECORD."""
    try:
        record = read_regular(Path(metadata_path, "RECORD"))
    except OSError:
        return None
    # A search in the bytes: RECORD can have 20,000 lines, and parsing them all takes far longer.
    entry = path.encode() + b","
    return record.startswith(entry) or b"\n" + entry in record


def _rows(metadata_path: str, is_wanted: Callable[[str], bool]) -> tuple[_Row, ...]:
    """RECORD's (path, hash, size) of the lines wanted."""
    path = f"{metadata_path}/RECORD"
    status = os.stat(path)  # noqa: PTH116
    return _parsed(path, is_wanted, status.st_ino, status.st_size, status.st_mtime_ns)


@lru_cache(maxsize=16)
def _parsed(path: str, is_wanted: Callable[[str], bool], *_identity: int) -> tuple[_Row, ...]:
    """Of one state of a RECORD: reading one of 20,000 lines takes longer than looking at the files of FP4 MoE."""
    text = read_regular(Path(path)).decode("utf-8").replace("\r\n", "\n")
    # Parsing as CSV takes as long again, and lines that need it are rare.
    rows = [line.rsplit(",", 2) for line in text.split("\n") if line and is_wanted(line)]
    if '"' in text or "\r" in text or any(len(row) != 3 for row in rows):
        import csv

        parsed = csv.reader(text.splitlines(keepends=True), strict=True)
        rows = [[*row, "", ""] for row in parsed if row and is_wanted(",".join(row))]
    for row in rows:
        if row[2] and not row[2].isdecimal():
            raise ValueError(f"{row[0]} has the size {row[2]!r}")
    return tuple((row[0], row[1], row[2]) for row in rows)


def _is_kept(line: str) -> bool:
    """Whether a line of RECORD is not of a compiled file: deleting or renewing those is normal."""
    return ".pyc," not in line


def _wanted(metadata_path: str) -> Callable[[str], bool]:
    """Which lines count for FP4 MoE: of FlashInfer's own distributions, others than of the libraries beside it."""
    return _runs_moe if Path(metadata_path).name.startswith(_FLASHINFER) else _is_imported


def _is_imported(line: str) -> bool:
    """Whether a line's file lies where it can be imported: no script, and no metadata."""
    return _is_kept(line) and not line.startswith(("../", "/")) and ".dist-info/" not in line


def _runs_moe(line: str) -> bool:
    """Whether FP4 MoE may run a line's file of FlashInfer, or is compiled from it."""
    if not line.startswith(_FLASHINFER):
        return False  # Its command, and what its build left at the top.
    if ".py," in line:
        return not line.startswith(_APART)
    return ".so," in line or line.startswith(_MOE_SOURCES) or _MOE_CUBINS in line


def _absolute(location: str, path: str) -> str:
    return path if path.startswith("/") else f"{location}/{path}"


def _agrees(path: str, digest: str, size: str) -> bool | None:
    """Whether a file is as recorded; None where it is missing or cannot be read."""
    try:
        status = os.stat(path)  # noqa: PTH116 (thousands of files: a Path for each would double the time)
        if not stat.S_ISREG(status.st_mode) or (size and status.st_size != int(size)):
            return False
        return not digest or _digest_agrees(path, digest)
    except (OSError, ValueError):  # A null byte in the path is a ValueError.
        return None


def _digest_agrees(path: str, recorded: str) -> bool:
    import base64
    import hashlib

    algorithm, _, expected = recorded.partition("=")
    if algorithm not in hashlib.algorithms_available:
        return True  # No way to compare: the size has agreed.
    actual = hashlib.new(algorithm)
    with Path(path).open("rb") as file:
        while chunk := file.read(_CHUNK_BYTES):
            actual.update(chunk)
    return base64.urlsafe_b64encode(actual.digest()).rstrip(b"=").decode() == expected.rstrip("=")
