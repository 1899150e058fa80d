"""What the files of a checkpoint say of its MoE layers, for an engine that decides before it loads weights."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from flashinfer_compat.errors import CheckpointError
from flashinfer_compat.problem import Problem
from flashinfer_compat.vocabulary import ActivationScaling, RoutingInput, SharedExpertFormat
from flashinfer_compat.weights.checkpoint import layer_prefix, stored_shared_format
from flashinfer_compat.weights.config import read_checkpoint_config
from flashinfer_compat.weights.tensors import CheckpointTensors, open_tensors
from flashinfer_compat.weights.values import LayerConfig

__all__ = ["CheckpointLayers", "read_layers", "read_model"]


@dataclass(frozen=True)
class CheckpointLayers:
    """The MoE layers of one checkpoint, which are all alike."""

    config: LayerConfig
    shared_format: SharedExpertFormat
    """As the tensors are stored."""

    def problem(
        self,
        *,
        routing_input: RoutingInput,
        tp_size: int = 1,
        ep_size: int = 1,
        activation_scaling: ActivationScaling = ActivationScaling.CHECKPOINT,
    ) -> Problem:
        """What planning needs to know of a layer, as one of `tp_size` ranks runs it.

        Raises:
            ArgumentError: the sizes make no layer that can be run.
        """
        config = self.config
        return Problem(
            hidden_size=config.hidden_size,
            intermediate_size=config.intermediate_size // tp_size,
            num_experts=config.num_experts,
            top_k=config.top_k,
            num_shared_experts=config.num_shared_experts,
            shared_format=self.shared_format,
            routing_method=config.routing_method,
            routing_input=routing_input,
            n_group=config.n_group,
            topk_group=config.topk_group,
            routed_scaling_factor=config.routed_scaling_factor,
            norm_topk_prob=config.norm_topk_prob,
            activation=config.activation,
            activation_scaling=activation_scaling,
            ep_size=ep_size,
        )


def read_layers(folder: str | os.PathLike[str]) -> CheckpointLayers:
    """Read the configuration and the headers of the tensor files; no weight is read.

    The tensors decide how the shared experts are stored, in every MoE layer; a list of excluded modules is not asked.

    Raises:
        CheckpointError: a file, key or tensor is missing or not what the format asks for; the routed experts are not
            NVFP4, or the layers do not store their shared experts alike.
        DependencyMissingError: safetensors or torch is not installed.
    """
    directory = Path(folder)
    config = read_checkpoint_config(directory)
    if not config.moe_layers:
        raise CheckpointError(str(config.path), "MoE layers", "none")
    with open_tensors(directory) as tensors:
        formats = {layer: _format_of(tensors, layer, config.layer) for layer in config.moe_layers}
    first = config.moe_layers[0]
    for layer, found in formats.items():
        if found is not formats[first]:
            expected = f"{formats[first].value} shared experts, as layer {first} has"
            raise CheckpointError(f"{directory}: layer {layer}", expected, found.value)
    return CheckpointLayers(config.layer, formats[first])


def read_model(model: str, revision: str | None = None) -> CheckpointLayers:
    """Like `read_layers`, of a folder or of a model in the local Hugging Face cache. Nothing is downloaded.

    Args:
        model: a folder, or a model's name.
        revision: of the named model.
    """
    if Path(model).is_dir():
        return read_layers(model)
    from huggingface_hub import snapshot_download

    try:
        return read_layers(snapshot_download(model, revision=revision, local_files_only=True))
    except (OSError, ValueError) as error:
        expected = "a folder, or a model that is in the local cache already"
        way_out = "Download the checkpoint before the server starts, so that its shared experts can be looked at."
        raise CheckpointError(f"model {model}", expected, "neither", way_out) from error


def _format_of(tensors: CheckpointTensors, layer: int, config: LayerConfig) -> SharedExpertFormat:
    prefix = layer_prefix(tensors, layer)
    # One rule reads both: codes, or a bf16 weight without scales.
    routed = stored_shared_format(tensors, f"{prefix}experts.0")
    if routed is not SharedExpertFormat.NVFP4:
        raise CheckpointError(f"{prefix}experts.0", "NVFP4 routed experts", routed.value)
    if config.num_shared_experts == 0:
        return SharedExpertFormat.NONE
    return stored_shared_format(tensors, f"{prefix}shared_experts")
