"""The fused part: one call of FlashInfer's logits or routed entry, set up once and repeated."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from flashinfer_compat.backends.routing import topk_from_logits
from flashinfer_compat.backends.trtllm.kernels import Kernel, Optional, find, find_member
from flashinfer_compat.backends.trtllm.weights import TrtllmExperts
from flashinfer_compat.inputs import LogitsRouting, PackedTopKRouting, Routing
from flashinfer_compat.numerics.routing import ROUTING_RULES, TopK, append_shared_experts, pack_topk, unpack_topk
from flashinfer_compat.planning.decision import KernelCall, Plan
from flashinfer_compat.vocabulary import Activation, RoutedScaling, RoutingInput

__all__ = ["FusedCall", "prepare_call"]

_BY_CALL = ("hidden_states", "hidden_states_scale")
_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


@dataclass(frozen=True)
class FusedCall:
    """Everything of the call that does not change between steps."""

    plan: Plan
    call: KernelCall
    function: Callable[..., Any]
    arguments: dict[str, Any]
    quantize: Callable[..., Any]
    quantize_arguments: dict[str, Any]
    hidden_size: int

    def __call__(self, hidden_states: torch.Tensor, routing: Routing) -> torch.Tensor:
        """bfloat16 [T, H] to bfloat16 [T, H]: the routed experts, and on a fused strategy the shared ones."""
        codes, scale = self.quantize(input=hidden_states, **self.quantize_arguments)
        scale = scale.view(torch.float8_e4m3fn)
        shape = (-1,) if self.call.flat_scale else (hidden_states.shape[0], self.hidden_size // 16)
        result = self.function(
            hidden_states=codes,
            hidden_states_scale=scale.reshape(shape),
            **self._routing(routing, hidden_states),
            **self.arguments,
        )
        # Most releases return a list, whatever their annotation says.
        output: torch.Tensor = result[0] if isinstance(result, (list, tuple)) else result
        return output

    def _routing(self, routing: Routing, hidden_states: torch.Tensor) -> dict[str, Any]:
        if self.call.topk_format:
            return {"topk_ids": self._topk(routing), "routing_bias": None}
        assert isinstance(routing, LogitsRouting)
        bias = routing.bias
        if bias is None and ROUTING_RULES[self.plan.problem.routing_method].uses_bias:
            # Every release dereferences the bias of an ungrouped DeepSeekV3.
            bias = hidden_states.new_zeros(self.plan.problem.num_experts)
        return {
            "routing_logits": routing.logits.to(_DTYPES[self.call.logits_dtype]).contiguous(),
            "routing_bias": None if bias is None else bias.to(_DTYPES[self.call.bias_dtype]),
        }

    def _topk(self, routing: Routing) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
        problem = self.plan.problem
        if isinstance(routing, PackedTopKRouting):
            if self.call.topk_format == "packed" and not self.plan.strategy.is_fused:
                return routing.packed
            topk = TopK(*unpack_topk(routing.packed))
        elif isinstance(routing, LogitsRouting):
            topk = topk_from_logits(problem, routing)
        else:
            topk = TopK(routing.ids, routing.weights)
        if self.plan.strategy.is_fused:
            topk = append_shared_experts(topk, problem.num_experts, problem.num_shared_experts)
        if self.call.topk_format == "packed":
            return pack_topk(topk.ids, topk.weights)
        return topk.ids.to(torch.int32).contiguous(), topk.weights.to(torch.float32).contiguous()


def prepare_call(plan: Plan, call: KernelCall, experts: TrtllmExperts, local_expert_offset: int) -> FusedCall:
    """Find the installed functions and fit everything that does not change between steps.

    Raises:
        BackendUnavailableError: FlashInfer cannot be imported or lacks what the plan found in its source.
        ArgumentError: an argument that matters has no parameter in this release.
    """
    problem = plan.problem
    kernel = find(call.entry_point)
    scaled_here = problem.routing_input is RoutingInput.LOGITS and not call.routed_before
    scaled_here = scaled_here and problem.routed_scaling is RoutedScaling.ROUTING_WEIGHTS
    arguments = {
        "gemm1_weights": experts.gemm1_weights,
        "gemm1_weights_scale": experts.gemm1_weights_scale,
        "gemm1_bias": Optional(None),
        "gemm1_alpha": Optional(None),
        "gemm1_beta": Optional(None),
        "gemm1_clamp_limit": Optional(None),
        "gemm2_weights": experts.gemm2_weights,
        "gemm2_weights_scale": experts.gemm2_weights_scale,
        "gemm2_bias": Optional(None),
        "output1_scale_scalar": experts.output1_scale_scalar,
        "output1_scale_gate_scalar": experts.output1_scale_gate_scalar,
        "output2_scale_scalar": experts.output2_scale_scalar,
        "num_experts": call.num_experts,
        "top_k": call.top_k,
        "n_group": call.n_group,
        "topk_group": call.topk_group,
        "intermediate_size": call.intermediate_size,
        "local_expert_offset": local_expert_offset,
        "local_num_experts": call.local_num_experts,
        # Top-k weights are final; the routed entry ignores the factor.
        "routed_scaling_factor": problem.routed_scaling_factor if scaled_here else None,
        "routing_method_type": int(find_member("RoutingMethodType", call.routing_method.flashinfer_name)),
        "do_finalize": True,
        **_release_arguments(kernel, call, problem.activation),
    }
    by_call = (*_BY_CALL, "routing_bias", "topk_ids" if call.topk_format else "routing_logits")
    quantizer = find("fp4_quantize")
    quantize_arguments = {
        "global_scale": experts.quantize_scale,
        "sf_vec_size": 16,
        "sf_use_ue8m0": False,
        "is_sf_swizzled_layout": False,
    }
    return FusedCall(
        plan,
        call,
        kernel.function,
        kernel.fit(arguments, later=by_call),
        quantizer.function,
        quantizer.fit(quantize_arguments, later=("input",)),
        problem.hidden_size,
    )


def _release_arguments(kernel: Kernel, call: KernelCall, activation: Activation) -> dict[str, Any]:
    """The arguments that only some releases have, or need."""
    arguments: dict[str, Any] = {}
    tile = kernel.symbol.parameter("tile_tokens_dim")
    if tile is not None and tile.default is None:
        # 0.5.0 to 0.5.3 require it and ignore it.
        arguments["tile_tokens_dim"] = None
    if kernel.takes("hidden_states_scale_layout"):
        arguments["hidden_states_scale_layout"] = find_member("SfLayout", "layout_linear")
    if call.num_fused_shared_experts:
        arguments["num_fused_shared_experts"] = call.num_fused_shared_experts
    # SwiGLU is every release's default, under whichever name and number.
    if activation is not Activation.SWIGLU and kernel.takes("activation_type"):
        arguments["activation_type"] = int(find_member("ActivationType", activation.flashinfer_name))
    elif activation is Activation.GEGLU:
        arguments["gated_act_type"] = int(find_member("GatedActType", "GeGlu"))
    return arguments
