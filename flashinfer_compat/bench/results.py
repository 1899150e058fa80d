"""What was measured, as frozen values; pure."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from flashinfer_compat import __version__
from flashinfer_compat.bench.floor import Rates
from flashinfer_compat.bench.shapes import Sizes
from flashinfer_compat.policy import Origin, PolicyRow
from flashinfer_compat.reasons import Reason
from flashinfer_compat.vocabulary import Backend, Numerics, RoutingInput, Strategy

__all__ = ["SCHEMA_VERSION", "Found", "Point", "Refusal", "Report", "Way"]

SCHEMA_VERSION = 1
"""Raised when a field changes its meaning or goes; schemas/bench-1.json describes this one."""


@dataclass(frozen=True)
class Way:
    """One layer, and one way to run it."""

    sizes: Sizes
    routing_input: RoutingInput
    backend: Backend
    strategy: Strategy
    numerics: Numerics

    @property
    def name(self) -> str:
        """Without the sizes."""
        return f"{self.backend.value} {self.strategy.value} {self.numerics.value}"

    def to_dict(self) -> dict[str, Any]:
        """The way as plain JSON values."""
        return {
            **self.sizes.to_dict(),
            "routing_input": self.routing_input.value,
            "backend": self.backend.value,
            "strategy": self.strategy.value,
            "numerics": self.numerics.value,
        }


@dataclass(frozen=True)
class Found:
    """What a measurement gave."""

    microseconds: float | None
    """Of one call, median; None where the result is wrong."""
    timing: str
    """`cuda_graph` or `wall_clock`."""
    calls: int
    """With experts of their own, that were timed one after the other."""
    relative_error: float
    """To the reference in float32, over all rows."""
    median_row_error: float
    """What is judged in w4a4, where a tie moves single rows."""
    tolerance: float
    """Largest error for which a time is told."""
    floor_microseconds: float | None
    """None where the GPU's rates are not known."""
    weight_bytes: int
    """Of the experts, as a checkpoint stores them."""
    beyond_bytes: int
    """Of what preparing made beside them; a backend with a layout of its own does not need the checkpoint's any
    more."""
    peak_bytes: int | None
    """What one call needs at once beside that, its output included; None on a CPU."""


@dataclass(frozen=True)
class Point:
    """One way at one number of tokens."""

    way: Way
    tokens: int
    found: Found | None
    """None where it did not run."""
    problem: str
    """Why there is no time; empty where there is one."""

    @property
    def microseconds(self) -> float | None:
        """The time, where there is one."""
        return self.found.microseconds if self.found else None

    def to_dict(self) -> dict[str, Any]:
        """The point as plain JSON values."""
        return {
            **self.way.to_dict(),
            "tokens": self.tokens,
            "found": self.found and _finite(asdict(self.found)),
            "problem": self.problem or None,
        }


@dataclass(frozen=True)
class Refusal:
    """A way that planning does not let through here."""

    way: Way
    reasons: tuple[Reason, ...]

    def to_dict(self) -> dict[str, Any]:
        """The refusal as plain JSON values."""
        return {**self.way.to_dict(), "reasons": [one.to_dict() for one in self.reasons]}


@dataclass(frozen=True)
class Report:
    """A whole run."""

    device: str
    """As torch names it."""
    origin: Origin
    tokens: tuple[int, ...]
    rates: Rates | None
    points: tuple[Point, ...]
    refusals: tuple[Refusal, ...]
    policy: tuple[PolicyRow, ...]
    """What follows from the times."""
    policy_file: str | None
    """Where that was written."""
    notes: tuple[str, ...]
    interrupted: bool
    policy_asked: bool = False
    """Whether it should be written."""

    @property
    def exit_code(self) -> int:
        """0 all were measured, 1 some way is wrong or failed or the asked policy is not written, 130 interrupted."""
        unwritten = self.policy_asked and self.policy_file is None
        return 130 if self.interrupted else int(unwritten or any(one.problem for one in self.points))

    def to_dict(self) -> dict[str, Any]:
        """The report as plain JSON values, as schemas/bench-1.json describes them."""
        return {
            "schema_version": SCHEMA_VERSION,
            "flashinfer_compat": __version__,
            "exit_code": self.exit_code,
            "interrupted": self.interrupted,
            "device": self.device,
            "machine": self.origin.to_dict(),
            "tokens": list(self.tokens),
            "rates": self.rates and self.rates.to_dict(),
            "points": [one.to_dict() for one in self.points],
            "refused": [one.to_dict() for one in self.refusals],
            "policy": [one.to_dict() for one in self.policy],
            "policy_file": self.policy_file,
            "notes": list(self.notes),
        }


def _finite(values: dict[str, Any]) -> dict[str, Any]:
    """JSON has no infinity."""
    return {name: None if value == float("inf") else value for name, value in values.items()}
