"""The signatures of every FlashInfer release since 0.2.9, shipped with the package.

The data file lists the releases in version order; each holds only the entry points that differ from the release before
it. `python -m tools.record_signatures` makes it from the published archives.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cache, cached_property
from pathlib import Path
from types import MappingProxyType
from typing import Any

from packaging.version import InvalidVersion, Version

from flashinfer_compat.errors import RecordedDataError, UnknownReleaseError
from flashinfer_compat.signatures.model import Symbol, SymbolTable
from flashinfer_compat.versions import parse_version

__all__ = ["DATA", "RecordedRelease", "recorded", "releases"]

DATA = Path(__file__).parent / "data" / "flashinfer.json"


@dataclass(frozen=True)
class RecordedRelease:
    """What was read from one release's archive."""

    version: str
    archive: str
    """The archive's file name."""
    sha256: str
    requires_python: str | None
    requires: tuple[str, ...]
    """Requires-Dist."""
    texts: Mapping[str, str]
    """By entry point name: the symbol in `Symbol.to_text` form."""

    @cached_property
    def symbols(self) -> SymbolTable:
        """The release's entry points."""
        return SymbolTable({name: Symbol.from_text(name, text) for name, text in self.texts.items()})


def releases() -> tuple[str, ...]:
    """The recorded releases, oldest first, release candidates included."""
    return tuple(_load())


def recorded(version: str) -> RecordedRelease:
    """The record of a release; a local part such as `+cu130` is ignored.

    Raises:
        UnknownReleaseError: the release is not recorded; the error names the newest final one of the line that was
            named, such as 0.7, or else the newest before the release.
    """
    known, version = _load(), str(version)
    try:
        return known[Version(version).public]
    except (KeyError, InvalidVersion):
        raise UnknownReleaseError("flashinfer version", version, known, _meant(version, known)) from None


def _meant(text: str, known: Iterable[str]) -> str | None:
    wanted = parse_version(text)
    if wanted is None:
        return None
    newest_first = [Version(one) for one in reversed(tuple(known))]
    before = [one for one in newest_first if one < wanted]
    if not wanted.is_prerelease:
        finals = [one for one in newest_first if not one.is_prerelease]
        line = [one for one in finals if one.release[: len(wanted.release)] == wanted.release]
        before = [*line, *(one for one in finals if one < wanted), *before]
    return next(map(str, before), None)


@cache
def _load() -> Mapping[str, RecordedRelease]:
    try:
        data = json.loads(DATA.read_text("utf-8"))
        return MappingProxyType(decode(data))
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise RecordedDataError(f"{DATA}: {error!r}. Reinstall flashinfer-compat.") from error


def decode(data: Any) -> dict[str, RecordedRelease]:
    """The releases from the data file's content."""
    found: dict[str, RecordedRelease] = {}
    texts: dict[str, str] = {}
    requires: tuple[str, ...] = ()
    for row in data["releases"]:
        changes = row["changes"]
        texts = {name: text for name, text in {**texts, **changes}.items() if text is not None}
        requires = tuple(row.get("requires", requires))
        found[row["version"]] = RecordedRelease(
            row["version"], row["archive"], row["sha256"], row.get("requires_python"), requires, MappingProxyType(texts)
        )
    return found


def encode(records: list[RecordedRelease]) -> dict[str, Any]:
    """The data file's content: each release as its changes to the one before it."""
    rows = []
    texts: Mapping[str, str] = {}
    requires: tuple[str, ...] = ()
    for record in sorted(records, key=lambda one: Version(one.version)):
        changes: dict[str, str | None] = {name: None for name in texts if name not in record.texts}
        changes.update({name: text for name, text in record.texts.items() if texts.get(name) != text})
        row: dict[str, Any] = {"version": record.version, "archive": record.archive, "sha256": record.sha256}
        if record.requires_python:
            row["requires_python"] = record.requires_python
        if record.requires != requires:
            row["requires"] = list(record.requires)
        row["changes"] = dict(sorted(changes.items()))
        rows.append(row)
        texts, requires = record.texts, record.requires
    return {"format": 1, "releases": rows}
