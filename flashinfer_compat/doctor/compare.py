"""What another FlashInfer release changes for FP4 MoE: a pure function of two recorded releases."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from packaging.version import Version

from flashinfer_compat import __version__
from flashinfer_compat.doctor.question import Premise
from flashinfer_compat.doctor.requirements import RequirementChange, requirement_changes
from flashinfer_compat.features.known_issues import KnownIssue
from flashinfer_compat.features.model import FeatureState
from flashinfer_compat.features.target import Target
from flashinfer_compat.reasons import Reason
from flashinfer_compat.report import Capabilities, StrategyState, capabilities_of
from flashinfer_compat.signatures.changes import EntryPointChange, NumbersChange, changes_between
from flashinfer_compat.signatures.recorded import RecordedRelease
from flashinfer_compat.vocabulary import Backend, Evidence, RoutingInput, Strategy

__all__ = ["SCHEMA_VERSION", "AlternativeChange", "Comparison", "FeatureChange", "StrategyChange", "compare"]

SCHEMA_VERSION = 1
"""Raised when a field changes its meaning or goes; schemas/compare-1.json describes this one."""


@dataclass(frozen=True)
class AlternativeChange:
    """A way to run DeepSeek-R1's layer that becomes possible or stops being so, or is known otherwise."""

    strategy: Strategy
    backend: Backend
    old: Evidence
    new: Evidence
    reasons: tuple[Reason, ...]
    """Why it could not run before, or cannot now; empty where it runs on both."""

    def to_dict(self) -> dict[str, Any]:
        """The change as plain JSON values."""
        return {
            "strategy": self.strategy.value,
            "backend": self.backend.value,
            "old": self.old.value,
            "new": self.new.value,
            "reasons": [reason.to_dict() for reason in self.reasons],
        }


@dataclass(frozen=True)
class StrategyChange:
    """How DeepSeek-R1's layer runs from one kind of routing input."""

    routing_input: RoutingInput
    old: StrategyState
    """What is planned on the old release."""
    new: StrategyState
    alternatives: tuple[AlternativeChange, ...]

    def to_dict(self) -> dict[str, Any]:
        """The change as plain JSON values."""
        return {
            "routing_input": self.routing_input.value,
            "old": _choice(self.old),
            "new": _choice(self.new),
            "alternatives": [one.to_dict() for one in self.alternatives],
        }


@dataclass(frozen=True)
class FeatureChange:
    """A feature whose status differs."""

    old: FeatureState
    new: FeatureState

    @property
    def gained(self) -> bool:
        """Whether it becomes usable."""
        return self.new.evidence.rank >= Evidence.ELIGIBLE.rank

    @property
    def lost(self) -> bool:
        """Whether it was usable."""
        return self.old.evidence.rank >= Evidence.ELIGIBLE.rank

    def to_dict(self) -> dict[str, Any]:
        """The change as plain JSON values."""
        return {
            "name": self.new.feature.name,
            "title": self.new.feature.title,
            "old": self.old.evidence.value,
            "new": self.new.evidence.value,
            "reasons": [reason.to_dict() for reason in self.new.reasons],
        }


@dataclass(frozen=True)
class Comparison:
    """Everything that differs; each part is empty where nothing does, but for `strategies`."""

    old: str
    new: str
    architecture: Premise
    strategies: tuple[StrategyChange, ...]
    """One for each kind of routing input, changed or not."""
    features: tuple[FeatureChange, ...]
    entry_points: tuple[EntryPointChange, ...]
    enumerations: tuple[NumbersChange, ...]
    issues_ended: tuple[KnownIssue, ...]
    issues_begun: tuple[KnownIssue, ...]
    requirements: tuple[RequirementChange, ...]

    @property
    def direction(self) -> str:
        """`upgrade`, `downgrade` or `same`."""
        old, new = Version(self.old), Version(self.new)
        return "same" if old == new else "upgrade" if new > old else "downgrade"

    @property
    def summary(self) -> str:
        """What becomes of DeepSeek-R1's layer."""
        ways = "; ".join(f"from {one.routing_input.value} {_way(one)}" for one in self.strategies)
        gpu = self.architecture.value or "a machine without GPU"
        name = {"same": "no change"}.get(self.direction, self.direction)
        return f"FlashInfer {self.old} to {self.new} on {gpu} ({name}): DeepSeek-R1's MoE runs {ways}."

    def to_dict(self) -> dict[str, Any]:
        """The comparison as plain JSON values, as schemas/compare-1.json describes them."""
        return {
            "schema_version": SCHEMA_VERSION,
            "flashinfer_compat": __version__,
            "old": self.old,
            "new": self.new,
            "direction": self.direction,
            "architecture": self.architecture.to_dict(),
            "summary": self.summary,
            "strategies": [one.to_dict() for one in self.strategies],
            "features": [one.to_dict() for one in self.features],
            "entry_points": [one.to_dict() for one in self.entry_points],
            "enumerations": [one.to_dict() for one in self.enumerations],
            "known_issues": {
                "ended": [_issue(one) for one in self.issues_ended],
                "begun": [_issue(one) for one in self.issues_begun],
            },
            "requirements": [one.to_dict() for one in self.requirements],
        }


def compare(old: RecordedRelease, new: RecordedRelease, architecture: Premise) -> Comparison:
    """What differs on a GPU, with everything installed that each release requires."""
    before, after = (capabilities_of(Target.from_release(one.version, architecture.value)) for one in (old, new))
    entry_points, enumerations = changes_between(old.symbols, new.symbols)
    return Comparison(
        old.version,
        new.version,
        architecture,
        tuple(_strategy_change(one, before, after) for one in RoutingInput),
        tuple(
            FeatureChange(state, after.features[name])
            for name, state in before.features.items()
            if state.evidence is not after.features[name].evidence
        ),
        entry_points,
        enumerations,
        tuple(one for one in before.known_issues if one not in after.known_issues),
        tuple(one for one in after.known_issues if one not in before.known_issues),
        requirement_changes(old, new),
    )


def _strategy_change(routing_input: RoutingInput, before: Capabilities, after: Capabilities) -> StrategyChange:
    old, new = ([one for one in report.strategies if one.routing_input is routing_input] for report in (before, after))
    return StrategyChange(routing_input, _planned(old), _planned(new), tuple(_alternatives(old, new)))


def _planned(states: list[StrategyState]) -> StrategyState:
    """The first that can run, as `planning.plan` takes it; the torch backend always can."""
    return next(one for one in states if one.status is not Evidence.ABSENT)


def _alternatives(old: list[StrategyState], new: list[StrategyState]) -> Iterator[AlternativeChange]:
    for one, other in zip(old, new, strict=True):
        if one.status is not other.status:
            yield AlternativeChange(one.strategy, one.backend, one.status, other.status, one.reasons or other.reasons)


def _choice(state: StrategyState) -> dict[str, str]:
    return {"strategy": state.strategy.value, "backend": state.backend.value, "status": state.status.value}


def _way(change: StrategyChange) -> str:
    old, new = (f"{one.strategy.value} on {one.backend.value}" for one in (change.old, change.new))
    if old == new:
        return f"as {new}, as before"
    return f"as {new} instead of {old}"


def _issue(issue: KnownIssue) -> dict[str, str]:
    return {"id": issue.id, "title": issue.title, "effect": issue.effect.value, "source": issue.source}
