"""Tile shapes that were measured on this machine, as they lie in the user's cache, and which of them a call takes."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from flashinfer_compat.backends.triton.tiles import Product, Tiles
from flashinfer_compat.environment import cache_directory
from flashinfer_compat.environment.reading import read_regular
from flashinfer_compat.files import write_whole

__all__ = ["Cut", "Measured", "load", "nearest", "store"]

_FORMAT = 1
_APART = 1.5
"""Every count between two measured ones, one twice the other, is that near to one of them."""


@dataclass(frozen=True)
class Cut:
    """The tiles of a layer's call."""

    experts: Tiles
    shared: Tiles | None
    """Of an NVFP4 shared MLP apart."""


@dataclass(frozen=True)
class Measured:
    """The cut found for one number of tokens."""

    cut: Cut
    microseconds: float
    """Of one call."""
    untuned_microseconds: float
    """With the tiles of `tiles_for`."""


def nearest(cuts: Mapping[int, Cut], tokens: int) -> Cut | None:
    """What was measured for the count nearest to `tokens` by ratio, the smaller of two as near.

    None where none is within a factor of 1.5.
    """
    exact = cuts.get(tokens)
    if exact is not None or not cuts:
        return exact
    found = min(cuts, key=lambda measured: (_ratio(measured, tokens), measured))
    return cuts[found] if _ratio(found, tokens) <= _APART else None


def _ratio(one: int, other: int) -> float:
    return max(one, other) / min(one, other)


def load(facts: Mapping[str, Any]) -> dict[int, Measured]:
    """What was found here before under exactly these facts, by tokens; nothing where it cannot be read."""
    path = _path(facts)
    if path is None:
        return {}
    try:
        stored = json.loads(read_regular(path))
        if stored["facts"] != facts:
            return {}
        return {int(tokens): _measured(one) for tokens, one in stored["tokens"].items()}
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return {}


def store(facts: Mapping[str, Any], found: Mapping[int, Measured]) -> None:
    """Keep what was found, beside what others kept meanwhile; nothing where the folder cannot be written."""
    path = _path(facts)
    if path is None:
        return
    together = {**load(facts), **found}
    content = {"facts": facts, "tokens": {str(tokens): asdict(one) for tokens, one in sorted(together.items())}}
    with suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True)
        write_whole(path, json.dumps(content, indent=1))


def _path(facts: Mapping[str, Any]) -> Path | None:
    folder = cache_directory().value
    if folder is None:
        return None
    digest = hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()
    return Path(folder) / f"triton-tiles-{_FORMAT}-{digest[:24]}.json"


def _measured(stored: Mapping[str, Any]) -> Measured:
    cut = stored["cut"]
    shared = None if cut["shared"] is None else _tiles(cut["shared"])
    return Measured(
        Cut(_tiles(cut["experts"]), shared), float(stored["microseconds"]), float(stored["untuned_microseconds"])
    )


def _tiles(stored: Mapping[str, Any]) -> Tiles:
    return Tiles(_whole(stored["block_t"]), _product(stored["gate_up"]), _product(stored["down"]))


def _product(stored: Mapping[str, Any]) -> Product:
    return Product(**{name: _whole(value) for name, value in stored.items()})


def _whole(value: Any) -> int:
    if type(value) is not int:
        raise TypeError(value)
    return value
