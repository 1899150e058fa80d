"""Run FlashInfer releases through fp4_moe on a CPU, with only their compiled kernels stood in for.

    python -m tools.matrix ci                      the seven releases that every change is tried with
    python -m tools.matrix all --output FOLDER     every published release
    python -m tools.matrix 0.6 newest 0.7.0        a line of releases, the newest, one

Exit code: 0 when every cell that must hold does, 1 when one does not, 2 when it cannot be run: a release is not
published, the index or a folder cannot be used, or a package is missing.
What each cell means, and what it does not: docs/matrix.md.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from functools import partial
from pathlib import Path

from packaging.version import Version

from flashinfer_compat.signatures.recorded import releases
from tools.matrix.results import ReleaseResult
from tools.matrix.selection import named_exactly, select
from tools.matrix.tables import markdown, progress, summary, write_tables

_OUTPUT = Path("build/matrix")
_JOBS = min(os.cpu_count() or 1, 4)

_Job = Callable[[], ReleaseResult]


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
    if options.jobs < 1:
        parser.error(f"argument --jobs: must be at least 1, but is {options.jobs}")
    for name in ("output", "archives"):
        folder = getattr(options, name)
        problem = folder and _obstacle(folder)
        if problem:
            parser.error(f"argument --{name}: {folder} cannot be written: {problem}")
    try:
        jobs = _jobs(options.versions, options.archives)
    except ImportError as error:
        parser.error(f"{error.name} is not installed; pip install -r tools/matrix/requirements.txt")
    except ValueError as error:
        parser.error(str(error))
    # What requests raises is an OSError.
    except OSError as error:
        parser.error(f"the package index cannot be asked: {error}")
    return report(_run(jobs, options.jobs), options.output)


def _obstacle(folder: Path) -> OSError | None:
    """Why nothing can be written there, known before an hour of work."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            return None
    except OSError as error:
        return error


def _jobs(words: Sequence[str], folder: Path | None) -> list[_Job]:
    """What runs each release that the words name. The index is asked only where the archives on disk do not answer."""
    from pypi_simple import PyPISimple

    from tools.matrix.archives import fetch, kept
    from tools.matrix.run import run_release
    from tools.record_signatures import archives

    exact = named_exactly(words, releases())
    found = {one: kept(one, folder) for one in exact} if folder and exact else {}
    here = [(version, path) for version, path in found.items() if path is not None]
    if here and len(here) == len(found):
        return [partial(run_release, version, path.name, partial(_given, path)) for version, path in here]
    with PyPISimple() as client:
        published = archives(client)

    def download(version: str, temporary: Path) -> Path:
        # A client for each release: its connections are not made for several threads.
        with PyPISimple() as client:
            return fetch(client, published[version], folder or temporary)

    return [
        partial(run_release, version, published[version].filename, partial(download, version))
        for version in select(words, list(published))
    ]


def _given(archive: Path, temporary: Path) -> Path:
    """An archive that is there already, for a run in the folder `temporary`."""
    return archive


def _run(jobs: Sequence[_Job], at_a_time: int) -> list[ReleaseResult]:
    """The results, oldest release first."""
    started = time.monotonic()
    results: list[ReleaseResult] = []
    with ThreadPoolExecutor(at_a_time) as pool:
        for number, done in enumerate(as_completed([pool.submit(job) for job in jobs]), 1):
            results.append(done.result())
            print(progress(results[-1], number, len(jobs), time.monotonic() - started), file=sys.stderr, flush=True)
    return sorted(results, key=lambda result: Version(result.version))


def report(results: Sequence[ReleaseResult], folder: Path) -> int:
    """Write and print the tables; the exit code."""
    write_tables(results, folder)
    print(markdown(results))
    print(f"{summary(results)}; written to {folder}", file=sys.stderr)
    return int(any(result.failures for result in results))


if __name__ == "__main__":
    sys.exit(main())
