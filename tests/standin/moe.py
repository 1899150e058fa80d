"""The two entry points of the trtllm-gen NVFP4 mixture of experts."""

from __future__ import annotations

import warnings
from collections.abc import Mapping

import torch

from flashinfer_compat.vocabulary import RoutingMethod
from standin.calls import Call, Era, Kernel
from standin.experts import Unfinalized, finalize, run_experts, unwritten
from standin.launch import Launch, check_tensors, read_launch
from standin.limits import check_launcher
from standin.optional import check_optional, check_replay
from standin.routing import Chosen, from_logits, precomputed

__all__ = ["KERNELS"]

_LAYOUT_LINEAR = 2
_USER_FRAME = 4
"""warnings.warn's stacklevel of whoever called the function: _check_layout, the entry below, the bound function."""


def _logits_entry(era: Era, call: Call) -> list[torch.Tensor]:
    launch = read_launch(era, call)
    _check_shared(launch)
    check_replay(launch)
    _check_layout(launch)
    check_tensors(launch)
    check_optional(launch)
    check_launcher(era, launch.sizes)
    return _result(launch, from_logits(launch))


def _routed_entry(era: Era, call: Call) -> list[torch.Tensor]:
    launch = read_launch(era, call)
    _check_shared(launch)
    _check_layout(launch)
    check_tensors(launch)
    check_optional(launch)
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
    index = experts.permuted
    if launch.era.before("0.5.3"):
        index = index.reshape(launch.tokens, launch.slots)
    activated = [] if launch.lora is None else [experts.gemm1_output]
    if not call["do_finalize"]:
        return [experts.gemm2_output, chosen.buffer, index, *activated]
    finalized = _written(launch, finalize(launch, chosen, experts))
    return [finalized, index, *activated] if activated else [finalized]


def _written(launch: Launch, finalized: torch.Tensor) -> torch.Tensor:
    """The result, in the caller's buffer where there is one: as many columns of it as that has."""
    output: torch.Tensor | None = launch.call.get("output")
    if output is None:
        return finalized
    fits = output.ndim == 2 and output.shape[0] == launch.tokens and output.shape[1] <= launch.hidden
    if fits and output.dtype == torch.bfloat16:
        return output.copy_(finalized[:, : output.shape[1]])
    return output.fill_(torch.nan) if output.is_floating_point() else output


def _nothing(launch: Launch) -> tuple[Unfinalized, Chosen]:
    """Memory that nobody wrote: every number is NaN."""
    device = launch.call.tensor("hidden_states").device
    slots = launch.tokens * launch.slots
    weights = torch.full((launch.tokens, launch.slots), torch.nan, dtype=torch.bfloat16, device=device)
    index = torch.arange(slots, device=device)
    return unwritten(launch, slots, index.to(torch.int32)), Chosen(index, index, weights, weights)


KERNELS: Mapping[str, Kernel] = {
    "trtllm_fp4_block_scale_moe": _logits_entry,
    "trtllm_fp4_block_scale_routed_moe": _routed_entry,
}
