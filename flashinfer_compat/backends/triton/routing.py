# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators
"""Router logits to top-k in one launch: `numerics.routing.route` for one token a program."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

import torch
import triton
import triton.language as tl

from flashinfer_compat.backends.triton.overlap import launch_options, wait_for_launch_before
from flashinfer_compat.inputs import LogitsRouting
from flashinfer_compat.numerics.routing import ROUTING_RULES
from flashinfer_compat.problem import Problem
from flashinfer_compat.vocabulary import RoutedScaling, RoutingMethod

__all__ = ["route_on_gpu"]

_IDENTITY, _SOFTMAX, _SIGMOID, _OVER_SUM, _OVER_FLOORED_SUM = range(5)
_EPSILON = 1e-20


@dataclass(frozen=True)
class _Functions:
    score: int
    """Logits to the scores experts are chosen by."""
    weigh: int
    """Chosen scores to weights."""


_FUNCTIONS: Mapping[RoutingMethod, _Functions] = MappingProxyType(
    {
        RoutingMethod.DEFAULT: _Functions(_SOFTMAX, _IDENTITY),
        RoutingMethod.RENORMALIZE: _Functions(_IDENTITY, _SOFTMAX),
        RoutingMethod.DEEPSEEK_V3: _Functions(_SIGMOID, _OVER_SUM),
        RoutingMethod.LLAMA4: _Functions(_IDENTITY, _SIGMOID),
        RoutingMethod.RENORMALIZE_NAIVE: _Functions(_IDENTITY, _SOFTMAX),
        RoutingMethod.TOPK: _Functions(_IDENTITY, _IDENTITY),
        RoutingMethod.SIGMOID_RENORM: _Functions(_SIGMOID, _OVER_FLOORED_SUM),
        RoutingMethod.MINIMAX2: _Functions(_SIGMOID, _OVER_SUM),
        RoutingMethod.SIGMOID: _Functions(_SIGMOID, _IDENTITY),
        RoutingMethod.TOPK_SIGMOID: _Functions(_IDENTITY, _SIGMOID),
    }
)
"""`ROUTING_RULES` by name of function; a kernel cannot call Python's."""


def route_on_gpu(problem: Problem, routing: LogitsRouting, overlaps: bool = False) -> tuple[torch.Tensor, torch.Tensor]:
    """The experts and final weights of each token, as `backends.routing.topk_from_logits` defines them.

    Returns:
        int32 [T, top_k], best first, and float32 [T, top_k].
    """
    logits = routing.logits if routing.logits.stride(1) == 1 else routing.logits.contiguous()
    tokens = logits.shape[0]
    rule, functions = ROUTING_RULES[problem.routing_method], _FUNCTIONS[problem.routing_method]
    groups = problem.n_group if rule.uses_groups else 1
    scaled_here = problem.routed_scaling is RoutedScaling.ROUTING_WEIGHTS
    bias = routing.bias.contiguous() if rule.uses_bias and routing.bias is not None else None
    ids = torch.empty((tokens, problem.top_k), dtype=torch.int32, device=logits.device)
    weights = torch.empty((tokens, problem.top_k), dtype=torch.float32, device=logits.device)
    _route[(tokens,)](
        logits,
        logits.stride(0),
        logits if bias is None else bias,
        ids,
        weights,
        problem.routed_scaling_factor if scaled_here else 1.0,
        members=problem.num_experts // groups,
        groups=groups,
        kept_groups=problem.topk_group,
        top_k=problem.top_k,
        has_bias=bias is not None,
        score=functions.score,
        weigh=functions.weigh if problem.norm_topk_prob or not rule.uses_norm_topk_prob else _IDENTITY,
        padded_members=triton.next_power_of_2(problem.num_experts // groups),
        padded_groups=triton.next_power_of_2(groups),
        padded_top_k=triton.next_power_of_2(problem.top_k),
        num_warps=1 if problem.num_experts <= 256 else 4,
        **launch_options(overlaps),
    )
    return ids, weights


_SCORE_IDENTITY, _SCORE_SOFTMAX, _SCORE_SIGMOID = (
    tl.constexpr(_IDENTITY),
    tl.constexpr(_SOFTMAX),
    tl.constexpr(_SIGMOID),
)
_WEIGH_OVER_SUM, _WEIGH_OVER_FLOORED_SUM = tl.constexpr(_OVER_SUM), tl.constexpr(_OVER_FLOORED_SUM)
_SMALL = tl.constexpr(_EPSILON)
_UNAVAILABLE = tl.constexpr(-(2**31))


@triton.jit
def _ranked(values, available):
    """int32 that order as float32 values do (-0 and 0 equal), what is not available last."""
    bits = (values + 0.0).to(tl.int32, bitcast=True)
    return tl.where(available, bits ^ ((bits >> 31) & 0x7FFFFFFF), _UNAVAILABLE)


@triton.jit
def _sigmoid(values):
    return 1.0 / (1.0 + tl.exp(-values))


@triton.jit
def _best(rank, index):
    """The index of the highest rank over all axes; of equals the lowest index."""
    packed = (rank.to(tl.int64) << 32) | (0x7FFFFFFF - index).to(tl.int64)
    return 0x7FFFFFFF - (tl.max(tl.ravel(packed), 0) & 0x7FFFFFFF).to(tl.int32)


@triton.jit
def _route(
    logits,
    stride,
    bias,
    ids,
    weights,
    factor,
    members: tl.constexpr,
    groups: tl.constexpr,
    kept_groups: tl.constexpr,
    top_k: tl.constexpr,
    has_bias: tl.constexpr,
    score: tl.constexpr,
    weigh: tl.constexpr,
    padded_members: tl.constexpr,
    padded_groups: tl.constexpr,
    padded_top_k: tl.constexpr,
    overlaps: tl.constexpr,
):
    wait_for_launch_before(overlaps)
    token = tl.program_id(0).to(tl.int64)
    group = tl.arange(0, padded_groups)
    member = tl.arange(0, padded_members)
    expert = group[:, None] * members + member[None, :]
    real = (group < groups)[:, None] & (member < members)[None, :]
    values = tl.load(logits + token * stride + expert, mask=real, other=float("-inf")).to(tl.float32)
    scores = values
    if score == _SCORE_SIGMOID:
        scores = _sigmoid(values)
    elif score == _SCORE_SOFTMAX:
        powers = tl.exp(values - tl.max(tl.ravel(values), 0))
        scores = powers / tl.sum(tl.ravel(powers), 0)
    preference = scores
    if has_bias:
        preference += tl.load(bias + expert, mask=real, other=0.0).to(tl.float32)
    available = real
    if groups > 1:
        rank = _ranked(preference, real)
        packed = (rank.to(tl.int64) << 32) | (0x7FFFFFFF - member).to(tl.int64)[None, :]
        best = 0x7FFFFFFF - (tl.max(packed, 1) & 0x7FFFFFFF).to(tl.int32)
        first = tl.max(tl.where(real, preference, float("-inf")), 1)
        second = tl.max(tl.where(real & (member[None, :] != best[:, None]), preference, float("-inf")), 1)
        group_rank = _ranked(first + second, group < groups)
        kept = group < 0
        for _ in tl.static_range(kept_groups):
            chosen_group = _best(tl.where(kept, _UNAVAILABLE, group_rank), group)
            kept = kept | (group == chosen_group)
        available = real & kept[:, None]

    rank = _ranked(preference, available)
    place = tl.arange(0, padded_top_k)
    chosen = tl.zeros((padded_top_k,), tl.int32)
    weight = tl.full((padded_top_k,), float("-inf"), tl.float32)
    for k in tl.static_range(top_k):
        one = _best(rank, expert)
        here = expert == one
        chosen = tl.where(place == k, one, chosen)
        weight = tl.where(place == k, tl.sum(tl.ravel(tl.where(here & real, scores, 0.0)), 0), weight)
        rank = tl.where(here, _UNAVAILABLE, rank)
    inside = place < top_k
    if weigh == _SCORE_SIGMOID:
        weight = _sigmoid(weight)
    elif weigh == _SCORE_SOFTMAX:
        powers = tl.exp(weight - tl.max(weight, 0))
        weight = powers / tl.sum(powers, 0)
    elif weigh == _WEIGH_OVER_SUM:
        weight = weight / (tl.sum(tl.where(inside, weight, 0.0), 0) + _SMALL)
    elif weigh == _WEIGH_OVER_FLOORED_SUM:
        weight = weight / tl.maximum(tl.sum(tl.where(inside, weight, 0.0), 0), _SMALL)
    tl.store(ids + token * top_k + place, chosen, mask=inside)
    tl.store(weights + token * top_k + place, weight * factor, mask=inside)
