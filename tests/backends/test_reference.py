from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

torch = pytest.importorskip("torch")

from comparison import error  # noqa: E402
from safetensors.torch import load_file  # noqa: E402

import flashinfer_compat as fc  # noqa: E402
from flashinfer_compat.numerics import pack_topk, route  # noqa: E402

if TYPE_CHECKING:
    from collections.abc import Mapping

SAMPLES = ("grouped", "shared-bf16", "ungrouped-2-shared")
# One bf16 rounding of the result; the recordings are float32.
BF16 = 5e-3


class Sample:
    def __init__(self, folder: Path) -> None:
        self.io: Mapping[str, torch.Tensor] = load_file(folder / "moe_io.safetensors")
        self.weights = fc.load_moe_layer(folder, 1)
        self.x = self.io["hidden_states"]

    def layer(self, routing_input: str, strategy: str = "split", numerics: str = "w4a4") -> fc.PreparedLayer:
        problem = self.weights.problem(routing_input, numerics=numerics)
        return fc.prepare(self.weights, fc.plan(problem, strategy=strategy, backend="torch"))

    @property
    def topk(self) -> fc.TopKRouting:
        return fc.TopKRouting(self.io["topk_ids"], self.io["topk_weights"])

    @property
    def logits(self) -> fc.LogitsRouting:
        return fc.LogitsRouting(self.io["router_logits"], self.io["e_score_correction_bias"])


@pytest.fixture(params=SAMPLES)
def sample(request: pytest.FixtureRequest, checkpoints: Path) -> Sample:
    return Sample(checkpoints / request.param)


@pytest.fixture
def grouped(checkpoints: Path) -> Sample:
    return Sample(checkpoints / "grouped")


@pytest.mark.parametrize("numerics", ["w4a4", "w4a16"])
def test_split_reproduces_the_recorded_output(sample: Sample, numerics: str) -> None:
    expected = sample.io[f"output_{numerics}"]
    from_topk = fc.fp4_moe(sample.x, sample.layer("topk", numerics=numerics), sample.topk)
    from_logits = fc.fp4_moe(sample.x, sample.layer("logits", numerics=numerics), sample.logits)
    assert from_topk.dtype == torch.bfloat16
    assert error(from_topk, expected) <= BF16
    assert error(from_logits, expected) <= BF16


@pytest.mark.parametrize("numerics", ["w4a4", "w4a16"])
def test_float32_results_leave_only_summation_order(sample: Sample, numerics: str) -> None:
    output = fc.fp4_moe(sample.x.float(), sample.layer("topk", numerics=numerics), sample.topk)
    assert output.dtype == torch.float32
    assert error(output, sample.io[f"output_{numerics}"]) <= 1e-6


def test_the_layers_own_router_chooses_the_recorded_experts(sample: Sample) -> None:
    config = sample.weights.config
    routing = fc.route_logits(sample.x, sample.weights.router)
    chosen = route(
        routing.logits,
        routing.bias,
        method=config.routing_method,
        top_k=config.top_k,
        n_group=config.n_group,
        topk_group=config.topk_group,
        routed_scaling_factor=config.routed_scaling_factor,
        norm_topk_prob=config.norm_topk_prob,
    )
    dense = torch.zeros(sample.x.shape[0], config.num_experts)
    ours = dense.scatter(1, chosen.ids, chosen.weights)
    recorded = dense.scatter(1, sample.io["topk_ids"], sample.io["topk_weights"])
    assert torch.equal(ours != 0, recorded != 0)
    assert float((ours - recorded).abs().max()) <= 1e-5


@pytest.mark.parametrize("numerics", ["w4a4", "w4a16"])
@pytest.mark.parametrize("name", ["grouped", "ungrouped-2-shared"])
def test_fused_forms_agree_with_split(checkpoints: Path, name: str, numerics: str) -> None:
    sample = Sample(checkpoints / name)
    # These samples share one input scale, so nothing but the order of the sum differs.
    assert sample.weights.input_scale_spread == 1.0
    x = sample.x.float()
    split = fc.fp4_moe(x, sample.layer("topk", "split", numerics), sample.topk)
    native = fc.fp4_moe(x, sample.layer("logits", "native", numerics), sample.logits)
    expanded = fc.fp4_moe(x, sample.layer("topk", "expanded", numerics), sample.topk)
    assert error(native, split) <= 1e-6
    assert error(expanded, split) <= 1e-6


def test_a_common_input_scale_is_the_only_difference_of_a_fused_form(grouped: Sample) -> None:
    """With unequal input scales fused rounds activations more coarsely; without rounding it is exact."""
    shared = grouped.weights.shared
    assert isinstance(shared, type(grouped.weights.routed))
    coarser = replace(shared, gate_up_input_scale=shared.gate_up_input_scale * 1.7)
    grouped.weights = replace(grouped.weights, shared=coarser)
    assert grouped.weights.input_scale_spread == pytest.approx(1.7)
    x = grouped.x.float()
    exact = [fc.fp4_moe(x, grouped.layer("topk", name, "w4a16"), grouped.topk) for name in ("split", "expanded")]
    assert error(exact[1], exact[0]) <= 1e-6
    rounded = [fc.fp4_moe(x, grouped.layer("topk", name, "w4a4"), grouped.topk) for name in ("split", "expanded")]
    assert 1e-3 < error(rounded[1], rounded[0]) < 0.2


def test_a_bf16_shared_expert_cannot_be_fused(checkpoints: Path) -> None:
    sample = Sample(checkpoints / "shared-bf16")
    with pytest.raises(fc.StrategyUnavailableError, match="bf16") as caught:
        sample.layer("topk", "expanded")
    assert "shared_format" in caught.value.codes


def test_packed_and_int32_topk_are_the_same_layer(grouped: Sample) -> None:
    layer = grouped.layer("topk", numerics="w4a16")
    ids, weights = grouped.io["topk_ids"], grouped.io["topk_weights"].bfloat16()
    expected = fc.fp4_moe(grouped.x, layer, fc.TopKRouting(ids, weights.float()))
    assert torch.equal(fc.fp4_moe(grouped.x, layer, fc.TopKRouting(ids.int(), weights)), expected)
    assert torch.equal(fc.fp4_moe(grouped.x, layer, fc.PackedTopKRouting(pack_topk(ids, weights))), expected)


def test_no_tokens_give_an_empty_result(sample: Sample) -> None:
    nothing = sample.x[:0]
    topk = fc.TopKRouting(sample.io["topk_ids"][:0], sample.io["topk_weights"][:0])
    for output in (
        fc.fp4_moe(nothing, sample.layer("topk"), topk),
        fc.fp4_moe(nothing, sample.layer("logits"), fc.LogitsRouting(sample.io["router_logits"][:0])),
    ):
        assert output.shape == nothing.shape
        assert output.dtype == nothing.dtype


def test_a_zero_row_stays_zero(sample: Sample) -> None:
    assert sample.x[3].abs().max() == 0
    assert fc.fp4_moe(sample.x, sample.layer("topk"), sample.topk)[3].abs().max() == 0


def test_input_is_not_modified_and_may_be_strided(grouped: Sample) -> None:
    wide = torch.stack((grouped.x, torch.ones_like(grouped.x)), dim=-1)
    strided = wide[..., 0]
    assert not strided.is_contiguous()
    before = wide.clone()
    layer = grouped.layer("topk")
    assert torch.equal(fc.fp4_moe(strided, layer, grouped.topk), fc.fp4_moe(grouped.x, layer, grouped.topk))
    assert torch.equal(wide, before)


def test_autocast_and_inference_mode_change_nothing(grouped: Sample) -> None:
    layer = grouped.layer("topk")
    expected = fc.fp4_moe(grouped.x, layer, grouped.topk)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert torch.equal(fc.fp4_moe(grouped.x, layer, grouped.topk), expected)
    with torch.inference_mode():
        assert torch.equal(fc.fp4_moe(grouped.x, layer, grouped.topk), expected)


def test_a_scaled_output_is_refused_with_a_shared_expert_only(grouped: Sample) -> None:
    problem = grouped.weights.problem("logits", routed_scaling="output")
    with pytest.raises(fc.StrategyUnavailableError) as caught:
        fc.plan(problem, backend="torch")
    assert "routed_scaling" in caught.value.codes

    without = replace(grouped.weights, shared=None, config=replace(grouped.weights.config, num_shared_experts=0))
    x = grouped.x.float()
    outputs = []
    for scaling in ("routing_weights", "output"):
        problem = without.problem("logits", routed_scaling=scaling, numerics="w4a16")
        outputs.append(fc.fp4_moe(x, fc.prepare(without, fc.plan(problem, backend="torch")), grouped.logits))
    assert error(outputs[1] * 2.5, outputs[0]) <= 1e-6


@pytest.mark.parametrize(
    ("change", "argument"),
    [
        (lambda x: x[:, :-16], "hidden_states"),
        (lambda x: x[0], "hidden_states"),
        (lambda x: x.double(), "hidden_states"),
        (lambda x: x.to(torch.int32), "hidden_states"),
        (lambda x: x.masked_fill(x == x[0, 0], float("nan")), "hidden_states"),
        (lambda x: x.masked_fill(x == x[0, 0], float("inf")), "hidden_states"),
        (lambda x: x.to("meta"), "hidden_states"),
        (lambda x: x[:-1], "topk_ids"),
    ],
)
def test_bad_hidden_states_are_named(grouped: Sample, change: object, argument: str) -> None:
    with pytest.raises(fc.TensorError) as caught:
        fc.fp4_moe(change(grouped.x), grouped.layer("topk"), grouped.topk)
    assert caught.value.argument == argument


@pytest.mark.parametrize(
    ("ids", "weights", "argument"),
    [
        (lambda i: i.clamp(max=-1), None, "topk_ids"),
        (lambda i: i + 16, None, "topk_ids"),
        (lambda i: i.short(), None, "topk_ids"),
        (lambda i: i.float(), None, "topk_ids"),
        (lambda i: i[:, :-1], None, "topk_ids"),
        (None, lambda w: w[:, :-1], "topk_weights"),
        (None, lambda w: w.double(), "topk_weights"),
        (None, lambda w: w * float("nan"), "topk_weights"),
    ],
)
def test_bad_topk_is_named(grouped: Sample, ids: object, weights: object, argument: str) -> None:
    given = fc.TopKRouting(
        ids(grouped.io["topk_ids"]) if ids else grouped.io["topk_ids"],
        weights(grouped.io["topk_weights"]) if weights else grouped.io["topk_weights"],
    )
    with pytest.raises(fc.TensorError) as caught:
        fc.fp4_moe(grouped.x, grouped.layer("topk"), given)
    assert caught.value.argument == argument


def test_bad_logits_are_named(grouped: Sample) -> None:
    layer = grouped.layer("logits")
    for logits, bias, argument in (
        (grouped.io["router_logits"][:, :-1], None, "logits"),
        (grouped.io["router_logits"] * float("nan"), None, "logits"),
        (grouped.io["router_logits"], torch.zeros(15), "bias"),
    ):
        with pytest.raises(fc.TensorError) as caught:
            fc.fp4_moe(grouped.x, layer, fc.LogitsRouting(logits, bias))
        assert caught.value.argument == argument


def test_routing_of_another_kind_than_planned_is_refused(grouped: Sample) -> None:
    with pytest.raises(fc.ArgumentError, match="routing_input='logits'"):
        fc.fp4_moe(grouped.x, grouped.layer("topk"), grouped.logits)
    with pytest.raises(fc.ArgumentError, match="TopKRouting"):
        fc.fp4_moe(grouped.x, grouped.layer("topk"), (grouped.io["topk_ids"], grouped.io["topk_weights"]))


def test_a_plan_for_another_layer_is_refused(grouped: Sample, checkpoints: Path) -> None:
    other = Sample(checkpoints / "ungrouped-2-shared")
    plan = fc.plan(other.weights.problem("topk"), backend="torch")
    with pytest.raises(fc.ArgumentError, match="num_shared_experts"):
        fc.prepare(grouped.weights, plan)


@pytest.mark.parametrize("tp_size", [2, 4])
def test_tensor_parallel_slices_sum_to_the_whole(sample: Sample, checkpoints: Path, tp_size: int) -> None:
    """w4a16: with rounded activations each slice is a different sum of the same terms, but the same rounding."""
    x = sample.x.float()
    whole = fc.fp4_moe(x, sample.layer("topk", numerics="w4a16"), sample.topk)
    name = next(
        n for n in SAMPLES if torch.equal(load_file(checkpoints / n / "moe_io.safetensors")["hidden_states"], sample.x)
    )
    total = torch.zeros_like(whole)
    for rank in range(tp_size):
        part = fc.load_moe_layer(checkpoints / name, 1, tp_rank=rank, tp_size=tp_size)
        plan = fc.plan(part.problem("topk", numerics="w4a16"), backend="torch")
        total += fc.fp4_moe(x, fc.prepare(part, plan), sample.topk)
    assert error(total, whole) <= 1e-6
