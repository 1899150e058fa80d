"""The trtllm backend through the stand-in for FlashInfer's kernels."""

from __future__ import annotations

import sys
import warnings
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")

import standin  # noqa: E402
from comparison import error  # noqa: E402
from safetensors.torch import load_file  # noqa: E402

import flashinfer_compat as fc  # noqa: E402
from flashinfer_compat.numerics import Nvfp4Tensor, dequantize_nvfp4, quantize_nvfp4  # noqa: E402
from flashinfer_compat.weights.values import Nvfp4Experts  # noqa: E402

# bf16 routing weights and expert rows, where the reference has one rounding at the end.
BF16 = 8e-3
# The dense FP4 GEMM rounds the first projection to bf16 before it is quantized again, which moves codes to neighbours.
DENSE = 3e-2
RELEASES = ("0.5.3", "0.6.7.post3", "0.6.12", "0.6.15.post1", "0.6.17", "0.7.0", "0.7.4")
WITH_NATIVE = ("0.6.17", "0.6.18.post1", "0.7.0", "0.7.4")


def run(folder: Path, release: str, strategy: str, routing_input: str) -> tuple[torch.Tensor, torch.Tensor, fc.Plan]:
    io = load_file(folder / "moe_io.safetensors")
    weights = fc.load_moe_layer(folder, 1)
    problem = weights.problem(routing_input)
    plan = fc.plan(problem, fc.Target.from_release(release, "sm100"), strategy=strategy, backend="trtllm")
    routing = fc.TopKRouting(io["topk_ids"], io["topk_weights"])
    if routing_input == "logits":
        routing = fc.LogitsRouting(io["router_logits"], io["e_score_correction_bias"])
    with standin.installed(release), warnings.catch_warnings():
        warnings.simplefilter("error", DeprecationWarning)
        layer = fc.prepare(weights, plan)
        return fc.fp4_moe(io["hidden_states"], layer, routing), io["output_w4a4"], plan


@pytest.mark.parametrize("release", WITH_NATIVE)
def test_native_reproduces_the_recorded_output(checkpoints: Path, release: str) -> None:
    output, expected, _ = run(checkpoints / "grouped", release, "native", "logits")
    assert error(output, expected) <= BF16


@pytest.mark.parametrize("release", RELEASES)
@pytest.mark.parametrize("name", ["grouped", "ungrouped-2-shared"])
def test_expanded_reproduces_the_recorded_output(checkpoints: Path, name: str, release: str) -> None:
    output, expected, _ = run(checkpoints / name, release, "expanded", "topk")
    assert error(output, expected) <= BF16


@pytest.mark.parametrize("routing_input", ["logits", "topk"])
@pytest.mark.parametrize("release", ["0.2.14.post1", "0.3.1", *RELEASES])
@pytest.mark.parametrize("name", ["grouped", "shared-bf16", "ungrouped-2-shared"])
def test_split_reproduces_the_recorded_output(checkpoints: Path, name: str, release: str, routing_input: str) -> None:
    output, expected, _ = run(checkpoints / name, release, "split", routing_input)
    assert error(output, expected) <= (BF16 if name == "shared-bf16" else DENSE)


@pytest.mark.parametrize("name", ["grouped", "ungrouped-2-shared"])
def test_the_dense_shared_expert_is_exact_but_for_its_bf16_roundings(checkpoints: Path, name: str) -> None:
    weights = fc.load_moe_layer(checkpoints / name, 1)
    x = load_file(checkpoints / name / "moe_io.safetensors")["hidden_states"]
    plan = fc.plan(weights.problem("topk"), fc.Target.from_release("0.7.4", "sm100"), strategy="split")
    with standin.installed("0.7.4"):
        output = fc.prepare(weights, plan).state.shared(x)
    shared = weights.shared
    gate, up = (
        (rounded(x, shared.gate_up_input_scale[0, side]) @ matrix.T).bfloat16()
        for side, matrix in enumerate(gate_up_values(shared))
    )
    hidden = (torch.nn.functional.silu(gate.float()) * up.float()).bfloat16()
    expected = rounded(hidden, shared.down_input_scale[0]) @ down_values(shared).T
    assert error(output, expected) <= 3e-3


def rounded(values: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    return dequantize_nvfp4(quantize_nvfp4(values, scale))


def gate_up_values(experts: Nvfp4Experts) -> torch.Tensor:
    parts = (experts.gate_up_weight[0], experts.gate_up_block_scale[0], experts.gate_up_global_scale[0])
    return dequantize_nvfp4(Nvfp4Tensor(*parts))


def down_values(experts: Nvfp4Experts) -> torch.Tensor:
    parts = (experts.down_weight[0], experts.down_block_scale[0], experts.down_global_scale[0])
    return dequantize_nvfp4(Nvfp4Tensor(*parts))


def test_no_tokens_call_no_kernel(checkpoints: Path) -> None:
    """FlashInfer's autotuner divides by the number of tokens."""
    weights = fc.load_moe_layer(checkpoints / "grouped", 1)
    plan = fc.plan(weights.problem("logits"), fc.Target.from_release("0.7.4", "sm100"))
    with standin.installed("0.7.4") as flashinfer:
        layer = fc.prepare(weights, plan)
        output = fc.fp4_moe(torch.zeros(0, 256, dtype=torch.bfloat16), layer, fc.LogitsRouting(torch.zeros(0, 16)))
        assert flashinfer.calls == []
    assert output.shape == (0, 256)


def test_only_bf16_is_taken(checkpoints: Path) -> None:
    weights = fc.load_moe_layer(checkpoints / "grouped", 1)
    plan = fc.plan(weights.problem("logits"), fc.Target.from_release("0.7.4", "sm100"))
    with standin.installed("0.7.4"):
        layer = fc.prepare(weights, plan)
        with pytest.raises(fc.TensorError, match="bfloat16"):
            fc.fp4_moe(torch.zeros(1, 256), layer, fc.LogitsRouting(torch.zeros(1, 16)))


def test_without_flashinfer_the_backend_says_so(checkpoints: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    weights = fc.load_moe_layer(checkpoints / "grouped", 1)
    plan = fc.plan(weights.problem("logits"), fc.Target.from_release("0.7.4", "sm100"))
    for name in ("flashinfer", "flashinfer.fused_moe", *(one for one in sys.modules if one.startswith("flashinfer."))):
        monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(fc.BackendUnavailableError, match=r"flashinfer.*halted"):
        fc.prepare(weights, plan)


def test_a_release_whose_keyword_is_gone_is_an_error_not_a_dropped_shared_expert(checkpoints: Path) -> None:
    """The plan was made for 0.7.4, the install changed under it."""
    weights = fc.load_moe_layer(checkpoints / "grouped", 1)
    plan = fc.plan(weights.problem("logits"), fc.Target.from_release("0.7.4", "sm100"), strategy="native")
    with standin.installed("0.6.15.post1"), pytest.raises(fc.ArgumentError, match=r"num_fused_shared.*0\.6\.17"):
        fc.prepare(weights, plan)


def test_an_arithmetic_that_the_kernels_do_not_have_is_refused(checkpoints: Path) -> None:
    weights = fc.load_moe_layer(checkpoints / "grouped", 1)
    plan = fc.plan(weights.problem("topk"), fc.Target.from_release("0.7.4", "sm100"), backend="trtllm")
    with standin.installed("0.7.4"):
        with pytest.raises(fc.ArgumentError, match="flashinfer or None") as caught:
            fc.prepare(weights, plan, fc.LayerOptions(quantizer="modelopt"))
        assert caught.value.argument == "options.quantizer"
        fc.prepare(weights, plan, fc.LayerOptions(quantizer="flashinfer"))


def test_a_bias_may_lie_in_strides(checkpoints: Path) -> None:
    folder = checkpoints / "grouped"
    io, weights = load_file(folder / "moe_io.safetensors"), fc.load_moe_layer(folder, 1)
    plan = fc.plan(weights.problem("logits"), fc.Target.from_release("0.7.4", "sm100"), strategy="native")
    bias = io["e_score_correction_bias"].repeat_interleave(2)[::2]
    with standin.installed("0.7.4"):
        layer = fc.prepare(weights, plan)
        output = fc.fp4_moe(io["hidden_states"], layer, fc.LogitsRouting(io["router_logits"], bias))
    assert error(output, io["output_w4a4"]) <= BF16
