"""`torch.ops.flashinfer_compat.fp4_moe`: the layer as one opaque operator, so that torch.compile traces through it.

Operators take tensors and numbers only, so a prepared layer is passed by its number and each value by its fields.
"""

from __future__ import annotations

import itertools
import weakref
from dataclasses import fields
from typing import TYPE_CHECKING, Any

import torch

from flashinfer_compat.calls import check_apart
from flashinfer_compat.errors import ArgumentError
from flashinfer_compat.inputs import (
    HiddenStates,
    LogitsRouting,
    PackedTopKRouting,
    QuantizedInput,
    Routing,
    TopKRouting,
)
from flashinfer_compat.options import NO_OPTIONS, CallOptions

if TYPE_CHECKING:
    from flashinfer_compat.backends.base import PreparedLayer

__all__ = ["call", "register"]

_LOGITS, _TOPK, _PACKED = range(3)

_layers: weakref.WeakValueDictionary[int, PreparedLayer] = weakref.WeakValueDictionary()
_numbers = itertools.count()

_INPUTS = (
    "Tensor hidden_states, Tensor routing, Tensor? second, int kind, int layer, *, Tensor? block_scale=None, "
    "Tensor? per_token_scale=None, Tensor? unrounded=None, bool? enable_pdl=None, int? tune_max_num_tokens=None, "
    "Tensor? gemm1_lora_delta=None"
)
torch.library.define("flashinfer_compat::fp4_moe", f"({_INPUTS}) -> Tensor")
# Apart, because torch's inductor does not take an operator whose written arguments are all None.
torch.library.define(
    "flashinfer_compat::fp4_moe_into",
    f"({_INPUTS}, Tensor(a!)? output=None, Tensor(b!)? routing_replay_out=None, Tensor(c!)? workspace_buffer=None) "
    "-> Tensor",
)
_OPTIONS = tuple(one.name for one in fields(CallOptions))
_WRITTEN = ("output", "routing_replay_out", "workspace_buffer")


def register(layer: PreparedLayer) -> int:
    """Number a layer; it stays callable by its number for as long as somebody holds it."""
    number = next(_numbers)
    _layers[number] = layer
    return number


def call(hidden_states: HiddenStates, number: int, routing: Routing, options: CallOptions) -> torch.Tensor:
    """The operator's call for a registered layer."""
    if isinstance(routing, LogitsRouting):
        tensors, kind = (routing.logits, routing.bias), _LOGITS
    elif isinstance(routing, TopKRouting):
        tensors, kind = (routing.ids, routing.weights), _TOPK
    else:
        tensors, kind = (routing.packed, None), _PACKED
    more: dict[str, Any] = {}
    if isinstance(hidden_states, QuantizedInput):
        more["block_scale"] = hidden_states.block_scale
        more["per_token_scale"] = hidden_states.per_token_scale
        more["unrounded"] = hidden_states.hidden_states
        hidden_states = hidden_states.codes
    operator = torch.ops.flashinfer_compat.fp4_moe
    if options is not NO_OPTIONS:
        # torch.compile of torch 2.6 knows neither `vars` nor `|=`.
        more.update({name: getattr(options, name) for name in _OPTIONS if getattr(options, name) is not None})
        if any(name in more for name in _WRITTEN):
            operator = torch.ops.flashinfer_compat.fp4_moe_into
    output: torch.Tensor = operator(hidden_states, *tensors, kind, number, **more)
    return output if options.output is None else options.output


def _run(
    hidden_states: torch.Tensor,
    routing: torch.Tensor,
    second: torch.Tensor | None,
    kind: int,
    layer: int,
    *,
    block_scale: torch.Tensor | None = None,
    per_token_scale: torch.Tensor | None = None,
    unrounded: torch.Tensor | None = None,
    **options: Any,
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
    values: HiddenStates = hidden_states
    if block_scale is not None:
        values = QuantizedInput(hidden_states, block_scale, per_token_scale, unrounded)
    if all(value is None for value in options.values()):
        return found.backend.run(values, found, given, NO_OPTIONS)
    chosen = CallOptions(**options)
    check_apart(values, given, chosen)
    output = found.backend.run(values, found, given, chosen)
    # An operator may not return one of its arguments.
    return output if options.get("output") is None else output.new_empty(0)


def _fake(
    hidden_states: torch.Tensor,
    routing: torch.Tensor,
    second: torch.Tensor | None,
    kind: int,
    layer: int,
    *,
    block_scale: torch.Tensor | None = None,
    output: torch.Tensor | None = None,
    **more: Any,
) -> torch.Tensor:
    if output is not None:
        return output.new_empty(0)
    if block_scale is not None:
        return hidden_states.new_empty((hidden_states.shape[0], 2 * hidden_states.shape[1]), dtype=torch.bfloat16)
    return hidden_states.new_empty(hidden_states.shape)


for _operator in ("flashinfer_compat::fp4_moe", "flashinfer_compat::fp4_moe_into"):
    torch.library.impl(_operator, "CompositeExplicitAutograd", _run)
    torch.library.register_fake(_operator, _fake)
