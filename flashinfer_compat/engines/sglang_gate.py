"""Whether SGLang may fuse the shared experts of a model on FlashInfer's trtllm runners: the decision and its reason.

SGLang hands top-k to FlashInfer's routed entry, with the shared expert appended as one more id of weight 1.0. That is
this package's strategy expanded, which needs no FlashInfer keyword.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from flashinfer_compat.engines.checkpoint import CheckpointLayers
from flashinfer_compat.engines.gate import Decision, Outcome, old_flashinfer, refusal, told
from flashinfer_compat.errors import FlashInferCompatError, StrategyUnavailableError
from flashinfer_compat.features.target import Target
from flashinfer_compat.planning.decision import Plan
from flashinfer_compat.planning.plan import plan
from flashinfer_compat.vocabulary import (
    ActivationScaling,
    Backend,
    Evidence,
    RoutingInput,
    SharedExpertFormat,
    Strategy,
)

__all__ = ["QUANTIZATION", "RUNNERS", "Server", "decide", "is_asked_about", "left_alone"]

RUNNERS = ("flashinfer_trtllm", "flashinfer_trtllm_routed")
QUANTIZATION = "modelopt_fp4"
KNOWN_SGLANG = ("0.5.23",)
"""Releases whose way from the router to FlashInfer's call was read and tested."""


@dataclass(frozen=True)
class Server:
    """What SGLang has settled when it asks, by its own names."""

    sglang: str
    """Its version."""
    moe_runner_backend: str = "auto"
    quantization: str | None = None
    disable_shared_experts_fusion: bool = False
    enforce_shared_experts_fusion: bool = False
    tp_size: int = 1
    ep_size: int = 1
    moe_dp_size: int = 1
    moe_a2a_backend: str = "none"
    ep_num_redundant_experts: int = 0
    per_token_activation: bool = False
    """SGLANG_FLASHINFER_NVFP4_PER_TOKEN_ACTIVATION."""


def decide(server: Server, target: Target, layers: Callable[[], CheckpointLayers]) -> Decision:
    """Decide for one model on one machine.

    Args:
        server: SGLang's settings.
        target: the FlashInfer and GPU.
        layers: reads the model's checkpoint; called only where that matters. It may raise a FlashInferCompatError.
    """
    untouched = left_alone(server, target)
    if untouched:
        return Decision(Outcome.UNTOUCHED, untouched)
    enforced = server.enforce_shared_experts_fusion
    refused = _refused(server, enforced)
    if not refused:
        try:
            found = layers()
            refused = _refused_layers(found)
            if not refused:
                chosen = _planned(server, target, found, enforced)
                asked = "--enforce-shared-experts-fusion; " if enforced else ""
                return Decision(Outcome.LIFTED, f"{asked}{told(chosen, target)}", chosen)
        except StrategyUnavailableError as error:
            refused = refusal(error)
        except FlashInferCompatError as error:
            refused = str(error)
    flag = "--enforce-shared-experts-fusion cannot be met: " if enforced else ""
    return Decision(Outcome.KEPT_OFF, f"{flag}{refused}")


def is_asked_about(server: Server) -> bool:
    """Whether SGLang's blanket disable is what decides; an all-to-all backend's own rules come after it."""
    right = server.moe_runner_backend in RUNNERS and server.quantization == QUANTIZATION
    return right and server.moe_a2a_backend == "none"


def left_alone(server: Server, target: Target) -> str:
    """Why SGLang's answer stands whatever this machine can do; empty where it is in question."""
    if server.moe_runner_backend not in RUNNERS:
        return f"the MoE runner is {server.moe_runner_backend}, not one of {', '.join(RUNNERS)}"
    if server.quantization != QUANTIZATION:
        return f"the quantization is {server.quantization or 'not set'}, not {QUANTIZATION}"
    if server.disable_shared_experts_fusion:
        return "it is disabled already (--disable-shared-experts-fusion)"
    return old_flashinfer(target)


def _refused(server: Server, enforced: bool) -> str:
    """What would compute wrong numbers, whoever asks for it; an unknown SGLang only where the user does not insist."""
    if server.ep_size > 1 or server.moe_a2a_backend != "none":
        return (
            f"expert parallelism (ep_size {server.ep_size}, moe_a2a_backend {server.moe_a2a_backend}): "
            "every rank would add the shared expert"
        )
    if server.ep_num_redundant_experts:
        return f"{server.ep_num_redundant_experts} redundant experts have the ids behind the routed ones"
    if server.sglang not in KNOWN_SGLANG and not enforced:
        return f"SGLang {server.sglang} was not tested with it, {', '.join(KNOWN_SGLANG)} was"
    return ""


def _refused_layers(layers: CheckpointLayers) -> str:
    if layers.config.num_shared_experts != 1:
        # SGLang's loader renames the one shared MLP to one more expert.
        return f"the model has {layers.config.num_shared_experts} shared experts, SGLang fuses exactly one"
    if layers.shared_format is not SharedExpertFormat.NVFP4:
        return f"the checkpoint stores its shared experts in {layers.shared_format.value}, not NVFP4"
    return ""


def _planned(server: Server, target: Target, layers: CheckpointLayers, enforced: bool) -> Plan:
    scaling = ActivationScaling.PER_TOKEN if server.per_token_activation else ActivationScaling.CHECKPOINT
    problem = layers.problem(
        routing_input=RoutingInput.TOPK,
        tp_size=max(1, server.tp_size // server.moe_dp_size),
        activation_scaling=scaling,
    )
    # Who insists gets it against a self-check's verdict too, but never against a rule.
    least = Evidence.REFUTED if enforced else None
    return plan(problem, target, strategy=Strategy.EXPANDED, backend=Backend.TRTLLM, require=least)
