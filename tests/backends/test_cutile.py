"""The cutile backend on FlashInfer's own host code; only the kernel is plain PyTorch (`cutile_on_cpu`)."""

from __future__ import annotations

import gc
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from comparison import error  # noqa: E402
from cutile_on_cpu import CutileOnCpu, cutile_on_cpu  # noqa: E402
from safetensors.torch import load_file  # noqa: E402

import flashinfer_compat as fc  # noqa: E402
from flashinfer_compat.backends.cutile import experts  # noqa: E402
from flashinfer_compat.errors import ArgumentError, BackendUnavailableError, TensorError  # noqa: E402
from flashinfer_compat.numerics import pack_topk  # noqa: E402
from flashinfer_compat.verification.layers import TOKENS  # noqa: E402
from flashinfer_compat.verification.run import self_checks  # noqa: E402

pytestmark = pytest.mark.flashinfer

CAPABILITIES = {"sm89": (8, 9), "sm90": (9, 0), "sm120": (12, 0), "sm121": (12, 1)}
CPU = torch.device("cpu")
# Both GEMMs' results, the activation between them and the sum are rounded to bf16.
TOLERANCE = 1e-2
CHECKPOINTS = ("grouped", "shared-bf16", "ungrouped-2-shared")


@pytest.fixture
def sm90(monkeypatch: pytest.MonkeyPatch) -> CutileOnCpu:
    return cutile_on_cpu(monkeypatch, (9, 0))


def plan(weights: fc.MoELayerWeights, given: str = "topk", strategy: str = "auto", arch: str = "sm90") -> fc.Plan:
    problem = weights.problem(given, numerics="w4a16")
    return fc.plan(problem, fc.Target.from_release("0.7.4", arch), strategy=strategy, backend="cutile")


def reference(weights: fc.MoELayerWeights, x: torch.Tensor, routing: Any) -> torch.Tensor:
    made = fc.plan(weights.problem(routing.routing_input, numerics="w4a16"), backend="torch")
    return fc.fp4_moe(x.float(), fc.prepare(weights, made), routing)


@pytest.mark.parametrize("architecture", CAPABILITIES)
@pytest.mark.parametrize(
    ("name", "strategy", "given"),
    [
        ("grouped", "expanded", "topk"),
        ("grouped", "split", "topk"),
        ("grouped", "split", "logits"),
        ("shared-bf16", "split", "topk"),
        ("ungrouped-2-shared", "expanded", "topk"),
        ("ungrouped-2-shared", "split", "logits"),
    ],
)
def test_it_gives_what_was_recorded(
    monkeypatch: pytest.MonkeyPatch, checkpoints: Path, architecture: str, name: str, strategy: str, given: str
) -> None:
    cutile_on_cpu(monkeypatch, CAPABILITIES[architecture])
    io = load_file(checkpoints / name / "moe_io.safetensors")
    weights = fc.load_moe_layer(checkpoints / name, 1)
    layer = fc.prepare(weights, plan(weights, given, strategy, architecture))
    routing = (
        fc.TopKRouting(io["topk_ids"], io["topk_weights"])
        if given == "topk"
        else fc.LogitsRouting(io["router_logits"], io["e_score_correction_bias"])
    )
    output = fc.fp4_moe(io["hidden_states"], layer, routing)
    assert output.dtype == torch.bfloat16
    assert error(output, io["output_w4a16"]) <= TOLERANCE


@pytest.mark.parametrize("architecture", CAPABILITIES)
def test_every_self_check_passes(monkeypatch: pytest.MonkeyPatch, architecture: str) -> None:
    cutile_on_cpu(monkeypatch, CAPABILITIES[architecture])
    checks = list(self_checks(fc.Target.from_release("0.7.4", architecture), CPU, [fc.Backend.CUTILE]))
    assert [one.problem for one in checks if one.problem] == []
    assert {(one.kind.strategy, one.kind.routing_input, one.kind.shared_format) for one in checks} == {
        ("expanded", "topk", "nvfp4"),
        *(("split", given, stored) for given in ("topk", "logits") for stored in ("nvfp4", "bf16", "none")),
    }
    assert {one.kind.numerics for one in checks} == {"w4a16"}


@pytest.fixture
def grouped(checkpoints: Path) -> fc.MoELayerWeights:
    return fc.load_moe_layer(checkpoints / "grouped", 1)


def made_up(weights: fc.MoELayerWeights, tokens: int) -> tuple[torch.Tensor, fc.TopKRouting]:
    config, generator = weights.config, torch.Generator().manual_seed(tokens)
    ids = torch.rand(tokens, config.num_experts, generator=generator).topk(config.top_k).indices
    x = torch.randn(tokens, config.hidden_size, generator=generator).bfloat16()
    return x, fc.TopKRouting(ids, torch.rand(tokens, config.top_k, generator=generator))


@pytest.mark.parametrize("strategy", ["expanded", "split"])
@pytest.mark.parametrize("tokens", TOKENS)
def test_any_number_of_tokens(sm90: CutileOnCpu, grouped: fc.MoELayerWeights, strategy: str, tokens: int) -> None:
    layer = fc.prepare(grouped, plan(grouped, strategy=strategy))
    x, routing = made_up(grouped, tokens)
    output = fc.fp4_moe(x, layer, routing)
    assert output.shape == x.shape
    if tokens == 0:
        assert sm90.launches == []
    else:
        assert error(output, reference(grouped, x, routing)) <= TOLERANCE


def test_gate_and_up_keep_global_scales_of_their_own(sm90: CutileOnCpu, grouped: fc.MoELayerWeights) -> None:
    scale = grouped.routed.gate_up_global_scale * torch.tensor([1.0, 0.25])
    uneven = replace(grouped, routed=replace(grouped.routed, gate_up_global_scale=scale))
    x, routing = made_up(uneven, 7)
    right = reference(uneven, x, routing)
    for strategy in ("expanded", "split"):
        output = fc.fp4_moe(x, fc.prepare(uneven, plan(uneven, strategy=strategy)), routing)
        assert error(output, right) <= TOLERANCE


def test_geglu(sm90: CutileOnCpu, grouped: fc.MoELayerWeights) -> None:
    other = replace(grouped, config=replace(grouped.config, activation=fc.Activation.GEGLU))
    x, routing = made_up(other, 7)
    output = fc.fp4_moe(x, fc.prepare(other, plan(other)), routing)
    assert error(output, reference(other, x, routing)) <= TOLERANCE
    assert error(output, reference(grouped, x, routing)) > TOLERANCE


@pytest.mark.parametrize("name", ["grouped", "shared-bf16"])
def test_a_gate_of_the_shared_expert(sm90: CutileOnCpu, checkpoints: Path, name: str) -> None:
    gate = (torch.randn(1, 256, generator=torch.Generator().manual_seed(3)) * 0.2).bfloat16()
    weights = replace(fc.load_moe_layer(checkpoints / name, 1), shared_gate=gate)
    x, routing = made_up(weights, 7)
    output = fc.fp4_moe(x, fc.prepare(weights, plan(weights)), routing)
    assert error(output, reference(weights, x, routing)) <= TOLERANCE


def test_more_tokens_than_flashinfer_takes_run_in_several_calls(
    monkeypatch: pytest.MonkeyPatch, sm90: CutileOnCpu, grouped: fc.MoELayerWeights
) -> None:
    monkeypatch.setattr(experts, "TOKENS_AT_ONCE", 64)
    layer = fc.prepare(grouped, plan(grouped))
    x, routing = made_up(grouped, 130)
    assert error(fc.fp4_moe(x, layer, routing), reference(grouped, x, routing)) <= TOLERANCE
    assert [one.ids.shape[0] for one in sm90.launches] == [64, 64, 2]


def test_every_form_of_top_k_and_of_hidden_states(sm90: CutileOnCpu, grouped: fc.MoELayerWeights) -> None:
    layer = fc.prepare(grouped, plan(grouped, strategy="expanded"))
    x, topk = made_up(grouped, 5)
    rounded = topk.weights.bfloat16()
    right = fc.fp4_moe(x, layer, fc.TopKRouting(topk.ids, rounded.float()))
    forms = [
        fc.TopKRouting(topk.ids.int(), rounded),
        fc.TopKRouting(topk.ids.T.contiguous().T, rounded.T.contiguous().T),
        fc.PackedTopKRouting(pack_topk(topk.ids, rounded)),
    ]
    for form in forms:
        assert torch.equal(fc.fp4_moe(x, layer, form), right)
    wide = torch.cat((x, x), 1)[:, :256]
    assert not wide.is_contiguous()
    assert torch.equal(fc.fp4_moe(wide, layer, forms[0]), right)


def test_the_shared_expert_is_appended_with_weight_one(sm90: CutileOnCpu, grouped: fc.MoELayerWeights) -> None:
    x, routing = made_up(grouped, 3)
    fc.fp4_moe(x, fc.prepare(grouped, plan(grouped, strategy="expanded")), routing)
    (launch,) = sm90.launches
    assert launch.ids[:, -1].tolist() == [grouped.config.num_experts] * 3
    assert launch.weights[:, -1].tolist() == [1.0] * 3
    assert launch.w1.shape[0] == grouped.config.num_experts + 1


@pytest.mark.parametrize("strategy", ["expanded", "split"])
def test_output_and_replay_are_written(sm90: CutileOnCpu, grouped: fc.MoELayerWeights, strategy: str) -> None:
    layer = fc.prepare(grouped, plan(grouped, strategy=strategy))
    x, routing = made_up(grouped, 5)
    output = torch.full_like(x, float("nan"))
    replay = torch.full((6, grouped.config.top_k), -1, dtype=torch.int16)
    options = fc.CallOptions(output=output, routing_replay_out=replay, enable_pdl=False, tune_max_num_tokens=64)
    assert fc.fp4_moe(x, layer, routing, options) is output
    assert torch.equal(output, fc.fp4_moe(x, layer, routing))
    assert torch.equal(replay[:5].long(), routing.ids)
    assert replay[5].tolist() == [-1] * grouped.config.top_k
    nothing = fc.CallOptions(output=x.new_empty(0, 256))
    empty = fc.TopKRouting(routing.ids[:0], routing.weights[:0])
    assert fc.fp4_moe(x[:0], layer, empty, nothing) is nothing.output


def test_the_input_is_not_modified(sm90: CutileOnCpu, grouped: fc.MoELayerWeights) -> None:
    layer = fc.prepare(grouped, plan(grouped))
    x, routing = made_up(grouped, 5)
    before = [one.clone() for one in (x, routing.ids, routing.weights)]
    fc.fp4_moe(x, layer, routing)
    assert all(torch.equal(one, other) for one, other in zip(before, (x, routing.ids, routing.weights), strict=True))


@pytest.mark.parametrize("chunk_bytes", [1, 100_000, 2**30])
def test_on_sm90_the_layout_is_the_checkpoints(
    monkeypatch: pytest.MonkeyPatch, sm90: CutileOnCpu, grouped: fc.MoELayerWeights, chunk_bytes: int
) -> None:
    monkeypatch.setattr(experts, "_CHUNK_BYTES", chunk_bytes)
    view = fc.prepare(grouped, plan(grouped, strategy="expanded")).state.experts.weights.get_view("cutile_nvfp4")
    for start, part in ((0, grouped.routed), (grouped.config.num_experts, grouped.shared)):
        rows = slice(start, start + part.num_experts)
        expected = {
            "w1": part.gate_up_weight.flatten(1, 2),
            "w1_scale": part.gate_up_block_scale.flatten(1, 2),
            "w1_global_scale": part.gate_up_global_scale,
            "w2": part.down_weight,
            "w2_scale": part.down_block_scale,
            "w2_global_scale": part.down_global_scale,
        }
        assert set(view) == set(expected)
        for name, tensor in expected.items():
            assert torch.equal(view[name][rows].view(torch.uint8), tensor.view(torch.uint8)), name


def test_layers_of_equal_sizes_share_scratch_memory_within_a_thread(
    sm90: CutileOnCpu, grouped: fc.MoELayerWeights
) -> None:
    layers = [fc.prepare(grouped, plan(grouped, strategy="expanded")) for _ in range(2)]
    shared = layers[0].state.experts.layer
    assert layers[1].state.experts.layer is shared
    assert fc.prepare(grouped, plan(grouped, strategy="split")).state.experts.layer is not shared
    x, routing = made_up(grouped, 5)
    outputs = [fc.fp4_moe(x, layer, routing) for layer in layers]
    thread = threading.Thread(target=lambda: outputs.append(fc.fp4_moe(x, layers[0], routing)))
    thread.start()
    thread.join()
    assert all(torch.equal(output, outputs[0]) for output in outputs[1:])
    # A CUDA graph of that thread may still be replayed, so what it used stays.
    assert len(shared.by_thread) == 2
    assert len({id(layer) for layer in shared.by_thread.values()}) == 2
    assert len(experts._SHARED) == 1
    layers.clear()
    del shared
    gc.collect()
    assert len(experts._SHARED) == 0


REFUSED: dict[str, tuple[Callable[[fc.MoELayerWeights, fc.PreparedLayer, torch.Tensor, Any], Any], type, str]] = {
    "a LoRA delta": (
        lambda weights, layer, x, routing: fc.fp4_moe(
            x,
            layer,
            routing,
            fc.CallOptions(
                gemm1_lora_delta=x.new_zeros(x.shape[0], weights.config.top_k, 2 * weights.config.intermediate_size)
            ),
        ),
        ArgumentError,
        "gemm1_lora_delta: expected None on the cutile backend",
    ),
    "programmatic launches": (
        lambda weights, layer, x, routing: fc.fp4_moe(x, layer, routing, fc.CallOptions(enable_pdl=True)),
        ArgumentError,
        "enable_pdl: expected False or None",
    ),
    "float16": (
        lambda weights, layer, x, routing: fc.fp4_moe(x.half(), layer, routing),
        TensorError,
        "hidden_states: expected bfloat16",
    ),
    "rounded input": (
        lambda weights, layer, x, routing: fc.fp4_moe(
            fc.QuantizedInput(x.new_zeros(5, 128, dtype=torch.uint8), x.new_zeros(5, 16, dtype=torch.uint8)),
            layer,
            routing,
        ),
        TensorError,
        "hidden_states that are not rounded",
    ),
    "no final sum": (
        lambda weights, layer, x, routing: fc.fp4_moe_unfinalized(x, layer, routing),
        ArgumentError,
        "without the final sum",
    ),
    "4over6": (
        lambda weights, layer, x, routing: fc.prepare(weights, layer.plan, fc.LayerOptions(nvfp4_4over6=object())),
        ArgumentError,
        "nvfp4_4over6: expected None on the cutile backend",
    ),
}


@pytest.mark.parametrize("what", REFUSED)
def test_what_the_kernels_lack_is_refused(sm90: CutileOnCpu, grouped: fc.MoELayerWeights, what: str) -> None:
    ask, kind, said = REFUSED[what]
    layer = fc.prepare(grouped, plan(grouped))
    x, routing = made_up(grouped, 5)
    with pytest.raises(kind, match=said):
        ask(grouped, layer, x, routing)
    assert sm90.launches == []


def test_a_missing_compiler_is_told_while_loading(
    monkeypatch: pytest.MonkeyPatch, sm90: CutileOnCpu, grouped: fc.MoELayerWeights
) -> None:
    import flashinfer.cutile

    monkeypatch.setattr(flashinfer.cutile, "is_cuda_tile_available", lambda device=None: False)
    with pytest.raises(BackendUnavailableError, match=r"tileiras.*SM90.*pip install") as caught:
        fc.prepare(grouped, plan(grouped))
    assert "Registered unified runners" not in str(caught.value)


def test_torch_compile_takes_it_as_one_operator(sm90: CutileOnCpu, grouped: fc.MoELayerWeights) -> None:
    layer = fc.prepare(grouped, plan(grouped))
    x, routing = made_up(grouped, 5)
    compiled = torch.compile(lambda x: fc.fp4_moe(x, layer, routing), backend="eager", fullgraph=True)
    assert torch.equal(compiled(x), fc.fp4_moe(x, layer, routing))
