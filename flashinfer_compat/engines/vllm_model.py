"""vLLM's DeepseekV3ForCausalLM, whose MoE layers hold the shared expert as one more row of the routed experts.

vLLM's own code does everything but the kernel call: the class of a layer and the factory of its experts are vLLM's,
told in vLLM's words that the shared expert is fused. vLLM imports this module when it needs the model, never before.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any

import torch
from vllm.distributed import parallel_state
from vllm.model_executor.layers.fused_moe import layer as fused_moe_layer
from vllm.model_executor.layers.fused_moe import utils as fused_moe_utils
from vllm.model_executor.layers.fused_moe.activation import MoEActivation
from vllm.model_executor.layers.fused_moe.config import FusedMoEConfig, RoutingMethodType, get_routing_method_type
from vllm.model_executor.layers.fused_moe.expert_substitution import get_expert_substitution_spec
from vllm.model_executor.layers.quantization.modelopt import ModelOptNvFp4Config, ModelOptNvFp4FusedMoE
from vllm.model_executor.layers.quantization.utils.quant_utils import kNvfp4DynamicToken
from vllm.model_executor.models import deepseek_v2

from flashinfer_compat import machine
from flashinfer_compat.engines.agreement import facts_of, require_same
from flashinfer_compat.engines.checkpoint import read_model
from flashinfer_compat.engines.vllm_experts import FusedRoutedExperts, PlannedConfig
from flashinfer_compat.engines.vllm_gate import Experts, Server, VllmDecision, by_settings, decide
from flashinfer_compat.planning.decision import Plan

__all__ = ["DeepseekV3ForCausalLM"]

_REPLACED = {
    "resolve_layer_fused_shared_expert": fused_moe_utils.resolve_layer_fused_shared_expert,
    "FusedMoEFactory": fused_moe_layer.FusedMoEFactory,
}
"""The names in deepseek_v2 that are replaced while a fused model is built, and what they must be before."""
_HASHED = "flashinfer_compat_fusion"

_logger = logging.getLogger(__name__)


# vLLM keeps a model's class name, so this has vLLM's.
class DeepseekV3ForCausalLM(deepseek_v2.DeepseekV3ForCausalLM):  # type: ignore[misc]
    """The same model; with its shared experts fused where the gate says so."""

    def __init__(self, *, vllm_config: Any, prefix: str = "") -> None:
        """Decide, make sure that all ranks have decided alike, and build.

        Raises:
            RankDisagreementError: the ranks differ.
        """
        decision = _agreed(vllm_config, prefix)
        if decision.plan is not None:
            # Part of the key of vLLM's compile cache: a graph without the shared MLP must not be taken for one with it.
            vllm_config.additional_config = {**vllm_config.additional_config, _HASHED: decision.plan.strategy.value}
        with nullcontext() if decision.plan is None else _fusing(decision.plan):
            super().__init__(vllm_config=vllm_config, prefix=prefix)
        self.fuses_shared_expert = decision.plan is not None

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> set[str]:
        """Load a checkpoint's tensors; a fused shared expert's go to the row behind the routed experts'."""
        if self.fuses_shared_expert:
            # vLLM's own way to split shared experts cannot take scalars, which ModelOpt's global and input scales are.
            row = f"mlp.experts.{self.config.n_routed_experts}."
            weights = ((name.replace("mlp.shared_experts.", row), tensor) for name, tensor in weights)
        loaded: set[str] = super().load_weights(weights)
        return loaded


@contextmanager
def _fusing(plan: Plan) -> Iterator[None]:
    """While a model is built in it, its layers have no shared MLP and one more expert each."""
    replacements = {
        "resolve_layer_fused_shared_expert": lambda quant_config, prefix: True,
        "FusedMoEFactory": partial(_experts, plan),
    }
    for name, replacement in replacements.items():
        setattr(deepseek_v2, name, replacement)
    try:
        yield
    finally:
        for name, original in _REPLACED.items():
            setattr(deepseek_v2, name, original)


def _experts(plan: Plan, **arguments: Any) -> Any:
    """What DeepseekV2MoE asks of the factory, with the shared expert as an ordinary one whom the router never chooses.

    vLLM's own fields for fused shared experts would allocate AITER's buffers and too few input scales.
    """
    arguments["num_experts"] += plan.problem.num_shared_experts
    arguments.update(
        n_shared_experts=None,
        fuse_shared_experts=False,
        # The factor goes into the routing weights, so that it does not scale the shared expert.
        apply_routed_scale_to_output=False,
        moe_config_cls=partial(PlannedConfig, plan=plan),
        routed_experts_cls=FusedRoutedExperts,
    )
    return _REPLACED["FusedMoEFactory"](**arguments)


def _agreed(vllm_config: Any, prefix: str) -> VllmDecision:
    server = _server(vllm_config, prefix)
    settled = by_settings(server)
    decision = settled or decide(
        server,
        machine.this_machine(),
        lambda: _experts_of(vllm_config),
        lambda: read_model(vllm_config.model_config.model, vllm_config.model_config.revision),
    )
    if _is_first():
        # A warning: vLLM shows nothing less of other loggers.
        _logger.warning("flashinfer_compat: %s", decision)
    if settled is None:
        facts = {"fusion": decision.outcome.value, "because": decision.because.value}
        if decision.plan is not None:
            facts.update(facts_of(decision.plan))
        require_same(facts, _world())
    return decision


def _server(vllm_config: Any, prefix: str) -> Server:
    model, parallel, quantization = vllm_config.model_config, vllm_config.parallel_config, vllm_config.quant_config
    activation = getattr(quantization, "moe_activation_override", None)
    return Server(
        architecture=(model.hf_config.architectures or [""])[0],
        # The name alone is not enough: another plugin may have registered its own class for it.
        quantization=model.quantization if type(quantization) is ModelOptNvFp4Config else None,
        prefix=prefix,
        is_draft=model.runner_type == "draft",
        dtype=str(model.dtype).removeprefix("torch."),
        tensor_parallel_size=parallel.tensor_parallel_size,
        data_parallel_size=parallel.data_parallel_size,
        prefill_context_parallel_size=parallel.prefill_context_parallel_size,
        enable_expert_parallel=parallel.enable_expert_parallel,
        enable_eplb=parallel.enable_eplb,
        lora=vllm_config.lora_config is not None,
        substituted_experts=get_expert_substitution_spec(model) is not None,
        additional_config_is_dict=isinstance(vllm_config.additional_config, dict),
        changed_by_others=any(getattr(deepseek_v2, name) is not own for name, own in _REPLACED.items()),
        per_token_activation=activation == kNvfp4DynamicToken,
    )


def _experts_of(vllm_config: Any) -> Experts:
    """What vLLM's own selection gives for a layer as DeepseekV2MoE describes it."""
    config, scheduler = vllm_config.model_config.hf_config, vllm_config.scheduler_config
    routing: RoutingMethodType = get_routing_method_type(
        scoring_func=getattr(config, "scoring_func", "softmax"),
        top_k=config.num_experts_per_tok,
        renormalize=config.norm_topk_prob,
        num_expert_group=getattr(config, "n_group", 1),
        has_e_score_bias=getattr(config, "topk_method", None) == "noaux_tc",
    )
    num_experts = config.n_routed_experts + (config.n_shared_experts or 0)
    layer = FusedMoEConfig(
        num_experts=num_experts,
        experts_per_token=config.num_experts_per_tok,
        hidden_dim=config.hidden_size,
        intermediate_size=config.moe_intermediate_size,
        num_local_experts=num_experts,
        num_logical_experts=num_experts,
        activation=MoEActivation.SILU,
        device=vllm_config.device_config.device,
        routing_method=routing,
        moe_parallel_config=fused_moe_layer.make_parallel_config(None, None, None, False, vllm_config.parallel_config),
        in_dtype=vllm_config.model_config.dtype,
        router_logits_dtype=deepseek_v2._get_moe_router_dtype(config),
        moe_backend=vllm_config.kernel_config.moe_backend,
        max_num_tokens=scheduler.max_num_batched_tokens,
    )
    try:
        name = ModelOptNvFp4FusedMoE(vllm_config.quant_config, layer).experts_cls.__name__
    except (NotImplementedError, ValueError) as error:
        # vLLM will say so itself when it builds the layer.
        name = f"{type(error).__name__}: {error}"
    return Experts(name, routing.name)


def _world() -> Any:
    """All ranks' CPU group; None where vLLM has made none."""
    world = parallel_state._WORLD
    return None if world is None else world.cpu_group


def _is_first() -> bool:
    world = parallel_state._WORLD
    return world is None or world.rank == 0
