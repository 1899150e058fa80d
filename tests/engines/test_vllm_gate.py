"""The decision about vLLM's fusion, as a pure function."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import flashinfer_compat as fc
from flashinfer_compat.engines.checkpoint import CheckpointLayers, read_layers
from flashinfer_compat.engines.gate import Outcome
from flashinfer_compat.engines.vllm_gate import SENTENCES, Because, Experts, Server, VllmDecision, by_settings, decide

pytest.importorskip("torch")

SERVER = Server(quantization="modelopt_fp4")
MONOLITHIC = Experts("TrtLlmNvFp4ExpertsMonolithic", "DeepSeekV3")
MODULAR = Experts("TrtLlmNvFp4ExpertsModular", "DeepSeekV3")

SETTINGS: dict[Because, tuple[dict[str, Any], Outcome]] = {
    Because.ARCHITECTURE: ({"architecture": "Glm4MoeForCausalLM"}, Outcome.UNTOUCHED),
    Because.QUANTIZATION: ({"quantization": "fp8"}, Outcome.UNTOUCHED),
    Because.PART_OF_ANOTHER: ({"prefix": "language_model"}, Outcome.UNTOUCHED),
    Because.DRAFT: ({"is_draft": True}, Outcome.UNTOUCHED),
    Because.EXPERT_PARALLELISM: ({"enable_expert_parallel": True}, Outcome.KEPT_OFF),
    Because.LOAD_BALANCING: ({"enable_eplb": True}, Outcome.KEPT_OFF),
    Because.DATA_PARALLELISM: ({"data_parallel_size": 2}, Outcome.KEPT_OFF),
    Because.CONTEXT_PARALLELISM: ({"prefill_context_parallel_size": 2}, Outcome.KEPT_OFF),
    Because.DTYPE: ({"dtype": "float16"}, Outcome.KEPT_OFF),
    Because.LORA: ({"lora": True}, Outcome.KEPT_OFF),
    Because.SUBSTITUTED_EXPERTS: ({"substituted_experts": True}, Outcome.KEPT_OFF),
    Because.COMPILE_CACHE: ({"additional_config_is_dict": False}, Outcome.KEPT_OFF),
}


def target(release: str = "0.7.2.post1", architecture: str | None = "sm100") -> fc.Target:
    return fc.Target.from_release(release, architecture)


@pytest.fixture
def grouped(checkpoints: Path) -> CheckpointLayers:
    return read_layers(checkpoints / "grouped")


def never() -> Any:
    raise AssertionError("this need not be asked")


def decided(
    layers: CheckpointLayers, server: Server = SERVER, experts: Experts = MONOLITHIC, where: fc.Target | None = None
) -> VllmDecision:
    return decide(server, where or target(), lambda: experts, lambda: layers)


def test_every_reason_has_a_sentence() -> None:
    assert set(SENTENCES) == set(Because)


def test_router_logits_are_planned_native_with_routed_sizes(grouped: CheckpointLayers) -> None:
    decision = decided(grouped)
    assert (decision.outcome, decision.because) == (Outcome.LIFTED, Because.FUSED)
    assert decision.plan is not None
    call = decision.plan.call
    assert call is not None
    assert decision.plan.strategy is fc.Strategy.NATIVE
    assert (call.entry_point, call.num_fused_shared_experts) == ("trtllm_fp4_block_scale_moe", 1)
    assert (call.num_experts, call.weight_rows, call.top_k) == (16, 17, 4)
    assert str(decision).endswith("[fused]")


def test_a_topk_is_planned_expanded_without_the_keyword(grouped: CheckpointLayers) -> None:
    decision = decided(grouped, experts=MODULAR)
    assert decision.plan is not None
    call = decision.plan.call
    assert call is not None
    assert (call.entry_point, call.num_fused_shared_experts) == ("trtllm_fp4_block_scale_routed_moe", 0)
    assert (call.num_experts, call.weight_rows, call.top_k) == (17, 17, 5)


def test_ranks_plan_their_slice_in_vllms_padded_width(grouped: CheckpointLayers) -> None:
    narrow = replace(grouped, config=replace(grouped.config, hidden_size=320))
    decision = decided(narrow, replace(SERVER, tensor_parallel_size=2, per_token_activation=True))
    assert decision.plan is not None
    problem = decision.plan.problem
    assert (problem.intermediate_size, problem.hidden_size) == (64, 512)
    assert problem.activation_scaling is fc.ActivationScaling.PER_TOKEN


@pytest.mark.parametrize("because", SETTINGS)
def test_a_setting_decides_alike_on_all_ranks_and_asks_no_machine(because: Because) -> None:
    changes, outcome = SETTINGS[because]
    server = replace(SERVER, **changes)
    decision = decide(server, target(), never, never)
    assert (decision.outcome, decision.because, decision.plan) == (outcome, because, None)
    assert by_settings(server) == decision
    assert "{" not in decision.why


@pytest.mark.parametrize(
    ("changes", "experts", "release", "architecture", "because", "outcome"),
    [
        ({"changed_by_others": True}, MONOLITHIC, "0.7.4", "sm100", Because.CHANGED_BY_OTHERS, Outcome.KEPT_OFF),
        ({}, MONOLITHIC, "0.6.15.post1", "sm100", Because.OLD_FLASHINFER, Outcome.UNTOUCHED),
        ({}, Experts("FlashInferExperts", "DeepSeekV3"), "0.7.4", "sm100", Because.EXPERTS, Outcome.UNTOUCHED),
        ({}, Experts("ValueError: no", "DeepSeekV3"), "0.7.4", "sm100", Because.EXPERTS, Outcome.UNTOUCHED),
        ({}, Experts(MONOLITHIC.name, "Default"), "0.7.4", "sm100", Because.ROUTING, Outcome.KEPT_OFF),
        ({"apply_routed_scale_to_output": True}, MONOLITHIC, "0.7.4", "sm100", Because.OUTPUT_SCALE, Outcome.KEPT_OFF),
        ({}, MONOLITHIC, "0.6.16", "sm100", Because.PLANNING, Outcome.KEPT_OFF),
        ({}, MONOLITHIC, "0.7.4", "sm90", Because.PLANNING, Outcome.KEPT_OFF),
        ({}, MONOLITHIC, "0.7.4", None, Because.PLANNING, Outcome.KEPT_OFF),
        ({"tensor_parallel_size": 16}, MONOLITHIC, "0.7.4", "sm100", Because.PLANNING, Outcome.KEPT_OFF),
    ],
)
def test_what_keeps_it_off_on_a_machine(
    grouped: CheckpointLayers,
    changes: dict[str, Any],
    experts: Experts,
    release: str,
    architecture: str | None,
    because: Because,
    outcome: Outcome,
) -> None:
    decision = decided(grouped, replace(SERVER, **changes), experts, target(release, architecture))
    assert (decision.outcome, decision.because, decision.plan) == (outcome, because, None)


@pytest.mark.parametrize("release", ["0.6.17", "0.6.18.post1", "0.7.0", "0.7.2.post1", "0.7.4"])
def test_native_is_taken_from_the_release_that_has_the_keyword(grouped: CheckpointLayers, release: str) -> None:
    assert decided(grouped, where=target(release)).outcome is Outcome.LIFTED


def test_a_factor_of_one_on_the_output_scales_nothing(grouped: CheckpointLayers) -> None:
    plain = replace(grouped, config=replace(grouped.config, routed_scaling_factor=1.0))
    assert decided(plain, replace(SERVER, apply_routed_scale_to_output=True)).outcome is Outcome.LIFTED


@pytest.mark.parametrize(
    ("sample", "because"),
    [
        ("shared-bf16", Because.SHARED_FORMAT),
        ("ungrouped-2-shared", Because.NUM_SHARED_EXPERTS),
        ("nowhere", Because.CHECKPOINT),
    ],
)
def test_the_checkpoints_own_tensors_decide(checkpoints: Path, sample: str, because: Because) -> None:
    decision = decide(SERVER, target(), lambda: MONOLITHIC, lambda: read_layers(checkpoints / sample))
    assert (decision.outcome, decision.because) == (Outcome.KEPT_OFF, because)


def test_a_model_without_groups_is_not_fused_from_logits(grouped: CheckpointLayers) -> None:
    """FlashInfer 0.6.17 and 0.6.18 leave slots of such a layer unwritten."""
    ungrouped = replace(grouped, config=replace(grouped.config, n_group=1, topk_group=1))
    assert decided(ungrouped).because is Because.PLANNING
    assert decided(ungrouped, experts=MODULAR).outcome is Outcome.LIFTED


@pytest.mark.parametrize("value", [None, "", "0", "false"])
def test_switched_off_the_entry_point_loads_neither_vllm_nor_torch(value: str | None) -> None:
    code = f"""
import os, sys
value = {value!r}
if value is not None:
    os.environ["FLASHINFER_COMPAT_VLLM_FUSION"] = value
from flashinfer_compat.engines.vllm import register
register()
loaded = {{"vllm", "torch", "flashinfer"}} & set(sys.modules)
assert not loaded, loaded
own = {{name for name in sys.modules if name.startswith("flashinfer_compat.engines.")}}
assert own == {{"flashinfer_compat.engines.vllm", "flashinfer_compat.engines.switch"}}, own
assert "flashinfer_compat.planning" not in sys.modules
"""
    subprocess.run([sys.executable, "-c", code], check=True)


def test_without_vllm_the_plugin_says_so_and_raises_nothing() -> None:
    code = """
import logging, os, sys
os.environ["FLASHINFER_COMPAT_VLLM_FUSION"] = "1"
import importlib.metadata
def missing(name):
    raise importlib.metadata.PackageNotFoundError(name)
importlib.metadata.version = missing
from flashinfer_compat.engines.vllm import register
register()
"""
    child = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    assert child.stderr.count("\n") == 1
    assert "left as it is: PackageNotFoundError" in child.stderr
