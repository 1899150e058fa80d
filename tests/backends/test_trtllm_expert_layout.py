"""The experts in the kernels' layout: the checkpoint's values come back from it, and what has no layout is refused."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

torch = pytest.importorskip("torch")

from hypothesis import given, settings  # noqa: E402
from hypothesis import strategies as st  # noqa: E402
from layout_undone import assert_undone, close, same_bytes, undo  # noqa: E402
from trtllm_layers import (  # noqa: E402
    SAMPLE_CALLS,
    SCALARS,
    call_of,
    experts_of,
    layer_of,
    random_experts,
    random_layer,
)

import flashinfer_compat as fc  # noqa: E402
from flashinfer_compat.backends.trtllm import weights as trtllm  # noqa: E402
from flashinfer_compat.backends.trtllm.weights import TrtllmExperts, prepare_dense, prepare_experts  # noqa: E402
from flashinfer_compat.errors import ArgumentError, TensorError  # noqa: E402
from flashinfer_compat.weights.values import MoELayerWeights, Nvfp4Experts  # noqa: E402

if TYPE_CHECKING:
    from flashinfer_compat.planning.decision import KernelCall


def tensors_of(value: Any) -> dict[str, torch.Tensor]:
    return {name: one for name, one in vars(value).items() if isinstance(one, torch.Tensor)}


def assert_same(a: TrtllmExperts, b: TrtllmExperts) -> None:
    others = tensors_of(b)
    assert all(same_bytes(tensor, others[name]) for name, tensor in tensors_of(a).items())


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
