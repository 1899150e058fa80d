"""Static readings kept on disk, keyed by the identity of every file they depend on.

The cache can only save time: a file that changed, an entry that cannot be read, or a folder that cannot be written
means reading the source again.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
from pathlib import Path

from flashinfer_compat import __version__
from flashinfer_compat.environment.reading import read_regular
from flashinfer_compat.files import write_whole
from flashinfer_compat.signatures.entry_points import ENTRY_POINTS
from flashinfer_compat.signatures.model import Symbol, SymbolTable
from flashinfer_compat.signatures.source import DirectorySource
from flashinfer_compat.signatures.static import read_source

__all__ = ["read_installed"]

_FORMAT = 2

_Identity = list[int] | None


def read_installed(root: Path, cache_directory: Path | None) -> SymbolTable:
    """The entry points of the FlashInfer whose package folder lies in `root`.

    Args:
        root: the folder that holds `flashinfer/`, such as site-packages.
        cache_directory: where readings are kept; None keeps none.
    """
    entry = None if cache_directory is None else cache_directory / f"signatures-{_key(root)}.json"
    cached = None if entry is None else _load(entry, root)
    if cached is not None:
        return cached
    source = _WatchedSource(root)
    table = read_source(source)
    # A reading with problems is not worth keeping.
    if entry is not None and not table.problems:
        _store(entry, source.files, table)
    return table


class _WatchedSource(DirectorySource):
    """Notes the identity of every file asked for, present or not."""

    def __init__(self, root: Path) -> None:
        super().__init__(root)
        self.files: dict[str, _Identity] = {}

    def read(self, path: str) -> bytes | None:
        # Before reading: a file that changes meanwhile must not match later.
        self.files[path] = _identity(self.root / path)
        return super().read(path)


def _key(root: Path) -> str:
    wanted = [_FORMAT, __version__, str(root.absolute()), [[entry.name, *entry.modules] for entry in ENTRY_POINTS]]
    return hashlib.sha256(json.dumps(wanted).encode()).hexdigest()[:24]


def _identity(path: Path) -> _Identity:
    """What changes whenever a file's content does: size, inode, and both times (ctime cannot be set back)."""
    try:
        status = path.stat()
    except OSError:
        return None
    return [status.st_size, status.st_ino, status.st_mtime_ns, status.st_ctime_ns]


def _load(entry: Path, root: Path) -> SymbolTable | None:
    try:
        digest, _, content = read_regular(entry).partition(b"\n")
        if digest != _digest(content):
            return None
        stored = json.loads(content)
        if any(_identity(root / path) != identity for path, identity in stored["files"].items()):
            return None
        symbols = [Symbol.from_data(data) for data in stored["symbols"]]
        return SymbolTable({symbol.name: symbol for symbol in symbols})
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None


def _store(entry: Path, files: dict[str, _Identity], table: SymbolTable) -> None:
    content = {
        "files": files,
        "symbols": [symbol.to_data() for symbol in table.symbols.values()],
    }
    encoded = json.dumps(content).encode()
    with contextlib.suppress(OSError):
        entry.parent.mkdir(parents=True, exist_ok=True)
        write_whole(entry, _digest(encoded) + b"\n" + encoded)


def _digest(content: bytes) -> bytes:
    return hashlib.sha256(content).hexdigest().encode()
