"""What a checked layer must give: one token and one expert at a time in float64, sharing no code with the backends.

Only the NVFP4 codec is shared (`numerics.nvfp4`), which is tested against ModelOpt and FlashInfer.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from flashinfer_compat.numerics.nvfp4 import Nvfp4Tensor, dequantize_nvfp4, quantize_nvfp4
from flashinfer_compat.verification.layers import CheckedLayer, Inputs
from flashinfer_compat.vocabulary import Numerics, RoutingMethod
from flashinfer_compat.weights.values import DenseExperts, LayerConfig, Nvfp4Experts

__all__ = ["choose", "expected"]


def expected(layer: CheckedLayer, inputs: Inputs, numerics: Numerics) -> torch.Tensor:
    """float64 [T, H] on the CPU."""
    weights = layer.weights
    values, logits = inputs.hidden_states.double().cpu(), inputs.logits.cpu()
    routed = [_Expert.of(weights.routed, one) for one in range(weights.routed.num_experts)]
    shared = None if weights.shared is None else _Expert.of(weights.shared, 0)
    bias = [0.0] * len(routed) if weights.router.bias is None else weights.router.bias.tolist()
    output = torch.zeros_like(values)
    for token in range(values.shape[0]):
        for expert, weight in choose(weights.config, logits[token].tolist(), bias):
            output[token] += weight * routed[expert](values[token], numerics)
        if shared is not None:
            output[token] += shared(values[token], numerics)
    return output


def choose(config: LayerConfig, logits: list[float], bias: list[float]) -> list[tuple[int, float]]:
    """(expert, weight) of one token, by the definitions of DeepSeek-V3's gate and of softmax over the chosen."""
    if config.routing_method is RoutingMethod.RENORMALIZE:
        chosen = sorted(range(len(logits)), key=lambda one: -logits[one])[: config.top_k]
        powers = {one: math.exp(logits[one]) for one in chosen}
        total = sum(powers.values())
        return [(one, powers[one] / total) for one in chosen]
    scores = [1 / (1 + math.exp(-one)) for one in logits]
    biased = [score + one for score, one in zip(scores, bias, strict=True)]
    size = len(logits) // config.n_group
    groups = [range(start, start + size) for start in range(0, len(logits), size)]
    if config.n_group > 1:
        groups.sort(key=lambda group: -sum(sorted(biased[one] for one in group)[-2:]))
    open_to = [one for group in groups[: config.topk_group] for one in group]
    chosen = sorted(open_to, key=lambda one: -biased[one])[: config.top_k]
    total = sum(scores[one] for one in chosen)
    return [(one, config.routed_scaling_factor * scores[one] / total) for one in chosen]


class _Expert:
    """One gated MLP with dequantized weights."""

    def __init__(self, gate: torch.Tensor, up: torch.Tensor, down: torch.Tensor, scales: list[float] | None) -> None:
        self.gate, self.up, self.down = gate.double().cpu(), up.double().cpu(), down.double().cpu()
        self.scales: Sequence[float | None] | None = scales
        """Input scales of gate, up and down; None where the expert is not quantized."""

    @staticmethod
    def of(experts: Nvfp4Experts | DenseExperts, index: int) -> _Expert:
        if isinstance(experts, DenseExperts):
            gate, up = experts.gate_up_weight[index]
            return _Expert(gate, up, experts.down_weight[index], None)
        gate, up = (
            dequantize_nvfp4(
                Nvfp4Tensor(
                    experts.gate_up_weight[index, side],
                    experts.gate_up_block_scale[index, side],
                    experts.gate_up_global_scale[index, side],
                )
            )
            for side in range(2)
        )
        down = dequantize_nvfp4(
            Nvfp4Tensor(experts.down_weight[index], experts.down_block_scale[index], experts.down_global_scale[index])
        )
        scales = [*experts.gate_up_input_scale[index].tolist(), float(experts.down_input_scale[index])]
        return _Expert(gate, up, down, scales)

    def __call__(self, values: torch.Tensor, numerics: Numerics) -> torch.Tensor:
        scales = self.scales if self.scales and numerics is Numerics.W4A4 else [None] * 3
        gate = self.gate @ _rounded(values, scales[0])
        up = self.up @ _rounded(values, scales[1])
        hidden = gate / (1 + torch.exp(-gate)) * up
        return self.down @ _rounded(hidden, scales[2])


def _rounded(values: torch.Tensor, scale: float | None) -> torch.Tensor:
    return values if scale is None else dequantize_nvfp4(quantize_nvfp4(values.float(), scale, check=False)).double()
