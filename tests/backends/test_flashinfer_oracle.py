"""FlashInfer's own torch reference of its FP4 MoE agrees with ours."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import pytest

torch = pytest.importorskip("torch")

import flashinfer_compat as fc  # noqa: E402
from flashinfer_compat.weights.shared import append_shared, split_shared  # noqa: E402
from tools.matrix.references import random_layer, reference_arguments, relative_error  # noqa: E402

if TYPE_CHECKING:
    from types import ModuleType

    from flashinfer_compat.weights.values import MoELayerWeights

pytestmark = pytest.mark.flashinfer

TOKENS = 19


@pytest.fixture(scope="module")
def templates() -> ModuleType:
    pytest.importorskip("flashinfer")
    return pytest.importorskip("flashinfer.trace.templates.moe")


@pytest.fixture(scope="module")
def weights() -> MoELayerWeights:
    return random_layer()


def compare(output: torch.Tensor, expected: torch.Tensor) -> None:
    # FlashInfer's reference rounds its result to bf16.
    assert relative_error(output, expected) < 5e-3


def test_native_with_fused_shared_experts(templates: ModuleType, weights: MoELayerWeights) -> None:
    config = weights.config
    x = torch.randn(TOKENS, config.hidden_size, generator=torch.Generator().manual_seed(1)).bfloat16()
    routing = fc.route_logits(x, weights.router)
    plan = fc.plan(weights.problem("logits", numerics="w4a16"), strategy="native", backend="torch")
    output = fc.fp4_moe(x, fc.prepare(weights, plan), routing)
    expected = templates._trtllm_fp4_block_scale_moe_ds_routing_reference(
        routing_logits=routing.logits,
        routing_bias=routing.bias,
        hidden_states=x,
        hidden_states_scale=None,
        top_k=config.top_k,
        n_group=config.n_group,
        topk_group=config.topk_group,
        routed_scaling_factor=config.routed_scaling_factor,
        num_fused_shared_experts=config.num_shared_experts,
        **reference_arguments(append_shared(weights.routed, split_shared(weights))),
    )
    compare(output, expected)


def test_routed_experts_with_given_topk(templates: ModuleType, weights: MoELayerWeights) -> None:
    config = weights.config
    without = replace(weights, shared=None, config=replace(config, num_shared_experts=0))
    generator = torch.Generator().manual_seed(2)
    x = torch.randn(TOKENS, config.hidden_size, generator=generator).bfloat16()
    ids = torch.rand(TOKENS, config.num_experts, generator=generator).topk(config.top_k).indices
    weight = torch.rand(TOKENS, config.top_k, generator=generator)
    plan = fc.plan(without.problem("topk", numerics="w4a16"), backend="torch")
    output = fc.fp4_moe(x, fc.prepare(without, plan), fc.TopKRouting(ids, weight))
    arguments = reference_arguments(without.routed)
    expected = templates._fp4_moe_run_experts(
        hidden_states=x,
        hidden_states_scale=None,
        weights=weight,
        topk_idx=ids,
        E_global=config.num_experts,
        **arguments,
    )
    compare(output, expected)
