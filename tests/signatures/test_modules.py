"""Cutting a file into statements must bind the same names as parsing all of it."""

from __future__ import annotations

import ast

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flashinfer_compat.signatures.modules import Definition, Imported, ModuleIndex, Value

# Blocks of top-level code; `$` is a name that several of them bind.
BLOCKS = [
    "def $(a, b=1):\n    return a\n",
    "async def $(a): ...\n",
    "class $:\n    def $(self): ...\n    class Inner:\n        x = 1\n",
    "class $(Base, metaclass=Meta): pass\n",
    "@mark\ndef $(a): ...\n",
    "@mark(\n    1,\n)\n# between\n\n@other.mark\nclass $:\n    x = 1\n",
    "@mark(\n1\n)\ndef $(a): ...\n",
    "def $(\na,\nb=(\n1\n),\n): ...\n",
    "def $(a): return (a +\n1)\n",
    "def $(a):\n    return [\nx\n        for x in a]\n",
    "def $(a):\n    return {\n'def': a,\nkey: 1}\n",
    "def $(a): return (a\n@ a)\n",
    "def $(a): return 1 + \\\na\n",
    "def $(a): \\\npass\n",
    "def \\\n$(a): ...\n",
    'def $(a):\n    """Doc.\ndef $(wrong): ...\nclass Wrong: ...\n    """\n',
    "def $(a):\n    x = '''\n@wrong\nimport wrong\n'''\n    return x\n",
    "def $(a):\n    # it's \"\"\" a comment\n    return 'it\\'s' + \"\\\"\" + r'\\d\\\\'\n",
    "def $(a):\n    return f\"{a['x']} {{'#'}} {a!r:>{10}}\"\n",
    "def $(a):\n    return b'\\'' b\"'\" rb'''\ndef wrong(): ...\n'''\n",
    "def $(a):\n    x = 1\n# a comment at column 0\n    return x\n",
    "def $(a):\n\treturn a\n",
    "\fdef $(a): ...\n",
    "  \f\t\fclass $: ...\n",
    "def $(ä, b='—'):\n    return ä\n",
    "$ = 1\n",
    "$: int = 2\n",
    "$: int\n",
    "$ = other = name\n",
    "($) = 3\n",
    "$, other = 1, (2, 3)\n",
    "($, (other, third)) = 1, (2, 3)\n",
    "$, *other = values\n",
    "[$, other] = values\n",
    "$ += 1\n",
    "$ = {\n'a': 1,\nb: [\n2\n]}\n",
    "$ = '''\ndef $(wrong): ...\n'''\n",
    "$ = 'a \\\ndef $(wrong): ...'\n",
    "$ = 1 + \\\nother\n",
    "case = $ = match\n",
    "größe = $ = 1\n",
    "ß = 1\n",
    "x = 1; $ = 2\n",
    "'''A string.\ndef $(wrong): ...\n'''\n",
    "'text'; $ = 1\n",
    "(\nname\n)\n",
    "[name\nfor name in names]\n",
    "-name\n",
    "...\n",
    "import $\n",
    "import $.sub, other as $\n",
    "import a.b.c as $\n",
    "from . import $\n",
    "from .sub import other as $\n",
    "from ..up import (\n    $,\nother,\n)\n",
    "from a.b import $, \\\nother\n",
    "from .sub import *\n",
    "if test:\n    def $(a): ...\nelif other:\n    from .b import $\nelse:\n    $ = 1\n",
    "if TYPE_CHECKING:\n    from .types import $\n",
    "if not typing.TYPE_CHECKING:\n    from .types import $\n",
    "try:\n    from .a import $\nexcept (ImportError, OSError):\n    $ = None\n",
    "try:\n    pass\nexcept OSError:\n    $ = None\nelse:\n    import $\nfinally:\n    x = 1\n",
    "try:\n    from .a import *\n\nexcept ImportError:\n\n    def $(a): ...\n",
    "with suppress(ImportError):\n    from .a import $\n",
    "with open(\nname\n) as stream:\n    $ = stream\n",
    "for $ in values:\n    pass\nelse:\n    pass\n",
    "while test:\n    break\n",
    "match name:\n    case 1:\n        pass\n    case _:\n        pass\n",
    "del $\n",
    "assert name, (\n'def')\n",
    "raise SystemExit\n",
    "\n\n",
    "# def $(wrong): ...\n",
    "#'''\n",
    "pass\n",
]

NAMES = ["f", "g", "h"]

Outline = dict[str, tuple[str, object, bool]]


def plain_walk(source: str) -> tuple[Outline, list[tuple[str, bool]]]:
    """The bindings by parsing everything, with `ast` only."""
    bound: Outline = {}
    stars: list[tuple[str, bool]] = []

    def names(target: ast.expr, value: ast.expr) -> list[tuple[str, ast.expr]]:
        if isinstance(target, ast.Name):
            return [(target.id, value)]
        both_tuples = isinstance(target, ast.Tuple) and isinstance(value, ast.Tuple)
        if both_tuples and len(target.elts) == len(value.elts):  # type: ignore[attr-defined]
            return [one for pair in zip(target.elts, value.elts, strict=True) for one in names(*pair)]  # type: ignore[attr-defined]
        return []

    def walk(body: list[ast.stmt], conditional: bool) -> None:
        for node in body:
            match node:
                case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name) | ast.ClassDef(name=name):
                    bound[name] = ("definition", ast.dump(node), conditional)
                case ast.ImportFrom(module=module, names=aliases, level=level):
                    package = ["top", "sub", "package"][: 3 - (level - 1)] if level else []
                    full = ".".join([*package, *([module] if module else [])])
                    for alias in aliases:
                        if alias.name == "*":
                            stars.append((full, conditional))
                        else:
                            bound[alias.asname or alias.name] = ("import", (full, alias.name), conditional)
                case ast.Import(names=aliases):
                    for alias in aliases:
                        first = alias.name.split(".")[0]
                        module_name = alias.name if alias.asname else first
                        bound[alias.asname or first] = ("import", (module_name, None), conditional)
                case ast.Assign(targets=targets, value=value):
                    for target in targets:
                        for name, its_value in names(target, value):
                            bound[name] = ("value", ast.dump(its_value), conditional)
                case ast.AnnAssign(target=ast.Name(id=name), value=ast.expr() as value):
                    bound[name] = ("value", ast.dump(value), conditional)
                case ast.AugAssign(target=ast.Name(id=name) as target, op=op, value=value):
                    bound[name] = ("value", ast.dump(ast.BinOp(target, op, value)), conditional)
                case ast.If(test=ast.Name(id="TYPE_CHECKING"), orelse=orelse):
                    walk(orelse, conditional)
                case ast.If(test=ast.UnaryOp(operand=ast.Attribute(attr="TYPE_CHECKING")), body=inner):
                    walk(inner, conditional)
                case ast.If(body=inner, orelse=orelse):
                    walk(orelse, True)
                    walk(inner, True)
                case ast.Try(body=inner, handlers=handlers, orelse=orelse, finalbody=final):
                    for handler in handlers:
                        walk(handler.body, True)
                    for part in (inner, orelse, final):
                        walk(part, True)
                case ast.With(body=inner, items=items):
                    walk(inner, conditional or "suppress" in ast.dump(items[0].context_expr))

    walk(ast.parse(source).body, False)
    return bound, stars


def outline(index: ModuleIndex) -> Outline:
    found: Outline = {}
    for name, binding in index.bindings.items():
        if isinstance(binding, Definition):
            found[name] = ("definition", ast.dump(binding.parse()), binding.conditional)
        elif isinstance(binding, Imported):
            found[name] = ("import", (binding.module, binding.name), binding.conditional)
        else:
            assert isinstance(binding, Value)
            found[name] = ("value", ast.dump(binding.expression), binding.conditional)
    return found


def assert_same(source: str) -> None:
    index = ModuleIndex(source, "top.sub.package")
    assert (outline(index), index.star_imports) == plain_walk(source)


@pytest.mark.parametrize("block", BLOCKS)
def test_each_block_between_two_definitions(block: str) -> None:
    assert_same(f"def before(a): ...\n{block.replace('$', 'f')}def after(b): ...\n")


@pytest.mark.parametrize("block", BLOCKS)
def test_each_block_alone(block: str) -> None:
    assert_same(block.replace("$", "f").removesuffix("\n"))


blocks = st.tuples(st.sampled_from(BLOCKS), st.sampled_from(NAMES)).map(lambda pair: pair[0].replace("$", pair[1]))


@given(st.lists(blocks, max_size=12))
def test_any_arrangement_of_blocks_binds_what_parsing_the_whole_file_binds(arrangement: list[str]) -> None:
    assert_same("".join(arrangement))


# Python warns of unknown escapes, which random strings are full of.
pytestmark = pytest.mark.filterwarnings("ignore:.*invalid escape", "ignore:.*invalid .* literal")

texts = st.text(alphabet="'\"#\\\n\tdef f(){}[]:@,=x ", max_size=60)


@given(texts, texts)
def test_any_text_is_read_as_python_reads_it_or_refused(first: str, second: str) -> None:
    source = f"{first}\ndef f(a): ...\n{second}"
    try:
        ast.parse(source)
    except (SyntaxError, ValueError):
        return
    assert_same(source)


@given(st.sampled_from(["'", '"', "'''", '"""']), st.sampled_from(["", "r", "b", "f", "Rb", "u"]), st.data())
def test_any_string_hides_its_content(quote: str, prefix: str, data: st.DataObject) -> None:
    content = data.draw(st.text(alphabet="abd ef(:#@'\"\\\n", max_size=30))
    source = f"def f(a): ...\nx = {prefix}{quote}{content}{quote}\ndef g(b): ...\n"
    try:
        ast.parse(source)
    except (SyntaxError, ValueError):
        return
    assert_same(source)


def test_definitions_are_kept_as_source_until_asked_for() -> None:
    index = ModuleIndex("x = 1\n\n\n@mark\ndef f(a):\n    return a\n\n\nclass G: ...\n", "pkg")
    f, g = index.bindings["f"], index.bindings["G"]
    assert isinstance(f, Definition)
    assert isinstance(g, Definition)
    assert isinstance(f.statement, str)
    assert f.statement.startswith("@mark\ndef f(a):")
    assert g.statement == "class G: ...\n"


def test_an_unparsable_body_is_noticed_only_by_who_asks() -> None:
    index = ModuleIndex("def f(a):\n    return = a\ndef g(b): ...\n", "pkg")
    g = index.bindings["g"]
    f = index.bindings["f"]
    assert isinstance(g, Definition)
    assert isinstance(f, Definition)
    assert isinstance(g.parse(), ast.FunctionDef)
    with pytest.raises(SyntaxError):
        f.parse()


@pytest.mark.parametrize("source", ["x = (\n", "def f(:\n  '''\n", "if x:\npass\n", "  x = 1\n", "else:\n    pass\n"])
def test_what_python_cannot_parse_is_refused(source: str) -> None:
    with pytest.raises(SyntaxError):
        ModuleIndex(source, "pkg")


@pytest.mark.parametrize(
    ("statement", "package", "module"),
    [
        ("from . import f", "a.b", "a.b"),
        ("from .c import f", "a.b", "a.b.c"),
        ("from ..c import f", "a.b", "a.c"),
        ("from .. import f", "a.b", "a"),
        ("from ...c import f", "a.b", "c"),
        ("from .....c import f", "a.b", "c"),
        ("from c.d import f", "a.b", "c.d"),
    ],
)
def test_relative_imports(statement: str, package: str, module: str) -> None:
    assert ModuleIndex(statement, package).bindings["f"] == Imported(module, "f", False)
