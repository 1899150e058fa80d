from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
from checkpoint_variants import GROUPED, SHARED_BF16, TWO_SHARED, Json, write_variant

from flashinfer_compat.errors import ArgumentError, CheckpointError
from flashinfer_compat.vocabulary import Activation, RoutingMethod
from flashinfer_compat.weights.config import FAMILIES, read_checkpoint_config
from flashinfer_compat.weights.values import LayerConfig

if TYPE_CHECKING:
    from pathlib import Path


def refusal(checkpoint: Path) -> CheckpointError:
    with pytest.raises(CheckpointError) as caught:
        read_checkpoint_config(checkpoint)
    return caught.value


def test_settings_of_a_real_checkpoint() -> None:
    config = read_checkpoint_config(GROUPED)
    assert config.layer == LayerConfig(
        hidden_size=256,
        intermediate_size=128,
        num_experts=16,
        top_k=4,
        num_shared_experts=1,
        n_group=4,
        topk_group=2,
        routed_scaling_factor=2.5,
        norm_topk_prob=True,
        routing_method=RoutingMethod.DEEPSEEK_V3,
        activation=Activation.SWIGLU,
    )
    assert (config.model_type, config.num_layers, config.moe_layers) == ("deepseek_v3", 2, (1,))
    assert read_checkpoint_config(TWO_SHARED).layer.num_shared_experts == 2


@pytest.mark.parametrize("model_type", sorted(FAMILIES))
def test_every_known_family_reads(model_type: str, tmp_path: Path) -> None:
    config = read_checkpoint_config(write_variant(tmp_path, config=lambda doc: doc.update(model_type=model_type)))
    assert config.layer == read_checkpoint_config(GROUPED).layer


def test_unknown_family_lists_the_known_and_the_nearest(tmp_path: Path) -> None:
    error = refusal(write_variant(tmp_path, config=lambda config: config.update(model_type="kimi_k3")))
    assert error.subject == f"{tmp_path / 'config.json'}: model_type"
    assert error.expected == "one of " + ", ".join(FAMILIES)
    assert error.way_out == "The nearest is 'kimi_k2'."


REQUIRED = [
    "model_type",
    "num_hidden_layers",
    "first_k_dense_replace",
    "hidden_size",
    "moe_intermediate_size",
    "n_routed_experts",
    "num_experts_per_tok",
    "n_group",
    "topk_group",
    "routed_scaling_factor",
    "norm_topk_prob",
    "hidden_act",
]


@pytest.mark.parametrize("key", REQUIRED)
def test_missing_key_is_named_with_its_file(key: str, tmp_path: Path) -> None:
    error = refusal(write_variant(tmp_path, config=lambda config: config.pop(key)))
    assert error.subject == f"{tmp_path / 'config.json'}: {key}"
    assert error.actual == "no such key"


@pytest.mark.parametrize(
    ("key", "value", "actual"),
    [
        ("n_routed_experts", "16", '"16"'),
        ("n_routed_experts", True, "true"),
        ("num_experts_per_tok", 9, "9"),  # topk_group 2 of 4 groups hold 8 experts
        ("num_experts_per_tok", 0, "0"),
        ("n_group", 3, "3"),
        ("n_group", 0, "0"),
        ("topk_group", 5, "5"),
        ("n_shared_experts", -1, "-1"),
        ("moe_intermediate_size", 120, "120"),
        ("hidden_size", 0, "0"),
        ("routed_scaling_factor", 0, "0.0"),
        ("routed_scaling_factor", None, "null"),
        ("norm_topk_prob", 1, "1"),
        ("hidden_act", "relu", "'relu'"),
        ("moe_layer_freq", 0, "0"),
        ("scoring_func", "softmax", '"softmax"'),
        ("topk_method", "greedy", '"greedy"'),
    ],
)
def test_value_that_cannot_be_used_is_named_by_its_key(key: str, value: Any, actual: str, tmp_path: Path) -> None:
    error = refusal(write_variant(tmp_path, config=lambda config: config.update({key: value})))
    assert error.subject == f"{tmp_path / 'config.json'}: {key}"
    assert error.actual == actual


@pytest.mark.parametrize(
    ("settings", "layers", "text"),
    [
        ({"num_hidden_layers": 61, "first_k_dense_replace": 3}, tuple(range(3, 61)), "3 to 60"),
        ({"num_hidden_layers": 8, "first_k_dense_replace": 1, "moe_layer_freq": 3}, (3, 6), "3, 6"),
        ({"num_hidden_layers": 2, "first_k_dense_replace": 2}, (), "none"),
    ],
)
def test_moe_layers_follow_the_config(settings: Json, layers: tuple[int, ...], text: str, tmp_path: Path) -> None:
    config = read_checkpoint_config(write_variant(tmp_path, config=lambda document: document.update(settings)))
    assert config.moe_layers == layers
    for layer in layers:
        config.require_moe_layer(layer)
    with pytest.raises(ArgumentError) as caught:
        config.require_moe_layer(0)
    assert caught.value.expected == f"an MoE layer ({text} in {config.path})"


def test_quantization_of_real_checkpoints() -> None:
    quantization = read_checkpoint_config(SHARED_BF16).quantization
    assert (quantization.quant_algo, quantization.group_size) == ("NVFP4", 16)
    assert "model.layers.1.mlp.shared_experts*" in quantization.exclude_modules
    assert quantization.path == SHARED_BF16 / "hf_quant_config.json"


@pytest.mark.parametrize("nested", [False, True], ids=["flat", "in-text-config"])
def test_config_json_speaks_for_the_quantization_where_alone(nested: bool, tmp_path: Path) -> None:
    def nest(config: Json) -> None:
        if nested:
            text = dict(config)
            config.clear()
            config.update(model_type="wrapper", text_config=text)

    (write_variant(tmp_path, SHARED_BF16, config=nest) / "hf_quant_config.json").unlink()
    quantization = read_checkpoint_config(tmp_path).quantization
    assert quantization.path == tmp_path / "config.json"
    assert quantization.exclude_modules == read_checkpoint_config(SHARED_BF16).quantization.exclude_modules


@pytest.mark.parametrize(
    ("key", "value"),
    [("quant_algo", "FP8"), ("quant_algo", "MIXED_PRECISION"), ("quant_algo", None), ("group_size", 32)],
)
def test_other_quantization_is_refused_with_what_is_supported(key: str, value: Any, tmp_path: Path) -> None:
    error = refusal(
        write_variant(tmp_path, quantization=lambda document: document["quantization"].update({key: value}))
    )
    assert error.subject == f"{tmp_path / 'hf_quant_config.json'}: {key}"
    assert error.way_out == "Supported: ModelOpt checkpoints with quant_algo NVFP4 and group_size 16."


def test_groups_of_two_sizes_in_config_json_are_refused(tmp_path: Path) -> None:
    def edit(config: Json) -> None:
        groups = config["quantization_config"]["config_groups"]
        groups["group_1"] = {"weights": {"group_size": 32}}

    (write_variant(tmp_path, config=edit) / "hf_quant_config.json").unlink()
    error = refusal(tmp_path)
    assert error.subject == f"{tmp_path / 'config.json'}: group_size"
    assert error.actual == "[16, 32]"


def test_unquantized_checkpoint_is_refused(tmp_path: Path) -> None:
    (write_variant(tmp_path, config=lambda config: config.pop("quantization_config")) / "hf_quant_config.json").unlink()
    assert refusal(tmp_path).subject == f"{tmp_path / 'config.json'}: quantization_config"


def test_compressed_tensors_checkpoint_is_refused(tmp_path: Path) -> None:
    def edit(config: Json) -> None:
        config["quantization_config"] = {"quant_method": "compressed-tensors", "format": "nvfp4-pack-quantized"}

    (write_variant(tmp_path, config=edit) / "hf_quant_config.json").unlink()
    error = refusal(tmp_path)
    assert error.subject == f"{tmp_path / 'config.json'}: quant_algo"
    assert error.actual == "no such key"


def test_malformed_exclude_list_is_refused(tmp_path: Path) -> None:
    error = refusal(
        write_variant(
            tmp_path, quantization=lambda document: document["quantization"].update(exclude_modules="lm_head")
        )
    )
    assert error.subject == f"{tmp_path / 'hf_quant_config.json'}: exclude_modules"
