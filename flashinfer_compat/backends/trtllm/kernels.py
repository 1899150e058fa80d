"""The installed FlashInfer's functions, found by name, and arguments fitted to their signatures by name.

FlashInfer inserts, renames and removes parameters between releases, so nothing is ever passed by position, and what an
installed function takes is asked of the function itself.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from flashinfer_compat.errors import ArgumentError, BackendUnavailableError
from flashinfer_compat.signatures.entry_points import ENTRY_POINTS
from flashinfer_compat.signatures.live import symbol_of
from flashinfer_compat.signatures.model import Kind, Symbol
from flashinfer_compat.signatures.recorded import recorded, releases

__all__ = ["Kernel", "Optional", "find", "find_member"]

_MODULES = {entry.name: entry.modules for entry in ENTRY_POINTS}


@dataclass(frozen=True)
class Optional:
    """An argument that may be left out where a release has no such parameter, if it holds its default."""

    value: Any
    default: Any = None


@dataclass(frozen=True)
class Kernel:
    """One installed function and its signature."""

    function: Callable[..., Any]
    symbol: Symbol

    def takes(self, parameter: str) -> bool:
        """Whether the installed function has the parameter."""
        return parameter in self.symbol.parameter_names

    def require(self, parameter: str, value: Any) -> None:
        """Refuse an argument that the installed function cannot be given.

        Raises:
            ArgumentError: the release has no such parameter; the error says since when it exists.
        """
        if not self.takes(parameter):
            expected = f"to be left out: the installed {self.symbol.name} has no such parameter"
            raise ArgumentError(parameter, expected, _shown(value), _since(self.symbol.name, parameter))

    def fit(self, arguments: Mapping[str, Any], later: tuple[str, ...] = ()) -> dict[str, Any]:
        """The keyword arguments of a call.

        Args:
            arguments: by parameter name; an `Optional` may be dropped, anything else must be taken.
            later: parameters whose values come with each call.

        Raises:
            ArgumentError: the release lacks a parameter whose argument matters; the error says since when it exists.
            BackendUnavailableError: the release has a required parameter that this package does not know.
        """
        fitted = {}
        for name, argument in arguments.items():
            value = argument.value if isinstance(argument, Optional) else argument
            if self.takes(name):
                fitted[name] = value
            elif not isinstance(argument, Optional) or value is not argument.default:
                self.require(name, value)
        required = {
            one.name
            for one in self.symbol.parameters or ()
            if one.default is None and one.kind not in (Kind.VAR_POSITIONAL, Kind.VAR_KEYWORD)
        }
        unknown = required - fitted.keys() - set(later)
        if unknown:
            raise BackendUnavailableError(
                f"the installed {self.symbol.name} requires {', '.join(sorted(unknown))}, which this version of "
                "flashinfer-compat does not know. Use a recorded FlashInfer release, or backend='torch'."
            )
        return fitted


def find(name: str) -> Kernel:
    """The installed function called `name`; this imports flashinfer.

    Raises:
        BackendUnavailableError: flashinfer cannot be imported, or has no such function; the error says why.
    """
    value = _attribute(name)
    return Kernel(value, symbol_of(name, value))


def find_member(enumeration: str, member: str) -> Any:
    """A member of an installed enumeration, by name: the numbers change between releases.

    Raises:
        BackendUnavailableError: there is no such enumeration or member.
    """
    found = _attribute(enumeration)
    if member not in found.__members__:
        raise BackendUnavailableError(f"the installed {enumeration} has no {member}, but {list(found.__members__)}.")
    return found[member]


def _attribute(name: str) -> Any:
    problems = []
    for module_name in _MODULES[name]:
        try:
            module = importlib.import_module(module_name)
        except ModuleNotFoundError as error:
            problems.append(str(error))
            continue
        except (KeyboardInterrupt, MemoryError):
            raise
        except BaseException as error:
            raise BackendUnavailableError(
                f"import {module_name} raised {error!r}. Run: python -m flashinfer_compat doctor"
            ) from error
        found = getattr(module, name, None)
        if found is not None:
            return found
        problems.append(f"{module_name} has no {name}")
    raise BackendUnavailableError(f"FlashInfer has no {name}: {'; '.join(problems)}.")


def _since(entry_point: str, parameter: str) -> str:
    first = next((one for one in releases() if recorded(one).symbols.has_parameter(entry_point, parameter)), None)
    return f"FlashInfer has it since {first}." if first else ""


def _shown(value: Any) -> str:
    return f"a tensor {list(value.shape)}" if hasattr(value, "shape") else repr(value)
