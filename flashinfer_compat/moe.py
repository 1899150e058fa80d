"""`fp4_moe`: one NVFP4 mixture-of-experts layer with its shared experts, the same on every FlashInfer and GPU.

    out = routed_scaling_factor * sum_k w_k R_k(x) + sum_s S_s(x)

A plan fixes the weight layout, so weights are prepared once and the call repeated: problem -> plan -> prepare ->
fp4_moe.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from flashinfer_compat.errors import ArgumentError, DependencyMissingError, TensorError

try:
    import torch
except ImportError as error:
    raise DependencyMissingError("torch", "fp4_moe") from error

from flashinfer_compat import ops
from flashinfer_compat.backends.base import PreparedLayer
from flashinfer_compat.backends.registry import backend_module
from flashinfer_compat.calls import check_call
from flashinfer_compat.inputs import HiddenStates, LogitsRouting, Routing
from flashinfer_compat.options import NO_OPTIONS, CallOptions, LayerOptions
from flashinfer_compat.outputs import UnfinalizedOutput
from flashinfer_compat.planning.decision import Plan
from flashinfer_compat.vocabulary import Backend
from flashinfer_compat.weights.scales import check_block_scales
from flashinfer_compat.weights.values import MoELayerWeights, Router

if TYPE_CHECKING:
    from flashinfer_compat.backends.trtllm.weights import TrtllmExperts

__all__ = ["fp4_moe", "fp4_moe_unfinalized", "prepare", "route_logits"]


def prepare(weights: MoELayerWeights | TrtllmExperts, plan: Plan, options: LayerOptions | None = None) -> PreparedLayer:
    """Bring a layer's weights into the layout that `plan` needs.

    The weights' tensors must not change afterwards: a backend may read some of them in place and copies of others. With
    new values in them, prepare again.

    Args:
        weights: the layer, or this rank's part of it, as `load_moe_layer` gives it; or, for a plan on the trtllm
            backend, experts that the engine has laid out itself. Those are used as they are, without a copy.
        plan: made for this layer, from `weights.problem(...)`.
        options: settings of the layer.

    Raises:
        ArgumentError: the plan was made for another layer, or an option does not go with it.
        TensorError: a tensor of laid out experts does not fit the plan, or a block scale is negative or NaN.
        BackendUnavailableError: the installed FlashInfer cannot be imported, or lacks what the plan found in it.
    """
    from flashinfer_compat.backends.trtllm.weights import TrtllmExperts

    if not isinstance(plan, Plan):
        raise ArgumentError("plan", "what plan returned", type(plan).__name__)
    options = LayerOptions() if options is None else options
    if not isinstance(options, LayerOptions):
        raise ArgumentError("options", "a LayerOptions", type(options).__name__)
    most = options.side_stream_tokens
    if not isinstance(most, int) or isinstance(most, bool) or most < 0:
        raise ArgumentError("options.side_stream_tokens", "an integer of at least 0", repr(most))
    backend = backend_module(plan.backend)
    if isinstance(weights, TrtllmExperts):
        if plan.backend is not Backend.TRTLLM:
            expected = f"MoELayerWeights, the checkpoint's layout, for the {plan.backend.value} backend"
            raise ArgumentError("weights", expected, "TrtllmExperts", "Plan with backend='trtllm'.")
        device, adds_shared = weights.gemm1_weights.device, plan.strategy.is_fused
    elif isinstance(weights, MoELayerWeights):
        _check_made_for(weights, plan)
        check_block_scales(weights)
        device, adds_shared = weights.routed.down_weight.device, weights.adds_shared
    else:
        raise ArgumentError("weights", "what load_moe_layer returned, or TrtllmExperts", type(weights).__name__)
    state = backend.prepare(weights, plan, options)
    layer = PreparedLayer(plan, backend, device, state.input_scale, adds_shared, state)
    object.__setattr__(layer, "number", ops.register(layer))
    return layer


def fp4_moe(
    hidden_states: HiddenStates, layer: PreparedLayer, routing: Routing, options: CallOptions = NO_OPTIONS
) -> torch.Tensor:
    """Run one MoE layer, routed and shared experts. Under expert parallelism the ranks' results add up to the layer's.

    It is for inference: no gradient flows through it.

    Args:
        hidden_states: bfloat16 [T, hidden_size], T >= 0, never modified; on the torch and triton backends also float16
            or float32, which triton rounds to bfloat16 first. Or a `QuantizedInput`.
        layer: from `prepare`.
        routing: `LogitsRouting`, `TopKRouting` or `PackedTopKRouting`, of the kind the plan was made for.
        options: settings of this call.

    Returns:
        A new tensor of the shape and dtype of `hidden_states` (bfloat16 for a `QuantizedInput`), or `options.output`.

    Raises:
        ArgumentError: the routing is not of the kind the plan was made for, or the installed FlashInfer cannot do what
            an option asks.
        TensorError: a tensor's dtype, shape or device does not fit, or (torch backend) its values cannot be used.
    """
    check_call(hidden_states, layer, routing, options)
    if torch.compiler.is_compiling():
        return ops.call(hidden_states, layer.number, routing, options)
    return layer.backend.run(hidden_states, layer, routing, options)


def fp4_moe_unfinalized(
    hidden_states: HiddenStates, layer: PreparedLayer, routing: Routing, options: CallOptions = NO_OPTIONS
) -> UnfinalizedOutput:
    """Run one MoE layer up to the sum over each token's experts, for engines that fuse that sum with their all-reduce.

    Arguments and errors are those of `fp4_moe`; `options.output` and `options.workspace_buffer` must be None. Not for
    torch.compile, for the number of rows is the kernel's.
    """
    check_call(hidden_states, layer, routing, options)
    for name in ("output", "workspace_buffer"):
        if getattr(options, name) is not None:
            raise ArgumentError(f"options.{name}", "None without the final sum", "a tensor")
    return layer.backend.run_unfinalized(hidden_states, layer, routing, options)


def _check_made_for(weights: MoELayerWeights, plan: Plan) -> None:
    problem = plan.problem
    made_for = weights.problem(
        routing_input=problem.routing_input,
        routed_scaling=problem.routed_scaling,
        numerics=problem.numerics,
        activation_scaling=problem.activation_scaling,
    )
    if made_for != problem:
        pairs = zip(made_for.to_dict().items(), problem.to_dict().values(), strict=True)
        wrong = [(name, right, given) for (name, right), given in pairs if right != given]
        raise ArgumentError(
            "plan",
            "a plan for this layer, " + ", ".join(f"{name}={right!r}" for name, right, _ in wrong),
            ", ".join(f"{name}={given!r}" for name, _, given in wrong),
            "Make it from weights.problem(...).",
        )


def route_logits(hidden_states: torch.Tensor, router: Router) -> LogitsRouting:
    """What a layer's own router says: float32 logits `hidden_states @ weight.T` [T, E], and its bias.

    Args:
        hidden_states: [T, hidden_size].
        router: `MoELayerWeights.router`.

    Raises:
        ArgumentError: an argument is of another type.
        TensorError: the hidden states are no floating-point [T, hidden_size] on the router's device.
    """
    if not isinstance(router, Router):
        raise ArgumentError("router", "a Router", type(router).__name__)
    if not isinstance(hidden_states, torch.Tensor):
        raise ArgumentError("hidden_states", "a torch.Tensor", type(hidden_states).__name__)
    size, device = router.weight.shape[1], router.weight.device
    if hidden_states.ndim != 2 or hidden_states.shape[1] != size or not hidden_states.is_floating_point():
        found = f"{hidden_states.dtype} {list(hidden_states.shape)}"
        raise TensorError("hidden_states", f"a floating-point tensor [tokens, {size}]", found)
    if hidden_states.device != device:
        raise TensorError("hidden_states", f"a tensor on {device}, as the router", f"one on {hidden_states.device}")
    # Autocast would compute the logits in bf16.
    with torch.autocast(hidden_states.device.type, enabled=False):
        logits = torch.nn.functional.linear(hidden_states.to(torch.float32), router.weight.to(torch.float32))
    return LogitsRouting(logits, router.bias)
