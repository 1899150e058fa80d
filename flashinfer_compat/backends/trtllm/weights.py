"""A checkpoint layer in the layout that FlashInfer's trtllm-gen FP4 MoE kernel and its dense FP4 GEMM take.

Only bytes move and a few float32 scalars are multiplied, so nothing of the checkpoint is rounded. Padding is exact: the
zero rows of gate and up give activations act(0) * 0 = 0, whose codes meet zero columns of down; and a block of 16
activations is all real or all padding (I is a multiple of 16), so no block scale changes either.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, fields

import torch

from flashinfer_compat.errors import ArgumentError, TensorError
from flashinfer_compat.numerics.layouts import (
    SCALE_ROWS,
    interleave_block_scale,
    permute_rows,
    w2_permutation,
    w13_permutation,
)
from flashinfer_compat.numerics.nvfp4 import BLOCK_SIZE
from flashinfer_compat.planning.decision import KernelCall
from flashinfer_compat.weights.shared import split_shared
from flashinfer_compat.weights.values import MoELayerWeights, Nvfp4Experts

__all__ = ["DenseNvfp4Linear", "DenseNvfp4Mlp", "TrtllmExperts", "prepare_dense", "prepare_experts"]

_CHUNK_BYTES = 64 * 2**20
"""Experts are laid out this many bytes at a time, which bounds the memory beyond input and output."""
_GEMM_MULTIPLE = 32
"""Rows and columns of the dense FP4 GEMM. Source: FlashInfer 0.7.4, fp4_gemm_cutlass.cu."""


@dataclass(frozen=True)
class TrtllmExperts:
    """R experts as trtllm_fp4_block_scale_moe and its routed form take them; fields are named after its arguments.

    H is the hidden_size and I the call's intermediate_size. Rows of gemm1 are [up; gate] before the shuffle. All
    tensors are contiguous.

    Raises:
        ArgumentError: a value is not of its field's type. Shapes and dtypes are checked against a plan, by `prepare`.
    """

    gemm1_weights: torch.Tensor
    """uint8 [R, 2I, H/2], rows alternated and shuffled."""
    gemm1_weights_scale: torch.Tensor
    """float8_e4m3fn [R, 2I, H/16], rows alike, in the 128x4 layout."""
    gemm2_weights: torch.Tensor
    """uint8 [R, H, I/2], rows shuffled."""
    gemm2_weights_scale: torch.Tensor
    """float8_e4m3fn [R, H, I/16], rows alike, in the 128x4 layout."""
    output1_scale_scalar: torch.Tensor
    """float32 [R]: input scale * up's global scale / down's input scale; with a per-token scale up's global scale."""
    output1_scale_gate_scalar: torch.Tensor
    """float32 [R]: input scale * gate's global scale; with a per-token scale gate's global scale."""
    output2_scale_scalar: torch.Tensor
    """float32 [R]: down's input scale * down's global scale; with a per-token scale down's global scale."""
    input_scale: torch.Tensor
    """float32 []: the multiplier of the activations' codes, common to all experts; it is part of the scalars."""
    local_expert_offset: int = 0
    """Id of the first routed expert."""
    gemm1_alpha: torch.Tensor | None = None
    """float32 [R]: the factor of gate in its sigmoid; None is 1."""
    gemm1_beta: torch.Tensor | None = None
    """float32 [R]: added to up, divided by the dequantizing scale output1_scale_gate_scalar; None is 0."""
    gemm1_clamp_limit: torch.Tensor | None = None
    """float32 [R]: gate is cut above, up on both sides, divided like gemm1_beta; None is no limit."""
    gemm1_bias: torch.Tensor | None = None
    """float32 [R, 2I]: divided by the dequantizing scale of its half, rows in the order of gemm1_weights."""
    gemm2_bias: torch.Tensor | None = None
    """float32 [R, H]: divided by output2_scale_scalar, rows in the order of gemm2_weights."""
    gate_up_alike: bool = True
    """Whether gate and up of each expert have one global scale, as a LoRA delta needs it."""

    def __post_init__(self) -> None:
        kinds = {"local_expert_offset": int, "gate_up_alike": bool}
        for one in fields(self):
            value, kind = getattr(self, one.name), kinds.get(one.name, torch.Tensor)
            optional = one.default is None
            if not isinstance(value, kind) and not (optional and value is None):
                expected = f"{kind.__name__} or None" if optional else kind.__name__
                raise ArgumentError(f"TrtllmExperts.{one.name}", f"of type {expected}", type(value).__name__)

    @property
    def quantize_scale(self) -> torch.Tensor:
        """float32 [1]: 1 / input_scale, which is fp4_quantize's global_scale."""
        return self.input_scale.reciprocal().reshape(1)


@dataclass(frozen=True)
class DenseNvfp4Linear:
    """One NVFP4 linear layer for `mm_fp4(x, weight.T, x_scale, block_scale.T, alpha)`, backends cutlass and cudnn."""

    weight: torch.Tensor
    """uint8 [N, K/2], rows in their own order."""
    block_scale: torch.Tensor
    """uint8 (E4M3 bytes) [N up to a multiple of 128, K/16 up to a multiple of 4], in the 128x4 layout."""
    alpha: torch.Tensor
    """float32 []: input scale * global scale."""
    quantize_scale: torch.Tensor
    """float32 [1]: 1 / input scale, which is fp4_quantize's global_scale."""


@dataclass(frozen=True)
class DenseNvfp4Mlp:
    """A gated MLP as dense layers, each with its own scales: exact for every checkpoint.

    H is the hidden_size and W the MLP's width, padded to a multiple of 32.
    """

    gate_up: tuple[DenseNvfp4Linear, ...]
    """One layer of 2W rows [gate; up], silu_and_mul's order, where gate and up have the same scales; else gate, up."""
    down: DenseNvfp4Linear
    """H rows, W columns."""

    @property
    def fused_gate_up(self) -> bool:
        """Whether gate and up are one GEMM."""
        return len(self.gate_up) == 1


def prepare_experts(weights: MoELayerWeights, call: KernelCall) -> TrtllmExperts:
    """Lay out the experts of one kernel call: the routed ones and, for a fused call, the shared ones behind them.

    The activations are quantized once for all experts, so the FC1 input scale is the largest gate or up input scale of
    the experts in the call, of all ranks. Everything else stays per expert; gate and up keep different global scales.

    Source of the layout: FlashInfer 0.7.4, `prepare_trtllm_fp4_weights`; of the scalars: FlashInfer 0.6.17,
    tests/moe/trtllm_gen_fused_moe_utils.py.

    Args:
        weights: The layer, or this rank's part of it. Not modified.
        call: From `plan(...).call`.

    Returns:
        `call.weight_rows` experts on the device of the weights. Beyond them it needs about 200 MB.

    Raises:
        ArgumentError: the call's rows are not those of the layer, the shared experts of a fused call are not NVFP4, or
            the kernel's layout does not take the sizes.
        TensorError: `routed_input_scale` is smaller than that of an expert here, or the shared experts lie on another
            device.
    """
    parts = _parts(weights, call)
    hidden, inter = _sizes(weights, call)
    device = weights.routed.gate_up_weight.device
    # The checkpoint stacks [gate; up], the permutation starts from [up; gate].
    gemm1_rows = (w13_permutation(2 * inter, device) + inter) % (2 * inter)
    gemm2_rows = w2_permutation(hidden, device)

    common = _common_input_scale(parts, weights.routed_input_scale)
    # With per-token scales the kernel multiplies each row's own in, at both GEMMs.
    static = not call.per_token_scale
    gate_global, up_global = torch.cat([part.gate_up_global_scale for part in parts]).unbind(1)
    down_global = torch.cat([part.down_global_scale for part in parts])
    down_input = torch.cat([part.down_input_scale for part in parts])
    return TrtllmExperts(
        gemm1_weights=_lay_out([part.gate_up_weight for part in parts], gemm1_rows, (inter, hidden // 2)),
        gemm1_weights_scale=_lay_out(
            [part.gate_up_block_scale for part in parts], gemm1_rows, (inter, hidden // BLOCK_SIZE)
        ),
        gemm2_weights=_lay_out([part.down_weight for part in parts], gemm2_rows, (hidden, inter // 2)),
        gemm2_weights_scale=_lay_out(
            [part.down_block_scale for part in parts], gemm2_rows, (hidden, inter // BLOCK_SIZE)
        ),
        output1_scale_scalar=common * up_global * down_input.reciprocal() if static else up_global.contiguous(),
        output1_scale_gate_scalar=common * gate_global if static else gate_global.contiguous(),
        output2_scale_scalar=down_input * down_global if static else down_global,
        input_scale=common,
        local_expert_offset=weights.local_expert_offset,
        gate_up_alike=torch.equal(gate_global, up_global),
    )


def prepare_dense(shared: Nvfp4Experts) -> DenseNvfp4Mlp:
    """One NVFP4 MLP, the shared expert that runs beside the kernel, for the dense FP4 GEMM.

    Its input scales are its own, so this is the checkpoint's exact computation. Weights that need no padding are views
    of the checkpoint's.

    Args:
        shared: One expert, as wide as the checkpoint stores it. Not modified.

    Raises:
        ArgumentError: there is not exactly one expert, or hidden_size is not a multiple of 32.
    """
    if shared.num_experts != 1:
        raise ArgumentError("shared", "one MLP, as the checkpoint stores it", f"{shared.num_experts} experts")
    hidden = shared.hidden_size
    _require_multiple("hidden_size", hidden, _GEMM_MULTIPLE)
    width = _round_up(shared.intermediate_size, _GEMM_MULTIPLE)
    weight = _padded(shared.gate_up_weight[0], (width, hidden // 2))
    scale = _padded(shared.gate_up_block_scale[0].view(torch.uint8), (width, hidden // BLOCK_SIZE))
    input_scale, global_scale = shared.gate_up_input_scale[0], shared.gate_up_global_scale[0]
    alike = bool((input_scale[0] == input_scale[1]) & (global_scale[0] == global_scale[1]))
    sides = [slice(0, 2)] if alike else [slice(0, 1), slice(1, 2)]
    return DenseNvfp4Mlp(
        gate_up=tuple(
            _linear(weight[side].flatten(0, 1), scale[side].flatten(0, 1), input_scale[side], global_scale[side])
            for side in sides
        ),
        down=_linear(
            _padded(shared.down_weight[0], (hidden, width // 2)),
            _padded(shared.down_block_scale[0].view(torch.uint8), (hidden, width // BLOCK_SIZE)),
            shared.down_input_scale,
            shared.down_global_scale,
        ),
    )


def _linear(
    weight: torch.Tensor, scale: torch.Tensor, input_scale: torch.Tensor, global_scale: torch.Tensor
) -> DenseNvfp4Linear:
    """`input_scale` and `global_scale` are float32 [1 or 2], equal where there are two."""
    return DenseNvfp4Linear(
        weight=weight.contiguous(),
        block_scale=interleave_block_scale(scale),
        alpha=input_scale[0] * global_scale[0],
        quantize_scale=input_scale[:1].reciprocal(),
    )


def _parts(weights: MoELayerWeights, call: KernelCall) -> tuple[Nvfp4Experts, ...]:
    """The experts of the call, in the order of its rows."""
    routed, num_shared = weights.routed, weights.config.num_shared_experts
    if call.weight_rows == routed.num_experts:
        return (routed,)
    if num_shared == 0 or call.weight_rows != routed.num_experts + num_shared:
        fused = f", or {routed.num_experts + num_shared} with the shared ones" if num_shared else ""
        raise ArgumentError(
            "call.weight_rows",
            f"{routed.num_experts}, the layer's routed experts{fused}",
            str(call.weight_rows),
            "Plan from this layer's problem(...); under expert parallelism pass the experts of one rank.",
        )
    shared = split_shared(weights)
    if not isinstance(shared, Nvfp4Experts):
        raise ArgumentError(
            "weights.shared", "NVFP4 experts, which a fused call needs", "bf16 experts", "Plan with strategy='split'."
        )
    device, found = routed.gate_up_weight.device, shared.gate_up_weight.device
    if device != found:
        raise TensorError("weights.shared", f"device {device}, as the routed experts", str(found))
    return (routed, shared)


def _sizes(weights: MoELayerWeights, call: KernelCall) -> tuple[int, int]:
    """hidden_size and the padded intermediate_size."""
    hidden, own, inter = weights.routed.hidden_size, weights.routed.intermediate_size, call.intermediate_size
    _require_multiple("hidden_size", hidden, SCALE_ROWS)
    # Gate and up together fill whole tiles.
    _require_multiple("call.intermediate_size", inter, SCALE_ROWS // 2)
    if inter < own:
        fits = _round_up(own, SCALE_ROWS // 2)
        raise ArgumentError("call.intermediate_size", f"at least {own}, the layer's", str(inter), f"Use {fits}.")
    return hidden, inter


def _common_input_scale(parts: Sequence[Nvfp4Experts], given: float | None) -> torch.Tensor:
    """float32 []."""
    largest = torch.cat([part.gate_up_input_scale for part in parts]).amax()
    if given is None:
        return largest
    scale = torch.tensor(given, dtype=torch.float32, device=largest.device)
    if not float(largest) <= float(scale) < math.inf:
        raise TensorError(
            "routed_input_scale",
            f"a finite number of at least {float(largest)!r}, the largest gate or up input scale of these experts",
            repr(given),
            "Pass the largest of all ranks; a smaller one clips activations.",
        )
    return scale


def _lay_out(parts: Sequence[torch.Tensor], index: torch.Tensor, padded: tuple[int, int]) -> torch.Tensor:
    """Pad each expert's matrices, stack them, permute the rows; block scales also go to the 128x4 layout.

    Args:
        parts: uint8 codes or float8_e4m3fn block scales, [E, rows, C] or [E, 2, rows, C].
        index: int64, the stacked rows in their new order.
        padded: rows and C of one matrix after padding.

    Returns:
        The dtype of the parts, [sum of E, len(index), padded C], contiguous.
    """
    first = parts[0]
    out = torch.empty(
        sum(part.shape[0] for part in parts), index.shape[0], padded[1], dtype=torch.uint8, device=first.device
    )
    experts_a_chunk = max(1, _CHUNK_BYTES // out[0].numel())
    done = 0
    for part in parts:
        for start in range(0, part.shape[0], experts_a_chunk):
            chunk = part[start : start + experts_a_chunk].view(torch.uint8)
            stacked = _padded(chunk, padded).flatten(1, -2)
            target = out[done : done + chunk.shape[0]]
            if first.dtype == torch.uint8:
                torch.index_select(stacked, 1, index, out=target)
            else:
                target.copy_(interleave_block_scale(permute_rows(stacked, index)))
            done += chunk.shape[0]
    return out.view(first.dtype)


def _padded(matrix: torch.Tensor, shape: tuple[int, int]) -> torch.Tensor:
    """Zeros below and to the right; the same tensor where nothing is missing. A zero byte is code 0 and scale 0."""
    rows, cols = shape[0] - matrix.shape[-2], shape[1] - matrix.shape[-1]
    return torch.nn.functional.pad(matrix, (0, cols, 0, rows)) if rows or cols else matrix


def _require_multiple(argument: str, size: int, of: int) -> None:
    if size < of or size % of:
        works = _round_up(size, of)
        raise ArgumentError(argument, f"a multiple of {of}", str(size), f"The next size that works is {works}.")


def _round_up(size: int, step: int) -> int:
    return -(-size // step) * step
