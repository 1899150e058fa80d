"""This package's numerics against FlashInfer's own PyTorch code, which runs without a GPU.

FlashInfer's trace references add the bias to the logits and scale the weights for every routing method; its kernels do
so only for DeepSeekV3 and MiniMax2. The comparisons below give the references no bias and a scale of 1 elsewhere.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import TYPE_CHECKING

import pytest
import torch

pytest.importorskip("flashinfer", exc_type=ImportError)
moe = pytest.importorskip("flashinfer.trace.templates.moe", exc_type=ImportError)
gemm = pytest.importorskip("flashinfer.trace.templates.gemm", exc_type=ImportError)

from flashinfer.fused_moe import core  # noqa: E402
from flashinfer.quantization import fp4_quantization  # noqa: E402
from flashinfer.trace.templates import quantize as quantize_templates  # noqa: E402

from flashinfer_compat import numerics as n  # noqa: E402
from flashinfer_compat.vocabulary import RoutingMethod as M  # noqa: E402

if TYPE_CHECKING:
    from collections.abc import Callable

pytestmark = pytest.mark.flashinfer


def need(module: object, name: str) -> Callable[..., torch.Tensor]:
    """FlashInfer's function, or a skip where this release does not have it."""
    if not hasattr(module, name):
        pytest.skip(f"this FlashInfer has no {name}")
    return getattr(module, name)  # type: ignore[no-any-return]


def random_bytes(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randint(0, 256, shape, dtype=torch.uint8, generator=torch.Generator().manual_seed(seed))


def randn(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


# Layouts


@pytest.mark.parametrize("rows", [128, 256, 384, 4096])
def test_row_shuffles(rows: int) -> None:
    matrix = random_bytes(rows, 24)
    assert torch.equal(n.shuffle_permutation(rows), core.get_shuffle_matrix_a_row_indices(matrix, 128))
    assert torch.equal(n.shuffle_permutation(rows), core.get_shuffle_matrix_sf_a_row_indices(matrix, 128))
    assert torch.equal(n.shuffle_rows(matrix), fp4_quantization.shuffle_matrix_a(matrix, 128))


@pytest.mark.parametrize("rows", [2, 96, 256, 4096])
def test_gate_and_up_reordering(rows: int) -> None:
    matrix = random_bytes(rows, 8)
    assert torch.equal(n.interleave_gate_up(matrix), core.reorder_rows_for_gated_act_gemm(matrix))
    undo = need(core, "deinterleave_gated_rows")
    assert torch.equal(n.deinterleave_gate_up(matrix), undo(matrix, 1))


@pytest.mark.parametrize("rows", [128, 256, 4096])
@pytest.mark.parametrize("num_elts_per_sf", [None, 16])
def test_weight_permutations(rows: int, num_elts_per_sf: int | None) -> None:
    matrix = random_bytes(rows, 8)
    w13 = core._maybe_get_cached_w3_w1_permute_indices({}, matrix, 128, num_elts_per_sf)
    w2 = core.get_w2_permute_indices_with_cache({}, matrix, 128, num_elts_per_sf)
    assert torch.equal(n.w13_permutation(rows), w13)
    assert torch.equal(n.w2_permutation(rows), w2)


@pytest.mark.parametrize(("experts", "rows", "cols"), [(1, 128, 4), (3, 256, 8), (2, 130, 5), (4, 1, 1)])
def test_block_scale_layout(experts: int, rows: int, cols: int) -> None:
    scale = random_bytes(experts, rows, cols)
    interleaved = n.interleave_block_scale(scale)
    undo = need(gemm, "_unswizzle_batched_sf_128x4")
    assert torch.equal(undo(interleaved, experts, rows, cols), scale)


@pytest.mark.parametrize(("rows", "cols"), [(128, 4), (130, 5), (1, 12)])
def test_block_scale_layout_against_the_batch_invariant_reference(rows: int, cols: int) -> None:
    reference = pytest.importorskip("flashinfer.batch_invariant.quantization.nvfp4_reference", exc_type=ImportError)
    scale = random_bytes(rows, cols)
    interleaved = n.interleave_block_scale(scale)
    assert torch.equal(interleaved, reference.swizzle_sf_128x4(scale, rows, cols * 16))
    assert torch.equal(n.deinterleave_block_scale(interleaved, rows, cols), scale)


@pytest.mark.parametrize("gated", [True, False])
def test_weights_come_back_through_flashinfers_unshuffle(gated: bool) -> None:
    weight = random_bytes(3, 256, 8)
    index = n.w13_permutation(256) if gated else n.w2_permutation(256)
    undo = need(moe, "_trtllm_unshuffle_weight")
    assert torch.equal(undo(n.permute_rows(weight, index), gated), weight.float())


# Routing


@pytest.fixture
def chosen(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """Where the references leave what they choose, in place of running the experts."""
    seen = SimpleNamespace()

    def keep(*args: object, **kwargs: object) -> None:
        seen.weights, seen.ids, seen.num_experts = args[8], args[9], args[11]

    monkeypatch.setattr(moe, "_fp4_moe_run_experts", keep)
    return seen


def run_reference(
    name: str, logits: torch.Tensor, bias: torch.Tensor | None, top_k: int, *groups: int, **more: object
) -> None:
    reference = getattr(moe, f"_trtllm_fp4_block_scale_moe_{name}_routing_reference")
    scale = more.pop("routed_scaling_factor", None)
    reference(logits, bias, *[None] * 8, top_k, *groups, 0, scale, **more)


def assert_same_choice(ours: n.TopK, ids: torch.Tensor, weights: torch.Tensor | None) -> None:
    """Equal but for the order in a row, which the references leave open."""
    mine, theirs = ours.ids.sort(dim=1), ids.sort(dim=1)
    assert torch.equal(mine.values, theirs.values)
    if weights is not None:
        expected = weights.gather(1, theirs.indices)
        torch.testing.assert_close(ours.weights.gather(1, mine.indices), expected, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize(
    ("name", "method"),
    [("default", M.DEFAULT), ("renormalize", M.RENORMALIZE), ("renormalize_naive", M.RENORMALIZE_NAIVE)],
)
@pytest.mark.parametrize("top_k", [1, 8, 64])
def test_softmax_routing(chosen: SimpleNamespace, name: str, method: M, top_k: int) -> None:
    logits = randn(50, 64)
    run_reference(name, logits, None, top_k)
    assert_same_choice(n.route(logits, None, method=method, top_k=top_k), chosen.ids, chosen.weights)


def test_llama4_routing(chosen: SimpleNamespace) -> None:
    logits = randn(50, 64)
    run_reference("llama4", logits, None, 1)
    assert_same_choice(n.route(logits, None, method=M.LLAMA4, top_k=1), chosen.ids, chosen.weights)


def test_topk_routing_chooses_alike(chosen: SimpleNamespace) -> None:
    # The reference weighs each expert 1 / top_k; the kernels (no postprocess policy) weigh by the logit itself.
    logits = randn(50, 64)
    run_reference("topk", logits, None, 6)
    ours = n.route(logits, None, method=M.TOPK, top_k=6)
    assert_same_choice(ours, chosen.ids, None)
    assert torch.equal(ours.weights, logits.gather(1, ours.ids))


@pytest.mark.parametrize(("n_group", "topk_group"), [(8, 4), (4, 1), (1, 1)])
@pytest.mark.parametrize("shared", [0, 2])
def test_deepseek_routing(chosen: SimpleNamespace, n_group: int, topk_group: int, shared: int) -> None:
    logits, bias = randn(50, 64) * 2, randn(64, seed=1) * 0.1
    more = {"num_fused_shared_experts": shared} if shared else {}
    run_reference("ds", logits, bias, 8, n_group, topk_group, routed_scaling_factor=2.5, **more)
    ours = n.route(
        logits,
        bias,
        method=M.DEEPSEEK_V3,
        top_k=8,
        n_group=n_group,
        topk_group=topk_group,
        routed_scaling_factor=2.5,
    )
    assert_same_choice(n.append_shared_experts(ours, 64, shared), chosen.ids, chosen.weights)
    assert chosen.num_experts == 64 + shared


# NVFP4


def test_decoding_against_the_cpu_fallback() -> None:
    packed, scale = random_bytes(40, 64), torch.rand(40, 8).mul(448).to(torch.float8_e4m3fn)
    theirs = fp4_quantization._e2m1_and_ufp8sf_scale_to_float_cpu(
        packed, scale.view(torch.uint8), torch.tensor([0.25]), 16, 1, False
    )
    assert torch.equal(n.dequantize_nvfp4(n.Nvfp4Tensor(packed, scale, torch.tensor(0.25))), theirs)


@pytest.mark.parametrize("power", [-12, 0, 7])
def test_quantizing_against_the_trace_reference_off_ties(power: int) -> None:
    # The reference rounds ties down in magnitude and divides where the kernels multiply by reciprocals, so bytes may
    # differ where a value lies on a rounding boundary. A power of two as global scale leaves only the ties.
    values = randn(64, 256)
    global_scale = torch.tensor(2.0**power)
    codes, scale = quantize_templates._fp4_quantize_reference(values, 1 / global_scale)
    ours = n.quantize_nvfp4(values, global_scale)
    step = (ours.block_scale.float() * global_scale).repeat_interleave(16, dim=1)
    scaled = values.abs() / step
    midpoints = torch.tensor([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0])
    off_ties = (scaled.unsqueeze(-1) / midpoints - 1).abs().amin(dim=-1) > 1e-6
    assert torch.equal(ours.block_scale.float(), scale.float())
    assert torch.equal(n.unpack_e2m1(ours.codes)[off_ties], n.unpack_e2m1(codes)[off_ties])
    assert off_ties.float().mean() > 0.99


@pytest.mark.parametrize("power", [-11, -3, 0, 6])
def test_quantizing_against_the_exact_kernel_reference(power: int) -> None:
    """FlashInfer's specification of its quantizer without fast reciprocals.

    Block scales agree bit for bit. It multiplies by 1 / block scale where we divide, so codes may differ on a tie.
    """
    reference = pytest.importorskip("flashinfer.batch_invariant.quantization.nvfp4_reference", exc_type=ImportError)
    values = (randn(96, 512) * torch.logspace(-3, 3, 96).unsqueeze(1)).bfloat16()
    values[5] = 0
    global_scale = torch.tensor(2.0**power)
    codes, scale, _ = reference.quantize_reference(values, 1 / global_scale)
    ours = n.quantize_nvfp4(values, global_scale)
    assert torch.equal(n.interleave_block_scale(ours.block_scale).view(torch.uint8), scale)
    # A block whose scale rounds to zero: the default kernel writes zeros, the specification saturates.
    kept = (ours.block_scale.float() != 0).repeat_interleave(8, dim=1)
    kept = kept.repeat_interleave(2, dim=1)
    step = (ours.block_scale.float() * global_scale).repeat_interleave(16, dim=1)
    midpoints = torch.tensor([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0])
    off_ties = ((values.float().abs() / step).unsqueeze(-1) / midpoints - 1).abs().amin(dim=-1) > 1e-6
    assert torch.equal(n.unpack_e2m1(ours.codes)[kept & off_ties], n.unpack_e2m1(codes)[kept & off_ties])
    assert off_ties[kept].float().mean() > 0.9


def test_rounding_to_e2m1_and_e4m3_against_the_exact_kernel_reference() -> None:
    reference = pytest.importorskip("flashinfer.batch_invariant.quantization.nvfp4_reference", exc_type=ImportError)
    values = torch.cat((torch.arange(-2800, 2801) / 400, randn(5000) * 3, torch.tensor([-0.0, 1e30, -1e30])))
    assert torch.equal(n.encode_e2m1(values), reference.e2m1_codes(reference.e2m1_round(values)))
    scales = torch.cat((torch.arange(0, 4096) / 2.0**12, torch.arange(0, 4480) / 10.0))
    assert torch.equal(scales.to(torch.float8_e4m3fn).float(), reference.e4m3_round(scales))
