"""What planning answers: the decision, and every alternative it turned down."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from flashinfer_compat.problem import Problem
from flashinfer_compat.reasons import Reason
from flashinfer_compat.vocabulary import Backend, Evidence, RoutingMethod, Strategy

__all__ = ["DenseCall", "KernelCall", "Plan", "Rejection"]


@dataclass(frozen=True)
class KernelCall:
    """The sizes that a FlashInfer entry point is called with."""

    entry_point: str
    num_experts: int
    """Routed and appended experts, and padding ids that are never chosen."""
    local_num_experts: int
    """Of `num_experts`, those on this rank."""
    weight_rows: int
    """Rows of every per-expert tensor."""
    top_k: int
    routing_method: RoutingMethod
    n_group: int | None
    """None: passed as None, because the routing method has no groups."""
    topk_group: int | None
    intermediate_size: int
    """Padded with zeros where the weight layout needs it."""
    num_fused_shared_experts: int
    """0: the keyword is not passed."""
    routed_before: bool
    """Whether router logits are turned into top-k before the call, because the entry point cannot."""
    topk_format: str
    """`packed`, `tuple`, or empty where the entry point takes logits."""
    logits_dtype: str
    """What the kernel reads router logits as; it accepts more than it understands before 0.6.8."""
    bias_dtype: str
    """What the kernel reads the router's bias as."""
    flat_scale: bool
    """Whether block scales of activations must be one-dimensional."""
    per_token_scale: bool
    """Whether each token's own scale is passed, and the scalars leave the input scales out."""
    writes_replay: bool
    """Whether the kernel writes the experts it chose to `routing_replay_out`."""
    mislabels_weights: bool
    """Whether unfinalized expert weights are bf16 numbers under the dtype of the logits."""


@dataclass(frozen=True)
class DenseCall:
    """The FP4 GEMM that a split plan runs an NVFP4 shared expert with."""

    backend: str
    """`mm_fp4`'s."""
    passed_over: tuple[str, ...]
    """Backends that would have been preferred, each with the reason."""


@dataclass(frozen=True)
class Rejection:
    """One reason why one alternative was not taken."""

    strategy: Strategy
    backend: Backend
    reason: Reason

    def to_dict(self) -> dict[str, str]:
        """The rejection as plain JSON values."""
        return {
            "strategy": self.strategy.value,
            "backend": self.backend.value,
            **self.reason.to_dict(),
        }

    def __str__(self) -> str:
        return f"{self.strategy.value} on {self.backend.value}: {self.reason} [{self.reason.code.value}]"


@dataclass(frozen=True)
class Plan:
    """How one MoE layer will run on one target."""

    problem: Problem
    strategy: Strategy
    backend: Backend
    status: Evidence
    call: KernelCall | None
    """None where no trtllm-gen kernel is called."""
    dense: DenseCall | None
    """None where there is no NVFP4 shared expert beside a FlashInfer kernel."""
    rejected: tuple[Rejection, ...]
    notes: tuple[str, ...]
    """What the caller should know: padding, known issues, routing done outside the kernel."""
    split_from_tokens: int | None = None
    """A fused plan runs split from so many tokens a call on, because a measured policy says so; None: never."""

    def to_dict(self) -> dict[str, Any]:
        """The plan as plain JSON values."""
        call = None if self.call is None else asdict(self.call)
        if call is not None:
            call["routing_method"] = call["routing_method"].value
        return {
            "strategy": self.strategy.value,
            "backend": self.backend.value,
            "status": self.status.value,
            "call": call,
            "split_from_tokens": self.split_from_tokens,
            "dense": self.dense and {"backend": self.dense.backend, "passed_over": list(self.dense.passed_over)},
            "notes": list(self.notes),
            "rejected": [rejection.to_dict() for rejection in self.rejected],
            "problem": self.problem.to_dict(),
        }
