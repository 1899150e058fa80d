"""From router logits to chosen experts and their weights, for every routing method of FlashInfer's kernels.

Source: FlashInfer 0.7.4, `Routing::Runner::run` (trtllm_fused_moe_routing_runner.cu) and the policies of
RoutingCustomPolicy.cuh. Among equal scores the lower index wins, for experts and groups, as in the kernels
(`TopKRedType`). Everything here is float32. The kernels round the weights, and the grouped DeepSeek kernel also the
bias, to bf16, and their sigmoid, 0.5 * tanh(x / 2) + 0.5, is zero for logits below about -17.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType

import torch

from flashinfer_compat.errors import ArgumentError, TensorError
from flashinfer_compat.vocabulary import RoutingMethod

__all__ = ["ROUTING_RULES", "RoutingRule", "TopK", "append_shared_experts", "pack_topk", "route", "unpack_topk"]

_EPSILON = 1e-20
_FLOATS = (torch.float32, torch.bfloat16, torch.float16)
_TensorMap = Callable[[torch.Tensor], torch.Tensor]


@dataclass(frozen=True)
class TopK:
    """The experts of each token, best first, and how much each counts."""

    ids: torch.Tensor
    """int64 [T, K]."""
    weights: torch.Tensor
    """float32 [T, K]."""


def _identity(values: torch.Tensor) -> torch.Tensor:
    return values


def _softmax(values: torch.Tensor) -> torch.Tensor:
    return torch.softmax(values, dim=-1)


def _sigmoid(values: torch.Tensor) -> torch.Tensor:
    # torch.sigmoid on a CPU may round equal logits differently by their position in the row, which would decide ties.
    return 1.0 / (1.0 + torch.exp(-values))


def _over_sum(values: torch.Tensor) -> torch.Tensor:
    return values / (values.sum(dim=-1, keepdim=True) + _EPSILON)


def _over_floored_sum(values: torch.Tensor) -> torch.Tensor:
    return values / values.sum(dim=-1, keepdim=True).clamp(min=_EPSILON)


@dataclass(frozen=True)
class RoutingRule:
    """What one routing method does, and which arguments it reads."""

    score: _TensorMap
    """Logits [T, E] to the scores experts are chosen by."""
    weigh: _TensorMap
    """The chosen experts' scores [T, K] to their weights."""
    uses_bias: bool = False
    """Whether the bias helps to choose. It never enters the weights."""
    uses_groups: bool = False
    """Whether n_group and topk_group limit the choice."""
    uses_norm_topk_prob: bool = False
    """Whether norm_topk_prob=False leaves out `weigh`."""
    max_top_k: int | None = None
    """The largest top_k, where the method has one."""


_TOPK_THEN_SOFTMAX = RoutingRule(_identity, _softmax)

ROUTING_RULES: Mapping[RoutingMethod, RoutingRule] = MappingProxyType(
    {
        RoutingMethod.DEFAULT: RoutingRule(_softmax, _identity),
        RoutingMethod.RENORMALIZE: _TOPK_THEN_SOFTMAX,
        RoutingMethod.DEEPSEEK_V3: RoutingRule(
            _sigmoid, _over_sum, uses_bias=True, uses_groups=True, uses_norm_topk_prob=True
        ),
        RoutingMethod.LLAMA4: RoutingRule(_identity, _sigmoid, max_top_k=1),
        # Softmax, top-k, division by the sum is the same function; the kernels use this form of it since 0.6.8.
        RoutingMethod.RENORMALIZE_NAIVE: _TOPK_THEN_SOFTMAX,
        RoutingMethod.TOPK: RoutingRule(_identity, _identity),
        RoutingMethod.SIGMOID_RENORM: RoutingRule(_sigmoid, _over_floored_sum, uses_norm_topk_prob=True),
        RoutingMethod.MINIMAX2: RoutingRule(_sigmoid, _over_sum, uses_bias=True, uses_norm_topk_prob=True),
        RoutingMethod.SIGMOID: RoutingRule(_sigmoid, _identity),
        RoutingMethod.TOPK_SIGMOID: RoutingRule(_identity, _sigmoid),
    }
)
"""Every routing method. An argument a method does not read has no effect in `route`.

The kernels read norm_topk_prob for SIGMOID_RENORM alone; here it also serves the models whose sigmoid weights are not
renormalised."""


def route(
    logits: torch.Tensor,
    bias: torch.Tensor | None,
    *,
    method: RoutingMethod,
    top_k: int,
    n_group: int = 1,
    topk_group: int = 1,
    routed_scaling_factor: float = 1.0,
    norm_topk_prob: bool = True,
) -> TopK:
    """Chooses `top_k` experts for each token and weighs them.

    Arguments that `ROUTING_RULES[method]` does not name as used have no effect. Groups: each group's score is the sum
    of its two best scores (bias included), and only experts of the `topk_group` best groups can be chosen.

    Args:
        logits: float32, bfloat16 or float16 [T, E], without NaN.
        bias: Floating point [E], on the same device, or None for zero.
        method: The routing method.
        top_k: Experts for each token, 1..E (Llama4: 1).
        n_group: Groups of neighbouring experts; 1 or less means no groups.
        topk_group: Groups each token may use, 1..n_group.
        routed_scaling_factor: What the weights are multiplied by, finite and positive. The kernels multiply for
            DeepSeekV3 and, since 0.6.13, MiniMax2 only.
        norm_topk_prob: Whether the weights are divided by their sum, where the method has that choice.

    Returns:
        Distinct experts, best first, and their weights.

    Raises:
        ArgumentError: A number is out of range, or the groups cannot be formed or do not hold `top_k` experts.
        TensorError: A tensor's shape, dtype or device does not fit.
    """
    rule = ROUTING_RULES[method]
    _check_tensors(logits, bias)
    num_experts = logits.shape[1]
    _check_top_k(rule, method, top_k, num_experts)
    if not (math.isfinite(routed_scaling_factor) and routed_scaling_factor > 0):
        raise ArgumentError("routed_scaling_factor", "a finite positive number", repr(routed_scaling_factor))

    scores = rule.score(logits.to(torch.float32))
    preference = scores if bias is None or not rule.uses_bias else scores + bias.to(torch.float32)
    if rule.uses_groups and n_group > 1:
        _check_groups(num_experts, top_k, n_group, topk_group)
        preference = _keep_best_groups(preference, n_group, topk_group)
    ids = _best(preference, top_k)
    weights = scores.gather(1, ids)
    if norm_topk_prob or not rule.uses_norm_topk_prob:
        weights = rule.weigh(weights)
    return TopK(ids, weights * routed_scaling_factor)


def append_shared_experts(topk: TopK, num_experts: int, num_shared: int) -> TopK:
    """The same choice with the shared experts behind it, as experts num_experts.. of weight 1.0 for every token.

    Args:
        topk: Routed experts, [T, K]; routed_scaling_factor is already in the weights.
        num_experts: E, the routed experts.
        num_shared: S, the experts to append, 0 or more.

    Returns:
        [T, K + S].

    Raises:
        ArgumentError: `num_experts` or `num_shared` is out of range.
    """
    if num_experts < 1:
        raise ArgumentError("num_experts", "1 or more", str(num_experts))
    if num_shared < 0:
        raise ArgumentError("num_shared", "0 or more", str(num_shared))
    tokens = topk.ids.shape[0]
    shared = torch.arange(num_experts, num_experts + num_shared, dtype=topk.ids.dtype, device=topk.ids.device)
    ids = torch.cat((topk.ids, shared.expand(tokens, num_shared)), dim=1)
    weights = torch.cat((topk.weights, topk.weights.new_ones(tokens, num_shared)), dim=1)
    return TopK(ids, weights)


def pack_topk(ids: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """The kernels' packed form, `(id << 16) | bf16 bits of the weight`.

    Source: FlashInfer 0.7.4, `PackedScoreIdx` (RoutingKernel.h). The kernels hold an id in 16 signed bits; ids are not
    checked, for that would wait for the GPU.

    Args:
        ids: int32 or int64, any shape, at most 32767.
        weights: float32 or bfloat16 of the same shape, rounded to bf16 here.

    Returns:
        int32 of the same shape.

    Raises:
        TensorError: A dtype is another one, or the shapes differ.
    """
    if ids.dtype not in (torch.int32, torch.int64):
        raise TensorError("ids", "int32 or int64", str(ids.dtype))
    if weights.dtype not in (torch.float32, torch.bfloat16):
        raise TensorError("weights", "float32 or bfloat16", str(weights.dtype))
    if ids.shape != weights.shape:
        raise TensorError("weights", f"shape {tuple(ids.shape)}, as ids", f"shape {tuple(weights.shape)}")
    # A negative weight's bits widen to a negative int32; the mask keeps them out of the id.
    bits = weights.to(torch.bfloat16).view(torch.int16).to(torch.int32) & 0xFFFF
    return (ids.to(torch.int32) << 16) | bits


def unpack_topk(packed: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The inverse of `pack_topk`: int32 to int64 ids and float32 weights of the same shape.

    Raises:
        TensorError: `packed` is not int32.
    """
    if packed.dtype != torch.int32:
        raise TensorError("packed", "int32", str(packed.dtype))
    # bf16 is the upper half of a float32.
    return (packed >> 16).to(torch.int64), (packed << 16).view(torch.float32)


def _best(preference: torch.Tensor, count: int) -> torch.Tensor:
    """The indices of the `count` largest along the last axis, largest first; of equals the lower index comes first."""
    # torch.topk promises no order among equals; a stable sort does.
    return preference.sort(dim=-1, descending=True, stable=True).indices[..., :count]


def _keep_best_groups(preference: torch.Tensor, n_group: int, topk_group: int) -> torch.Tensor:
    """`preference` with every expert outside the best groups at -infinity."""
    grouped = preference.reshape(preference.shape[0], n_group, preference.shape[1] // n_group)
    group_score = grouped.topk(2, dim=-1).values.sum(dim=-1)
    kept = torch.zeros_like(group_score, dtype=torch.bool).scatter_(1, _best(group_score, topk_group), True)
    return grouped.masked_fill(~kept.unsqueeze(-1), -torch.inf).flatten(1)


def _check_tensors(logits: torch.Tensor, bias: torch.Tensor | None) -> None:
    if logits.ndim != 2 or logits.shape[1] == 0:
        raise TensorError("logits", "shape [tokens, experts]", f"shape {tuple(logits.shape)}")
    if logits.dtype not in _FLOATS:
        raise TensorError("logits", "float32, bfloat16 or float16", str(logits.dtype))
    if bias is None:
        return
    if tuple(bias.shape) != (logits.shape[1],):
        raise TensorError("bias", f"shape ({logits.shape[1]},), one number an expert", f"shape {tuple(bias.shape)}")
    if bias.dtype not in _FLOATS:
        raise TensorError("bias", "float32, bfloat16 or float16", str(bias.dtype))
    if bias.device != logits.device:
        raise TensorError("bias", f"a tensor on {logits.device}, as logits", f"one on {bias.device}")


def _check_top_k(rule: RoutingRule, method: RoutingMethod, top_k: int, num_experts: int) -> None:
    largest = num_experts if rule.max_top_k is None else min(num_experts, rule.max_top_k)
    if not 1 <= top_k <= largest:
        expected = f"1 to {largest} with {num_experts} experts and {method.value} routing"
        raise ArgumentError("top_k", expected, str(top_k))


def _check_groups(num_experts: int, top_k: int, n_group: int, topk_group: int) -> None:
    if num_experts % n_group or num_experts // n_group < 2:
        expected = f"a divisor of {num_experts} experts that leaves two or more in a group"
        raise ArgumentError("n_group", expected, str(n_group), "Use n_group=1 for no groups.")
    if not 1 <= topk_group <= n_group:
        raise ArgumentError("topk_group", f"1 to n_group = {n_group}", str(topk_group))
    reachable = topk_group * (num_experts // n_group)
    if top_k > reachable:
        expected = f"at most {reachable}, the experts of {topk_group} groups"
        raise ArgumentError("top_k", expected, str(top_k), "Raise topk_group.")
