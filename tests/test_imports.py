"""Imports go one way, cost little, and load neither torch nor flashinfer."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[1] / "flashinfer_compat"

# From the bottom up; a module may import its own layer and those before it.
LAYERS = (
    ("errors", "architectures", "versions", "reasons", "files"),
    ("vocabulary",),
    ("problem", "inputs", "options", "outputs"),
    ("self_checks", "policy"),
    ("environment", "signatures"),
    ("features",),
    ("planning",),
    ("numerics",),
    ("weights",),
    ("backends",),
    ("verified",),
    ("policy_files",),
    ("machine",),
    ("calls",),
    ("ops",),
    ("moe",),
    ("verification",),
    ("bench",),
    ("report", "adoption"),
    ("doctor",),
    ("engines", "ab"),
    ("cli", "__main__"),
)
RANK = {name: rank for rank, names in enumerate(LAYERS) for name in names}


def modules() -> list[Path]:
    return sorted(path for path in PACKAGE.rglob("*.py") if path != PACKAGE / "__init__.py")


def layer_of(dotted: str) -> str:
    return dotted.split(".")[1]


def imported(path: Path) -> set[str]:
    names = set()
    for node in ast.walk(ast.parse(path.read_text("utf-8"))):
        if isinstance(node, ast.ImportFrom) and node.module:
            names.add(node.module)
        elif isinstance(node, ast.Import):
            names.update(alias.name for alias in node.names)
    return names


@pytest.mark.parametrize("path", modules(), ids=lambda path: str(path.relative_to(PACKAGE)))
def test_imports_go_downwards(path: Path) -> None:
    own = path.relative_to(PACKAGE).with_suffix("").parts[0]
    upwards = {
        name for name in imported(path) if name.startswith("flashinfer_compat.") and RANK[layer_of(name)] > RANK[own]
    }
    assert not upwards


# The core needs the standard library and packaging only.
ALLOWED = {"packaging", "flashinfer_compat", *sys.stdlib_module_names}
EXTRAS = {
    "numerics": {"torch"},
    "weights": {"torch", "safetensors"},
    "backends": {"torch", "triton"},
    "moe": {"torch"},
    "verification": {"torch"},
    "bench": {"torch", "matplotlib"},
    "ops": {"torch"},
    "inputs": {"torch"},
    "options": {"torch"},
    "outputs": {"torch"},
    "calls": {"torch"},
    "cli": {"rich", "torch", "safetensors"},
    "ab": {"httpx"},
    "engines": {"torch", "sglang", "vllm", "huggingface_hub"},
}


@pytest.mark.parametrize("path", modules(), ids=lambda path: str(path.relative_to(PACKAGE)))
def test_only_the_upper_layers_need_more_than_packaging(path: Path) -> None:
    own = path.relative_to(PACKAGE).with_suffix("").parts[0]
    roots = {name.partition(".")[0] for name in imported(path)}
    assert roots <= ALLOWED | EXTRAS.get(own, set())


@pytest.mark.parametrize(
    "code",
    [
        "import flashinfer_compat",
        "import flashinfer_compat; flashinfer_compat.capabilities().to_json()",
        "import flashinfer_compat as fc; fc.plan(fc.Problem(256, 128, 16, 4), fc.Target.from_release('0.7.4', None))",
        "from flashinfer_compat.cli import main; main(['doctor', '--json'])",
        "from flashinfer_compat.cli import main; main(['plan', '--flashinfer', '0.7.4', '--arch', 'sm100'])",
    ],
)
def test_neither_torch_nor_flashinfer_is_loaded(code: str) -> None:
    check = "import sys; loaded = {'torch', 'flashinfer', 'numpy'} & set(sys.modules); assert not loaded, loaded"
    run = subprocess.run([sys.executable, "-c", f"{code}\n{check}"], capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr


def test_every_public_name_loads() -> None:
    import flashinfer_compat

    assert dir(flashinfer_compat) == sorted(flashinfer_compat.__all__)
    pytest.importorskip("torch")
    for name in flashinfer_compat.__all__:
        assert getattr(flashinfer_compat, name) is not None
    with pytest.raises(AttributeError, match="no attribute 'fp5_moe'"):
        _ = flashinfer_compat.fp5_moe


def test_modules_stay_small() -> None:
    assert {path.name: lines for path in modules() if (lines := path.read_text("utf-8").count("\n")) > 400} == {}
