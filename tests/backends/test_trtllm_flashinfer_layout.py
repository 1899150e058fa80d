"""The experts' layout beside what FlashInfer's own helpers and reference make of it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

torch = pytest.importorskip("torch")

from trtllm_layers import SAMPLE_CALLS, call_of, experts_of, random_layer  # noqa: E402

import flashinfer_compat as fc  # noqa: E402
from flashinfer_compat.backends.trtllm.weights import prepare_experts  # noqa: E402
from flashinfer_compat.numerics import (  # noqa: E402
    append_shared_experts,
    dequantize_nvfp4,
    interleave_block_scale,
    quantize_nvfp4,
)

if TYPE_CHECKING:
    from collections.abc import Callable


def require_module(name: str) -> Any:
    pytest.importorskip("flashinfer", exc_type=ImportError)
    return pytest.importorskip(name, exc_type=ImportError)


@pytest.mark.flashinfer
@pytest.mark.parametrize("scale_layout", ["ours", "flashinfer"])
def test_flashinfers_helpers_lay_out_each_expert_alike(scale_layout: str) -> None:
    core = require_module("flashinfer.fused_moe.core")
    interleave: Callable[[torch.Tensor], torch.Tensor] = interleave_block_scale
    if scale_layout == "flashinfer":
        reference = require_module("flashinfer.batch_invariant.quantization.nvfp4_reference")

        def interleave(scale: torch.Tensor) -> torch.Tensor:
            rows, cols = scale.shape
            return reference.swizzle_sf_128x4(scale, rows, cols * 16)  # type: ignore[no-any-return]

    weights = random_layer(hidden=256, width=192)
    call = call_of(weights)
    prepared, experts = prepare_experts(weights, call), experts_of(weights, call)
    cache: dict[Any, Any] = {}
    for row in range(call.weight_rows):
        up_gate = experts.gate_up_weight[row].flip(0).flatten(0, 1)
        up_gate_scale = experts.gate_up_block_scale[row].view(torch.uint8).flip(0).flatten(0, 1)
        down, down_scale = experts.down_weight[row], experts.down_block_scale[row].view(torch.uint8)
        w13 = core._maybe_get_cached_w3_w1_permute_indices(cache, up_gate, 128)
        w13_scale = core._maybe_get_cached_w3_w1_permute_indices(cache, up_gate_scale, 128, num_elts_per_sf=16)
        w2 = core.get_w2_permute_indices_with_cache(cache, down, 128)
        w2_scale = core.get_w2_permute_indices_with_cache(cache, down_scale, 128, num_elts_per_sf=16)
        assert torch.equal(prepared.gemm1_weights[row], up_gate[w13])
        assert torch.equal(prepared.gemm2_weights[row], down[w2])
        expected = interleave(up_gate_scale[w13_scale]).flatten()
        assert torch.equal(prepared.gemm1_weights_scale[row].view(torch.uint8).flatten(), expected)
        expected = interleave(down_scale[w2_scale]).flatten()
        assert torch.equal(prepared.gemm2_weights_scale[row].view(torch.uint8).flatten(), expected)


SWIGLU_STEP = 7
"""The one activation whose FlashInfer reference reads the kernels' layout and scalars; without a clamp it is SwiGLU."""


@pytest.mark.flashinfer
@pytest.mark.parametrize(("sample", "strategy"), [(one, how) for one, _, how in SAMPLE_CALLS if how != "native"])
def test_flashinfers_reference_computes_the_layer_from_the_prepared_weights(
    checkpoints: Path, sample: str, strategy: str
) -> None:
    moe = require_module("flashinfer.trace.templates.moe")
    weights = fc.load_moe_layer(checkpoints / sample, 1)
    if strategy == "split":
        config = replace(weights.config, num_shared_experts=0)
        weights = replace(weights, shared=None, config=config)
    config, call = weights.config, call_of(weights, "topk", strategy)
    prepared = prepare_experts(weights, call)

    generator = torch.Generator().manual_seed(3)
    x = torch.randn(19, config.hidden_size, generator=generator)
    ids = torch.rand(19, config.num_experts, generator=generator).topk(config.top_k).indices
    topk = fc.TopKRouting(ids, torch.rand(19, config.top_k, generator=generator))
    quantized = quantize_nvfp4(x, prepared.input_scale)
    # The reference does not round activations between the GEMMs.
    plan = fc.plan(weights.problem("topk", numerics="w4a16"), strategy="split", backend="torch")
    expected = fc.fp4_moe(dequantize_nvfp4(quantized), fc.prepare(weights, plan), topk)

    chosen = append_shared_experts(topk, config.num_experts, config.num_shared_experts)
    output = moe._fp4_moe_run_experts(
        hidden_states=quantized.codes,
        hidden_states_scale=quantized.block_scale,
        gemm1_weights=prepared.gemm1_weights,
        gemm1_weights_scale=prepared.gemm1_weights_scale,
        gemm1_bias=None,
        gemm1_clamp_limit=torch.full((call.weight_rows,), 1e30),
        gemm2_weights=prepared.gemm2_weights,
        gemm2_weights_scale=prepared.gemm2_weights_scale,
        gemm2_bias=None,
        output1_scale_scalar=prepared.output1_scale_scalar,
        output1_scale_gate_scalar=prepared.output1_scale_gate_scalar,
        output2_scale_scalar=prepared.output2_scale_scalar,
        weights=chosen.weights,
        topk_idx=chosen.ids,
        local_expert_offset=0,
        E_global=call.num_experts,
        activation_type=SWIGLU_STEP,
    )
    difference = float((output.float() - expected).norm() / expected.norm())
    # The reference rounds its result to bf16.
    assert difference < 3e-3
