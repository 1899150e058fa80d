"""Shared experts as ordinary experts, which is what a fused strategy takes."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

from flashinfer_compat.errors import ArgumentError, TensorError
from flashinfer_compat.weights.values import DenseExperts, MoELayerWeights, Nvfp4Experts

if TYPE_CHECKING:
    import torch

__all__ = ["append_shared", "common_input_scale", "split_shared"]


def split_shared(weights: MoELayerWeights) -> Nvfp4Experts | DenseExperts:
    """The one wide shared MLP as `config.num_shared_experts` experts, each as wide as a routed expert of this rank.

    Exact: a gated MLP is a sum over its intermediate values, so any cut of them into S equal runs gives S MLPs whose
    outputs add up to the whole. The S experts repeat the wide MLP's global and input scales. Tensors are contiguous;
    with one shared expert they are the stored ones.

    Raises:
        ArgumentError: the layer has no shared experts.
    """
    shared, num = weights.shared, weights.config.num_shared_experts
    if shared is None:
        raise ArgumentError("weights", "a layer with shared experts", f"layer {weights.layer}, which has none")
    gate_up_weight = _split_rows(shared.gate_up_weight, num)
    down_weight = _split_columns(shared.down_weight, num)
    if isinstance(shared, DenseExperts):
        return DenseExperts(gate_up_weight, down_weight)
    return Nvfp4Experts(
        gate_up_weight=gate_up_weight,
        gate_up_block_scale=_split_rows(shared.gate_up_block_scale, num),
        gate_up_global_scale=shared.gate_up_global_scale.expand(num, 2).contiguous(),
        gate_up_input_scale=shared.gate_up_input_scale.expand(num, 2).contiguous(),
        down_weight=down_weight,
        down_block_scale=_split_columns(shared.down_block_scale, num),
        down_global_scale=shared.down_global_scale.expand(num).contiguous(),
        down_input_scale=shared.down_input_scale.expand(num).contiguous(),
    )


def append_shared(routed: Nvfp4Experts, shared: Nvfp4Experts) -> Nvfp4Experts:
    """E routed and S shared experts as E + S experts, the shared ones last, every scale kept as it is.

    Copies the weights. `shared` is what `split_shared` returns.

    Raises:
        TensorError: the two differ in hidden_size, intermediate_size or device.
    """
    import torch

    for size in ("hidden_size", "intermediate_size"):
        if getattr(routed, size) != getattr(shared, size):
            way_out = "split_shared cuts a wide shared MLP into experts of the routed width."
            raise TensorError("shared", f"{size} {getattr(routed, size)}", str(getattr(shared, size)), way_out)
    if routed.gate_up_weight.device != shared.gate_up_weight.device:
        raise TensorError("shared", f"device {routed.gate_up_weight.device}", str(shared.gate_up_weight.device))
    fields = [field.name for field in dataclasses.fields(Nvfp4Experts)]
    return Nvfp4Experts(**{name: torch.cat([getattr(routed, name), getattr(shared, name)]) for name in fields})


def common_input_scale(experts: Nvfp4Experts) -> Nvfp4Experts:
    """The same experts with every gate/up input scale replaced by the largest of them all.

    A kernel that quantizes each token once, for whichever experts it goes to, needs one scale. Larger is safe: it only
    coarsens the grid. A smaller one would clip, because an input scale is amax / (6 * 448) and 6 * 448 is the largest
    NVFP4 value. Weights and down input scales stay: the kernel takes those per expert.
    """
    scale = experts.gate_up_input_scale
    return dataclasses.replace(experts, gate_up_input_scale=scale.amax().expand_as(scale).contiguous())


def _split_rows(tensor: torch.Tensor, num: int) -> torch.Tensor:
    """[1, 2, num * I, K] to [num, 2, I, K]."""
    _, sides, rows, columns = tensor.shape
    return tensor.reshape(sides, num, rows // num, columns).transpose(0, 1).contiguous()


def _split_columns(tensor: torch.Tensor, num: int) -> torch.Tensor:
    """[1, N, num * K] to [num, N, K]."""
    _, rows, columns = tensor.shape
    return tensor.reshape(rows, num, columns // num).transpose(0, 1).contiguous()
