"""What `fp4_moe_unfinalized` returns: each chosen expert's output, before the sum over a token's experts."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

__all__ = ["UnfinalizedOutput"]


@dataclass(frozen=True)
class UnfinalizedOutput:
    """A layer's output but for the sum: out[t] = sum_k weight[t, k] * gemm2_output[index[t, k]] + shared_output[t].

    Slots are the top_k routed experts in order of choice, then on a fused strategy the S shared ones with weight 1.0.
    Source: FlashInfer 0.7.4, `trtllm_fp4_block_scale_moe` with do_finalize=False.
    """

    gemm2_output: torch.Tensor
    """bfloat16 [rows, H], unweighted, in the kernel's order; rows that no index names hold anything."""
    expert_weights: torch.Tensor
    """bfloat16 or float32 [T, slots]."""
    expanded_idx_to_permuted_idx: torch.Tensor
    """int32 [T, slots]: the row of each slot, -1 where the expert is on another rank."""
    shared_output: torch.Tensor | None
    """bfloat16 [T, H]: the shared experts' part on split, None where they have slots or there are none here."""

    def finalize(self) -> torch.Tensor:
        """The sum, in float32 and rounded once: bfloat16 [T, H]."""
        index = self.expanded_idx_to_permuted_idx.long()
        rows = self.gemm2_output[index.clamp(min=0)].float()
        rows = rows.masked_fill((index < 0).unsqueeze(-1), 0.0)
        output = (self.expert_weights.float().unsqueeze(-1) * rows).sum(1)
        if self.shared_output is not None:
            output = output + self.shared_output.float()
        return output.to(self.gemm2_output.dtype)
