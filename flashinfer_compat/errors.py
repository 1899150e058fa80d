"""The errors this package raises on purpose.

Every one of them names the argument, tensor or file it is about, says what was expected and what was found, and how to
go on.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, cast

__all__ = [
    "ArgumentError",
    "BackendUnavailableError",
    "CheckpointError",
    "DependencyMissingError",
    "ExpertParallelismError",
    "FlashInferCompatError",
    "RecordedDataError",
    "StrategyUnavailableError",
    "TensorError",
    "UnknownNameError",
    "UnknownReleaseError",
]

_MOST_SHOWN = 24
"""Longer lists of choices are cut in the middle."""


class FlashInferCompatError(Exception):
    """Base of every error this package raises on purpose; each can be pickled, to leave a worker process."""

    def __reduce__(self) -> tuple[Any, ...]:
        # An exception is unpickled by calling it with its message, which these do not take.
        kind, arguments, *state = cast("tuple[Any, ...]", super().__reduce__())
        return _restore, (kind, arguments), *state


class ArgumentError(FlashInferCompatError, ValueError):
    """An argument's value cannot be used."""

    def __init__(self, argument: str, expected: str, actual: str, way_out: str = "") -> None:
        self.argument = argument
        self.expected = expected
        self.actual = actual
        self.way_out = way_out
        super().__init__(_sentence(argument, expected, actual, way_out))


class TensorError(ArgumentError):
    """A tensor's dtype, shape, device or content cannot be used."""


class UnknownNameError(ArgumentError):
    """A name is not one of a closed set; `nearest` is the valid one meant, by spelling unless given."""

    def __init__(self, argument: str, name: str, choices: Iterable[str], near: str | None = None) -> None:
        self.choices = tuple(choices)
        self.nearest = near or nearest(name, self.choices)
        way_out = f"Did you mean {self.nearest!r}?" if self.nearest else ""
        shown = self.choices
        if len(shown) > _MOST_SHOWN:
            shown = (*shown[:3], f"... ({len(self.choices)} in all)", *shown[-3:])
        super().__init__(argument, "one of " + ", ".join(shown), repr(name), way_out)


class UnknownReleaseError(UnknownNameError):
    """A FlashInfer release is not among the recorded ones."""


class CheckpointError(FlashInferCompatError):
    """A checkpoint's file or tensor is missing or cannot be used."""

    def __init__(self, subject: str, expected: str, actual: str, way_out: str = "") -> None:
        self.subject = subject
        self.expected = expected
        self.actual = actual
        self.way_out = way_out
        super().__init__(_sentence(subject, expected, actual, way_out))


class StrategyUnavailableError(FlashInferCompatError):
    """The asked-for strategy, backend, or every one of them, cannot run; `rejected` says why, one entry a reason."""

    def __init__(self, message: str, rejected: Iterable[Mapping[str, str]] = ()) -> None:
        self.rejected = tuple(rejected)
        super().__init__(message)

    @property
    def codes(self) -> tuple[str, ...]:
        """The reason code of each entry of `rejected`."""
        return tuple(one["code"] for one in self.rejected)


class ExpertParallelismError(StrategyUnavailableError, NotImplementedError):
    """A fused strategy was asked for under expert parallelism, which no release can run."""


class BackendUnavailableError(FlashInferCompatError):
    """A backend cannot execute here, though planning can speak of it."""


class DependencyMissingError(FlashInferCompatError, ImportError):
    """A part of the package needs a library that is not installed."""

    def __init__(self, library: str, needed_for: str) -> None:
        self.library = library
        super().__init__(
            f"{needed_for} needs {library}, which is not installed. Run: pip install {library}",
            name=library,
        )


class RecordedDataError(FlashInferCompatError):
    """The signature data shipped with the package cannot be read."""


def nearest(name: str, choices: Iterable[str]) -> str | None:
    """The choice closest to `name` in spelling, or None where none is close."""
    import difflib

    by_folded = {choice.lower(): choice for choice in choices}
    matches = difflib.get_close_matches(name.lower(), list(by_folded), n=1, cutoff=0.5)
    return by_folded[matches[0]] if matches else None


def _restore(kind: type[FlashInferCompatError], arguments: tuple[object, ...]) -> FlashInferCompatError:
    return kind.__new__(kind, *arguments)


def _sentence(subject: str, expected: str, actual: str, way_out: str) -> str:
    text = f"{subject}: expected {expected}, got {actual}."
    return f"{text} {way_out}" if way_out else text
