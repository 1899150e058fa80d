"""fp4_moe under torch.compile, and its operator."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")

import standin  # noqa: E402
from safetensors.torch import load_file  # noqa: E402

import flashinfer_compat as fc  # noqa: E402
from flashinfer_compat.numerics import pack_topk  # noqa: E402


@pytest.fixture(scope="module")
def sample(checkpoints: Path) -> tuple[dict[str, torch.Tensor], fc.MoELayerWeights]:
    folder = checkpoints / "grouped"
    return load_file(folder / "moe_io.safetensors"), fc.load_moe_layer(folder, 1)


@pytest.mark.parametrize("kind", ["topk", "packed", "logits"])
def test_the_whole_graph_is_traced(sample: tuple[dict[str, torch.Tensor], fc.MoELayerWeights], kind: str) -> None:
    io, weights = sample
    layer = fc.prepare(weights, fc.plan(weights.problem("logits" if kind == "logits" else "topk"), backend="torch"))
    ids, weight = io["topk_ids"], io["topk_weights"]
    packed = pack_topk(ids, weight)

    def step(x: torch.Tensor) -> torch.Tensor:
        tokens = x.shape[0]
        if kind == "topk":
            routing = fc.TopKRouting(ids[:tokens], weight[:tokens])
        elif kind == "packed":
            routing = fc.PackedTopKRouting(packed[:tokens])
        else:
            routing = fc.LogitsRouting(io["router_logits"][:tokens], io["e_score_correction_bias"])
        return fc.fp4_moe(x * 1, layer, routing) + x

    torch._dynamo.reset()
    compiled = torch.compile(step, fullgraph=True, backend="aot_eager")
    for tokens in (33, 1, 7, 0):
        x = io["hidden_states"][:tokens]
        assert torch.equal(compiled(x), step(x))


@pytest.mark.parametrize("strategy", ["native", "split"])
def test_a_trtllm_layer_is_traced_too(
    sample: tuple[dict[str, torch.Tensor], fc.MoELayerWeights], strategy: str
) -> None:
    io, weights = sample
    plan = fc.plan(weights.problem("logits"), fc.Target.from_release("0.7.4", "sm100"), strategy=strategy)

    def step(x: torch.Tensor) -> torch.Tensor:
        routing = fc.LogitsRouting(io["router_logits"][: x.shape[0]], io["e_score_correction_bias"])
        return fc.fp4_moe(x * 1, layer, routing) * 2

    with standin.installed("0.7.4"):
        layer = fc.prepare(weights, plan)
        torch._dynamo.reset()
        compiled = torch.compile(step, fullgraph=True, backend="aot_eager")
        for tokens in (33, 5, 0):
            x = io["hidden_states"][:tokens]
            assert torch.equal(compiled(x), step(x))


def test_the_operator_passes_torchs_own_checks(sample: tuple[dict[str, torch.Tensor], fc.MoELayerWeights]) -> None:
    io, weights = sample
    layer = fc.prepare(weights, fc.plan(weights.problem("topk"), backend="torch"))
    arguments = (io["hidden_states"], io["topk_ids"], io["topk_weights"], 1, layer.number)
    torch.library.opcheck(torch.ops.flashinfer_compat.fp4_moe.default, arguments)


def test_a_layer_that_is_gone_is_named(sample: tuple[dict[str, torch.Tensor], fc.MoELayerWeights]) -> None:
    io, weights = sample
    layer = fc.prepare(weights, fc.plan(weights.problem("topk"), backend="torch"))
    number = layer.number
    del layer
    with pytest.raises(fc.ArgumentError, match="still held"):
        torch.ops.flashinfer_compat.fp4_moe(io["hidden_states"], io["topk_ids"], io["topk_weights"], 1, number)


def test_what_is_written_is_apart_where_the_operator_runs(
    sample: tuple[dict[str, torch.Tensor], fc.MoELayerWeights],
) -> None:
    io, weights = sample
    layer = fc.prepare(weights, fc.plan(weights.problem("topk"), backend="torch"))
    x = io["hidden_states"].clone()
    operator = torch.ops.flashinfer_compat.fp4_moe_into
    with pytest.raises(fc.TensorError, match=r"options.output: expected memory of its own"):
        operator(x, io["topk_ids"], io["topk_weights"], 1, layer.number, output=x)
    assert torch.equal(x, io["hidden_states"])


def test_a_bias_that_is_not_finite_is_refused_when_compiled_too(
    sample: tuple[dict[str, torch.Tensor], fc.MoELayerWeights],
) -> None:
    io, weights = sample
    layer = fc.prepare(weights, fc.plan(weights.problem("logits"), backend="torch"))
    bias = torch.full_like(io["e_score_correction_bias"], torch.nan)

    def step(x: torch.Tensor) -> torch.Tensor:
        return fc.fp4_moe(x, layer, fc.LogitsRouting(io["router_logits"], bias))

    torch._dynamo.reset()
    for one in (step, torch.compile(step, fullgraph=True, backend="aot_eager")):
        with pytest.raises(fc.TensorError, match="bias: expected finite values"):
            one(io["hidden_states"])


def test_hidden_states_that_lie_transposed_are_traced_as_they_run(
    sample: tuple[dict[str, torch.Tensor], fc.MoELayerWeights],
) -> None:
    io, weights = sample
    layer = fc.prepare(weights, fc.plan(weights.problem("topk"), backend="torch"))
    routing = fc.TopKRouting(io["topk_ids"], io["topk_weights"])
    transposed = io["hidden_states"].t().contiguous().t()
    torch._dynamo.reset()
    compiled = torch.compile(lambda x: fc.fp4_moe(x, layer, routing).view(-1), fullgraph=True, backend="aot_eager")
    assert torch.equal(compiled(transposed), fc.fp4_moe(io["hidden_states"], layer, routing).view(-1))


def test_a_changed_copy_of_a_layer_is_not_taken_for_it(
    sample: tuple[dict[str, torch.Tensor], fc.MoELayerWeights],
) -> None:
    _, weights = sample
    layer = fc.prepare(weights, fc.plan(weights.problem("topk"), backend="torch"))
    assert replace(layer, state=None).number == -1
