"""The files that bench writes: checked before it measures, and named when they cannot be written in the end."""

from __future__ import annotations

import argparse
import contextlib
import os
from collections.abc import Iterator
from pathlib import Path

from flashinfer_compat.errors import ArgumentError, DependencyMissingError
from flashinfer_compat.policy import PolicyError
from flashinfer_compat.policy_files import read_policy

__all__ = ["CACHE", "STDOUT", "check_files", "told"]

STDOUT = "-"
"""In place of --json's file."""
CACHE = object()
"""In place of --write-policy's."""

_LONGEST = 255
"""Bytes of a name, which most file systems take."""


def check_files(options: argparse.Namespace) -> None:
    """What could not be written in the end is refused before anything is measured.

    Raises:
        ArgumentError: a name is empty, another option's too, a folder's, too long, or in a folder that is missing or
            cannot be written.
        DependencyMissingError: a plot is asked for without matplotlib.
        PolicyError: the file to write a policy to is there and none.
    """
    given = {"--json": options.json, "--plot": options.plot, "--write-policy": options.write_policy}
    seen: dict[str, str] = {}
    for name, file in given.items():
        if file in (None, False, STDOUT, CACHE):
            continue
        if not str(file):
            raise ArgumentError(name, "a file name", "an empty one", "Name a file, or leave the option out.")
        path, folder = Path(file), Path(file).absolute().parent
        if (other := seen.setdefault(os.path.realpath(path), name)) != name:
            raise ArgumentError(name, f"another file than {other}'s", str(path))
        length = len(os.fsencode(path.name))
        if length > _LONGEST:
            raise ArgumentError(name, f"a file name of at most {_LONGEST} bytes", f"{length} bytes")
        if path.is_dir():
            raise ArgumentError(name, "a file name", f"the folder {path}", "Name a file in it.")
        if not folder.is_dir():
            raise ArgumentError(name, "a file name in an existing folder", str(path), "Create the folder.")
        # A device is written to as it is.
        if (path.is_file() or not path.exists()) and not os.access(folder, os.W_OK | os.X_OK):
            raise ArgumentError(name, "a file name in a folder that can be written", str(path))
    if options.write_policy not in (None, CACHE) and Path(options.write_policy).exists():
        _check_policy(Path(options.write_policy))
    if options.plot is None:
        return
    try:
        from flashinfer_compat.bench.plot import SUFFIXES
    except ImportError as error:
        raise DependencyMissingError("matplotlib", "bench --plot") from error
    if options.plot.suffix not in SUFFIXES:
        raise ArgumentError("--plot", f"a name that ends in {' or '.join(SUFFIXES)}", str(options.plot))


def _check_policy(path: Path) -> None:
    try:
        read_policy(path)
    except PolicyError as error:
        way_out = "Remove it, or name another file."
        raise PolicyError(f"--write-policy {path}", error.expected, error.actual, way_out) from error


@contextlib.contextmanager
def told(failures: list[str], option: str, file: object) -> Iterator[None]:
    """A file that cannot be written loses nothing of what was measured."""
    try:
        yield
    except OSError as error:
        # Its own text names the temporary file.
        failures.append(f"{option}: expected a file that can be written, got {file} ({error.strerror or error}).")
    except PolicyError as error:
        failures.append(f"{option}: {error}")
