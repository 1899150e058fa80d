from __future__ import annotations

from dataclasses import replace
from typing import Any

from flashinfer_compat.problem import Problem


def changed(problem: Problem, **fields: Any) -> Problem:
    """`problem` with some fields changed; names may stand for members of enumerations."""
    return replace(problem, **fields)
