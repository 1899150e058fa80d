"""What every engine's gate answers: whether the shared experts of a model are fused, and why."""

from __future__ import annotations

import enum
from dataclasses import dataclass

from packaging.version import Version

from flashinfer_compat.errors import StrategyUnavailableError
from flashinfer_compat.features.target import Target
from flashinfer_compat.planning.decision import Plan

__all__ = ["LAST_WITHOUT", "Decision", "Outcome", "old_flashinfer", "refusal", "told"]

LAST_WITHOUT = Version("0.6.15.post1")
"""With this FlashInfer and older ones nothing is changed."""


class Outcome(enum.Enum):
    """What becomes of the engine's own answer."""

    UNTOUCHED = "left as it is"
    """Not a question of this plugin: another runner, quantization or FlashInfer, or the user's own word."""
    KEPT_OFF = "kept off"
    """It was asked for, but does not work here."""
    LIFTED = "on"


@dataclass(frozen=True)
class Decision:
    """The outcome, why, and how the layers will run where shared experts are fused."""

    outcome: Outcome
    why: str
    plan: Plan | None = None

    def __str__(self) -> str:
        return f"fusion of shared experts {self.outcome.value}: {self.why}"


def old_flashinfer(target: Target) -> str:
    """Says so where the FlashInfer of `target` is one with which nothing is changed; empty elsewhere."""
    found = target.flashinfer
    if found is None or found.behaviour is None or found.behaviour > LAST_WITHOUT:
        return ""
    return f"FlashInfer {found.version} is not newer than {LAST_WITHOUT}"


def refusal(error: StrategyUnavailableError) -> str:
    """Why planning turned a strategy down, in one line."""
    return "; ".join(dict.fromkeys(one["message"] for one in error.rejected)) or str(error)


def told(chosen: Plan, target: Target) -> str:
    """How the layers will run and how well that is known, for a log."""
    call = chosen.call
    assert call is not None
    assert target.flashinfer is not None
    shared = call.num_fused_shared_experts
    if shared:
        how = f"one call with router logits, {call.num_experts} experts and {shared} shared, top-{call.top_k}"
    else:
        how = f"one routed call, {call.num_experts} experts, top-{call.top_k}"
    known = f"{chosen.strategy.value} is {chosen.status.value} with FlashInfer {target.flashinfer.version}"
    return f"{known} on {target.architecture} ({how})"
