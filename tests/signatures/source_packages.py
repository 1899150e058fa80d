"""Writes small packages to read, and reads them both ways."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

from flashinfer_compat.signatures.entry_points import EntryPoint
from flashinfer_compat.signatures.live import read_live
from flashinfer_compat.signatures.source import DirectorySource
from flashinfer_compat.signatures.static import read_source

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

    from flashinfer_compat.signatures.model import SymbolTable


def write(root: Path, files: Mapping[str, str | bytes]) -> Path:
    for name, content in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return root


def entries(*names: str, module: str = "pkg") -> list[EntryPoint]:
    return [EntryPoint(name, (module,)) for name in names]


def static(root: Path, *names: str, module: str = "pkg") -> SymbolTable:
    return read_source(DirectorySource(root), entries(*names, module=module))


def live(root: Path, entry_points: Sequence[EntryPoint]) -> SymbolTable:
    """The entry points as this very process imports them from `root`; nothing imported stays behind."""
    before = set(sys.modules)
    sys.path.insert(0, str(root))
    try:
        return read_live(entry_points)
    finally:
        sys.path.remove(str(root))
        sys.path_importer_cache.pop(str(root), None)
        for name in set(sys.modules) - before:
            del sys.modules[name]


def text(table: SymbolTable, name: str = "f") -> str | None:
    """The recorded form of an entry point that was read without problems."""
    assert not table.problems
    symbol = table.get(name)
    return symbol.to_text() if symbol else None
