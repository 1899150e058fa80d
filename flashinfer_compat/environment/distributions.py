"""Finds installed distributions by reading their metadata folders.

importlib.metadata answers the same questions, but takes several times this section's whole time to import.
"""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import TYPE_CHECKING

from flashinfer_compat.environment.model import Beside, Distribution, Distributions, FileCheck
from flashinfer_compat.environment.reading import path_entries, read_regular
from flashinfer_compat.environment.records import check_record

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

__all__ = ["DISTRIBUTIONS", "DISTRIBUTION_PREFIXES", "gather_distributions", "is_relevant", "normalised", "scan"]

DISTRIBUTIONS = frozenset(
    {
        "apache-tvm-ffi",
        "cuda-tile",
        "flashinfer-cubin",
        "flashinfer-jit-cache",
        "flashinfer-python",
        "nvidia-cuda-tileiras",
        "nvidia-cudnn-frontend",
        "nvidia-cutlass-dsl",
        "pytorch-triton",
        "sglang",
        "tensorrt-llm",
        "torch",
        "triton",
        "vllm",
    }
)
"""The distributions whose versions bear on what FlashInfer can do, and the engines that use it."""

DISTRIBUTION_PREFIXES = ("flashinfer-jit-cache-", "nvidia-cutlass-dsl-libs")
"""Families with one distribution per GPU architecture or CUDA release."""

_COMPARED = ("flashinfer-", "apache-tvm-ffi", "cuda-tile", "nvidia-cutlass-dsl")
"""Whose files are compared without hashes too: kernels run through them. torch and engines have 30,000 files more."""

_FLASHINFER = "flashinfer-python"
_METADATA_SUFFIXES = (".dist-info", ".egg-info")
_METADATA_FILES = ("METADATA", "PKG-INFO", "")


def gather_distributions(search_path: Sequence[str] | None, check_files: FileCheck) -> Distributions:
    """Every copy of the distributions this package asks about.

    Args:
        search_path: Directories to look in; None means `sys.path`.
        check_files: How closely to compare their files with RECORD; without hashes only those of FlashInfer and of
            the libraries it calls kernels through.
    """
    listed = [_list(entry) for entry in path_entries(search_path)]
    found = tuple(scan(search_path, is_relevant, check_files))
    required = {_required(line) for one in found if one.name == _FLASHINFER for line in one.requires}
    wanted = {name for name in required if not is_relevant(name)}
    return Distributions(
        found=found,
        unreadable=tuple(problem for _, problem in listed if problem is not None),
        beside=tuple(_beside([folder for folders, _ in listed for folder in folders], wanted)),
    )


def _required(line: str) -> str:
    """The normalised name in a Requires-Dist line."""
    match = re.match(r"[\w.-]+", line)
    return normalised(match[0]) if match else ""


def _beside(folders: Sequence[str], wanted: set[str]) -> Iterator[Beside]:
    seen: set[str] = set()
    for folder in folders:
        # An .egg-info may name the interpreter too: name-version-py3.11.egg-info.
        name, _, version = folder.rpartition(".")[0].partition("-")
        if normalised(name) in wanted - seen:
            seen.add(normalised(name))
            yield Beside(normalised(name), version.partition("-")[0] or None)


def is_relevant(name: str) -> bool:
    """Whether a normalised distribution name is among those this package asks about."""
    return name in DISTRIBUTIONS or name.startswith(DISTRIBUTION_PREFIXES)


def scan(
    search_path: Sequence[str] | None, wanted: Callable[[str], bool], check_files: FileCheck = FileCheck.NONE
) -> Iterator[Distribution]:
    """The copies of every distribution with a wanted name, in search order; unreadable entries are skipped."""
    for entry in path_entries(search_path):
        folders, _ = _list(entry)
        # The order importlib.metadata has: .dist-info before .egg-info, and otherwise the directory's own.
        for suffix in _METADATA_SUFFIXES:
            for folder in folders:
                if folder.endswith(suffix):
                    name = normalised(folder[: -len(suffix)].partition("-")[0])
                    if wanted(name):
                        compared = check_files is FileCheck.HASHES or name.startswith(_COMPARED)
                        yield _read(name, entry, folder, check_files if compared else FileCheck.NONE)


def _list(entry: str) -> tuple[list[str], str | None]:
    """The metadata folders in a search path entry, and what kept them from being listed."""
    try:
        return [name for name in os.listdir(entry) if name.endswith(_METADATA_SUFFIXES)], None  # noqa: PTH208
    except (FileNotFoundError, NotADirectoryError):
        return [], None  # Usual on sys.path: the zip of the standard library, folders not made yet.
    except (OSError, ValueError) as error:
        return [], f"{entry}: {error}"


def _read(name: str, location: str, folder: str, check_files: FileCheck) -> Distribution:
    metadata_path = Path(location, folder)
    problems: list[str] = []
    headers = _headers(metadata_path, problems)
    versions = [value for key, value in headers if key == "version" and value]
    if headers and not versions:
        problems.append("the metadata gives no version")
    problems += [f"{version!r} is not a PEP 440 version" for version in versions[:1] if not _is_pep440(version)]
    editable, source = _editable(metadata_path, problems)
    return Distribution(
        name=name,
        version=versions[0] if versions else None,
        location=location,
        metadata_path=str(metadata_path),
        editable=editable,
        source=source,
        requires=tuple(value for key, value in headers if key == "requires-dist"),
        files=check_record(str(metadata_path), location, check_files),
        problems=tuple(problems),
    )


def _headers(metadata_path: Path, problems: list[str]) -> list[tuple[str, str]]:
    """The metadata's header lines, with lower-case names."""
    texts = (_text(metadata_path / file_name) for file_name in _METADATA_FILES)
    text = next((text for text in texts if text is not None), None)
    if text is None:
        problems.append("the metadata file is missing or cannot be read")
        return []
    headers: list[tuple[str, str]] = []
    for line in text.split("\n"):
        if not line.rstrip("\r"):
            break  # The long description follows. A line of spaces continues a header, such as a licence's text.
        key, colon, value = line.partition(":")
        if line[0] in " \t":
            if headers:
                headers[-1] = (headers[-1][0], f"{headers[-1][1]} {line.strip()}")
        elif colon:
            headers.append((key.lower(), value.strip()))
    if not headers:
        problems.append("the metadata file is empty or no metadata")
    return headers


def _text(path: Path) -> str | None:
    try:
        return read_regular(path).decode("utf-8", errors="replace")
    except OSError:
        return None


def _editable(metadata_path: Path, problems: list[str]) -> tuple[bool, str | None]:
    """Whether direct_url.json (PEP 610) marks an editable install, and its project folder."""
    try:
        text = read_regular(metadata_path / "direct_url.json").decode("utf-8")
    except (FileNotFoundError, NotADirectoryError):
        return False, None
    except (OSError, ValueError) as error:
        problems.append(f"direct_url.json cannot be read: {error}")
        return False, None
    import json
    from urllib.parse import unquote, urlsplit

    try:
        record = json.loads(text)
        url = urlsplit(record["url"])
        if not record.get("dir_info", {}).get("editable", False):
            return False, None
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        problems.append(f"direct_url.json cannot be read: {error!r}")
        return False, None
    return True, unquote(url.path) if url.scheme == "file" else None


def _is_pep440(version: str) -> bool:
    from packaging.version import InvalidVersion, Version

    try:
        Version(version)
    except InvalidVersion:
        return False
    return True


def normalised(name: str) -> str:
    """A distribution's name in lower case, its words joined by "-" (PEP 503)."""
    return re.sub(r"[-_.]+", "-", name).lower()
