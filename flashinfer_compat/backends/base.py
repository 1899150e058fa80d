"""What every backend offers."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NoReturn, Protocol

from flashinfer_compat.errors import ArgumentError

if TYPE_CHECKING:
    import torch

    from flashinfer_compat.inputs import HiddenStates, Routing
    from flashinfer_compat.options import CallOptions, LayerOptions
    from flashinfer_compat.outputs import UnfinalizedOutput
    from flashinfer_compat.planning.decision import Plan

__all__ = ["BackendModule", "PreparedLayer"]


@dataclass(frozen=True)
class PreparedLayer:
    """A layer's weights in the layout that its plan needs; `prepare` makes it, `fp4_moe` takes it."""

    plan: Plan
    backend: BackendModule
    """The code of the plan's backend."""
    device: torch.device
    """Where the weights are, and hidden states must be."""
    input_scale: torch.Tensor
    """float32 []: the multiplier of the codes in a `QuantizedInput`, common to all experts; without meaning where the
    plan's activation_scaling is per_token."""
    adds_shared: bool
    """Whether shared experts are part of this rank's result."""
    state: Any = field(repr=False)
    """What the backend keeps; only it looks inside."""
    number: int = field(default=-1, init=False)
    """Its number for the torch operator, which `prepare` gives."""

    def __deepcopy__(self, memo: dict[int, Any]) -> PreparedLayer:
        """Itself: nothing of it ever changes, and a copy of a module need not hold the weights twice."""
        return self

    def __copy__(self) -> PreparedLayer:
        """Itself, likewise."""
        return self

    def __reduce__(self) -> NoReturn:
        """Refuse: laid out weights and compiled kernels are of this process and GPU.

        Raises:
            ArgumentError: always.
        """
        way_out = "Pickle the plan, and prepare the layer again in the other process."
        raise ArgumentError("layer", "an object that can be pickled", "a PreparedLayer", way_out)


class BackendModule(Protocol):
    """The functions of a backend's module. All inputs are checked before they are called."""

    def prepare(self, weights: Any, plan: Plan, options: LayerOptions) -> Any:
        """The weights in this backend's layout.

        `weights` are `MoELayerWeights` made for `plan`, or what else `moe.prepare` lets pass to this backend.
        """
        ...

    def run(
        self, hidden_states: HiddenStates, layer: PreparedLayer, routing: Routing, options: CallOptions
    ) -> torch.Tensor:
        """The layer's output [T, H]: of the dtype of `hidden_states`, bfloat16 for a `QuantizedInput`."""
        ...

    def run_unfinalized(
        self, hidden_states: HiddenStates, layer: PreparedLayer, routing: Routing, options: CallOptions
    ) -> UnfinalizedOutput:
        """The layer's output before the sum over each token's experts."""
        ...
