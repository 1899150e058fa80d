"""Signatures read from source files, without importing anything."""

from __future__ import annotations

import ast
from collections.abc import Iterable, Sequence

from flashinfer_compat.signatures.entry_points import ENTRY_POINTS, EntryPoint
from flashinfer_compat.signatures.model import OPAQUE, Parameter, Symbol, SymbolTable, parameters_of
from flashinfer_compat.signatures.modules import Definition, Imported, ModuleIndex, Value
from flashinfer_compat.signatures.source import Source

__all__ = ["StaticReader", "read_source"]


def read_source(source: Source, entry_points: Sequence[EntryPoint] = ENTRY_POINTS) -> SymbolTable:
    """The entry points that the FlashInfer in `source` defines."""
    return StaticReader(source).read(entry_points)


class StaticReader:
    """Follows re-exports from a public name to the definition."""

    def __init__(self, source: Source) -> None:
        self._source = source
        self._modules: dict[str, ModuleIndex | None] = {}

    def read(self, entry_points: Iterable[EntryPoint]) -> SymbolTable:
        """The entry points that exist; one that cannot be read becomes a problem with its reason."""
        symbols: dict[str, Symbol] = {}
        problems: dict[str, str] = {}
        for entry in entry_points:
            try:
                found = next(filter(None, (self.symbol(module, entry.name) for module in entry.modules)), None)
            except (SyntaxError, UnicodeDecodeError, ValueError, RecursionError, OSError) as error:
                problems[entry.name] = f"{type(error).__name__}: {error}"
                continue
            if found is not None:
                symbols[entry.name] = found
        return SymbolTable(symbols, problems)

    def symbol(self, module: str, name: str) -> Symbol | None:
        """The function, class or enumeration that `from module import name` would give; None where there is none."""
        found = self._find(module, name)
        if found is None or isinstance(found[1], ast.expr):
            return None
        module, statement, conditional = found
        if isinstance(statement, (ast.FunctionDef, ast.AsyncFunctionDef)):
            parameters = tuple(parameters_of(statement.args, lambda default: self._default(module, default)))
            return Symbol(name, module, parameters, None, conditional)
        if not isinstance(statement, ast.ClassDef):
            return None
        if self._is_enumeration(module, statement):
            return Symbol(name, module, None, tuple(self._members(statement).items()), conditional)
        return Symbol(name, module, tuple(self._constructor(module, statement)), None, conditional)

    def _module(self, name: str) -> ModuleIndex | None:
        if name not in self._modules:
            self._modules[name] = None
            stem = name.replace(".", "/")
            for path, package in ((f"{stem}/__init__.py", name), (f"{stem}.py", name.rpartition(".")[0])):
                text = self._source.read(path)
                if text is not None:
                    self._modules[name] = ModuleIndex(text.decode("utf-8"), package)
                    break
        return self._modules[name]

    def _find(
        self, module: str, name: str, seen: frozenset[tuple[str, str]] = frozenset()
    ) -> tuple[str, ast.stmt | ast.expr, bool] | None:
        """(module, definition or assigned value, conditional) of a name, through imports and aliases."""
        index = self._module(module)
        if index is None or (module, name) in seen:
            return None
        seen = seen | {(module, name)}
        binding = index.bindings.get(name)
        if binding is None:
            found = (self._find(star, name, seen) for star in index.star_imports)
            return next((one for one in found if one is not None), None)
        if isinstance(binding, Definition):
            return module, binding.parse(), binding.conditional
        if isinstance(binding, Value) and not isinstance(binding.expression, ast.Name):
            return module, binding.expression, binding.conditional
        if isinstance(binding, Value):
            assert isinstance(binding.expression, ast.Name)
            target = self._find(module, binding.expression.id, seen)
        elif binding.name is not None:
            target = self._find(binding.module, binding.name, seen)
        else:
            return None
        return target and (target[0], target[1], target[2] or binding.conditional)

    def _default(self, module: str, expression: ast.expr) -> str:
        try:
            return repr(ast.literal_eval(expression))
        except ValueError:
            pass
        if isinstance(expression, ast.Name):
            found = self._find(module, expression.id)
            if found and isinstance(found[1], ast.expr) and not isinstance(found[1], ast.Name):
                return self._default(found[0], found[1])
        if isinstance(expression, ast.Attribute):
            return self._attribute(module, expression)
        return OPAQUE

    def _attribute(self, module: str, expression: ast.Attribute) -> str:
        if expression.attr == "value" and isinstance(expression.value, ast.Attribute):
            owner, member = expression.value.value, expression.value.attr
            enumeration = self._class(module, owner)
            members = self._members(enumeration[1]) if enumeration else {}
            return repr(members[member]) if member in members else OPAQUE
        if self._class(module, expression.value):
            return ast.unparse(expression)
        index = self._module(module)
        binding = index.bindings.get(expression.value.id) if index and isinstance(expression.value, ast.Name) else None
        is_torch = isinstance(binding, Imported) and binding.module == "torch" and binding.name is None
        return ast.unparse(expression) if is_torch else OPAQUE

    def _class(self, module: str, expression: ast.expr) -> tuple[str, ast.ClassDef] | None:
        found = self._find(module, expression.id) if isinstance(expression, ast.Name) else None
        return (found[0], found[1]) if found and isinstance(found[1], ast.ClassDef) else None

    def _is_enumeration(self, module: str, statement: ast.ClassDef) -> bool:
        for base in statement.bases:
            if ast.unparse(base).rpartition(".")[2] in {"Enum", "IntEnum", "StrEnum", "Flag", "IntFlag"}:
                return True
            parent = self._class(module, base)
            if parent and self._is_enumeration(*parent):
                return True
        return False

    def _members(self, statement: ast.ClassDef) -> dict[str, int | str]:
        members: dict[str, int | str] = {}
        for item in statement.body:
            if isinstance(item, ast.Assign) and isinstance(item.targets[0], ast.Name):
                value = ast.literal_eval(item.value)
                # `Default = (0,)` calls int(0): FlashInfer writes many members with this trailing comma.
                members[item.targets[0].id] = value[0] if isinstance(value, tuple) and len(value) == 1 else value
        return members

    def _constructor(self, module: str, statement: ast.ClassDef) -> list[Parameter]:
        for item in statement.body:
            if isinstance(item, ast.FunctionDef) and item.name == "__init__":
                return list(parameters_of(item.args, lambda default: self._default(module, default)))[1:]
        parents = (self._class(module, base) for base in statement.bases)
        inherited = next((self._constructor(*parent) for parent in parents if parent), [])
        if any("dataclass" in ast.unparse(decorator) for decorator in statement.decorator_list):
            return self._fields(module, statement, inherited)
        return inherited

    def _fields(self, module: str, statement: ast.ClassDef, inherited: list[Parameter]) -> list[Parameter]:
        fields = {parameter.name: parameter for parameter in inherited}
        kind = "POSITIONAL_OR_KEYWORD"
        for item in statement.body:
            if not isinstance(item, ast.AnnAssign) or not isinstance(item.target, ast.Name):
                continue
            annotation = ast.unparse(item.annotation)
            if annotation.endswith("KW_ONLY"):
                kind = "KEYWORD_ONLY"
            elif "ClassVar" not in annotation:
                field = self._field(module, item.target.id, kind, item.value)
                if field is not None:
                    fields[field.name] = field
        return sorted(fields.values(), key=lambda field: field.kind == "KEYWORD_ONLY")

    def _field(self, module: str, name: str, kind: str, value: ast.expr | None) -> Parameter | None:
        if isinstance(value, ast.Call) and ast.unparse(value.func).endswith("field"):
            options = {keyword.arg: keyword.value for keyword in value.keywords}
            if _is_literal(options.get("init"), False):
                return None
            if _is_literal(options.get("kw_only"), True):
                kind = "KEYWORD_ONLY"
            if "default_factory" in options:
                return Parameter(name, kind, "<factory>")
            value = options.get("default")
        return Parameter(name, kind, None if value is None else self._default(module, value))


def _is_literal(expression: ast.expr | None, value: bool) -> bool:
    return isinstance(expression, ast.Constant) and expression.value is value
