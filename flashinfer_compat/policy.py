"""From how many tokens on split was measured to be faster than fused: frozen rows that planning reads."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from typing import Any, TypeVar

from flashinfer_compat.errors import ArgumentError, FlashInferCompatError, UnknownNameError
from flashinfer_compat.problem import Problem
from flashinfer_compat.vocabulary import ActivationScaling, Backend, Numerics, Strategy, parse

__all__ = ["NOISE", "SCHEMA_VERSION", "Origin", "Policy", "PolicyError", "PolicyRow", "Times"]

SCHEMA_VERSION = 1
"""Raised when a field changes its meaning or goes; schemas/policy-1.json describes this one."""
NOISE = 0.03
"""Of fused's time: what split differs by less counts as equal. Two runs can differ by more (docs/triton.md)."""


class PolicyError(FlashInferCompatError):
    """A policy file is missing, cannot be read, or was measured elsewhere."""

    def __init__(self, subject: str, expected: str, actual: str, way_out: str = "") -> None:
        self.subject = subject
        self.expected = expected
        self.actual = actual
        self.way_out = way_out
        super().__init__(f"{subject}: expected {expected}, got {actual}." + (f" {way_out}" if way_out else ""))


@dataclass(frozen=True)
class Origin:
    """When, where and with what something was measured."""

    gpu: str | None
    """Its name; None: on a CPU."""
    architecture: str | None
    """Such as sm90; None: on a CPU."""
    driver: str | None
    releases: tuple[tuple[str, str], ...]
    """Name and version of the libraries that compute."""
    date: str
    """Such as 2026-11-30, UTC."""

    def __str__(self) -> str:
        return f"{self.gpu or 'a CPU'}, {self.date}"

    def to_dict(self) -> dict[str, Any]:
        """The origin as plain JSON values."""
        return {**asdict(self), "releases": dict(self.releases)}

    @staticmethod
    def from_dict(values: Mapping[str, Any]) -> Origin:
        """What `to_dict` gave; errors are those of `Policy.from_dict`."""
        _require_fields("measured", values, [field.name for field in fields(Origin)])
        known = {field.name: values[field.name] for field in fields(Origin)}
        for name in ("gpu", "architecture", "driver", "date"):
            if not isinstance(known[name], str) and (known[name] is not None or name == "date"):
                raise ArgumentError(f"measured.{name}", "a string", repr(known[name]))
        releases = _of_kind("measured.releases", known["releases"], dict)
        known["releases"] = tuple((name, _of_kind(name, version, str)) for name, version in releases.items())
        return Origin(**known)


@dataclass(frozen=True)
class Times:
    """Both ways at one number of tokens: medians of one call."""

    tokens: int
    fused: float
    """Microseconds."""
    split: float
    """Microseconds."""

    def __post_init__(self) -> None:
        _require_count("tokens", self.tokens, 1)
        for name in ("fused", "split"):
            value = getattr(self, name)
            if not isinstance(value, (int, float)) or isinstance(value, bool) or not 0 < value < float("inf"):
                raise ArgumentError(name, "a positive number of microseconds", repr(value))

    @staticmethod
    def from_dict(values: Mapping[str, Any]) -> Times:
        """Of plain JSON values; errors are those of `Policy.from_dict`."""
        names = [field.name for field in fields(Times)]
        _require_fields("times", values, names)
        return Times(*(values[name] for name in names))


@dataclass(frozen=True)
class PolicyRow:
    """What was measured of one layer on one backend.

    Raises:
        ArgumentError: a size is no positive integer, times are not in the order of tokens, or `split_from_tokens` is
            not one of them, or one at which split is not the faster, or one before others at which it is the slower.
    """

    backend: Backend
    numerics: Numerics
    hidden_size: int
    intermediate_size: int
    num_experts: int
    top_k: int
    num_shared_experts: int
    fused: Strategy
    """The fused strategy that split was compared with."""
    split_from_tokens: int | None
    """The smallest measured number of tokens at which split is faster, and slower at no larger one; None: at none."""
    times: tuple[Times, ...]
    """In the order of tokens."""
    origin: Origin

    def __post_init__(self) -> None:
        for name in _SIZES:
            _require_count(name, getattr(self, name), 1)
        if not self.fused.is_fused:
            raise ArgumentError("fused", "native or expanded", repr(self.fused.value))
        tokens = [one.tokens for one in self.times]
        if not tokens or tokens != sorted(set(tokens)):
            raise ArgumentError("times", "times by ascending tokens", str(tokens))
        if self.split_from_tokens is not None:
            _require_count("split_from_tokens", self.split_from_tokens, 1)
        if self.split_from_tokens not in (None, *tokens):
            raise ArgumentError("split_from_tokens", f"None or one of {tokens}", repr(self.split_from_tokens))
        at = self.at_switch
        if at is not None and at.split >= at.fused:
            actual = f"{at.tokens}, at which split takes {at.split} us and fused {at.fused}"
            raise ArgumentError("split_from_tokens", "a number of tokens at which split is faster", actual)
        later = () if at is None else (one for one in self.times if one.tokens > at.tokens)
        for one in later:
            if one.split > (1 + NOISE) * one.fused:
                actual = f"{self.split_from_tokens}; with {one.tokens} split takes {one.split} us and fused {one.fused}"
                raise ArgumentError("split_from_tokens", "a number from which on split is not slower", actual)

    @property
    def split_always(self) -> bool:
        """Whether split is preferred at every measured number of tokens."""
        return self.split_from_tokens == self.times[0].tokens

    @property
    def at_switch(self) -> Times | None:
        """The times at `split_from_tokens`."""
        return next((one for one in self.times if one.tokens == self.split_from_tokens), None)

    @property
    def subject(self) -> tuple[object, ...]:
        """What it speaks of: equal for two measurements of the same."""
        return (self.backend, self.numerics, self.fused, *(getattr(self, name) for name in _SIZES))

    def speaks_of(self, problem: Problem, strategy: Strategy, backend: Backend, architecture: str | None) -> bool:
        """Whether it was measured of just this: sizes are matched exactly, nothing is interpolated."""
        return (
            (self.backend, self.fused, self.numerics) == (backend, strategy, problem.numerics)
            and all(getattr(self, name) == getattr(problem, name) for name in _SIZES)
            and problem.activation_scaling is ActivationScaling.CHECKPOINT
            and self.origin.architecture == architecture
        )

    def to_dict(self) -> dict[str, Any]:
        """The row as plain JSON values."""
        return {
            "backend": self.backend.value,
            "numerics": self.numerics.value,
            **{name: getattr(self, name) for name in _SIZES},
            "fused": self.fused.value,
            "split_from_tokens": self.split_from_tokens,
            "times": [asdict(one) for one in self.times],
            "measured": self.origin.to_dict(),
        }

    @staticmethod
    def from_dict(values: Mapping[str, Any]) -> PolicyRow:
        """What `to_dict` gave; errors are those of `Policy.from_dict`."""
        _require_fields("a row", values, _FIELDS)
        return PolicyRow(
            parse(Backend, values["backend"], "backend"),
            parse(Numerics, values["numerics"], "numerics"),
            **{name: values[name] for name in _SIZES},
            fused=parse(Strategy, values["fused"], "fused"),
            split_from_tokens=values["split_from_tokens"],
            times=tuple(Times.from_dict(one) for one in _of_kind("times", values["times"], list)),
            origin=Origin.from_dict(values["measured"]),
        )


@dataclass(frozen=True)
class Policy:
    """The content of a policy file.

    Raises:
        ArgumentError: two rows speak of the same.
    """

    facts: Mapping[str, Any]
    """What the times may depend on, as `verified.facts` gives it."""
    rows: tuple[PolicyRow, ...]

    def __post_init__(self) -> None:
        seen = set()
        for row in self.rows:
            if row.subject in seen:
                what = f"two of {row.fused.value} on {row.backend.value}, {row.numerics.value}, of the same sizes"
                raise ArgumentError("rows", "one row for each layer, backend and fused strategy", what)
            seen.add(row.subject)

    def with_rows(self, rows: tuple[PolicyRow, ...]) -> Policy:
        """These rows, and of its own those that they do not speak of."""
        new = {one.subject for one in rows}
        return Policy(self.facts, (*(one for one in self.rows if one.subject not in new), *rows))

    def to_dict(self) -> dict[str, Any]:
        """The policy as plain JSON values, as schemas/policy-1.json describes them."""
        return {
            "schema_version": SCHEMA_VERSION,
            "facts": dict(self.facts),
            "rows": [one.to_dict() for one in self.rows],
        }

    @staticmethod
    def from_dict(values: Any) -> Policy:
        """What `to_dict` gave.

        Raises:
            KeyError, TypeError, ValueError: it is not; ArgumentError is a ValueError.
        """
        _require_fields("policy", values, ("schema_version", "facts", "rows"))
        if values["schema_version"] != SCHEMA_VERSION:
            raise ArgumentError("schema_version", str(SCHEMA_VERSION), repr(values["schema_version"]))
        rows = _of_kind("rows", values["rows"], list)
        return Policy(_of_kind("facts", values["facts"], dict), tuple(PolicyRow.from_dict(one) for one in rows))


_SIZES = ("hidden_size", "intermediate_size", "num_experts", "top_k", "num_shared_experts")
_FIELDS = ("backend", "numerics", *_SIZES, "fused", "split_from_tokens", "times", "measured")

_K = TypeVar("_K")
_KINDS: Mapping[type, str] = {dict: "a JSON object", list: "a JSON array", str: "a string"}


def _of_kind(name: str, value: object, kind: type[_K]) -> _K:
    if not isinstance(value, kind):
        raise ArgumentError(name, _KINDS[kind], type(value).__name__)
    return value


def _require_fields(what: str, values: object, known: Sequence[str]) -> None:
    """What is missing is found where it is read."""
    unknown = sorted(set(_of_kind(what, values, dict)) - set(known))
    if unknown:
        raise UnknownNameError(f"a field of {what}", unknown[0], known)


def _require_count(name: str, value: object, least: int) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or value < least:
        raise ArgumentError(name, f"an integer of at least {least}", repr(value))
