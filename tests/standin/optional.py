"""The checks of tensors that a launch may have or not: the output, the workspace, replay, per-token scales and LoRA."""

from __future__ import annotations

import torch

from standin.activation import activation_name
from standin.faults import need
from standin.launch import Launch, check_per_expert
from standin.recipe import NVFP44Over6Config, resolve

__all__ = ["check_optional", "check_replay", "recipe_of"]

_WORKSPACE_ALIGNMENT = 256
_SCALAR_FINALIZE_BLOCKS = 1184
"""From so many blocks on (of 256 columns of a token) the finalizing kernel reads and writes 16 bytes at once."""


def recipe_of(launch: Launch) -> NVFP44Over6Config | None:
    """The 4over6 recipe of GEMM2's input.

    Raises:
        TypeError, ValueError: the argument is no recipe, or no path of this launch requantizes with it.
    """
    recipe = resolve(launch.call.get("nvfp4_4over6"))
    if recipe is not None and launch.per_token is None:
        raise ValueError("nvfp4_4over6 requires per_token_scale with NVFP4 (uint8) hidden_states")
    return recipe


def check_optional(launch: Launch) -> None:
    """What is refused or misread of them.

    Raises:
        LaunchError, AssertionError, ValueError, TypeError: a tensor is refused.
    """
    recipe_of(launch)
    _check_output(launch)
    _check_workspace(launch)
    _check_per_token(launch)
    _check_lora(launch)
    if activation_name(launch.era, launch.call) == "SwigluStep":
        check_per_expert(launch, "gemm1_clamp_limit")


def check_replay(launch: Launch) -> None:
    """What is refused or misread of routing_replay_out.

    Raises:
        ValueError, TypeError: the buffer is refused.
    """
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
        if launch.era.since("0.7.0"):
            raise ValueError(f"routing_replay_out dim0 must be >= num_tokens={launch.tokens}")
        launch.call.misread(True, "routing_replay_out is too short: memory behind it is overwritten")


def _check_output(launch: Launch) -> None:
    call, era = launch.call, launch.era
    ignored = era.since("0.6.15") and not call["do_finalize"]
    if call.get("output") is None or ignored:
        return
    output = call.tensor("output")
    if era.before("0.6.0"):
        # Whatever it is, the kernel writes bf16 [T, H] from its first byte on.
        right = output.dtype == torch.bfloat16 and tuple(output.shape) == (launch.tokens, launch.hidden)
        call.misread(not right and call["do_finalize"], f"output is written as bf16 {launch.tokens, launch.hidden}")
        return
    if output.dtype != torch.bfloat16:
        raise ValueError(f"Invalid dtype of output: expected torch.bfloat16, got {output.dtype}")
    assert output.shape[0] == launch.tokens, f"output.shape[0]={output.shape[0]} must be equal to {launch.tokens}"
    assert output.shape[1] <= launch.hidden, f"output.shape[1]={output.shape[1]} must be at most {launch.hidden}"
    if output.ndim != 2:
        raise NotImplementedError("an output of more than two axes is not modelled")
    width = output.shape[1]
    vectors = min(8192, launch.tokens) * -(-width // 256) >= _SCALAR_FINALIZE_BLOCKS
    split = vectors and width % 8 != 0 and era.before("0.7.2.post1")
    call.misread(split, "the columns after the last whole 16 bytes of an output row are not written")


def _check_workspace(launch: Launch) -> None:
    """Any size will do: what does not fit is allocated."""
    if launch.call.get("workspace_buffer") is None:
        return
    buffer = launch.call.tensor("workspace_buffer")
    need(
        bool(launch.call["do_finalize"]) and launch.lora is None, "workspace_buffer requires do_finalize=True, no LoRA"
    )
    need(buffer.dtype in (torch.uint8, torch.int8), f"workspace_buffer dtype must be uint8 or int8, got {buffer.dtype}")
    need(buffer.ndim == 1, f"workspace_buffer must be 1-D, got ndim={buffer.ndim}")
    need(buffer.is_contiguous(), "workspace_buffer must be contiguous.")
    need(buffer.data_ptr() % _WORKSPACE_ALIGNMENT == 0, "workspace_buffer must be 256-byte aligned")


def _check_per_token(launch: Launch) -> None:
    """Nothing is checked: the kernel reads T float32 numbers."""
    if launch.per_token is None:
        return
    scale = launch.call.tensor("per_token_scale")
    launch.call.misread(scale.dtype != torch.float32, f"per_token_scale is {scale.dtype}, and read as float32")
    launch.call.misread(scale.numel() < launch.tokens, "per_token_scale has fewer numbers than tokens")


def _check_lora(launch: Launch) -> None:
    """The launcher hands it over as GEMM1's bias, and looks at it only where shared experts are fused."""
    if launch.lora is None:
        return
    delta = launch.call.tensor("gemm1_lora_delta")
    need(not launch.sizes.shared, "gemm1_bias must be 2D.")
    wanted = (launch.tokens, launch.sizes.top_k, 2 * launch.intermediate)
    launch.call.misread(tuple(delta.shape) != wanted, f"gemm1_lora_delta is {tuple(delta.shape)}, not {wanted}")
    launch.call.misread(delta.dtype != torch.bfloat16, f"gemm1_lora_delta is {delta.dtype}, and read as bfloat16")
    launch.call.misread(launch.call["gemm1_bias"] is not None, "gemm1_lora_delta takes the place of gemm1_bias")
