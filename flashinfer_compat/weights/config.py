"""What a checkpoint's JSON files say: the model family, one MoE layer's sizes and routing, the quantization."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from flashinfer_compat.environment.reading import read_regular
from flashinfer_compat.errors import ArgumentError, CheckpointError, nearest
from flashinfer_compat.vocabulary import Activation, RoutingMethod
from flashinfer_compat.weights.values import LayerConfig

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

__all__ = ["FAMILIES", "CheckpointConfig", "ModelFamily", "QuantizationConfig", "read_checkpoint_config", "read_json"]


@dataclass(frozen=True)
class ModelFamily:
    """How one `model_type` routes, and the names its config.json gives to the settings whose names vary."""

    routing_method: RoutingMethod
    fixed: Mapping[str, str]
    """Settings that must have this value where config.json gives them: any other routes differently."""
    num_experts: str = "n_routed_experts"
    num_shared_experts: str = "n_shared_experts"
    top_k: str = "num_experts_per_tok"
    intermediate_size: str = "moe_intermediate_size"
    first_moe_layer: str = "first_k_dense_replace"


_DEEPSEEK_V3 = ModelFamily(RoutingMethod.DEEPSEEK_V3, {"scoring_func": "sigmoid", "topk_method": "noaux_tc"})

FAMILIES: Mapping[str, ModelFamily] = {
    "deepseek_v3": _DEEPSEEK_V3,
    "deepseek_v32": _DEEPSEEK_V3,
    "glm4_moe": _DEEPSEEK_V3,
    "kimi_k2": _DEEPSEEK_V3,
}
"""By `model_type`. A new family is one row."""

_ACTIVATIONS = {"silu": Activation.SWIGLU}
_QUANT_ALGO = "NVFP4"
_GROUP_SIZE = 16


@dataclass(frozen=True)
class QuantizationConfig:
    """The quantization a checkpoint declares. Which tensors are quantized is read from the tensors themselves."""

    quant_algo: str
    group_size: int
    """Values that share one block scale."""
    exclude_modules: tuple[str, ...]
    """Module name patterns declared unquantized."""
    path: Path
    """The file that says so."""


@dataclass(frozen=True)
class CheckpointConfig:
    """A checkpoint's settings, as far as its MoE layers go."""

    path: Path
    """Of config.json."""
    model_type: str
    num_layers: int
    moe_layers: tuple[int, ...]
    """Indices of the MoE layers, ascending; the others are dense."""
    layer: LayerConfig
    """The same for every MoE layer."""
    quantization: QuantizationConfig

    def require_moe_layer(self, layer: int) -> None:
        """Do nothing if `layer` is an MoE layer.

        Raises:
            ArgumentError: it is dense or out of range; the error says which layers are MoE.
        """
        if layer in self.moe_layers:
            return
        what = "a dense layer" if 0 <= layer < self.num_layers else f"out of range 0 to {self.num_layers - 1}"
        expected = f"an MoE layer ({_spans(self.moe_layers)} in {self.path})"
        raise ArgumentError("layer", expected, f"{layer}, {what}")


def read_checkpoint_config(directory: Path) -> CheckpointConfig:
    """Read config.json and, where there is one, hf_quant_config.json, which then speaks for the quantization.

    The settings of a multimodal wrapper are those of its `text_config`.

    Raises:
        CheckpointError: a file is missing or not JSON; the model_type is unknown; a setting is missing or cannot be
            used; the quantization is not NVFP4 with blocks of 16. The error names the file and the key.
    """
    path = directory / "config.json"
    whole = read_json(path)
    section = whole
    if whole.get("model_type") not in FAMILIES and isinstance(whole.get("text_config"), dict):
        section = whole["text_config"]
    settings = _Settings(path, section)
    model_type = settings.text("model_type")
    if model_type not in FAMILIES:
        closest = nearest(model_type, FAMILIES)
        way_out = f"The nearest is {closest!r}." if closest else ""
        raise CheckpointError(f"{path}: model_type", "one of " + ", ".join(FAMILIES), repr(model_type), way_out)
    family = FAMILIES[model_type]
    for key, value in family.fixed.items():
        settings.require_value(key, value)
    num_layers = settings.integer("num_hidden_layers")
    first = settings.integer(family.first_moe_layer)
    every = settings.integer("moe_layer_freq", default=1)
    if every < 1:
        raise CheckpointError(f"{path}: moe_layer_freq", "at least 1", str(every))
    return CheckpointConfig(
        path=path,
        model_type=model_type,
        num_layers=num_layers,
        moe_layers=tuple(layer for layer in range(num_layers) if layer >= first and layer % every == 0),
        layer=_layer_config(settings, family),
        quantization=_read_quantization(directory, path, whole, section),
    )


def read_json(path: Path) -> dict[str, Any]:
    """The JSON object in a file.

    Raises:
        CheckpointError: the file is missing, unreadable, not JSON or not an object.
    """
    try:
        document = json.loads(read_regular(path).decode("utf-8"))
    except FileNotFoundError:
        way_out = "Give the folder that holds the checkpoint's config.json and its safetensors files."
        raise CheckpointError(str(path), "a file", "none there", way_out) from None
    except OSError as error:
        raise CheckpointError(str(path), "a readable file", error.strerror or str(error)) from error
    except ValueError as error:  # JSONDecodeError and UnicodeDecodeError
        raise CheckpointError(str(path), "JSON", f"text that is not ({error})") from error
    if not isinstance(document, dict):
        raise CheckpointError(str(path), "a JSON object", type(document).__name__)
    return document


@dataclass(frozen=True)
class _Settings:
    """Typed access to one JSON object of settings, with errors that name the file and the key."""

    path: Path
    values: Mapping[str, Any]

    def integer(self, key: str, default: int | None = None) -> int:
        """The integer at `key`; `default`, if given, where the key is missing or null."""
        if default is not None and self.values.get(key) is None:
            return default
        value = self._get(key)
        if type(value) is not int:  # bool is a subclass of int
            raise self._error(key, "an integer")
        return value

    def number(self, key: str) -> float:
        value = self._get(key)
        if type(value) not in (int, float):
            raise self._error(key, "a number")
        return float(value)

    def boolean(self, key: str) -> bool:
        value = self._get(key)
        if not isinstance(value, bool):
            raise self._error(key, "true or false")
        return value

    def text(self, key: str) -> str:
        value = self._get(key)
        if not isinstance(value, str):
            raise self._error(key, "a string")
        return value

    def require_value(self, key: str, value: str) -> None:
        """Raise if `key` is there with another value."""
        if self.values.get(key, value) != value:
            raise self._error(key, repr(value))

    def _get(self, key: str) -> Any:
        if key not in self.values:
            raise CheckpointError(f"{self.path}: {key}", "this key", "no such key")
        return self.values[key]

    def _error(self, key: str, expected: str) -> CheckpointError:
        return CheckpointError(f"{self.path}: {key}", expected, json.dumps(self.values[key]))


def _layer_config(settings: _Settings, family: ModelFamily) -> LayerConfig:
    hidden_act = settings.text("hidden_act")
    if hidden_act not in _ACTIVATIONS:
        raise CheckpointError(f"{settings.path}: hidden_act", "one of " + ", ".join(_ACTIVATIONS), repr(hidden_act))
    try:
        return LayerConfig(
            hidden_size=settings.integer("hidden_size"),
            intermediate_size=settings.integer(family.intermediate_size),
            num_experts=settings.integer(family.num_experts),
            top_k=settings.integer(family.top_k),
            num_shared_experts=settings.integer(family.num_shared_experts, default=0),
            n_group=settings.integer("n_group"),
            topk_group=settings.integer("topk_group"),
            routed_scaling_factor=settings.number("routed_scaling_factor"),
            norm_topk_prob=settings.boolean("norm_topk_prob"),
            routing_method=family.routing_method,
            activation=_ACTIVATIONS[hidden_act],
        )
    except ArgumentError as error:
        key = getattr(family, error.argument, error.argument)
        raise CheckpointError(f"{settings.path}: {key}", error.expected, error.actual) from error


def _read_quantization(
    directory: Path, config_path: Path, config: Mapping[str, Any], text_config: Mapping[str, Any]
) -> QuantizationConfig:
    path = directory / "hf_quant_config.json"
    if path.exists():
        document: Any = read_json(path)
    else:
        path = config_path
        document = config.get("quantization_config", text_config.get("quantization_config"))
        if not isinstance(document, dict):
            expected = "NVFP4 settings here, or a file hf_quant_config.json beside it"
            raise CheckpointError(f"{path}: quantization_config", expected, "neither")
    # ModelOpt nests the settings in its own file and leaves them flat in config.json.
    section = document.get("quantization", document)
    if not isinstance(section, dict):
        raise CheckpointError(f"{path}: quantization", "a JSON object", json.dumps(section))
    settings = _Settings(path, section)
    supported = f"Supported: ModelOpt checkpoints with quant_algo {_QUANT_ALGO} and group_size {_GROUP_SIZE}."
    quant_algo, group_size = section.get("quant_algo"), _group_size(section)
    if quant_algo != _QUANT_ALGO:
        actual = "no such key" if quant_algo is None else repr(quant_algo)
        raise CheckpointError(f"{path}: quant_algo", repr(_QUANT_ALGO), actual, supported)
    if group_size != _GROUP_SIZE:
        actual = "no such key" if group_size is None else repr(group_size)
        raise CheckpointError(f"{path}: group_size", str(_GROUP_SIZE), actual, supported)
    excluded = section.get("exclude_modules", section.get("ignore")) or []
    if not (isinstance(excluded, list) and all(isinstance(module, str) for module in excluded)):
        raise CheckpointError(f"{settings.path}: exclude_modules", "a list of strings", json.dumps(excluded))
    return QuantizationConfig(_QUANT_ALGO, _GROUP_SIZE, tuple(excluded), path)


def _group_size(section: Mapping[str, Any]) -> Any:
    """The declared group size: flat, or that of config.json's `config_groups` where they agree; else None."""
    if "group_size" in section:
        return section["group_size"]
    groups = section.get("config_groups")
    if not isinstance(groups, dict):
        return None
    weights = [group.get("weights") for group in groups.values() if isinstance(group, dict)]
    sizes = [entry.get("group_size") for entry in weights if isinstance(entry, dict)]
    return sizes[0] if sizes and all(size == sizes[0] for size in sizes) else sizes or None


def _spans(layers: tuple[int, ...]) -> str:
    """Layer indices as people write them: `3 to 60`, `1, 3, 5`."""
    if not layers:
        return "none"
    if len(layers) > 2 and layers == tuple(range(layers[0], layers[-1] + 1)):
        return f"{layers[0]} to {layers[-1]}"
    return ", ".join(map(str, layers))
