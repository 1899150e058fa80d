"""Writes variants of the sample checkpoints, and computes a layer from its loaded weights."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors.torch import load_file, save_file

from flashinfer_compat.weights.values import DenseExperts, MoELayerWeights, Nvfp4Experts

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

CHECKPOINTS = Path(__file__).parent.parent / "data" / "checkpoints"
GROUPED = CHECKPOINTS / "grouped"
SHARED_BF16 = CHECKPOINTS / "shared-bf16"
TWO_SHARED = CHECKPOINTS / "ungrouped-2-shared"
SAMPLES = [GROUPED, SHARED_BF16, TWO_SHARED]
MLP = "model.layers.1.mlp."

Tensors = dict[str, torch.Tensor]
Json = dict[str, Any]

_E2M1 = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0]
_PAIRS = torch.tensor([[_E2M1[byte & 15], _E2M1[byte >> 4]] for byte in range(256)], dtype=torch.float64)


def sample_tensors(sample: Path) -> Tensors:
    return load_file(sample / "model.safetensors")


def read_json(path: Path) -> Json:
    document: Json = json.loads(path.read_text(encoding="utf-8"))
    return document


def write_variant(
    target: Path,
    sample: Path = GROUPED,
    *,
    tensors: Callable[[Tensors], object] | None = None,
    config: Callable[[Json], object] | None = None,
    quantization: Callable[[Json], object] | None = None,
) -> Path:
    """A copy of a sample with its tensors, config.json or hf_quant_config.json edited in place by the callables."""
    target.mkdir(exist_ok=True)
    contents = sample_tensors(sample)
    if tensors is not None:
        tensors(contents)
    save_file(contents, target / "model.safetensors", metadata={"format": "pt"})
    for name, edit in (("config.json", config), ("hf_quant_config.json", quantization)):
        document = read_json(sample / name)
        if edit is not None:
            edit(document)
        (target / name).write_text(json.dumps(document), encoding="utf-8")
    return target


def split_files(checkpoint: Path, files: Mapping[str, Callable[[str], bool]], *, index: bool) -> None:
    """Replace model.safetensors by these files, each with the tensors its predicate takes."""
    contents = sample_tensors(checkpoint)
    (checkpoint / "model.safetensors").unlink()
    weight_map = {}
    for file, takes in files.items():
        part = {name: tensor for name, tensor in contents.items() if takes(name)}
        save_file(part, checkpoint / file)
        weight_map.update(dict.fromkeys(part, file))
    if index:
        document = {"metadata": {}, "weight_map": weight_map}
        (checkpoint / "model.safetensors.index.json").write_text(json.dumps(document), encoding="utf-8")


def dequantize(weight: torch.Tensor, block_scale: torch.Tensor, global_scale: torch.Tensor) -> torch.Tensor:
    """float64 values of [..., N, K/2] codes; `global_scale` broadcasts over the leading axes."""
    blocks = torch.nn.functional.embedding(weight.int(), _PAIRS).unflatten(-2, (-1, 8)).flatten(-2)
    scales = block_scale.double() * global_scale.double()[..., None, None]
    return (blocks * scales[..., None]).flatten(-2)


def dense_weights(experts: Nvfp4Experts | DenseExperts) -> tuple[torch.Tensor, torch.Tensor]:
    """gate/up [E, 2, I, H] and down [E, H, I] in float64."""
    if isinstance(experts, DenseExperts):
        return experts.gate_up_weight.double(), experts.down_weight.double()
    return (
        dequantize(experts.gate_up_weight, experts.gate_up_block_scale, experts.gate_up_global_scale),
        dequantize(experts.down_weight, experts.down_block_scale, experts.down_global_scale),
    )


def expert_outputs(experts: Nvfp4Experts | DenseExperts, x: torch.Tensor) -> torch.Tensor:
    """[E, T, H] float64: every expert's output for every token, activations not quantized."""
    gate_up, down = dense_weights(experts)
    gate, up = (x.double() @ gate_up.transpose(-1, -2)).unbind(1)
    return (torch.nn.functional.silu(gate) * up) @ down.transpose(-1, -2)


def layer_output(
    weights: MoELayerWeights, x: torch.Tensor, topk_ids: torch.Tensor, topk_weights: torch.Tensor
) -> torch.Tensor:
    """[T, H] float64: routed experts weighed by `topk_weights`, shared experts by 1."""
    outputs = expert_outputs(weights.routed, x)
    routing = torch.zeros(x.shape[0], outputs.shape[0], dtype=torch.float64)
    routing.scatter_(1, topk_ids, topk_weights.double())
    total = torch.einsum("te,eth->th", routing, outputs)
    if weights.shared is not None:
        total += expert_outputs(weights.shared, x).sum(0)
    return total


def same_bits(left: torch.Tensor, right: torch.Tensor) -> bool:
    """Equal dtype, shape and bytes (torch.equal does not compare float8)."""
    if left.dtype != right.dtype or left.shape != right.shape:
        return False
    return torch.equal(left.contiguous().view(torch.uint8), right.contiguous().view(torch.uint8))
