"""What `fp4_moe` takes: hidden states rounded already, and router logits or chosen experts with their weights."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeAlias

from flashinfer_compat.vocabulary import RoutingInput

if TYPE_CHECKING:
    import torch

__all__ = ["HiddenStates", "LogitsRouting", "PackedTopKRouting", "QuantizedInput", "Routing", "TopKRouting"]


@dataclass(frozen=True)
class QuantizedInput:
    """Hidden states that the caller has rounded to NVFP4: `code * block scale * scale` for each 16 values.

    The scale is `PreparedLayer.input_scale` of the layer, or each token's own where the plan's activation_scaling is
    per_token.
    """

    codes: torch.Tensor
    """uint8 [T, H/2], two E2M1 codes a byte, low nibble first."""
    block_scale: torch.Tensor
    """float8_e4m3fn, or its bytes as uint8, [T, H/16], row-major (linear, not swizzled)."""
    per_token_scale: torch.Tensor | None = None
    """float32 [T], amax / (6 * 448) of each token; with activation_scaling per_token only."""
    hidden_states: torch.Tensor | None = None
    """bfloat16 [T, H], the values before rounding: a shared expert that runs beside the kernel needs them."""


@dataclass(frozen=True)
class LogitsRouting:
    """Router logits; the layer's routing method, groups and scaling factor are in its plan."""

    logits: torch.Tensor
    """float32, bfloat16 or float16 [T, E]."""
    bias: torch.Tensor | None = None
    """[E], added to the scores to choose experts, not to weigh them."""

    @property
    def routing_input(self) -> RoutingInput:
        """The kind of input a plan must have been made for."""
        return RoutingInput.LOGITS


@dataclass(frozen=True)
class TopKRouting:
    """Chosen routed experts and their final weights."""

    ids: torch.Tensor
    """int32 or int64 [T, top_k], in 0..num_experts-1; shared experts are not among them."""
    weights: torch.Tensor
    """float32 or bfloat16 [T, top_k]; routed_scaling_factor is already applied. They are used as they are."""

    @property
    def routing_input(self) -> RoutingInput:
        """The kind of input a plan must have been made for."""
        return RoutingInput.TOPK


@dataclass(frozen=True)
class PackedTopKRouting:
    """Chosen routed experts and their final weights in the kernel's packed form."""

    packed: torch.Tensor
    """int32 [T, top_k]: `(id << 16) | bf16 bits of the weight` (FlashInfer 0.7.4, RoutingKernel.h `PackedScoreIdx`)."""

    @property
    def routing_input(self) -> RoutingInput:
        """The kind of input a plan must have been made for."""
        return RoutingInput.TOPK


Routing = LogitsRouting | TopKRouting | PackedTopKRouting

HiddenStates: TypeAlias = "torch.Tensor | QuantizedInput"
