from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from source_packages import entries, live, static, write

import flashinfer_compat
from flashinfer_compat.signatures.entry_points import ENTRY_POINTS, EntryPoint
from flashinfer_compat.signatures.live import differences
from flashinfer_compat.signatures.model import OPAQUE, Kind, Symbol, SymbolTable

KIND = Kind.POSITIONAL_OR_KEYWORD
ROOT = Path(flashinfer_compat.__file__).parents[1]

ALL_LIVE = """
import json
from flashinfer_compat.signatures.live import is_imported, read_live
assert not is_imported()
table = read_live()
print(json.dumps([{name: one.to_text() for name, one in table.symbols.items()}, dict(table.problems), is_imported()]))
"""


def run(code: str, *path: Path) -> str:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(map(str, [*path, ROOT]))}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def all_live(root: Path) -> tuple[dict[str, str], dict[str, str], bool]:
    symbols, problems, imported = json.loads(run(ALL_LIVE, root).splitlines()[-1])
    return symbols, problems, imported


@pytest.mark.flashinfer
def test_the_installed_flashinfer_is_what_its_source_says() -> None:
    spec = importlib.util.find_spec("flashinfer")
    if spec is None or spec.origin is None:
        pytest.skip("flashinfer is not installed")
    code = (
        "import json, pathlib, sys\n"
        "from flashinfer_compat.signatures.cache import read_installed\n"
        "from flashinfer_compat.signatures.live import differences, read_live\n"
        f"static = read_installed(pathlib.Path({str(Path(spec.origin).parents[1])!r}), None)\n"
        "assert 'flashinfer' not in sys.modules and 'torch' not in sys.modules\n"
        "live = read_live()\n"
        "problems = dict(static.problems), dict(live.problems)\n"
        "print(json.dumps([*problems, differences(static, live), sorted(live.symbols)]))\n"
    )
    static_problems, live_problems, different, names = json.loads(run(code).splitlines()[-1])
    assert (static_problems, live_problems, different) == ({}, {}, [])
    assert {"trtllm_fp4_block_scale_moe", "fp4_quantize", "mm_fp4", "RoutingMethodType"} <= set(names)


@pytest.mark.parametrize(
    ("statement", "shown"),
    [
        ("raise AssertionError('no GPU')", "AssertionError('no GPU')"),
        ("open('/nonexistent/libcuda.so')", "FileNotFoundError(2, 'No such file or directory')"),
        ("raise RuntimeError('CUDA error')", "RuntimeError('CUDA error')"),
        ("import sys; sys.exit(3)", "SystemExit(3)"),
        ("import a_missing_dependency", "ModuleNotFoundError(\"No module named 'a_missing_dependency'\")"),
        ("import flash", "ModuleNotFoundError(\"No module named 'flash'\")"),
        ("raise ModuleNotFoundError('no name given')", "ModuleNotFoundError('no name given')"),
        ("from . import absent", "ImportError(\"cannot import name 'absent' from"),
        ("def (", "SyntaxError("),
        ("class Odd(BaseException): ...\nraise Odd()", "Odd()"),
        ("def loop(): loop()\nloop()", "RecursionError("),
    ],
)
def test_whatever_an_import_raises_is_a_problem(statement: str, shown: str, tmp_path: Path) -> None:
    write(tmp_path, {"flashinfer/__init__.py": f"print('noise')\n{statement}\n"})
    symbols, problems, _ = all_live(tmp_path)
    assert symbols == {}
    assert len(problems) > 30
    assert all(problem.startswith("import flashinfer") for problem in problems.values())
    assert problems["mm_fp4"].startswith(f"import flashinfer: {shown}")


def test_a_failing_import_is_tried_once(tmp_path: Path) -> None:
    write(tmp_path, {"flashinfer/__init__.py": "print('tried')\nraise RuntimeError\n"})
    output = run(ALL_LIVE, tmp_path)
    modules = {name for entry in ENTRY_POINTS for name in entry.modules}
    assert output.count("tried") == len(modules)


def test_keyboard_interrupt_is_not_swallowed(tmp_path: Path) -> None:
    write(tmp_path, {"flashinfer/__init__.py": "raise KeyboardInterrupt\n"})
    with pytest.raises(AssertionError, match="KeyboardInterrupt"):
        all_live(tmp_path)


def test_a_failing_part_is_a_problem_of_only_the_entry_points_behind_it(tmp_path: Path) -> None:
    files: dict[str, str | bytes] = {
        "flashinfer/__init__.py": "def mm_fp4(a): ...\n",
        "flashinfer/fused_moe/__init__.py": "raise RuntimeError('no nvcc')\n",
    }
    symbols, problems, imported = all_live(write(tmp_path, files))
    assert symbols == {"mm_fp4": "flashinfer(a)"}
    assert problems["cutlass_fused_moe"] == "import flashinfer.fused_moe: RuntimeError('no nvcc')"
    assert "fp4_quantize" not in problems
    assert imported


def test_without_flashinfer_there_is_nothing(tmp_path: Path) -> None:
    code = f"import sys\nsys.modules['flashinfer'] = None\n{ALL_LIVE.replace('assert not is_imported()', '')}"
    symbols, problems, _ = json.loads(run(code, tmp_path).splitlines()[-1])
    assert (symbols, set(problems)) == ({}, set())


def test_a_name_found_later_outweighs_a_failing_module(tmp_path: Path) -> None:
    write(tmp_path, {"pkg/__init__.py": "def f(a): ...\n", "pkg/bad.py": "raise RuntimeError\n"})
    table = live(tmp_path, [EntryPoint("f", ("pkg.bad", "pkg.absent", "pkg")), EntryPoint("g", ("pkg.bad", "pkg"))])
    assert table.symbols["f"].to_text() == "pkg(a)"
    assert table.problems == {"g": "import pkg.bad: RuntimeError()"}


@pytest.mark.parametrize(
    ("definition", "shown"),
    [
        ("f = 3", "TypeError"),
        ("import sys as f", "TypeError"),
        ("f = dict", "ValueError"),
        ("class f:\n    __signature__ = 3", "TypeError"),
        ("def __getattr__(name):\n    raise ImportError('lazy')", "ImportError('lazy')"),
        ("def __getattr__(name):\n    raise SystemExit(1)", "SystemExit(1)"),
    ],
)
def test_what_cannot_be_described_is_a_problem(definition: str, shown: str, tmp_path: Path) -> None:
    write(tmp_path, {"pkg/__init__.py": f"{definition}\n"})
    table = live(tmp_path, entries("f"))
    assert not table.symbols
    assert table.problems["f"].startswith("pkg.f: ")
    assert shown in table.problems["f"]


def test_decorated_functions_show_what_they_wrap(tmp_path: Path) -> None:
    source = (
        "import functools\ndef mark(function):\n    @functools.wraps(function)\n    def wrapper(*args, **kwargs): ...\n"
        "    return wrapper\n@mark\ndef f(a, b=1): ...\n"
    )
    write(tmp_path, {"pkg/__init__.py": source})
    assert live(tmp_path, entries("f")).symbols["f"].to_text() == "pkg(a, b=1)"
    assert differences(static(tmp_path, "f"), live(tmp_path, entries("f"))) == ()


def test_defaults_that_do_not_compare_are_objects(tmp_path: Path) -> None:
    source = (
        "class Odd:\n    def __eq__(self, other): raise RuntimeError\n    __hash__ = None\n"
        "def f(a=Odd(), b=[], c=float('inf'), d=(), e=(1,), g=len): ...\n"
    )
    write(tmp_path, {"pkg/__init__.py": source})
    assert live(tmp_path, entries("f")).symbols["f"].to_text() == (
        "pkg(a=<object>, b=<object>, c=<object>, d=(), e=<object>, g=<object>)"
    )
    assert differences(static(tmp_path, "f"), live(tmp_path, entries("f"))) == ()


def table(*texts: str, **problems: str) -> SymbolTable:
    symbols = [Symbol.from_text(text.partition("=")[0], text.partition("=")[2]) for text in texts]
    return SymbolTable({symbol.name: symbol for symbol in symbols}, problems)


@pytest.mark.parametrize(
    ("source", "imported", "sentence"),
    [
        (table(), table("f=m(a)"), "f: not in the source, but importable"),
        (table("f=m(a)"), table(), "f: in the source, but not importable"),
        (table("f=m(a)"), table("f=m(b)"), f"f: parameters [('a', '{KIND}')] in the source, [('b', '{KIND}')] live"),
        (
            table("f=m(a)"),
            table("f=m(*, a)"),
            f"f: parameters [('a', '{KIND}')] in the source, [('a', 'KEYWORD_ONLY')] live",
        ),
        (table("f=m(a)"), table("f=m()"), f"f: parameters [('a', '{KIND}')] in the source, [] live"),
        (table("f=m(a)"), table("f=m(a=1)"), "f.a: None () in the source, 1 () live"),
        (table("f=m(a=1)"), table("f=m(a)"), "f.a: 1 () in the source, None () live"),
        (table("f=m(a=<object>)"), table("f=m(a)"), "f.a: <object> () in the source, None () live"),
        (table("f=m(a)"), table("f=m(a=<object>)"), "f.a: None () in the source, <object> () live"),
        (table("f=m(a='x')"), table("f=m(a='y')"), "f.a: 'x' () in the source, 'y' () live"),
        (
            table("f=m(a: Literal['x'])"),
            table("f=m(a: Literal['y'])"),
            "f.a: None ('x',) in the source, None ('y',) live",
        ),
        (table("f=m{A=1}"), table("f=m{A=2}"), "f: members (('A', 1),) in the source, (('A', 2),) live"),
        (table("f=m{A=1}"), table("f=m(a)"), "f: members (('A', 1),) in the source, None live"),
        (
            table(f="m.py: SyntaxError"),
            table("f=m(a)"),
            "f: importable, but its source cannot be read: m.py: SyntaxError",
        ),
    ],
)
def test_each_kind_of_disagreement_is_told(source: SymbolTable, imported: SymbolTable, sentence: str) -> None:
    assert differences(source, imported) == (sentence,)


@pytest.mark.parametrize(
    ("source", "imported"),
    [
        (table("f=m(a, b=1)"), table("f=elsewhere(a, b=1)")),
        (table("f=m(a=<object>)"), table("f=m(a=3)")),
        (table("f=m(a={})"), table("f=m(a=<object>)")),
        (table("f=m?(a)"), table()),
        (table("f=m(a)"), table(f="import m: RuntimeError()")),
        (table(), table(f="import m: RuntimeError()")),
        (table(f="m.py: SyntaxError"), table(f="import m: SyntaxError()")),
        (table("f=m{A=1}"), table("f=m{A=1}")),
    ],
)
def test_what_is_no_disagreement(source: SymbolTable, imported: SymbolTable) -> None:
    assert differences(source, imported) == ()


def test_disagreements_are_told_in_order_of_name() -> None:
    source = table("b=m(x=1, y=2)", "a=m(x)")
    changed = replace(source.symbols["b"], parameters=tuple(
        replace(one, default="3") for one in source.symbols["b"].parameters or ()
    ))  # fmt: skip
    found = differences(source, SymbolTable({"b": changed}))
    assert [sentence.partition(":")[0] for sentence in found] == ["a", "b.x", "b.y"]
    assert OPAQUE not in "".join(found)
