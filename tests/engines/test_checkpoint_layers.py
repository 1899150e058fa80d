"""What a checkpoint's headers say, for engines that decide before loading."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

pytest.importorskip("torch")
pytest.importorskip("safetensors")

from safetensors.torch import load_file, save_file

import flashinfer_compat as fc
from flashinfer_compat.engines.checkpoint import read_layers


@pytest.mark.parametrize(
    ("name", "stored"), [("grouped", "nvfp4"), ("ungrouped-2-shared", "nvfp4"), ("shared-bf16", "bf16")]
)
def test_the_problem_is_that_of_the_loaded_layer(checkpoints: Path, name: str, stored: str) -> None:
    layers = read_layers(checkpoints / name)
    assert layers.shared_format.value == stored
    loaded = fc.load_moe_layer(checkpoints / name, 1, tp_size=2)
    for kind in fc.RoutingInput:
        assert layers.problem(routing_input=kind, tp_size=2) == loaded.problem(kind)


def copy(checkpoints: Path, tmp_path: Path, name: str = "grouped") -> Path:
    return Path(shutil.copytree(checkpoints / name, tmp_path / name))


def test_every_moe_layer_is_looked_at(checkpoints: Path, tmp_path: Path) -> None:
    folder = copy(checkpoints, tmp_path)
    config = json.loads((folder / "config.json").read_text("utf-8"))
    (folder / "config.json").write_text(json.dumps({**config, "num_hidden_layers": 3}), "utf-8")
    tensors = load_file(folder / "model.safetensors")
    other = load_file(checkpoints / "shared-bf16" / "model.safetensors")
    for name, tensor in other.items():
        if ".layers.1.mlp." in name:
            tensors[name.replace(".layers.1.", ".layers.2.")] = tensor
    save_file(tensors, folder / "model.safetensors")
    with pytest.raises(fc.CheckpointError, match="layer 2: expected nvfp4 shared experts, as layer 1 has, got bf16"):
        read_layers(folder)


def test_routed_experts_in_bf16_are_refused(checkpoints: Path, tmp_path: Path) -> None:
    folder = copy(checkpoints, tmp_path)
    tensors = load_file(folder / "model.safetensors")
    dense = load_file(checkpoints / "shared-bf16" / "model.safetensors")
    for name in [one for one in tensors if ".layers.1.mlp.experts.0." in one]:
        del tensors[name]
    for name, tensor in dense.items():
        if ".layers.1.mlp.shared_experts." in name:
            tensors[name.replace("shared_experts", "experts.0")] = tensor
    save_file(tensors, folder / "model.safetensors")
    with pytest.raises(fc.CheckpointError, match="expected NVFP4 routed experts, got bf16"):
        read_layers(folder)


def test_missing_tensor_files_are_named(checkpoints: Path, tmp_path: Path) -> None:
    folder = copy(checkpoints, tmp_path)
    (folder / "model.safetensors").unlink()
    (folder / "moe_io.safetensors").unlink()
    with pytest.raises(fc.CheckpointError, match="no safetensors file"):
        read_layers(folder)


def test_a_model_without_moe_layers_is_refused(checkpoints: Path, tmp_path: Path) -> None:
    folder = copy(checkpoints, tmp_path)
    config = json.loads((folder / "config.json").read_text("utf-8"))
    (folder / "config.json").write_text(json.dumps({**config, "first_k_dense_replace": 2}), "utf-8")
    with pytest.raises(fc.CheckpointError, match="expected MoE layers, got none"):
        read_layers(folder)
