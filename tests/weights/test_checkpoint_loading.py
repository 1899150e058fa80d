from __future__ import annotations

import json
import subprocess
import sys
from typing import TYPE_CHECKING

import pytest
import torch
from checkpoint_variants import (
    GROUPED,
    MLP,
    SAMPLES,
    SHARED_BF16,
    TWO_SHARED,
    Json,
    Tensors,
    layer_output,
    same_bits,
    sample_tensors,
    split_files,
    write_variant,
)
from safetensors.torch import load_file

from flashinfer_compat.errors import ArgumentError
from flashinfer_compat.vocabulary import SharedExpertFormat
from flashinfer_compat.weights.checkpoint import load_moe_layer
from flashinfer_compat.weights.values import DenseExperts, Nvfp4Experts

if TYPE_CHECKING:
    from pathlib import Path


@pytest.mark.parametrize("sample", SAMPLES, ids=lambda path: path.name)
def test_loaded_layer_computes_the_recorded_output(sample: Path) -> None:
    recorded = load_file(sample / "moe_io.safetensors")
    weights = load_moe_layer(sample, 1)
    output = layer_output(weights, recorded["hidden_states"], recorded["topk_ids"], recorded["topk_weights"])
    torch.testing.assert_close(output.float(), recorded["output_w4a16"], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("sample", SAMPLES, ids=lambda path: path.name)
def test_every_routed_tensor_is_the_stored_one(sample: Path) -> None:
    stored = sample_tensors(sample)
    routed = load_moe_layer(sample, 1).routed
    for expert in range(16):
        for side, projection in enumerate(("gate_proj", "up_proj")):
            name = f"{MLP}experts.{expert}.{projection}."
            assert same_bits(routed.gate_up_weight[expert, side], stored[name + "weight"])
            assert same_bits(routed.gate_up_block_scale[expert, side], stored[name + "weight_scale"])
            assert routed.gate_up_global_scale[expert, side] == stored[name + "weight_scale_2"]
            assert routed.gate_up_input_scale[expert, side] == stored[name + "input_scale"]
        name = f"{MLP}experts.{expert}.down_proj."
        assert same_bits(routed.down_weight[expert], stored[name + "weight"])
        assert same_bits(routed.down_block_scale[expert], stored[name + "weight_scale"])
        assert routed.down_global_scale[expert] == stored[name + "weight_scale_2"]
        assert routed.down_input_scale[expert] == stored[name + "input_scale"]


def test_router_weight_keeps_its_dtype_and_bias_becomes_float32() -> None:
    stored = sample_tensors(GROUPED)
    router = load_moe_layer(GROUPED, 1).router
    assert same_bits(router.weight, stored[MLP + "gate.weight"])
    assert stored[MLP + "gate.e_score_correction_bias"].dtype is torch.bfloat16
    assert router.bias is not None
    assert same_bits(router.bias, stored[MLP + "gate.e_score_correction_bias"].float())


def test_recorded_bias_and_float32_router_load_exactly(tmp_path: Path) -> None:
    recorded = load_file(GROUPED / "moe_io.safetensors")["e_score_correction_bias"]

    def edit(tensors: Tensors) -> None:
        tensors[MLP + "gate.e_score_correction_bias"] = recorded
        tensors[MLP + "gate.weight"] = tensors[MLP + "gate.weight"].float()

    router = load_moe_layer(write_variant(tmp_path, tensors=edit), 1).router
    assert router.weight.dtype is torch.float32
    assert router.bias is not None
    assert same_bits(router.bias, recorded)


@pytest.mark.parametrize(
    ("sample", "shared_format", "kind", "width"),
    [
        (GROUPED, SharedExpertFormat.NVFP4, Nvfp4Experts, 128),
        (SHARED_BF16, SharedExpertFormat.BF16, DenseExperts, 128),
        (TWO_SHARED, SharedExpertFormat.NVFP4, Nvfp4Experts, 256),
    ],
    ids=lambda value: getattr(value, "name", None),
)
def test_shared_expert_format_follows_the_tensors(
    sample: Path, shared_format: SharedExpertFormat, kind: type, width: int
) -> None:
    weights = load_moe_layer(sample, 1)
    assert weights.shared_format is shared_format
    assert isinstance(weights.shared, kind)
    assert weights.shared is not None
    assert (weights.shared.num_experts, weights.shared.intermediate_size) == (1, width)


@pytest.mark.parametrize("excluded", [[], ["model.layers.1.mlp.shared_experts*"]])
@pytest.mark.parametrize("sample", [GROUPED, SHARED_BF16], ids=lambda path: path.name)
@pytest.mark.filterwarnings("error")
def test_tensors_win_over_the_exclude_list(sample: Path, excluded: list[str], tmp_path: Path) -> None:
    def edit(document: Json) -> None:
        document["quantization"]["exclude_modules"] = excluded

    weights = load_moe_layer(write_variant(tmp_path, sample, quantization=edit), 1)
    assert weights.shared_format is load_moe_layer(sample, 1).shared_format


@pytest.mark.parametrize("setting", ["zero", "null", "missing"])
def test_layer_without_shared_experts(setting: str, tmp_path: Path) -> None:
    def drop_shared(tensors: Tensors) -> None:
        for name in [name for name in tensors if "shared_experts" in name]:
            del tensors[name]

    def edit(config: Json) -> None:
        config["n_shared_experts"] = 0 if setting == "zero" else None
        if setting == "missing":
            del config["n_shared_experts"]

    weights = load_moe_layer(write_variant(tmp_path, tensors=drop_shared, config=edit), 1)
    assert weights.shared is None
    assert weights.shared_format is SharedExpertFormat.NONE
    assert weights.config.num_shared_experts == 0


def test_unequal_gate_and_up_scales_are_kept_exactly(tmp_path: Path) -> None:
    linear = MLP + "experts.5."
    scales = {"gate_proj": torch.tensor(0.0123), "up_proj": torch.tensor(0.00321)}

    def edit(tensors: Tensors) -> None:
        for projection, scale in scales.items():
            tensors[f"{linear}{projection}.weight_scale_2"] = scale
            tensors[f"{linear}{projection}.input_scale"] = scale * 2

    weights = load_moe_layer(write_variant(tmp_path, tensors=edit), 1)
    expected = torch.stack(list(scales.values()))
    assert torch.equal(weights.routed.gate_up_global_scale[5], expected)
    assert torch.equal(weights.routed.gate_up_input_scale[5], expected * 2)
    others = torch.cat([weights.routed.gate_up_input_scale[:5], weights.routed.gate_up_input_scale[6:]])
    assert weights.input_scale_spread == pytest.approx(float(expected.max() * 2 / others.min()))


def test_scalars_stored_as_one_element_load(tmp_path: Path) -> None:
    def edit(tensors: Tensors) -> None:
        for name in tensors:
            if name.endswith(("weight_scale_2", "input_scale")):
                tensors[name] = tensors[name].reshape(1)

    loaded = load_moe_layer(write_variant(tmp_path, tensors=edit), 1).routed
    assert torch.equal(loaded.gate_up_global_scale, load_moe_layer(GROUPED, 1).routed.gate_up_global_scale)


@pytest.mark.parametrize("prefix", ["language_model.model.", "model.language_model."])
def test_multimodal_wrapper_nests_the_config_and_prefixes_the_tensors(prefix: str, tmp_path: Path) -> None:
    def rename(tensors: Tensors) -> None:
        for name in list(tensors):
            tensors[prefix + name.removeprefix("model.")] = tensors.pop(name)

    def nest(config: Json) -> None:
        text = dict(config)
        config.clear()
        config.update(model_type="kimi_k25", text_config={**text, "model_type": "kimi_k2"})

    weights = load_moe_layer(write_variant(tmp_path, tensors=rename, config=nest), 1)
    plain = load_moe_layer(GROUPED, 1)
    assert weights.config == plain.config
    assert same_bits(weights.routed.down_weight, plain.routed.down_weight)


@pytest.mark.parametrize("index", [True, False], ids=["index", "no-index"])
def test_layer_spread_over_several_files(index: bool, tmp_path: Path) -> None:
    checkpoint = write_variant(tmp_path)
    files = {
        "model-00001-of-00003.safetensors": lambda name: not name.startswith(MLP),
        "model-00002-of-00003.safetensors": lambda name: name.startswith(MLP) and "gate_proj" in name,
        "model-00003-of-00003.safetensors": lambda name: name.startswith(MLP) and "gate_proj" not in name,
    }
    split_files(checkpoint, files, index=index)
    loaded, whole = load_moe_layer(checkpoint, 1), load_moe_layer(GROUPED, 1)
    assert same_bits(loaded.routed.gate_up_weight, whole.routed.gate_up_weight)
    assert isinstance(loaded.shared, Nvfp4Experts)
    assert isinstance(whole.shared, Nvfp4Experts)
    assert same_bits(loaded.shared.down_block_scale, whole.shared.down_block_scale)


@pytest.mark.parametrize("damage", ["deleted", "corrupt"])
def test_files_of_other_layers_are_never_opened(damage: str, tmp_path: Path) -> None:
    checkpoint = write_variant(tmp_path)
    other = "model-00001-of-00002.safetensors"
    files = {
        other: lambda name: not name.startswith(MLP),
        "model-00002-of-00002.safetensors": lambda name: name.startswith(MLP),
    }
    split_files(checkpoint, files, index=True)
    if damage == "deleted":
        (checkpoint / other).unlink()
    else:
        (checkpoint / other).write_bytes(b"not safetensors")
    assert same_bits(load_moe_layer(checkpoint, 1).routed.down_weight, load_moe_layer(GROUPED, 1).routed.down_weight)


def test_loaded_weights_survive_the_file_being_overwritten(tmp_path: Path) -> None:
    checkpoint = write_variant(tmp_path)
    weights = load_moe_layer(checkpoint, 1)
    before = {
        "router": weights.router.weight.clone(),
        "down": weights.routed.down_weight.clone(),
    }
    file = checkpoint / "model.safetensors"
    with file.open("r+b") as stream:
        stream.write(b"\xff" * file.stat().st_size)
    assert same_bits(weights.router.weight, before["router"])
    assert same_bits(weights.routed.down_weight, before["down"])


@pytest.mark.parametrize(("layer", "what"), [(0, "0, a dense layer"), (2, "2, out of range 0 to 1"), (-1, "-1, out")])
def test_layer_that_is_not_moe_is_refused_with_those_that_are(layer: int, what: str) -> None:
    with pytest.raises(ArgumentError, match="an MoE layer") as caught:
        load_moe_layer(GROUPED, layer)
    assert caught.value.argument == "layer"
    assert caught.value.expected.startswith("an MoE layer (1 in ")
    assert caught.value.actual.startswith(what)


def test_unknown_device_is_refused() -> None:
    with pytest.raises(ArgumentError, match=r"device: expected a device .* got 'gpu0'"):
        load_moe_layer(GROUPED, 1, device="gpu0")


def test_device_places_every_tensor() -> None:
    weights = load_moe_layer(TWO_SHARED, 1, device="meta")
    assert isinstance(weights.shared, Nvfp4Experts)
    tensors = [
        weights.router.weight,
        weights.router.bias,
        *vars(weights.routed).values(),
        *vars(weights.shared).values(),
    ]
    assert {str(tensor.device) for tensor in tensors if tensor is not None} == {"meta"}


def test_modules_import_without_torch_or_safetensors() -> None:
    code = (
        "import sys; sys.modules['torch'] = sys.modules['safetensors'] = None\n"
        "import flashinfer_compat.weights.checkpoint, flashinfer_compat.weights.shared\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


@pytest.mark.parametrize("library", ["safetensors", "torch"])
def test_missing_library_is_named(library: str) -> None:
    code = (
        "import json, sys\n"
        f"sys.modules[{library!r}] = None\n"
        "from flashinfer_compat.errors import DependencyMissingError\n"
        "from flashinfer_compat.weights.checkpoint import load_moe_layer\n"
        "try:\n"
        f"    load_moe_layer({str(GROUPED)!r}, 1)\n"
        "except DependencyMissingError as error:\n"
        "    print(json.dumps([error.library, str(error)]))\n"
    )
    done = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    name, message = json.loads(done.stdout)
    assert name == library
    assert f"pip install {library}" in message
