"""Signatures asked of an imported FlashInfer with `inspect`, to check what was read from its source."""

from __future__ import annotations

import ast
import dataclasses
import enum
import importlib
import inspect
import sys
import typing
from collections.abc import Callable, Sequence

from flashinfer_compat.signatures.entry_points import ENTRY_POINTS, EntryPoint
from flashinfer_compat.signatures.model import FACTORY, OPAQUE, Parameter, Symbol, SymbolTable, literal_choices

__all__ = ["differences", "is_imported", "read_live", "symbol_of"]


def is_imported() -> bool:
    """Whether this process has imported flashinfer already."""
    return "flashinfer" in sys.modules


def read_live(entry_points: Sequence[EntryPoint] = ENTRY_POINTS) -> SymbolTable:
    """The entry points that `import flashinfer` gives; this imports flashinfer.

    Whatever an import raises, SystemExit included, becomes the reason of every entry point behind it. Each module is
    tried once.
    """
    names = dict.fromkeys(name for entry in entry_points for name in entry.modules)
    modules = {name: _import(name) for name in names}
    symbols: dict[str, Symbol] = {}
    problems: dict[str, str] = {}
    for entry in entry_points:
        answers = [_look_up(name, modules[name], entry.name) for name in entry.modules]
        symbol = next((answer for answer in answers if isinstance(answer, Symbol)), None)
        problem = next((answer for answer in answers if isinstance(answer, str)), None)
        if symbol:
            symbols[entry.name] = symbol
        elif problem:
            problems[entry.name] = problem
    return SymbolTable(symbols, problems)


def _import(name: str) -> object:
    """The module; the reason where importing it fails; None where there is no such module."""
    try:
        return importlib.import_module(name)
    except KeyboardInterrupt:
        raise
    except BaseException as error:
        if isinstance(error, ModuleNotFoundError) and f"{name}.".startswith(f"{error.name}."):
            return None
        return f"import {name}: {error!r}"


def _look_up(module_name: str, module: object, name: str) -> Symbol | str | None:
    """The entry point in an imported module; the reason where it cannot be described; None where there is none."""
    if module is None or isinstance(module, str):
        return module
    try:
        # A module's own __getattr__ may import more.
        found = getattr(module, name, None)
        return None if found is None else symbol_of(name, found)
    except (Exception, SystemExit) as error:
        return f"{module_name}.{name}: {error!r}"


def differences(static: SymbolTable, live: SymbolTable) -> tuple[str, ...]:
    """Where the two readings disagree, one sentence each; empty when they agree.

    A symbol that the source defines only under a condition may be missing live. A default without a literal form is
    compared as present, not by value.
    """
    found = []
    for name in sorted({*static.symbols, *live.symbols} - {*live.problems}):
        expected, actual = static.get(name), live.get(name)
        if name in static.problems:
            found.append(f"{name}: importable, but its source cannot be read: {static.problems[name]}")
        elif expected is None:
            found.append(f"{name}: not in the source, but importable")
        elif actual is None:
            if not expected.conditional:
                found.append(f"{name}: in the source, but not importable")
        elif expected.members != actual.members:
            found.append(f"{name}: members {expected.members} in the source, {actual.members} live")
        else:
            found.extend(_parameter_differences(name, expected, actual))
    return tuple(found)


def _parameter_differences(name: str, static: Symbol, live: Symbol) -> list[str]:
    expected = [(one.name, one.kind) for one in static.parameters or ()]
    actual = [(one.name, one.kind) for one in live.parameters or ()]
    if expected != actual:
        return [f"{name}: parameters {expected} in the source, {actual} live"]
    pairs = zip(static.parameters or (), live.parameters or (), strict=True)
    return [
        f"{name}.{one.name}: {one.default} {one.choices} in the source, {other.default} {other.choices} live"
        for one, other in pairs
        if one.choices != other.choices
        or (one.default is None) != (other.default is None)
        or (one.default != other.default and OPAQUE not in (one.default, other.default))
    ]


def symbol_of(name: str, value: object) -> Symbol:
    """The signature of a function or class, or the members of an enumeration.

    Raises:
        TypeError, ValueError: `value` is neither, or has no signature.
    """
    module = str(getattr(value, "__module__", ""))
    if isinstance(value, type) and issubclass(value, enum.Enum):
        members = tuple((member, item.value) for member, item in value.__members__.items())
        return Symbol(name, module, members=members)
    function = typing.cast("Callable[..., object]", value)
    return Symbol(name, module, tuple(_parameter(one) for one in inspect.signature(function).parameters.values()))


def _parameter(parameter: inspect.Parameter) -> Parameter:
    default = None if parameter.default is inspect.Parameter.empty else _default_text(parameter.default)
    return Parameter(parameter.name, parameter.kind.name, default, _choices(parameter.annotation))


def _default_text(value: object) -> str:
    if isinstance(value, enum.Enum):
        return f"{type(value).__name__}.{value.name}"
    if value is None or isinstance(value, (bool, int, float, str)) or (isinstance(value, tuple) and not value):
        return OPAQUE if value in (float("inf"), float("-inf")) else repr(value)
    if type(value).__module__ == "torch" and type(value).__name__ == "dtype":
        return str(value)
    return FACTORY if type(value) is type(getattr(dataclasses, "_HAS_DEFAULT_FACTORY", None)) else OPAQUE


def _choices(annotation: object) -> tuple[str, ...]:
    if isinstance(annotation, str):
        return literal_choices(ast.Constant(annotation))
    if typing.get_origin(annotation) is typing.Literal:
        return tuple(choice for choice in typing.get_args(annotation) if isinstance(choice, str))
    return ()
