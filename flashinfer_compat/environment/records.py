"""Compares installed files with the RECORD of their distribution."""

from __future__ import annotations

import os
import stat
from pathlib import Path

from flashinfer_compat.environment.model import FileCheck, RecordCheck, RecordState

__all__ = ["check_record", "record_lists", "recorded_paths"]

_CHUNK_BYTES = 1 << 20
_SOURCES = "flashinfer/data/"
"""C++ that FlashInfer compiles: nine tenths of its files, and too many to look at by default."""


def check_record(metadata_path: str, location: str, level: FileCheck) -> RecordCheck:
    """Compare the files under `location` with `metadata_path`/RECORD, at `level`."""
    if level is FileCheck.NONE:
        return RecordCheck(RecordState.NOT_CHECKED, level, reason="not asked for")
    try:
        rows = _rows(metadata_path, leave_out=_SOURCES if level is FileCheck.SIZES else None)
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
        return tuple(path for path, _, _ in _rows(metadata_path))
    except Exception:
        return ()


def record_lists(metadata_path: str, path: str) -> bool | None:
    """Whether RECORD lists `path`, or None without a readable RECORD."""
    try:
        record = Path(metadata_path, "RECORD").read_bytes()
    except OSError:
        return None
    # A search in the bytes: RECORD can have 20,000 lines, and parsing them all takes far longer.
    entry = path.encode() + b","
    return record.startswith(entry) or b"\n" + entry in record


def _rows(metadata_path: str, leave_out: str | None = None) -> list[tuple[str, str, str]]:
    """RECORD's (path, hash, size), less compiled files and those below `leave_out`."""
    text = Path(metadata_path, "RECORD").read_bytes().decode("utf-8")
    # Parsing 20,000 lines as CSV takes half as long as looking at the files, and lines that need it are rare.
    lines = text.split("\n")
    rows = [line.rsplit(",", 2) for line in lines if line and not (leave_out and line.startswith(leave_out))]
    if '"' in text or "\r" in text or any(len(row) != 3 for row in rows):
        import csv

        rows = [[*row, "", ""] for row in csv.reader(text.splitlines(keepends=True), strict=True) if row]
        rows = [row for row in rows if not (leave_out and row[0].startswith(leave_out))]
    kept = [(row[0], row[1], row[2]) for row in rows if not row[0].endswith(".pyc")]
    for path, _, size in kept:
        if size and not size.isdecimal():
            raise ValueError(f"{path} has the size {size!r}")
    return kept


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
