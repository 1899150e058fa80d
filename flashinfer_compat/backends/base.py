"""What every backend offers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    import torch

    from flashinfer_compat.inputs import Routing
    from flashinfer_compat.planning.decision import Plan
    from flashinfer_compat.weights.values import MoELayerWeights

__all__ = ["BackendModule", "PreparedLayer"]


@dataclass(frozen=True)
class PreparedLayer:
    """A layer's weights in the layout that its plan needs; `prepare` makes it, `fp4_moe` takes it."""

    plan: Plan
    backend: BackendModule
    """The code of the plan's backend."""
    device: torch.device
    """Where the weights are, and hidden states must be."""
    state: Any
    """What the backend keeps; only it looks inside."""
    number: int = -1
    """Its number for the torch operator, which `prepare` gives."""


class BackendModule(Protocol):
    """The two functions of a backend's module."""

    def prepare(self, weights: MoELayerWeights, plan: Plan) -> Any:
        """The weights in this backend's layout."""
        ...

    def run(self, hidden_states: torch.Tensor, layer: PreparedLayer, routing: Routing) -> torch.Tensor:
        """The layer's output, of the shape and dtype of `hidden_states`, which are checked already."""
        ...
