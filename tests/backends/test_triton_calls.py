"""`prepare` and `fp4_moe` on the triton backend."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")

from comparison import error  # noqa: E402
from safetensors.torch import load_file  # noqa: E402
from triton_layers import DEVICE, INTERPRETED, W4A4, inputs, layer  # noqa: E402

import flashinfer_compat as fc  # noqa: E402
from flashinfer_compat.numerics import pack_topk  # noqa: E402
from flashinfer_compat.vocabulary import Activation, RoutingMethod  # noqa: E402
from flashinfer_compat.weights.values import LayerConfig, MoELayerWeights, Nvfp4Experts, Router  # noqa: E402

TARGET = fc.Target.from_release("0.7.4", "sm90")
WAYS = (("native", "logits"), ("expanded", "topk"), ("expanded", "packed"), ("split", "logits"), ("split", "topk"))


@pytest.mark.parametrize(("strategy", "kind"), WAYS)
def test_a_checkpoint_layer_runs_through_fp4_moe(checkpoints: Path, strategy: str, kind: str) -> None:
    folder = checkpoints / "grouped"
    io = {name: one.to(DEVICE) for name, one in load_file(folder / "moe_io.safetensors").items()}
    weights = fc.load_moe_layer(folder, 1, device=DEVICE)
    problem = weights.problem("logits" if kind == "logits" else "topk")
    target = fc.Target.from_release("0.7.4", "sm90")
    layer = fc.prepare(weights, fc.plan(problem, target, strategy=strategy, backend="triton"))
    x, tokens = io["hidden_states"][:9], 9
    routing = fc.LogitsRouting(io["router_logits"][:9], io["e_score_correction_bias"])
    if kind == "topk":
        routing = fc.TopKRouting(io["topk_ids"][:9], io["topk_weights"][:9])
    elif kind == "packed":
        routing = fc.PackedTopKRouting(pack_topk(io["topk_ids"][:9], io["topk_weights"][:9]))
    output, replay = torch.zeros_like(x), torch.zeros(tokens, 4, dtype=torch.int16, device=DEVICE)
    options = fc.CallOptions(output=output, routing_replay_out=replay, enable_pdl=True)
    assert fc.fp4_moe(x, layer, routing, options) is output
    # Packed weights are bf16.
    assert error(output, io["output_w4a4"][:9]) <= (6e-3 if kind == "packed" else 5e-3)
    assert torch.equal(replay.sort(-1).values, io["topk_ids"][:9].to(torch.int16).sort(-1).values)
    with pytest.raises(fc.ArgumentError, match="without the final sum"):
        fc.fp4_moe_unfinalized(x, layer, routing)


@dataclass(frozen=True)
class Sample:
    """A small layer as `prepare` takes it, its plan on triton, and a call."""

    weights: fc.MoELayerWeights
    plan: fc.Plan
    x: torch.Tensor
    routing: fc.TopKRouting

    def run(self, plan: fc.Plan, tokens: int, options: fc.LayerOptions | None = None) -> torch.Tensor:
        routing = fc.TopKRouting(self.routing.ids[:tokens], self.routing.weights[:tokens])
        return fc.fp4_moe(self.x[:tokens], fc.prepare(self.weights, plan, options), routing)


@pytest.fixture
def sample() -> Sample:
    given = layer("w4a4")
    x, ids, weights = inputs(given.problem, 3)
    # Quotients on ties, and a shared expert with an input scale of its own.
    x[0, :16] = x[0, :16].clamp(-1.5, 1.5)
    x[0, 0], x[0, 16] = 213 / 128, 71 / 16
    assert isinstance(given.shared, Nvfp4Experts)
    held = MoELayerWeights(
        LayerConfig(64, 32, 5, 3, 1, 1, 1, 1.0, True, RoutingMethod.DEEPSEEK_V3, Activation.SWIGLU),
        Router(torch.zeros(5, 64), None),
        replace(given.routed, gate_up_input_scale=torch.full((5, 2), 71 / 16 / 2688, device=DEVICE)),
        replace(given.shared, gate_up_input_scale=torch.full((1, 2), 2.0**-10, device=DEVICE)),
        0,
        0,
        1,
    )
    plan = fc.plan(held.problem("topk"), TARGET, strategy="expanded", backend="triton")
    return Sample(held, replace(plan, split_from_tokens=None), x, fc.TopKRouting(ids, weights))


@pytest.mark.parametrize("tokens", [1, 2, 3])
def test_a_plan_says_from_how_many_tokens_a_fused_layer_runs_split(sample: Sample, tokens: int) -> None:
    output = sample.run(replace(sample.plan, split_from_tokens=2), tokens)
    fused, split = sample.run(sample.plan, tokens), sample.run(replace(sample.plan, strategy=fc.Strategy.SPLIT), tokens)
    form, other = (fused, split) if tokens < 2 else (split, fused)
    assert torch.equal(output, form)
    assert not torch.equal(output, other)


def test_both_forms_of_a_switched_layer_hold_the_same_tensors(sample: Sample) -> None:
    # A slice of a wider tensor, which the kernels cannot read where it lies.
    stored = sample.weights.routed.down_weight
    sliced = torch.cat([stored] * 2, 2)[..., : stored.shape[2]]
    weights = replace(sample.weights, routed=replace(sample.weights.routed, down_weight=sliced))
    state = fc.prepare(weights, replace(sample.plan, split_from_tokens=3)).state
    assert state.for_tokens(2) is state
    assert state.for_tokens(3) is state.split
    for name in ("gate_up_weight", "gate_up_block_scale", "down_weight", "down_block_scale"):
        for fused, split in (("routed", state.split.experts), ("appended", state.split.shared)):
            assert getattr(getattr(state.experts, fused), name).data_ptr() == getattr(split.routed, name).data_ptr()
    assert torch.equal(state.experts.routed.down_weight, stored.view(torch.int32))


@pytest.mark.parametrize("quantizer", ["flashinfer", None])
def test_triton_and_torch_round_as_the_layer_was_asked_to(sample: Sample, quantizer: str | None) -> None:
    options = fc.LayerOptions(quantizer=quantizer)  # type: ignore[arg-type]
    reference_plan = replace(sample.plan, backend=fc.Backend.TORCH)
    outputs = [sample.run(one, 2, options) for one in (sample.plan, reference_plan)]
    if INTERPRETED or quantizer != "flashinfer":
        assert error(*outputs) <= W4A4
    unasked = error(outputs[0], sample.run(sample.plan, 2))
    assert unasked > 1e-3 if quantizer == "flashinfer" else unasked == 0


def test_weights_may_begin_at_any_byte(sample: Sample) -> None:
    stored = sample.weights.routed.down_weight
    shifted = torch.empty(stored.numel() + 1, dtype=torch.uint8, device=DEVICE)[1:].view(stored.shape)
    shifted.copy_(stored)
    weights = replace(sample.weights, routed=replace(sample.weights.routed, down_weight=shifted))
    output = fc.fp4_moe(sample.x, fc.prepare(weights, sample.plan), sample.routing)
    assert torch.equal(output, sample.run(sample.plan, 3))


@pytest.mark.parametrize("strategy", ["native", "split"])
def test_a_bias_may_lie_in_strides(sample: Sample, strategy: str) -> None:
    plan = fc.plan(sample.weights.problem("logits"), TARGET, strategy=strategy, backend="triton")
    layer = fc.prepare(sample.weights, plan)
    logits = torch.randn(3, 5, generator=torch.Generator().manual_seed(4)).to(DEVICE)
    strided = (torch.randn(10, generator=torch.Generator().manual_seed(5)) * 2).to(DEVICE)[::2]
    output = fc.fp4_moe(sample.x, layer, fc.LogitsRouting(logits, strided))
    assert torch.equal(output, fc.fp4_moe(sample.x, layer, fc.LogitsRouting(logits, strided.contiguous())))
    assert not torch.equal(output, fc.fp4_moe(sample.x, layer, fc.LogitsRouting(logits, None)))


@pytest.mark.parametrize("strategy", ["expanded", "split"])
def test_the_input_scale_is_the_references(sample: Sample, strategy: str) -> None:
    layers = [
        fc.prepare(sample.weights, fc.plan(sample.weights.problem("topk"), TARGET, strategy=strategy, backend=backend))
        for backend in ("triton", "torch")
    ]
    assert float(layers[0].input_scale) == float(layers[1].input_scale)


def test_the_input_scale_of_all_ranks_is_kept(sample: Sample) -> None:
    weights = replace(sample.weights, routed_input_scale=0.5)
    layer = fc.prepare(weights, replace(sample.plan, strategy=fc.Strategy.SPLIT))
    assert float(layer.input_scale) == 0.5
