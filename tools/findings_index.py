"""The list of the doctor's codes, made from its checks.

python -m tools.findings_index            write it into docs/findings/index.md
python -m tools.findings_index --check    exit 1 where it is out of date
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

from flashinfer_compat.doctor.checks import CHECKS
from flashinfer_compat.doctor.finding import DOCS, Group
from flashinfer_compat.files import write_whole

INDEX = Path(__file__).parents[1] / DOCS / "index.md"

_HEAD = """# Findings of the doctor

`python -m flashinfer_compat doctor` gives each finding a code; each code has a page. Severities: an *error* means that
NVFP4 MoE will fail or its numbers cannot be trusted; a *warning*, that it will run, but not as well as this machine
could, or not as its operator thinks; a *note* is good to know. The exit code is 2 with errors, 1 with warnings, else 0.

This page is made by `python -m tools.findings_index`.
"""


def main(arguments: Sequence[str] | None = None) -> int:
    """Write or check the page."""
    check = "--check" in (sys.argv[1:] if arguments is None else arguments)
    if INDEX.exists() and INDEX.read_text("utf-8") == page():
        return 0
    if check:
        print(f"{INDEX.name} is out of date. Run: python -m tools.findings_index", file=sys.stderr)
        return 1
    write_whole(INDEX, page())
    return 0


def page() -> str:
    """Markdown: a table for each group."""
    parts = [_HEAD]
    for group in Group:
        title = group.value[0].upper() + group.value[1:]
        parts.append(f"\n## {title}\n\n| code | why it matters |\n| --- | --- |\n")
        parts.extend(f"| [{one.code}]({one.code}.md) | {one.why} |\n" for one in CHECKS if one.group is group)
    return "".join(parts)


if __name__ == "__main__":
    raise SystemExit(main())
