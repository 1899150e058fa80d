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

__all__ = ["Binding", "Definition", "Imported", "ModuleIndex", "Value"]

_STRINGS_AND_COMMENTS = re.compile(
    r'"""[^"\\]*(?:(?:\\.|"(?!""))[^"\\]*)*"""'
    r"|'''[^'\\]*(?:(?:\\.|'(?!''))[^'\\]*)*'''"
    r'|"[^"\\\n]*(?:\\.[^"\\\n]*)*"'
    r"|'[^'\\\n]*(?:\\.[^'\\\n]*)*'"
    r"|#[^\n]*",
    re.DOTALL,
)
_STATEMENT = re.compile(r"^(?!(?:else|elif|except|finally|case)\b)[A-Za-z_@]", re.MULTILINE)
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
        """Index `source`; relative imports start from `package`.

        Raises:
            SyntaxError: the file is not valid for this Python.
        """
        self.bindings: dict[str, Binding] = {}
        self.star_imports: list[str] = []
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
                for target in targets:
                    if isinstance(target, ast.Name) and statement.value is not None:
                        self.bindings[target.id] = Value(statement.value, conditional)
            elif isinstance(statement, ast.If):
                # The body comes last because it is the branch meant to be taken.
                self._bind(statement.orelse, conditional=True)
                if "TYPE_CHECKING" not in ast.unparse(statement.test):
                    self._bind(statement.body, conditional=True)
            elif isinstance(statement, ast.Try):
                for handler in statement.handlers:
                    self._bind(handler.body, conditional=True)
                for body in (statement.body, statement.orelse, statement.finalbody):
                    self._bind(body, conditional=True)
            elif isinstance(statement, ast.With):
                self._bind(statement.body, conditional)

    def _bind_import_from(self, statement: ast.ImportFrom, conditional: bool) -> None:
        parts = self._package.split(".")
        base = parts[: len(parts) - (statement.level - 1)] if statement.level else []
        module = ".".join([*base, *([statement.module] if statement.module else [])])
        for alias in statement.names:
            if alias.name == "*":
                self.star_imports.append(module)
            else:
                self.bindings[alias.asname or alias.name] = Imported(module, alias.name, conditional)


def _cut(source: str) -> tuple[list[tuple[int, str, str]], str]:
    """Split off the definitions as (line, name, source); the rest keeps its line numbers."""
    blanked = _STRINGS_AND_COMMENTS.sub(lambda match: "0" + "\n" * match.group().count("\n"), source)
    blanked_lines = blanked.split("\n")
    lines = source.split("\n")
    if len(blanked_lines) != len(lines):
        raise SyntaxError("strings could not be told from code")
    starts = [number for number, line in enumerate(blanked_lines) if _STATEMENT.match(line)]
    definitions = []
    for first, name_line, end in _definitions(blanked_lines, starts):
        match = _DEFINITION.match(blanked_lines[name_line])
        assert match is not None
        definitions.append((first + 1, match.group(1), "\n".join(lines[first:end])))
        lines[first:end] = [""] * (end - first)
    return definitions, "\n".join(lines)


def _definitions(lines: Sequence[str], starts: Sequence[int]) -> Iterator[tuple[int, int, int]]:
    """(first line with decorators, line of the def or class, line after its end) of each top-level definition."""
    decorator: int | None = None
    for start, end in zip(starts, [*starts[1:], len(lines)], strict=True):
        if lines[start].startswith("@"):
            decorator = start if decorator is None else decorator
        elif _DEFINITION.match(lines[start]):
            yield (start if decorator is None else decorator), start, end
            decorator = None
        else:
            decorator = None
