"""One release as it is on this machine: does it import, and are its signatures what its source says.

    python -m tools.matrix.plain VERSION FOLDER OUTPUT.json

FOLDER holds the unpacked release and comes first on the search path.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from pathlib import Path

from packaging.version import Version

from flashinfer_compat.environment import cache_directory
from flashinfer_compat.features.known_issues import KNOWN_ISSUES
from flashinfer_compat.signatures.cache import read_installed
from flashinfer_compat.signatures.live import differences, read_live
from tools.matrix.child import main
from tools.matrix.results import Cell, State, failed

__all__ = ["compare_signatures"]

_IMPORT_ISSUE = "import-needs-cuda"


def _cells(version: str, folder: Path) -> Iterator[Cell]:
    try:
        module = importlib.import_module("flashinfer")
    except (Exception, SystemExit) as error:
        issue = next(one for one in KNOWN_ISSUES if one.id == _IMPORT_ISSUE)
        known = issue.affects(Version(version)) and isinstance(error, AssertionError)
        if known:
            yield Cell("release", "import", State.KNOWN, f"{_IMPORT_ISSUE}: {error!r}")
        else:
            yield from failed("release", ["import"], error)
        yield Cell("release", "signatures", State.ABSENT, "not compared here: the import fails")
        return
    where = Path(str(module.__file__)).resolve()
    if not where.is_relative_to(folder.resolve()):
        yield Cell("release", "import", State.FAILED, f"another flashinfer was imported: {where}")
        return
    yield Cell("release", "import", State.PASSED)
    yield compare_signatures(folder, "signatures")


def compare_signatures(folder: Path, column: str) -> Cell:
    """Whether reading the source gives the signatures that the imported package has."""
    directory = cache_directory().value
    static, live = read_installed(folder, Path(directory) if directory else None), read_live()
    problems = [f"{name}: {why}" for table in (static, live) for name, why in table.problems.items()]
    found = [*problems, *differences(static, live)]
    compared = len(static.symbols.keys() & live.symbols.keys())
    if found:
        return Cell("release", column, State.FAILED, "\n".join(found))
    return Cell("release", column, State.PASSED, f"{compared} of {len(static.symbols)} compared")


if __name__ == "__main__":
    sys.exit(main(_cells))
