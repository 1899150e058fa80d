"""Which top-level names a Python file binds, without parsing the bodies of its functions and classes.

FlashInfer's largest modules have over 8,000 lines. A file is cut at its top-level statements; definitions are parsed
only when asked for, and everything else (imports, assignments) at once. A file that cannot be cut this way is parsed
whole.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import cast

__all__ = ["Binding", "Definition", "Imported", "ModuleIndex", "Value"]

_STRINGS_AND_COMMENTS = re.compile(
    r'"""[^"\\]*(?:(?:\\.|"(?!""))[^"\\]*)*"""'
    r"|'''[^'\\]*(?:(?:\\.|'(?!''))[^'\\]*)*'''"
    r'|"[^"\\\n]*(?:\\.[^"\\\n]*)*"'
    r"|'[^'\\\n]*(?:\\.[^'\\\n]*)*'"
    r"|#[^\n]*",
    re.DOTALL,
)
_STATEMENT = re.compile(r"(?!(?:else|elif|except|finally)\b)[^\s)\]}]")
# Python ignores what precedes a form feed in an indentation.
_FORM_FEED = re.compile(r"^[ \t\f]*\f", re.MULTILINE)
_TYPE_CHECKING = re.compile(r"(not )?(?:\w+\.)?TYPE_CHECKING")
_DEFINITION = re.compile(r"(?:async\s+def|def|class)\s+(\w+)")


@dataclass(frozen=True)
class Definition:
    """A `def` or `class` statement, as source or already parsed."""

    statement: str | ast.stmt
    conditional: bool

    def parse(self) -> ast.stmt:
        """The statement's tree.

        Raises:
            SyntaxError: the source is not valid for this Python.
        """
        return ast.parse(self.statement).body[0] if isinstance(self.statement, str) else self.statement


@dataclass(frozen=True)
class Imported:
    """`from module import name`, or `import module` where `name` is None."""

    module: str
    name: str | None
    conditional: bool


@dataclass(frozen=True)
class Value:
    """The right-hand side of an assignment."""

    expression: ast.expr
    conditional: bool


Binding = Definition | Imported | Value


class ModuleIndex:
    """The top-level bindings of one module; a later binding of a name replaces an earlier one, as in Python."""

    def __init__(self, source: str, package: str) -> None:
        """Index `source`, whose lines end in line feeds; relative imports start from `package`.

        Raises:
            SyntaxError: the file is not valid for this Python.
        """
        self.bindings: dict[str, Binding] = {}
        self.star_imports: list[tuple[str, bool]] = []
        """(module, conditional) of each `from module import *`."""
        self._package = package
        try:
            definitions, rest = _cut(source)
            statements = ast.parse(rest).body
        except SyntaxError:
            definitions, statements = [], ast.parse(source).body
        # In line order, so that the last binding wins.
        pending = iter(definitions)
        following = next(pending, None)
        for statement in statements:
            while following and following[0] < statement.lineno:
                self.bindings[following[1]] = Definition(following[2], conditional=False)
                following = next(pending, None)
            self._bind([statement], conditional=False)
        while following:
            self.bindings[following[1]] = Definition(following[2], conditional=False)
            following = next(pending, None)

    def _bind(self, statements: Sequence[ast.stmt], conditional: bool) -> None:
        for statement in statements:
            if isinstance(statement, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
                self.bindings[statement.name] = Definition(statement, conditional)
            elif isinstance(statement, ast.ImportFrom):
                self._bind_import_from(statement, conditional)
            elif isinstance(statement, ast.Import):
                for alias in statement.names:
                    bound = alias.asname or alias.name.partition(".")[0]
                    self.bindings[bound] = Imported(alias.name if alias.asname else bound, None, conditional)
            elif isinstance(statement, (ast.Assign, ast.AnnAssign)):
                targets = statement.targets if isinstance(statement, ast.Assign) else [statement.target]
                for target in targets if statement.value else []:
                    for name, value in _assigned(target, cast("ast.expr", statement.value)):
                        self.bindings[name] = Value(value, conditional)
            elif isinstance(statement, ast.AugAssign) and isinstance(statement.target, ast.Name):
                value = ast.BinOp(statement.target, statement.op, statement.value)
                self.bindings[statement.target.id] = Value(value, conditional)
            elif isinstance(statement, ast.If):
                self._bind_if(statement, conditional)
            elif isinstance(statement, ast.Try):
                for handler in statement.handlers:
                    self._bind(handler.body, conditional=True)
                for body in (statement.body, statement.orelse, statement.finalbody):
                    self._bind(body, conditional=True)
            elif isinstance(statement, ast.With):
                contexts = (ast.unparse(item.context_expr) for item in statement.items)
                self._bind(statement.body, conditional or any("suppress" in context for context in contexts))

    def _bind_if(self, statement: ast.If, conditional: bool) -> None:
        type_checking = _TYPE_CHECKING.fullmatch(ast.unparse(statement.test))
        if type_checking:
            self._bind(statement.body if type_checking.group(1) else statement.orelse, conditional)
        else:
            # The body comes last because it is the branch meant to be taken.
            self._bind(statement.orelse, conditional=True)
            self._bind(statement.body, conditional=True)

    def _bind_import_from(self, statement: ast.ImportFrom, conditional: bool) -> None:
        parts = self._package.split(".")
        base = parts[: max(len(parts) - statement.level + 1, 0)] if statement.level else []
        module = ".".join([*base, *([statement.module] if statement.module else [])])
        for alias in statement.names:
            if alias.name == "*":
                self.star_imports.append((module, conditional))
            else:
                self.bindings[alias.asname or alias.name] = Imported(module, alias.name, conditional)


def _assigned(target: ast.expr, value: ast.expr) -> Iterator[tuple[str, ast.expr]]:
    """(name, value) of each name that an assignment binds; nothing for unpacking that only running it can tell."""
    if isinstance(target, ast.Name):
        yield target.id, value
    elif isinstance(target, ast.Tuple) and isinstance(value, ast.Tuple) and len(target.elts) == len(value.elts):
        for one, its_value in zip(target.elts, value.elts, strict=True):
            yield from _assigned(one, its_value)


def _cut(source: str) -> tuple[list[tuple[int, str, str]], str]:
    """Split off the definitions as (line, name, source); the rest keeps its line numbers.

    Raises:
        SyntaxError: a bracket spans what looks like two statements.
    """
    blanked = _STRINGS_AND_COMMENTS.sub(_blank, source)
    blanked_lines = _FORM_FEED.sub("", blanked).split("\n")
    lines = source.split("\n")
    starts = [
        number
        for number, line in enumerate(blanked_lines)
        if _STATEMENT.match(line) and not (number and blanked_lines[number - 1].endswith("\\"))
    ]
    definitions = []
    for first, name_line, end in _definitions(blanked_lines, starts):
        match = _DEFINITION.match(blanked_lines[name_line])
        assert match is not None
        code = "".join(blanked_lines[first:end])
        if any(code.count(opening) != code.count(closing) for opening, closing in ("()", "[]", "{}")):
            raise SyntaxError("a bracket is open at the start of a line that looks like a statement")
        definitions.append((first + 1, match.group(1), "\n".join(lines[first:end])))
        lines[first:end] = [""] * (end - first)
    return definitions, "\n".join(lines)


def _blank(match: re.Match[str]) -> str:
    text = match.group()
    # Indented, so that what follows a string on its last line does not look like a statement.
    return "" if text.startswith("#") else "0" + "\n " * text.count("\n")


def _definitions(lines: Sequence[str], starts: Sequence[int]) -> Iterator[tuple[int, int, int]]:
    """(first line with decorators, line of the def or class, line after its end) of each top-level definition."""
    decorator: int | None = None
    for start, end in zip(starts, [*starts, len(lines)][1:], strict=True):
        if lines[start].startswith("@"):
            decorator = start if decorator is None else decorator
        elif _DEFINITION.match(lines[start]):
            yield (start if decorator is None else decorator), start, end
            decorator = None
        else:
            decorator = None
