"""Record the signatures of FlashInfer's releases into the package's data file.

    python -m tools.record_signatures            add the releases that are not recorded yet
    python -m tools.record_signatures --all      read every release again (about 2.5 GB of downloads)
    python -m tools.record_signatures 0.7.4 ...  read these again

Archives are read without installing or unpacking them, one at a time, each deleted before the next. The sdists of 0.4.0
and 0.4.1 are read like every other: nothing is built.
"""

from __future__ import annotations

import argparse
import email
import hashlib
import json
import sys
import tempfile
from collections.abc import Iterable, Sequence
from pathlib import Path

from packaging.version import Version
from pypi_simple import DistributionPackage, PyPISimple

from flashinfer_compat.files import write_whole
from flashinfer_compat.signatures.archives import ArchiveSource
from flashinfer_compat.signatures.recorded import DATA, RecordedRelease, decode, encode
from flashinfer_compat.signatures.static import read_source

PROJECT = "flashinfer-python"
FIRST = Version("0.2.9rc1")
"""The first release with an FP4 MoE is 0.2.9."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; 0 when every wanted release was recorded."""
    parser = argparse.ArgumentParser(prog="python -m tools.record_signatures", description=__doc__)
    parser.add_argument("versions", nargs="*", help="releases to read again")
    parser.add_argument("--all", action="store_true", help="read every release again")
    options = parser.parse_args(arguments)
    records = {} if options.all else _existing()
    with PyPISimple() as client:
        published = archives(client)
        unknown = [version for version in options.versions if version not in published]
        if unknown:
            parser.error(f"not published: {', '.join(unknown)}")
        wanted = options.versions or [version for version in published if version not in records]
        for number, version in enumerate(wanted, 1):
            package = published[version]
            size = f"{package.size / 1e6:.0f} MB" if package.size else "size unknown"
            print(f"[{number}/{len(wanted)}] {package.filename} ({size})", file=sys.stderr, flush=True)
            records[version] = record(client, package)
            _write(records.values())
    print(f"{len(records)} releases recorded in {DATA}")
    return 0


def archives(client: PyPISimple) -> dict[str, DistributionPackage]:
    """One archive per published release, a wheel where there is one, oldest first."""
    chosen: dict[str, DistributionPackage] = {}
    for package in client.get_project_page(PROJECT).packages:
        version = package.version
        if version is None or Version(version) < FIRST or package.package_type not in ("wheel", "sdist"):
            continue
        if version not in chosen or package.package_type == "wheel":
            chosen[version] = package
    return dict(sorted(chosen.items(), key=lambda item: Version(item[0])))


def record(client: PyPISimple, package: DistributionPackage) -> RecordedRelease:
    """Download one archive, read it, delete it."""
    with tempfile.TemporaryDirectory() as folder:
        archive = Path(folder) / package.filename
        client.download_package(package, archive)
        return read_archive(archive, str(package.version))


def read_archive(archive: Path, version: str) -> RecordedRelease:
    """The record of an archive on disk.

    Raises:
        ValueError: an entry point in it cannot be read.
    """
    source = ArchiveSource(archive)
    table = read_source(source)
    if table.problems:
        raise ValueError(f"{archive.name}: {dict(table.problems)}")
    metadata = email.message_from_bytes(source.metadata())
    return RecordedRelease(
        version,
        archive.name,
        hashlib.sha256(archive.read_bytes()).hexdigest(),
        metadata.get("Requires-Python"),
        tuple(metadata.get_all("Requires-Dist") or ()),
        {name: symbol.to_text() for name, symbol in sorted(table.symbols.items())},
    )


def _existing() -> dict[str, RecordedRelease]:
    return decode(json.loads(DATA.read_text("utf-8"))) if DATA.exists() else {}


def _write(records: Iterable[RecordedRelease]) -> None:
    write_whole(DATA, json.dumps(encode(list(records)), indent=1) + "\n")


if __name__ == "__main__":
    raise SystemExit(main())
