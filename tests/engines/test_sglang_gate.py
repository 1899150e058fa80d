"""The decision about SGLang's fusion, as a pure function."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

import flashinfer_compat as fc
from flashinfer_compat.engines.checkpoint import CheckpointLayers, read_layers
from flashinfer_compat.engines.gate import Outcome
from flashinfer_compat.engines.sglang_gate import Server, decide

pytest.importorskip("torch")

SERVER = Server("0.5.23", "flashinfer_trtllm", "modelopt_fp4")


def target(release: str = "0.7.4", architecture: str | None = "sm100") -> fc.Target:
    return fc.Target.from_release(release, architecture)


@pytest.fixture
def grouped(checkpoints: Path) -> CheckpointLayers:
    return read_layers(checkpoints / "grouped")


def never() -> CheckpointLayers:
    raise AssertionError("the checkpoint need not be read")


def test_a_fusing_plan_is_expanded_on_the_routed_entry(grouped: CheckpointLayers) -> None:
    decision = decide(SERVER, target(), lambda: grouped)
    assert decision.outcome is Outcome.LIFTED
    assert decision.plan is not None
    call = decision.plan.call
    assert call is not None
    assert decision.plan.strategy is fc.Strategy.EXPANDED
    assert (call.entry_point, call.num_fused_shared_experts) == ("trtllm_fp4_block_scale_routed_moe", 0)
    assert (call.num_experts, call.weight_rows, call.top_k) == (17, 17, 5)


def test_tensor_parallel_ranks_plan_their_slice(grouped: CheckpointLayers) -> None:
    decision = decide(replace(SERVER, tp_size=4, moe_dp_size=2), target(), lambda: grouped)
    assert decision.plan is not None
    assert decision.plan.problem.intermediate_size == 64


def test_per_token_activations_are_planned_as_such(grouped: CheckpointLayers) -> None:
    decision = decide(replace(SERVER, per_token_activation=True), target(), lambda: grouped)
    assert decision.plan is not None
    assert decision.plan.problem.activation_scaling is fc.ActivationScaling.PER_TOKEN


@pytest.mark.parametrize(
    ("changes", "release"),
    [
        ({"moe_runner_backend": "triton"}, "0.7.4"),
        ({"quantization": "fp8"}, "0.7.4"),
        ({"disable_shared_experts_fusion": True}, "0.7.4"),
        ({"ep_size": 8}, "0.7.4"),
        ({"moe_a2a_backend": "flashinfer"}, "0.7.4"),
        ({}, "0.6.15.post1"),
    ],
)
def test_the_checkpoint_is_read_only_where_it_matters(changes: dict[str, object], release: str) -> None:
    assert decide(replace(SERVER, **changes), target(release), never).outcome is not Outcome.LIFTED


def test_an_untested_sglang_fuses_only_where_the_user_insists(grouped: CheckpointLayers) -> None:
    newer = replace(SERVER, sglang="0.5.24")
    decision = decide(newer, target(), lambda: grouped)
    assert decision.outcome is Outcome.KEPT_OFF
    assert "SGLang 0.5.24 was not tested" in decision.why
    insisting = replace(newer, enforce_shared_experts_fusion=True)
    assert decide(insisting, target(), lambda: grouped).outcome is Outcome.LIFTED


def test_a_checkpoint_that_cannot_be_read_is_a_reason(checkpoints: Path) -> None:
    decision = decide(SERVER, target(), lambda: read_layers(checkpoints / "nothing"))
    assert decision.outcome is Outcome.KEPT_OFF
    assert "config.json" in decision.why


def test_a_missing_flashinfer_is_a_reason(grouped: CheckpointLayers) -> None:
    without = replace(target(), flashinfer=None, flashinfer_problem="flashinfer is not installed.")
    assert "flashinfer is not installed" in decide(SERVER, without, lambda: grouped).why


@pytest.mark.parametrize("value", [None, "", "0", "false"])
def test_switched_off_the_entry_point_loads_neither_sglang_nor_torch(value: str | None) -> None:
    code = f"""
import os, sys
value = {value!r}
if value is not None:
    os.environ["FLASHINFER_COMPAT_SGLANG_FUSION"] = value
from flashinfer_compat.engines.sglang import register
register()
loaded = {{"sglang", "torch", "flashinfer"}} & set(sys.modules)
assert not loaded, loaded
own = {{name for name in sys.modules if name.startswith("flashinfer_compat.engines.")}}
assert own == {{"flashinfer_compat.engines.sglang", "flashinfer_compat.engines.switch"}}, own
assert "flashinfer_compat.planning" not in sys.modules
"""
    subprocess.run([sys.executable, "-c", code], check=True)
