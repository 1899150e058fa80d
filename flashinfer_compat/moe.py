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
from flashinfer_compat.inputs import LogitsRouting, PackedTopKRouting, Routing, TopKRouting
from flashinfer_compat.numerics.routing import ROUTING_RULES
from flashinfer_compat.planning.decision import Plan
from flashinfer_compat.problem import Problem
from flashinfer_compat.weights.values import MoELayerWeights

if TYPE_CHECKING:
    from flashinfer_compat.weights.values import Router

__all__ = ["fp4_moe", "prepare", "route_logits"]

_FLOATS = (torch.bfloat16, torch.float16, torch.float32)
_IDS = (torch.int32, torch.int64)
_WEIGHTS = (torch.float32, torch.bfloat16)
_WITH_BIAS = frozenset(method for method, rule in ROUTING_RULES.items() if rule.uses_bias)


def prepare(weights: MoELayerWeights, plan: Plan) -> PreparedLayer:
    """Bring a layer's weights into the layout that `plan` needs.

    Args:
        weights: the layer, as `load_moe_layer` gives it.
        plan: made for this layer, from `weights.problem(...)`.

    Raises:
        ArgumentError: the plan was made for another layer.
        BackendUnavailableError: the installed FlashInfer cannot be imported, or lacks what the plan found in it.
    """
    if not isinstance(weights, MoELayerWeights):
        raise ArgumentError("weights", "what load_moe_layer returned", type(weights).__name__)
    if not isinstance(plan, Plan):
        raise ArgumentError("plan", "what plan returned", type(plan).__name__)
    problem = plan.problem
    made_for = weights.problem(
        routing_input=problem.routing_input,
        routed_scaling=problem.routed_scaling,
        numerics=problem.numerics,
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
    backend = backend_module(plan.backend)
    layer = PreparedLayer(plan, backend, weights.routed.down_weight.device, backend.prepare(weights, plan))
    object.__setattr__(layer, "number", ops.register(layer))
    return layer


def fp4_moe(hidden_states: torch.Tensor, layer: PreparedLayer, routing: Routing) -> torch.Tensor:
    """Run one MoE layer, routed and shared experts.

    Args:
        hidden_states: bfloat16, float16 or float32 [T, hidden_size], T >= 0; never modified.
        layer: from `prepare`.
        routing: `LogitsRouting`, `TopKRouting` or `PackedTopKRouting`, of the kind the plan was made for.

    Returns:
        A new tensor of the shape and dtype of `hidden_states`.

    Raises:
        ArgumentError: the routing is not of the kind the plan was made for.
        TensorError: a tensor's dtype, shape or device does not fit, or (torch backend) its values cannot be used.
    """
    if not isinstance(layer, PreparedLayer):
        raise ArgumentError("layer", "what prepare returned", type(layer).__name__)
    problem = layer.plan.problem
    _check_hidden_states(hidden_states, layer, problem)
    _check_routing(routing, hidden_states, problem)
    if torch.compiler.is_compiling():
        return ops.call(hidden_states, layer.number, routing)
    return layer.backend.run(hidden_states, layer, routing)


def route_logits(hidden_states: torch.Tensor, router: Router) -> LogitsRouting:
    """What a layer's own router says: float32 logits `hidden_states @ weight.T` [T, E], and its bias.

    Args:
        hidden_states: [T, hidden_size].
        router: `MoELayerWeights.router`.
    """
    # Autocast would compute the logits in bf16.
    with torch.autocast(hidden_states.device.type, enabled=False):
        logits = torch.nn.functional.linear(hidden_states.to(torch.float32), router.weight.to(torch.float32))
    return LogitsRouting(logits, router.bias)


def _check_hidden_states(hidden_states: torch.Tensor, layer: PreparedLayer, problem: Problem) -> None:
    if not isinstance(hidden_states, torch.Tensor):
        raise ArgumentError("hidden_states", "a torch.Tensor", type(hidden_states).__name__)
    if hidden_states.ndim != 2 or hidden_states.shape[1] != problem.hidden_size:
        raise TensorError(
            "hidden_states", f"shape [tokens, {problem.hidden_size}]", f"shape {list(hidden_states.shape)}"
        )
    if hidden_states.dtype not in _FLOATS:
        raise TensorError("hidden_states", "bfloat16, float16 or float32", str(hidden_states.dtype))
    _check_device(hidden_states, "hidden_states", layer.device)


def _check_routing(routing: Routing, hidden_states: torch.Tensor, problem: Problem) -> None:
    if not isinstance(routing, (LogitsRouting, TopKRouting, PackedTopKRouting)):
        raise ArgumentError("routing", "a LogitsRouting, TopKRouting or PackedTopKRouting", type(routing).__name__)
    if routing.routing_input is not problem.routing_input:
        raise ArgumentError(
            "routing",
            f"{problem.routing_input.value}, which the layer's plan was made for",
            f"{routing.routing_input.value}",
            f"Plan with routing_input={routing.routing_input.value!r}.",
        )
    tokens, device = hidden_states.shape[0], hidden_states.device
    if isinstance(routing, LogitsRouting):
        _check(routing.logits, "logits", _FLOATS, (tokens, problem.num_experts), device)
        if routing.bias is not None:
            if problem.routing_method not in _WITH_BIAS:
                expected = f"None with routing_method {problem.routing_method.value}, which has no bias"
                raise TensorError("bias", expected, "a tensor")
            _check(routing.bias, "bias", _FLOATS, (problem.num_experts,), device)
    elif isinstance(routing, TopKRouting):
        _check(routing.ids, "topk_ids", _IDS, (tokens, problem.top_k), device)
        _check(routing.weights, "topk_weights", _WEIGHTS, (tokens, problem.top_k), device)
    else:
        _check(routing.packed, "packed", (torch.int32,), (tokens, problem.top_k), device)


def _check(
    tensor: torch.Tensor, name: str, dtypes: tuple[torch.dtype, ...], shape: tuple[int, ...], device: torch.device
) -> None:
    if not isinstance(tensor, torch.Tensor):
        raise ArgumentError(name, "a torch.Tensor", type(tensor).__name__)
    if tensor.dtype not in dtypes:
        raise TensorError(name, " or ".join(map(str, dtypes)), str(tensor.dtype))
    if tuple(tensor.shape) != shape:
        raise TensorError(name, f"shape {list(shape)}", f"shape {list(tensor.shape)}")
    _check_device(tensor, name, device)


def _check_device(tensor: torch.Tensor, name: str, device: torch.device) -> None:
    if tensor.device != device:
        raise TensorError(
            name, f"a tensor on {device}", f"one on {tensor.device}", f"Move it: {name}.to({str(device)!r})."
        )
