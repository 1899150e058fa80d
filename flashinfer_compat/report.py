"""What this machine's FlashInfer can do for NVFP4 MoE, as one value that servers read."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

from flashinfer_compat import __version__
from flashinfer_compat.features.known_issues import KNOWN_ISSUES, KnownIssue
from flashinfer_compat.features.model import FeatureState
from flashinfer_compat.features.table import feature_states
from flashinfer_compat.features.target import Target
from flashinfer_compat.machine import this_machine
from flashinfer_compat.planning.plan import ALTERNATIVES, assess
from flashinfer_compat.problem import DEEPSEEK_R1, Problem
from flashinfer_compat.reasons import Reason
from flashinfer_compat.vocabulary import Backend, Evidence, RoutingInput, Strategy

__all__ = ["SCHEMA_VERSION", "Capabilities", "StrategyState", "capabilities", "capabilities_of"]

SCHEMA_VERSION = 1
"""Raised when a field of the report changes its meaning or goes; schemas/capabilities-1.json describes this one."""


@dataclass(frozen=True)
class StrategyState:
    """One way to run the reference problem, and how well it is known to work."""

    routing_input: RoutingInput
    strategy: Strategy
    backend: Backend
    status: Evidence
    reasons: tuple[Reason, ...]
    """Why it cannot run; empty when it can."""


@dataclass(frozen=True)
class Capabilities:
    """The report."""

    target: Target
    features: Mapping[str, FeatureState]
    reference_problem: Problem
    """The layer that `strategies` speaks of; ask `plan` about another one."""
    strategies: tuple[StrategyState, ...]
    known_issues: tuple[KnownIssue, ...]
    """Those of this FlashInfer release."""

    def to_dict(self) -> dict[str, Any]:
        """The report as plain JSON values, as schemas/capabilities-1.json describes them."""
        return {
            "schema_version": SCHEMA_VERSION,
            "flashinfer_compat": __version__,
            "target": self.target.to_dict(),
            "features": {name: state.to_dict() for name, state in self.features.items()},
            "fp4_moe": {
                "reference_problem": self.reference_problem.to_dict(),
                "strategies": [
                    {
                        "routing_input": one.routing_input.value,
                        "strategy": one.strategy.value,
                        "backend": one.backend.value,
                        "status": one.status.value,
                        "reasons": [reason.to_dict() for reason in one.reasons],
                    }
                    for one in self.strategies
                ],
            },
            "known_issues": [
                {"id": one.id, "title": one.title, "effect": one.effect.value, "source": one.source}
                for one in self.known_issues
            ],
        }

    def to_json(self) -> str:
        """The report as JSON text."""
        return json.dumps(self.to_dict(), indent=2)


@cache
def capabilities() -> Capabilities:
    """What this machine can do. It is looked at once in a process; neither torch nor flashinfer is imported."""
    return capabilities_of(this_machine())


def capabilities_of(target: Target, problem: Problem = DEEPSEEK_R1) -> Capabilities:
    """What `target` can do, with the strategies for `problem`."""
    behaviour = target.flashinfer.behaviour if target.flashinfer else None
    issues = tuple(issue for issue in KNOWN_ISSUES if behaviour is not None and issue.affects(behaviour))
    return Capabilities(target, feature_states(target), problem, tuple(_strategies(problem, target)), issues)


def _strategies(problem: Problem, target: Target) -> list[StrategyState]:
    states = []
    for routing_input in RoutingInput:
        asked = replace(problem, routing_input=routing_input)
        for backend, strategy in ALTERNATIVES:
            found = assess(asked, target, strategy, backend)
            states.append(StrategyState(routing_input, strategy, backend, found.status, found.reasons))
    return states
