"""One MoE launch: its arguments by name, and the checks of their types, dtypes and shapes."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch

from flashinfer_compat.signatures.recorded import recorded
from flashinfer_compat.vocabulary import RoutingMethod
from standin.calls import Call, Era
from standin.faults import LaunchError, need
from standin.limits import Sizes

__all__ = ["Launch", "check_per_expert", "check_tensors", "read_launch"]

_SCALARS = ("output1_scale_scalar", "output1_scale_gate_scalar", "output2_scale_scalar")
_PARAMETERS = ("gemm1_alpha", "gemm1_beta", "gemm1_clamp_limit")
_NOT_MODELLED = ("valid_hidden_size", "valid_intermediate_size", "routing_metadata")


@dataclass(frozen=True)
class Launch:
    """The sizes of a launch; the tensors stay in `call`."""

    era: Era
    call: Call
    sizes: Sizes
    tokens: int
    hidden: int
    intermediate: int

    @property
    def rows(self) -> int:
        """Experts whose weights are here: local_num_experts + num_fused_shared_experts."""
        return self.sizes.local + self.sizes.shared

    @property
    def slots(self) -> int:
        """top_k + num_fused_shared_experts."""
        return self.sizes.top_k + self.sizes.shared

    @property
    def per_token(self) -> torch.Tensor | None:
        """float32 [T]: the activations' own scales, where there are such."""
        scale: torch.Tensor | None = self.call.get("per_token_scale")
        return scale

    @property
    def lora(self) -> torch.Tensor | None:
        """bf16 [T, top_k, 2 I]: what is added to GEMM1, up before gate, in the order before any shuffle."""
        delta: torch.Tensor | None = self.call.get("gemm1_lora_delta")
        return delta


def read_launch(era: Era, call: Call) -> Launch:
    """The launch of a call.

    Raises:
        TypeError: a number is not an integer, a flag not a bool, or a tensor not a tensor.
        NotImplementedError: an argument is given that is not modelled.
    """
    for name in _NOT_MODELLED:
        if call.get(name) is not None:
            raise NotImplementedError(f"{call.name}({name}=...) is not modelled")
    hidden_states = call.tensor("hidden_states")
    need(hidden_states.ndim == 2, "hidden_states must be 2D.")
    sizes = Sizes(
        num_experts=_integer(call, "num_experts"),
        top_k=_integer(call, "top_k"),
        n_group=_optional_integer(call, "n_group"),
        topk_group=_optional_integer(call, "topk_group"),
        shared=max(0, _optional_integer(call, "num_fused_shared_experts") or 0),
        local_offset=_integer(call, "local_expert_offset"),
        local=_integer(call, "local_num_experts"),
        method=_method(era, _integer(call, "routing_method_type")),
    )
    _check_tile(era, call)
    _check_tuning(call)
    tokens, width = hidden_states.shape
    packed = 2 if hidden_states.dtype == torch.uint8 else 1
    return Launch(era, call, sizes, tokens, width * packed, _integer(call, "intermediate_size"))


def check_tensors(launch: Launch) -> None:
    """What the wrapper and the launcher check of the tensors, and what they should have checked.

    Raises:
        LaunchError, AssertionError: a tensor is refused.
        ZeroDivisionError: there are no tokens, and the size of a scale vector is a quotient.
    """
    call, era = launch.call, launch.era
    hidden_states = call.tensor("hidden_states")
    for name, tensor in _tensors(call):
        need(tensor.device == hidden_states.device, f"{name} must be on the device of hidden_states")
        call.misread(not tensor.is_contiguous(), f"{name} is not contiguous")
    need(hidden_states.dtype == torch.uint8, "hidden_states must be packed fp4 in uint8 with NVFP4 weights.")
    for name in ("gemm1_weights", "gemm2_weights"):
        need(call.tensor(name).dtype == torch.uint8, f"{name} must be fp4 packed in uint8.")
    need(call["hidden_states_scale"] is not None, "hidden_states_scale is required for E2m1 activation")
    for name in ("hidden_states_scale", "gemm1_weights_scale", "gemm2_weights_scale"):
        need(call.tensor(name).dtype == torch.float8_e4m3fn, f"{name} must be fp8.")
    for name in _SCALARS:
        need(call[name] is not None, f"{name} is required for E2m1 activation")
    _check_input_scale(launch)
    if era.before("0.5.3"):
        _check_shapes_strictly(launch)
    else:
        _check_shapes_loosely(launch)
    if launch.sizes.shared:
        _check_shared_rows(launch)
    need(launch.hidden % 128 == 0 and launch.intermediate % 64 == 0, "no kernel for rows that fill no tile of 128")
    # FlashInfer 0.7.4, pad_trtllm_moe_weights: a smaller hidden_alignment "gives wrong results" for NVFP4.
    call.misread(launch.hidden % 256 != 0, "hidden_size is not a multiple of 256, the depth of GEMM1's tile")


def _check_input_scale(launch: Launch) -> None:
    call, era, scale = launch.call, launch.era, launch.call.tensor("hidden_states_scale")
    wanted = launch.tokens * launch.hidden // 16
    if launch.tokens == 0:
        if era.since("0.2.13"):
            raise ZeroDivisionError("the vector size of an empty hidden_states_scale: SIGFPE")
        raise LaunchError("a grid of no blocks is an invalid configuration")
    if era.before("0.5.3"):
        need(era.since("0.2.13") or scale.ndim == 1, "hidden_states_scale must be 1D.")
        need(scale.numel() == wanted, "hidden_states_scale has incorrect size")
        return
    need(scale.numel() > 0, "hidden_states_scale is empty")
    if 16 * wanted // scale.numel() != 16:
        raise LaunchError("Unsupported hidden state scale shape.")
    call.misread(scale.numel() < wanted, "hidden_states_scale is too small")


def _shapes(launch: Launch) -> Iterator[tuple[str, tuple[int, ...]]]:
    rows, hidden, intermediate = launch.rows, launch.hidden, launch.intermediate
    yield "gemm1_weights_scale", (rows, 2 * intermediate, hidden // 16)
    yield "gemm2_weights_scale", (rows, hidden, intermediate // 16)
    for name in (*_SCALARS, *_PARAMETERS):
        yield name, (rows,)
    yield "gemm1_bias", (rows, 2 * intermediate)
    yield "gemm2_bias", (rows, hidden)


def _weight_shapes(launch: Launch) -> Iterator[tuple[str, tuple[int, ...]]]:
    yield "gemm1_weights", (launch.rows, 2 * launch.intermediate, launch.hidden // 2)
    yield "gemm2_weights", (launch.rows, launch.hidden, launch.intermediate // 2)


def _dtype(name: str) -> torch.dtype:
    return torch.float8_e4m3fn if name.endswith("weights_scale") else torch.float32


def _check_shapes_strictly(launch: Launch) -> None:
    """Up to 0.5.2 every shape is checked, but for the weights' first axis."""
    call = launch.call
    for name, shape in _weight_shapes(launch):
        found = tuple(call.tensor(name).shape)
        need(len(found) == 3, f"{name} must be 3D.")
        first_checked = 1 if name == "gemm1_weights" else 2
        need(found[first_checked:] == shape[first_checked:], f"{name} must be {shape}, got {found}")
        call.misread(found[0] < shape[0] or found[1:] != shape[1:], f"{name} is {found}, not {shape}")
    for name, shape in _shapes(launch):
        if call.get(name) is None:
            continue
        tensor = call.tensor(name)
        need(tensor.dtype == _dtype(name), f"{name} must be {_dtype(name)}, got {tensor.dtype}")
        need(tuple(tensor.shape) == shape, f"{name} must be {shape}, got {tuple(tensor.shape)}")


def _check_shapes_loosely(launch: Launch) -> None:
    """From 0.5.3 only the number of gemm1's scales is looked at; everything else is read as far as it is needed."""
    call = launch.call
    count = call.tensor("gemm1_weights_scale").numel()
    logical = launch.rows * 2 * launch.intermediate * launch.hidden
    need(count > 0, "gemm1_weights_scale is empty")
    if launch.era.before("0.6.8"):
        # 32 would be MXFP4 weights, which NVFP4 activations do not go with.
        need(logical // count == 16, "unsupported weight_scale_vec_size.")
    else:
        vector = 32 if logical // count > 16 else 16
        need(count >= logical // vector, "weight scale tensor too small")
        need(vector == 16, "Only E2m1 weights are supported by block scale MoE with E2m1 activation")
    for name, shape in (*_weight_shapes(launch), *_shapes(launch)):
        if call.get(name) is None:
            continue
        tensor = call.tensor(name)
        wrong = tensor.ndim == len(shape) and tuple(tensor.shape[1:]) != shape[1:]
        wrong = wrong or tensor.numel() < torch.Size(shape).numel()
        call.misread(wrong, f"{name} is {tuple(tensor.shape)}, not {shape}")
        if not name.endswith("weights"):
            call.misread(tensor.dtype != _dtype(name), f"{name} is {tensor.dtype}, not {_dtype(name)}")


def _check_shared_rows(launch: Launch) -> None:
    call = launch.call
    for name, shape in (*_weight_shapes(launch), *_shapes(launch)):
        if call.get(name) is None or name.endswith("weights_scale"):
            continue
        tensor = call.tensor(name)
        need(tensor.ndim == len(shape), f"{name} must be {len(shape)}D.")
        need(tensor.shape[0] == shape[0], f"{name} dim 0 must be local_num_experts + num_fused_shared_experts.")
    for name in _PARAMETERS:
        check_per_expert(launch, name)


def check_per_expert(launch: Launch, name: str) -> None:
    """`check_optional_per_expert_float_tensor`.

    Raises:
        LaunchError: the tensor is there, and is not float32 [rows], contiguous.
    """
    if launch.call.get(name) is None:
        return
    tensor = launch.call.tensor(name)
    need(tensor.dtype == torch.float32, f"{name} must be float32.")
    need(tuple(tensor.shape) == (launch.rows,), f"{name} must have shape [{launch.rows}].")
    need(tensor.is_contiguous(), f"{name} must be contiguous.")


def _check_tile(era: Era, call: Call) -> None:
    if "tile_tokens_dim" not in call.arguments or era.since("0.5.0"):
        return
    tile = call["tile_tokens_dim"]
    if tile is None and era.since("0.4.1"):
        return
    if not isinstance(tile, int):
        raise TypeError(f"tile_tokens_dim must be an int, got {tile!r}")
    sizes = (8, 16, 32, 64) if era.before("0.2.10") else (8, 16, 32, 64, 128)
    need(tile in sizes, f"tile_tokens_dim must be one of {sizes}")


def _check_tuning(call: Call) -> None:
    """Neither changes what is computed; the kernels' bindings and the tuner only take what they can read."""
    if not isinstance(call.arguments.get("enable_pdl"), int | None):
        raise TypeError(f"{call.name}: enable_pdl must be a bool, got {call['enable_pdl']!r}")
    if "tune_max_num_tokens" in call.arguments:
        _integer(call, "tune_max_num_tokens")


def _tensors(call: Call) -> Iterator[tuple[str, torch.Tensor]]:
    for name, value in call.arguments.items():
        for one in value if isinstance(value, tuple) else (value,):
            if isinstance(one, torch.Tensor):
                yield name, one


def _integer(call: Call, name: str) -> int:
    value: Any = call[name]
    if not isinstance(value, int):
        raise TypeError(f"{call.name}: {name} must be an int, got {value!r}")
    return int(value)


def _optional_integer(call: Call, name: str) -> int | None:
    return None if call.get(name) is None else _integer(call, name)


def _method(era: Era, number: int) -> RoutingMethod | None:
    symbol = recorded(era.version).symbols.get("RoutingMethodType")
    assert symbol is not None
    names = {value: name for name, value in symbol.members or ()}
    return next((one for one in RoutingMethod if one.flashinfer_name == names.get(number)), None)
