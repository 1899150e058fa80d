"""The form of a feature row, and how a row is judged against a target."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from flashinfer_compat.features.known_issues import KnownIssue
from flashinfer_compat.features.target import FlashInfer, Target
from flashinfer_compat.reasons import Reason, ReasonCode
from flashinfer_compat.signatures.model import Symbol, SymbolTable
from flashinfer_compat.signatures.recorded import recorded, releases
from flashinfer_compat.versions import at_least, parse_version
from flashinfer_compat.vocabulary import Evidence

__all__ = ["Feature", "FeatureState", "Library", "evaluate", "library_reasons"]


@dataclass(frozen=True)
class Library:
    """A distribution that a feature needs beside FlashInfer and torch."""

    name: str
    least: str = ""
    """The first version that will do; empty where any does."""
    install: str = ""
    """What to ask pip for where that is not the name."""


@dataclass(frozen=True)
class Feature:
    """One thing a FlashInfer can or cannot do. The signature decides presence; `since` is only told to people."""

    name: str
    title: str
    entry_point: str
    parameter: str = ""
    """A keyword the entry point must take."""
    choice: str = ""
    """A string that `parameter` must allow."""
    member: str = ""
    """A member the entry point, an enumeration, must have."""
    since: str = ""
    """The first release known to have it."""
    architectures: Mapping[str, str] | None = None
    """Release from which each GPU architecture works; None where any does."""
    libraries: tuple[Library, ...] = ()
    """What it needs beside FlashInfer and torch."""


@dataclass(frozen=True)
class FeatureState:
    """A feature as it stands on one target."""

    feature: Feature
    evidence: Evidence
    reasons: tuple[Reason, ...]
    """Why the evidence is not stronger; empty when nothing but a numeric self-check is missing."""

    def to_dict(self) -> dict[str, Any]:
        """The state as plain JSON values."""
        return {
            "title": self.feature.title,
            "entry_point": self.feature.entry_point,
            "since": self.feature.since,
            "status": self.evidence.value,
            "reasons": [
                {"code": one.code.value, "message": one.message, "way_out": one.way_out} for one in self.reasons
            ],
        }


def evaluate(feature: Feature, target: Target, issues: Iterable[KnownIssue]) -> FeatureState:
    """How `feature` stands on `target`."""
    if target.flashinfer is None:
        return FeatureState(
            feature, Evidence.ABSENT, (Reason(ReasonCode.FLASHINFER_MISSING, target.flashinfer_problem),)
        )
    absent = _absence(feature, target.flashinfer)
    if absent is not None:
        return FeatureState(feature, Evidence.ABSENT, (absent,))
    reasons = tuple(_doubts(feature, target, target.flashinfer, issues))
    return FeatureState(feature, Evidence.PRESENT if reasons else Evidence.ELIGIBLE, reasons)


def _absence(feature: Feature, flashinfer: FlashInfer) -> Reason | None:
    newer = feature.since and not (flashinfer.behaviour and at_least(flashinfer.behaviour, feature.since))
    since = f"FlashInfer has it since {feature.since}." if newer else ""
    lacking = _lacking(feature, flashinfer.symbols, f"FlashInfer {flashinfer.version}", since)
    if lacking is None or lacking.code is ReasonCode.UNREADABLE:
        return lacking
    known = _recorded(feature.entry_point, flashinfer)
    if known is None or _lacking(feature, known, "", "") is not None:
        return lacking
    # The release has it: what lacks it is what is installed here.
    here = f"This install of FlashInfer {flashinfer.version}"
    return _lacking(feature, flashinfer.symbols, here, "The release has it; reinstall FlashInfer.")


def _recorded(name: str, flashinfer: FlashInfer) -> SymbolTable | None:
    """The entry point in the release that this FlashInfer says it is; None where none is recorded."""
    version = parse_version(flashinfer.version)
    if version is None or version.public not in releases():
        return None
    text = recorded(version.public).texts.get(name)
    return SymbolTable({} if text is None else {name: Symbol.from_text(name, text)})


def _lacking(feature: Feature, table: SymbolTable, who: str, way_out: str) -> Reason | None:
    """What of a feature is not in a table, which is that of `who`."""
    name, whose = feature.entry_point, who.replace("This", "this")
    if name in table.problems:
        return Reason(ReasonCode.UNREADABLE, f"{name} of {whose} could not be read: {table.problems[name]}.")
    if table.get(name) is None:
        return Reason(ReasonCode.ENTRY_POINT_MISSING, f"{who} has no {name}.", way_out)
    if feature.parameter and not table.has_parameter(name, feature.parameter):
        return Reason(ReasonCode.KEYWORD_MISSING, f"{name} of {whose} takes no {feature.parameter}.", way_out)
    if feature.choice and feature.choice not in table.choices(name, feature.parameter):
        allowed = ", ".join(table.choices(name, feature.parameter)) or "not told by its annotation"
        message = f"{name}({feature.parameter}=) of {whose} allows {allowed}; not {feature.choice}."
        return Reason(ReasonCode.MEMBER_MISSING, message, way_out)
    if feature.member and not table.has_member(name, feature.member):
        return Reason(ReasonCode.MEMBER_MISSING, f"{name} of {whose} has no {feature.member}.", way_out)
    return None


def _doubts(feature: Feature, target: Target, flashinfer: FlashInfer, issues: Iterable[KnownIssue]) -> Iterable[Reason]:
    if target.torch_version is None:
        yield Reason(ReasonCode.TORCH_MISSING, "torch is not installed.", "Run: pip install torch")
    elif target.torch_cuda is None and target.architecture is not None and feature.architectures is not None:
        message = f"torch {target.torch_version} was built without CUDA."
        yield Reason(ReasonCode.TORCH_WITHOUT_CUDA, message, "Install a CUDA build of torch.")
    for library in feature.libraries:
        yield from library_reasons(feature.title, library, target)
    if flashinfer.behaviour is None:
        yield Reason(ReasonCode.BEHAVIOUR_UNKNOWN, f"{flashinfer.behaviour_source}.")
    else:
        for issue in issues:
            if feature.name in issue.features and issue.affects(flashinfer.behaviour):
                yield Reason(ReasonCode.KNOWN_ISSUE, f"{issue.id}: {issue.title}.", issue.way_out)
    if feature.architectures is None and target.architecture is None:
        yield Reason(ReasonCode.NO_GPU, "There is no NVIDIA GPU.")
    if feature.architectures is not None:
        yield from _architecture_doubts(feature, feature.architectures, target, flashinfer)


def library_reasons(what: str, library: Library, target: Target) -> Iterable[Reason]:
    """Why `what` cannot be had with the target's version of a library, or without it."""
    found = target.libraries.get(library.name)
    version = parse_version(found) if found and library.least else None
    if found is not None and (version is None or at_least(version, library.least)):
        return
    wanted = f"{library.name} {library.least} or newer" if library.least else library.name
    instead = "" if found is None else f"; {found} is installed"
    install = library.install or (f"'{library.name}>={library.least}'" if library.least else library.name)
    message = f"{what} needs {wanted}{instead}."
    yield Reason(ReasonCode.LIBRARY_MISSING, message, f"Run: pip install {install}")


def _architecture_doubts(
    feature: Feature, architectures: Mapping[str, str], target: Target, flashinfer: FlashInfer
) -> Iterable[Reason]:
    # Of a release that is not known, no more is assumed than of the newest known one.
    version = flashinfer.behaviour
    working = [name for name, since in architectures.items() if version is None or at_least(version, since)]
    if target.architecture is None:
        yield Reason(ReasonCode.NO_GPU, f"There is no NVIDIA GPU; {feature.entry_point} runs on {', '.join(working)}.")
    elif target.architecture not in working:
        message = f"{feature.entry_point} of FlashInfer {flashinfer.version} runs on {', '.join(working) or 'no GPU'}"
        since = architectures.get(target.architecture)
        way_out = f"FlashInfer has {target.architecture} since {since}." if since else ""
        yield Reason(ReasonCode.ARCHITECTURE, f"{message}; not on {target.architecture}.", way_out)
