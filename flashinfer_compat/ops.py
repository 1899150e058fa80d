"""`torch.ops.flashinfer_compat.fp4_moe`: the layer as one opaque operator, so that torch.compile traces through it.

Operators take tensors and numbers only, so a prepared layer is passed by its number.
"""

from __future__ import annotations

import itertools
import weakref
from typing import TYPE_CHECKING

import torch

from flashinfer_compat.errors import ArgumentError
from flashinfer_compat.inputs import LogitsRouting, PackedTopKRouting, Routing, TopKRouting

if TYPE_CHECKING:
    from flashinfer_compat.backends.base import PreparedLayer

__all__ = ["call", "register"]

_LOGITS, _TOPK, _PACKED = range(3)

_layers: weakref.WeakValueDictionary[int, PreparedLayer] = weakref.WeakValueDictionary()
_numbers = itertools.count()

torch.library.define(
    "flashinfer_compat::fp4_moe",
    "(Tensor hidden_states, Tensor routing, Tensor? second, int kind, int layer) -> Tensor",
)


def register(layer: PreparedLayer) -> int:
    """Number a layer; it stays callable by its number for as long as somebody holds it."""
    number = next(_numbers)
    _layers[number] = layer
    return number


def call(hidden_states: torch.Tensor, number: int, routing: Routing) -> torch.Tensor:
    """The operator's call for a registered layer."""
    if isinstance(routing, LogitsRouting):
        tensors, kind = (routing.logits, routing.bias), _LOGITS
    elif isinstance(routing, TopKRouting):
        tensors, kind = (routing.ids, routing.weights), _TOPK
    else:
        tensors, kind = (routing.packed, None), _PACKED
    output: torch.Tensor = torch.ops.flashinfer_compat.fp4_moe(hidden_states, *tensors, kind, number)
    return output


@torch.library.impl("flashinfer_compat::fp4_moe", "CompositeExplicitAutograd")
def _run(
    hidden_states: torch.Tensor, routing: torch.Tensor, second: torch.Tensor | None, kind: int, layer: int
) -> torch.Tensor:
    found = _layers.get(layer)
    if found is None:
        raise ArgumentError("layer", "the number of a prepared layer that is still held", str(layer))
    given: Routing
    if kind == _LOGITS:
        given = LogitsRouting(routing, second)
    elif kind == _TOPK:
        assert second is not None
        given = TopKRouting(routing, second)
    else:
        given = PackedTopKRouting(routing)
    return found.backend.run(hidden_states, found, given)


@torch.library.register_fake("flashinfer_compat::fp4_moe")  # type: ignore[untyped-decorator]
def _fake(
    hidden_states: torch.Tensor, routing: torch.Tensor, second: torch.Tensor | None, kind: int, layer: int
) -> torch.Tensor:
    return hidden_states.new_empty(hidden_states.shape)
