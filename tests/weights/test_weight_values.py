from __future__ import annotations

import dataclasses
import subprocess
import sys
from typing import Any

import pytest
import torch
from checkpoint_variants import GROUPED, SHARED_BF16

from flashinfer_compat.errors import ArgumentError, TensorError
from flashinfer_compat.weights.checkpoint import load_moe_layer
from flashinfer_compat.weights.values import DenseExperts, Nvfp4Experts, Router

WEIGHTS = load_moe_layer(GROUPED, 1)
DENSE = load_moe_layer(SHARED_BF16, 1).shared


def test_values_import_without_torch() -> None:
    code = "import sys, flashinfer_compat.weights.values; sys.exit('torch' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)


@pytest.mark.parametrize("field", [field.name for field in dataclasses.fields(Nvfp4Experts)])
def test_nvfp4_field_of_another_dtype_is_named(field: str) -> None:
    wrong = getattr(WEIGHTS.routed, field).to(torch.float64)
    with pytest.raises(TensorError, match=r"dtype .* got float64") as caught:
        dataclasses.replace(WEIGHTS.routed, **{field: wrong})
    assert caught.value.argument == f"Nvfp4Experts.{field}"


@pytest.mark.parametrize("field", [field.name for field in dataclasses.fields(Nvfp4Experts)])
def test_nvfp4_field_of_another_rank_is_named(field: str) -> None:
    wrong = getattr(WEIGHTS.routed, field)[..., None]
    with pytest.raises(TensorError, match="shape") as caught:
        dataclasses.replace(WEIGHTS.routed, **{field: wrong})
    assert caught.value.argument == f"Nvfp4Experts.{field}"


def test_transposed_down_scale_is_refused_with_both_shapes() -> None:
    scale = WEIGHTS.routed.down_block_scale.transpose(1, 2)
    with pytest.raises(TensorError) as caught:
        dataclasses.replace(WEIGHTS.routed, down_block_scale=scale)
    assert caught.value.expected == "shape [16, 256, 8]"
    assert caught.value.actual == "[16, 8, 256]"


def test_gate_without_up_is_refused() -> None:
    with pytest.raises(TensorError, match=r"shape \[E, 2, I, H/2\], got \[16, 1, 128, 128\]"):
        dataclasses.replace(WEIGHTS.routed, gate_up_weight=WEIGHTS.routed.gate_up_weight[:, :1])


def test_intermediate_size_off_the_block_is_refused() -> None:
    with pytest.raises(TensorError, match="multiples of 16, got H = 256, I = 120"):
        dataclasses.replace(WEIGHTS.routed, gate_up_weight=WEIGHTS.routed.gate_up_weight[:, :, :120])


@pytest.mark.parametrize("field", ["gate_up_weight", "down_weight"])
def test_dense_fields_must_be_bf16(field: str) -> None:
    assert isinstance(DENSE, DenseExperts)
    with pytest.raises(TensorError, match="bfloat16, got float32"):
        dataclasses.replace(DENSE, **{field: getattr(DENSE, field).float()})


@pytest.mark.parametrize(
    ("weight", "bias", "field"),
    [
        (torch.zeros(4), None, "Router.weight"),
        (torch.zeros(4, 32, dtype=torch.float16), None, "Router.weight"),
        (torch.zeros(4, 32), torch.zeros(4, dtype=torch.bfloat16), "Router.bias"),
        (torch.zeros(4, 32), torch.zeros(3), "Router.bias"),
    ],
)
def test_router_fields_are_checked(weight: torch.Tensor, bias: torch.Tensor | None, field: str) -> None:
    with pytest.raises(TensorError) as caught:
        Router(weight, bias)
    assert caught.value.argument == field


@pytest.mark.parametrize(
    ("changes", "argument"),
    [
        ({"tp_size": 0}, "tp_size"),
        ({"tp_size": 3}, "tp_size"),
        ({"tp_rank": 1}, "tp_rank"),
        ({"tp_size": 2}, "routed"),
        ({"shared": None}, "shared"),
        ({"config": dataclasses.replace(WEIGHTS.config, num_shared_experts=0)}, "shared"),
        ({"config": dataclasses.replace(WEIGHTS.config, num_shared_experts=2)}, "shared"),
        ({"config": dataclasses.replace(WEIGHTS.config, num_experts=32)}, "routed"),
        ({"config": dataclasses.replace(WEIGHTS.config, hidden_size=512)}, "routed"),
        ({"router": Router(WEIGHTS.router.weight[:8], None)}, "router.weight"),
    ],
)
def test_parts_of_a_layer_must_fit_its_config(changes: dict[str, Any], argument: str) -> None:
    with pytest.raises(ArgumentError) as caught:
        dataclasses.replace(WEIGHTS, **changes)
    assert caught.value.argument == argument


@pytest.mark.parametrize("factor", [float("nan"), float("inf"), -1.0])
def test_routed_scaling_factor_must_be_positive_and_finite(factor: float) -> None:
    with pytest.raises(ArgumentError, match="routed_scaling_factor"):
        dataclasses.replace(WEIGHTS.config, routed_scaling_factor=factor)


def test_groups_of_one_expert_are_refused() -> None:
    with pytest.raises(ArgumentError, match="n_group: expected groups of 2 experts or more"):
        dataclasses.replace(WEIGHTS.config, n_group=16, topk_group=8)
