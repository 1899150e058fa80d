"""Experts that an engine has laid out itself: the checks that FlashInfer's launcher leaves out."""

from __future__ import annotations

import torch

from flashinfer_compat.backends.trtllm.weights import TrtllmExperts
from flashinfer_compat.errors import ArgumentError, TensorError
from flashinfer_compat.planning.decision import KernelCall, Plan
from flashinfer_compat.vocabulary import Strategy

__all__ = ["check_given"]

_FP8, _F32 = torch.float8_e4m3fn, torch.float32


def check_given(experts: TrtllmExperts, plan: Plan, call: KernelCall) -> None:
    """Require that the experts are those of the plan's call. From 0.5.3 on the launcher reads past short tensors.

    Raises:
        ArgumentError: the plan has a shared expert beside the kernel, or the experts are not among the call's.
        TensorError: a tensor has another shape, dtype or device, or is not contiguous.
    """
    problem = plan.problem
    if plan.strategy is Strategy.SPLIT and problem.num_shared_experts:
        raise ArgumentError(
            "weights",
            "a checkpoint's layer, whose shared experts run beside the kernel",
            "TrtllmExperts",
            "Plan with num_shared_experts=0 and add the shared experts' output yourself, or pass MoELayerWeights.",
        )
    last = experts.local_expert_offset + call.local_num_experts
    if experts.local_expert_offset < 0 or last > call.num_experts:
        expected = f"0 to {call.num_experts - call.local_num_experts}"
        raise ArgumentError("weights.local_expert_offset", expected, str(experts.local_expert_offset))
    rows, hidden, inter = call.weight_rows, problem.hidden_size, call.intermediate_size
    expected_tensors: dict[str, tuple[torch.dtype, tuple[int, ...]]] = {
        "gemm1_weights": (torch.uint8, (rows, 2 * inter, hidden // 2)),
        "gemm1_weights_scale": (_FP8, (rows, 2 * inter, hidden // 16)),
        "gemm2_weights": (torch.uint8, (rows, hidden, inter // 2)),
        "gemm2_weights_scale": (_FP8, (rows, hidden, inter // 16)),
        "output1_scale_scalar": (_F32, (rows,)),
        "output1_scale_gate_scalar": (_F32, (rows,)),
        "output2_scale_scalar": (_F32, (rows,)),
        "gemm1_alpha": (_F32, (rows,)),
        "gemm1_beta": (_F32, (rows,)),
        "gemm1_clamp_limit": (_F32, (rows,)),
        "gemm1_bias": (_F32, (rows, 2 * inter)),
        "gemm2_bias": (_F32, (rows, hidden)),
    }
    device = experts.gemm1_weights.device
    for name, (dtype, shape) in expected_tensors.items():
        tensor = getattr(experts, name)
        if tensor is None:
            continue
        found = (tensor.dtype, tuple(tensor.shape), tensor.device)
        if found != (dtype, shape, device):
            raise TensorError(
                f"weights.{name}",
                f"{dtype} {list(shape)} on {device}",
                f"{found[0]} {list(found[1])} on {found[2]}",
                "Sizes are those of plan.call; intermediate_size is padded to a multiple of 64.",
            )
        if not tensor.is_contiguous():
            raise TensorError(f"weights.{name}", "a contiguous tensor", f"strides {tensor.stride()}")
    if experts.input_scale.numel() != 1 or experts.input_scale.dtype != _F32:
        expected = "one float32 number"
        raise TensorError(
            "weights.input_scale", expected, f"{experts.input_scale.dtype} {list(experts.input_scale.shape)}"
        )
