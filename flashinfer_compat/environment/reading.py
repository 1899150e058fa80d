"""What the gatherers of every section share."""

from __future__ import annotations

import stat
import sys
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from flashinfer_compat.environment.model import Section
from flashinfer_compat.errors import FlashInferCompatError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

__all__ = ["NotAvailableError", "gather", "path_entries", "read_regular"]

T = TypeVar("T")


class NotAvailableError(FlashInferCompatError):
    """A fact that this machine does not have; the message becomes the section's reason as it is."""


def gather(read: Callable[[], T]) -> Section[T]:
    """The section `read` returns the value of; whatever it raises becomes the reason."""
    try:
        return Section(value=read())
    except NotAvailableError as error:
        return Section(reason=str(error))
    except Exception as error:
        return Section(reason=f"{type(error).__name__}: {error}")


def read_regular(path: Path, size: int = -1) -> bytes:
    """The content of a regular file, or its first `size` bytes; opening a pipe would wait for somebody to write.

    Raises:
        OSError: the file cannot be read, or is none.
    """
    if not stat.S_ISREG(path.stat().st_mode):
        raise OSError(f"{path} is no regular file")
    with path.open("rb") as file:
        return file.read(size)


def path_entries(search_path: Sequence[str] | None) -> tuple[str, ...]:
    """The directories of a search path (None: `sys.path`) in order, each once however often it is linked to."""
    entries: dict[Path, str] = {}
    for entry in sys.path if search_path is None else search_path:
        directory = entry or str(Path.cwd())
        entries.setdefault(_resolved(directory), directory)
    return tuple(entries.values())


def _resolved(entry: str) -> Path:
    try:
        return Path(entry).resolve()
    except (OSError, RuntimeError, ValueError):
        return Path(entry)  # A loop of links, or a null byte; listing it will say what is wrong.
