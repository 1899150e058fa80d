from __future__ import annotations

import ast
import json
import keyword
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flashinfer_compat.signatures.model import FACTORY, OPAQUE, Kind, Parameter, Symbol, SymbolTable, literal_choices

names = st.from_regex(r"[A-Za-z_][A-Za-z0-9_]{0,8}", fullmatch=True).filter(lambda name: not keyword.iskeyword(name))
modules = st.lists(names, min_size=1, max_size=3).map(".".join)
literals = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text()
    | st.binary(),
    lambda inner: st.tuples(inner) | st.tuples(inner, inner) | st.lists(inner, max_size=2),
    max_leaves=4,
)
marked_text = st.sampled_from([OPAQUE, FACTORY, f"={OPAQUE}", "OBJECT_", "FACTORY_", "a, /, *, b", "'", '"', "(?{})"])
defaults = st.one_of(
    literals.map(repr),
    marked_text.map(repr),
    st.sampled_from([OPAQUE, FACTORY, "torch.bfloat16", "ActivationType.Swiglu"]),
)
choices = st.lists(st.text(max_size=5) | marked_text, max_size=3).map(tuple)


@st.composite
def parameters(draw: st.DrawFn) -> tuple[Parameter, ...]:
    drawn = iter(draw(st.lists(names, max_size=8, unique=True)))
    counts = [draw(st.integers(0, 3)) for _ in range(3)]
    found: list[Parameter] = []
    may_lack_default = True
    for kind, count in zip((Kind.POSITIONAL_ONLY, Kind.POSITIONAL_OR_KEYWORD), counts, strict=False):
        for name in [name for _, name in zip(range(count), drawn, strict=False)]:
            default = draw(st.none() | defaults) if may_lack_default else draw(defaults)
            may_lack_default = default is None
            found.append(Parameter(name, kind, default, draw(choices)))
    if draw(st.booleans()):
        found += [
            Parameter(name, Kind.VAR_POSITIONAL, None, draw(choices)) for _, name in zip(range(1), drawn, strict=False)
        ]
    for name in [name for _, name in zip(range(counts[2]), drawn, strict=False)]:
        found.append(Parameter(name, Kind.KEYWORD_ONLY, draw(st.none() | defaults), draw(choices)))
    if draw(st.booleans()):
        found += [
            Parameter(name, Kind.VAR_KEYWORD, None, draw(choices)) for _, name in zip(range(1), drawn, strict=False)
        ]
    return tuple(found)


functions = st.builds(Symbol, names, modules, parameters(), st.none(), st.booleans())
members = st.lists(st.tuples(names, st.integers() | st.text() | marked_text), max_size=6, unique_by=lambda one: one[0])
enumerations = st.builds(Symbol, names, modules, st.none(), members.map(tuple), st.booleans())
symbols = functions | enumerations


@given(symbols)
def test_the_recorded_text_reads_back(symbol: Symbol) -> None:
    written = symbol.to_text()
    assert Symbol.from_text(symbol.name, written) == symbol
    assert "\n" not in written


@given(symbols)
def test_the_json_form_reads_back(symbol: Symbol) -> None:
    assert Symbol.from_data(json.loads(json.dumps(symbol.to_data()))) == symbol


@given(functions)
def test_the_recorded_text_is_a_python_signature(symbol: Symbol) -> None:
    body = symbol.to_text().removeprefix(symbol.module).removeprefix("?")
    if OPAQUE in body or FACTORY in body:
        return
    (function,) = ast.parse(f"def f{body}: ...").body
    assert isinstance(function, ast.FunctionDef)
    arguments = [argument.arg for argument in ast.walk(function.args) if isinstance(argument, ast.arg)]
    assert set(arguments) == symbol.parameter_names


def test_the_form_is_readable() -> None:
    symbol = Symbol(
        "f",
        "flashinfer.core",
        (
            Parameter("a", Kind.POSITIONAL_ONLY),
            Parameter("b", default="1"),
            Parameter("c", Kind.KEYWORD_ONLY, "'x'", ("x", "y")),
            Parameter("d", Kind.KEYWORD_ONLY, OPAQUE),
            Parameter("e", Kind.VAR_KEYWORD),
        ),
        conditional=True,
    )
    assert symbol.to_text() == "flashinfer.core?(a, /, b=1, *, c: Literal['x', 'y']='x', d=<object>, **e)"
    assert Symbol("E", "m", members=(("A", 0), ("B", "b"))).to_text() == "m{A=0, B='b'}"


@pytest.mark.parametrize(
    "written",
    [
        "", "module", "module(", "module{A=}", "module(a", "module(a=1, b)", "module(a))", "module{A=open}", "a b(c)",
        "m(a)\n", "m{1}", "m{**a}", "m(a=<nothing>)",
    ],
)  # fmt: skip
def test_another_text_is_refused(written: str) -> None:
    with pytest.raises(ValueError, match=r"f: |malformed"):
        Symbol.from_text("f", written)


@pytest.mark.parametrize("data", [[], ["f"], ["f", "m", [["a"]], None, False], ["f", "m", 1, None, False], 3, "text",
                                  ["f", "m", None, [["A"]], False], {"name": "f"}])  # fmt: skip
def test_other_data_are_refused(data: Any) -> None:
    with pytest.raises((ValueError, TypeError)):
        Symbol.from_data(data)


def test_questions_to_a_symbol() -> None:
    function = Symbol.from_text("f", "m(a, b=2, *, c: Literal['x']='x')")
    assert function.parameter_names == {"a", "b", "c"}
    assert function.parameter("b") == Parameter("b", default="2")
    assert function.parameter("z") is None
    assert function.member("a") is None
    enumeration = Symbol.from_text("E", "m{Zero=0, One=1}")
    assert (enumeration.member("Zero"), enumeration.member("One"), enumeration.member("Two")) == (0, 1, None)
    assert enumeration.parameter("Zero") is None


def test_questions_to_a_table() -> None:
    table = SymbolTable(
        {"f": Symbol.from_text("f", "m(a, c: Literal['x', 'y']='x')"), "E": Symbol.from_text("E", "m{Zero=0}")}
    )
    assert table.has_parameter("f", "a")
    assert not table.has_parameter("f", "b")
    assert not table.has_parameter("g", "a")
    assert table.has_member("E", "Zero")
    assert not table.has_member("E", "One")
    assert not table.has_member("F", "Zero")
    assert table.choices("f", "c") == ("x", "y")
    assert table.choices("f", "a") == table.choices("f", "z") == table.choices("g", "c") == ()


@pytest.mark.parametrize(
    ("annotation", "expected"),
    [
        ("Literal['a', 'b']", ("a", "b")),
        ("typing.Literal['a']", ("a",)),
        ("Literal['a', 1, None]", ("a",)),
        ("'Literal[\"a\"]'", ("a",)),
        ("'not python['", ()),
        ("Optional[Literal['a']]", ()),
        ("str", ()),
        ("list[str]", ()),
    ],
)
def test_literal_choices(annotation: str, expected: tuple[str, ...]) -> None:
    assert literal_choices(ast.parse(annotation, mode="eval").body) == expected


def test_no_annotation_has_no_choices() -> None:
    assert literal_choices(None) == ()
