"""Record which FLASHINFER_* environment variables each FlashInfer release names in its source.

    python -m tools.record_variables                   add the releases that are not recorded yet
    python -m tools.record_variables --all             read every release again (about 2.5 GB of downloads)
    python -m tools.record_variables --source FOLDER   read unpacked archives instead: one folder for each release

A name counts when a string in Python, C++ or CUDA source is exactly that name. That takes in variables that only the
build of a release reads: the doctor rather misses one than calls a known one unknown.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
import tarfile
import tempfile
import zipfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path

from packaging.version import Version
from pypi_simple import PyPISimple

from flashinfer_compat.doctor.variables import DATA, decode, encode
from flashinfer_compat.files import write_whole
from flashinfer_compat.signatures.recorded import releases
from tools.record_signatures import archives

_SUFFIXES = (".py", ".cu", ".cuh", ".h", ".hpp", ".cpp", ".jinja")
_FOREIGN = re.compile(r"(^|/)(tests?|benchmarks?|docs?|examples|cutlass|spdlog|3rdparty)/")
_NAME = re.compile(rb"""["'](FLASHINFER_[A-Z0-9_]*[A-Z0-9])["']""")
_NO_VARIABLES = frozenset(
    {
        "FLASHINFER_BLACKWELL_BF16_FP4_MODULE_IDENT",
        "FLASHINFER_CACHE_DIR",
        "FLASHINFER_CAKE_GROUPED_MXFP8_DEVICE_PLACEHOLDER",
        "FLASHINFER_CUDA_VERSION",
        "FLASHINFER_MODULE_IDS",
    }
)
"""Strings that are labels, macros or placeholders: no release reads a variable of that name."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; 0 when every wanted release was recorded."""
    parser = argparse.ArgumentParser(prog="python -m tools.record_variables", description=__doc__)
    parser.add_argument("--all", action="store_true", help="read every release again")
    parser.add_argument("--source", type=Path, metavar="FOLDER", help="unpacked archives, in folders named by release")
    options = parser.parse_args(arguments)
    found = {} if options.all or not DATA.exists() else decode(json.loads(DATA.read_text("utf-8")))
    wanted = [version for version in releases() if version not in found]
    for number, (version, names) in enumerate(_read(wanted, options.source), 1):
        found[version] = names
        print(f"[{number}/{len(wanted)}] {version}: {len(names)} variables", file=sys.stderr, flush=True)
        _write(found)
    print(f"{len(found)} releases recorded in {DATA}")
    return 0


def _read(versions: Iterable[str], source: Path | None) -> Iterator[tuple[str, frozenset[str]]]:
    if source is not None:
        for version in versions:
            yield version, names_in(_files_of_folder(source / version))
        return
    with PyPISimple() as client:
        published = archives(client)
        for version in versions:
            with tempfile.TemporaryDirectory() as folder:
                archive = Path(folder) / published[version].filename
                client.download_package(published[version], archive)
                yield version, names_in(_files_of_archive(archive))


def names_in(files: Iterable[tuple[str, bytes]]) -> frozenset[str]:
    """The variables that FlashInfer's own files name; `files` are (path, content)."""
    own = (content for path, content in files if path.endswith(_SUFFIXES) and not _FOREIGN.search(path))
    return frozenset(name.decode() for content in own for name in _NAME.findall(content)) - _NO_VARIABLES


def _files_of_folder(folder: Path) -> Iterator[tuple[str, bytes]]:
    for path in folder.rglob("*"):
        if path.suffix in _SUFFIXES and path.is_file():
            yield path.relative_to(folder).as_posix(), path.read_bytes()


def _files_of_archive(archive: Path) -> Iterator[tuple[str, bytes]]:
    if archive.suffix == ".whl":
        with zipfile.ZipFile(archive) as wheel:
            for name in wheel.namelist():
                if name.endswith(_SUFFIXES):
                    yield name, wheel.read(name)
    else:
        with tarfile.open(archive) as sdist:
            for member in sdist:
                stream = sdist.extractfile(member) if member.isfile() and member.name.endswith(_SUFFIXES) else None
                if stream is not None:
                    # An sdist has one folder around everything.
                    yield member.name.partition("/")[2], stream.read()


def _write(found: Mapping[str, frozenset[str]]) -> None:
    ordered = dict(sorted(found.items(), key=lambda item: Version(item[0])))
    write_whole(DATA, json.dumps(encode(ordered), indent=1) + "\n")


if __name__ == "__main__":
    raise SystemExit(main())
