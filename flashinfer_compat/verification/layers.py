"""The fixed layers and inputs of the self-checks.

Scales are powers of two and hidden states lie on the NVFP4 grid of their scale, so that quantizers that divide and
quantizers that multiply by a reciprocal round alike: what is left to differ is the order of sums, and codes of the
second GEMM's input that lie on a boundary.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch

from flashinfer_compat.numerics.nvfp4 import dequantize_nvfp4, quantize_nvfp4
from flashinfer_compat.vocabulary import Activation, RoutingMethod
from flashinfer_compat.weights.values import DenseExperts, LayerConfig, MoELayerWeights, Nvfp4Experts, Router

__all__ = ["TOKENS", "CheckedLayer", "Inputs", "checked_layers"]

TOKENS = (0, 1, 3, 130)
"""One call for each: none, one, a few, and more than one tile of 128."""

_HIDDEN, _INTERMEDIATE, _EXPERTS, _TOP_K = 256, 128, 16, 4
_INPUT_SCALE = 2.0**-9
"""amax / (6 * 448) of hidden states up to 5.25."""
_HUGE = 100.0
"""Of a router bias: far above every score, and the same for several experts."""


@dataclass(frozen=True)
class Inputs:
    """What a call is given."""

    hidden_states: torch.Tensor
    """bfloat16 [T, H]; the first row is zero."""
    logits: torch.Tensor
    """float32 [T, E], all different within a row."""


@dataclass(frozen=True)
class CheckedLayer:
    """One fixed layer."""

    title: str
    weights: MoELayerWeights

    def inputs(self, tokens: int) -> Inputs:
        """The fixed inputs for so many tokens."""
        generator = torch.Generator().manual_seed(1000 + tokens)
        device = self.weights.routed.down_weight.device
        values = torch.randn(tokens, _HIDDEN, generator=generator)
        values[:1] = 0.0
        on_grid = dequantize_nvfp4(quantize_nvfp4(values, _INPUT_SCALE)).to(torch.bfloat16)
        # A step of 2^-7 apart, so that no kernel's rounding of the logits makes a tie.
        order = torch.rand(tokens, _EXPERTS, generator=generator).argsort(-1)
        logits = (order - _EXPERTS // 2).to(torch.float32) / 4
        return Inputs(on_grid.to(device), logits.to(device))


def checked_layers(device: torch.device) -> Iterator[CheckedLayer]:
    """DeepSeek's routing with groups and without, shared experts in NVFP4 and bf16, and a softmax layer without any."""
    config = LayerConfig(
        hidden_size=_HIDDEN,
        intermediate_size=_INTERMEDIATE,
        num_experts=_EXPERTS,
        top_k=_TOP_K,
        num_shared_experts=1,
        n_group=4,
        topk_group=2,
        routed_scaling_factor=2.5,
        norm_topk_prob=True,
        routing_method=RoutingMethod.DEEPSEEK_V3,
        activation=Activation.SWIGLU,
    )
    generator = torch.Generator().manual_seed(7)
    bias = torch.randn(_EXPERTS, generator=generator).to(torch.bfloat16).to(torch.float32)
    bias[::5] = _HUGE
    router = Router(torch.zeros(_EXPERTS, _HIDDEN, device=device), bias.to(device))
    routed, shared = (_nvfp4(count, generator, device) for count in (_EXPERTS, 1))
    grouped = MoELayerWeights(config, router, routed, shared, layer=0, tp_rank=0, tp_size=1)
    yield CheckedLayer("DeepSeekV3 with groups, NVFP4 shared expert", grouped)
    yield CheckedLayer("DeepSeekV3 with groups, bf16 shared expert", replace(grouped, shared=_dense(generator, device)))
    ungrouped = replace(config, n_group=1, topk_group=1)
    yield CheckedLayer("DeepSeekV3 without groups, NVFP4 shared expert", replace(grouped, config=ungrouped))
    softmax = replace(
        ungrouped, num_shared_experts=0, routing_method=RoutingMethod.RENORMALIZE, routed_scaling_factor=1.0
    )
    yield CheckedLayer("Renormalize, no shared expert", replace(grouped, config=softmax, shared=None))


def _nvfp4(count: int, generator: torch.Generator, device: torch.device) -> Nvfp4Experts:
    def codes(*shape: int) -> torch.Tensor:
        return torch.randint(0, 256, shape, dtype=torch.uint8, generator=generator).to(device)

    def block_scale(*shape: int) -> torch.Tensor:
        # 2^-3 to 2^3, every mantissa.
        return (
            torch.randint(0x20, 0x50, shape, dtype=torch.uint8, generator=generator)
            .view(torch.float8_e4m3fn)
            .to(device)
        )

    def power(low: int, *shape: int) -> torch.Tensor:
        return torch.exp2(torch.randint(low, low + 2, shape, generator=generator).float()).to(device)

    return Nvfp4Experts(
        gate_up_weight=codes(count, 2, _INTERMEDIATE, _HIDDEN // 2),
        gate_up_block_scale=block_scale(count, 2, _INTERMEDIATE, _HIDDEN // 16),
        gate_up_global_scale=power(-9, count, 1).expand(count, 2).contiguous(),
        gate_up_input_scale=torch.full((count, 2), _INPUT_SCALE, device=device),
        down_weight=codes(count, _HIDDEN, _INTERMEDIATE // 2),
        down_block_scale=block_scale(count, _HIDDEN, _INTERMEDIATE // 16),
        down_global_scale=power(-9, count),
        down_input_scale=torch.full((count,), 2.0**-7, device=device),
    )


def _dense(generator: torch.Generator, device: torch.device) -> DenseExperts:
    gate_up = torch.randn(1, 2, _INTERMEDIATE, _HIDDEN, generator=generator) * _HIDDEN**-0.5
    down = torch.randn(1, _HIDDEN, _INTERMEDIATE, generator=generator) * _INTERMEDIATE**-0.5
    return DenseExperts(gate_up.to(torch.bfloat16).to(device), down.to(torch.bfloat16).to(device))
