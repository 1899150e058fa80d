"""One stable call for NVFP4 mixture-of-experts with shared experts, over every FlashInfer release.

Importing this package loads neither torch nor flashinfer; each name below is loaded when it is first used.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from flashinfer_compat.adoption import SharedFusion, fused_shared_kwargs, supports_fp4_shared
    from flashinfer_compat.backends.base import PreparedLayer
    from flashinfer_compat.backends.trtllm.weights import TrtllmExperts
    from flashinfer_compat.errors import (
        ArgumentError,
        BackendUnavailableError,
        CheckpointError,
        DependencyMissingError,
        ExpertParallelismError,
        FlashInferCompatError,
        StrategyUnavailableError,
        TensorError,
        UnknownNameError,
        UnknownReleaseError,
    )
    from flashinfer_compat.features.target import Target
    from flashinfer_compat.inputs import LogitsRouting, PackedTopKRouting, QuantizedInput, TopKRouting
    from flashinfer_compat.machine import plan, this_machine
    from flashinfer_compat.moe import fp4_moe, fp4_moe_unfinalized, prepare, route_logits
    from flashinfer_compat.options import CallOptions, LayerOptions
    from flashinfer_compat.outputs import UnfinalizedOutput
    from flashinfer_compat.planning.decision import Plan, Rejection
    from flashinfer_compat.problem import Problem
    from flashinfer_compat.reasons import Reason, ReasonCode
    from flashinfer_compat.report import Capabilities, capabilities
    from flashinfer_compat.vocabulary import (
        Activation,
        ActivationScaling,
        Backend,
        Evidence,
        Numerics,
        QuantizerArithmetic,
        RoutedScaling,
        RoutingInput,
        RoutingMethod,
        SharedExpertFormat,
        SharedExpertPlacement,
        Strategy,
    )
    from flashinfer_compat.weights.checkpoint import load_moe_layer
    from flashinfer_compat.weights.values import MoELayerWeights

__version__ = "0.1.0.dev0"

_HOMES = {
    "adoption": ("SharedFusion", "fused_shared_kwargs", "supports_fp4_shared"),
    "backends.base": ("PreparedLayer",),
    "backends.trtllm.weights": ("TrtllmExperts",),
    "errors": (
        "ArgumentError",
        "BackendUnavailableError",
        "CheckpointError",
        "DependencyMissingError",
        "ExpertParallelismError",
        "FlashInferCompatError",
        "StrategyUnavailableError",
        "TensorError",
        "UnknownNameError",
        "UnknownReleaseError",
    ),
    "features.target": ("Target",),
    "inputs": ("LogitsRouting", "PackedTopKRouting", "QuantizedInput", "TopKRouting"),
    "machine": ("plan", "this_machine"),
    "moe": ("fp4_moe", "fp4_moe_unfinalized", "prepare", "route_logits"),
    "options": ("CallOptions", "LayerOptions"),
    "outputs": ("UnfinalizedOutput",),
    "planning.decision": ("Plan", "Rejection"),
    "problem": ("Problem",),
    "reasons": ("Reason", "ReasonCode"),
    "report": ("Capabilities", "capabilities"),
    "vocabulary": (
        "Activation",
        "ActivationScaling",
        "Backend",
        "Evidence",
        "Numerics",
        "QuantizerArithmetic",
        "RoutedScaling",
        "RoutingInput",
        "RoutingMethod",
        "SharedExpertFormat",
        "SharedExpertPlacement",
        "Strategy",
    ),
    "weights.checkpoint": ("load_moe_layer",),
    "weights.values": ("MoELayerWeights",),
}
_HOME = {name: module for module, names in _HOMES.items() for name in names}

__all__ = [
    "Activation",
    "ActivationScaling",
    "ArgumentError",
    "Backend",
    "BackendUnavailableError",
    "CallOptions",
    "Capabilities",
    "CheckpointError",
    "DependencyMissingError",
    "Evidence",
    "ExpertParallelismError",
    "FlashInferCompatError",
    "LayerOptions",
    "LogitsRouting",
    "MoELayerWeights",
    "Numerics",
    "PackedTopKRouting",
    "Plan",
    "PreparedLayer",
    "Problem",
    "QuantizedInput",
    "QuantizerArithmetic",
    "Reason",
    "ReasonCode",
    "Rejection",
    "RoutedScaling",
    "RoutingInput",
    "RoutingMethod",
    "SharedExpertFormat",
    "SharedExpertPlacement",
    "SharedFusion",
    "Strategy",
    "StrategyUnavailableError",
    "Target",
    "TensorError",
    "TopKRouting",
    "TrtllmExperts",
    "UnfinalizedOutput",
    "UnknownNameError",
    "UnknownReleaseError",
    "__version__",
    "capabilities",
    "fp4_moe",
    "fp4_moe_unfinalized",
    "fused_shared_kwargs",
    "load_moe_layer",
    "plan",
    "prepare",
    "route_logits",
    "supports_fp4_shared",
    "this_machine",
]


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = globals()[name] = getattr(importlib.import_module(f"{__name__}.{_HOME[name]}"), name)
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
