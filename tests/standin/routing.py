"""The experts of each token, as the kernel of a release chooses them or reads them from what it is given."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from flashinfer_compat.numerics import append_shared_experts, route
from flashinfer_compat.numerics.routing import TopK
from flashinfer_compat.vocabulary import RoutingMethod
from standin.faults import DeviceFaultError, NotATensorError, need
from standin.launch import Launch
from standin.limits import check_logits, check_precomputed

__all__ = ["Chosen", "from_logits", "precomputed"]


_REPLAYS_SINCE: Mapping[object, str] = {"groups": "0.6.8", RoutingMethod.LLAMA4: "0.6.18"}
"""The release from which a routing kernel writes the ids it chose; every other kernel: 0.6.13."""


@dataclass(frozen=True)
class Chosen:
    """What the kernels after routing see."""

    experts: torch.Tensor
    """int64 [T * slots]; -1 where nothing was written."""
    tokens: torch.Tensor
    """int64 [T * slots]: whose activations each slot's expert gets."""
    weights: torch.Tensor
    """[T, slots], bf16 or float32; NaN where nothing was written."""
    buffer: torch.Tensor
    """`weights` as do_finalize=False returns it."""


def from_logits(launch: Launch) -> Chosen | None:
    """The routing of the logits entry; None where it would be garbage.

    Raises:
        LaunchError: the launcher or the routing kernel refuses.
        DeviceFaultError: the kernel reads the bias, and there is none.
        ZeroDivisionError: see `check_logits`.
    """
    call, era, sizes = launch.call, launch.era, launch.sizes
    logits = call.tensor("routing_logits")
    _check_logits_tensor(launch, logits)
    bias = _bias(launch)
    check_logits(era, call, sizes)
    if bias is None and sizes.method in (RoutingMethod.DEEPSEEK_V3, RoutingMethod.MINIMAX2):
        reads_null = era.before("0.6.8") or not sizes.is_grouped
        if reads_null:
            raise DeviceFaultError("the routing kernel reads routing_bias, which is a null pointer")
    if call.garbage or sizes.method is None:
        return None
    groups = sizes.n_group or 1
    topk = route(
        logits,
        bias,
        method=sizes.method,
        top_k=sizes.top_k,
        n_group=groups,
        # Before 0.6.3 the kernel keeps the best four groups, whatever topk_group says.
        topk_group=min(4, groups) if era.before("0.6.3") else sizes.topk_group or 1,
        routed_scaling_factor=_scaling(launch),
        norm_topk_prob=sizes.method is not RoutingMethod.SIGMOID_RENORM or bool(call.arguments["norm_topk_prob"]),
    )
    _write_replay(launch, topk)
    topk = append_shared_experts(topk, sizes.num_experts, sizes.shared)
    weights = topk.weights.to(torch.bfloat16)
    return Chosen(topk.ids.flatten(), _own_tokens(launch), weights, _labelled(launch, weights, logits))


def precomputed(launch: Launch) -> Chosen | None:
    """What the routed entry reads; None where it would be garbage.

    Raises:
        AssertionError, NotATensorError: the wrapper refuses top-k.
        LaunchError: the launcher or the kernel refuses.
    """
    call, era, sizes = launch.call, launch.era, launch.sizes
    packed, weights = call["topk_ids"], None
    if isinstance(packed, tuple) and era.since("0.6.12"):
        packed, weights = packed
        assert weights is not None, "topk_weights must be provided for UnpackedPrecomputed mode"
    if not isinstance(packed, torch.Tensor):
        raise NotATensorError(f"{type(packed).__name__!r} object has no attribute 'dtype'")
    assert packed.dtype == torch.int32, "topk_ids must be an int32 tensor."
    if weights is not None:
        _check_unpacked(launch, weights)
    check_precomputed(era, call, sizes)
    count = launch.tokens * launch.slots
    if sizes.shared:
        need(sizes.is_grouped, "DeepSeek no-groups routing path does not support fusing shared expert")
        need(packed.numel() == count, "topk_ids must have num_tokens * (top_k + num_fused_shared_experts) elements")
        need(weights is None or weights.numel() == count, "topk_weights must have as many elements")
    wrong = packed.numel() != count or (weights is not None and weights.numel() != count)
    call.misread(wrong, "topk_ids do not have num_tokens * top_k elements")
    if call.garbage:
        return None
    ids = packed.flatten().to(torch.int64)
    if weights is None:
        # bf16 is the upper half of a float32.
        read = (packed.flatten() << 16).view(torch.float32).to(torch.bfloat16)
        ids = ids >> 16
    else:
        read = weights.flatten()
    known = ids[: launch.tokens * sizes.top_k]
    call.misread(bool(((known < 0) | (known >= sizes.num_experts)).any()), "topk_ids hold ids that are no experts")
    if call.garbage:
        return None
    if sizes.shared:
        return _misstrided(launch, ids, read, given=weights)
    read = read.reshape(launch.tokens, launch.slots)
    return Chosen(ids, _own_tokens(launch), read, read if weights is None else weights)


def _misstrided(launch: Launch, ids: torch.Tensor, weights: torch.Tensor, given: torch.Tensor | None) -> Chosen:
    """num_fused_shared_experts on the routed entry, 0.7.0 to 0.7.4.

    The routing kernel does not know of the shared slots: it reads and writes top_k slots a token from a buffer that
    has top_k + S, and the finalizing kernel, which does know, reads the rest as it is.
    """
    written = launch.tokens * launch.sizes.top_k
    launch.call.garbage.append("the routed entry misreads top-k and leaves the shared slots unwritten")
    slot = torch.arange(ids.numel(), device=ids.device)
    experts = torch.where(slot < written, ids, -1)
    tokens = (slot // launch.sizes.top_k).clamp(max=launch.tokens - 1)
    read = weights if given is not None else weights.masked_fill(slot >= written, torch.nan)
    read = read.reshape(launch.tokens, launch.slots)
    return Chosen(experts, tokens, read, read if given is None else given)


def _check_logits_tensor(launch: Launch, logits: torch.Tensor) -> None:
    call, era = launch.call, launch.era
    deepseek = launch.sizes.method is RoutingMethod.DEEPSEEK_V3
    need(logits.ndim == 2, "routing_logits must be 2D.")
    need(logits.shape[1] == launch.sizes.num_experts, "routing_logits dim1 must match num_experts.")
    same = logits.shape[0] == launch.tokens
    need(same or (era.since("0.2.10") and era.before("0.5.3")), "routing_logits must have as many tokens.")
    call.misread(not same, "routing_logits and hidden_states differ in tokens")
    need(logits.dtype in (torch.float32, torch.bfloat16), "routing_logits must be float or bfloat16.")
    needed = torch.float32 if deepseek else torch.bfloat16
    if era.since("0.6.8"):
        return
    is_checked = era.before("0.2.10") or (deepseek and era.since("0.6.0"))
    need(logits.dtype == needed or not is_checked, f"routing_logits must be {needed}.")
    call.misread(logits.dtype != needed, f"routing_logits are read as {needed}")


def _bias(launch: Launch) -> torch.Tensor | None:
    call, era, sizes = launch.call, launch.era, launch.sizes
    if call["routing_bias"] is None:
        return None
    bias = call.tensor("routing_bias")
    accepted = (torch.bfloat16, torch.float32) if era.since("0.5.0") else (torch.bfloat16,)
    need(bias.dtype in accepted, "routing_bias must be bfloat16 or float.")
    need(tuple(bias.shape) == (sizes.num_experts,), "routing_bias has incorrect shape.")
    misread = era.since("0.6.7") and era.before("0.6.8") and bias.dtype == torch.float32
    call.misread(misread, "routing_bias is read as bfloat16")
    rounds = era.since("0.6.8") and sizes.is_grouped
    return bias.to(torch.bfloat16) if rounds else bias


def _scaling(launch: Launch) -> float:
    factor = launch.call["routed_scaling_factor"]
    method = launch.sizes.method
    applies = method is RoutingMethod.DEEPSEEK_V3 or (method is RoutingMethod.MINIMAX2 and launch.era.since("0.6.13"))
    return float(factor) if applies and factor is not None else 1.0


def _check_unpacked(launch: Launch, weights: torch.Tensor) -> None:
    era = launch.era
    if era.since("0.6.16"):
        accepted: tuple[torch.dtype, ...] = (torch.bfloat16, torch.float32)
        assert weights.dtype in accepted, f"topk_weights must be bfloat16 or float32, got {weights.dtype}."
    elif era.since("0.6.15"):
        assert weights.dtype == torch.bfloat16, f"topk_weights must be bfloat16, got {weights.dtype}"
    launch.call.misread(era.before("0.6.15") and weights.dtype != torch.bfloat16, "topk_weights are read as bfloat16")


def _write_replay(launch: Launch, topk: TopK) -> None:
    """The routed ids in the order of the slots. A kernel that does not write them leaves the output as it is."""
    replay = launch.call.get("routing_replay_out")
    if replay is None:
        return
    kernel = "groups" if launch.sizes.is_grouped else launch.sizes.method
    if launch.era.since(_REPLAYS_SINCE.get(kernel, "0.6.13")):
        replay[: launch.tokens] = topk.ids.to(torch.int16)
    else:
        launch.call.misread(True, "routing_replay_out is not written by this routing kernel")


def _labelled(launch: Launch, weights: torch.Tensor, logits: torch.Tensor) -> torch.Tensor:
    """Up to 0.6.14 the buffer has the dtype of the logits (0.2.9: of the bias), and bf16 numbers in its first half."""
    era, bias = launch.era, launch.call["routing_bias"]
    dtype = logits.dtype
    if era.since("0.6.15"):
        dtype = torch.bfloat16
    elif era.before("0.2.10"):
        dtype = torch.bfloat16 if bias is None else bias.dtype
    if dtype == torch.bfloat16:
        return weights
    buffer = torch.full(weights.shape, torch.nan, dtype=dtype, device=weights.device)
    buffer.view(torch.bfloat16).flatten()[: weights.numel()] = weights.flatten()
    return buffer


def _own_tokens(launch: Launch) -> torch.Tensor:
    device = launch.call.tensor("hidden_states").device
    return torch.arange(launch.tokens, device=device).repeat_interleave(launch.slots)
