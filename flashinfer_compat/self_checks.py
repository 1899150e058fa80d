"""What a numeric self-check speaks of, and what it found: the evidence behind `verified` and `refuted`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any

from flashinfer_compat.problem import Problem
from flashinfer_compat.vocabulary import Backend, Evidence, Strategy, parse

__all__ = ["CheckedKind", "SelfCheck"]


@dataclass(frozen=True)
class CheckedKind:
    """Everything of a plan that chooses code; its sizes do not. A self-check speaks of all plans of its kind."""

    backend: str
    strategy: str
    routing_input: str
    routing_method: str
    has_groups: bool
    shared_format: str
    shared_gate: bool
    activation: str
    numerics: str
    activation_scaling: str
    expert_parallel: bool

    @staticmethod
    def of(problem: Problem, strategy: Strategy, backend: Backend) -> CheckedKind:
        """The kind of a plan for `problem`."""
        return CheckedKind(
            backend.value,
            strategy.value,
            problem.routing_input.value,
            problem.routing_method.value,
            problem.is_grouped,
            problem.shared_format.value,
            problem.shared_gate,
            problem.activation.value,
            problem.numerics.value,
            problem.activation_scaling.value,
            problem.ep_size > 1,
        )

    def __str__(self) -> str:
        shared = "no shared experts" if self.shared_format == "none" else f"{self.shared_format} shared experts"
        groups = "with groups" if self.has_groups else "without groups"
        return (
            f"{self.strategy} on {self.backend} from {self.routing_input}, {self.routing_method} {groups}, {shared}, "
            f"{self.numerics}"
        )


@dataclass(frozen=True)
class SelfCheck:
    """One kind that was run here and compared with the reference."""

    kind: CheckedKind
    verdict: Evidence
    """verified or refuted."""
    relative_error: float | None
    """The largest over the token counts; None where it did not run to its end."""
    tolerance: float
    microseconds: float | None
    """Of one call with the largest token count, median."""
    problem: str
    """What went wrong; empty where it agreed."""

    def to_dict(self) -> dict[str, Any]:
        """The check as plain JSON values."""
        return {**asdict(self), "verdict": self.verdict.value}

    @staticmethod
    def from_dict(values: Mapping[str, Any]) -> SelfCheck:
        """What `to_dict` gave.

        Raises:
            KeyError, TypeError, UnknownNameError: it is not.
        """
        known = {field.name: values[field.name] for field in fields(SelfCheck)}
        known["kind"] = CheckedKind(**known["kind"])
        known["verdict"] = parse(Evidence, known["verdict"], "verdict")
        return SelfCheck(**known)
