"""What changes between the requirements of two FlashInfer releases. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from packaging.requirements import InvalidRequirement, Requirement

from flashinfer_compat.signatures.recorded import RecordedRelease

__all__ = ["RequirementChange", "requirement_changes"]


@dataclass(frozen=True)
class RequirementChange:
    """One distribution that the new release requires otherwise."""

    name: str
    """Normalised, with its extras in brackets; `python` is the interpreter."""
    condition: str
    """The environment marker under which it holds, such as `extra == "cu13"`; empty where it always does."""
    old: str | None
    """PEP 440 specifiers, empty where any version will do; None where it was not required."""
    new: str | None

    def to_dict(self) -> dict[str, str | None]:
        """The change as plain JSON values."""
        return {"name": self.name, "condition": self.condition, "old": self.old, "new": self.new}


def requirement_changes(old: RecordedRelease, new: RecordedRelease) -> tuple[RequirementChange, ...]:
    """Those that come, go or take other versions; the unconditional ones first."""
    before, after = _specifiers(old), _specifiers(new)
    changed = [key for key in {**before, **after} if before.get(key) != after.get(key)]
    changed.sort(key=lambda key: (key[1] != "", key[1], key[0]))
    return tuple(RequirementChange(*key, before.get(key), after.get(key)) for key in changed)


def _specifiers(release: RecordedRelease) -> Mapping[tuple[str, str], str]:
    python = {("python", ""): release.requires_python} if release.requires_python else {}
    parsed = (one for one in map(_parsed, release.requires) if one is not None)
    return {**python, **{(_name(one), str(one.marker or "")): str(one.specifier) for one in parsed}}


def _name(requirement: Requirement) -> str:
    extras = f"[{','.join(sorted(requirement.extras))}]" if requirement.extras else ""
    return requirement.name.lower().replace("_", "-") + extras


def _parsed(line: str) -> Requirement | None:
    try:
        return Requirement(line)
    except InvalidRequirement:
        return None
