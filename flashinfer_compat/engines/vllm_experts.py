"""A drop-in for vLLM's trtllm NVFP4 experts, with the shared expert fused: the same call, through this package.

The classes are vLLM's own but for the kernel call. `apply` takes what vLLM passes; the plan in the configuration says
how FlashInfer is called: native for router logits, expanded for a top-k.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from vllm.model_executor.layers.fused_moe.config import FusedMoEConfig
from vllm.model_executor.layers.fused_moe.experts.trtllm_nvfp4_moe import (
    TrtLlmNvFp4ExpertsModular,
    TrtLlmNvFp4ExpertsMonolithic,
)
from vllm.model_executor.layers.fused_moe.oracle.nvfp4 import NvFp4MoeBackend
from vllm.model_executor.layers.fused_moe.routed_experts import RoutedExperts
from vllm.model_executor.layers.fused_moe.utils import fi_moe_largest_bucket
from vllm.model_executor.layers.quantization.modelopt import ModelOptNvFp4FusedMoE
from vllm.model_executor.layers.quantization.utils.flashinfer_utils import quantize_nvfp4_per_token_input

from flashinfer_compat.backends.base import PreparedLayer
from flashinfer_compat.backends.trtllm.weights import TrtllmExperts
from flashinfer_compat.engines.vllm_gate import EXPERTS
from flashinfer_compat.errors import StrategyUnavailableError
from flashinfer_compat.inputs import LogitsRouting, QuantizedInput, TopKRouting
from flashinfer_compat.moe import fp4_moe, prepare
from flashinfer_compat.options import CallOptions
from flashinfer_compat.planning.decision import Plan
from flashinfer_compat.reasons import Reason, ReasonCode

__all__ = ["FusedModular", "FusedMonolithic", "FusedRoutedExperts", "PlannedConfig", "prepare_experts"]


@dataclass
class PlannedConfig(FusedMoEConfig):  # type: ignore[misc]
    """vLLM's description of a layer with the plan its experts run by. Its experts are the routed and the shared."""

    plan: Plan | None = None


class FusedRoutedExperts(RoutedExperts):  # type: ignore[misc]
    """vLLM's container of expert weights; its experts are this module's."""

    def _get_quant_method(self, prefix: str, quant_config: Any, moe_config: Any) -> Any:
        method = super()._get_quant_method(prefix, quant_config, moe_config)
        fused = _FUSED.get(method.experts_cls) if type(method) is ModelOptNvFp4FusedMoE else None
        if fused is None or method.nvfp4_backend is not NvFp4MoeBackend.FLASHINFER_TRTLLM:
            # The gate has asked vLLM the same; nothing is loaded yet.
            found = getattr(method, "experts_cls", type(method)).__name__
            raise _unavailable(
                ReasonCode.NOT_PREFERRED,
                f"{prefix}: vLLM runs it with {found}, the plan was made for {' or '.join(EXPERTS)}.",
            )
        method.experts_cls = fused
        return method


class FusedMonolithic(TrtLlmNvFp4ExpertsMonolithic):  # type: ignore[misc]
    """Router logits: one native call."""

    def process_weights_after_loading(self, layer: Any) -> None:
        """Prepare the call once the weights are in the kernel's layout; see `prepare_experts`."""
        super().process_weights_after_loading(layer)
        self.fused = prepare_experts(self, layer)

    def apply(
        self,
        hidden_states: torch.Tensor,
        w1: torch.Tensor,
        w2: torch.Tensor,
        router_logits: torch.Tensor,
        activation: Any,
        global_num_experts: int,
        expert_map: torch.Tensor | None,
        a1q_scale: torch.Tensor | None,
        apply_router_weight_on_input: bool,
        num_expert_group: int | None = None,
        e_score_correction_bias: torch.Tensor | None = None,
        routed_scaling_factor: float | None = None,
        topk_group: int | None = None,
        routing_replay_out: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Routed and shared experts, bfloat16 [T, H]. Arguments and their order are vLLM's.

        The layer's sizes, weights and factor were fixed by `prepare_experts`; what vLLM passes of them is the same.
        """
        _require_no_hook(self)
        options = CallOptions(
            tune_max_num_tokens=fi_moe_largest_bucket(self.moe_config), routing_replay_out=routing_replay_out
        )
        routing = LogitsRouting(router_logits, e_score_correction_bias)
        return fp4_moe(_quantized(self, hidden_states, a1q_scale), self.fused, routing, options)


class FusedModular(TrtLlmNvFp4ExpertsModular):  # type: ignore[misc]
    """A top-k: one routed call, the shared expert appended to it with weight 1.0."""

    def __init__(self, moe_config: Any, quant_config: Any, per_token_activation: bool = False) -> None:
        super().__init__(moe_config, quant_config, per_token_activation)
        # Slots of the kernel's call, by which vLLM limits the tokens of one launch.
        self.topk += moe_config.plan.problem.num_shared_experts

    def process_weights_after_loading(self, layer: Any) -> None:
        """Prepare the call once the weights are in the kernel's layout; see `prepare_experts`."""
        super().process_weights_after_loading(layer)
        self.fused = prepare_experts(self, layer)

    def apply(
        self,
        output: torch.Tensor,
        hidden_states: torch.Tensor,
        w1: torch.Tensor,
        w2: torch.Tensor,
        topk_weights: torch.Tensor,
        topk_ids: torch.Tensor,
        activation: Any,
        global_num_experts: int,
        expert_map: torch.Tensor | None,
        a1q_scale: torch.Tensor | None,
        a2_scale: torch.Tensor | None,
        workspace13: torch.Tensor,
        workspace2: torch.Tensor,
        expert_tokens_meta: Any,
        apply_router_weight_on_input: bool,
    ) -> None:
        """Routed and shared experts into `output`, bfloat16 [T, H]. Arguments and their order are vLLM's."""
        _require_no_hook(self)
        chunk: int = self._get_chunk_size()
        tune = min(fi_moe_largest_bucket(self.moe_config), chunk)
        for start in range(0, hidden_states.shape[0], chunk):
            rows = slice(start, start + chunk)
            given = _quantized(self, hidden_states[rows], None if a1q_scale is None else a1q_scale[rows])
            options = CallOptions(output=output[rows], tune_max_num_tokens=tune)
            fp4_moe(given, self.fused, TopKRouting(topk_ids[rows], topk_weights[rows]), options)


_FUSED = {TrtLlmNvFp4ExpertsMonolithic: FusedMonolithic, TrtLlmNvFp4ExpertsModular: FusedModular}


def prepare_experts(experts: Any, layer: Any) -> PreparedLayer:
    """The call of one layer, for weights that vLLM has laid out: E routed rows and the shared one behind them.

    Args:
        experts: a `FusedMonolithic` or `FusedModular`, whose configuration is a `PlannedConfig`.
        layer: vLLM's RoutedExperts, after its weights were processed.

    Raises:
        StrategyUnavailableError: vLLM scales the whole output of the layer, routes otherwise than the plan says, or
            asks for what is not passed on.
        TensorError: a tensor is not what the plan's call takes.
    """
    plan: Plan = experts.moe_config.plan
    problem = plan.problem
    if layer.routed_scaling_factor != problem.routed_scaling_factor:
        raise _unavailable(
            ReasonCode.ROUTED_SCALING,
            f"vLLM gives the experts routed_scaling_factor {layer.routed_scaling_factor}, the model's is "
            f"{problem.routed_scaling_factor}: it scales the whole output, and the shared expert with it.",
        )
    groups = (layer.num_expert_group or 1, layer.topk_group or 1)
    found = (experts.routing_method_type.name, experts.moe_config.experts_per_token, groups)
    planned = (problem.routing_method.flashinfer_name, problem.top_k, (problem.n_group, problem.topk_group))
    if found != planned:
        raise _unavailable(ReasonCode.ROUTING_METHOD, f"vLLM routes by {found}, the plan by {planned}.")
    # What vLLM leaves open for another consumer has routed slots only.
    experts.moe_config.limit_deferred_moe_finalize(0)
    scales = experts.quant_config
    given = TrtllmExperts(
        gemm1_weights=layer.w13_weight.data,
        gemm1_weights_scale=scales.w1_scale.data.view(torch.float8_e4m3fn),
        gemm2_weights=layer.w2_weight.data,
        gemm2_weights_scale=scales.w2_scale.data.view(torch.float8_e4m3fn),
        output1_scale_scalar=experts.g1_scale_c.data,
        output1_scale_gate_scalar=scales.g1_alphas.data,
        output2_scale_scalar=scales.g2_alphas.data,
        input_scale=layer.w13_input_scale.data[0],
        gemm1_alpha=experts.gemm1_alpha,
        gemm1_beta=experts.gemm1_beta,
        gemm1_clamp_limit=experts.gemm1_clamp_limit,
    )
    return prepare(given, plan)


def _quantized(experts: Any, hidden_states: torch.Tensor, block_scale: torch.Tensor | None) -> QuantizedInput:
    """As vLLM's prepare step has rounded them; or rounded here, with a scale for each token, as vLLM's experts do."""
    per_token = None
    if experts.expects_unquantized_inputs:
        hidden_states, block_scale, per_token = quantize_nvfp4_per_token_input(hidden_states)
    assert block_scale is not None
    scale = block_scale.view(torch.float8_e4m3fn).reshape(hidden_states.shape[0], -1)
    return QuantizedInput(hidden_states, scale, per_token)


def _require_no_hook(experts: Any) -> None:
    if experts.post_gemm2_hook is not None:
        raise _unavailable(ReasonCode.NOT_PREFERRED, "A post_gemm2_hook takes the routed experts' rows only.")


def _unavailable(code: ReasonCode, message: str) -> StrategyUnavailableError:
    reason = Reason(code, message, "Unset FLASHINFER_COMPAT_VLLM_FUSION.")
    return StrategyUnavailableError(str(reason), [reason.to_dict()])
