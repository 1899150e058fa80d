from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

torch = pytest.importorskip("torch")

from hypothesis import given, settings  # noqa: E402
from hypothesis import strategies as st  # noqa: E402

import flashinfer_compat as fc  # noqa: E402
from flashinfer_compat.backends.trtllm import weights as trtllm  # noqa: E402
from flashinfer_compat.backends.trtllm.weights import (  # noqa: E402
    DenseNvfp4Linear,
    TrtllmExperts,
    prepare_dense,
    prepare_experts,
)
from flashinfer_compat.errors import ArgumentError, TensorError  # noqa: E402
from flashinfer_compat.features.target import Target  # noqa: E402
from flashinfer_compat.numerics import (  # noqa: E402
    Nvfp4Tensor,
    append_shared_experts,
    dequantize_nvfp4,
    interleave_block_scale,
    quantize_nvfp4,
)
from flashinfer_compat.weights.shared import append_shared, split_shared  # noqa: E402
from flashinfer_compat.weights.values import (  # noqa: E402
    DenseExperts,
    LayerConfig,
    MoELayerWeights,
    Nvfp4Experts,
    Router,
)

if TYPE_CHECKING:
    from collections.abc import Callable

    from flashinfer_compat.planning.decision import KernelCall

# Sample, routing input, strategy.
SAMPLE_CALLS = [
    ("grouped", "logits", "split"),
    ("grouped", "logits", "native"),
    ("grouped", "topk", "expanded"),
    ("shared-bf16", "logits", "split"),
    ("ungrouped-2-shared", "topk", "split"),
    ("ungrouped-2-shared", "topk", "expanded"),
]
TARGET = Target.from_release("0.7.4", "sm100")
# Three float32 roundings: two in a scalar, one in a dequantized value.
ROUNDING = 4e-7


def call_of(weights: MoELayerWeights, routing_input: str = "topk", strategy: str = "expanded") -> KernelCall:
    call = fc.plan(weights.problem(routing_input), TARGET, strategy=strategy).call
    assert call is not None
    return call


def experts_of(weights: MoELayerWeights, call: KernelCall) -> Nvfp4Experts:
    """The experts of the call in checkpoint layout."""
    if call.weight_rows == weights.config.num_experts:
        return weights.routed
    shared = split_shared(weights)
    assert isinstance(shared, Nvfp4Experts)
    return append_shared(weights.routed, shared)


def random_experts(count: int, hidden: int, width: int, seed: int = 0) -> Nvfp4Experts:
    """Random bytes without NaN scales; every scalar is different."""
    generator = torch.Generator().manual_seed(seed)

    def codes(*shape: int) -> torch.Tensor:
        return torch.randint(0, 256, shape, dtype=torch.uint8, generator=generator)

    def scales(*shape: int) -> torch.Tensor:
        return torch.randint(0, 0x7F, shape, dtype=torch.uint8, generator=generator).view(torch.float8_e4m3fn)

    def scalars(*shape: int) -> torch.Tensor:
        return torch.rand(*shape, generator=generator) * 1e-3 + 1e-4

    return Nvfp4Experts(
        gate_up_weight=codes(count, 2, width, hidden // 2),
        gate_up_block_scale=scales(count, 2, width, hidden // 16),
        gate_up_global_scale=scalars(count, 2),
        gate_up_input_scale=scalars(count, 2),
        down_weight=codes(count, hidden, width // 2),
        down_block_scale=scales(count, hidden, width // 16),
        down_global_scale=scalars(count),
        down_input_scale=scalars(count),
    )


def layer_of(routed: Nvfp4Experts, shared: Nvfp4Experts | DenseExperts | None, num_shared: int) -> MoELayerWeights:
    config = LayerConfig(
        hidden_size=routed.hidden_size,
        intermediate_size=routed.intermediate_size,
        num_experts=routed.num_experts,
        top_k=2,
        num_shared_experts=num_shared,
        n_group=1,
        topk_group=1,
        routed_scaling_factor=1.0,
        norm_topk_prob=True,
        routing_method=fc.RoutingMethod.DEEPSEEK_V3,
        activation=fc.Activation.SWIGLU,
    )
    router = Router(torch.zeros(routed.num_experts, routed.hidden_size), None)
    return MoELayerWeights(config, router, routed, shared, 0, 0, 1)


def random_layer(hidden: int = 256, width: int = 64, num_shared: int = 2, seed: int = 0) -> MoELayerWeights:
    shared = random_experts(1, hidden, width * num_shared, seed + 1) if num_shared else None
    return layer_of(random_experts(4, hidden, width, seed), shared, num_shared)


def same_bytes(a: torch.Tensor, b: torch.Tensor) -> bool:
    return a.dtype == b.dtype and torch.equal(*(tensor.reshape(-1).view(torch.uint8) for tensor in (a, b)))


def tensors_of(value: Any) -> dict[str, torch.Tensor]:
    return {name: one for name, one in vars(value).items() if isinstance(one, torch.Tensor)}


def assert_same(a: TrtllmExperts, b: TrtllmExperts) -> None:
    others = tensors_of(b)
    assert all(same_bytes(tensor, others[name]) for name, tensor in tensors_of(a).items())


def require_module(name: str) -> Any:
    pytest.importorskip("flashinfer", exc_type=ImportError)
    return pytest.importorskip(name, exc_type=ImportError)


# The way back, from FlashInfer's formulas.


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


# Experts


@pytest.mark.parametrize(("sample", "routing_input", "strategy"), SAMPLE_CALLS)
def test_a_checkpoint_comes_back_from_the_kernels_layout(
    checkpoints: Path, sample: str, routing_input: str, strategy: str
) -> None:
    weights = fc.load_moe_layer(checkpoints / sample, 1)
    call = call_of(weights, routing_input, strategy)
    prepared = prepare_experts(weights, call)
    experts = experts_of(weights, call)
    assert prepared.gemm1_weights.shape[0] == experts.num_experts == call.weight_rows
    assert_undone(prepared, experts)


@settings(deadline=None, max_examples=8)
@given(st.integers(1, 2), st.integers(1, 3), st.integers(0, 3), st.integers(0, 2**16))
def test_any_bytes_and_scalars_come_back(hidden_tiles: int, width_tiles: int, num_shared: int, seed: int) -> None:
    weights = random_layer(256 * hidden_tiles, 64 * width_tiles, num_shared, seed)
    call = call_of(weights, strategy="expanded" if num_shared else "split")
    assert_undone(prepare_experts(weights, call), experts_of(weights, call))


def test_shapes_and_dtypes_are_the_kernels() -> None:
    weights = random_layer(hidden=256, width=64, num_shared=2)
    prepared = prepare_experts(weights, call_of(weights))
    fp8 = torch.float8_e4m3fn
    found = {name: (tensor.dtype, tuple(tensor.shape)) for name, tensor in tensors_of(prepared).items()}
    assert found == {
        "gemm1_weights": (torch.uint8, (6, 128, 128)),
        "gemm1_weights_scale": (fp8, (6, 128, 16)),
        "gemm2_weights": (torch.uint8, (6, 256, 32)),
        "gemm2_weights_scale": (fp8, (6, 256, 4)),
        "output1_scale_scalar": (torch.float32, (6,)),
        "output1_scale_gate_scalar": (torch.float32, (6,)),
        "output2_scale_scalar": (torch.float32, (6,)),
        "input_scale": (torch.float32, ()),
    }
    assert all(tensor.is_contiguous() for tensor in tensors_of(prepared).values())


def test_scalars_follow_the_kernels_formulas() -> None:
    weights = random_layer()
    call = call_of(weights)
    prepared, experts = prepare_experts(weights, call), experts_of(weights, call)
    common = experts.gate_up_input_scale.max().double()
    gate, up = experts.gate_up_global_scale.double().unbind(1)
    down_input, down = experts.down_input_scale.double(), experts.down_global_scale.double()
    assert prepared.input_scale == experts.gate_up_input_scale.max()
    close(prepared.quantize_scale.double(), (1 / common).reshape(1))
    close(prepared.output1_scale_gate_scalar.double(), common * gate)
    close(prepared.output1_scale_scalar.double(), common * up / down_input)
    close(prepared.output2_scale_scalar.double(), down_input * down)


def test_the_input_scale_is_the_largest_of_the_experts_in_the_call() -> None:
    weights = random_layer()
    assert isinstance(weights.shared, Nvfp4Experts)
    wide = replace(weights.shared, gate_up_input_scale=torch.tensor([[0.25, 0.5]]))
    weights = replace(weights, shared=wide)
    fused = prepare_experts(weights, call_of(weights))
    split = prepare_experts(weights, call_of(weights, strategy="split"))
    assert fused.input_scale == 0.5
    assert split.input_scale == weights.routed.gate_up_input_scale.max()


def test_other_ranks_may_have_the_largest_input_scale() -> None:
    weights = random_layer(num_shared=0)
    call = call_of(weights, strategy="split")
    alone, given = prepare_experts(weights, call), prepare_experts(replace(weights, routed_input_scale=0.25), call)
    assert given.input_scale == 0.25
    assert given.quantize_scale.tolist() == [4.0]
    close(given.output1_scale_gate_scalar, weights.routed.gate_up_global_scale[:, 0] * 0.25)
    assert torch.equal(given.output2_scale_scalar, alone.output2_scale_scalar)
    largest = float(weights.routed.gate_up_input_scale.max())
    assert_same(prepare_experts(replace(weights, routed_input_scale=largest), call), alone)


@pytest.mark.parametrize("input_scale", [1e-6, 0.0, -1.0, float("nan"), float("inf"), 1e39])
def test_an_input_scale_that_would_clip_is_refused(input_scale: float) -> None:
    weights = random_layer()
    with pytest.raises(TensorError, match="largest of all ranks") as error:
        prepare_experts(replace(weights, routed_input_scale=input_scale), call_of(weights))
    assert error.value.argument == "routed_input_scale"


@pytest.mark.parametrize("width", [16, 80, 112])
def test_padding_adds_zeros_only(width: int) -> None:
    weights = random_layer(width=width)
    call = call_of(weights)
    padded = call.intermediate_size
    assert padded % 64 == 0
    back = undo(prepare_experts(weights, call))
    experts = experts_of(weights, call)
    assert same_bytes(back.gate_up_weight[:, :, :width].contiguous(), experts.gate_up_weight)
    assert same_bytes(back.gate_up_block_scale[:, :, :width].contiguous(), experts.gate_up_block_scale)
    assert same_bytes(back.down_weight[..., : width // 2].contiguous(), experts.down_weight)
    assert same_bytes(back.down_block_scale[..., : width // 16].contiguous(), experts.down_block_scale)
    assert back.gate_up_weight.shape[2] == padded
    for rest in (
        back.gate_up_weight[:, :, width:],
        back.gate_up_block_scale[:, :, width:],
        back.down_weight[..., width // 2 :],
        back.down_block_scale[..., width // 16 :],
    ):
        assert not rest.contiguous().view(torch.uint8).any()


def test_a_padded_layer_computes_the_same_output() -> None:
    """In float32 products, with activations quantized between the GEMMs, as the kernels do."""
    weights = random_layer(width=80, num_shared=0)
    call = call_of(weights, strategy="split")
    padded = prepare_experts(weights, call)
    # The scalars have no padding, so the padded experts may borrow the checkpoint's.
    experts = replace(undo(padded), **{name: getattr(weights.routed, name) for name in SCALARS})
    x = torch.randn(9, 256, generator=torch.Generator().manual_seed(2))
    topk = fc.TopKRouting(torch.tensor([[0, 1], [2, 3], [1, 3]] * 3), torch.rand(9, 2))
    outputs = []
    for layer in (weights, layer_of(experts, None, 0)):
        plan = fc.plan(layer.problem("topk"), strategy="split", backend="torch")
        outputs.append(fc.fp4_moe(x, fc.prepare(layer, plan), topk))
    assert float(outputs[0].abs().max()) > 0
    torch.testing.assert_close(outputs[1], outputs[0], rtol=0, atol=2e-6 * float(outputs[0].abs().max()))


SCALARS = ("gate_up_global_scale", "gate_up_input_scale", "down_global_scale", "down_input_scale")


def test_experts_are_laid_out_alike_in_chunks_of_any_size(monkeypatch: pytest.MonkeyPatch) -> None:
    weights = random_layer(width=80)
    call = call_of(weights)
    whole = prepare_experts(weights, call)
    for size in (1, 30_000):
        monkeypatch.setattr(trtllm, "_CHUNK_BYTES", size)
        assert_same(prepare_experts(weights, call), whole)


def strided(tensor: torch.Tensor) -> torch.Tensor:
    """The same values in memory of another order."""
    wide = torch.empty(*tensor.shape[:-1], tensor.shape[-1] * 2, dtype=tensor.dtype).transpose(0, -2)
    view = wide.transpose(0, -2)[..., ::2]
    view.copy_(tensor)
    return view


def test_strided_weights_are_taken_by_their_values() -> None:
    weights = random_layer()
    assert isinstance(weights.shared, Nvfp4Experts)
    scattered = [
        Nvfp4Experts(**{name: strided(tensor) if tensor.ndim > 2 else tensor for name, tensor in tensors_of(e).items()})
        for e in (weights.routed, weights.shared)
    ]
    assert not scattered[0].gate_up_weight.is_contiguous()
    other = replace(weights, routed=scattered[0], shared=scattered[1])
    call = call_of(weights)
    assert_same(prepare_experts(other, call), prepare_experts(weights, call))
    dense, expected = prepare_dense(scattered[1]), prepare_dense(weights.shared)
    assert same_bytes(dense.down.weight, expected.down.weight)
    assert dense.down.weight.is_contiguous()
    assert all(same_bytes(a.weight, b.weight) for a, b in zip(dense.gate_up, expected.gate_up, strict=True))


def test_the_checkpoints_tensors_stay_as_they_are() -> None:
    weights = random_layer(width=80)
    assert isinstance(weights.shared, Nvfp4Experts)
    stored = [(tensor, tensor.clone()) for e in (weights.routed, weights.shared) for tensor in tensors_of(e).values()]
    prepare_experts(weights, call_of(weights))
    prepare_dense(weights.shared)
    assert all(same_bytes(tensor, copy) for tensor, copy in stored)


def on_cuda(experts: Nvfp4Experts) -> Nvfp4Experts:
    return Nvfp4Experts(**{name: tensor.cuda() for name, tensor in tensors_of(experts).items()})


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
def test_a_gpu_lays_out_the_same_bytes() -> None:
    weights = random_layer(width=80)
    assert isinstance(weights.shared, Nvfp4Experts)
    call = call_of(weights)
    on_gpu = replace(weights, routed=on_cuda(weights.routed), shared=on_cuda(weights.shared))
    prepared = prepare_experts(on_gpu, call)
    assert all(tensor.is_cuda for tensor in tensors_of(prepared).values())
    assert_same(
        TrtllmExperts(**{name: tensor.cpu() for name, tensor in tensors_of(prepared).items()}),
        prepare_experts(weights, call),
    )
    dense, expected = prepare_dense(on_cuda(weights.shared)), prepare_dense(weights.shared)
    assert same_bytes(dense.down.block_scale.cpu(), expected.down.block_scale)
    with pytest.raises(TensorError, match="cuda"):
        prepare_experts(replace(weights, routed=on_gpu.routed), call)


# Refusals


def refused(weights: MoELayerWeights, call: KernelCall) -> ArgumentError:
    with pytest.raises(ArgumentError) as error:
        prepare_experts(weights, call)
    return error.value


def test_a_hidden_size_off_the_tile_is_refused() -> None:
    call = call_of(random_layer(hidden=256))
    error = refused(random_layer(hidden=160), call)
    assert (error.argument, error.actual) == ("hidden_size", "160")
    assert error.way_out.endswith("256.")


def test_an_intermediate_size_off_the_tile_is_refused() -> None:
    weights = random_layer(width=80)
    error = refused(weights, replace(call_of(weights), intermediate_size=80))
    assert (error.argument, error.actual) == ("call.intermediate_size", "80")
    assert error.way_out.endswith("128.")


def test_an_intermediate_size_below_the_layers_is_refused() -> None:
    weights = random_layer(width=80)
    error = refused(weights, replace(call_of(weights), intermediate_size=64))
    assert "at least 80" in str(error)
    assert error.way_out.endswith("128.")


def test_an_intermediate_size_off_the_block_is_refused_with_the_weights() -> None:
    with pytest.raises(TensorError, match="multiples of 16"):
        random_experts(1, 128, 24)


@pytest.mark.parametrize(("num_shared", "rows"), [(2, 3), (2, 5), (2, 7), (0, 5)])
def test_a_call_for_other_rows_is_refused(num_shared: int, rows: int) -> None:
    weights = random_layer(num_shared=num_shared)
    call = replace(call_of(weights, strategy="split"), weight_rows=rows)
    error = refused(weights, call)
    assert (error.argument, error.actual) == ("call.weight_rows", str(rows))
    assert ("or 6" in error.expected) == (num_shared == 2)


def test_bf16_shared_experts_cannot_be_fused(checkpoints: Path) -> None:
    weights = fc.load_moe_layer(checkpoints / "shared-bf16", 1)
    call = replace(call_of(weights, strategy="split"), weight_rows=17)
    assert "split" in refused(weights, call).way_out


# The dense shared expert


def dense_weight(linear: DenseNvfp4Linear) -> torch.Tensor:
    """float32 [N, K], still divided by alpha's global scale."""
    rows, half = linear.weight.shape
    scale = linear_scale(linear.block_scale, rows, half // 8)
    return dequantize_nvfp4(Nvfp4Tensor(linear.weight, scale, torch.tensor(1.0)))


@pytest.mark.parametrize("sample", ["grouped", "ungrouped-2-shared"])
def test_a_checkpoints_shared_expert_comes_back_from_the_dense_layout(checkpoints: Path, sample: str) -> None:
    shared = fc.load_moe_layer(checkpoints / sample, 1).shared
    assert isinstance(shared, Nvfp4Experts)
    dense = prepare_dense(shared)
    assert dense.fused_gate_up
    (gate_up,) = dense.gate_up
    expected = gate_up_of(shared)[0].flatten(0, 1)
    close(dense_weight(gate_up) * (gate_up.alpha * gate_up.quantize_scale), expected)
    close(dense_weight(dense.down) * (dense.down.alpha * dense.down.quantize_scale), down_of(shared)[0])
    assert gate_up.weight.data_ptr() == shared.gate_up_weight.data_ptr()


def test_gate_and_up_with_their_own_scales_are_two_exact_layers() -> None:
    shared = random_experts(1, 128, 96)
    same = torch.full((1, 2), 2.0**-9)
    alike = replace(shared, gate_up_global_scale=same, gate_up_input_scale=same)
    assert prepare_dense(alike).fused_gate_up
    for other in (
        replace(alike, gate_up_global_scale=shared.gate_up_global_scale),
        replace(alike, gate_up_input_scale=shared.gate_up_input_scale),
    ):
        dense = prepare_dense(other)
        assert not dense.fused_gate_up
        for side, linear in enumerate(dense.gate_up):
            input_scale, global_scale = other.gate_up_input_scale[0, side], other.gate_up_global_scale[0, side]
            assert linear.alpha == input_scale * global_scale
            assert linear.quantize_scale.tolist() == [float(1 / input_scale)]
            close(dense_weight(linear) * global_scale, gate_up_of(other)[0, side])


def test_dense_shapes_and_dtypes_are_the_gemms() -> None:
    shared = random_experts(1, 192, 96)
    dense = prepare_dense(replace(shared, **dict.fromkeys(SCALARS[:2], torch.ones(1, 2))))
    found = [(tuple(one.weight.shape), tuple(one.block_scale.shape)) for one in (*dense.gate_up, dense.down)]
    # 96 / 16 and 192 / 16 columns of scales, rows up to a multiple of 128.
    assert found == [((192, 96), (256, 12)), ((192, 48), (256, 8))]
    for one in (*dense.gate_up, dense.down):
        assert one.weight.dtype == one.block_scale.dtype == torch.uint8
        assert one.alpha.dtype == one.quantize_scale.dtype == torch.float32
        assert one.alpha.shape == ()
        assert one.quantize_scale.shape == (1,)
        assert one.weight.is_contiguous()
        assert one.block_scale.is_contiguous()


def test_a_dense_width_the_gemm_does_not_take_is_padded_with_zeros() -> None:
    shared = random_experts(1, 128, 48)
    fused = prepare_dense(replace(shared, **dict.fromkeys(SCALARS[:2], torch.ones(1, 2))))
    gate_up = dense_weight(fused.gate_up[0]).view(2, 64, 128)
    down = dense_weight(fused.down)
    ones = torch.ones(1)
    assert torch.equal(gate_up[:, :48], gate_up_of(shared, torch.ones(1, 2))[0])
    assert torch.equal(down[:, :48], down_of(shared, ones)[0])
    assert not gate_up[:, 48:].any()
    assert not down[:, 48:].any()
    for side, linear in enumerate(prepare_dense(shared).gate_up):
        assert torch.equal(dense_weight(linear), gate_up[side])


@pytest.mark.parametrize(
    ("experts", "argument"), [(random_experts(2, 128, 64), "shared"), (random_experts(1, 144, 64), "hidden_size")]
)
def test_what_the_dense_gemm_cannot_take_is_refused(experts: Nvfp4Experts, argument: str) -> None:
    with pytest.raises(ArgumentError) as error:
        prepare_dense(experts)
    assert error.value.argument == argument


# FlashInfer's own code


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
