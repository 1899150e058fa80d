"""The two entry points of the trtllm-gen NVFP4 mixture of experts."""

from __future__ import annotations

import warnings
from collections.abc import Mapping

import torch

from flashinfer_compat.vocabulary import RoutingMethod
from standin.calls import Call, Era, Kernel
from standin.experts import Unfinalized, finalize, run_experts
from standin.launch import Launch, check_tensors, read_launch
from standin.limits import check_launcher
from standin.routing import Chosen, from_logits, precomputed

__all__ = ["KERNELS"]

_LAYOUT_LINEAR = 2
_USER_FRAME = 4
"""warnings.warn's stacklevel of whoever called the function: _check_layout, the entry below, the bound function."""


def _logits_entry(era: Era, call: Call) -> list[torch.Tensor]:
    launch = read_launch(era, call)
    _check_shared(launch)
    _check_replay(launch)
    _check_layout(launch)
    check_tensors(launch)
    check_launcher(era, launch.sizes)
    return _result(launch, from_logits(launch))


def _routed_entry(era: Era, call: Call) -> list[torch.Tensor]:
    launch = read_launch(era, call)
    _check_shared(launch)
    _check_layout(launch)
    check_tensors(launch)
    check_launcher(era, launch.sizes)
    return _result(launch, precomputed(launch))


def _check_shared(launch: Launch) -> None:
    sizes = launch.sizes
    if not sizes.shared:
        return
    if sizes.local_offset != 0 or sizes.local != sizes.num_experts:
        raise ValueError("Fused shared experts (num_fused_shared_experts > 0) do not yet support expert parallelism")
    if sizes.method is not RoutingMethod.DEEPSEEK_V3:
        raise ValueError("Fused shared experts are only supported with DeepSeekV3 routing_method_type.")


def _check_replay(launch: Launch) -> None:
    if launch.call.get("routing_replay_out") is None:
        return
    replay, top_k = launch.call.tensor("routing_replay_out"), launch.sizes.top_k
    if launch.sizes.shared and launch.era.before("0.7.1"):
        raise ValueError("routing_replay_out is not supported with fused shared experts")
    if replay.dtype != torch.int16:
        raise ValueError(f"routing_replay_out must be int16, got {replay.dtype}")
    if replay.ndim != 2 or replay.shape[1] != top_k:
        raise ValueError(f"routing_replay_out must be [num_tokens, {top_k}], got {tuple(replay.shape)}")
    if not replay.is_contiguous():
        raise ValueError("routing_replay_out must be contiguous (packed row-major)")
    if replay.shape[0] < launch.tokens:
        if launch.era.since("0.7.4"):
            raise ValueError(f"routing_replay_out dim0 must be >= num_tokens={launch.tokens}")
        launch.call.misread(True, "routing_replay_out is too short: memory behind it is overwritten")


def _check_layout(launch: Launch) -> None:
    call = launch.call
    if "hidden_states_scale_layout" not in call.arguments or call["hidden_states_scale"] is None:
        return
    layout = call["hidden_states_scale_layout"]
    if layout is None:
        message = (
            "Calling a trtllm-gen block-scale MoE op with a `hidden_states_scale` but without "
            "`hidden_states_scale_layout` is deprecated"
        )
        warnings.warn(message, DeprecationWarning, stacklevel=_USER_FRAME)
    elif layout != _LAYOUT_LINEAR:
        raise NotImplementedError(f"hidden_states_scale_layout={layout!r} is not supported by the trtllm-gen MoE path")


def _result(launch: Launch, chosen: Chosen | None) -> list[torch.Tensor]:
    call = launch.call
    if chosen is None:
        experts, chosen = _nothing(launch)
    else:
        experts = run_experts(launch, chosen)
    if not call["do_finalize"]:
        index = experts.permuted
        if launch.era.before("0.5.3"):
            index = index.reshape(launch.tokens, launch.slots)
        return [experts.gemm2_output, chosen.buffer, index]
    finalized = finalize(launch, chosen, experts)
    output = call.get("output")
    return [finalized if output is None else output.copy_(finalized)]


def _nothing(launch: Launch) -> tuple[Unfinalized, Chosen]:
    """Memory that nobody wrote: every number is NaN."""
    device = launch.call.tensor("hidden_states").device
    slots = launch.tokens * launch.slots
    rows = torch.full((slots, launch.hidden), torch.nan, dtype=torch.bfloat16, device=device)
    weights = torch.full((launch.tokens, launch.slots), torch.nan, dtype=torch.bfloat16, device=device)
    index = torch.arange(slots, device=device)
    return Unfinalized(rows, index.to(torch.int32)), Chosen(index, index, weights, weights)


KERNELS: Mapping[str, Kernel] = {
    "trtllm_fp4_block_scale_moe": _logits_entry,
    "trtllm_fp4_block_scale_routed_moe": _routed_entry,
}
