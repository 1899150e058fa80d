"""Writes a file whole or not at all."""

from __future__ import annotations

import uuid
from pathlib import Path

__all__ = ["write_whole"]


def write_whole(path: Path, content: str | bytes) -> None:
    """Write under a temporary name beside `path` and rename: nobody ever sees a part, and a failure leaves no file.

    Raises:
        OSError: the folder is missing or cannot be written.
    """
    temporary = path.with_name(f"{path.name}.{uuid.uuid4().hex}.tmp")
    data = content.encode("utf-8") if isinstance(content, str) else content
    try:
        temporary.write_bytes(data)
        temporary.replace(path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
