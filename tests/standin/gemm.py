"""`mm_fp4`, the dense NVFP4 GEMM, on an SM100."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from flashinfer_compat.numerics import Nvfp4Tensor, deinterleave_block_scale, dequantize_nvfp4
from standin.calls import Call, Era, Kernel
from standin.faults import BackendSupportedError, need

__all__ = ["KERNELS"]

_BYTES = (torch.uint8,)
_SCALES = (torch.uint8, torch.float8_e4m3fn)
_SINCE = {
    "cudnn": "0.2.9",
    "trtllm": "0.2.9",
    "cutlass": "0.2.9",
    "auto": "0.6.0",
    "cute-dsl": "0.6.5",
    "cutedsl_low_latency": "0.7.0",
    "cake": "0.7.2",
}
"""Backends an SM100 can run; b12x (0.6.9) is for SM120."""


def _mm_fp4(era: Era, call: Call) -> torch.Tensor:
    a, b = call.tensor("a"), call.tensor("b")
    a_scale, b_scale = call.tensor("a_descale"), call.tensor("b_descale")
    backend = _backend(era, call)
    _check_operands(call, a, b, a_scale, b_scale)
    alpha = _alpha(era, call, a, backend)
    out_dtype = call["out_dtype"]
    if out_dtype not in (torch.bfloat16, torch.float16):
        raise ValueError(f"Unsupported output dtype: {out_dtype}.")
    if call.get("use_nvfp4") is False:
        raise NotImplementedError("MXFP4 is not modelled")
    if call["block_size"] != 16:
        raise ValueError("nvfp4 only supports block_size = 16.")
    if call.get("use_8x4_sf_layout") and backend != "trtllm":
        raise ValueError("Only TRTLLM FP4 GEMM supports 8x4 scale factor layout.")
    if backend in ("trtllm", "cake") or call.get("batch_invariant"):
        raise NotImplementedError(f"mm_fp4 with backend {backend!r} or batch_invariant is not modelled")
    rows, depth, columns = a.shape[0], 2 * a.shape[1], b.shape[1]
    _check_shape(era, backend, rows, depth, columns)
    if backend == "cutlass":
        need(alpha is not None, "globalScale must be a tensor")
    out = call.get("out")
    if out is None:
        out = torch.empty(rows, columns, dtype=out_dtype, device=a.device)
    need(tuple(out.shape) == (rows, columns), "out shape mismatch")
    padded = (-(-depth // 64) * 4, -(-rows // 128) * 128, -(-columns // 128) * 128)
    call.misread(a_scale.numel() != padded[0] * padded[1], "a_descale is not of the 128x4 layout's size")
    call.misread(b_scale.numel() != padded[0] * padded[2], "b_descale is not of the 128x4 layout's size")
    call.misread(backend not in _SINCE, f"no backend is called {backend!r}: nothing runs")
    if call.garbage:
        found: torch.Tensor = out.fill_(torch.nan)
        return found
    left = _dequantized(a, a_scale, padded[1])
    right = _dequantized(b.T, b_scale.T, padded[2])
    product = left @ right.T
    if alpha is not None:
        product = product * alpha.reshape(-1, 1)
    result: torch.Tensor = out.copy_(product.to(out.dtype))
    return result


def _backend(era: Era, call: Call) -> str:
    backend = call.get("backend") or "cudnn"
    if era.before("0.5.0"):
        return str(backend)
    # The decorator of 0.5.0 looks among the keywords only, and takes no default.
    if era.before("0.5.1") and "backend" not in call.keywords:
        raise BackendSupportedError("mm_fp4 does not support backend 'None' with capability 100")
    if backend not in _SINCE or era.before(_SINCE[backend]):
        raise BackendSupportedError(f"mm_fp4 does not support backend '{backend}' with capability 100")
    return str(backend)


def _check_operands(call: Call, a: torch.Tensor, b: torch.Tensor, a_scale: torch.Tensor, b_scale: torch.Tensor) -> None:
    if a.ndim != 2 or b.ndim != 2:
        raise ValueError(f"mm_fp4 accepts 2d tensors, got {a.shape} and {b.shape}")
    if a.shape[1] != b.shape[0]:
        raise ValueError(f"K dimension mismatch in mm_fp4. got {a.shape[1]} and {b.shape[0]}")
    if a.dtype not in _BYTES or b.dtype not in _BYTES:
        raise ValueError(f"a and b must have float4_e2m1fn_x2 packed into uint8. Got {a.dtype} and {b.dtype}.")
    if a_scale.dtype not in _SCALES or b_scale.dtype not in _SCALES:
        raise ValueError(f"a_descale and b_descale must be float8_e4m3fn. Got {a_scale.dtype} and {b_scale.dtype}.")
    # The second operand and its scales are passed transposed: row-major underneath.
    for name, matrix in (("a", a), ("b.T", b.T), ("a_descale", a_scale), ("b_descale.T", b_scale.T)):
        need(matrix.is_contiguous(), f"{name} must be contiguous")
        need(matrix.device == a.device, f"{name} must be on the device of a")


def _alpha(era: Era, call: Call, a: torch.Tensor, backend: str) -> torch.Tensor | None:
    alpha: torch.Tensor | None = call["alpha"]
    if alpha is None and era.since("0.4.0"):
        return None
    alpha = call.tensor("alpha")
    if alpha.dtype != torch.float32:
        raise ValueError(f"alpha must be a float tensor, got {alpha.dtype}")
    if alpha.numel() != 1 and era.before("0.7.1"):
        raise ValueError(f"alpha must be a scalar, got {alpha.numel()}")
    if alpha.numel() != 1:
        if alpha.numel() != a.shape[0]:
            raise ValueError(f"alpha must be a scalar, or one scale per row of a. Got {alpha.numel()}")
        if backend not in ("auto", "cute-dsl", "cake"):
            raise ValueError("per-token alpha is only implemented by the 'cute-dsl' and 'cake' backends")
    need(alpha.device == a.device, "alpha must be on the device of a")
    return alpha


def _check_shape(era: Era, backend: str, rows: int, depth: int, columns: int) -> None:
    if backend == "cutlass":
        need(depth % 32 == 0, f"Expected k to be divisible by 32, but got {depth}")
        need(columns % 32 == 0, f"Expected n to be divisible by 32, but got {columns}")
    if backend == "cute-dsl" and columns % 8 and era.since("0.6.14"):
        raise ValueError(f"CuTe-DSL FP4 GEMM requires N % 8 == 0, got n={columns}")
    if backend == "cutedsl_low_latency" and (rows > 8 or depth % 64):
        raise ValueError(f"the low-latency FP4 GEMM takes M <= 8 and K % 64 == 0, got {rows} and {depth}")


def _dequantized(codes: torch.Tensor, scale: torch.Tensor, padded_rows: int) -> torch.Tensor:
    """float32 [R, K] of codes uint8 [R, K/2] and the 128x4 bytes of their scales."""
    rows, blocks = codes.shape[0], codes.shape[1] // 8
    linear = deinterleave_block_scale(scale.reshape(padded_rows, -1).view(torch.uint8), rows, blocks)
    one = torch.ones((), device=codes.device)
    return dequantize_nvfp4(Nvfp4Tensor(codes, linear.view(torch.float8_e4m3fn), one))


KERNELS: Mapping[str, Kernel] = {"mm_fp4": _mm_fp4}
