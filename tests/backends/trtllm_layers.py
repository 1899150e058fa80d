"""Layers of random bytes and of the samples, with the calls their weights are laid out for."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

import flashinfer_compat as fc
from flashinfer_compat.features.target import Target
from flashinfer_compat.weights.shared import append_shared, split_shared
from flashinfer_compat.weights.values import DenseExperts, LayerConfig, MoELayerWeights, Nvfp4Experts, Router

if TYPE_CHECKING:
    from flashinfer_compat.planning.decision import KernelCall

# Sample, routing input, strategy.
SAMPLE_CALLS = [
    ("grouped", "logits", "split"),
    ("grouped", "logits", "native"),
    ("grouped", "topk", "expanded"),
    ("shared-bf16", "logits", "split"),
    ("ungrouped-2-shared", "topk", "split"),
    ("ungrouped-2-shared", "topk", "expanded"),
]
TARGET = Target.from_release("0.7.4", "sm100")
SCALARS = ("gate_up_global_scale", "gate_up_input_scale", "down_global_scale", "down_input_scale")


def call_of(weights: MoELayerWeights, routing_input: str = "topk", strategy: str = "expanded") -> KernelCall:
    call = fc.plan(weights.problem(routing_input), TARGET, strategy=strategy).call
    assert call is not None
    return call


def experts_of(weights: MoELayerWeights, call: KernelCall) -> Nvfp4Experts:
    """The experts of the call in checkpoint layout."""
    if call.weight_rows == weights.config.num_experts:
        return weights.routed
    shared = split_shared(weights)
    assert isinstance(shared, Nvfp4Experts)
    return append_shared(weights.routed, shared)


def random_experts(count: int, hidden: int, width: int, seed: int = 0) -> Nvfp4Experts:
    """Random bytes without NaN scales; every scalar is different."""
    generator = torch.Generator().manual_seed(seed)

    def codes(*shape: int) -> torch.Tensor:
        return torch.randint(0, 256, shape, dtype=torch.uint8, generator=generator)

    def scales(*shape: int) -> torch.Tensor:
        return torch.randint(0, 0x7F, shape, dtype=torch.uint8, generator=generator).view(torch.float8_e4m3fn)

    def scalars(*shape: int) -> torch.Tensor:
        return torch.rand(*shape, generator=generator) * 1e-3 + 1e-4

    return Nvfp4Experts(
        gate_up_weight=codes(count, 2, width, hidden // 2),
        gate_up_block_scale=scales(count, 2, width, hidden // 16),
        gate_up_global_scale=scalars(count, 2),
        gate_up_input_scale=scalars(count, 2),
        down_weight=codes(count, hidden, width // 2),
        down_block_scale=scales(count, hidden, width // 16),
        down_global_scale=scalars(count),
        down_input_scale=scalars(count),
    )


def layer_of(routed: Nvfp4Experts, shared: Nvfp4Experts | DenseExperts | None, num_shared: int) -> MoELayerWeights:
    config = LayerConfig(
        hidden_size=routed.hidden_size,
        intermediate_size=routed.intermediate_size,
        num_experts=routed.num_experts,
        top_k=2,
        num_shared_experts=num_shared,
        n_group=1,
        topk_group=1,
        routed_scaling_factor=1.0,
        norm_topk_prob=True,
        routing_method=fc.RoutingMethod.DEEPSEEK_V3,
        activation=fc.Activation.SWIGLU,
    )
    router = Router(torch.zeros(routed.num_experts, routed.hidden_size), None)
    return MoELayerWeights(config, router, routed, shared, 0, 0, 1)


def random_layer(hidden: int = 256, width: int = 64, num_shared: int = 2, seed: int = 0) -> MoELayerWeights:
    shared = random_experts(1, hidden, width * num_shared, seed + 1) if num_shared else None
    return layer_of(random_experts(4, hidden, width, seed), shared, num_shared)
