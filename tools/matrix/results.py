"""What was found out about a release: one cell for each thing tried."""

from __future__ import annotations

import enum
import traceback
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

__all__ = ["Cell", "ReleaseResult", "State", "failed"]


_TRACEBACK_LINES = 12


class State(str, enum.Enum):
    """How a cell came out."""

    PASSED = "passed"
    REFUSED = "refused"
    """The plan for this release does not offer it; `detail` has the reason codes."""
    ABSENT = "absent"
    """The release has no such thing, or it could not be looked at; `detail` says which."""
    KNOWN = "known"
    """It does not work, and a row of `features.known_issues`, named in `detail`, says so."""
    FAILED = "failed"
    """It must hold and does not."""


@dataclass(frozen=True)
class Cell:
    """One thing tried with one release."""

    table: str
    """The table it belongs to: `release`, or a sample checkpoint."""
    column: str
    state: State
    detail: str = ""
    error: float | None = None
    """The relative error, where numbers were compared."""

    def to_dict(self) -> dict[str, Any]:
        """The cell as plain JSON values."""
        return {
            "table": self.table,
            "column": self.column,
            "state": self.state.value,
            "detail": self.detail,
            "error": self.error,
        }

    @staticmethod
    def from_dict(data: dict[str, Any]) -> Cell:
        """The cell that `to_dict` wrote."""
        return Cell(data["table"], data["column"], State(data["state"]), data["detail"], data["error"])


@dataclass(frozen=True)
class ReleaseResult:
    """Every cell of a release."""

    version: str
    archive: str
    seconds: float
    cells: tuple[Cell, ...]

    @property
    def failures(self) -> tuple[Cell, ...]:
        """The cells that must hold and do not."""
        return tuple(cell for cell in self.cells if cell.state is State.FAILED)

    def to_dict(self) -> dict[str, Any]:
        """The result as plain JSON values."""
        return {
            "version": self.version,
            "archive": self.archive,
            "seconds": round(self.seconds, 1),
            "cells": [cell.to_dict() for cell in self.cells],
        }


def failed(table: str, columns: Sequence[str], error: BaseException) -> list[Cell]:
    """A failed cell for each column, with the end of the traceback."""
    lines = "".join(traceback.format_exception(error)).strip().splitlines()
    return [Cell(table, column, State.FAILED, "\n".join(lines[-_TRACEBACK_LINES:])) for column in columns]
