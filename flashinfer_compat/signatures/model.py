"""What is known of one entry point: its parameters, or its members where it is an enumeration."""

from __future__ import annotations

import ast
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any, cast

if TYPE_CHECKING:
    DefaultText = Callable[[ast.expr], str]

__all__ = ["FACTORY", "OPAQUE", "Kind", "Parameter", "Symbol", "SymbolTable"]

OPAQUE = "<object>"
"""The default of a parameter whose default is an object without a literal form (a sentinel, for instance)."""

FACTORY = "<factory>"
"""The default of a dataclass field that a factory makes."""

_STRINGS_AND_MARKERS = re.compile(r"""('(?:[^'\\]|\\.)*'|"(?:[^"\\]|\\.)*")|<(object|factory)>""")
_TEXT = re.compile(r"([\w.]*)(\?)?(?:\((.*)\)|\{(.*)\})")
_MARKERS = {"OBJECT_": OPAQUE, "FACTORY_": FACTORY}


class Kind:
    """How a parameter can be passed; the names of `inspect.Parameter`'s kinds."""

    POSITIONAL_ONLY = "POSITIONAL_ONLY"
    POSITIONAL_OR_KEYWORD = "POSITIONAL_OR_KEYWORD"
    VAR_POSITIONAL = "VAR_POSITIONAL"
    KEYWORD_ONLY = "KEYWORD_ONLY"
    VAR_KEYWORD = "VAR_KEYWORD"


@dataclass(frozen=True)
class Parameter:
    """One parameter of a function or of a class's constructor."""

    name: str
    kind: str = Kind.POSITIONAL_OR_KEYWORD
    default: str | None = None
    """None: required. Otherwise the default as Python source: a literal, `Enumeration.Member`, `torch.bfloat16`,
    `FACTORY` or `OPAQUE`."""
    choices: tuple[str, ...] = ()
    """The strings a `Literal[...]` annotation allows; empty where the annotation is something else."""


@dataclass(frozen=True)
class Symbol:
    """A function, class or enumeration that an installed FlashInfer defines."""

    name: str
    module: str
    """The module that defines it (not one that re-exports it)."""
    parameters: tuple[Parameter, ...] | None = None
    """None for an enumeration."""
    members: tuple[tuple[str, int | str], ...] | None = None
    """(name, value) of each member; None unless it is an enumeration."""
    conditional: bool = False
    """Whether a test or an exception at import time can leave it undefined."""

    @cached_property
    def parameter_names(self) -> frozenset[str]:
        """The names of all parameters."""
        return frozenset(parameter.name for parameter in self.parameters or ())

    @cached_property
    def passing(self) -> tuple[tuple[str, str, bool], ...]:
        """(name, kind, whether it must be given) of each parameter: what a caller depends on."""
        return tuple((one.name, one.kind, one.default is None) for one in self.parameters or ())

    def parameter(self, name: str) -> Parameter | None:
        """The parameter called `name`, if there is one."""
        return next((parameter for parameter in self.parameters or () if parameter.name == name), None)

    def member(self, name: str) -> int | str | None:
        """The value of the member called `name`, if there is one."""
        return dict(self.members or ()).get(name)

    def to_text(self) -> str:
        """The symbol in the form that the recorded data holds; `from_text` reads it back."""
        if self.members is not None:
            body = "{" + ", ".join(f"{name}={value!r}" for name, value in self.members) + "}"
        else:
            body = "(" + ", ".join(_parameter_texts(self.parameters or ())) + ")"
        return f"{self.module}{'?' if self.conditional else ''}{body}"

    def to_data(self) -> list[object]:
        """The symbol as JSON values that are quick to read; `from_data` reads them back."""
        parameters = self.parameters and [[one.name, one.kind, one.default, one.choices] for one in self.parameters]
        return [self.name, self.module, parameters, self.members, self.conditional]

    @staticmethod
    def from_data(data: list[Any]) -> Symbol:
        """Read what `to_data` wrote.

        Raises:
            ValueError, TypeError: the data is not of that form.
        """
        name, module, parameters, members, conditional = data
        if parameters is not None:
            parameters = tuple(
                Parameter(one, kind, default, tuple(choices)) for one, kind, default, choices in parameters
            )
        if members is not None:
            members = tuple((member, value) for member, value in members)
        return Symbol(name, module, parameters, members, conditional)

    @staticmethod
    def from_text(name: str, text: str) -> Symbol:
        """Read what `to_text` wrote.

        Raises:
            ValueError: the text is not of that form.
        """
        match = _TEXT.fullmatch(text)
        if match is None:
            raise ValueError(f"{name}: expected module(parameters) or module{{members}}, got {text!r}")
        module, conditional, parameters, members = match.groups()
        try:
            if members is not None:
                call = cast("ast.Call", ast.parse(f"f({members})", mode="eval").body)
                if call.args or any(item.arg is None for item in call.keywords):
                    raise ValueError(f"{name}: expected name=value for each member, got {text!r}")
                values = tuple((str(item.arg), ast.literal_eval(item.value)) for item in call.keywords)
                return Symbol(name, module, None, values, bool(conditional))
            source = _STRINGS_AND_MARKERS.sub(
                lambda found: found.group(1) or f"{found.group(2).upper()}_", f"def f({parameters}): ..."
            )
            function = cast("ast.FunctionDef", ast.parse(source).body[0])
        except SyntaxError as error:
            raise ValueError(f"{name}: {error} in {text!r}") from None
        return Symbol(name, module, tuple(parameters_of(function.args, _recorded_default)), None, bool(conditional))


@dataclass(frozen=True)
class SymbolTable:
    """The entry points of one FlashInfer, installed or recorded."""

    symbols: Mapping[str, Symbol]
    """By entry point name; an entry point that is missing is absent from the mapping."""
    problems: Mapping[str, str] = field(default_factory=dict)
    """By entry point name: why it could not be read, where it may exist all the same."""

    def get(self, name: str) -> Symbol | None:
        """The symbol called `name`, if it exists."""
        return self.symbols.get(name)

    def has_parameter(self, name: str, parameter: str) -> bool:
        """Whether `name` exists and takes `parameter`."""
        symbol = self.symbols.get(name)
        return symbol is not None and parameter in symbol.parameter_names

    def has_member(self, name: str, member: str) -> bool:
        """Whether the enumeration `name` exists and has `member`."""
        symbol = self.symbols.get(name)
        return symbol is not None and symbol.member(member) is not None

    def choices(self, name: str, parameter: str) -> tuple[str, ...]:
        """The strings that `parameter` of `name` allows; empty where that is not known."""
        symbol = self.symbols.get(name)
        found = symbol.parameter(parameter) if symbol else None
        return found.choices if found else ()


def parameters_of(arguments: ast.arguments, default_text: DefaultText) -> Iterator[Parameter]:
    """The parameters of a parsed function, in order; `default_text` turns a default's expression into its text."""
    positional = [*arguments.posonlyargs, *arguments.args]
    missing = len(positional) - len(arguments.defaults)
    for index, argument in enumerate(positional):
        kind = Kind.POSITIONAL_ONLY if index < len(arguments.posonlyargs) else Kind.POSITIONAL_OR_KEYWORD
        default = arguments.defaults[index - missing] if index >= missing else None
        yield _parameter(argument, kind, default, default_text)
    if arguments.vararg:
        yield _parameter(arguments.vararg, Kind.VAR_POSITIONAL, None, default_text)
    for argument, keyword_default in zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True):
        yield _parameter(argument, Kind.KEYWORD_ONLY, keyword_default, default_text)
    if arguments.kwarg:
        yield _parameter(arguments.kwarg, Kind.VAR_KEYWORD, None, default_text)


def literal_choices(annotation: ast.expr | None) -> tuple[str, ...]:
    """The strings of a `Literal[...]` annotation; empty for any other annotation."""
    if isinstance(annotation, ast.Constant) and isinstance(annotation.value, str):
        try:
            annotation = ast.parse(annotation.value, mode="eval").body
        except SyntaxError:
            return ()
    if not isinstance(annotation, ast.Subscript) or not ast.unparse(annotation.value).endswith("Literal"):
        return ()
    items = annotation.slice.elts if isinstance(annotation.slice, ast.Tuple) else [annotation.slice]
    return tuple(item.value for item in items if isinstance(item, ast.Constant) and isinstance(item.value, str))


def _parameter(argument: ast.arg, kind: str, default: ast.expr | None, default_text: DefaultText) -> Parameter:
    text = None if default is None else default_text(default)
    return Parameter(argument.arg, kind, text, literal_choices(argument.annotation))


def _recorded_default(expression: ast.expr) -> str:
    return _MARKERS.get(text := ast.unparse(expression), text)


def _parameter_texts(parameters: tuple[Parameter, ...]) -> Iterator[str]:
    starred = False
    for index, parameter in enumerate(parameters):
        if parameter.kind == Kind.KEYWORD_ONLY and not starred:
            starred = True
            yield "*"
        starred = starred or parameter.kind == Kind.VAR_POSITIONAL
        prefix = {Kind.VAR_POSITIONAL: "*", Kind.VAR_KEYWORD: "**"}.get(parameter.kind, "")
        annotation = f": Literal[{', '.join(map(repr, parameter.choices))}]" if parameter.choices else ""
        default = "" if parameter.default is None else f"={parameter.default}"
        yield f"{prefix}{parameter.name}{annotation}{default}"
        following = parameters[index + 1].kind if index + 1 < len(parameters) else None
        if parameter.kind == Kind.POSITIONAL_ONLY and following != Kind.POSITIONAL_ONLY:
            yield "/"
