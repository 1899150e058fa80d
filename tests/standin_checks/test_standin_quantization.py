"""A scale for each token and 4over6: what each release computes with them, refuses and misreads."""

from __future__ import annotations

from typing import Any

import pytest

torch = pytest.importorskip("torch")

import standin  # noqa: E402
from comparison import error  # noqa: E402
from launch_outcomes import good, misread, refused  # noqa: E402
from launches import LOGITS, Layer  # noqa: E402
from sample_experts import BF16, PER_TOKEN, Experts, dequantized, per_token, per_token_arguments  # noqa: E402

from flashinfer_compat.numerics import Nvfp4Tensor, dequantize_nvfp4, quantize_nvfp4, unpack_e2m1  # noqa: E402

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
