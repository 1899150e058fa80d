"""One MoE layer's weights as frozen values, in the layout a ModelOpt NVFP4 checkpoint stores them in.

E is the number of experts held, H the hidden_size, I the intermediate_size (of this tensor-parallel rank). An NVFP4
value is `E2M1 code * block scale * global scale`; the input scale multiplies an activation's codes the same way.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from flashinfer_compat.vocabulary import Activation, RoutingMethod, SharedExpertFormat

if TYPE_CHECKING:
    import torch

__all__ = ["DenseExperts", "LayerConfig", "MoELayerWeights", "Nvfp4Experts", "Router"]


@dataclass(frozen=True)
class LayerConfig:
    """The sizes and the routing of one MoE layer."""

    hidden_size: int
    intermediate_size: int
    """Of one routed expert, whole (before tensor parallelism)."""
    num_experts: int
    """Routed experts."""
    top_k: int
    """Routed experts per token."""
    num_shared_experts: int
    n_group: int
    topk_group: int
    routed_scaling_factor: float
    norm_topk_prob: bool
    routing_method: RoutingMethod
    activation: Activation


@dataclass(frozen=True)
class Router:
    """The linear layer that scores experts."""

    weight: torch.Tensor
    """[E, H], as stored (bf16 or float32)."""
    bias: torch.Tensor | None
    """[E] float32, added to the scores to choose experts, not to weigh them (DeepSeek's e_score_correction_bias)."""


@dataclass(frozen=True)
class Nvfp4Experts:
    """E gated MLPs in NVFP4. Index 0 of the second axis of `gate_up_*` is the gate projection, 1 is up."""

    gate_up_weight: torch.Tensor
    """uint8 [E, 2, I, H/2], two E2M1 codes a byte, low nibble first."""
    gate_up_block_scale: torch.Tensor
    """float8_e4m3fn [E, 2, I, H/16], row-major."""
    gate_up_global_scale: torch.Tensor
    """float32 [E, 2]; the checkpoint's weight_scale_2."""
    gate_up_input_scale: torch.Tensor
    """float32 [E, 2]; the checkpoint's input_scale, amax / (6 * 448)."""
    down_weight: torch.Tensor
    """uint8 [E, H, I/2]."""
    down_block_scale: torch.Tensor
    """float8_e4m3fn [E, H, I/16]."""
    down_global_scale: torch.Tensor
    """float32 [E]."""
    down_input_scale: torch.Tensor
    """float32 [E]."""

    @property
    def num_experts(self) -> int:
        """E."""
        return self.gate_up_weight.shape[0]

    @property
    def hidden_size(self) -> int:
        """H."""
        return self.down_weight.shape[1]

    @property
    def intermediate_size(self) -> int:
        """I, of this rank."""
        return self.gate_up_weight.shape[2]


@dataclass(frozen=True)
class DenseExperts:
    """E gated MLPs in bf16. Index 0 of the second axis of `gate_up_weight` is the gate projection, 1 is up."""

    gate_up_weight: torch.Tensor
    """bfloat16 [E, 2, I, H]."""
    down_weight: torch.Tensor
    """bfloat16 [E, H, I]."""

    @property
    def num_experts(self) -> int:
        """E."""
        return self.gate_up_weight.shape[0]

    @property
    def hidden_size(self) -> int:
        """H."""
        return self.down_weight.shape[1]

    @property
    def intermediate_size(self) -> int:
        """I, of this rank."""
        return self.gate_up_weight.shape[2]


@dataclass(frozen=True)
class MoELayerWeights:
    """One MoE layer of a checkpoint, or one tensor-parallel slice of it."""

    config: LayerConfig
    router: Router
    routed: Nvfp4Experts
    """num_experts MLPs of intermediate_size / tp_size."""
    shared: Nvfp4Experts | DenseExperts | None
    """One MLP (E = 1) of intermediate_size * num_shared_experts / tp_size: checkpoints store several shared experts
    as one wide one."""
    layer: int
    tp_rank: int
    tp_size: int

    @property
    def shared_format(self) -> SharedExpertFormat:
        """How the checkpoint stores the shared experts."""
        if self.shared is None:
            return SharedExpertFormat.NONE
        return SharedExpertFormat.NVFP4 if isinstance(self.shared, Nvfp4Experts) else SharedExpertFormat.BF16

    @property
    def input_scale_spread(self) -> float:
        """Largest over smallest gate/up input scale of all NVFP4 experts, shared ones included (1.0: all equal).

        A kernel that quantizes each token once needs one common scale, the largest; the spread says by how much that
        coarsens the expert with the smallest.
        """
        scales = [self.routed.gate_up_input_scale.flatten()]
        if isinstance(self.shared, Nvfp4Experts):
            scales.append(self.shared.gate_up_input_scale.flatten())
        largest = max(float(scale.max()) for scale in scales)
        smallest = min(float(scale.min()) for scale in scales)
        return largest / smallest
