"""The way back from the kernels' layout, by FlashInfer's formulas."""

from __future__ import annotations

import torch

from flashinfer_compat.backends.trtllm.weights import TrtllmExperts
from flashinfer_compat.numerics import Nvfp4Tensor, dequantize_nvfp4
from flashinfer_compat.weights.values import Nvfp4Experts

# Three float32 roundings: two in a scalar, one in a dequantized value.
ROUNDING = 4e-7


def same_bytes(a: torch.Tensor, b: torch.Tensor) -> bool:
    return a.dtype == b.dtype and torch.equal(*(tensor.reshape(-1).view(torch.uint8) for tensor in (a, b)))


def unshuffled(rows: torch.Tensor) -> torch.Tensor:
    """[R, N, C]: srcToDstBlk32RowMap sends row r of each 32 to row 8 * (r % 4) + r // 4."""
    row = torch.arange(rows.shape[1])
    return rows.view(torch.uint8)[:, row // 32 * 32 + 8 * (row % 4) + row % 32 // 4].view(rows.dtype)


def linear_scale(interleaved: torch.Tensor, rows: int, cols: int) -> torch.Tensor:
    """[R', C'] per matrix to [R, C]: get_sf_out_offset_128x4."""
    row, col = torch.arange(rows).unsqueeze(1), torch.arange(cols)
    col_tiles = interleaved.shape[-1] // 4
    offset = (row // 128 * col_tiles + col // 4) * 512 + row % 32 * 16 + row % 128 // 32 * 4 + col % 4
    return interleaved.view(torch.uint8).flatten(-2)[..., offset].view(torch.float8_e4m3fn)


def undo(prepared: TrtllmExperts) -> Nvfp4Experts:
    """Back to a checkpoint's values, with the common input scale in place of each expert's own."""
    experts, rows, half = prepared.gemm1_weights.shape
    hidden, width = 2 * half, rows // 2
    up_gate = unshuffled(prepared.gemm1_weights).reshape(experts, width, 2, half)
    up_gate_scale = unshuffled(linear_scale(prepared.gemm1_weights_scale, rows, hidden // 16)).view(torch.uint8)
    gate_up_scale = up_gate_scale.reshape(experts, width, 2, hidden // 16).flip(2).transpose(1, 2).contiguous()
    # FC2's scalar is down's input scale times its global scale; only the checkpoint says which is which.
    ones = torch.ones(experts)
    return Nvfp4Experts(
        gate_up_weight=up_gate.flip(2).transpose(1, 2).contiguous(),
        gate_up_block_scale=gate_up_scale.view(torch.float8_e4m3fn),
        gate_up_global_scale=torch.stack((prepared.output1_scale_gate_scalar, prepared.output1_scale_scalar), 1)
        * prepared.quantize_scale,
        gate_up_input_scale=prepared.input_scale.expand(experts, 2),
        down_weight=unshuffled(prepared.gemm2_weights),
        down_block_scale=unshuffled(linear_scale(prepared.gemm2_weights_scale, hidden, width // 16)),
        down_global_scale=prepared.output2_scale_scalar,
        down_input_scale=ones,
    )


def gate_up_of(experts: Nvfp4Experts, global_scale: torch.Tensor | None = None) -> torch.Tensor:
    scale = experts.gate_up_global_scale if global_scale is None else global_scale
    return dequantize_nvfp4(Nvfp4Tensor(experts.gate_up_weight, experts.gate_up_block_scale, scale))


def down_of(experts: Nvfp4Experts, global_scale: torch.Tensor | None = None) -> torch.Tensor:
    scale = experts.down_global_scale if global_scale is None else global_scale
    return dequantize_nvfp4(Nvfp4Tensor(experts.down_weight, experts.down_block_scale, scale))


def close(a: torch.Tensor, b: torch.Tensor) -> None:
    torch.testing.assert_close(a, b, rtol=ROUNDING, atol=0)


def assert_undone(prepared: TrtllmExperts, experts: Nvfp4Experts) -> None:
    back = undo(prepared)
    for name in ("gate_up_weight", "gate_up_block_scale", "down_weight", "down_block_scale"):
        assert same_bytes(getattr(back, name), getattr(experts, name)), name
    # Up's scalar also divides by down's input scale, and FC2's multiplies by it.
    gate_up_global = torch.stack(
        (back.gate_up_global_scale[:, 0], back.gate_up_global_scale[:, 1] * experts.down_input_scale), 1
    )
    close(gate_up_of(back, gate_up_global), gate_up_of(experts))
    close(down_of(back, back.down_global_scale / experts.down_input_scale), down_of(experts))
