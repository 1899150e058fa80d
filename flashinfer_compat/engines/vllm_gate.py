"""Whether vLLM may fuse the shared expert of a model into its trtllm NVFP4 experts: the decision and its reason.

vLLM calls FlashInfer's logits entry where its monolithic experts run, which take num_fused_shared_experts (strategy
native), and the routed entry where its modular ones do, to whose top-k the shared expert is appended (expanded).
"""

from __future__ import annotations

import enum
from collections.abc import Callable
from dataclasses import dataclass, replace

from flashinfer_compat.engines.checkpoint import CheckpointLayers
from flashinfer_compat.engines.gate import Decision, Outcome, old_flashinfer, refusal, told
from flashinfer_compat.errors import FlashInferCompatError, StrategyUnavailableError
from flashinfer_compat.features.target import Target
from flashinfer_compat.planning.decision import Plan
from flashinfer_compat.planning.plan import plan
from flashinfer_compat.vocabulary import (
    ActivationScaling,
    Backend,
    RoutedScaling,
    RoutingInput,
    SharedExpertFormat,
    Strategy,
)

__all__ = [
    "ARCHITECTURE",
    "EXPERTS",
    "QUANTIZATION",
    "Because",
    "Experts",
    "Server",
    "VllmDecision",
    "by_settings",
    "decide",
]

ARCHITECTURE = "DeepseekV3ForCausalLM"
QUANTIZATION = "modelopt_fp4"
EXPERTS = {
    "TrtLlmNvFp4ExpertsMonolithic": (RoutingInput.LOGITS, Strategy.NATIVE),
    "TrtLlmNvFp4ExpertsModular": (RoutingInput.TOPK, Strategy.EXPANDED),
}
"""vLLM's classes of trtllm NVFP4 experts: what they hand to FlashInfer, and the strategy for it."""
HIDDEN_MULTIPLE = 256
"""vLLM pads hidden states. Source: vLLM 0.33.0, flashinfer_utils.py, trtllm_nvfp4_hidden_alignment."""


class Because(str, enum.Enum):
    """Why: a closed set. Programs may rely on the values; `SENTENCES` may change."""

    FUSED = "fused"
    PART_OF_ANOTHER = "part_of_another_model"
    DRAFT = "draft_model"
    ARCHITECTURE = "architecture"
    QUANTIZATION = "quantization"
    EXPERT_PARALLELISM = "expert_parallelism"
    LOAD_BALANCING = "load_balancing"
    DATA_PARALLELISM = "data_parallelism"
    CONTEXT_PARALLELISM = "context_parallelism"
    DTYPE = "dtype"
    LORA = "lora"
    SUBSTITUTED_EXPERTS = "substituted_experts"
    COMPILE_CACHE = "compile_cache"
    CHANGED_BY_OTHERS = "changed_by_others"
    OLD_FLASHINFER = "old_flashinfer"
    EXPERTS = "experts"
    ROUTING = "routing"
    CHECKPOINT = "checkpoint"
    NUM_SHARED_EXPERTS = "num_shared_experts"
    SHARED_FORMAT = "shared_format"
    OUTPUT_SCALE = "output_scale"
    PLANNING = "planning"


SENTENCES = {
    Because.FUSED: "{found}",
    Because.PART_OF_ANOTHER: "the language model is part of another model, under {prefix!r}",
    Because.DRAFT: "this is a draft model",
    Because.ARCHITECTURE: "the model is {architecture}, not " + ARCHITECTURE,
    Because.QUANTIZATION: "the quantization is {quantization}, not " + QUANTIZATION,
    Because.EXPERT_PARALLELISM: "expert parallelism is on: every rank would add the shared expert",
    Because.LOAD_BALANCING: "expert load balancing is on: redundant experts have the ids behind the routed ones",
    Because.DATA_PARALLELISM: "data parallelism ({data_parallel_size}) spreads the experts over more ranks than the "
    "shared expert, and was not tested",
    Because.CONTEXT_PARALLELISM: "prefill context parallelism ({prefill_context_parallel_size}) was not tested",
    Because.DTYPE: "the model runs in {dtype}; FlashInfer's kernels give bfloat16",
    Because.LORA: "LoRA is on, and the shared expert would be none of its modules",
    Because.SUBSTITUTED_EXPERTS: "the model has substituted experts, whose rows vLLM leaves out",
    Because.COMPILE_CACHE: "additional_config is no dictionary, so that vLLM's compile cache could not tell a fused "
    "model from another",
    Because.CHANGED_BY_OTHERS: "another plugin has replaced what this one replaces",
    Because.OLD_FLASHINFER: "{found}",
    Because.EXPERTS: "vLLM runs these experts with {found}, not " + " or ".join(EXPERTS),
    Because.ROUTING: "{found}",
    Because.CHECKPOINT: "{found}",
    Because.NUM_SHARED_EXPERTS: "the model has {found} shared experts; vLLM's loader can be given exactly one",
    Because.SHARED_FORMAT: "the checkpoint stores its shared experts in {found}, not NVFP4",
    Because.OUTPUT_SCALE: "vLLM multiplies the whole output by {found}, and would multiply the shared expert too",
    Because.PLANNING: "{found}",
}


@dataclass(frozen=True)
class Server:
    """What vLLM has settled when it builds a model, by its own names. All ranks of a server have the same."""

    architecture: str = ARCHITECTURE
    quantization: str | None = None
    prefix: str = ""
    """Of the model's modules; empty where it is no part of another."""
    is_draft: bool = False
    dtype: str = "bfloat16"
    tensor_parallel_size: int = 1
    data_parallel_size: int = 1
    prefill_context_parallel_size: int = 1
    enable_expert_parallel: bool = False
    enable_eplb: bool = False
    lora: bool = False
    substituted_experts: bool = False
    additional_config_is_dict: bool = True
    changed_by_others: bool = False
    """Whether what the plugin replaces is not vLLM's own any more."""
    per_token_activation: bool = False
    apply_routed_scale_to_output: bool = False
    """Whether the runner multiplies the output by routed_scaling_factor. This plugin's own layers never do."""


@dataclass(frozen=True)
class Experts:
    """What vLLM would run the experts with, on this machine."""

    name: str
    """The class of the experts, or of the error where vLLM finds none."""
    routing: str
    """The member of FlashInfer's RoutingMethodType."""


@dataclass(frozen=True)
class VllmDecision(Decision):
    """A decision with its code."""

    because: Because = Because.FUSED

    def __str__(self) -> str:
        return f"{super().__str__()} [{self.because.value}]"


@dataclass(frozen=True)
class _Setting:
    """A setting with which shared experts are not fused."""

    because: Because
    outcome: Outcome
    found: Callable[[Server], bool]


_SETTINGS = (
    _Setting(Because.ARCHITECTURE, Outcome.UNTOUCHED, lambda server: server.architecture != ARCHITECTURE),
    _Setting(Because.QUANTIZATION, Outcome.UNTOUCHED, lambda server: server.quantization != QUANTIZATION),
    _Setting(Because.PART_OF_ANOTHER, Outcome.UNTOUCHED, lambda server: server.prefix != ""),
    _Setting(Because.DRAFT, Outcome.UNTOUCHED, lambda server: server.is_draft),
    _Setting(Because.EXPERT_PARALLELISM, Outcome.KEPT_OFF, lambda server: server.enable_expert_parallel),
    _Setting(Because.LOAD_BALANCING, Outcome.KEPT_OFF, lambda server: server.enable_eplb),
    _Setting(Because.DATA_PARALLELISM, Outcome.KEPT_OFF, lambda server: server.data_parallel_size > 1),
    _Setting(Because.CONTEXT_PARALLELISM, Outcome.KEPT_OFF, lambda server: server.prefill_context_parallel_size > 1),
    _Setting(Because.DTYPE, Outcome.KEPT_OFF, lambda server: server.dtype != "bfloat16"),
    _Setting(Because.LORA, Outcome.KEPT_OFF, lambda server: server.lora),
    _Setting(Because.SUBSTITUTED_EXPERTS, Outcome.KEPT_OFF, lambda server: server.substituted_experts),
    _Setting(Because.COMPILE_CACHE, Outcome.KEPT_OFF, lambda server: not server.additional_config_is_dict),
)
"""In the order in which they are told."""


def by_settings(server: Server) -> VllmDecision | None:
    """The decision where the settings alone make it, and so every rank's; None where the machine is to be asked."""
    for one in _SETTINGS:
        if one.found(server):
            return _decision(one.because, one.outcome, server)
    return None


def decide(
    server: Server, target: Target, experts: Callable[[], Experts], layers: Callable[[], CheckpointLayers]
) -> VllmDecision:
    """Decide for one model on one machine.

    Args:
        server: vLLM's settings.
        target: the FlashInfer and GPU.
        experts: asks vLLM what it would run the experts with; called only where that matters.
        layers: reads the model's checkpoint; called only where that matters. It may raise a FlashInferCompatError.
    """
    settled = by_settings(server)
    if settled is not None:
        return settled
    if server.changed_by_others:
        return _decision(Because.CHANGED_BY_OTHERS, Outcome.KEPT_OFF, server)
    old = old_flashinfer(target)
    if old:
        return _decision(Because.OLD_FLASHINFER, Outcome.UNTOUCHED, server, old)
    found = experts()
    if found.name not in EXPERTS:
        return _decision(Because.EXPERTS, Outcome.UNTOUCHED, server, found.name)
    try:
        read = layers()
    except FlashInferCompatError as error:
        return _decision(Because.CHECKPOINT, Outcome.KEPT_OFF, server, str(error))
    refused = _by_layers(server, found, read)
    if refused is not None:
        return refused
    try:
        chosen = _planned(server, target, found, read)
    except StrategyUnavailableError as error:
        return _decision(Because.PLANNING, Outcome.KEPT_OFF, server, refusal(error))
    except FlashInferCompatError as error:
        return _decision(Because.PLANNING, Outcome.KEPT_OFF, server, str(error))
    return VllmDecision(Outcome.LIFTED, told(chosen, target), chosen)


def _decision(because: Because, outcome: Outcome, server: Server, found: object = "") -> VllmDecision:
    why = SENTENCES[because].format(**vars(server), found=found)
    return VllmDecision(outcome, why, because=because)


def _by_layers(server: Server, experts: Experts, layers: CheckpointLayers) -> VllmDecision | None:
    config = layers.config
    expected = config.routing_method.flashinfer_name
    scaled = server.apply_routed_scale_to_output and config.routed_scaling_factor != 1.0
    differs = f"vLLM routes by {experts.routing}, the checkpoint's configuration says {expected}"
    refusals: tuple[tuple[Because, bool, object], ...] = (
        (Because.NUM_SHARED_EXPERTS, config.num_shared_experts != 1, config.num_shared_experts),
        (
            Because.SHARED_FORMAT,
            layers.shared_format is not SharedExpertFormat.NVFP4,
            layers.shared_format.value,
        ),
        (Because.ROUTING, experts.routing != expected, differs),
        (Because.OUTPUT_SCALE, scaled, config.routed_scaling_factor),
    )
    for because, applies, found in refusals:
        if applies:
            return _decision(because, Outcome.KEPT_OFF, server, found)
    return None


def _planned(server: Server, target: Target, experts: Experts, layers: CheckpointLayers) -> Plan:
    routing_input, strategy = EXPERTS[experts.name]
    problem = layers.problem(
        routing_input=routing_input,
        tp_size=server.tensor_parallel_size,
        activation_scaling=ActivationScaling.PER_TOKEN if server.per_token_activation else ActivationScaling.CHECKPOINT,
    )
    output = server.apply_routed_scale_to_output
    problem = replace(
        problem,
        hidden_size=-(-problem.hidden_size // HIDDEN_MULTIPLE) * HIDDEN_MULTIPLE,
        routed_scaling=RoutedScaling.OUTPUT if output else RoutedScaling.ROUTING_WEIGHTS,
    )
    chosen = plan(problem, target, strategy=strategy, backend=Backend.TRTLLM)
    # A measured policy may say split for many tokens; fused, vLLM holds no second copy of the shared expert.
    return replace(chosen, split_from_tokens=None)
