"""The README's table of strategies by release, made from planning.

python -m tools.strategy_table            write it into README.md
python -m tools.strategy_table --check    exit 1 where README.md differs
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from flashinfer_compat.features.target import Target
from flashinfer_compat.files import write_whole
from flashinfer_compat.planning.plan import plan
from flashinfer_compat.problem import DEEPSEEK_R1, Problem
from flashinfer_compat.signatures.recorded import releases
from flashinfer_compat.vocabulary import RoutingInput

README = Path(__file__).parents[1] / "README.md"
BEGIN, END = "<!-- strategies: begin -->", "<!-- strategies: end -->"
_COLUMNS = tuple((arch, kind) for arch in ("sm100", "sm90") for kind in RoutingInput)


def main(arguments: Sequence[str] | None = None) -> int:
    """Write or check the table."""
    check = "--check" in (sys.argv[1:] if arguments is None else arguments)
    text = README.read_text("utf-8")
    before, _, rest = text.partition(BEGIN)
    _, _, after = rest.partition(END)
    made = f"{before}{BEGIN}\n{table()}{END}{after}"
    if made == text:
        return 0
    if check:
        print("README.md: the strategy table is out of date. Run: python -m tools.strategy_table", file=sys.stderr)
        return 1
    write_whole(README, made)
    return 0


def table(problem: Problem = DEEPSEEK_R1) -> str:
    """Markdown: final releases grouped while nothing changes, one column for each GPU and kind of routing input."""
    groups: list[tuple[list[str], tuple[str, ...]]] = []
    for release in releases():
        if "rc" in release:
            continue
        row = tuple(_cell(problem, release, arch, kind) for arch, kind in _COLUMNS)
        if groups and groups[-1][1] == row:
            groups[-1][0].append(release)
        else:
            groups.append(([release], row))
    head = ["FlashInfer", *(f"{arch}, {kind.value}" for arch, kind in _COLUMNS)]
    lines = ["| " + " | ".join(head) + " |", "|" + " --- |" * len(head)]
    for names, row in groups:
        span = names[0] if len(names) == 1 else f"{names[0]} to {names[-1]}"
        lines.append("| " + " | ".join([span, *row]) + " |")
    return "\n".join(lines) + "\n"


def _cell(problem: Problem, release: str, arch: str, kind: RoutingInput) -> str:
    decision = plan(replace(problem, routing_input=kind), Target.from_release(release, arch))
    return f"{decision.strategy.value} ({decision.backend.value})"


if __name__ == "__main__":
    raise SystemExit(main())
