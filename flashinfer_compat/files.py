"""Writes a file whole or not at all."""

from __future__ import annotations

import os
import shutil
import uuid
from pathlib import Path

__all__ = ["write_whole"]

_KERNELS = ("/dev/", "/proc/")
"""Where names stand for what is open or attached, such as /dev/stdout."""


def write_whole(path: Path, content: str | bytes) -> None:
    """Write under a temporary name beside the file and rename: nobody ever sees a part, and a failure leaves no file.

    A link is followed, and a file that was there keeps its permissions. Devices and pipes are written to as they are.

    Raises:
        OSError: the folder is missing or cannot be written.
    """
    data = content.encode("utf-8") if isinstance(content, str) else content
    if str(path.absolute()).startswith(_KERNELS) or (path.exists() and not path.is_file()):
        path.write_bytes(data)
        return
    path = Path(os.path.realpath(path))
    # Not the whole name beside it, which may be as long as names may be.
    temporary = path.with_name(f"{path.name[:32]}.{uuid.uuid4().hex}.tmp")
    try:
        temporary.write_bytes(data)
        if path.exists():
            shutil.copymode(path, temporary)
        temporary.replace(path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
