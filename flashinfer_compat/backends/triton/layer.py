"""A prepared layer, and its call for chosen experts: a grouped MLP or two, and the final sum."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
import triton
from torch.nn import functional

from flashinfer_compat.backends.activation import ACTIVATIONS
from flashinfer_compat.backends.side_stream import SideStream, forks, run_both
from flashinfer_compat.backends.triton.down import combine
from flashinfer_compat.backends.triton.mlp import Choice, run_mlp
from flashinfer_compat.backends.triton.overlap import launch_options
from flashinfer_compat.backends.triton.tiles import HOPPER_SHARED_MEMORY, Tiles, tiles_for
from flashinfer_compat.backends.triton.tuned import Cut, nearest
from flashinfer_compat.backends.triton.weights import Experts
from flashinfer_compat.problem import Problem
from flashinfer_compat.vocabulary import Activation
from flashinfer_compat.weights.values import DenseExperts

__all__ = ["TritonState", "run_top_k", "untuned"]

_COMBINED = 512
"""Values of an output row that one program adds up."""


@dataclass(frozen=True)
class TritonState:
    """The experts as they lie in the checkpoint; nothing but scales is copied."""

    experts: Experts
    """Routed experts, and behind them the shared ones where the strategy is fused."""
    shared: Experts | DenseExperts | None
    """The shared MLP where the strategy is split and this rank adds it."""
    first_expert: int
    """Id of the first routed expert held."""
    input_scale: torch.Tensor
    """float32 []: the largest gate or up input scale of the routed experts."""
    shared_gate: torch.Tensor | None = None
    """[1, H]: the weight of a gate on the shared MLP's output, split only."""
    side_stream: SideStream | None = None
    """Where `shared` runs beside the experts."""
    cuts: Mapping[int, Cut] = field(default_factory=dict)
    """Tiles that were measured, by tokens; see `tuned.nearest`."""
    split: TritonState | None = None
    """What a fused layer runs calls of many tokens as; both hold the same weight tensors."""
    split_from_tokens: int = 0
    """From so many on."""
    shared_memory: int = HOPPER_SHARED_MEMORY
    """Bytes of the GPU's that one program may have."""
    overlaps: bool = False
    """Whether launches are made ready while the one before runs; see `overlap`."""

    def for_tokens(self, tokens: int) -> TritonState:
        """The form that a call of so many tokens takes."""
        return self if self.split is None or tokens < self.split_from_tokens else self.split


def run_top_k(
    hidden_states: torch.Tensor,
    state: TritonState,
    problem: Problem,
    ids: torch.Tensor,
    weights: torch.Tensor,
    *,
    packed: bool = False,
    output: torch.Tensor | None = None,
    tiles: Tiles | None = None,
    shared_tiles: Tiles | None = None,
) -> torch.Tensor:
    """The layer's output for chosen experts.

    Args:
        hidden_states: [T, hidden_size].
        state: from `prepare`; this form of it is run, whatever T is.
        problem: what it was prepared for.
        ids: int32 or int64 [T, top_k], contiguous; ids of experts that are not held add nothing.
        weights: float32 or bfloat16 [T, top_k], contiguous.
        packed: whether `ids` and `weights` are both the packed pairs, int32.
        output: where to write, like `hidden_states` in shape and dtype; None makes a new tensor.
        tiles: other tiles than were measured or `tiles_for` chooses.
        shared_tiles: likewise, for a shared MLP apart.
    """
    if hidden_states.shape[0] == 0:
        return torch.empty_like(hidden_states)
    x = hidden_states if hidden_states.stride(1) == 1 else hidden_states.contiguous()
    tokens, experts, apart = x.shape[0], state.experts, state.shared
    cut = nearest(state.cuts, tokens) or untuned(state, problem, tokens)

    def routed() -> torch.Tensor:
        choice = Choice(ids, packed, problem.top_k, state.first_expert)
        return run_mlp(x, experts, choice, problem, tiles or cut.experts, state.overlaps)

    def shared() -> torch.Tensor:
        if isinstance(apart, DenseExperts):
            result = _dense(x, apart, problem.activation)
        else:
            chosen = shared_tiles or cut.shared
            assert apart is not None
            assert chosen is not None
            result = run_mlp(x, apart, Choice(ids, False, 0, 0), problem, chosen, state.overlaps)
        if state.shared_gate is None:
            return result
        return result.float() * torch.sigmoid(functional.linear(x.float(), state.shared_gate.float()))

    if apart is None:
        y = extra = routed()
    else:
        y, extra = run_both(state.side_stream, tokens, routed, shared)
    if output is None:
        output = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    combine[(tokens, triton.cdiv(experts.hidden_size, _COMBINED))](
        y,
        extra,
        ids,
        weights,
        output,
        tokens,
        state.first_expert,
        hidden=experts.hidden_size,
        experts=experts.num_routed,
        top_k=problem.top_k,
        appended=experts.num_appended,
        packed=packed,
        has_extra=apart is not None,
        width=_COMBINED,
        # After a fork it follows two launches.
        **launch_options(state.overlaps and not forks(state.side_stream, tokens)),
    )
    return output


def untuned(state: TritonState, problem: Problem, tokens: int) -> Cut:
    """What `tiles_for` chooses."""
    memory = state.shared_memory
    shared = _tiles(state.shared, tokens, 0, memory) if isinstance(state.shared, Experts) else None
    return Cut(_tiles(state.experts, tokens, problem.top_k, memory), shared)


def _tiles(experts: Experts, tokens: int, top_k: int, shared_memory: int) -> Tiles:
    return tiles_for(
        tokens,
        top_k,
        experts.num_routed,
        experts.num_appended,
        experts.hidden_size,
        experts.intermediate_size,
        shared_memory,
    )


def _dense(x: torch.Tensor, experts: DenseExperts, activation: Activation) -> torch.Tensor:
    """A bf16 shared MLP through torch, the activation in float32."""
    gate, up = functional.linear(x.to(torch.bfloat16), experts.gate_up_weight[0].flatten(0, 1)).chunk(2, dim=-1)
    return functional.linear(ACTIVATIONS[activation](gate, up).to(torch.bfloat16), experts.down_weight[0])
