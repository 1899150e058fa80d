"""What the processes of the matrix have in common: arguments in, a file of cells out."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterable
from pathlib import Path

from flashinfer_compat.files import write_whole
from tools.matrix.results import Cell

__all__ = ["main", "read"]


def main(cells: Callable[[str, Path], Iterable[Cell]]) -> int:
    """Run `cells(version, folder)` for the command line's VERSION FOLDER OUTPUT.json.

    Output goes to a file because FlashInfer and torch print what they like.
    """
    version, folder, output = sys.argv[1:]
    write_whole(Path(output), json.dumps([cell.to_dict() for cell in cells(version, Path(folder))]))
    return 0


def read(path: Path) -> list[Cell]:
    """The cells that a process wrote."""
    return [Cell.from_dict(one) for one in json.loads(path.read_text("utf-8"))]
