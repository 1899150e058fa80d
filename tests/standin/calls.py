"""A release, and one call of one of its functions."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

import torch
from packaging.version import Version

__all__ = ["UNSET", "Call", "Era", "Kernel"]


class _Unset:
    def __repr__(self) -> str:
        return "UNSET"


UNSET = _Unset()
"""The default of a parameter whose recorded default is an object (a sentinel of FlashInfer's)."""


@dataclass(frozen=True)
class Era:
    """The release that is stood in for."""

    version: str

    def since(self, border: str) -> bool:
        """Whether this is `border`, a candidate of it, or newer."""
        return _version(self.version) >= _version(f"{border}.dev0")

    def before(self, border: str) -> bool:
        """Whether this is older than `border` and its candidates."""
        return not self.since(border)


@dataclass
class Call:
    """One call, recorded before it is checked."""

    name: str
    arguments: dict[str, Any]
    """Every parameter, defaults included."""
    given: frozenset[str]
    """The parameters the caller passed."""
    keywords: frozenset[str]
    """Those of them passed by keyword."""
    garbage: list[str] = field(default_factory=list)
    """Why the result is not what was asked for, though nothing is raised; empty for a good call."""

    def __getitem__(self, name: str) -> Any:
        return self.arguments[name]

    def get(self, name: str) -> Any:
        """The argument, or None where this release has no such parameter or nothing was passed for it."""
        value = self.arguments.get(name)
        return None if value is UNSET else value

    def tensor(self, name: str) -> torch.Tensor:
        """The argument, which must be a tensor.

        Raises:
            TypeError: it is something else.
        """
        value = self.arguments[name]
        if not isinstance(value, torch.Tensor):
            raise TypeError(f"{self.name}: {name} must be a tensor, got {type(value).__name__}")
        return value

    def misread(self, condition: bool, why: str) -> None:
        """Note that the kernel would read or leave wrong memory where `condition` holds."""
        if condition:
            self.garbage.append(why)


Kernel = Callable[[Era, Call], Any]
"""What a function does, given its release and its bound arguments."""


@lru_cache(maxsize=1024)
def _version(text: str) -> Version:
    return Version(text)
