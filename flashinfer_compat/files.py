"""Writes a file whole or not at all."""

from __future__ import annotations

import os
import shutil
import uuid
from pathlib import Path

__all__ = ["write_named", "write_whole"]

_KERNELS = ("/dev/", "/proc/")
"""Where names stand for what is open or attached, such as /dev/stdout."""


def write_whole(path: Path, content: str | bytes) -> None:
    """Write under a temporary name beside `path` and rename: nobody ever sees a part, and a failure leaves no file.

    Whatever had the name is replaced, a pipe or a link too; a file's permissions are kept.

    Raises:
        OSError: the folder is missing or cannot be written.
    """
    # Not the whole name, which may be as long as names may be.
    temporary = path.with_name(f"{path.name[:32]}.{uuid.uuid4().hex}.tmp")
    try:
        temporary.write_bytes(_bytes(content))
        if path.is_file():
            shutil.copymode(path, temporary)
        temporary.replace(path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


def write_named(path: Path, content: str | bytes) -> None:
    """`write_whole` to what a user has named: a link is followed, a device or pipe is written to as it is.

    Raises:
        OSError: as `write_whole`, or the device takes no more.
    """
    if str(path.absolute()).startswith(_KERNELS) or (path.exists() and not path.is_file()):
        path.write_bytes(_bytes(content))
    else:
        write_whole(Path(os.path.realpath(path)), content)


def _bytes(content: str | bytes) -> bytes:
    return content.encode("utf-8") if isinstance(content, str) else content
