"""What changes for callers between the entry points of two FlashInfer releases. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from typing import Any

from flashinfer_compat.signatures.entry_points import ENTRY_POINTS
from flashinfer_compat.signatures.model import Kind, Parameter, Symbol, SymbolTable

__all__ = ["EntryPointChange", "NumbersChange", "ParameterAdded", "ParameterMoved", "TextChange", "changes_between"]

_POSITIONAL = (Kind.POSITIONAL_ONLY, Kind.POSITIONAL_OR_KEYWORD)


@dataclass(frozen=True)
class ParameterAdded:
    """A parameter that the old release does not take."""

    name: str
    position: int | None
    """Counted from 1; None where it can be passed by keyword only."""
    required: bool
    inserted: bool
    """Whether a parameter that both releases have stands behind it, so that positional calls go wrong."""
    instead_of: str | None
    """The parameter that the old release has at this position and the new one nowhere."""


@dataclass(frozen=True)
class ParameterMoved:
    """A parameter whose place among the positional ones changes for a reason other than insertions before it."""

    name: str
    old: int | None
    """Counted from 1; None for keyword only."""
    new: int | None


@dataclass(frozen=True)
class TextChange:
    """Something whose text differs."""

    name: str
    old: str | None
    """None where there was none."""
    new: str | None


@dataclass(frozen=True)
class EntryPointChange:
    """What happens to a function or to a class's constructor."""

    name: str
    kind: str
    """`added`, `removed` or `changed`."""
    added: tuple[ParameterAdded, ...] = ()
    removed: tuple[str, ...] = ()
    moved: tuple[ParameterMoved, ...] = ()
    required: tuple[str, ...] = ()
    """Parameters of both that lose their default."""
    defaults: tuple[TextChange, ...] = ()
    """Parameters whose default differs, as Python source; None: required."""
    choices: tuple[TextChange, ...] = ()
    """Parameters that allow other strings; those are joined by commas."""
    breaks_positional_from: int | None = None
    """The first position, from 1, that means another parameter than before; None where positional calls stay right."""

    @property
    def breaks_callers(self) -> bool:
        """Whether a call that was right before can be wrong now."""
        needed = self.required or any(one.required for one in self.added)
        return self.kind == "removed" or bool(self.removed or needed or self.breaks_positional_from)

    def to_dict(self) -> dict[str, Any]:
        """The change as plain JSON values."""
        return {**_plain(self), "breaks_callers": self.breaks_callers}


@dataclass(frozen=True)
class NumbersChange:
    """What happens to an enumeration."""

    name: str
    kind: str
    """`added`, `removed` or `changed`."""
    added: tuple[tuple[str, int | str], ...] = ()
    """(member, value)."""
    removed: tuple[tuple[str, int | str], ...] = ()
    renumbered: tuple[tuple[str, int | str, int | str], ...] = ()
    """(member, old value, new value)."""
    reused: tuple[tuple[int | str, str, str], ...] = ()
    """(value, old member, new member): who passes the number gets something else."""

    def to_dict(self) -> dict[str, Any]:
        """The change as plain JSON values."""
        return {
            "name": self.name,
            "kind": self.kind,
            "added": [{"member": member, "value": value} for member, value in self.added],
            "removed": [{"member": member, "value": value} for member, value in self.removed],
            "renumbered": [{"member": member, "old": old, "new": new} for member, old, new in self.renumbered],
            "reused": [{"value": value, "old": old, "new": new} for value, old, new in self.reused],
        }


def changes_between(
    old: SymbolTable, new: SymbolTable
) -> tuple[tuple[EntryPointChange, ...], tuple[NumbersChange, ...]]:
    """The changes of functions and classes, and those of enumerations, in the order of `ENTRY_POINTS`."""
    calls: list[EntryPointChange] = []
    numbers: list[NumbersChange] = []
    for name in (one.name for one in ENTRY_POINTS):
        before, after = old.get(name), new.get(name)
        if before is None and after is None:
            continue
        if (after or before).members is not None:  # type: ignore[union-attr]
            numbers.extend(_numbers(name, before, after))
        else:
            calls.extend(_calls(name, before, after))
    return tuple(calls), tuple(numbers)


def _calls(name: str, before: Symbol | None, after: Symbol | None) -> Iterator[EntryPointChange]:
    if before is None or after is None:
        yield EntryPointChange(name, "removed" if after is None else "added")
        return
    if before.parameters == after.parameters:
        return
    old, new = before.parameters or (), after.parameters or ()
    both = [(one, other) for one in old if (other := after.parameter(one.name)) is not None]
    yield EntryPointChange(
        name,
        "changed",
        tuple(_added(before, new)),
        tuple(one.name for one in old if after.parameter(one.name) is None),
        tuple(_moved(old, new)),
        tuple(one.name for one, other in both if one.default is not None and other.default is None),
        tuple(TextChange(one.name, one.default, other.default) for one, other in both if one.default != other.default),
        tuple(
            TextChange(one.name, ", ".join(one.choices) or None, ", ".join(other.choices) or None)
            for one, other in both
            if one.choices != other.choices
        ),
        _breaks_positional_from(old, new),
    )


def _positional(parameters: Iterable[Parameter]) -> list[str]:
    return [one.name for one in parameters if one.kind in _POSITIONAL]


def _places(parameters: Iterable[Parameter]) -> dict[str, int]:
    return {name: position for position, name in enumerate(_positional(parameters), 1)}


def _added(before: Symbol, new: tuple[Parameter, ...]) -> Iterator[ParameterAdded]:
    places, old = _places(new), _positional(before.parameters or ())
    last = max((position for name, position in places.items() if name in old), default=0)
    names = {one.name for one in new}
    for one in new:
        if one.name not in before.parameter_names:
            position = places.get(one.name)
            required = one.default is None and one.kind not in (Kind.VAR_POSITIONAL, Kind.VAR_KEYWORD)
            there = next(iter(old[position - 1 : position]), None) if position else None
            inserted = position is not None and position < last
            yield ParameterAdded(one.name, position, required, inserted, None if there in names else there)


def _moved(old: tuple[Parameter, ...], new: tuple[Parameter, ...]) -> Iterator[ParameterMoved]:
    """Those whose order among the parameters of both changes, and those that start or stop being positional."""
    before, after = _places(old), _places(new)
    shared_before = [name for name in before if name in after]
    shared_after = [name for name in after if name in before]
    for name in (one.name for one in old if one.name in {other.name for other in new}):
        if (name in before) != (name in after):
            yield ParameterMoved(name, before.get(name), after.get(name))
        elif name in before and shared_before.index(name) != shared_after.index(name):
            yield ParameterMoved(name, before[name], after[name])


def _breaks_positional_from(old: tuple[Parameter, ...], new: tuple[Parameter, ...]) -> int | None:
    before, after = _positional(old), _positional(new)
    for position, name in enumerate(before):
        if after[position : position + 1] != [name]:
            return position + 1
    return None


def _numbers(name: str, before: Symbol | None, after: Symbol | None) -> Iterator[NumbersChange]:
    if before is None or after is None:
        yield NumbersChange(name, "removed" if after is None else "added")
        return
    old, new = dict(before.members or ()), dict(after.members or ())
    if old == new:
        return
    by_value = {value: member for member, value in new.items()}
    yield NumbersChange(
        name,
        "changed",
        tuple((member, value) for member, value in new.items() if member not in old),
        tuple((member, value) for member, value in old.items() if member not in new),
        tuple((member, old[member], new[member]) for member in old if member in new and old[member] != new[member]),
        tuple((value, one, by_value[value]) for one, value in old.items() if by_value.get(value, one) != one),
    )


def _plain(value: Any) -> Any:
    if isinstance(value, tuple):
        return [_plain(one) for one in value]
    if isinstance(value, dict):
        return {name: _plain(one) for name, one in value.items()}
    return _plain(asdict(value)) if hasattr(value, "__dataclass_fields__") else value
