"""The shared expert beside the fused call: a dense MLP, in NVFP4 GEMMs or, where it is stored so, in bf16."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn import functional

from flashinfer_compat.backends.activation import ACTIVATIONS, GatedActivation
from flashinfer_compat.backends.trtllm.kernels import Optional, find
from flashinfer_compat.backends.trtllm.weights import DenseNvfp4Linear, DenseNvfp4Mlp, prepare_dense
from flashinfer_compat.errors import BackendUnavailableError
from flashinfer_compat.planning.decision import Plan
from flashinfer_compat.weights.values import DenseExperts, Nvfp4Experts

__all__ = ["SharedMlp", "gated_output", "prepare_shared"]

SharedMlp = Callable[[torch.Tensor], torch.Tensor]
"""bfloat16 [T, H] to bfloat16 [T, H]."""


def prepare_shared(shared: Nvfp4Experts | DenseExperts, plan: Plan) -> SharedMlp:
    """The shared MLP ready to run.

    Raises:
        BackendUnavailableError: FlashInfer cannot be imported or lacks the functions.
    """
    activation = ACTIVATIONS[plan.problem.activation]
    if isinstance(shared, DenseExperts):
        # torch's linear wants [gate; up] as one matrix.
        return _Bf16Mlp(shared.gate_up_weight[0].flatten(0, 1), shared.down_weight[0], activation)
    if plan.dense is None:
        raise BackendUnavailableError("the plan names no FP4 GEMM for the NVFP4 shared expert.")
    quantizer, gemm = find("fp4_quantize"), find("mm_fp4")
    quantize_arguments = {
        "sf_vec_size": 16,
        "sf_use_ue8m0": False,
        "is_sf_swizzled_layout": True,
        # None: off, not what an environment variable says.
        "nvfp4_4over6": Optional(None),
    }
    gemm_arguments = {"out_dtype": torch.bfloat16, "backend": plan.dense.backend}
    return _Nvfp4Mlp(
        prepare_dense(shared),
        quantizer.function,
        quantizer.fit(quantize_arguments, later=("input", "global_scale")),
        gemm.function,
        gemm.fit(gemm_arguments, later=("a", "b", "a_descale", "b_descale", "alpha")),
        activation,
    )


def gated_output(shared: SharedMlp, values: torch.Tensor, gate: torch.Tensor | None) -> torch.Tensor:
    """What the shared MLP gives [T, H], times the sigmoid of its gate [1, H] where it has one."""
    output = shared(values)
    if gate is None:
        return output
    return output * torch.sigmoid(functional.linear(values, gate).float()).to(output.dtype)


@dataclass(frozen=True)
class _Bf16Mlp:
    gate_up_weight: torch.Tensor
    down_weight: torch.Tensor
    activation: GatedActivation

    def __call__(self, hidden_states: torch.Tensor) -> torch.Tensor:
        gate, up = functional.linear(hidden_states, self.gate_up_weight).chunk(2, dim=-1)
        return functional.linear(self.activation(gate, up).to(gate.dtype), self.down_weight)


@dataclass(frozen=True)
class _Nvfp4Mlp:
    weights: DenseNvfp4Mlp
    quantize: Callable[..., Any]
    quantize_arguments: dict[str, Any]
    gemm: Callable[..., Any]
    gemm_arguments: dict[str, Any]
    activation: GatedActivation

    def __call__(self, hidden_states: torch.Tensor) -> torch.Tensor:
        if self.weights.fused_gate_up:
            gate, up = self._linear(hidden_states, self.weights.gate_up[0]).chunk(2, dim=-1)
        else:
            gate, up = (self._linear(hidden_states, layer) for layer in self.weights.gate_up)
        return self._linear(self.activation(gate, up).to(gate.dtype), self.weights.down)

    def _linear(self, values: torch.Tensor, layer: DenseNvfp4Linear) -> torch.Tensor:
        codes, scale = self.quantize(input=values, global_scale=layer.quantize_scale, **self.quantize_arguments)
        output: torch.Tensor = self.gemm(
            a=codes,
            b=layer.weight.T,
            a_descale=scale,
            b_descale=layer.block_scale.T,
            alpha=layer.alpha,
            **self.gemm_arguments,
        )
        return output
