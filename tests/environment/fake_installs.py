"""Writes distributions as an installer leaves them: files, METADATA and a RECORD with true sizes and hashes."""

from __future__ import annotations

import base64
import csv
import hashlib
import json
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence


def install(
    site: Path,
    name: str,
    version: str = "1.0",
    files: Mapping[str, str] | None = None,
    requires: Sequence[str] = (),
) -> Path:
    """Install `files` under `site`; returns the .dist-info."""
    dist_info = site / f"{name.replace('-', '_')}-{version}.dist-info"
    dist_info.mkdir(parents=True)
    headers = [f"Name: {name}", f"Version: {version}", *(f"Requires-Dist: {line}" for line in requires)]
    contents = dict(files or {})
    contents[f"{dist_info.name}/METADATA"] = "\n".join(["Metadata-Version: 2.1", *headers, "", "Version: 9 is prose."])
    for path, text in contents.items():
        (site / path).parent.mkdir(parents=True, exist_ok=True)
        (site / path).write_text(text)
    rows = [[path, f"sha256={digest(text)}", str(len(text.encode()))] for path, text in contents.items()]
    write_record(dist_info, [*rows, [f"{dist_info.name}/RECORD", "", ""]])
    return dist_info


def digest(text: str) -> str:
    return base64.urlsafe_b64encode(hashlib.sha256(text.encode()).digest()).rstrip(b"=").decode()


def write_record(dist_info: Path, rows: Sequence[Sequence[str]]) -> None:
    with (dist_info / "RECORD").open("w", newline="") as file:
        csv.writer(file, lineterminator="\n").writerows(rows)


def make_editable(dist_info: Path, project: Path) -> None:
    record = {"url": project.as_uri(), "dir_info": {"editable": True}}
    (dist_info / "direct_url.json").write_text(json.dumps(record))


def flashinfer_files(version: str = "0.7.4") -> dict[str, str]:
    return {
        "flashinfer/__init__.py": 'raise ImportError("nothing may import this")\n',
        "flashinfer/_build_meta.py": f'"""Build metadata for flashinfer package."""\n__version__ = "{version}"\n',
        "flashinfer/fused_moe.py": "x = 1\n",
    }


def torch_files(version: str, cuda: str | None) -> dict[str, str]:
    return {
        "torch/__init__.py": 'raise ImportError("nothing may import this")\n',
        "torch/version.py": (
            "from typing import Optional\n\n"
            "__all__ = ['__version__', 'debug', 'cuda', 'git_version', 'hip']\n"
            f"__version__ = {version!r}\ndebug = False\ncuda: Optional[str] = {cuda!r}\n"
            "git_version = 'cf30153c'\nhip: Optional[str] = None\n"
        ),
    }
