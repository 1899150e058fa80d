"""Which FLASHINFER_* variables each FlashInfer release names in its source, as recorded from the published archives.

`python -m tools.record_variables` makes the data file. It lists the releases in version order, and for each variable
the spans of releases that name it.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

from packaging.version import Version

from flashinfer_compat.errors import RecordedDataError

__all__ = ["DATA", "decode", "encode", "known_variables", "read_by", "spans"]

DATA = Path(__file__).parent / "data" / "variables.json"


def known_variables() -> frozenset[str]:
    """Every variable that any recorded release names."""
    return frozenset().union(*_load().values())


def read_by(version: Version) -> frozenset[str] | None:
    """The variables of the newest recorded release that is not newer than `version`; None before the first one."""
    older = [release for release in _load() if Version(release) <= version]
    return _load()[older[-1]] if older else None


def spans(variable: str) -> tuple[tuple[str, str], ...]:
    """The first and last release of each unbroken run of releases that name `variable`, oldest first."""
    return tuple((first, last) for first, last in _spans(variable, _load()))


@cache
def _load() -> Mapping[str, frozenset[str]]:
    try:
        return decode(json.loads(DATA.read_text("utf-8")))
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise RecordedDataError(f"{DATA}: {error!r}. Reinstall flashinfer-compat.") from error


def decode(data: Any) -> dict[str, frozenset[str]]:
    """The variables of each release, oldest first, from the data file's content."""
    order = list(data["releases"])
    found: dict[str, set[str]] = {release: set() for release in order}
    for name, runs in data["variables"].items():
        for first, last in runs:
            for release in order[order.index(first) : order.index(last) + 1]:
                found[release].add(name)
    return {release: frozenset(names) for release, names in found.items()}


def encode(found: Mapping[str, frozenset[str]]) -> dict[str, Any]:
    """The data file's content; `found` is in version order."""
    names = sorted(frozenset().union(*found.values()))
    return {"format": 1, "releases": list(found), "variables": {name: _spans(name, found) for name in names}}


def _spans(variable: str, found: Mapping[str, frozenset[str]]) -> list[list[str]]:
    runs: list[list[str]] = []
    named_before = False
    for release, names in found.items():
        named = variable in names
        if named and named_before:
            runs[-1][1] = release
        elif named:
            runs.append([release, release])
        named_before = named
    return runs
