"""What a measured layer must give: plain PyTorch in float32, an expert at a time, apart from the backends."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch.nn import functional

from flashinfer_compat.numerics.nvfp4 import Nvfp4Tensor, dequantize_nvfp4, quantize_nvfp4
from flashinfer_compat.numerics.routing import TopK
from flashinfer_compat.vocabulary import Numerics
from flashinfer_compat.weights.values import MoELayerWeights, Nvfp4Experts

__all__ = ["TOLERANCE", "Deviation", "dequantized", "deviation_of", "expected"]

TOLERANCE = 5e-3
"""Relative error up to which a time is told; 1.7e-3 is the rounding of the output to bf16."""


@dataclass(frozen=True)
class Deviation:
    """How far an output is from the reference; Euclidean norms."""

    relative: float
    """Over all rows."""
    median_row: float

    def judged(self, numerics: Numerics) -> float:
        """What is held against the tolerance. In w4a4 a tie moves single rows; a wrong kernel moves most."""
        return self.median_row if numerics is Numerics.W4A4 else self.relative


def deviation_of(output: torch.Tensor, right: torch.Tensor) -> Deviation:
    """Infinite where the output is not finite."""
    if not bool(torch.isfinite(output).all()):
        return Deviation(float("inf"), float("inf"))
    difference, size = (output.double() - right.double()).norm(dim=1), right.double().norm(dim=1)
    rows = difference / size.clamp(min=1e-30)
    return Deviation(float(difference.norm() / size.norm().clamp(min=1e-30)), float(rows.median()))


@torch.no_grad()
def expected(weights: MoELayerWeights, hidden_states: torch.Tensor, chosen: TopK, numerics: Numerics) -> torch.Tensor:
    """The layer's output in float32 [T, H]; input scales are each expert's own."""
    values = hidden_states.float()
    output = torch.zeros_like(values)
    if isinstance(weights.shared, Nvfp4Experts):
        output += _mlp(values, weights.shared, 0, numerics)
    for expert in sorted(set(chosen.ids.flatten().tolist())):
        token, slot = (chosen.ids == expert).nonzero(as_tuple=True)
        rows = _mlp(values[token], weights.routed, expert, numerics)
        output.index_add_(0, token, chosen.weights[token, slot, None] * rows)
    return output


def dequantized(experts: Nvfp4Experts, name: str, expert: int) -> torch.Tensor:
    """One expert's `gate_up` [2, I, H] or `down` [H, I] in float32."""
    tensors = (getattr(experts, f"{name}_{kind}") for kind in ("weight", "block_scale", "global_scale"))
    return dequantize_nvfp4(Nvfp4Tensor(*(tensor[expert] for tensor in tensors)))


def _mlp(values: torch.Tensor, experts: Nvfp4Experts, expert: int, numerics: Numerics) -> torch.Tensor:
    def rounded(activations: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
        if numerics is Numerics.W4A16:
            return activations
        return dequantize_nvfp4(quantize_nvfp4(activations, scale, check=False))

    weights = dequantized(experts, "gate_up", expert)
    gate, up = (rounded(values, experts.gate_up_input_scale[expert, side]) @ weights[side].T for side in (0, 1))
    hidden = rounded(functional.silu(gate) * up, experts.down_input_scale[expert])
    return hidden @ dequantized(experts, "down", expert).T
