"""A fused shared expert in the real vLLM, from its own argument resolution to FlashInfer's compiled call."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

if any(importlib.util.find_spec(name) is None for name in ("vllm", "flashinfer")):
    pytest.skip("needs vLLM and flashinfer-python: scripts/test-engines.sh vllm", allow_module_level=True)

EXPERTS = ("monolithic", "modular")
ENVIRON = {
    "FLASHINFER_COMPAT_VLLM_FUSION": "1",
    # Attention and top-k without compiled kernels; neither is what is tested.
    "VLLM_MLA_DISABLE": "1",
    "VLLM_USE_FUSED_MOE_GROUPED_TOPK": "0",
}


@pytest.fixture(scope="module")
def answers(run_child: Callable[..., Any], tmp_path_factory: pytest.TempPathFactory, checkpoints: Path) -> Any:
    return {
        name: run_child(
            "run_vllm_moe.py",
            {"folder": str(checkpoints / "grouped"), "modular": name == "modular"},
            STORE=(tmp_path_factory.mktemp("store") / "file").as_uri(),
            **ENVIRON,
        )
        for name in EXPERTS
    }


@pytest.mark.parametrize("name", EXPERTS)
def test_the_output_is_the_routed_experts_and_the_shared_one(answers: Any, name: str) -> None:
    found = answers[name]
    assert found["shared_part"] > 0.1, "a lost shared expert would be seen"
    assert found["error"] < 8e-3
    assert found["garbage"] == []


@pytest.mark.parametrize("name", EXPERTS)
def test_no_shared_mlp_is_built_and_nothing_scales_the_output(answers: Any, name: str) -> None:
    found = answers[name]
    assert found["shared_mlp"] == []
    assert found["runner_scale"] == 1.0
    assert set(found["rows"].values()) == {17}


@pytest.mark.parametrize("name", EXPERTS)
def test_the_checkpoints_tensors_are_laid_out_byte_for_byte_as_the_plan_wants_them(answers: Any, name: str) -> None:
    assert set(answers[name]["same_layout"].values()) == {True}
    assert max(answers[name]["scalars"].values()) < 1e-6


@pytest.mark.parametrize("name", EXPERTS)
def test_a_fused_model_has_its_own_key_in_the_compile_cache(answers: Any, name: str) -> None:
    assert answers[name]["hash_differs"]


def test_router_logits_are_one_native_call_with_the_routed_sizes(answers: Any) -> None:
    found = answers["monolithic"]
    assert found["experts"] == "FusedMonolithic"
    assert found["calls"] == ["trtllm_fp4_block_scale_moe"]
    assert found["keyword"] == 1
    assert found["sizes"] == {
        "num_experts": 16,
        "local_num_experts": 16,
        "top_k": 4,
        "local_expert_offset": 0,
        "intermediate_size": 128,
        "n_group": 4,
        "topk_group": 2,
    }
    # DeepSeekV3, which applies the factor to the routed experts' weights only.
    assert (found["method"], found["factor"]) == (2, 2.5)
    assert found["logits_shape"] == [33, 16]
    said = "on: native is eligible with FlashInfer 0.7.2.post1 on sm100 (one call with router logits, 16 experts and 1"
    assert [said in line for line in found["lines"]] == [True]


def test_a_topk_is_one_routed_call_with_the_shared_expert_appended_and_no_keyword(answers: Any) -> None:
    found = answers["modular"]
    assert found["experts"] == "FusedModular"
    assert found["calls"] == ["trtllm_fp4_block_scale_routed_moe"]
    # The wrapper's default; FlashInfer's routed entry computes nonsense with any other.
    assert found["keyword"] == 0
    sizes = {"num_experts": 17, "local_num_experts": 17, "top_k": 5, "local_expert_offset": 0, "intermediate_size": 128}
    assert sizes.items() <= found["sizes"].items()
    assert found["method"] == 1
    slots = found["shared_slots"]
    assert (slots["ids"], slots["weights"]) == ([16], [1.0])
    # Router logits are bf16 here.
    assert slots["routed_sum"] == pytest.approx(2.5, rel=1e-2)
    assert ["on: expanded is eligible" in line for line in found["lines"]] == [True]
