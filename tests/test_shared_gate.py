"""Shared experts behind a sigmoid gate of their own."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")

import standin  # noqa: E402
from comparison import error  # noqa: E402
from safetensors.torch import load_file  # noqa: E402

import flashinfer_compat as fc  # noqa: E402

H = 256


@pytest.fixture(scope="module", params=["grouped", "shared-bf16"])
def gated(request: pytest.FixtureRequest, checkpoints: Path) -> tuple[dict[str, torch.Tensor], fc.MoELayerWeights]:
    folder = checkpoints / request.param
    gate = torch.randn(1, H, generator=torch.Generator().manual_seed(3)) * 0.2
    return load_file(folder / "moe_io.safetensors"), replace(fc.load_moe_layer(folder, 1), shared_gate=gate.bfloat16())


def test_the_gate_multiplies_the_shared_experts_only(
    gated: tuple[dict[str, torch.Tensor], fc.MoELayerWeights],
) -> None:
    io, weights = gated
    x = io["hidden_states"].float()
    topk = fc.TopKRouting(io["topk_ids"], io["topk_weights"])

    def run(one: fc.MoELayerWeights) -> torch.Tensor:
        return fc.fp4_moe(x, fc.prepare(one, fc.plan(one.problem("topk"), backend="torch")), topk)

    without = replace(weights, shared_gate=None)
    routed = run(replace(without, config=replace(weights.config, num_shared_experts=0), shared=None))
    shared = run(without) - routed
    factor = torch.sigmoid(x @ weights.shared_gate.float().T)
    assert error(run(weights), routed + factor * shared) <= 1e-6
    assert weights.problem("topk").shared_gate


def test_the_kernels_side_agrees_with_the_reference(
    gated: tuple[dict[str, torch.Tensor], fc.MoELayerWeights],
) -> None:
    io, weights = gated
    topk = fc.TopKRouting(io["topk_ids"], io["topk_weights"])
    problem = weights.problem("topk")
    with standin.installed("0.7.4"):
        layer = fc.prepare(weights, fc.plan(problem, fc.Target.from_release("0.7.4", "sm100")))
        output = fc.fp4_moe(io["hidden_states"], layer, topk)
        unfinalized = fc.fp4_moe_unfinalized(io["hidden_states"], layer, topk).finalize()
    reference = fc.prepare(weights, fc.plan(problem, backend="torch"))
    expected = fc.fp4_moe(io["hidden_states"].float(), reference, topk)
    assert error(output, expected) <= 3e-2
    assert error(unfinalized, output) <= 5e-3


@pytest.mark.parametrize("strategy", ["native", "expanded"])
def test_fused_strategies_have_no_gate(
    gated: tuple[dict[str, torch.Tensor], fc.MoELayerWeights], strategy: str
) -> None:
    problem = gated[1].problem("logits" if strategy == "native" else "topk")
    with pytest.raises(fc.StrategyUnavailableError) as caught:
        fc.plan(problem, fc.Target.from_release("0.7.4", "sm100"), strategy=strategy)
    assert "shared_gate" in caught.value.codes


@pytest.mark.parametrize("gate", [torch.zeros(H), torch.zeros(1, H // 2), torch.zeros(1, H, dtype=torch.float64)])
def test_a_gate_of_another_form_is_named(
    gated: tuple[dict[str, torch.Tensor], fc.MoELayerWeights], gate: torch.Tensor
) -> None:
    with pytest.raises(fc.TensorError, match="shared_gate"):
        replace(gated[1], shared_gate=gate)
