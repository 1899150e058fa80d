"""Block scales that kernels would read as something else are refused."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from checkpoint_variants import GROUPED, SHARED_BF16  # noqa: E402

import flashinfer_compat as fc  # noqa: E402
from flashinfer_compat.weights.checkpoint import load_moe_layer  # noqa: E402

GIVEN = load_moe_layer(GROUPED, 1)


def with_byte(part: str, name: str, byte: int) -> fc.MoELayerWeights:
    experts: Any = getattr(GIVEN, part)
    scale = getattr(experts, name).clone()
    scale.view(torch.uint8).view(-1)[3:5] = byte
    return dataclasses.replace(GIVEN, **{part: dataclasses.replace(experts, **{name: scale})})


@pytest.mark.parametrize("backend", ["torch", "triton"])
@pytest.mark.parametrize("byte", [0x7F, 0x80, 0xB8, 0xFF])
@pytest.mark.parametrize("name", ["gate_up_block_scale", "down_block_scale"])
@pytest.mark.parametrize("part", ["routed", "shared"])
def test_negative_numbers_and_nan_are_named(part: str, name: str, byte: int, backend: str) -> None:
    weights = with_byte(part, name, byte)
    target = fc.Target.from_release("0.7.4", "sm90")
    with pytest.raises(fc.TensorError, match="E4M3 numbers from 0 to 448, got 2 of") as caught:
        fc.prepare(weights, fc.plan(weights.problem("topk"), target, backend=backend))
    assert caught.value.argument == f"weights.{part}.{name}"


@pytest.mark.parametrize("byte", [0, 0x7E])
def test_0_and_448_are_not(byte: int) -> None:
    weights = with_byte("routed", "down_block_scale", byte)
    fc.prepare(weights, fc.plan(weights.problem("topk"), backend="torch"))


def test_a_shared_expert_in_bf16_has_none() -> None:
    weights = load_moe_layer(SHARED_BF16, 1)
    fc.prepare(weights, fc.plan(weights.problem("topk"), backend="torch"))
