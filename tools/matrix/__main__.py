"""Run FlashInfer releases through fp4_moe on a CPU, with only their compiled kernels stood in for.

    python -m tools.matrix ci                      the seven releases that every change is tried with
    python -m tools.matrix all --output FOLDER     every published release
    python -m tools.matrix 0.6 newest 0.7.0        a line of releases, the newest, one

Exit code: 0 when every cell that must hold does, 1 when one does not, 2 when a release is not published.
What each cell means, and what it does not: docs/matrix.md.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path

from packaging.version import Version
from pypi_simple import PyPISimple

from tools.matrix.results import ReleaseResult
from tools.matrix.run import run_release
from tools.matrix.selection import select
from tools.matrix.tables import markdown, progress, summary, write_tables
from tools.record_signatures import archives

_OUTPUT = Path("build/matrix")
_JOBS = min(os.cpu_count() or 1, 4)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command."""
    parser = argparse.ArgumentParser(
        prog="python -m tools.matrix", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("versions", nargs="*", default=["ci"], help="releases, lines such as 0.6, ci, newest or all")
    parser.add_argument("--output", type=Path, default=_OUTPUT, help=f"where the tables go (default: {_OUTPUT})")
    parser.add_argument("--archives", type=Path, help="where archives are kept and found (default: nothing is kept)")
    parser.add_argument("--jobs", type=int, default=_JOBS, help=f"releases at a time (default: {_JOBS})")
    options = parser.parse_args(arguments)
    with PyPISimple() as client:
        published = archives(client)
    try:
        wanted = select(options.versions, list(published))
    except ValueError as error:
        parser.error(str(error))
    if options.archives is not None:
        options.archives.mkdir(parents=True, exist_ok=True)
    started = time.monotonic()
    results: list[ReleaseResult] = []
    with ThreadPoolExecutor(max(1, options.jobs)) as pool:
        running = [pool.submit(run_release, published[version], options.archives) for version in wanted]
        for number, done in enumerate(as_completed(running), 1):
            results.append(done.result())
            print(progress(results[-1], number, len(wanted), time.monotonic() - started), file=sys.stderr, flush=True)
    return report(sorted(results, key=lambda result: Version(result.version)), options.output)


def report(results: Sequence[ReleaseResult], folder: Path) -> int:
    """Write and print the tables; the exit code."""
    write_tables(results, folder)
    print(markdown(results))
    print(f"{summary(results)}; written to {folder}", file=sys.stderr)
    return int(any(result.failures for result in results))


if __name__ == "__main__":
    sys.exit(main())
