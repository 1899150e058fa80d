"""The stand-in computes what the torch reference computes, in the kernels' layout."""

from __future__ import annotations

import importlib
import importlib.util
import sys
import warnings

import pytest

torch = pytest.importorskip("torch")

import standin  # noqa: E402
from comparison import error  # noqa: E402
from launches import LOGITS, ROUTED, Layer  # noqa: E402

from flashinfer_compat.numerics import (  # noqa: E402
    append_shared_experts,
    dequantize_nvfp4,
    pack_topk,
    quantize_nvfp4,
)
from flashinfer_compat.numerics.routing import TopK  # noqa: E402
from flashinfer_compat.signatures.live import differences, read_live  # noqa: E402
from flashinfer_compat.signatures.recorded import recorded, releases  # noqa: E402

# bf16 rounding of the weights, of each expert's row and of the sum.
BF16 = 6e-3


def random_bytes(*shape: int) -> torch.Tensor:
    return torch.randint(0, 256, shape, dtype=torch.uint8, generator=torch.Generator().manual_seed(1))


def randn(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).bfloat16()


# The fake modules


@pytest.mark.parametrize("version", releases())
def test_the_installed_modules_have_the_recorded_entry_points(version: str) -> None:
    with standin.installed(version):
        live = read_live()
    assert live.problems == {}
    assert differences(recorded(version).symbols, live) == ()


def test_modules_come_and_go() -> None:
    before = {name for name in sys.modules if name.split(".")[0] == "flashinfer"}
    with standin.installed("0.7.4") as flashinfer:
        module = importlib.import_module("flashinfer")
        assert module.__version__ == "0.7.4"
        assert module.fused_moe.core.trtllm_fp4_block_scale_moe is flashinfer.objects[LOGITS]
        assert importlib.import_module("flashinfer.tllm_enums").RoutingMethodType.TopKSigmoid == 9
        assert importlib.util.find_spec("flashinfer") is not None
        assert importlib.util.find_spec("flashinfer.decode") is None
    assert {name for name in sys.modules if name.split(".")[0] == "flashinfer"} == before


@pytest.mark.parametrize(("version", "exported"), [("0.6.2", True), ("0.6.3", False)])
def test_a_name_is_exported_where_the_release_does(version: str, exported: bool) -> None:
    with standin.installed(version):
        assert hasattr(importlib.import_module("flashinfer"), "GatedActType") == exported
        assert hasattr(importlib.import_module("flashinfer.fused_moe"), "ActivationType") != exported


def test_arguments_are_really_bound() -> None:
    flashinfer = standin.release("0.6.10")
    quantize = flashinfer.objects["fp4_quantize"]
    with pytest.raises(TypeError, match="is_global_scale_inversed"):
        quantize(randn(4, 32), torch.tensor(1.0), is_global_scale_inversed=False)
    with pytest.raises(TypeError, match="input"):
        quantize(global_scale=torch.tensor(1.0))
    quantize(randn(4, 32), torch.tensor(1.0), 16, False, False)
    call = flashinfer.calls[-1]
    assert call.arguments["is_sf_swizzled_layout"] is False
    assert call.arguments["backend"] == "cuda"
    assert call.given == {"input", "global_scale", "sf_vec_size", "sf_use_ue8m0", "is_sf_swizzled_layout"}
    assert flashinfer.named("fp4_quantize") == [call]


def test_what_is_not_computed_says_so() -> None:
    with pytest.raises(NotImplementedError, match="MoELayer"):
        standin.release("0.7.4").objects["MoELayer"](None)
    with standin.release("0.6.9").objects["autotune"](True):
        pass


# Layouts


def test_the_128x4_layout_is_the_documented_one() -> None:
    scale = random_bytes(130, 6)
    flat = standin.release("0.7.4").objects["block_scale_interleave"](scale)
    assert flat.shape == (256 * 8,)
    for row, column in [(0, 0), (1, 5), (37, 3), (127, 4), (129, 5)]:
        where = (row // 128 * 2 + column // 4) * 512 + row % 32 * 16 + row % 128 // 32 * 4 + column % 4
        assert flat[where] == scale[row, column]


@pytest.mark.parametrize("version", ["0.2.11", "0.4.1", "0.6.3", "0.7.4"])
def test_the_index_helpers_do_what_the_steps_do(version: str) -> None:
    flashinfer = standin.release(version).objects
    matrix = random_bytes(256, 8)
    index = flashinfer["_maybe_get_cached_w3_w1_permute_indices"]({}, matrix, 128)
    steps = flashinfer["shuffle_matrix_a"](flashinfer["reorder_rows_for_gated_act_gemm"](matrix), 128)
    assert torch.equal(matrix[index], steps)
    if "get_w2_permute_indices_with_cache" in flashinfer:
        index = flashinfer["get_w2_permute_indices_with_cache"]({}, matrix, 128, num_elts_per_sf=16)
        scale = flashinfer["shuffle_matrix_sf_a"](matrix, 128)
        assert torch.equal(scale, flashinfer["nvfp4_block_scale_interleave"](matrix[index].contiguous()))


@pytest.mark.parametrize(("version", "collides"), [("0.4.1", True), ("0.5.0", False)])
def test_one_cache_for_both_weights_collides_before_0_5_0(version: str, collides: bool) -> None:
    flashinfer = standin.release(version).objects
    cache: dict[object, torch.Tensor] = {}
    matrix = random_bytes(256, 8)
    first = flashinfer["_maybe_get_cached_w3_w1_permute_indices"](cache, matrix, 128)
    second = flashinfer["get_w2_permute_indices_with_cache"](cache, matrix, 128)
    assert torch.equal(first, second) == collides


# The dense path


@pytest.mark.parametrize("version", ["0.2.9", "0.4.1", "0.6.8", "0.7.4"])
def test_quantizing_is_the_packages_own(version: str) -> None:
    flashinfer = standin.release(version).objects
    values, scale = randn(5, 64), torch.tensor(0.25)
    expected = quantize_nvfp4(values, scale)
    codes, linear = flashinfer["fp4_quantize"](values, 1.0 / scale, is_sf_swizzled_layout=False)
    assert torch.equal(codes, expected.codes)
    assert linear.dtype == torch.uint8
    assert torch.equal(linear.view(torch.float8_e4m3fn).float(), expected.block_scale.float())
    codes, swizzled = flashinfer["fp4_quantize"](values, 1.0 / scale)
    assert swizzled.shape == (128, 4)
    assert torch.equal(swizzled.flatten(), flashinfer["nvfp4_block_scale_interleave"](linear))
    if "is_global_scale_inversed" in recorded(version).symbols.symbols["fp4_quantize"].parameter_names:
        inverse, _ = flashinfer["fp4_quantize"](values, scale, is_global_scale_inversed=True)
        assert torch.equal(inverse, expected.codes)


@pytest.mark.parametrize(("version", "linear"), [("0.6.6", False), ("0.6.7", True)])
def test_nvfp4_quantize_knows_the_linear_layout_from_0_6_7(version: str, linear: bool) -> None:
    flashinfer = standin.release(version).objects
    layout = flashinfer["SfLayout"].layout_linear
    _, scale = flashinfer["nvfp4_quantize"](randn(5, 64), torch.tensor([4.0]), sfLayout=layout)
    assert scale.shape == ((5, 4) if linear else (128, 4))


@pytest.mark.parametrize("backend", ["cutlass", "cudnn"])
@pytest.mark.parametrize("version", ["0.2.9", "0.5.0", "0.7.4"])
def test_the_dense_gemm(version: str, backend: str) -> None:
    flashinfer = standin.release(version).objects
    a, b = quantize_nvfp4(randn(5, 128), 0.001), quantize_nvfp4(randn(96, 128, seed=1), 0.002)
    swizzle = flashinfer["nvfp4_block_scale_interleave"]
    a_scale, b_scale = (swizzle(one.block_scale.view(torch.uint8)).reshape(-1, 8) for one in (a, b))
    alpha = a.global_scale * b.global_scale
    out = flashinfer["mm_fp4"](
        a.codes, b.codes.T, a_scale, b_scale.T, alpha=alpha, out_dtype=torch.bfloat16, backend=backend
    )
    expected = dequantize_nvfp4(a) @ dequantize_nvfp4(b).T
    assert out.dtype == torch.bfloat16
    torch.testing.assert_close(out.float(), expected, rtol=2**-8, atol=1e-6)


def test_gated_activation_alone_and_with_the_quantizer() -> None:
    flashinfer = standin.release("0.6.16").objects
    values = randn(4, 64)
    gated = flashinfer["silu_and_mul"](values)
    expected = torch.nn.functional.silu(values[:, :32].float()) * values[:, 32:].float()
    assert torch.equal(gated, expected.bfloat16())
    scale = torch.tensor([8.0])
    fused = flashinfer["silu_and_mul_nvfp4_quantize"](values, scale)
    for mine, theirs in zip(fused, flashinfer["fp4_quantize"](gated, scale), strict=True):
        assert torch.equal(mine, theirs)


# The mixture of experts


@pytest.mark.parametrize("version", ["0.2.9", "0.4.1", "0.6.8"])
def test_weights_are_prepared_alike_in_every_release(layer: Layer, version: str) -> None:
    newest = layer.prepared(standin.release("0.7.4"), shared=False)
    for name, tensor in layer.prepare(standin.release(version), shared=False).items():
        expected = newest[name]
        assert tensor.dtype == expected.dtype
        assert torch.equal(tensor.view(torch.uint8), expected.view(torch.uint8))


@pytest.mark.parametrize("version", ["0.2.9", "0.2.10", "0.3.1", "0.5.3", "0.6.2", "0.6.3", "0.6.6", "0.6.8", "0.7.4"])
def test_routing_from_logits(layer: Layer, version: str) -> None:
    flashinfer = standin.release(version)
    era = flashinfer.era
    [output] = flashinfer.objects[LOGITS](**layer.arguments(flashinfer, LOGITS))
    # Before 0.6.3 the kernel keeps four groups, whatever it is told. From 0.5.0 to 0.6.6 it keeps a float32 bias.
    topk = layer.topk(4 if era.before("0.6.3") else 2, bf16_bias=era.before("0.5.0") or era.since("0.6.8"))
    assert output.dtype == torch.bfloat16
    assert error(output, layer.reference(topk, "split", shared=False)) <= BF16
    assert flashinfer.calls[-1].garbage == []


@pytest.mark.parametrize("version", ["0.6.17", "0.6.18.post1", "0.7.0", "0.7.4"])
def test_the_native_shared_expert(layer: Layer, version: str) -> None:
    flashinfer = standin.release(version)
    [output] = flashinfer.objects[LOGITS](**layer.arguments(flashinfer, LOGITS, shared=True))
    topk = layer.topk(bf16_bias=True)
    assert error(output, layer.reference(topk, "split", shared=True)) <= BF16
    assert error(output, layer.reference(topk, "split", shared=False)) > 0.1


@pytest.mark.parametrize("version", [one for one in releases() if ROUTED in recorded(one).symbols.symbols])
def test_packed_top_k(layer: Layer, version: str) -> None:
    flashinfer = standin.release(version)
    [output] = flashinfer.objects[ROUTED](**layer.arguments(flashinfer, ROUTED))
    assert error(output, layer.reference(layer.topk(), "split", shared=False)) <= BF16


@pytest.mark.parametrize(("version", "dtype"), [("0.6.12", "bfloat16"), ("0.6.15", "bfloat16"), ("0.7.4", "float32")])
def test_top_k_as_a_pair(layer: Layer, version: str, dtype: str) -> None:
    flashinfer = standin.release(version)
    topk = layer.topk()
    pair = (topk.ids, topk.weights.to(getattr(torch, dtype)))
    [output] = flashinfer.objects[ROUTED](**layer.arguments(flashinfer, ROUTED, topk_ids=pair))
    assert error(output, layer.reference(topk, "split", shared=False)) <= BF16


@pytest.mark.parametrize(("version", "num_experts"), [("0.3.0", 20), ("0.5.3", 20), ("0.6.7", 20), ("0.6.8", 17)])
def test_the_shared_expert_as_an_ordinary_one(layer: Layer, version: str, num_experts: int) -> None:
    flashinfer = standin.release(version)
    topk = layer.topk()
    more = append_shared_experts(TopK(topk.ids, topk.weights), 16, 1)
    changes = {
        **layer.prepared(flashinfer, shared=True),
        "topk_ids": pack_topk(more.ids, more.weights),
        "top_k": 5,
        "num_experts": num_experts,
        "local_num_experts": 17,
    }
    [output] = flashinfer.objects[ROUTED](**layer.arguments(flashinfer, ROUTED, **changes))
    assert error(output, layer.reference(topk, "expanded", shared=True)) <= BF16


def test_two_ranks_add_up(layer: Layer) -> None:
    flashinfer = standin.release("0.7.4")
    names = [name for name in layer.prepared(flashinfer, shared=False) if not name.startswith("hidden")]
    total = torch.zeros_like(layer.x, dtype=torch.float32)
    for offset in (0, 8):
        half = {name: (lambda whole, offset=offset: whole[offset : offset + 8]) for name in names}
        changes = {**half, "local_expert_offset": offset, "local_num_experts": 8}
        total += flashinfer.objects[ROUTED](**layer.arguments(flashinfer, ROUTED, **changes))[0].float()
    assert error(total, layer.reference(layer.topk(), "split", shared=False)) <= BF16


def test_an_output_buffer_is_written_and_returned(layer: Layer) -> None:
    flashinfer = standin.release("0.7.4")
    output = torch.empty_like(layer.x)
    returned = flashinfer.objects[ROUTED](**layer.arguments(flashinfer, ROUTED, output=output))
    assert returned[0] is output
    assert error(output, layer.reference(layer.topk(), "split", shared=False)) <= BF16


@pytest.mark.parametrize(("version", "shape"), [("0.5.0", (-1, 4)), ("0.5.3", (-1,)), ("0.7.4", (-1,))])
def test_unfinalized_parts_give_the_sum(layer: Layer, version: str, shape: tuple[int, ...]) -> None:
    flashinfer = standin.release(version)
    arguments = layer.arguments(flashinfer, ROUTED, do_finalize=False)
    rows, weights, index = flashinfer.objects[ROUTED](**arguments)
    assert index.dtype == torch.int32
    assert index.shape == index.reshape(shape).shape
    assert weights.dtype == torch.bfloat16
    chosen = rows[index.flatten().long()].reshape(*weights.shape, -1).float()
    total = (chosen * weights.float().unsqueeze(-1)).sum(1)
    assert error(total, layer.reference(layer.topk(), "split", shared=False)) <= BF16


@pytest.mark.parametrize(("version", "dtype"), [("0.6.14", torch.float32), ("0.6.15", torch.bfloat16)])
def test_unfinalized_weights_are_labelled_like_the_logits_up_to_0_6_14(
    layer: Layer, version: str, dtype: torch.dtype
) -> None:
    flashinfer = standin.release(version)
    _, weights, _ = flashinfer.objects[LOGITS](**layer.arguments(flashinfer, LOGITS, do_finalize=False))
    assert weights.dtype == dtype
    read = weights.view(torch.bfloat16).flatten()[: weights.numel()].reshape(weights.shape)
    assert torch.equal(read, layer.topk(bf16_bias=True).weights.bfloat16())


def test_the_slots_of_native_shared_experts_come_last_with_weight_one(layer: Layer) -> None:
    flashinfer = standin.release("0.7.4")
    replay = torch.full((layer.x.shape[0] + 3, 4), -1, dtype=torch.int16)
    arguments = layer.arguments(flashinfer, LOGITS, shared=True, do_finalize=False, routing_replay_out=replay)
    _, weights, index = flashinfer.objects[LOGITS](**arguments)
    assert weights.shape == (layer.x.shape[0], 5)
    assert index.shape == (layer.x.shape[0] * 5,)
    assert torch.equal(weights[:, 4], torch.ones_like(weights[:, 4]))
    assert torch.equal(replay[:-3], layer.topk(bf16_bias=True).ids.to(torch.int16))
    assert replay[-3:].eq(-1).all()


def test_biases_and_a_clamp_change_nothing_when_neutral(layer: Layer) -> None:
    flashinfer = standin.release("0.7.4")
    [plain] = flashinfer.objects[ROUTED](**layer.arguments(flashinfer, ROUTED))
    neutral = {
        "gemm1_bias": torch.zeros(16, 256),
        "gemm2_bias": torch.zeros(16, 256),
        "gemm1_alpha": torch.ones(16),
        "gemm1_beta": torch.zeros(16),
        "gemm1_clamp_limit": torch.full((16,), 1e30),
    }
    [same] = flashinfer.objects[ROUTED](**layer.arguments(flashinfer, ROUTED, **neutral))
    assert torch.equal(same, plain)
    bias = torch.zeros(16, 256)
    bias[:, 0] = 1.0
    changed = {"gemm2_bias": bias, "output2_scale_scalar": torch.ones(16)}
    base = {"output2_scale_scalar": torch.ones(16)}
    outputs = [flashinfer.objects[ROUTED](**layer.arguments(flashinfer, ROUTED, **one))[0] for one in (changed, base)]
    # Row 3 of the input is zero, so only the bias is left of it.
    assert (outputs[0] - outputs[1])[3].nonzero().flatten().tolist() == [0]


def test_the_missing_layout_is_blamed_on_the_caller(layer: Layer) -> None:
    flashinfer = standin.release("0.7.0")
    arguments = layer.arguments(flashinfer, ROUTED)
    del arguments["hidden_states_scale_layout"]
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        flashinfer.objects[ROUTED](**arguments)
    assert [(one.category, one.filename) for one in caught] == [(DeprecationWarning, __file__)]
