"""What a fused layer of vLLM should give: the torch backend's sum, for what reached the kernel."""

from __future__ import annotations

from typing import Any

import torch

import flashinfer_compat as fc
from flashinfer_compat.backends.routing import topk_from_logits

__all__ = ["sums", "with_vllms_scales"]


def with_vllms_scales(weights: fc.MoELayerWeights) -> fc.MoELayerWeights:
    """vLLM takes one input scale for the second GEMM of all experts, the largest."""
    parts = (weights.routed, weights.shared)
    largest = max(part.down_input_scale.max() for part in parts)
    for part in parts:
        part.down_input_scale.fill_(largest)
    return weights


def sums(weights: fc.MoELayerWeights, arguments: dict[str, Any]) -> tuple[torch.Tensor, torch.Tensor]:
    """R + S and S from the torch backend in float32, for the activations and the routing that reached the kernel."""
    problem = weights.problem("topk")
    if "topk_ids" in arguments:
        ids, chosen = (one[:, : problem.top_k] for one in arguments["topk_ids"])
    else:
        logits = fc.LogitsRouting(arguments["routing_logits"].float(), arguments["routing_bias"].float())
        topk = topk_from_logits(weights.problem("logits"), logits)
        ids, chosen = topk.ids, topk.weights
    plan = fc.plan(problem, fc.Target.from_release("0.7.2.post1", None), strategy="expanded", backend="torch")
    layer = fc.prepare(weights, plan)
    given = fc.QuantizedInput(arguments["hidden_states"], arguments["hidden_states_scale"])
    ids, chosen = ids.long().contiguous(), chosen.float().contiguous()
    both = (fc.fp4_moe(given, layer, fc.TopKRouting(ids, one)).float() for one in (chosen, torch.zeros_like(chosen)))
    return tuple(both)
