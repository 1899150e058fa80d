"""What the C++ functions behind the MoE, the quantizer and the FP4 GEMM do, in terms of the stand-in's functions."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

from standin import gemm, moe, quantization
from standin.calls import Call, Era, Kernel
from standin.faults import need

__all__ = ["KERNELS"]

_FROM_LOGITS, _UNPACKED = 0, 2
"""`RoutingInputMode`, the same numbers in every release that has it."""
_4OVER6_OFF = (-1, 0)
"""`nvfp4_4over6_code`: what the environment says, which is taken to be nothing, and off."""

_MOE_NAMES = {
    "expert_indices": "topk_ids",
    "expert_weights": "topk_weights",
    "output1_scales_scalar": "output1_scale_scalar",
    "output1_scales_gate_scalar": "output1_scale_gate_scalar",
    "output2_scales_scalar": "output2_scale_scalar",
    "per_token_scales": "per_token_scale",
    "act_type": "activation_type",
}
_QUANTIZER_NAMES = {
    "self": "input",
    "globalScale": "global_scale",
    "sfVecSize": "sf_vec_size",
    "sfUseUE8M0": "sf_use_ue8m0",
    "isSfSwizzledLayout": "is_sf_swizzled_layout",
    "isSf8x4Layout": "is_sf_8x4_layout",
    "isGlobalScaleInversed": "is_global_scale_inversed",
    "enable_pdl": "enable_pdl",
}
_GEMM_NAMES = {"mat1": "a", "mat2": "b", "mat1Scale": "a_descale", "mat2Scale": "b_descale", "globalScale": "alpha"}


def _moe(era: Era, given: dict[str, Any], calls: list[Call]) -> list[torch.Tensor]:
    arguments = {_MOE_NAMES.get(name, name): value for name, value in given.items()}
    for name in ("da_routing_metadata", "da_body_workspace", "is_da_body_preparation", "query_workspace_size"):
        if arguments.pop(name, False):
            raise NotImplementedError(f"trtllm_fp4_block_scale_moe({name}=...) is not modelled")
    need(arguments.pop("nvfp4_4over6_code", 0) in _4OVER6_OFF, "nvfp4_4over6 is not modelled")
    mode = arguments.pop("routing_input_mode", None)
    ids, weights = arguments.pop("topk_ids", None), arguments.pop("topk_weights", None)
    if mode == _FROM_LOGITS or (mode is None and arguments["routing_logits"] is not None):
        need(arguments["routing_logits"] is not None, "routing_logits are required")
        name = "trtllm_fp4_block_scale_moe"
    else:
        arguments["topk_ids"] = (ids, weights) if mode == _UNPACKED else ids
        name = "trtllm_fp4_block_scale_routed_moe"
    result: list[torch.Tensor] = _call(era, name, moe.KERNELS, arguments, calls)
    if arguments["do_finalize"] or weights is None:
        return result
    rows, used, permuted = result
    need(
        (weights.shape, weights.dtype) == (used.shape, used.dtype), f"expert weights must be {used.dtype} {used.shape}"
    )
    weights.copy_(used)
    # The wrapper has the weights in its own buffer; some releases return them all the same.
    return [rows, permuted] if era.since("0.4.1") and era.before("0.6.5") else result


def _fp4_quantize(era: Era, given: dict[str, Any], calls: list[Call]) -> tuple[torch.Tensor, torch.Tensor] | None:
    need(given.get("nvfp44Over6Code", 0) in _4OVER6_OFF, "nvfp4_4over6 is not modelled")
    arguments = {_QUANTIZER_NAMES[name]: value for name, value in given.items() if name in _QUANTIZER_NAMES}
    codes, scale = _call(era, "fp4_quantize", quantization.KERNELS, arguments, calls)
    scale = scale.flatten()
    if "valueE2M1" not in given:
        # Up to 0.4.0rc3 the torch library makes the tensors itself.
        return codes, scale
    for name, result in (("valueE2M1", codes.flatten()), ("scaleFP8SF", scale)):
        output = given[name]
        need(output.dtype == torch.uint8 and output.is_contiguous(), f"{name} must be contiguous uint8")
        # 0.6.8 to 0.7.0 pad the buffer of linear scales to 16 rows.
        need(output.numel() >= result.numel(), f"{name} must hold {result.numel()} bytes, not {output.numel()}")
        output.view(-1)[: result.numel()] = result
    return None


def _fp4_gemm(era: Era, given: dict[str, Any], calls: list[Call]) -> torch.Tensor:
    for name in ("mat1Scale", "mat2Scale"):
        need(given[name].dtype == torch.uint8, f"{name} must be uint8, got {given[name].dtype}")
    arguments = {_GEMM_NAMES[name]: value for name, value in given.items() if name in _GEMM_NAMES}
    # The binding takes the second operand and its scales row by row, the Python function their transposes.
    arguments["b"], arguments["b_descale"] = arguments["b"].T, arguments["b_descale"].T
    arguments.update(out=given["out"], out_dtype=given["out"].dtype, block_size=16, backend="cutlass")
    output: torch.Tensor = _call(era, "mm_fp4", gemm.KERNELS, arguments, calls)
    return output


def _call(era: Era, name: str, kernels: Mapping[str, Kernel], arguments: dict[str, Any], calls: list[Call]) -> Any:
    given = frozenset(arguments)
    call = Call(name, arguments, given, given)
    calls.append(call)
    return kernels[name](era, call)


KERNELS: Mapping[str, Callable[[Era, dict[str, Any], list[Call]], Any]] = {
    "trtllm_fp4_block_scale_moe": _moe,
    "fp4_quantize": _fp4_quantize,
    "fp4_gemm": _fp4_gemm,
    "fp4_gemm_tactic_num": lambda era, given, calls: 1,
}
"""By the name that Python calls the binding by."""
