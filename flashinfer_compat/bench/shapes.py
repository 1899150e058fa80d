"""The layers that are measured, by their sizes; pure."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from flashinfer_compat.problem import DEEPSEEK_R1, Problem
from flashinfer_compat.vocabulary import Numerics, RoutingInput, SharedExpertFormat

__all__ = ["R1_INTERMEDIATE_SIZES", "R1_TOKENS", "Sizes"]

R1_INTERMEDIATE_SIZES = (256, 2048)
"""DeepSeek-R1 on eight tensor-parallel ranks, and whole."""
R1_TOKENS = (1, 8, 64, 512, 4096)

_BITS_PER_BLOCK = 16 * 4 + 8
"""Of an NVFP4 block: 16 codes and their scale."""


@dataclass(frozen=True)
class Sizes:
    """One layer; the rest of it is DeepSeek's: its routing, SwiGLU, NVFP4 shared experts."""

    hidden_size: int = DEEPSEEK_R1.hidden_size
    intermediate_size: int = DEEPSEEK_R1.intermediate_size
    num_experts: int = DEEPSEEK_R1.num_experts
    top_k: int = DEEPSEEK_R1.top_k
    num_shared_experts: int = DEEPSEEK_R1.num_shared_experts

    @property
    def expert_values(self) -> int:
        """Weights of one expert: gate, up and down."""
        return 3 * self.hidden_size * self.intermediate_size

    @property
    def expert_bytes(self) -> int:
        """Codes and block scales of one expert; a few global scales are left out."""
        return self.expert_values // 16 * _BITS_PER_BLOCK // 8

    def problem(self, routing_input: RoutingInput, numerics: Numerics) -> Problem:
        """The problem to plan for. With as many experts as DeepSeek-R1 it has its groups, otherwise none.

        Raises:
            ArgumentError: no layer has such sizes.
        """
        grouped = self.num_experts == DEEPSEEK_R1.num_experts and self.top_k <= _REACHABLE
        return Problem(
            **asdict(self),
            shared_format=SharedExpertFormat.NVFP4 if self.num_shared_experts else SharedExpertFormat.NONE,
            routing_input=routing_input,
            n_group=DEEPSEEK_R1.n_group if grouped else 1,
            topk_group=DEEPSEEK_R1.topk_group if grouped else 1,
            routed_scaling_factor=DEEPSEEK_R1.routed_scaling_factor,
            numerics=numerics,
        )

    @staticmethod
    def of(problem: Problem) -> Sizes:
        """Those of a problem."""
        return Sizes(**{name: getattr(problem, name) for name in asdict(Sizes())})

    def to_dict(self) -> dict[str, Any]:
        """The sizes as plain JSON values."""
        return asdict(self)

    def __str__(self) -> str:
        shared = f"{self.num_shared_experts} shared" if self.num_shared_experts else "none shared"
        return (
            f"hidden_size {self.hidden_size}, intermediate_size {self.intermediate_size}, {self.num_experts} experts, "
            f"top-{self.top_k}, {shared}"
        )


_REACHABLE = DEEPSEEK_R1.topk_group * DEEPSEEK_R1.num_experts // DEEPSEEK_R1.n_group
"""Experts of the groups that a token may choose from."""
