"""What may change from call to call, and what may be set when a layer is prepared, beside plan, weights and inputs.

Fields have FlashInfer's names. A FlashInfer release that lacks a field's argument refuses any value but the default.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from flashinfer_compat.errors import ArgumentError
from flashinfer_compat.vocabulary import QuantizerArithmetic, parse

if TYPE_CHECKING:
    import torch

__all__ = ["NO_OPTIONS", "CallOptions", "LayerOptions"]


@dataclass(frozen=True)
class LayerOptions:
    """Settings of a prepared layer."""

    side_stream_tokens: int = 256
    """On split, up to so many tokens the shared experts run on a second stream beside the routed ones; more tokens
    fill the GPU alone. 0: never. Without effect on a CPU."""
    nvfp4_4over6: Any = None
    """FlashInfer's `NVFP44Over6Config`, with activation_scaling per_token. None: off, whatever the environment says,
    where the release has the argument (0.7.1 for the quantizer, 0.7.4 for the kernel)."""
    quantizer: QuantizerArithmetic | None = None
    """How activations are rounded in w4a4, or its name. None: the backend's own, FlashInfer's on trtllm, which has no
    other, and ModelOpt's on torch and triton."""
    autotune_tokens: tuple[int, ...] = ()
    """On triton: find tile shapes for calls of so many tokens while preparing, or read what was found before from the
    cache directory. The first time takes about half a minute for each number. Without effect on a CPU."""

    def __post_init__(self) -> None:
        if self.quantizer is not None:
            object.__setattr__(self, "quantizer", parse(QuantizerArithmetic, self.quantizer, "options.quantizer"))
        tokens = self.autotune_tokens
        if not isinstance(tokens, tuple) or not all(type(one) is int and one > 0 for one in tokens):
            raise ArgumentError("options.autotune_tokens", "a tuple of integers of at least 1", repr(tokens))


@dataclass(frozen=True)
class CallOptions:
    """Settings of one call. The torch backend takes no notice of those that only change speed."""

    output: torch.Tensor | None = None
    """bfloat16 [T, H], contiguous: where to write the result, which is then this tensor. It may share no memory with an
    input."""
    enable_pdl: bool | None = None
    """Programmatic dependent launch of the MoE kernels; None: FlashInfer decides, and triton uses it on SM90 and newer.
    Changes speed only."""
    tune_max_num_tokens: int | None = None
    """Largest T that FlashInfer's autotuner tunes for; None: the release's default. Changes speed only."""
    routing_replay_out: torch.Tensor | None = None
    """int16 [at least T, top_k], contiguous: receives the chosen routed experts."""
    workspace_buffer: torch.Tensor | None = None
    """uint8 [bytes], contiguous, aligned to 256 bytes: scratch memory of the kernel. Changes speed only."""
    gemm1_lora_delta: torch.Tensor | None = None
    """bfloat16 [T, top_k, 2 * intermediate_size], up then gate, in the units of the first GEMM's output: added to it
    before the activation. The experts' gate and up must have equal global scales."""


NO_OPTIONS = CallOptions()
"""Every default; backends recognise it by identity."""
