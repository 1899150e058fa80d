"""The optional arguments: what each release computes with them, refuses and misreads."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")

import standin  # noqa: E402
from comparison import error  # noqa: E402
from launches import LOGITS, ROUTED, Layer  # noqa: E402
from standin import LaunchError  # noqa: E402
from torch.nn import functional  # noqa: E402

from flashinfer_compat.numerics import (  # noqa: E402
    Nvfp4Tensor,
    dequantize_nvfp4,
    quantize_nvfp4,
    unpack_e2m1,
    w2_permutation,
    w13_permutation,
)

E, H, INTER, T = 16, 256, 128, 33
BF16 = 6e-3
PER_TOKEN = 1.0 / (448.0 * 6.0)
Physical = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


@pytest.fixture(scope="module")
def layer() -> Layer:
    return Layer(Path(__file__).parents[1] / "data" / "checkpoints" / "grouped")


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """The matrices are small; threads would only wait for each other."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def run(layer: Layer, version: str, entry: str = ROUTED, shared: bool = False, **changes: Any) -> Any:
    flashinfer = standin.release(version)
    result = flashinfer.objects[entry](**layer.arguments(flashinfer, entry, shared=shared, **changes))
    return flashinfer.calls[-1], result


def good(layer: Layer, version: str, entry: str = ROUTED, shared: bool = False, **changes: Any) -> torch.Tensor:
    call, result = run(layer, version, entry, shared, **changes)
    assert call.garbage == []
    found: torch.Tensor = result[0]
    return found


def refused(layer: Layer, version: str, outcome: type[Exception], entry: str = ROUTED, **changes: Any) -> None:
    with pytest.raises(outcome):
        run(layer, version, entry, **changes)


def misread(layer: Layer, version: str, entry: str = ROUTED, **changes: Any) -> None:
    call, [output, *_] = run(layer, version, entry, **changes)
    assert call.garbage
    assert output.isnan().all()


# The reference: the sample's experts on float32 weights, in the order of the checkpoint.


def silu_and_mul(up: torch.Tensor, gate: torch.Tensor) -> torch.Tensor:
    return up * functional.silu(gate)


class Experts:
    """Each expert's dequantized matrices, with the gate's global scale for both halves of GEMM1."""

    def __init__(self, layer: Layer) -> None:
        routed = layer.weights.routed
        self.topk = layer.topk()
        self.gate_scale = routed.gate_up_global_scale[:, 0].contiguous()
        self.down_scale = routed.down_global_scale
        gate_up = Nvfp4Tensor(routed.gate_up_weight, routed.gate_up_block_scale, torch.ones(()))
        self.gate, self.up = (dequantize_nvfp4(gate_up) * self.gate_scale.reshape(-1, 1, 1, 1)).unbind(1)
        down = Nvfp4Tensor(routed.down_weight, routed.down_block_scale, torch.ones(()))
        self.down = dequantize_nvfp4(down) * self.down_scale.reshape(-1, 1, 1)

    def __call__(
        self,
        x: torch.Tensor,
        physical: Physical = silu_and_mul,
        requantize: Callable[[torch.Tensor], torch.Tensor] = lambda hidden: hidden,
    ) -> torch.Tensor:
        output = torch.zeros(len(x), H)
        for token, ids in enumerate(self.topk.ids.tolist()):
            for slot, expert in enumerate(ids):
                hidden = physical(self.up[expert] @ x[token], self.gate[expert] @ x[token])
                weight = self.topk.weights[token, slot].bfloat16().float()
                output[token] += weight * (self.down[expert] @ requantize(hidden)).bfloat16().float()
        return output


def per_token(hidden: torch.Tensor) -> torch.Tensor:
    """A row through the explicit quantizer: bf16, then a scale of its own."""
    row = hidden.bfloat16()
    amax = row.abs().max().float()
    return dequantize_nvfp4(quantize_nvfp4(row, amax * PER_TOKEN)) if amax else row.float()


def per_token_arguments(layer: Layer, version: str, experts: Experts, **quantizer: Any) -> dict[str, Any]:
    flashinfer = standin.release(version).objects
    linear = flashinfer["SfLayout"].layout_linear
    scale_inv = quantizer.pop("scale_inv", PER_TOKEN)
    codes, scale, per_row = flashinfer["nvfp4_quantize"](
        layer.x, scale_inv, sfLayout=linear, per_token_activation=True, **quantizer
    )
    return {
        "hidden_states": codes,
        "hidden_states_scale": scale.view(torch.float8_e4m3fn),
        "per_token_scale": per_row,
        "output1_scale_scalar": experts.gate_scale,
        "output1_scale_gate_scalar": experts.gate_scale,
        "output2_scale_scalar": experts.down_scale,
    }


def dequantized(arguments: dict[str, Any]) -> torch.Tensor:
    ones = torch.ones(())
    found = dequantize_nvfp4(Nvfp4Tensor(arguments["hidden_states"], arguments["hidden_states_scale"], ones))
    scale = arguments.get("per_token_scale")
    return found if scale is None else found * scale[:, None]


def static_arguments(layer: Layer, experts: Experts) -> tuple[dict[str, Any], torch.Tensor]:
    """The scalars of equal global scales of gate and up, without a scale of GEMM2's input; and the input."""
    input_scale = layer.weights.routed.gate_up_input_scale.max()
    quantized = quantize_nvfp4(layer.x, input_scale)
    scalars = {
        "hidden_states": quantized.codes,
        "hidden_states_scale": quantized.block_scale,
        "output1_scale_gate_scalar": input_scale * experts.gate_scale,
        "output1_scale_scalar": input_scale * experts.gate_scale / HIDDEN_SCALE,
        "output2_scale_scalar": experts.down_scale * HIDDEN_SCALE,
    }
    return scalars, dequantize_nvfp4(quantized)


HIDDEN_SCALE = 2.0**-8


def static(hidden: torch.Tensor) -> torch.Tensor:
    return dequantize_nvfp4(quantize_nvfp4(hidden, HIDDEN_SCALE))


# A scale for each token


@pytest.mark.parametrize("version", ["0.6.11", "0.6.17", "0.7.4"])
def test_per_token_scales(layer: Layer, version: str) -> None:
    experts = Experts(layer)
    arguments = per_token_arguments(layer, version, experts)
    output = good(layer, version, **arguments)
    assert error(output, experts(dequantized(arguments), requantize=per_token)) <= BF16


def test_per_token_scales_with_native_shared_experts(layer: Layer) -> None:
    flashinfer = standin.release("0.7.4")
    experts = Experts(layer)
    arguments = per_token_arguments(layer, "0.7.4", experts)
    prepared = layer.prepared(flashinfer, shared=True)
    for name in ("output1_scale_scalar", "output1_scale_gate_scalar", "output2_scale_scalar"):
        arguments[name] = torch.cat((arguments[name], prepared[name][-1:]))
    both = good(layer, "0.7.4", LOGITS, shared=True, **arguments)
    assert both.isfinite().all()
    refused(layer, "0.6.10", TypeError, LOGITS, per_token_scale=arguments["per_token_scale"])


def test_per_token_scales_that_are_misread(layer: Layer) -> None:
    arguments = per_token_arguments(layer, "0.7.4", Experts(layer))
    scale = arguments["per_token_scale"]
    misread(layer, "0.7.4", **{**arguments, "per_token_scale": scale[:-1]})
    misread(layer, "0.7.4", **{**arguments, "per_token_scale": scale.bfloat16()})
    refused(layer, "0.7.4", TypeError, per_token_scale=1.0)


def test_the_per_token_quantizer() -> None:
    flashinfer = standin.release("0.7.4").objects
    linear = flashinfer["SfLayout"].layout_linear
    values = torch.randn(5, 64, generator=torch.Generator().manual_seed(0)).bfloat16()
    values[2] = 0
    codes, scale, per_row = flashinfer["nvfp4_quantize"](values, PER_TOKEN, sfLayout=linear, per_token_activation=True)
    torch.testing.assert_close(per_row, values.abs().amax(1).float() / 2688, rtol=1e-6, atol=0)
    assert per_row[2] == 0
    assert not codes[2].any()
    for row in (0, 1, 3, 4):
        expected = quantize_nvfp4(values[row : row + 1], per_row[row])
        assert torch.equal(codes[row], expected.codes[0])
        assert torch.equal(scale[row], expected.block_scale.view(torch.uint8)[0])
    _, swizzled, _ = flashinfer["nvfp4_quantize"](values, torch.tensor([PER_TOKEN]), per_token_activation=True)
    assert torch.equal(swizzled.flatten(), flashinfer["block_scale_interleave"](scale))
    _, _, doubled = flashinfer["nvfp4_quantize"](
        values, PER_TOKEN, linear, per_token_activation=True, backend="cute-dsl", out_scale=torch.tensor(2.0)
    )
    assert torch.equal(doubled, 2 * per_row)


@pytest.mark.parametrize(
    ("version", "changes", "outcome"),
    [
        ("0.6.10", {}, TypeError),
        ("0.6.12", {"backend": "cute-dsl"}, ValueError),
        ("0.6.13", {"backend": "cute-dsl"}, None),
        ("0.7.1", {"backend": "cake"}, ValueError),
        ("0.7.2", {"backend": "cake"}, None),
        ("0.6.18", {"backend": "auto"}, ValueError),
        ("0.7.4", {"backend": "auto"}, None),
        ("0.7.4", {"sf_vec_size": 32}, ValueError),
        ("0.7.4", {"out_scale": torch.ones(1)}, ValueError),
        ("0.7.4", {"out_scale": torch.ones(1), "per_token_activation": False}, ValueError),
        ("0.7.4", {"expanded_idx_to_permuted_idx": torch.zeros(4), "per_token_activation": False}, ValueError),
        ("0.7.4", {"a_global_sf": 1 / (256 * 6)}, None),
        ("0.7.4", {"a_global_sf": 1 / (256 * 6), "nvfp4_4over6": None}, ValueError),
        ("0.7.4", {"a": torch.ones(2, 2, 32, dtype=torch.bfloat16)}, ValueError),
    ],
)
def test_what_the_per_token_quantizer_takes(version: str, changes: dict[str, Any], outcome: Any) -> None:
    quantize = standin.release(version).objects["nvfp4_quantize"]
    arguments = {"a": torch.ones(4, 32, dtype=torch.bfloat16), "a_global_sf": PER_TOKEN, "per_token_activation": True}
    arguments |= changes
    if outcome is None:
        assert len(quantize(**arguments)) == 3
    else:
        with pytest.raises(outcome):
            quantize(**arguments)


# 4over6


def block_error(values: torch.Tensor, codes: torch.Tensor, scale: torch.Tensor, multiplier: float) -> torch.Tensor:
    found = dequantize_nvfp4(Nvfp4Tensor(codes, scale.view(torch.float8_e4m3fn), torch.tensor(multiplier)))
    return (found - values.float()).abs().reshape(len(values), -1, 16).sum(-1)


def test_4over6_takes_the_better_block_scale() -> None:
    flashinfer = standin.release("0.7.4").objects
    config = flashinfer["NVFP44Over6Config"]()
    values = torch.randn(64, 64, generator=torch.Generator().manual_seed(0)).bfloat16()
    multiplier = 2.0**-9

    def quantized(recipe: Any) -> tuple[torch.Tensor, torch.Tensor]:
        found: tuple[torch.Tensor, torch.Tensor] = flashinfer["fp4_quantize"](
            values, torch.tensor(1 / multiplier), is_sf_swizzled_layout=False, nvfp4_4over6=recipe
        )
        return found

    before, after = (block_error(values, *quantized(recipe), multiplier) for recipe in (None, config))
    assert (after <= before).all()
    assert (after < before).any()
    codes, scale = quantized(config)
    largest = (unpack_e2m1(codes) & 7).reshape(64, 4, 16).amax(-1)
    # Code 7 is 6, code 6 is 4.
    assert set(largest.unique().tolist()) == {6, 7}
    same = quantized(None)
    assert torch.equal(codes.reshape(64, 4, 8)[largest == 7], same[0].reshape(64, 4, 8)[largest == 7])
    assert (scale[largest == 6] > same[1][largest == 6]).all()


def test_4over6_by_hand() -> None:
    flashinfer = standin.release("0.7.1").objects
    # 3 is no multiple of 4/6, which 2 and 3 of six steps are; of a largest code of 4 all of these are codes.
    values = torch.tensor([[4.0, 3.0, 2.0, 1.5] * 4]).bfloat16()
    codes, scale = flashinfer["fp4_quantize"](
        values,
        torch.tensor(1.0),
        is_sf_swizzled_layout=False,
        nvfp4_4over6=flashinfer["NVFP44Over6Config"](err_mode="mse"),
    )
    assert scale.view(torch.float8_e4m3fn).float().tolist() == [[1.0]]
    assert unpack_e2m1(codes).tolist() == [[6, 5, 4, 3] * 4]


def test_4over6_in_the_moe_is_for_the_second_gemm(layer: Layer) -> None:
    flashinfer = standin.release("0.7.4").objects
    experts = Experts(layer)
    plain = per_token_arguments(layer, "0.7.4", experts)
    for config in (flashinfer["NVFP44Over6Config"](), flashinfer["NVFP44Over6Config"](256, "MSE")):
        found = good(layer, "0.7.4", **plain, nvfp4_4over6=config)
        expected = experts(dequantized(plain))
        assert 1e-4 < error(found, good(layer, "0.7.4", **plain)) < 0.15
        assert error(found, expected) <= error(good(layer, "0.7.4", **plain), expected)


@pytest.mark.parametrize(
    ("version", "recipe", "outcome"),
    [
        ("0.7.4", {"e4m3_max": 448}, ValueError),
        ("0.7.4", None, None),
        ("0.7.2", None, TypeError),
    ],
)
def test_4over6_needs_per_token_scales(layer: Layer, version: str, recipe: Any, outcome: Any) -> None:
    config = None if recipe is None else standin.release(version).objects["NVFP44Over6Config"](**recipe)
    if outcome is None:
        good(layer, version, nvfp4_4over6=config)
    else:
        refused(layer, version, outcome, nvfp4_4over6=config)


def test_4over6_recipes_that_are_none() -> None:
    flashinfer = standin.release("0.7.4").objects
    config = flashinfer["NVFP44Over6Config"]
    values, scale = torch.ones(2, 32, dtype=torch.bfloat16), torch.tensor(1.0)
    with pytest.raises(ValueError, match="256 or 448"):
        config(300)
    with pytest.raises(ValueError, match="MAE or MSE"):
        config(err_mode="MAX")
    with pytest.raises(TypeError, match="NVFP44Over6Config"):
        flashinfer["fp4_quantize"](values, scale, nvfp4_4over6=True)
    with pytest.raises(ValueError, match="NVFP4 only"):
        flashinfer["fp4_quantize"](values, scale, 32, True, nvfp4_4over6=config())
    with pytest.raises(NotImplementedError, match="fast_math"):
        flashinfer["fp4_quantize"](values, scale, nvfp4_4over6=config(err_use_fast_math=True))
    assert "NVFP44Over6Config" not in standin.release("0.7.0").objects


# The epilogue of the first GEMM


def swiglu_oai(up: torch.Tensor, gate: torch.Tensor) -> torch.Tensor:
    up, gate = up.clamp(-0.8, 0.8), gate.clamp(max=0.8)
    return (up + 0.5) * gate * torch.sigmoid(1.702 * gate)


def geglu(up: torch.Tensor, gate: torch.Tensor) -> torch.Tensor:
    return up * functional.gelu(gate)


def swiglu_step(up: torch.Tensor, gate: torch.Tensor) -> torch.Tensor:
    return up.clamp(-0.8, 0.8) * functional.silu(gate).clamp(max=0.8)


def situ(up: torch.Tensor, gate: torch.Tensor) -> torch.Tensor:
    return 1.3 * torch.tanh(up / 1.3) * 0.7 * torch.tanh(gate / 0.7) * torch.sigmoid(gate)


def over(value: float, divisor: torch.Tensor) -> torch.Tensor:
    return torch.full((E,), value) / divisor


@pytest.mark.parametrize(
    ("version", "number", "physical"),
    [("0.7.4", 3, swiglu_oai), ("0.6.3", 4, geglu), ("0.7.2.post1", 7, swiglu_step), ("0.6.16", 10, situ)],
)
@pytest.mark.parametrize("rows", ["static", "per token"])
def test_activations_in_the_units_of_the_accumulator(
    layer: Layer, version: str, number: int, physical: Physical, rows: str
) -> None:
    experts = Experts(layer)
    if rows == "per token":
        if version == "0.6.3":
            version = "0.6.11"
        arguments = per_token_arguments(layer, version, experts)
        x, requantize = dequantized(arguments), per_token
    else:
        arguments, x = static_arguments(layer, experts)
        requantize = static
    gate = arguments["output1_scale_gate_scalar"]
    if physical is swiglu_oai:
        arguments |= {"gemm1_alpha": torch.full((E,), 1.702), "gemm1_beta": over(0.5, gate)}
    if physical is situ:
        arguments |= {"gemm1_alpha": torch.full((E,), 0.7), "gemm1_beta": torch.full((E,), 1.3)}
        # What comes out of the activation is dequantized.
        arguments["output1_scale_scalar"] = arguments["output1_scale_scalar"] / gate
    if physical in (swiglu_oai, swiglu_step):
        arguments["gemm1_clamp_limit"] = over(0.8, gate)
    output = good(layer, version, **arguments, activation_type=number)
    assert error(output, experts(x, physical, requantize)) <= BF16


@pytest.mark.parametrize(
    ("version", "number", "changes", "outcome"),
    [
        ("0.6.12", 7, {}, NotImplementedError),
        ("0.7.2", 7, {}, LaunchError),
        ("0.7.4", 7, {"gemm1_alpha": torch.ones(E)}, LaunchError),
        ("0.7.4", 7, {"gemm1_clamp_limit": torch.ones(E, dtype=torch.bfloat16)}, LaunchError),
        ("0.6.15", 10, {}, LaunchError),
        ("0.7.4", 8, {}, LaunchError),
        ("0.7.4", 5, {}, LaunchError),
        ("0.7.4", 12, {}, LaunchError),
        ("0.7.4", 9, {}, NotImplementedError),
        ("0.7.4", 10, {"gemm1_clamp_limit": torch.ones(E)}, NotImplementedError),
    ],
)
def test_activations_that_are_refused(
    layer: Layer, version: str, number: int, changes: dict[str, Any], outcome: type[Exception]
) -> None:
    refused(layer, version, outcome, activation_type=number, **changes)


def test_biases_are_raw_and_lie_like_the_weights(layer: Layer) -> None:
    experts = Experts(layer)
    arguments, x = static_arguments(layer, experts)
    generator = torch.Generator().manual_seed(0)
    up, gate, down = (torch.randn(E, size, generator=generator) * 0.5 for size in (INTER, INTER, H))
    raw = torch.cat((up, gate), 1) / arguments["output1_scale_gate_scalar"][:, None]
    arguments["gemm1_bias"] = raw[:, w13_permutation(2 * INTER)]
    arguments["gemm2_bias"] = (down / arguments["output2_scale_scalar"][:, None])[:, w2_permutation(H)]
    expected = torch.zeros(T, H)
    for token, ids in enumerate(experts.topk.ids.tolist()):
        for slot, one in enumerate(ids):
            hidden = silu_and_mul(experts.up[one] @ x[token] + up[one], experts.gate[one] @ x[token] + gate[one])
            row = (experts.down[one] @ static(hidden) + down[one]).bfloat16().float()
            expected[token] += experts.topk.weights[token, slot].bfloat16().float() * row
    assert error(good(layer, "0.7.4", **arguments), expected) <= BF16


# LoRA


def deltas(scale: float = 0.5) -> torch.Tensor:
    return (torch.randn(T, 4, 2 * INTER, generator=torch.Generator().manual_seed(0)) * scale).bfloat16()


def test_a_lora_delta_is_added_before_the_activation(layer: Layer) -> None:
    experts = Experts(layer)
    arguments, x = static_arguments(layer, experts)
    delta = deltas()
    expected = torch.zeros(T, H)
    for token, ids in enumerate(experts.topk.ids.tolist()):
        for slot, one in enumerate(ids):
            up, gate = delta[token, slot].float().chunk(2)
            hidden = silu_and_mul(experts.up[one] @ x[token] + up, experts.gate[one] @ x[token] + gate)
            row = (experts.down[one] @ static(hidden)).bfloat16().float()
            expected[token] += experts.topk.weights[token, slot].bfloat16().float() * row
    # Dividing by the scale rounds the delta to bf16 once more, and that moves codes.
    assert error(good(layer, "0.7.4", **arguments, gemm1_lora_delta=delta), expected) <= 3e-2
    assert error(good(layer, "0.7.4", **arguments), expected) > 0.1


@pytest.mark.parametrize("do_finalize", [True, False])
def test_a_lora_delta_brings_the_first_gemms_output(layer: Layer, do_finalize: bool) -> None:
    experts = Experts(layer)
    arguments, _ = static_arguments(layer, experts)
    _, found = run(layer, "0.6.18", **arguments, gemm1_lora_delta=deltas(), do_finalize=do_finalize)
    assert len(found) == (3 if do_finalize else 4)
    index, codes = found[-2] if do_finalize else found[2], found[-1]
    assert (codes.dtype, codes.shape[1]) == (torch.uint8, INTER // 2)
    assert index.shape == (T * 4,)
    assert len(codes) > int(index.max())
    arguments = per_token_arguments(layer, "0.7.4", experts)
    _, [*_, rows] = run(layer, "0.7.4", **arguments, gemm1_lora_delta=deltas())
    assert (rows.dtype, rows.shape[1]) == (torch.bfloat16, INTER)


def test_lora_deltas_that_are_refused_or_misread(layer: Layer) -> None:
    refused(layer, "0.6.17", TypeError, gemm1_lora_delta=deltas())
    refused(layer, "0.7.4", TypeError, LOGITS, gemm1_lora_delta=deltas())
    misread(layer, "0.7.4", gemm1_lora_delta=deltas().float())
    misread(layer, "0.7.4", gemm1_lora_delta=deltas()[..., :INTER])
    misread(layer, "0.7.4", gemm1_lora_delta=deltas(), gemm1_bias=torch.zeros(E, 2 * INTER))
    grouped = {"routing_method_type": 2, "n_group": 4, "topk_group": 2, "num_fused_shared_experts": 1}
    refused(layer, "0.7.4", LaunchError, shared=True, gemm1_lora_delta=deltas(), **grouped)


# The chosen experts


def renormalize(top_k: int = 4, method: int = 1) -> dict[str, Any]:
    return {"n_group": None, "topk_group": None, "routing_method_type": method, "top_k": top_k}


@pytest.mark.parametrize(
    ("version", "changes", "written"),
    [
        ("0.6.8", {}, True),
        ("0.6.12", {"n_group": 1, "topk_group": 1}, False),
        ("0.6.13", {"n_group": 1, "topk_group": 1}, True),
        ("0.6.12", renormalize(), False),
        ("0.6.13", renormalize(), True),
        ("0.6.17", renormalize(1, 3), False),
        ("0.6.18", renormalize(1, 3), True),
        ("0.7.4", {}, True),
    ],
)
def test_replay_is_written_by_the_kernels_that_know_it(
    layer: Layer, version: str, changes: dict[str, Any], written: bool
) -> None:
    replay = torch.full((T + 2, changes.get("top_k", 4)), -7, dtype=torch.int16)
    call, [output] = run(layer, version, LOGITS, **changes, routing_replay_out=replay)
    assert output.isfinite().all()
    assert bool(call.garbage) != written
    assert (replay[:T] != -7).all() == written
    assert (replay[T:] == -7).all()


@pytest.mark.parametrize(("version", "outcome"), [("0.6.18", None), ("0.7.0", ValueError)])
def test_a_replay_buffer_that_is_too_short(layer: Layer, version: str, outcome: Any) -> None:
    short = {"routing_replay_out": torch.zeros(T - 1, 4, dtype=torch.int16)}
    if outcome is None:
        misread(layer, version, LOGITS, **short)
    else:
        refused(layer, version, outcome, LOGITS, **short)
    refused(layer, version, ValueError, LOGITS, routing_replay_out=torch.zeros(T, 4, dtype=torch.int32))


# Buffers


@pytest.mark.parametrize("entry", [LOGITS, ROUTED])
@pytest.mark.parametrize("size", [0, 1 << 16])
def test_a_workspace_of_any_size_changes_nothing(layer: Layer, entry: str, size: int) -> None:
    plain = good(layer, "0.7.4", entry)
    for dtype in (torch.uint8, torch.int8):
        buffer = torch.empty(size + 256, dtype=dtype)
        buffer = buffer[-buffer.data_ptr() % 256 :][:size]
        assert torch.equal(good(layer, "0.7.4", entry, workspace_buffer=buffer), plain)


@pytest.mark.parametrize(
    "changes",
    [
        {"workspace_buffer": torch.empty(1024, dtype=torch.float32)},
        {"workspace_buffer": torch.empty(4, 256, dtype=torch.uint8)},
        {"workspace_buffer": torch.empty(1024, dtype=torch.uint8)[8:]},
        {"workspace_buffer": torch.empty(1024, dtype=torch.uint8)[::2]},
        {"workspace_buffer": torch.empty(1024, dtype=torch.uint8), "do_finalize": False},
        {"workspace_buffer": torch.empty(1024, dtype=torch.uint8), "gemm1_lora_delta": deltas()},
    ],
)
def test_workspaces_that_are_refused(layer: Layer, changes: dict[str, Any]) -> None:
    refused(layer, "0.7.4", LaunchError, **changes)
    refused(layer, "0.7.2.post1", TypeError, workspace_buffer=torch.empty(1024, dtype=torch.uint8))


@pytest.mark.parametrize("version", ["0.6.0", "0.7.4"])
@pytest.mark.parametrize("width", [128, 100, 255])
def test_a_narrower_output_gets_the_first_columns(layer: Layer, version: str, width: int) -> None:
    plain = good(layer, version)
    output = torch.full((T, width), torch.nan, dtype=torch.bfloat16)
    assert good(layer, version, output=output) is output
    assert torch.equal(output, plain[:, :width])


@pytest.mark.parametrize(
    ("version", "shape", "dtype", "outcome"),
    [
        ("0.5.3", (T, 128), torch.bfloat16, "garbage"),
        ("0.5.3", (T, 256), torch.float32, "garbage"),
        ("0.5.3", (T - 1, 256), torch.bfloat16, "garbage"),
        ("0.5.3", (T, 256), torch.bfloat16, None),
        ("0.6.0", (T - 1, 256), torch.bfloat16, AssertionError),
        ("0.7.4", (T, 257), torch.bfloat16, AssertionError),
        ("0.7.4", (T, 256), torch.float16, ValueError),
    ],
)
def test_outputs_of_another_kind(layer: Layer, version: str, shape: Any, dtype: torch.dtype, outcome: Any) -> None:
    changes = {"output": torch.empty(shape, dtype=dtype)}
    if outcome is None:
        good(layer, version, **changes)
    elif outcome == "garbage":
        misread(layer, version, **changes)
    else:
        refused(layer, version, outcome, **changes)


@pytest.mark.parametrize(("version", "looked_at"), [("0.6.14", True), ("0.6.15", False)])
def test_an_output_that_is_not_written(layer: Layer, version: str, looked_at: bool) -> None:
    changes = {"output": torch.zeros(1, 1), "do_finalize": False}
    if looked_at:
        refused(layer, version, ValueError, **changes)
    else:
        run(layer, version, **changes)
        assert not changes["output"].any()


# What changes no number


@pytest.mark.parametrize("version", ["0.2.13", "0.6.0", "0.7.4"])
def test_pdl_and_the_tuners_limit(layer: Layer, version: str) -> None:
    plain = good(layer, version)
    for changes in ({"enable_pdl": True}, {"enable_pdl": False}, {"enable_pdl": 1}, {"tune_max_num_tokens": 1}):
        assert torch.equal(good(layer, version, **changes), plain)
    for changes in ({"enable_pdl": "yes"}, {"enable_pdl": torch.ones(())}, {"tune_max_num_tokens": None}):
        refused(layer, version, TypeError, **changes)
    refused(layer, "0.2.12", TypeError, tune_max_num_tokens=1)
    refused(layer, "0.2.11", TypeError, enable_pdl=True)
