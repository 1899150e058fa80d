"""Signatures read from source files, without importing anything."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterable, Mapping, Sequence
from importlib.util import decode_source

from flashinfer_compat.signatures.entry_points import ENTRY_POINTS, EntryPoint
from flashinfer_compat.signatures.model import FACTORY, OPAQUE, Kind, Parameter, Symbol, SymbolTable, parameters_of
from flashinfer_compat.signatures.modules import Definition, Imported, ModuleIndex, Value
from flashinfer_compat.signatures.source import Source

__all__ = ["StaticReader", "UnreadableError", "read_source"]

_FIELD_MARKER = re.compile(r"['\"]?(?:\w+\.)*(ClassVar|KW_ONLY)\b")
# Names that an enumeration's body keeps for itself.
_RESERVED = re.compile(r"_.*_")


def read_source(source: Source, entry_points: Sequence[EntryPoint] = ENTRY_POINTS) -> SymbolTable:
    """The entry points that the FlashInfer in `source` defines."""
    return StaticReader(source).read(entry_points)


class UnreadableError(ValueError):
    """A file or an expression cannot be read; an entry point behind it may exist all the same."""


class StaticReader:
    """Follows re-exports from a public name to the definition."""

    def __init__(self, source: Source) -> None:
        self._source = source
        self._modules: dict[str, ModuleIndex | UnreadableError | None] = {}

    def read(self, entry_points: Iterable[EntryPoint]) -> SymbolTable:
        """The entry points that exist; one that cannot be read becomes a problem with its reason."""
        symbols: dict[str, Symbol] = {}
        problems: dict[str, str] = {}
        for entry in entry_points:
            try:
                found = next(filter(None, (self.symbol(module, entry.name) for module in entry.modules)), None)
            except UnreadableError as error:
                problems[entry.name] = str(error)
                continue
            except (SyntaxError, ValueError, RecursionError) as error:
                problems[entry.name] = f"{type(error).__name__}: {error}"
                continue
            if found is not None:
                symbols[entry.name] = found
        return SymbolTable(symbols, problems)

    def symbol(self, module: str, name: str) -> Symbol | None:
        """The function, class or enumeration that `from module import name` would give; None where there is none.

        Raises:
            UnreadableError: a file on the way cannot be read, or the name is the result of a computation.
            SyntaxError: the definition is not valid for this Python.
        """
        found = self._find(module, name)
        if found is None:
            return None
        module, statement, conditional = found
        if isinstance(statement, ast.expr):
            if isinstance(statement, ast.Constant):
                return None
            raise UnreadableError(f"{module} computes {name}: {ast.unparse(statement)}")
        if isinstance(statement, (ast.FunctionDef, ast.AsyncFunctionDef)):
            parameters = tuple(parameters_of(statement.args, lambda default: self._default(module, default)))
            return Symbol(name, module, parameters, None, conditional)
        if not isinstance(statement, ast.ClassDef):
            return None
        if self._is_enumeration(module, statement):
            return Symbol(name, module, None, tuple(self._members(statement).items()), conditional)
        return Symbol(name, module, tuple(self._constructor(module, statement) or ()), None, conditional)

    def _module(self, name: str) -> ModuleIndex | None:
        if name not in self._modules:
            self._modules[name] = self._load(name)
        found = self._modules[name]
        if isinstance(found, UnreadableError):
            raise found
        return found

    def _load(self, name: str) -> ModuleIndex | UnreadableError | None:
        stem = name.replace(".", "/")
        return self._index(f"{stem}/__init__.py", name) or self._index(f"{stem}.py", name.rpartition(".")[0])

    def _index(self, path: str, package: str) -> ModuleIndex | UnreadableError | None:
        try:
            content = self._source.read(path)
            return None if content is None else ModuleIndex(decode_source(content), package)
        except (SyntaxError, ValueError, RecursionError, OSError) as error:
            return UnreadableError(f"{path}: {type(error).__name__}: {error}")

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
            for star, conditional in reversed(index.star_imports):
                target = self._find(star, name, seen) if self._exports(star, name) else None
                if target:
                    return target[0], target[1], target[2] or conditional
            return None
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

    def _exports(self, module: str, name: str) -> bool:
        """Whether `from module import *` gives `name`, if the module has it."""
        index = self._module(module)
        exported = index.bindings.get("__all__") if index else None
        if isinstance(exported, Value) and isinstance(exported.expression, (ast.List, ast.Tuple)):
            return any(_is_literal(item, name) for item in exported.expression.elts)
        return exported is not None or not name.startswith("_")

    def _default(self, module: str, expression: ast.expr) -> str:
        try:
            return repr(ast.literal_eval(expression))
        except (ValueError, TypeError):
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
        owner_class = self._class(module, expression.value)
        if owner_class:
            return f"{owner_class[1].name}.{expression.attr}" if self._is_enumeration(*owner_class) else OPAQUE
        index = self._module(module)
        binding = index.bindings.get(expression.value.id) if index and isinstance(expression.value, ast.Name) else None
        is_torch = isinstance(binding, Imported) and binding.module == "torch" and binding.name is None
        return f"torch.{expression.attr}" if is_torch else OPAQUE

    def _class(self, module: str, expression: ast.expr) -> tuple[str, ast.ClassDef] | None:
        found = self._find(module, expression.id) if isinstance(expression, ast.Name) else None
        return (found[0], found[1]) if found and isinstance(found[1], ast.ClassDef) else None

    def _is_enumeration(self, module: str, statement: ast.ClassDef) -> bool:
        for base in statement.bases:
            if _last_name(base) in {"Enum", "IntEnum", "StrEnum", "Flag", "IntFlag"}:
                return True
            parent = self._class(module, base)
            if parent and self._is_enumeration(*parent):
                return True
        return False

    def _members(self, statement: ast.ClassDef) -> dict[str, int | str]:
        members: dict[str, int | str] = {}
        for item in statement.body:
            if not isinstance(item, (ast.Assign, ast.AnnAssign)) or item.value is None:
                continue
            for target in item.targets if isinstance(item, ast.Assign) else [item.target]:
                if isinstance(target, ast.Name) and not _RESERVED.fullmatch(target.id):
                    members[target.id] = _member_value(item.value, members)
        return members

    def _constructor(self, module: str, statement: ast.ClassDef) -> list[Parameter] | None:
        """None: neither the class nor a base in the source defines one."""
        own = [item for item in statement.body if isinstance(item, ast.FunctionDef) and item.name == "__init__"]
        if own:
            # The last one, after any overloads; without the instance.
            parameters = list(parameters_of(own[-1].args, lambda default: self._default(module, default)))
            return parameters[1:] if own[-1].args.posonlyargs or own[-1].args.args else parameters
        options = _dataclass_options(statement)
        if options is not None and not _is_literal(options.get("init"), False):
            fields = [field for field in self._fields(module, statement).values() if field]
            return sorted(fields, key=lambda field: field.kind == Kind.KEYWORD_ONLY)
        parents = (self._class(module, base) for base in statement.bases)
        constructors = (self._constructor(*parent) for parent in parents if parent)
        return next((constructor for constructor in constructors if constructor is not None), None)

    def _fields(self, module: str, statement: ast.ClassDef) -> dict[str, Parameter | None]:
        """The dataclass fields by name, inherited ones first; None for one that the constructor does not take."""
        fields: dict[str, Parameter | None] = {}
        for base in reversed(statement.bases):
            parent = self._class(module, base)
            fields.update(self._fields(*parent) if parent else {})
        options = _dataclass_options(statement)
        if options is None:
            return fields
        kind = Kind.KEYWORD_ONLY if _is_literal(options.get("kw_only"), True) else Kind.POSITIONAL_OR_KEYWORD
        for item in statement.body:
            if not isinstance(item, ast.AnnAssign) or not isinstance(item.target, ast.Name):
                continue
            marker = _FIELD_MARKER.match(ast.unparse(item.annotation))
            if marker is None:
                fields[item.target.id] = self._field(module, item.target.id, kind, item.value)
            elif marker.group(1) == "KW_ONLY":
                kind = Kind.KEYWORD_ONLY
        return fields

    def _field(self, module: str, name: str, kind: str, value: ast.expr | None) -> Parameter | None:
        if isinstance(value, ast.Call) and _last_name(value.func) == "field":
            options = {keyword.arg: keyword.value for keyword in value.keywords}
            if _is_literal(options.get("init"), False):
                return None
            if isinstance(kw_only := options.get("kw_only"), ast.Constant):
                kind = Kind.KEYWORD_ONLY if kw_only.value else Kind.POSITIONAL_OR_KEYWORD
            if "default_factory" in options:
                return Parameter(name, kind, FACTORY)
            value = options.get("default")
        return Parameter(name, kind, None if value is None else self._default(module, value))


def _dataclass_options(statement: ast.ClassDef) -> dict[str | None, ast.expr] | None:
    """The arguments of the `@dataclass` decorator; None where the class has none."""
    for decorator in statement.decorator_list:
        call = decorator if isinstance(decorator, ast.Call) else None
        if _last_name(call.func if call else decorator) == "dataclass":
            return {keyword.arg: keyword.value for keyword in call.keywords} if call else {}
    return None


def _member_value(expression: ast.expr, earlier: Mapping[str, int | str]) -> int | str:
    if isinstance(expression, ast.Name) and expression.id in earlier:
        return earlier[expression.id]
    try:
        value = ast.literal_eval(expression)
    except (ValueError, TypeError):
        value = None
    # `Default = (0,)` calls int(0): FlashInfer writes many members with this trailing comma.
    value = value[0] if isinstance(value, tuple) and len(value) == 1 else value
    if not isinstance(value, (int, str)):
        raise UnreadableError(f"a member's value is neither an integer nor a string: {ast.unparse(expression)}")
    return value


def _last_name(expression: ast.expr) -> str:
    return ast.unparse(expression).rpartition(".")[2]


def _is_literal(expression: ast.expr | None, value: bool | str) -> bool:
    return isinstance(expression, ast.Constant) and type(expression.value) is type(value) and expression.value == value
