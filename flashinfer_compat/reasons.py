"""Why something is not available: a closed set of codes, each with a sentence and, where there is one, a way out."""

from __future__ import annotations

import enum
from dataclasses import dataclass

__all__ = ["Reason", "ReasonCode"]


class ReasonCode(str, enum.Enum):
    """What kind of reason it is. Programs may rely on these values; sentences may change."""

    # The install
    FLASHINFER_MISSING = "flashinfer_missing"
    TORCH_MISSING = "torch_missing"
    TORCH_WITHOUT_CUDA = "torch_without_cuda"
    LIBRARY_MISSING = "library_missing"
    ENTRY_POINT_MISSING = "entry_point_missing"
    KEYWORD_MISSING = "keyword_missing"
    MEMBER_MISSING = "member_missing"
    UNREADABLE = "unreadable"
    BEHAVIOUR_UNKNOWN = "behaviour_unknown"
    KNOWN_ISSUE = "known_issue"
    REFUTED = "refuted"
    # The GPU
    NO_GPU = "no_gpu"
    ARCHITECTURE = "architecture"
    # The problem
    NO_SHARED_EXPERTS = "no_shared_experts"
    SHARED_FORMAT = "shared_format"
    EXPERT_PARALLELISM = "expert_parallelism"
    SHARED_PLACEMENT = "shared_placement"
    SHARED_GATE = "shared_gate"
    ROUTED_SCALING = "routed_scaling"
    NEEDS_LOGITS = "needs_logits"
    NEEDS_TOPK = "needs_topk"
    NO_ROUTER = "no_router"
    ROUTING_METHOD = "routing_method"
    NO_EXPERT_GROUPS = "no_expert_groups"
    ACTIVATION = "activation"
    NUMERICS = "numerics"
    ACTIVATION_SCALING = "activation_scaling"
    NORM_TOPK_PROB = "norm_topk_prob"
    # Sizes
    NUM_EXPERTS = "num_experts"
    TOP_K = "top_k"
    EXPERT_GROUPS = "expert_groups"
    NUM_SHARED_EXPERTS = "num_shared_experts"
    HIDDEN_SIZE = "hidden_size"
    INTERMEDIATE_SIZE = "intermediate_size"
    # The choice
    NOT_ASKED_FOR = "not_asked_for"
    NOT_PREFERRED = "not_preferred"
    POLICY = "policy"
    EVIDENCE = "evidence"


@dataclass(frozen=True)
class Reason:
    """One reason, for people and for programs."""

    code: ReasonCode
    message: str
    way_out: str = ""

    def to_dict(self) -> dict[str, str]:
        """The reason as plain JSON values."""
        return {"code": self.code.value, "message": self.message, "way_out": self.way_out}

    def __str__(self) -> str:
        return f"{self.message} {self.way_out}" if self.way_out else self.message
