"""One MoE layer of a ModelOpt NVFP4 checkpoint, whole or one rank's part of it.

Tensor names under `<model>.layers.L.mlp.`: `gate.weight`, `gate.e_score_correction_bias`, and for each of the
projections gate, up and down of `experts.E` and `shared_experts`: `weight`, `weight_scale` (block scales),
`weight_scale_2` (global scale) and `input_scale`.
"""

from __future__ import annotations

import math
import os
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from flashinfer_compat.errors import ArgumentError, CheckpointError
from flashinfer_compat.vocabulary import SharedExpertFormat, SharedExpertPlacement, parse
from flashinfer_compat.weights.config import CheckpointConfig, read_checkpoint_config
from flashinfer_compat.weights.devices import usable_device
from flashinfer_compat.weights.tensors import CheckpointTensors, open_tensors
from flashinfer_compat.weights.values import DenseExperts, LayerConfig, MoELayerWeights, Nvfp4Experts, Router

if TYPE_CHECKING:
    import os
    from collections.abc import Sequence

    import torch

__all__ = ["layer_prefix", "load_moe_layer", "stored_shared_format"]

_MODEL_PREFIXES = ("model.", "language_model.model.", "model.language_model.")
"""Before `layers.`: of a language model, and of one inside a multimodal wrapper."""
_GATE_UP = ("gate_proj", "up_proj")
_DOWN = "down_proj"
_SCALES = ("weight_scale", "weight_scale_2", "input_scale")
_SHARED_FORMATS = {"uint8": SharedExpertFormat.NVFP4, "bfloat16": SharedExpertFormat.BF16}
_BLOCK = 16
_CODES_PER_BYTE = 2


def load_moe_layer(
    path: str | os.PathLike[str],
    layer: int,
    *,
    tp_rank: int = 0,
    tp_size: int = 1,
    ep_rank: int = 0,
    ep_size: int = 1,
    shared_placement: SharedExpertPlacement | str | None = None,
    device: str = "cpu",
) -> MoELayerWeights:
    """Load one MoE layer; reads only that layer's tensors, and of those only this rank's part.

    The tensors decide how the shared experts are stored (uint8: NVFP4; bfloat16 without scales: bf16); the config's
    list of excluded modules is not consulted. Peak memory is the layer plus one tensor of it.

    A rank holds `num_experts / ep_size` routed experts, and of each `intermediate_size / tp_size` rows of the gate and
    up projections and as many columns of the down projection, with their block scales; of the shared MLP, the same
    share of its whole width. The router, and the global and input scales of what is held, are whole on every rank. The
    ranks' outputs add up to the layer's.

    Args:
        path: the folder with config.json, optionally hf_quant_config.json, and the safetensors files.
        layer: index of the layer in the model.
        tp_rank: this rank, 0 to tp_size - 1.
        tp_size: tensor-parallel ranks; intermediate_size / tp_size must be a multiple of 16, the NVFP4 block.
        ep_rank: this rank, 0 to ep_size - 1.
        ep_size: expert-parallel ranks, a divisor of num_experts.
        shared_placement: with shared experts and ep_size > 1, whether each of those ranks holds the whole shared MLP,
            which then rank 0 adds, or a slice of it.
        device: where the tensors go.

    Raises:
        ArgumentError: `layer` is not an MoE layer, or a rank, a size, `shared_placement` or `device` cannot be used.
        CheckpointError: a file, key or tensor is missing, damaged or not what the format asks for.
        DependencyMissingError: safetensors or torch is not installed.
    """
    if not isinstance(layer, int) or isinstance(layer, bool):
        raise ArgumentError("layer", "an integer", repr(layer))
    if not isinstance(path, (str, os.PathLike)):
        raise ArgumentError("path", "the folder of a checkpoint", repr(path))
    directory = Path(path)
    config = read_checkpoint_config(directory)
    config.require_moe_layer(layer)
    share = _share(config.layer, tp_rank, tp_size)
    held = _held_experts(config.layer, ep_rank, ep_size)
    placement = None if ep_size == 1 else _placement(config.layer, shared_placement)
    shared_share = share
    if placement is SharedExpertPlacement.SHARDED:
        shared_share = _share(config.layer, ep_rank * tp_size + tp_rank, ep_size * tp_size, "ep_size * tp_size")
    with open_tensors(directory) as tensors:
        target = usable_device(device, "device")
        prefix = layer_prefix(tensors, layer)
        names = [f"{prefix}experts.{expert}" for expert in range(config.layer.num_experts)]
        surplus = f"{prefix}experts.{config.layer.num_experts}.{_DOWN}.weight"
        if surplus in tensors:
            raise CheckpointError(surplus, f"{len(names)} routed experts, as {config.path} says", "this one as well")
        return MoELayerWeights(
            config=config.layer,
            router=_load_router(tensors, f"{prefix}gate", config.layer, target),
            routed=_load_nvfp4(
                tensors, names[held], config.layer.hidden_size, config.layer.intermediate_size, share, target
            ),
            shared=_load_shared(tensors, f"{prefix}shared_experts", config, shared_share, target),
            layer=layer,
            tp_rank=tp_rank,
            tp_size=tp_size,
            ep_rank=ep_rank,
            ep_size=ep_size,
            shared_placement=placement,
            routed_input_scale=None if ep_size == 1 else _largest_input_scale(tensors, names),
        )


@dataclass(frozen=True)
class _Share:
    """One tensor-parallel rank's part of an intermediate size."""

    rank: int
    size: int

    def of(self, width: int, packed: int = 1) -> slice:
        """The part of an axis of `width` values that is stored `packed` values an element."""
        per_rank = width // self.size
        return slice(self.rank * per_rank // packed, (self.rank + 1) * per_rank // packed)


def _share(config: LayerConfig, tp_rank: int, tp_size: int, name: str = "tp_size") -> _Share:
    blocks = config.intermediate_size // _BLOCK
    if tp_size < 1 or blocks % tp_size:
        fitting = ", ".join(str(size) for size in range(1, blocks + 1) if blocks % size == 0)
        expected = (
            f"a size that splits intermediate_size {config.intermediate_size} into multiples of {_BLOCK}: {fitting}"
        )
        raise ArgumentError(name, expected, str(tp_size))
    if not 0 <= tp_rank < tp_size:
        raise ArgumentError("tp_rank", f"0 to {tp_size - 1} (tp_size - 1)", str(tp_rank))
    return _Share(tp_rank, tp_size)


def _held_experts(config: LayerConfig, ep_rank: int, ep_size: int) -> slice:
    if ep_size < 1 or config.num_experts % ep_size:
        raise ArgumentError("ep_size", f"a divisor of num_experts {config.num_experts}", str(ep_size))
    if not 0 <= ep_rank < ep_size:
        raise ArgumentError("ep_rank", f"0 to {ep_size - 1} (ep_size - 1)", str(ep_rank))
    each = config.num_experts // ep_size
    return slice(ep_rank * each, (ep_rank + 1) * each)


def _placement(config: LayerConfig, given: SharedExpertPlacement | str | None) -> SharedExpertPlacement | None:
    if config.num_shared_experts == 0:
        return None
    if given is None:
        expected = "'replicated' or 'sharded': with ep_size > 1 it must be said what each rank holds"
        raise ArgumentError("shared_placement", expected, "None")
    return parse(SharedExpertPlacement, given, "shared_placement")


def _largest_input_scale(tensors: CheckpointTensors, names: Sequence[str]) -> float:
    """Of every gate and up projection of these experts."""
    return max(_scalar_scales(tensors, f"{name}.{projection}")[1] for name in names for projection in _GATE_UP)


def layer_prefix(tensors: CheckpointTensors, layer: int) -> str:
    """What a layer's MoE tensors are named by."""
    prefixes = [f"{model}layers.{layer}.mlp." for model in _MODEL_PREFIXES]
    for prefix in prefixes:
        if f"{prefix}gate.weight" in tensors:
            return prefix
    # The usual name: the read fails with the error of a missing tensor.
    return prefixes[0]


def _load_router(tensors: CheckpointTensors, name: str, config: LayerConfig, device: torch.device) -> Router:
    import torch

    weight_name, bias_name = f"{name}.weight", f"{name}.e_score_correction_bias"
    stored = ("bfloat16", "float32")
    weight = tensors.read(weight_name, stored, (config.num_experts, config.hidden_size))
    bias = tensors.read(bias_name, stored, (config.num_experts,))
    for tensor_name, tensor in ((weight_name, weight), (bias_name, bias)):
        if not bool(torch.isfinite(tensor).all()):
            raise CheckpointError(tensor_name, "finite values", "NaN or infinity")
    return Router(
        weight=weight.to(device=device, copy=True),
        bias=bias.to(device=device, dtype=torch.float32, copy=True),
    )


def _load_shared(
    tensors: CheckpointTensors, name: str, config: CheckpointConfig, share: _Share, device: torch.device
) -> Nvfp4Experts | DenseExperts | None:
    sizes = config.layer
    if sizes.num_shared_experts == 0:
        present = f"{name}.{_DOWN}.weight"
        if present in tensors:
            expected = f"no shared experts, as {config.path} says"
            raise CheckpointError(present, expected, "this tensor", "Correct the number of shared experts there.")
        return None
    width = sizes.intermediate_size * sizes.num_shared_experts
    load = _load_nvfp4 if stored_shared_format(tensors, name) is SharedExpertFormat.NVFP4 else _load_dense
    return load(tensors, [name], sizes.hidden_size, width, share, device)


def stored_shared_format(tensors: CheckpointTensors, name: str) -> SharedExpertFormat:
    """How the MLP of this name is stored, by its tensors.

    Raises:
        CheckpointError: in neither way, or its projections differ.
    """
    weights = {f"{name}.{projection}": "" for projection in (*_GATE_UP, _DOWN)}
    for linear in weights:
        weights[linear] = tensors.stored(f"{linear}.weight").dtype
        if weights[linear] not in _SHARED_FORMATS:
            expected = "dtype uint8 (NVFP4) or bfloat16"
            raise CheckpointError(f"{linear}.weight", expected, weights[linear])
    first = next(iter(weights))
    for linear, dtype in weights.items():
        if dtype != weights[first]:
            raise CheckpointError(f"{linear}.weight", f"dtype {weights[first]}, as {first}.weight has", dtype)
        surplus = [f"{linear}.{scale}" for scale in _SCALES if f"{linear}.{scale}" in tensors]
        if surplus and _SHARED_FORMATS[dtype] is SharedExpertFormat.BF16:
            raise CheckpointError(surplus[0], "no scales beside a bfloat16 weight", "this tensor")
    return _SHARED_FORMATS[weights[first]]


def _load_nvfp4(
    tensors: CheckpointTensors, names: Sequence[str], hidden: int, width: int, share: _Share, device: torch.device
) -> Nvfp4Experts:
    """The MLPs of these names, each `width` wide before it is shared out over the ranks."""
    import torch

    e, i = len(names), width // share.size
    fp8 = torch.float8_e4m3fn
    gate_up_weight = torch.empty(e, 2, i, hidden // _CODES_PER_BYTE, dtype=torch.uint8, device=device)
    gate_up_block_scale = torch.empty(e, 2, i, hidden // _BLOCK, dtype=fp8, device=device)
    down_weight = torch.empty(e, hidden, i // _CODES_PER_BYTE, dtype=torch.uint8, device=device)
    down_block_scale = torch.empty(e, hidden, i // _BLOCK, dtype=fp8, device=device)
    gate_up_scales: list[tuple[float, float]] = []
    down_scales: list[tuple[float, float]] = []

    def copy(linear: str, rows: int, columns: int, split: int, weight: torch.Tensor, block_scale: torch.Tensor) -> None:
        for suffix, dtype, packed, out in (
            ("weight", "uint8", _CODES_PER_BYTE, weight),
            ("weight_scale", "float8_e4m3fn", _BLOCK, block_scale),
        ):
            part = [slice(0, rows), slice(0, columns // packed)]
            part[split] = share.of(width, packed if split == 1 else 1)
            tensor = tensors.read(f"{linear}.{suffix}", (dtype,), (rows, columns // packed), tuple(part))
            if dtype == "float8_e4m3fn":
                _require_no_nan(f"{linear}.{suffix}", tensor)
            out.copy_(tensor)

    for expert, name in enumerate(names):
        for side, projection in enumerate(_GATE_UP):
            linear = f"{name}.{projection}"
            copy(linear, width, hidden, 0, gate_up_weight[expert, side], gate_up_block_scale[expert, side])
            gate_up_scales.append(_scalar_scales(tensors, linear))
        linear = f"{name}.{_DOWN}"
        copy(linear, hidden, width, 1, down_weight[expert], down_block_scale[expert])
        down_scales.append(_scalar_scales(tensors, linear))

    gate_up_global, gate_up_input = (
        torch.tensor(scales, dtype=torch.float32, device=device) for scales in zip(*gate_up_scales, strict=True)
    )
    down_global, down_input = (
        torch.tensor(scales, dtype=torch.float32, device=device) for scales in zip(*down_scales, strict=True)
    )
    return Nvfp4Experts(
        gate_up_weight=gate_up_weight,
        gate_up_block_scale=gate_up_block_scale,
        gate_up_global_scale=gate_up_global.reshape(e, 2),
        gate_up_input_scale=gate_up_input.reshape(e, 2),
        down_weight=down_weight,
        down_block_scale=down_block_scale,
        down_global_scale=down_global,
        down_input_scale=down_input,
    )


def _load_dense(
    tensors: CheckpointTensors, names: Sequence[str], hidden: int, width: int, share: _Share, device: torch.device
) -> DenseExperts:
    """The bf16 MLPs of these names, each `width` wide before it is shared out over the ranks."""
    import torch

    e, i = len(names), width // share.size
    gate_up_weight = torch.empty(e, 2, i, hidden, dtype=torch.bfloat16, device=device)
    down_weight = torch.empty(e, hidden, i, dtype=torch.bfloat16, device=device)
    mine, every = share.of(width), slice(0, hidden)
    for expert, name in enumerate(names):
        for side, projection in enumerate(_GATE_UP):
            tensor = tensors.read(f"{name}.{projection}.weight", ("bfloat16",), (width, hidden), (mine, every))
            gate_up_weight[expert, side].copy_(tensor)
        tensor = tensors.read(f"{name}.{_DOWN}.weight", ("bfloat16",), (hidden, width), (every, mine))
        down_weight[expert].copy_(tensor)
    return DenseExperts(gate_up_weight, down_weight)


def _scalar_scales(tensors: CheckpointTensors, linear: str) -> tuple[float, float]:
    """A projection's global scale and input scale, each a positive float32."""
    values = []
    for suffix in ("weight_scale_2", "input_scale"):
        name = f"{linear}.{suffix}"
        # Some exporters write a scalar as one element.
        shape = (1,) if tensors.stored(name).shape == (1,) else ()
        value = float(tensors.read(name, ("float32",), shape))
        if not (math.isfinite(value) and value > 0):
            raise CheckpointError(name, "a positive finite scale", str(value))
        values.append(value)
    return values[0], values[1]


def _require_no_nan(name: str, block_scale: torch.Tensor) -> None:
    import torch

    # All seven low bits set is the only NaN of float8_e4m3fn, with either sign.
    nan = int((block_scale.view(torch.uint8) & 0x7F == 0x7F).sum())
    if nan:
        raise CheckpointError(name, "block scales without NaN", f"{nan} NaN among {block_scale.numel()}")
