"""The weights of one grouped MLP as the kernels take them: views of the checkpoint's tensors, and a few scalars."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace

import torch

from flashinfer_compat.backends.triton.decode import WEIGHT_UNIT
from flashinfer_compat.errors import TensorError
from flashinfer_compat.vocabulary import Numerics, QuantizerArithmetic
from flashinfer_compat.weights.values import Nvfp4Experts

__all__ = ["SIZE_MULTIPLE", "Experts", "Matrices", "contiguous", "experts_of"]

SIZE_MULTIPLE = 32
"""Of the hidden and intermediate size. Steps of 16 values of K come out wrong from Triton 3.6 on mma.sync (H200)."""
_WORD = 4
"""Bytes that a kernel reads codes in."""


@dataclass(frozen=True)
class Matrices:
    """The stored tensors of some experts; nothing is copied."""

    gate_up_weight: torch.Tensor
    """int32 [E, 2, I, H/8], eight codes a word."""
    gate_up_block_scale: torch.Tensor
    """uint8 [E, 2, I, H/16]."""
    down_weight: torch.Tensor
    """int32 [E, H, I/8]."""
    down_block_scale: torch.Tensor
    """uint8 [E, H, I/16]."""


@dataclass(frozen=True)
class Experts:
    """`num_routed` experts chosen by top-k, and behind them `num_appended` that every token goes to."""

    num_routed: int
    num_appended: int
    hidden_size: int
    intermediate_size: int
    """Of each expert."""
    routed: Matrices
    appended: Matrices
    """One MLP, num_appended * intermediate_size wide. Without appended experts `routed`, and the other way round."""
    gate_up_scale: torch.Tensor
    """float32 [E, 2], what the first product is multiplied by: global scale, input scale and the unit of weights."""
    down_scale: torch.Tensor
    """float32 [E], likewise."""
    gate_up_input_scale: torch.Tensor
    """float32 [E, 2]."""
    down_input_scale: torch.Tensor
    """float32 [E]."""
    scale_per_pair: bool
    """Whether hidden states are rounded for each expert apart, because input scales differ."""
    scale_sides: int
    """2 where some expert's gate and up have input scales of their own."""
    arithmetic: QuantizerArithmetic
    """How activations are rounded, where they are."""


def experts_of(
    routed: Nvfp4Experts | None,
    shared: Nvfp4Experts | None,
    num_shared: int,
    numerics: Numerics,
    *,
    common_scale: bool,
    arithmetic: QuantizerArithmetic = QuantizerArithmetic.MODELOPT,
) -> Experts:
    """Routed experts, a shared MLP as `num_shared` experts, or both. It reads input scales, so it waits for the GPU.

    Args:
        routed: E experts of the intermediate size.
        shared: one MLP, num_shared times as wide.
        num_shared: 0 without `shared`.
        numerics: whether activations are rounded.
        common_scale: whether hidden states are rounded once, with the largest gate and up input scale.
        arithmetic: how activations are rounded.

    Raises:
        TensorError: the hidden or intermediate size is not a multiple of 32.
    """
    parts = [(part, count) for part, count in ((routed, None), (shared, num_shared)) if part is not None]
    gate_up_global, gate_up_input, down_global, down_input = (
        torch.cat([_repeated(getattr(part, name), count) for part, count in parts])
        for name in ("gate_up_global_scale", "gate_up_input_scale", "down_global_scale", "down_input_scale")
    )
    if common_scale:
        gate_up_input = gate_up_input.amax().expand_as(gate_up_input).contiguous()
    rounded = numerics is Numerics.W4A4
    differ = rounded and not bool((gate_up_input == gate_up_input[0]).all())
    sides = 2 if rounded and not bool((gate_up_input[:, 0] == gate_up_input[:, 1]).all()) else 1
    first, last = parts[0][0], parts[-1][0]
    hidden = first.hidden_size
    intermediate = first.intermediate_size if routed is not None else last.intermediate_size // num_shared
    for name, size in (("hidden_size", hidden), ("intermediate_size", intermediate)):
        if size % SIZE_MULTIPLE:
            raise TensorError(name, f"a multiple of {SIZE_MULTIPLE} on the triton backend", str(size))
    return Experts(
        num_routed=0 if routed is None else routed.num_experts,
        num_appended=num_shared,
        hidden_size=hidden,
        intermediate_size=intermediate,
        routed=_matrices(first),
        appended=_matrices(last),
        gate_up_scale=gate_up_global * (gate_up_input if rounded else 1.0) * WEIGHT_UNIT,
        down_scale=down_global * (down_input if rounded else 1.0) * WEIGHT_UNIT,
        gate_up_input_scale=gate_up_input,
        down_input_scale=down_input,
        scale_per_pair=differ,
        scale_sides=sides,
        arithmetic=arithmetic,
    )


def contiguous(experts: Nvfp4Experts) -> Nvfp4Experts:
    """The same experts, copied only where rows do not lie one behind another, or words of codes would not be aligned.

    Several `Experts` then share them.
    """
    return replace(experts, **{one.name: _in_words(getattr(experts, one.name)) for one in fields(experts)})


def _in_words(tensor: torch.Tensor) -> torch.Tensor:
    tensor = tensor.contiguous()
    return tensor.clone() if tensor.data_ptr() % _WORD else tensor


def _repeated(scale: torch.Tensor, count: int | None) -> torch.Tensor:
    return scale if count is None else scale.expand(count, *scale.shape[1:])


def _matrices(experts: Nvfp4Experts) -> Matrices:
    return Matrices(
        experts.gate_up_weight.contiguous().view(torch.int32),
        experts.gate_up_block_scale.contiguous().view(torch.uint8),
        experts.down_weight.contiguous().view(torch.int32),
        experts.down_block_scale.contiguous().view(torch.uint8),
    )
