"""A fused shared expert in the real SGLang, from the checkpoint's tensors to FlashInfer's compiled call."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

if any(importlib.util.find_spec(name) is None for name in ("sglang", "torchvision", "flashinfer")):
    pytest.skip("needs SGLang, torchvision and flashinfer-python: scripts/test-engines.sh", allow_module_level=True)

RUNNERS = ("flashinfer_trtllm", "flashinfer_trtllm_routed")


@pytest.fixture(scope="module")
def answers(run_child: Callable[..., Any], tmp_path_factory: pytest.TempPathFactory, checkpoints: Path) -> Any:
    store = tmp_path_factory.mktemp("store") / "file"
    return run_child("run_sglang_moe.py", str(checkpoints / "grouped"), STORE=store.as_uri())


@pytest.mark.parametrize("runner", RUNNERS)
def test_the_output_is_the_routed_experts_and_the_shared_one(answers: Any, runner: str) -> None:
    found = answers[runner]
    assert found["shared_part"] > 0.1, "a lost shared expert would be seen"
    assert found["error"] < 8e-3
    assert found["garbage"] == []


@pytest.mark.parametrize("runner", RUNNERS)
def test_one_routed_call_has_consistent_sizes_and_no_keyword(answers: Any, runner: str) -> None:
    found = answers[runner]
    assert found["calls"] == ["fp4_quantize", "trtllm_fp4_block_scale_routed_moe"]
    sizes = {"num_experts": 17, "local_num_experts": 17, "top_k": 5, "local_expert_offset": 0, "intermediate_size": 128}
    assert found["sizes"] == sizes
    assert found["planned"].items() <= found["sizes"].items()
    assert set(found["rows"].values()) == {17}
    # The wrapper's default; FlashInfer's routed entry computes nonsense with any other.
    assert found["keyword"] == 0
    assert found["method"] == 1


@pytest.mark.parametrize("runner", RUNNERS)
def test_the_router_appends_the_shared_expert_with_weight_one(answers: Any, runner: str) -> None:
    found = answers[runner]
    assert found["topk_shape"] == [33, 5]
    assert (found["shared_ids"], found["shared_weights"]) == ([16], [1.0])
    assert found["routed_ids_agree"]
    assert found["scaling_is_in_topk"]
    assert found["sum_of_routed_weights"] == pytest.approx(2.5, rel=1e-5)


@pytest.mark.parametrize("runner", RUNNERS)
def test_the_renamed_tensors_are_laid_out_byte_for_byte_as_the_plan_wants_them(answers: Any, runner: str) -> None:
    assert set(answers[runner]["same_layout"].values()) == {True}
