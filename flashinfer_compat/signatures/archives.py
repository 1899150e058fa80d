"""Python source inside a wheel or sdist, read without unpacking it."""

from __future__ import annotations

import tarfile
import zipfile
from pathlib import Path

__all__ = ["ArchiveSource"]


class ArchiveSource:
    """The Python files and the metadata of a wheel or a gzipped sdist, read without unpacking to disk."""

    def __init__(self, archive: Path) -> None:
        wanted = (".py", "/METADATA", "/PKG-INFO")
        self._files: dict[str, bytes] = {}
        if archive.suffix == ".whl":
            with zipfile.ZipFile(archive) as wheel:
                self._files = {name: wheel.read(name) for name in wheel.namelist() if name.endswith(wanted)}
        else:
            with tarfile.open(archive) as sdist:
                for member in sdist:
                    stream = sdist.extractfile(member) if member.isfile() and member.name.endswith(wanted) else None
                    if stream is not None:
                        # An sdist has one folder around everything.
                        self._files[member.name.partition("/")[2]] = stream.read()

    def read(self, path: str) -> bytes | None:
        """The file's bytes; None where there is no such file."""
        return self._files.get(path)

    def metadata(self) -> bytes:
        """The archive's core metadata.

        Raises:
            KeyError: the archive has none.
        """
        names = [name for name in self._files if name == "PKG-INFO" or name.endswith(".dist-info/METADATA")]
        return self._files[min(names, key=len) if names else "METADATA"]
