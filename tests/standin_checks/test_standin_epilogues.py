"""Activations, biases and LoRA deltas: what each release computes with them, refuses and misreads."""

from __future__ import annotations

from typing import Any

import pytest

torch = pytest.importorskip("torch")

from comparison import error  # noqa: E402
from launch_outcomes import good, misread, refused, run  # noqa: E402
from launches import LOGITS, Layer  # noqa: E402
from sample_experts import (  # noqa: E402
    BF16,
    INTER,
    E,
    Experts,
    H,
    Physical,
    T,
    deltas,
    dequantized,
    per_token,
    per_token_arguments,
    silu_and_mul,
)
from standin import LaunchError  # noqa: E402
from torch.nn import functional  # noqa: E402

from flashinfer_compat.numerics import dequantize_nvfp4, quantize_nvfp4, w2_permutation, w13_permutation  # noqa: E402

HIDDEN_SCALE = 2.0**-8


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


def static(hidden: torch.Tensor) -> torch.Tensor:
    return dequantize_nvfp4(quantize_nvfp4(hidden, HIDDEN_SCALE))


# Activations and biases


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
