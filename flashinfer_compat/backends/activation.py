"""The gated activations in plain PyTorch, for MLPs that run outside a fused kernel."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType

import torch
from torch.nn import functional

from flashinfer_compat.vocabulary import Activation

__all__ = ["ACTIVATIONS", "GatedActivation"]

GatedActivation = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
"""gate and up, of any float dtype, to float32: whoever rounds the result says so."""

ACTIVATIONS: Mapping[Activation, GatedActivation] = MappingProxyType(
    {
        Activation.SWIGLU: lambda gate, up: functional.silu(gate.float()) * up.float(),
        Activation.GEGLU: lambda gate, up: functional.gelu(gate.float()) * up.float(),
    }
)
"""Planning refuses every other one."""
