"""Hidden states that the caller has rounded already, with the layer's scale or each token's own."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")

import standin  # noqa: E402
from comparison import error  # noqa: E402
from safetensors.torch import load_file  # noqa: E402
from standin.recipe import NVFP44Over6Config  # noqa: E402

import flashinfer_compat as fc  # noqa: E402
from flashinfer_compat.numerics import per_token_scale, quantize_nvfp4  # noqa: E402

WAYS = (("native", "logits"), ("expanded", "topk"), ("split", "logits"), ("split", "topk"))
SM100 = fc.Target.from_release("0.7.4", "sm100")
T, H = 33, 256


class Sample:
    def __init__(self, folder: Path) -> None:
        self.io = load_file(folder / "moe_io.safetensors")
        self.weights = fc.load_moe_layer(folder, 1)
        self.x = self.io["hidden_states"]

    def routing(self, kind: str) -> fc.LogitsRouting | fc.TopKRouting:
        if kind == "topk":
            return fc.TopKRouting(self.io["topk_ids"], self.io["topk_weights"])
        return fc.LogitsRouting(self.io["router_logits"], self.io["e_score_correction_bias"])

    def rounded(self, layer: fc.PreparedLayer) -> fc.QuantizedInput:
        quantized = quantize_nvfp4(self.x, layer.input_scale)
        return fc.QuantizedInput(quantized.codes, quantized.block_scale, hidden_states=self.x)

    def rounded_per_token(self) -> fc.QuantizedInput:
        scale = per_token_scale(self.x.float())
        quantized = quantize_nvfp4(self.x, scale)
        return fc.QuantizedInput(quantized.codes, quantized.block_scale, scale, self.x)


@pytest.fixture(scope="module")
def sample(checkpoints: Path) -> Sample:
    return Sample(checkpoints / "grouped")


@pytest.mark.parametrize(("strategy", "kind"), WAYS)
def test_it_gives_what_the_kernels_own_rounding_gives(sample: Sample, strategy: str, kind: str) -> None:
    with standin.installed("0.7.4") as flashinfer:
        layer = fc.prepare(sample.weights, fc.plan(sample.weights.problem(kind), SM100, strategy=strategy))
        expected = fc.fp4_moe(sample.x, layer, sample.routing(kind))
        flashinfer.calls.clear()
        given = sample.rounded(layer)
        assert torch.equal(fc.fp4_moe(given, layer, sample.routing(kind)), expected)
        as_bytes = replace(given, block_scale=given.block_scale.view(torch.uint8))
        assert torch.equal(fc.fp4_moe(as_bytes, layer, sample.routing(kind)), expected)
    # Only the shared expert beside the kernel is still rounded: twice in each call.
    assert len(flashinfer.named("fp4_quantize")) == (4 if strategy == "split" else 0)


@pytest.mark.parametrize(("strategy", "kind"), WAYS)
def test_it_gives_what_the_reference_rounds(sample: Sample, strategy: str, kind: str) -> None:
    layer = fc.prepare(sample.weights, fc.plan(sample.weights.problem(kind), strategy=strategy, backend="torch"))
    expected = fc.fp4_moe(sample.x, layer, sample.routing(kind))
    output = fc.fp4_moe(sample.rounded(layer), layer, sample.routing(kind))
    assert output.dtype == torch.bfloat16
    # The sample's experts all have one input scale, so split rounds alike.
    assert sample.weights.input_scale_spread == 1.0
    assert error(output, expected) <= 1e-3


@pytest.mark.parametrize("release", ["0.6.11", "0.6.14", "0.6.18", "0.7.4"])
@pytest.mark.parametrize(("strategy", "kind"), [("native", "logits"), ("expanded", "topk"), ("split", "topk")])
def test_per_token_scales_agree_with_the_reference(sample: Sample, release: str, strategy: str, kind: str) -> None:
    if strategy == "native" and release < "0.6.17":
        pytest.skip("no native strategy")
    problem = sample.weights.problem(kind, activation_scaling="per_token")
    plan = fc.plan(problem, fc.Target.from_release(release, "sm100"), strategy=strategy)
    with standin.installed(release) as flashinfer:
        layer = fc.prepare(sample.weights, plan)
        output = fc.fp4_moe(sample.x, layer, sample.routing(kind))
        given = fc.fp4_moe(sample.rounded_per_token(), layer, sample.routing(kind))
    assert not [call.garbage for call in flashinfer.calls if call.garbage]
    assert torch.equal(given, output)
    reference = fc.prepare(sample.weights, fc.plan(problem, backend="torch", strategy=strategy))
    expected = fc.fp4_moe(sample.x.float(), reference, sample.routing(kind))
    # GEMM1's bf16 result is rounded again, and ties of the quantizers differ.
    assert error(output, expected) <= 5e-2
    static = fc.fp4_moe(
        sample.x.float(),
        fc.prepare(sample.weights, fc.plan(sample.weights.problem(kind), backend="torch", strategy=strategy)),
        sample.routing(kind),
    )
    assert error(static, expected) > 5e-2


@pytest.mark.parametrize("release", ["0.6.10", "0.6.16.post4", "0.6.17"])
def test_releases_without_sound_per_token_kernels_are_refused(sample: Sample, release: str) -> None:
    problem = sample.weights.problem("topk", activation_scaling="per_token")
    with pytest.raises(fc.StrategyUnavailableError) as caught:
        fc.plan(problem, fc.Target.from_release(release, "sm100"), strategy="split")
    assert {"known_issue", "keyword_missing"} & set(caught.value.codes)


def test_tokens_are_independent_with_per_token_scales(sample: Sample) -> None:
    problem = sample.weights.problem("topk", activation_scaling="per_token")
    layer = fc.prepare(sample.weights, fc.plan(problem, backend="torch"))
    x = sample.x.float().clone()
    expected = fc.fp4_moe(x, layer, sample.routing("topk"))
    x[0] = 0
    x[1] *= 1e4
    output = fc.fp4_moe(x, layer, sample.routing("topk"))
    assert float(output[0].abs().max()) == 0
    assert torch.equal(output[2:], expected[2:])


@pytest.mark.parametrize(
    ("change", "argument"),
    [
        ({"codes": torch.zeros(T, H, dtype=torch.uint8)}, "codes"),
        ({"codes": torch.zeros(T, H // 2, dtype=torch.int8)}, "codes"),
        ({"codes": torch.zeros(H // 2, T, dtype=torch.uint8).T}, "codes"),
        ({"codes": None}, "codes"),
        ({"block_scale": torch.zeros(T, H // 16)}, "block_scale"),
        ({"block_scale": torch.zeros(128, H // 16, dtype=torch.uint8)}, "block_scale"),
        ({"per_token_scale": torch.ones(T)}, "per_token_scale"),
        ({"hidden_states": torch.zeros(T, H)}, "hidden_states"),
        ({"hidden_states": None}, "QuantizedInput.hidden_states"),
    ],
)
def test_what_does_not_fit_is_named(sample: Sample, change: dict[str, object], argument: str) -> None:
    layer = fc.prepare(sample.weights, fc.plan(sample.weights.problem("topk"), backend="torch", strategy="split"))
    with pytest.raises((fc.TensorError, fc.ArgumentError)) as caught:
        fc.fp4_moe(replace(sample.rounded(layer), **change), layer, sample.routing("topk"))
    assert caught.value.argument == argument


def test_a_per_token_layer_needs_the_scales(sample: Sample) -> None:
    problem = sample.weights.problem("topk", activation_scaling="per_token")
    layer = fc.prepare(sample.weights, fc.plan(problem, backend="torch"))
    with pytest.raises(fc.TensorError, match="per_token"):
        fc.fp4_moe(sample.rounded(layer), layer, sample.routing("topk"))


def test_a_compiled_graph_takes_it(sample: Sample) -> None:
    with standin.installed("0.7.4"):
        layer = fc.prepare(sample.weights, fc.plan(sample.weights.problem("topk"), SM100, strategy="split"))
        given = sample.rounded(layer)

        def step(codes: torch.Tensor, scale: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
            return fc.fp4_moe(fc.QuantizedInput(codes, scale, None, x * 1), layer, sample.routing("topk")) + 0

        torch._dynamo.reset()
        output = torch.compile(step, fullgraph=True, backend="aot_eager")(given.codes, given.block_scale, sample.x)
        assert torch.equal(output, fc.fp4_moe(given, layer, sample.routing("topk")))


def test_four_over_six_reaches_kernel_and_quantizer(sample: Sample) -> None:
    recipe = NVFP44Over6Config()
    problem = sample.weights.problem("topk", activation_scaling="per_token")
    with standin.installed("0.7.4") as flashinfer:
        plan = fc.plan(problem, SM100, strategy="split")
        layer = fc.prepare(sample.weights, plan, fc.LayerOptions(nvfp4_4over6=recipe))
        fc.fp4_moe(sample.x, layer, sample.routing("topk"))
    (moe,) = flashinfer.named("trtllm_fp4_block_scale_routed_moe")
    (quantizer,) = flashinfer.named("nvfp4_quantize")
    assert moe.arguments["nvfp4_4over6"] is quantizer.arguments["nvfp4_4over6"] is recipe


@pytest.mark.parametrize("backend", ["torch", "trtllm"])
def test_four_over_six_is_refused_where_it_cannot_be(sample: Sample, backend: str) -> None:
    with standin.installed("0.7.4"):
        plan = fc.plan(sample.weights.problem("topk"), SM100, backend=backend, strategy="split")
        with pytest.raises(fc.ArgumentError, match="4over6"):
            fc.prepare(sample.weights, plan, fc.LayerOptions(nvfp4_4over6=object()))


def test_weights_only_numerics_take_no_rounded_input(sample: Sample) -> None:
    problem = sample.weights.problem("topk", numerics="w4a16")
    layer = fc.prepare(sample.weights, fc.plan(problem, backend="torch"))
    with pytest.raises(fc.TensorError, match="w4a16"):
        fc.fp4_moe(sample.rounded(layer), layer, sample.routing("topk"))


@pytest.mark.parametrize("name", ["block_scale", "per_token_scale"])
def test_the_torch_backend_names_the_scale_that_is_not_finite(sample: Sample, name: str) -> None:
    scaling = "per_token" if name == "per_token_scale" else "checkpoint"
    problem = sample.weights.problem("logits", activation_scaling=scaling)
    layer = fc.prepare(sample.weights, fc.plan(problem, SM100, backend="torch", strategy="split"))
    given = sample.rounded_per_token() if name == "per_token_scale" else sample.rounded(layer)
    broken = getattr(given, name).clone()
    broken.view(torch.float32 if name == "per_token_scale" else torch.uint8).flatten()[5] = (
        float("nan") if name == "per_token_scale" else 0x7F
    )
    with pytest.raises(fc.TensorError) as caught:
        fc.fp4_moe(replace(given, **{name: broken}), layer, sample.routing("logits"))
    assert caught.value.argument == name
    assert caught.value.actual.startswith("1 of ")
