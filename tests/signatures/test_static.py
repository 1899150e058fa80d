from __future__ import annotations

from pathlib import Path

import pytest
from package_cases import IMPORTABLE, INIT
from source_packages import entries, live, static, text, write

from flashinfer_compat.signatures.entry_points import ENTRY_POINTS, EntryPoint
from flashinfer_compat.signatures.live import differences
from flashinfer_compat.signatures.source import DirectorySource
from flashinfer_compat.signatures.static import StaticReader, read_source


@pytest.mark.parametrize("case", IMPORTABLE)
def test_the_definition_is_read(case: str, tmp_path: Path) -> None:
    files, expected = IMPORTABLE[case]
    assert text(static(write(tmp_path, files), "f")) == expected


@pytest.mark.parametrize("case", IMPORTABLE)
def test_python_imports_the_same(case: str, tmp_path: Path) -> None:
    files, _ = IMPORTABLE[case]
    write(tmp_path, files)
    imported = live(tmp_path, entries("f"))
    assert not imported.problems
    assert differences(static(tmp_path, "f"), imported) == ()


@pytest.mark.parametrize("case", IMPORTABLE)
def test_line_ends_do_not_matter(case: str, tmp_path: Path) -> None:
    files, expected = IMPORTABLE[case]
    with_returns = {name: content.replace("\n", "\r\n") for name, content in files.items() if isinstance(content, str)}
    assert text(static(write(tmp_path, {**files, **with_returns}), "f")) == expected


# What Python cannot import, or what only running it could tell.
def test_import_cycle_without_a_definition(tmp_path: Path) -> None:
    files = {INIT: "from .one import f\n", "pkg/one.py": "from .two import f\n", "pkg/two.py": "from .one import f\n"}
    assert text(static(write(tmp_path, files), "f")) is None


def test_star_import_cycle(tmp_path: Path) -> None:
    files = {INIT: "from .one import *\n", "pkg/one.py": "from . import *\nfrom .one import *\ndef g(): ...\n"}
    assert text(static(write(tmp_path, files), "f")) is None
    assert text(static(tmp_path, "g"), "g") == "pkg.one()"


@pytest.mark.parametrize(
    "line", ["from .absent import f", "from absent_distribution import f", "from ....pkg import f", "from . import f"]
)
def test_a_name_from_a_missing_module_is_absent(line: str, tmp_path: Path) -> None:
    assert text(static(write(tmp_path, {INIT: f"{line}\n"}), "f")) is None


def test_a_submodule_or_module_is_no_entry_point(tmp_path: Path) -> None:
    files = {INIT: "from . import f\nimport os.path as g\nimport sys\n", "pkg/f.py": "x = 1\n"}
    table = static(write(tmp_path, files), "f", "g", "sys")
    assert (dict(table.symbols), dict(table.problems)) == ({}, {})


def test_a_missing_package_has_nothing(tmp_path: Path) -> None:
    table = read_source(DirectorySource(tmp_path))
    assert (dict(table.symbols), dict(table.problems)) == ({}, {})


@pytest.mark.parametrize(
    "expression", ["wrap(g)", "functools.partial(g, 1)", "core.f", "g if x else None", "lambda a: a"]
)
def test_a_computed_name_is_a_problem_not_absent(expression: str, tmp_path: Path) -> None:
    table = static(write(tmp_path, {INIT: f"def g(a): ...\nf = {expression}\n"}), "f", "g")
    assert dict(table.problems) == {"f": f"pkg computes f: {expression}"}
    assert list(table.symbols) == ["g"]


def test_a_wrapped_definition_is_a_problem(tmp_path: Path) -> None:
    table = static(write(tmp_path, {INIT: "def f(a): ...\nf = wrap(f)\n"}), "f")
    assert "computes f: wrap(f)" in table.problems["f"]


@pytest.mark.parametrize(
    "content",
    [b"def broken(:\n", b"x = '\xff'\n", b"x = 1\0\n", b"# coding: no-such-codec\n", b"if x:\npass\n", b'"""\n',
     b"x = " + b"(" * 3000 + b")" * 3000 + b"\n"],
    ids=["syntax", "not UTF-8", "null byte", "unknown encoding", "indentation", "open string", "too deep"],
)  # fmt: skip
def test_an_unreadable_module_is_a_problem_of_only_the_entry_points_behind_it(content: bytes, tmp_path: Path) -> None:
    files: dict[str, str | bytes] = {
        INIT: "from .good import g\nfrom .bad import f, h\nfrom .chain import i\n",
        "pkg/good.py": "def g(a): ...\n",
        "pkg/chain.py": "from .bad import *\n",
        "pkg/bad.py": content,
    }
    table = static(write(tmp_path, files), "f", "g", "h", "i", "absent")
    assert set(table.symbols) == {"g"}
    assert set(table.problems) == {"f", "h", "i"}
    # Every one of them gives the same reason, and the reason names the file.
    (reason,) = set(table.problems.values())
    assert reason.startswith("pkg/bad.py: ")


def test_a_definition_python_cannot_parse_does_not_spoil_its_neighbours(tmp_path: Path) -> None:
    table = static(write(tmp_path, {INIT: "def f(a = = 1): ...\ndef g(a): ...\n"}), "f", "g")
    assert table.problems["f"].startswith("SyntaxError: ")
    assert table.symbols["g"].to_text() == "pkg(a)"


@pytest.mark.parametrize("content", ["", "\n", "# nothing\n", "'''Doc.'''\n", "\f", "\n\n   \n"])
def test_a_module_without_statements_is_readable(content: str, tmp_path: Path) -> None:
    write(tmp_path, {INIT: "from .empty import *\nfrom .core import f\n", "pkg/empty.py": content})
    write(tmp_path, {"pkg/core.py": "def f(a): ...\n"})
    assert text(static(tmp_path, "f")) == "pkg.core(a)"
    assert text(static(tmp_path, "f", module="pkg.empty")) is None


@pytest.mark.parametrize("value", ["enum.auto()", "1 << 2", "unknown", "1.5", "(1, 2)", "None", "-'x'"])
def test_a_member_that_only_running_could_tell_is_a_problem(value: str, tmp_path: Path) -> None:
    table = static(write(tmp_path, {INIT: f"import enum\nclass f(enum.IntEnum):\n    A = 1\n    B = {value}\n"}), "f")
    assert not table.symbols
    assert value in table.problems["f"]


def test_a_class_derived_from_its_own_name_ends(tmp_path: Path) -> None:
    files = {
        INIT: "from .core import f\nclass f(f): ...\n",
        "pkg/core.py": "class f:\n    def __init__(self, a): ...\n",
    }
    assert "RecursionError" in static(write(tmp_path, files), "f").problems["f"]


def test_a_folder_named_like_a_module_is_no_module(tmp_path: Path) -> None:
    write(tmp_path, {INIT: "from .core import f\n", "pkg/core/nothing.txt": ""})
    (tmp_path / "pkg" / "core.py").mkdir()
    assert text(static(tmp_path, "f")) is None


def test_a_package_goes_before_a_module_of_the_same_name(tmp_path: Path) -> None:
    files = {INIT: "from .core import f\n", "pkg/core.py": "def f(a): ...\n", "pkg/core/__init__.py": "def f(b): ...\n"}
    assert text(static(write(tmp_path, files), "f")) == "pkg.core(b)"


def test_the_first_module_that_has_the_name_counts(tmp_path: Path) -> None:
    write(tmp_path, {"pkg/__init__.py": "", "pkg/new.py": "", "pkg/old.py": "def f(a): ...\n"})
    entry = EntryPoint("f", ("pkg.newest", "pkg.new", "pkg.old", "pkg"))
    assert text(read_source(DirectorySource(tmp_path), [entry])) == "pkg.old(a)"


def test_a_module_of_ten_thousand_lines(tmp_path: Path) -> None:
    function = 'def f{0}(a, b={0}):\n    """Doc.\ndef f(wrong): ...\n    """\n    return [\n        a,\n    b,]\n\n\n\n'
    content = "".join(function.format(number) for number in range(1000))
    assert content.count("\n") == 10_000
    write(tmp_path, {INIT: "from .core import f7, f999\n", "pkg/core.py": content})
    table = static(tmp_path, "f7", "f999", "f")
    assert (text(table, "f7"), text(table, "f999"), text(table)) == ("pkg.core(a, b=7)", "pkg.core(a, b=999)", None)


def test_a_nightly_that_adds_keywords_is_read_by_its_source_not_its_version(tmp_path: Path) -> None:
    core = (
        "import torch\nfrom typing import Optional\nfrom ..tllm_enums import ActivationType\n_UNSET = object()\n\n\n"
        "@flashinfer_api(trace=trace)\ndef trtllm_fp4_block_scale_moe(\n    routing_logits: torch.Tensor,\n"
        "    routing_bias: Optional[torch.Tensor],\n    activation_type: int = ActivationType.A.value,\n"
        "    num_fused_shared_experts: Optional[int] = None,\n    shared_expert_gate=_UNSET,\n    *,\n"
        "    nightly_only: torch.dtype = torch.bfloat16,\n):\n    raise AssertionError\n"
    )
    write(
        tmp_path,
        {
            "flashinfer/__init__.py": "from .fused_moe import trtllm_fp4_block_scale_moe\n",
            "flashinfer/version.py": "__version__ = '0.7.5.dev20251130+cu130'\n",
            "flashinfer/tllm_enums.py": "import enum\nclass ActivationType(enum.IntEnum):\n    A = 3,\n    New = 99\n",
            "flashinfer/fused_moe/__init__.py": "from .core import *\n",
            "flashinfer/fused_moe/core.py": core,
        },
    )
    table = read_source(DirectorySource(tmp_path), ENTRY_POINTS)
    assert not table.problems
    assert table.symbols["trtllm_fp4_block_scale_moe"].to_text() == (
        "flashinfer.fused_moe.core(routing_logits, routing_bias, activation_type=3, num_fused_shared_experts=None, "
        "shared_expert_gate=<object>, *, nightly_only=torch.bfloat16)"
    )
    assert table.has_parameter("trtllm_fp4_block_scale_moe", "num_fused_shared_experts")
    assert table.symbols["ActivationType"].member("New") == 99


def test_a_file_is_read_once(tmp_path: Path) -> None:
    write(tmp_path, {INIT: "from .core import f, g\n", "pkg/core.py": "def f(a): ...\ndef g(b): ...\n"})
    paths: list[str] = []

    class Counting(DirectorySource):
        def read(self, path: str) -> bytes | None:
            paths.append(path)
            return super().read(path)

    StaticReader(Counting(tmp_path)).read(entries("f", "g", "h"))
    assert sorted(paths) == ["pkg/__init__.py", "pkg/core.py", "pkg/core/__init__.py"]


def test_torch_types_are_named_whatever_torch_is_called(tmp_path: Path) -> None:
    write(tmp_path, {INIT: "import torch as th, os\ndef f(a=th.float32, b=os.sep, c=th.cuda.Stream): ...\n"})
    assert text(static(tmp_path, "f")) == "pkg(a=torch.float32, b=<object>, c=<object>)"
