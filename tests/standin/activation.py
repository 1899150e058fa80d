"""The gated activations of GEMM1's epilogue, on raw accumulators, by the release's number for them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch

from flashinfer_compat.signatures.recorded import recorded
from standin.calls import Call, Era
from standin.faults import need

__all__ = ["Activation", "Scalars", "activation", "activation_name"]


@dataclass(frozen=True)
class Scalars:
    """One expert's scalars, float32 without axes; None where nothing was given."""

    up: torch.Tensor
    """output1_scale_scalar."""
    gate: torch.Tensor
    """output1_scale_gate_scalar."""
    alpha: torch.Tensor | None
    beta: torch.Tensor | None
    clamp: torch.Tensor | None


Activation = Callable[[torch.Tensor, torch.Tensor, Scalars], torch.Tensor]
"""Of the accumulators of the up and the gate rows, [n, I] each."""


def _swiglu(up: torch.Tensor, gate: torch.Tensor, scalars: Scalars) -> torch.Tensor:
    return _gated(up, gate, scalars, torch.sigmoid)


def _geglu(up: torch.Tensor, gate: torch.Tensor, scalars: Scalars) -> torch.Tensor:
    return _gated(up, gate, scalars, torch.special.ndtr)


def _gated(
    up: torch.Tensor, gate: torch.Tensor, scalars: Scalars, curve: Callable[[torch.Tensor], torch.Tensor]
) -> torch.Tensor:
    """FlashInfer 0.7.4, KernelRunner.h:36-57: beta and the clamp are in the units of the accumulator, alpha is not."""
    if scalars.clamp is not None:
        up, gate = up.clamp(-scalars.clamp, scalars.clamp), gate.clamp(max=scalars.clamp)
    scaled = scalars.gate * gate
    slope = 1.0 if scalars.alpha is None else scalars.alpha
    shift = 0.0 if scalars.beta is None else scalars.beta
    return scalars.up * (up + shift) * scaled * curve(slope * scaled)


def _swiglu_step(up: torch.Tensor, gate: torch.Tensor, scalars: Scalars) -> torch.Tensor:
    """FlashInfer 0.7.4, `_fp4_moe_run_experts` (trace/templates/moe.py:1626-1640)."""
    limit = 7.0 / scalars.gate if scalars.clamp is None else scalars.clamp
    silu = torch.nn.functional.silu(scalars.gate * gate)
    return scalars.up * up.clamp(-limit, limit) * silu.clamp(max=limit * scalars.gate)


def _situ(up: torch.Tensor, gate: torch.Tensor, scalars: Scalars) -> torch.Tensor:
    """Of dequantized values: both halves are multiplied with the gate's scalar, and the result with the up's."""
    if scalars.clamp is not None:
        raise NotImplementedError("gemm1_clamp_limit with Situ is not modelled")
    alpha = torch.ones_like(scalars.up) if scalars.alpha is None else scalars.alpha
    beta = torch.ones_like(scalars.up) if scalars.beta is None else scalars.beta
    left, right = scalars.gate * up, scalars.gate * gate
    return scalars.up * beta * torch.tanh(left / beta) * alpha * torch.tanh(right / alpha) * torch.sigmoid(right)


_BY_NAME: Mapping[str, tuple[Activation, str]] = {
    "Swiglu": (_swiglu, "0.2.9"),
    "Geglu": (_geglu, "0.2.14"),
    "Situ": (_situ, "0.6.16"),
    "SwigluStep": (_swiglu_step, "0.7.2.post1"),
}
"""The function, and the first release whose MoE runs it; the enumeration may be older."""
_GATED_ACT_TYPES: Mapping[int, Activation] = {0: _swiglu, 1: _geglu}
_WITHOUT_GATE = ("Relu2", "Identity")


def activation(era: Era, call: Call) -> Activation:
    """The activation of a call.

    Raises:
        LaunchError: the release's MoE does not run it, or not with these arguments.
        NotImplementedError: it runs it, but it has no gate.
    """
    if "gated_act_type" in call.arguments:
        number = int(call["gated_act_type"])
        need(number in _GATED_ACT_TYPES, f"invalid gated act type {number}")
        return _GATED_ACT_TYPES[number]
    name = activation_name(era, call)
    if name in _WITHOUT_GATE:
        raise NotImplementedError(f"activation_type={name} is not modelled")
    need(name in _BY_NAME and era.since(_BY_NAME[name][1]), f"Unsupported activation type {name}")
    if name == "SwigluStep":
        extra = call.get("gemm1_alpha") is not None or call.get("gemm1_beta") is not None
        need(not extra, "SwigluStep accepts gemm1_clamp_limit only; gemm1_alpha and gemm1_beta must be absent.")
    return _BY_NAME[name][0]


def activation_name(era: Era, call: Call) -> str:
    """The name this release gives the number, or the number itself."""
    symbol = recorded(era.version).symbols.get("ActivationType")
    if symbol is None:
        return "Swiglu"
    number = int(call.arguments.get("activation_type", 3))
    return {value: name for name, value in symbol.members or ()}.get(number, str(number))
