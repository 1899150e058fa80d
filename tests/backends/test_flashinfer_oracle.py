"""FlashInfer's own torch reference of its FP4 MoE agrees with ours."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import pytest

torch = pytest.importorskip("torch")

import flashinfer_compat as fc  # noqa: E402
from flashinfer_compat.numerics import Nvfp4Tensor, quantize_nvfp4  # noqa: E402
from flashinfer_compat.weights.shared import append_shared, split_shared  # noqa: E402
from flashinfer_compat.weights.values import LayerConfig, MoELayerWeights, Nvfp4Experts, Router  # noqa: E402

if TYPE_CHECKING:
    from types import ModuleType

pytestmark = pytest.mark.flashinfer

HIDDEN, INTER, E, TOP_K, TOKENS = 128, 64, 32, 4, 19
CONFIG = LayerConfig(
    hidden_size=HIDDEN,
    intermediate_size=INTER,
    num_experts=E,
    top_k=TOP_K,
    num_shared_experts=2,
    n_group=4,
    topk_group=2,
    routed_scaling_factor=2.5,
    norm_topk_prob=True,
    routing_method=fc.RoutingMethod.DEEPSEEK_V3,
    activation=fc.Activation.SWIGLU,
)


@pytest.fixture(scope="module")
def templates() -> ModuleType:
    pytest.importorskip("flashinfer")
    return pytest.importorskip("flashinfer.trace.templates.moe")


def experts(count: int, width: int, generator: torch.Generator) -> Nvfp4Experts:
    """Random experts whose global scales are 1, because FlashInfer's reference knows no others."""

    def quantized(*shape: int) -> Nvfp4Tensor:
        return quantize_nvfp4(torch.randn(*shape, generator=generator) * 0.3, 1.0)

    gate_up, down = quantized(count, 2, width, HIDDEN), quantized(count, HIDDEN, width)
    return Nvfp4Experts(
        gate_up.codes,
        gate_up.block_scale,
        torch.ones(count, 2),
        torch.ones(count, 2),
        down.codes,
        down.block_scale,
        torch.ones(count),
        torch.ones(count),
    )


@pytest.fixture(scope="module")
def weights() -> MoELayerWeights:
    generator = torch.Generator().manual_seed(0)
    router = Router(torch.randn(E, HIDDEN, generator=generator), torch.randn(E, generator=generator) * 0.1)
    return MoELayerWeights(CONFIG, router, experts(E, INTER, generator), experts(1, 2 * INTER, generator), 0, 0, 1)


def kernel_arguments(all_experts: Nvfp4Experts) -> dict[str, object]:
    """Canonical layout: rows [up; gate], linear block scales."""
    count = all_experts.num_experts
    return {
        "gemm1_weights": all_experts.gate_up_weight.flip(1).reshape(count, 2 * INTER, HIDDEN // 2),
        "gemm1_weights_scale": all_experts.gate_up_block_scale.view(torch.uint8)
        .flip(1)
        .reshape(count, 2 * INTER, HIDDEN // 16)
        .view(torch.float8_e4m3fn),
        "gemm1_bias": None,
        "gemm2_weights": all_experts.down_weight,
        "gemm2_weights_scale": all_experts.down_block_scale,
        "gemm2_bias": None,
        "local_expert_offset": 0,
    }


def compare(output: torch.Tensor, expected: torch.Tensor) -> None:
    difference = (output.double() - expected.double()).norm() / expected.double().norm()
    # FlashInfer's reference rounds its result to bf16.
    assert float(difference) < 5e-3


def test_native_with_fused_shared_experts(templates: ModuleType, weights: MoELayerWeights) -> None:
    x = torch.randn(TOKENS, HIDDEN, generator=torch.Generator().manual_seed(1)).bfloat16()
    routing = fc.route_logits(x, weights.router)
    plan = fc.plan(weights.problem("logits", numerics="w4a16"), strategy="native", backend="torch")
    output = fc.fp4_moe(x, fc.prepare(weights, plan), routing)
    expected = templates._trtllm_fp4_block_scale_moe_ds_routing_reference(
        routing_logits=routing.logits,
        routing_bias=routing.bias,
        hidden_states=x,
        hidden_states_scale=None,
        top_k=TOP_K,
        n_group=CONFIG.n_group,
        topk_group=CONFIG.topk_group,
        routed_scaling_factor=CONFIG.routed_scaling_factor,
        num_fused_shared_experts=CONFIG.num_shared_experts,
        **kernel_arguments(append_shared(weights.routed, split_shared(weights))),
    )
    compare(output, expected)


def test_routed_experts_with_given_topk(templates: ModuleType, weights: MoELayerWeights) -> None:
    without = replace(weights, shared=None, config=replace(CONFIG, num_shared_experts=0))
    generator = torch.Generator().manual_seed(2)
    x = torch.randn(TOKENS, HIDDEN, generator=generator).bfloat16()
    ids = torch.rand(TOKENS, E, generator=generator).topk(TOP_K).indices
    weight = torch.rand(TOKENS, TOP_K, generator=generator)
    plan = fc.plan(without.problem("topk", numerics="w4a16"), backend="torch")
    output = fc.fp4_moe(x, fc.prepare(without, plan), fc.TopKRouting(ids, weight))
    arguments = kernel_arguments(without.routed)
    expected = templates._fp4_moe_run_experts(
        hidden_states=x, hidden_states_scale=None, weights=weight, topk_idx=ids, E_global=E, **arguments
    )
    compare(output, expected)
