"""The checks of one call's tensors: shapes, dtypes and devices.

Values are looked at by the torch backend only, which reads them anyway; elsewhere that would wait for the GPU.
"""

from __future__ import annotations

import torch

from flashinfer_compat.backends.base import PreparedLayer
from flashinfer_compat.errors import ArgumentError, TensorError
from flashinfer_compat.inputs import (
    HiddenStates,
    LogitsRouting,
    PackedTopKRouting,
    QuantizedInput,
    Routing,
    TopKRouting,
)
from flashinfer_compat.numerics.routing import ROUTING_RULES
from flashinfer_compat.options import NO_OPTIONS, CallOptions
from flashinfer_compat.problem import Problem
from flashinfer_compat.vocabulary import ActivationScaling, Backend, Numerics

__all__ = ["check_apart", "check_call"]

_FLOATS = (torch.bfloat16, torch.float16, torch.float32)
_IDS = (torch.int32, torch.int64)
_WEIGHTS = (torch.float32, torch.bfloat16)
_BF16 = (torch.bfloat16,)
_CONVERTIBLE = (_FLOATS, _IDS, _WEIGHTS)
# Tuples: torch.compile of torch 2.6 cannot look into a frozenset.
_TAKE_FLOATS = (Backend.TORCH, Backend.TRITON)
_WITH_BIAS = tuple(method for method, rule in ROUTING_RULES.items() if rule.uses_bias)
_ALLOCATE = "Allocate it contiguous; a contiguous copy would be written instead of it."
_ALIGNMENT = 256
"""Of a workspace, in bytes. Source: FlashInfer 0.7.4, trtllm_fused_moe_kernel_launcher.cu."""


def check_call(hidden_states: HiddenStates, layer: PreparedLayer, routing: Routing, options: CallOptions) -> None:
    """Require that the arguments of `fp4_moe` fit the layer.

    Raises:
        ArgumentError: an argument is of another type, or the routing of another kind than the plan's.
        TensorError: a tensor has another dtype, shape or device.
    """
    if not isinstance(layer, PreparedLayer):
        raise ArgumentError("layer", "what prepare returned", type(layer).__name__)
    problem, device = layer.plan.problem, layer.device
    if isinstance(hidden_states, QuantizedInput):
        tokens = _check_quantized(hidden_states, layer, problem)
    else:
        if not isinstance(hidden_states, torch.Tensor):
            raise ArgumentError("hidden_states", "a torch.Tensor or a QuantizedInput", type(hidden_states).__name__)
        if hidden_states.ndim != 2 or hidden_states.shape[1] != problem.hidden_size:
            expected, found = f"shape [tokens, {problem.hidden_size}]", f"shape {list(hidden_states.shape)}"
            way_out = f"Pass hidden_states.reshape(-1, {problem.hidden_size})." if hidden_states.ndim > 2 else ""
            raise TensorError("hidden_states", expected, found, way_out)
        dtypes = _FLOATS if layer.plan.backend in _TAKE_FLOATS else _BF16
        if hidden_states.dtype not in dtypes:
            names = " or ".join(str(one).removeprefix("torch.") for one in dtypes)
            expected = f"{names} on the {layer.plan.backend.value} backend"
            way_out = "Pass hidden_states.to(torch.bfloat16)."
            raise TensorError("hidden_states", expected, str(hidden_states.dtype), way_out)
        _check_device(hidden_states, "hidden_states", device)
        tokens = hidden_states.shape[0]
    _check_routing(routing, tokens, device, problem)
    if options is not NO_OPTIONS:
        _check_options(options, tokens, hidden_states, layer)
        if not torch.compiler.is_compiling():
            check_apart(hidden_states, routing, options)


def _check_quantized(given: QuantizedInput, layer: PreparedLayer, problem: Problem) -> int:
    """The number of tokens."""
    device, size = layer.device, problem.hidden_size
    if problem.numerics is Numerics.W4A16:
        expected = "hidden_states that are not rounded, with numerics w4a16"
        raise TensorError("hidden_states", expected, "a QuantizedInput", "Plan with numerics='w4a4'.")
    if not isinstance(given.codes, torch.Tensor) or given.codes.ndim != 2:
        raise TensorError("codes", f"a tensor [tokens, {size // 2}]", _described(given.codes))
    tokens = given.codes.shape[0]
    _check(given.codes, "codes", (torch.uint8,), (tokens, size // 2), device)
    _check(given.block_scale, "block_scale", (torch.float8_e4m3fn, torch.uint8), (tokens, size // 16), device)
    for name in ("codes", "block_scale"):
        _check_contiguous(getattr(given, name), name)
    if (given.per_token_scale is None) == (problem.activation_scaling is ActivationScaling.PER_TOKEN):
        expected = "None" if given.per_token_scale is not None else f"float32 [{tokens}]"
        found, scaling = _described(given.per_token_scale), problem.activation_scaling.value
        raise TensorError("per_token_scale", f"{expected} with activation_scaling {scaling}", found)
    if given.per_token_scale is not None:
        _check(given.per_token_scale, "per_token_scale", (torch.float32,), (tokens,), device)
        _check_contiguous(given.per_token_scale, "per_token_scale")
    if given.hidden_states is not None:
        _check(given.hidden_states, "hidden_states", _BF16, (tokens, size), device)
    elif layer.adds_shared and not layer.plan.strategy.is_fused:
        expected = f"bfloat16 [{tokens}, {size}], which the shared expert beside the kernel needs"
        raise TensorError("QuantizedInput.hidden_states", expected, "None")
    return tokens


def _check_routing(routing: Routing, tokens: int, device: torch.device, problem: Problem) -> None:
    if not isinstance(routing, (LogitsRouting, TopKRouting, PackedTopKRouting)):
        raise ArgumentError("routing", "a LogitsRouting, TopKRouting or PackedTopKRouting", type(routing).__name__)
    if routing.routing_input is not problem.routing_input:
        raise ArgumentError(
            "routing",
            f"{problem.routing_input.value}, which the layer's plan was made for",
            f"{routing.routing_input.value}",
            f"Plan with routing_input={routing.routing_input.value!r}.",
        )
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


def _check_options(options: CallOptions, tokens: int, given: HiddenStates, layer: PreparedLayer) -> None:
    if not isinstance(options, CallOptions):
        raise ArgumentError("options", "a CallOptions", type(options).__name__, "Leave it out for the defaults.")
    problem, device = layer.plan.problem, layer.device
    if options.enable_pdl is not None and not isinstance(options.enable_pdl, bool):
        raise ArgumentError("options.enable_pdl", "True, False or None", repr(options.enable_pdl))
    most = options.tune_max_num_tokens
    if most is not None and (not isinstance(most, int) or isinstance(most, bool) or most < 1):
        raise ArgumentError("options.tune_max_num_tokens", "an integer of at least 1, or None", repr(most))
    if options.output is not None:
        _check_output(options.output, tokens, given, layer)
    replay = options.routing_replay_out
    if replay is not None:
        rows = max(tokens, replay.shape[0]) if isinstance(replay, torch.Tensor) and replay.ndim else tokens
        _check(replay, "options.routing_replay_out", (torch.int16,), (rows, problem.top_k), device)
        _check_contiguous(replay, "options.routing_replay_out", _ALLOCATE)
    workspace = options.workspace_buffer
    if workspace is not None:
        size = workspace.numel() if isinstance(workspace, torch.Tensor) else 0
        _check(workspace, "options.workspace_buffer", (torch.uint8,), (size,), device)
        _check_contiguous(workspace, "options.workspace_buffer", _ALLOCATE)
        if not torch.compiler.is_compiling() and workspace.data_ptr() % _ALIGNMENT:
            expected, found = f"memory aligned to {_ALIGNMENT} bytes", f"address {workspace.data_ptr():#x}"
            way_out = "Pass a slice of it that begins at a multiple; torch's GPU allocations do."
            raise TensorError("options.workspace_buffer", expected, found, way_out)
        if options.gemm1_lora_delta is not None:
            raise ArgumentError("options.workspace_buffer", "None beside gemm1_lora_delta", "a tensor")
    delta = options.gemm1_lora_delta
    if delta is not None:
        shape = (tokens, problem.top_k, 2 * problem.intermediate_size)
        _check(delta, "options.gemm1_lora_delta", _BF16, shape, device)
        _check_contiguous(delta, "options.gemm1_lora_delta")


def _check_output(output: torch.Tensor, tokens: int, given: HiddenStates, layer: PreparedLayer) -> None:
    dtype = torch.bfloat16 if isinstance(given, QuantizedInput) else given.dtype
    _check(output, "options.output", (dtype,), (tokens, layer.plan.problem.hidden_size), layer.device)
    _check_contiguous(output, "options.output", _ALLOCATE)


def check_apart(given: HiddenStates, routing: Routing, options: CallOptions) -> None:
    """Require that whatever is written shares no memory with anything else of the call, which may be read after it.

    While torch.compile traces, tensors have no memory; its operator looks when it runs.

    Raises:
        TensorError: two do.
    """
    read = {"gemm1_lora_delta": options.gemm1_lora_delta, **vars(routing)}
    read |= vars(given) if isinstance(given, QuantizedInput) else {"hidden_states": given}
    written = {name: getattr(options, name) for name in ("output", "routing_replay_out", "workspace_buffer")}
    for name, buffer in written.items():
        if buffer is None:
            continue
        for other, tensor in (read | {one: value for one, value in written.items() if one != name}).items():
            if tensor is not None and _overlap(buffer, tensor):
                found = f"memory of {other}, which may be read after it is written"
                raise TensorError(f"options.{name}", "memory of its own", found)


def _overlap(one: torch.Tensor, other: torch.Tensor) -> bool:
    if one.untyped_storage().data_ptr() != other.untyped_storage().data_ptr():
        return False
    first, second = _extent(one), _extent(other)
    return first[0] < second[1] and second[0] < first[1]


def _extent(tensor: torch.Tensor) -> tuple[int, int]:
    """First byte and the one behind the last."""
    if tensor.numel() == 0:
        return 0, 0
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return tensor.data_ptr(), tensor.data_ptr() + (last + 1) * tensor.element_size()


def _check(
    tensor: torch.Tensor, name: str, dtypes: tuple[torch.dtype, ...], shape: tuple[int, ...], device: torch.device
) -> None:
    if not isinstance(tensor, torch.Tensor):
        raise ArgumentError(name, "a torch.Tensor", type(tensor).__name__)
    if tensor.dtype not in dtypes:
        way_out = f"Pass {name}.to({dtypes[0]})." if dtypes in _CONVERTIBLE else ""
        raise TensorError(name, " or ".join(map(str, dtypes)), str(tensor.dtype), way_out)
    if tuple(tensor.shape) != shape:
        raise TensorError(name, f"shape {list(shape)}", f"shape {list(tensor.shape)}")
    _check_device(tensor, name, device)


def _check_contiguous(tensor: torch.Tensor, name: str, way_out: str = "") -> None:
    if not tensor.is_contiguous():
        way_out = way_out or f"Pass {name}.contiguous()."
        raise TensorError(name, "a contiguous tensor", f"strides {list(tensor.stride())}", way_out)


def _check_device(tensor: torch.Tensor, name: str, device: torch.device) -> None:
    if tensor.device != device:
        raise TensorError(
            name, f"a tensor on {device}", f"one on {tensor.device}", f"Move it: {name}.to({str(device)!r})."
        )


def _described(value: object) -> str:
    return f"{value.dtype} {list(value.shape)}" if isinstance(value, torch.Tensor) else repr(value)
