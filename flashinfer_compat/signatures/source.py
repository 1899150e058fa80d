"""Where Python source is read from; `archives` has the wheels and sdists."""

from __future__ import annotations

from pathlib import Path
from typing import Protocol

from flashinfer_compat.environment.reading import read_regular

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
        """The file's bytes; None where there is no such file.

        Raises:
            OSError: something is there that cannot be read, such as a pipe.
        """
        place = self.root / path
        try:
            return None if place.is_dir() else read_regular(place)
        except (FileNotFoundError, NotADirectoryError):
            return None
