"""The fused part: one call of FlashInfer's logits or routed entry, set up once and repeated."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch.nn import functional

from flashinfer_compat.backends.routing import topk_of
from flashinfer_compat.backends.trtllm.kernels import Kernel, Optional, find, find_member
from flashinfer_compat.backends.trtllm.quantizer import Quantizer, prepare_quantizer
from flashinfer_compat.backends.trtllm.weights import TrtllmExperts
from flashinfer_compat.errors import ArgumentError, TensorError
from flashinfer_compat.inputs import HiddenStates, LogitsRouting, QuantizedInput, Routing
from flashinfer_compat.numerics.routing import ROUTING_RULES, TopK, append_shared_experts, pack_topk
from flashinfer_compat.options import NO_OPTIONS, CallOptions, LayerOptions
from flashinfer_compat.outputs import UnfinalizedOutput
from flashinfer_compat.planning.decision import KernelCall, Plan
from flashinfer_compat.vocabulary import Activation, RoutedScaling, RoutingInput

__all__ = ["FusedCall", "prepare_call"]

_BY_CALL = ("hidden_states", "hidden_states_scale", "routing_bias", "do_finalize")
_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
_PASSED_ON = ("enable_pdl", "tune_max_num_tokens", "workspace_buffer")
"""Options that are the kernel's own argument and need nothing else."""


@dataclass(frozen=True)
class FusedCall:
    """Everything of the call that does not change between steps."""

    plan: Plan
    call: KernelCall
    kernel: Kernel
    arguments: dict[str, Any]
    quantize: Quantizer
    hidden_size: int
    gate_up_alike: bool
    shared: TopK | None
    """[1, S]: the slots of appended shared experts; None where none are appended."""

    def __call__(self, hidden_states: HiddenStates, routing: Routing, options: CallOptions) -> torch.Tensor:
        """bfloat16 [T, H]: the routed experts, and on a fused strategy the shared ones."""
        result = self._launch(hidden_states, routing, options, True)
        # Most releases return a list, whatever their annotation says.
        output: torch.Tensor = result[0] if isinstance(result, (list, tuple)) else result
        if options.output is None or output is options.output:
            return output
        return options.output if self.kernel.takes("output") else options.output.copy_(output)

    def unfinalized(
        self, hidden_states: HiddenStates, routing: Routing, options: CallOptions
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """The fields of `UnfinalizedOutput` but the last."""
        rows, weights, index = self._launch(hidden_states, routing, options, False)[:3]
        slots = self.call.top_k + self.call.num_fused_shared_experts
        if self.call.mislabels_weights and weights.dtype != torch.bfloat16:
            weights = weights.view(torch.bfloat16).flatten()[: weights.numel()]
        return rows, weights.reshape(-1, slots), index.reshape(-1, slots)

    def nothing(self, like: torch.Tensor, *, shared: bool) -> UnfinalizedOutput:
        """What no tokens give; the kernel does not take them."""
        slots = self.call.top_k + self.call.num_fused_shared_experts
        rows = like.new_empty((0, self.hidden_size), dtype=torch.bfloat16)
        weights = like.new_empty((0, slots), dtype=torch.bfloat16)
        return UnfinalizedOutput(rows, weights, weights.to(torch.int32), rows if shared else None)

    def _launch(self, hidden_states: HiddenStates, routing: Routing, options: CallOptions, finalize: bool) -> Any:
        if isinstance(hidden_states, QuantizedInput):
            codes, scale = hidden_states.codes, hidden_states.block_scale
            per_token = hidden_states.per_token_scale
        else:
            codes, scale, per_token = self.quantize(hidden_states)
        if scale.dtype != torch.float8_e4m3fn:
            scale = scale.view(torch.float8_e4m3fn)
        shape = (-1,) if self.call.flat_scale else (codes.shape[0], self.hidden_size // 16)
        # One dictionary; this runs at every step.
        arguments = self.arguments | self._routing(routing, codes, options)
        arguments["hidden_states"] = codes
        arguments["hidden_states_scale"] = scale.reshape(shape)
        arguments["do_finalize"] = finalize
        if per_token is not None:
            arguments["per_token_scale"] = per_token
        if options is not NO_OPTIONS:
            self._set_options(arguments, options, finalize)
        return self.kernel.function(**arguments)

    def _set_options(self, arguments: dict[str, Any], options: CallOptions, finalize: bool) -> None:
        for name in _PASSED_ON:
            value = getattr(options, name)
            if value is not None:
                self.kernel.require(name, value)
                arguments[name] = value
        if options.output is not None and finalize and self.kernel.takes("output"):
            arguments["output"] = options.output
        if options.routing_replay_out is not None and not self.call.topk_format:
            self._require_replay(options.routing_replay_out)
            arguments["routing_replay_out"] = options.routing_replay_out
        if options.gemm1_lora_delta is not None:
            arguments["gemm1_lora_delta"] = self._lora_delta(options.gemm1_lora_delta, arguments)

    def _require_replay(self, buffer: torch.Tensor) -> None:
        self.kernel.require("routing_replay_out", buffer)
        if not self.call.writes_replay:
            raise ArgumentError(
                "options.routing_replay_out",
                "None: this FlashInfer release does not write it here, or refuses it beside fused shared experts",
                f"a tensor {list(buffer.shape)}",
                "See docs/launcher-limits.md; with top-k passed in, every release can.",
            )

    def _lora_delta(self, delta: torch.Tensor, arguments: dict[str, Any]) -> torch.Tensor:
        self.kernel.require("gemm1_lora_delta", delta)
        if not self.gate_up_alike:
            expected = "None: gate and up have different global scales, and the kernel divides by gate's"
            raise ArgumentError("options.gemm1_lora_delta", expected, f"a tensor {list(delta.shape)}")
        if arguments.get("gemm1_bias") is not None:
            raise ArgumentError("options.gemm1_lora_delta", "None beside a gemm1_bias", f"a tensor {list(delta.shape)}")
        slots = self.call.top_k - delta.shape[1]
        # Appended shared experts have slots of their own.
        return functional.pad(delta, (0, 0, 0, slots)) if slots else delta

    def _routing(self, routing: Routing, like: torch.Tensor, options: CallOptions) -> dict[str, Any]:
        if self.call.topk_format:
            return {"topk_ids": self._topk(routing, options.routing_replay_out), "routing_bias": None}
        assert isinstance(routing, LogitsRouting)
        bias = routing.bias
        if bias is None and ROUTING_RULES[self.plan.problem.routing_method].uses_bias:
            # Every release dereferences the bias of an ungrouped DeepSeekV3.
            bias = like.new_zeros(self.plan.problem.num_experts, dtype=torch.float32)
        return {
            "routing_logits": routing.logits.to(_DTYPES[self.call.logits_dtype]).contiguous(),
            "routing_bias": None if bias is None else bias.to(_DTYPES[self.call.bias_dtype]).contiguous(),
        }

    def _topk(self, routing: Routing, replay: torch.Tensor | None) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
        topk = topk_of(self.plan.problem, routing)
        if replay is not None:
            replay[: topk.ids.shape[0]].copy_(topk.ids)
        ids, weights = topk.ids.to(torch.int32), topk.weights
        if self.shared is not None:
            ids = torch.cat((ids, self.shared.ids.expand(ids.shape[0], -1)), 1)
            weights = torch.cat((weights.to(torch.float32), self.shared.weights.expand(ids.shape[0], -1)), 1)
        if self.call.topk_format == "packed":
            return pack_topk(ids, weights)
        return ids.contiguous(), weights.to(torch.float32).contiguous()


def prepare_call(plan: Plan, call: KernelCall, experts: TrtllmExperts, options: LayerOptions) -> FusedCall:
    """Find the installed functions and fit everything that does not change between steps.

    Raises:
        BackendUnavailableError: FlashInfer cannot be imported or lacks what the plan found in its source.
        ArgumentError: an argument that matters has no parameter in this release.
        TensorError: 4over6 rounding with one of the experts' tensors that it does not go with.
    """
    problem = plan.problem
    if options.nvfp4_4over6 is not None and not call.per_token_scale:
        raise ArgumentError(
            "options.nvfp4_4over6",
            "None with activation_scaling checkpoint",
            repr(options.nvfp4_4over6),
            "Plan with activation_scaling='per_token'.",
        )
    if call.per_token_scale and (experts.gemm1_bias is not None or experts.gemm2_bias is not None):
        # Whether the kernel adds a bias before or after the token's scale was not found in any source.
        raise TensorError("weights.gemm1_bias", "no biases with activation_scaling per_token", "a bias")
    kernel = find(call.entry_point)
    scaled_here = problem.routing_input is RoutingInput.LOGITS and not call.routed_before
    scaled_here = scaled_here and problem.routed_scaling is RoutedScaling.ROUTING_WEIGHTS
    arguments = {
        "gemm1_weights": experts.gemm1_weights,
        "gemm1_weights_scale": experts.gemm1_weights_scale,
        "gemm1_bias": Optional(experts.gemm1_bias),
        "gemm1_alpha": Optional(experts.gemm1_alpha),
        "gemm1_beta": Optional(experts.gemm1_beta),
        "gemm1_clamp_limit": Optional(experts.gemm1_clamp_limit),
        "gemm2_weights": experts.gemm2_weights,
        "gemm2_weights_scale": experts.gemm2_weights_scale,
        "gemm2_bias": Optional(experts.gemm2_bias),
        "output1_scale_scalar": experts.output1_scale_scalar,
        "output1_scale_gate_scalar": experts.output1_scale_gate_scalar,
        "output2_scale_scalar": experts.output2_scale_scalar,
        "num_experts": call.num_experts,
        "top_k": call.top_k,
        "n_group": call.n_group,
        "topk_group": call.topk_group,
        "intermediate_size": call.intermediate_size,
        "local_expert_offset": experts.local_expert_offset,
        "local_num_experts": call.local_num_experts,
        # Top-k weights are final; the routed entry ignores the factor.
        "routed_scaling_factor": problem.routed_scaling_factor if scaled_here else None,
        "routing_method_type": int(find_member("RoutingMethodType", call.routing_method.flashinfer_name)),
        # None: off, not what an environment variable says.
        "nvfp4_4over6": Optional(options.nvfp4_4over6),
        **_release_arguments(kernel, call, problem.activation),
    }
    by_call = (*_BY_CALL, "topk_ids" if call.topk_format else "routing_logits")
    return FusedCall(
        plan,
        call,
        kernel,
        kernel.fit(arguments, later=by_call),
        prepare_quantizer(call, experts.quantize_scale, options),
        problem.hidden_size,
        experts.gate_up_alike,
        _shared_slots(plan, experts.gemm1_weights.device) if call.topk_format and plan.strategy.is_fused else None,
    )


def _shared_slots(plan: Plan, device: torch.device) -> TopK:
    """Made once: a call only puts them behind each token's choice."""
    nothing = TopK(torch.empty(1, 0, dtype=torch.int32, device=device), torch.empty(1, 0, device=device))
    return append_shared_experts(nothing, plan.problem.num_experts, plan.problem.num_shared_experts)


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
