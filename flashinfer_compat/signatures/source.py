"""Where Python source is read from; `archives` has the wheels and sdists."""

from __future__ import annotations

from pathlib import Path
from typing import Protocol

__all__ = ["DirectorySource", "Source"]


class Source(Protocol):
    """Files by their path relative to the folder that holds the package, with forward slashes."""

    def read(self, path: str) -> bytes | None:
        """The file's bytes; None where there is no such file."""
        ...


class DirectorySource:
    """The files under a folder, such as site-packages."""

    def __init__(self, root: Path) -> None:
        self.root = root

    def read(self, path: str) -> bytes | None:
        """The file's bytes; None where there is no such file."""
        try:
            return (self.root / path).read_bytes()
        except (FileNotFoundError, NotADirectoryError, IsADirectoryError):
            return None
