"""The plugin in the real vLLM: found by its loader, and inert unless switched on in a vLLM that it knows."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from typing import Any

import pytest

if importlib.util.find_spec("vllm") is None:
    pytest.skip("vLLM is not installed: scripts/test-engines.sh vllm", allow_module_level=True)

THEIRS = "vllm.model_executor.models.deepseek_v2:DeepseekV3ForCausalLM"
OURS = "flashinfer_compat.engines.vllm_model:DeepseekV3ForCausalLM"
ANOTHER = "another.plugin:DeepseekV3ForCausalLM"

# What vLLM would build, and the words in the plugin's one line; empty for no line.
ROWS: dict[str, tuple[dict[str, Any], str, str]] = {
    "on": ({}, OURS, ""),
    "loaded twice": ({"times": 2}, OURS, ""),
    "off": ({"switch": "0"}, THEIRS, ""),
    "empty": ({"switch": ""}, THEIRS, ""),
    "an unknown release": ({"release": "0.33.1"}, THEIRS, "vLLM 0.33.1 was not tested with it, 0.33.0 was"),
    "no release": ({"release": "none"}, THEIRS, "InvalidVersion"),
    "a local build": ({"release": "0.33.0+cu130"}, OURS, ""),
    "a changed file": (
        {"sources": {"model_executor/models": {"deepseek_v2.py": "0"}}},
        THEIRS,
        "is not the released one, it has another model_executor/models/deepseek_v2.py",
    ),
    "a missing file": ({"sources": {"nowhere": {"file.py": "0"}}}, THEIRS, "another nowhere/file.py"),
    "another plugin's model": ({"registered": ANOTHER}, ANOTHER, "another plugin has registered"),
}


@pytest.fixture(scope="module")
def answer(run_child: Callable[..., Any]) -> Any:
    return run_child("ask_vllm_plugin.py", [row for row, _, _ in ROWS.values()])


def test_vllms_loader_finds_the_plugin_of_the_installed_distribution(answer: Any) -> None:
    assert answer["plugins"]["flashinfer_compat"] == "flashinfer_compat.engines.vllm"


@pytest.mark.parametrize("name", ROWS)
def test_the_model_is_replaced_only_where_vllm_is_known(answer: Any, name: str) -> None:
    _, built, said = ROWS[name]
    found = answer["rows"][list(ROWS).index(name)]
    assert found["class"] == built
    assert len(found["lines"]) == (1 if said else 0)
    assert not said or said in found["lines"][0]


def test_registering_imports_no_model_code(answer: Any) -> None:
    """Model code may touch CUDA, which must not happen in the process that starts the others."""
    assert not answer["imported"]


def test_vllms_own_filter_leaves_it_out(run_child: Callable[..., Any]) -> None:
    answer = run_child("ask_vllm_plugin.py", [{}], VLLM_PLUGINS="another")
    assert "flashinfer_compat" not in answer["plugins"]
    assert answer["rows"] == [{"class": THEIRS, "lines": []}]
