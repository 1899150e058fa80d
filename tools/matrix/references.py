"""FlashInfer's own PyTorch code, which runs on a CPU, against this package's.

Layout helpers are in every release, and are compared byte for byte. References of the MoE are in FlashInfer's trace
templates from 0.6.10. They know no global scales and do not quantize what passes between the two GEMMs, so they are
compared with the torch backend in w4a16 on weights whose global scales are 1, where both round once, to bf16.
"""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable, Iterator
from dataclasses import replace
from types import ModuleType
from typing import Any

import torch

import flashinfer_compat as fc
from flashinfer_compat import numerics
from flashinfer_compat.backends.trtllm.kernels import find
from flashinfer_compat.signatures.live import read_live
from flashinfer_compat.weights.shared import append_shared, split_shared
from flashinfer_compat.weights.values import LayerConfig, MoELayerWeights, Nvfp4Experts, Router
from tools.matrix.results import Cell, State, failed

__all__ = ["cells", "random_layer", "reference_arguments", "relative_error"]

TOLERANCE = 5e-3
"""Both round once, to bf16, which is 1.6e-3 at most where sums differ; a wrong expert, weight or row is above 1e-1."""

_ROWS = 256
_TOKENS = 19


def relative_error(output: torch.Tensor, expected: torch.Tensor) -> float:
    """Frobenius norm of the difference over that of `expected`."""
    return float((output.double() - expected.double()).norm() / expected.double().norm())


def cells() -> Iterator[Cell]:
    """One cell for each kind of FlashInfer's own PyTorch code."""
    yield _cell("layouts", _layouts)
    try:
        templates = importlib.import_module("flashinfer.trace.templates.moe")
    except ModuleNotFoundError:
        for column in ("experts reference", "routing reference"):
            yield Cell("release", column, State.ABSENT, "no references before 0.6.10")
        return
    yield _cell("experts reference", lambda: _experts(templates))
    yield _cell("routing reference", lambda: _deepseek(templates))


def _cell(column: str, compare: Callable[[], Cell]) -> Cell:
    try:
        return compare()
    except Exception as error:
        return failed("release", [column], error)[0]


def _layouts() -> Cell:
    matrix = torch.arange(_ROWS * 32, dtype=torch.int64).reshape(_ROWS, 32).to(torch.uint8)
    ours: dict[str, torch.Tensor] = {
        "_maybe_get_cached_w3_w1_permute_indices": numerics.w13_permutation(_ROWS),
        "get_w2_permute_indices_with_cache": numerics.w2_permutation(_ROWS),
        "shuffle_matrix_a": numerics.shuffle_rows(matrix),
        "reorder_rows_for_gated_act_gemm": numerics.interleave_gate_up(matrix),
    }
    arguments: dict[str, tuple[Any, ...]] = {
        "_maybe_get_cached_w3_w1_permute_indices": ({}, matrix, 128),
        "get_w2_permute_indices_with_cache": ({}, matrix, 128),
        "shuffle_matrix_a": (matrix, 128),
        "reorder_rows_for_gated_act_gemm": (matrix,),
    }
    present = [name for name in ours if name in read_live().symbols]
    wrong = [name for name in present if not torch.equal(find(name).function(*arguments[name]), ours[name])]
    if wrong:
        return Cell("release", "layouts", State.FAILED, f"other bytes from {', '.join(wrong)}")
    return Cell("release", "layouts", State.PASSED if present else State.ABSENT, ", ".join(present))


def _experts(templates: ModuleType) -> Cell:
    """Given top-k, routed experts only."""
    layer = random_layer()
    routed = replace(layer, shared=None, config=replace(layer.config, num_shared_experts=0))
    generator = torch.Generator().manual_seed(2)
    hidden_states = torch.randn(_TOKENS, layer.config.hidden_size, generator=generator).bfloat16()
    ids = torch.rand(_TOKENS, layer.config.num_experts, generator=generator).topk(layer.config.top_k).indices
    weights = torch.rand(_TOKENS, layer.config.top_k, generator=generator)
    plan = fc.plan(routed.problem("topk", numerics="w4a16"), backend="torch")
    output = fc.fp4_moe(hidden_states, fc.prepare(routed, plan), fc.TopKRouting(ids, weights))
    expected = templates._fp4_moe_run_experts(
        hidden_states=hidden_states,
        hidden_states_scale=None,
        weights=weights,
        topk_idx=ids,
        E_global=layer.config.num_experts,
        **reference_arguments(routed.routed),
    )
    return _compared("experts reference", output, expected)


def _deepseek(templates: ModuleType) -> Cell:
    """DeepSeekV3 routing from logits, with fused shared experts where the reference has them."""
    layer = random_layer()
    reference = templates._trtllm_fp4_block_scale_moe_ds_routing_reference
    fuses = "num_fused_shared_experts" in inspect.signature(reference).parameters
    experts = layer.routed
    if fuses:
        shared = split_shared(layer)
        assert isinstance(shared, Nvfp4Experts)
        experts = append_shared(experts, shared)
    else:
        layer = replace(layer, shared=None, config=replace(layer.config, num_shared_experts=0))
    config = layer.config
    hidden_states = torch.randn(_TOKENS, config.hidden_size, generator=torch.Generator().manual_seed(1)).bfloat16()
    routing = fc.route_logits(hidden_states, layer.router)
    strategy = "native" if fuses else "split"
    plan = fc.plan(layer.problem("logits", numerics="w4a16"), strategy=strategy, backend="torch")
    output = fc.fp4_moe(hidden_states, fc.prepare(layer, plan), routing)
    expected = reference(
        routing_logits=routing.logits,
        routing_bias=routing.bias,
        hidden_states=hidden_states,
        hidden_states_scale=None,
        top_k=config.top_k,
        n_group=config.n_group,
        topk_group=config.topk_group,
        routed_scaling_factor=config.routed_scaling_factor,
        **({"num_fused_shared_experts": config.num_shared_experts} if fuses else {}),
        **reference_arguments(experts),
    )
    cell = _compared("routing reference", output, expected)
    return replace(cell, detail=cell.detail or ("with shared experts" if fuses else "without shared experts"))


def _compared(column: str, output: torch.Tensor, expected: torch.Tensor) -> Cell:
    error = relative_error(output, expected)
    # Not `error > TOLERANCE`, which NaN is not.
    if error <= TOLERANCE:
        return Cell("release", column, State.PASSED, "", error)
    return Cell("release", column, State.FAILED, f"relative error {error:.2e}, more than {TOLERANCE}", error)


def random_layer() -> MoELayerWeights:
    """32 experts in 4 groups, top-4 of 2 groups, 2 shared experts; hidden_size 128, intermediate_size 64."""
    config = LayerConfig(
        hidden_size=128,
        intermediate_size=64,
        num_experts=32,
        top_k=4,
        num_shared_experts=2,
        n_group=4,
        topk_group=2,
        routed_scaling_factor=2.5,
        norm_topk_prob=True,
        routing_method=fc.RoutingMethod.DEEPSEEK_V3,
        activation=fc.Activation.SWIGLU,
    )
    generator = torch.Generator().manual_seed(0)
    router = Router(
        torch.randn(config.num_experts, config.hidden_size, generator=generator),
        torch.randn(config.num_experts, generator=generator) * 0.1,
    )
    routed = _experts_of(config.num_experts, config.intermediate_size, config.hidden_size, generator)
    shared = _experts_of(1, config.num_shared_experts * config.intermediate_size, config.hidden_size, generator)
    return MoELayerWeights(config, router, routed, shared, 0, 0, 1)


def _experts_of(count: int, width: int, hidden_size: int, generator: torch.Generator) -> Nvfp4Experts:
    """Random experts whose global scales are 1, because FlashInfer's references know no others."""
    gate_up = numerics.quantize_nvfp4(torch.randn(count, 2, width, hidden_size, generator=generator) * 0.3, 1.0)
    down = numerics.quantize_nvfp4(torch.randn(count, hidden_size, width, generator=generator) * 0.3, 1.0)
    return Nvfp4Experts(
        gate_up.codes,
        gate_up.block_scale,
        torch.ones(count, 2),
        torch.ones(count, 2),
        down.codes,
        down.block_scale,
        torch.ones(count),
        torch.ones(count),
    )


def reference_arguments(experts: Nvfp4Experts) -> dict[str, Any]:
    """Weights as FlashInfer's references take them: rows [up; gate], nothing shuffled, linear block scales."""
    count, _, width, packed = experts.gate_up_weight.shape
    scale = experts.gate_up_block_scale.view(torch.uint8).flip(1).reshape(count, 2 * width, -1)
    return {
        "gemm1_weights": experts.gate_up_weight.flip(1).reshape(count, 2 * width, packed),
        "gemm1_weights_scale": scale.view(torch.float8_e4m3fn),
        "gemm1_bias": None,
        "gemm2_weights": experts.down_weight,
        "gemm2_weights_scale": experts.down_block_scale,
        "gemm2_bias": None,
        "local_expert_offset": 0,
    }
