"""The sample's experts on float32 weights, in the order of the checkpoint, and inputs for them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import standin
import torch
from launches import Layer
from torch.nn import functional

from flashinfer_compat.numerics import Nvfp4Tensor, dequantize_nvfp4, quantize_nvfp4

E, H, INTER, T = 16, 256, 128, 33
BF16 = 6e-3
PER_TOKEN = 1.0 / (448.0 * 6.0)
Physical = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


def silu_and_mul(up: torch.Tensor, gate: torch.Tensor) -> torch.Tensor:
    return up * functional.silu(gate)


class Experts:
    """Each expert's dequantized matrices, with the gate's global scale for both halves of GEMM1."""

    def __init__(self, layer: Layer) -> None:
        routed = layer.weights.routed
        self.topk = layer.topk()
        self.gate_scale = routed.gate_up_global_scale[:, 0].contiguous()
        self.down_scale = routed.down_global_scale
        gate_up = Nvfp4Tensor(routed.gate_up_weight, routed.gate_up_block_scale, torch.ones(()))
        self.gate, self.up = (dequantize_nvfp4(gate_up) * self.gate_scale.reshape(-1, 1, 1, 1)).unbind(1)
        down = Nvfp4Tensor(routed.down_weight, routed.down_block_scale, torch.ones(()))
        self.down = dequantize_nvfp4(down) * self.down_scale.reshape(-1, 1, 1)

    def __call__(
        self,
        x: torch.Tensor,
        physical: Physical = silu_and_mul,
        requantize: Callable[[torch.Tensor], torch.Tensor] = lambda hidden: hidden,
    ) -> torch.Tensor:
        output = torch.zeros(len(x), H)
        for token, ids in enumerate(self.topk.ids.tolist()):
            for slot, expert in enumerate(ids):
                hidden = physical(self.up[expert] @ x[token], self.gate[expert] @ x[token])
                weight = self.topk.weights[token, slot].bfloat16().float()
                output[token] += weight * (self.down[expert] @ requantize(hidden)).bfloat16().float()
        return output


def per_token(hidden: torch.Tensor) -> torch.Tensor:
    """A row through the explicit quantizer: bf16, then a scale of its own."""
    row = hidden.bfloat16()
    amax = row.abs().max().float()
    return dequantize_nvfp4(quantize_nvfp4(row, amax * PER_TOKEN)) if amax else row.float()


def per_token_arguments(layer: Layer, version: str, experts: Experts) -> dict[str, Any]:
    flashinfer = standin.release(version).objects
    linear = flashinfer["SfLayout"].layout_linear
    codes, scale, per_row = flashinfer["nvfp4_quantize"](layer.x, PER_TOKEN, sfLayout=linear, per_token_activation=True)
    return {
        "hidden_states": codes,
        "hidden_states_scale": scale.view(torch.float8_e4m3fn),
        "per_token_scale": per_row,
        "output1_scale_scalar": experts.gate_scale,
        "output1_scale_gate_scalar": experts.gate_scale,
        "output2_scale_scalar": experts.down_scale,
    }


def dequantized(arguments: dict[str, Any]) -> torch.Tensor:
    ones = torch.ones(())
    found = dequantize_nvfp4(Nvfp4Tensor(arguments["hidden_states"], arguments["hidden_states_scale"], ones))
    return found * arguments["per_token_scale"][:, None]


def deltas() -> torch.Tensor:
    return (torch.randn(T, 4, 2 * INTER, generator=torch.Generator().manual_seed(0)) * 0.5).bfloat16()
