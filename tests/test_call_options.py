"""What an engine may say at a call beside inputs: it reaches the kernel, or is refused where the release lacks it."""

from __future__ import annotations

import copy
from dataclasses import replace
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")

import standin  # noqa: E402
from comparison import error  # noqa: E402
from safetensors.torch import load_file  # noqa: E402

import flashinfer_compat as fc  # noqa: E402
from flashinfer_compat.backends.side_stream import side_stream_for  # noqa: E402
from flashinfer_compat.vocabulary import QuantizerArithmetic  # noqa: E402

WAYS = (("native", "logits"), ("expanded", "topk"), ("split", "logits"), ("split", "topk"))
T, H, K = 33, 256, 4


class Sample:
    def __init__(self, folder: Path) -> None:
        self.io = load_file(folder / "moe_io.safetensors")
        self.weights = fc.load_moe_layer(folder, 1)
        self.x = self.io["hidden_states"]

    def routing(self, kind: str) -> fc.LogitsRouting | fc.TopKRouting:
        if kind == "topk":
            return fc.TopKRouting(self.io["topk_ids"], self.io["topk_weights"])
        return fc.LogitsRouting(self.io["router_logits"], self.io["e_score_correction_bias"])

    def layer(self, release: str, strategy: str, kind: str, **problem: object) -> fc.PreparedLayer:
        target = fc.Target.from_release(release, "sm100")
        return fc.prepare(self.weights, fc.plan(self.weights.problem(kind, **problem), target, strategy=strategy))


@pytest.fixture(scope="module")
def sample(checkpoints: Path) -> Sample:
    return Sample(checkpoints / "grouped")


def kernel_call(flashinfer: standin.StandIn) -> standin.Call:
    return next(call for call in reversed(flashinfer.calls) if call.name.startswith("trtllm_fp4"))


@pytest.mark.parametrize("release", ["0.2.9", "0.2.10", "0.5.3", "0.6.0", "0.6.12", "0.7.4"])
def test_the_result_is_written_where_the_caller_wants_it(checkpoints: Path, release: str) -> None:
    # The ungrouped sample is what 0.2.9 can route.
    sample = Sample(checkpoints / "ungrouped-2-shared")
    output = torch.full_like(sample.x, 7.0)
    with standin.installed(release):
        layer = sample.layer(release, "split", "logits")
        expected = fc.fp4_moe(sample.x, layer, sample.routing("logits"))
        given = fc.fp4_moe(sample.x, layer, sample.routing("logits"), fc.CallOptions(output=output))
    assert given is output
    assert torch.equal(output, expected)


@pytest.mark.parametrize(("strategy", "kind"), WAYS)
def test_every_strategy_writes_into_the_buffer(sample: Sample, strategy: str, kind: str) -> None:
    output = torch.zeros_like(sample.x)
    with standin.installed("0.7.4"):
        layer = sample.layer("0.7.4", strategy, kind)
        expected = fc.fp4_moe(sample.x, layer, sample.routing(kind))
        before = sample.x.clone()
        given = fc.fp4_moe(sample.x, layer, sample.routing(kind), fc.CallOptions(output=output))
    assert given is output
    assert torch.equal(output, expected)
    assert torch.equal(sample.x, before)


def test_the_torch_backend_writes_into_the_buffer(sample: Sample) -> None:
    layer = fc.prepare(sample.weights, fc.plan(sample.weights.problem("topk"), backend="torch"))
    output = torch.zeros_like(sample.x)
    assert fc.fp4_moe(sample.x, layer, sample.routing("topk"), fc.CallOptions(output=output)) is output
    assert torch.equal(output, fc.fp4_moe(sample.x, layer, sample.routing("topk")))


@pytest.mark.parametrize(
    "output",
    [
        lambda x: x,
        lambda x: x[:],
        lambda x: torch.zeros(T, H),
        lambda x: torch.zeros(T - 1, H, dtype=torch.bfloat16),
        lambda x: torch.zeros(H, T, dtype=torch.bfloat16).T,
        lambda x: x.new_zeros(T, 2 * H)[:, :H],
    ],
    ids=["the input", "a view of it", "float32", "too short", "transposed", "a slice of columns"],
)
def test_a_buffer_that_cannot_be_written_is_refused(sample: Sample, output: object) -> None:
    layer = fc.prepare(sample.weights, fc.plan(sample.weights.problem("topk"), backend="torch"))
    with pytest.raises(fc.TensorError) as caught:
        fc.fp4_moe(sample.x, layer, sample.routing("topk"), fc.CallOptions(output=output(sample.x)))
    assert caught.value.argument == "options.output"


def test_a_buffer_beside_the_input_in_one_storage_is_taken(sample: Sample) -> None:
    pool = torch.zeros(2, T, H, dtype=torch.bfloat16)
    pool[0] = sample.x
    layer = fc.prepare(sample.weights, fc.plan(sample.weights.problem("topk"), backend="torch"))
    fc.fp4_moe(pool[0], layer, sample.routing("topk"), fc.CallOptions(output=pool[1]))
    assert torch.equal(pool[0], sample.x)
    assert torch.equal(pool[1], fc.fp4_moe(sample.x, layer, sample.routing("topk")))


@pytest.mark.parametrize(("strategy", "kind"), WAYS)
def test_hints_reach_the_kernel(sample: Sample, strategy: str, kind: str) -> None:
    workspace = torch.zeros(4096, dtype=torch.uint8)
    workspace = workspace[-workspace.data_ptr() % 256 :]
    with standin.installed("0.7.4") as flashinfer:
        layer = sample.layer("0.7.4", strategy, kind)
        options = fc.CallOptions(enable_pdl=False, tune_max_num_tokens=64, workspace_buffer=workspace)
        fc.fp4_moe(sample.x, layer, sample.routing(kind), options)
        given = kernel_call(flashinfer).arguments
        assert (given["enable_pdl"], given["tune_max_num_tokens"]) == (False, 64)
        assert given["workspace_buffer"] is workspace
        # They are not remembered.
        fc.fp4_moe(sample.x, layer, sample.routing(kind))
        assert not {"enable_pdl", "tune_max_num_tokens", "workspace_buffer"} & kernel_call(flashinfer).given


@pytest.mark.parametrize(
    ("release", "option", "since"),
    [
        ("0.2.10", {"enable_pdl": True}, "0.2.11"),
        ("0.2.12", {"tune_max_num_tokens": 64}, "0.2.13"),
        ("0.7.2.post1", {"workspace_buffer": torch.zeros(0, dtype=torch.uint8)}, "0.7.4"),
        ("0.6.6", {"routing_replay_out": torch.zeros(T, K, dtype=torch.int16)}, "0.6.8"),
    ],
)
def test_what_a_release_lacks_is_an_error_that_says_since_when(
    checkpoints: Path, release: str, option: dict[str, object], since: str
) -> None:
    sample = Sample(checkpoints / "grouped")
    with standin.installed(release):
        layer = sample.layer(release, "split", "logits")
        with pytest.raises(fc.ArgumentError, match=rf"since {since}") as caught:
            fc.fp4_moe(sample.x, layer, sample.routing("logits"), fc.CallOptions(**option))
    assert caught.value.argument == next(iter(option))


@pytest.mark.parametrize(
    ("option", "argument"),
    [
        ({"enable_pdl": 1}, "options.enable_pdl"),
        ({"tune_max_num_tokens": 0}, "options.tune_max_num_tokens"),
        ({"tune_max_num_tokens": True}, "options.tune_max_num_tokens"),
        ({"routing_replay_out": torch.zeros(T, K, dtype=torch.int32)}, "options.routing_replay_out"),
        ({"routing_replay_out": torch.zeros(T - 1, K, dtype=torch.int16)}, "options.routing_replay_out"),
        ({"routing_replay_out": torch.zeros(T, K + 1, dtype=torch.int16)}, "options.routing_replay_out"),
        ({"workspace_buffer": torch.zeros(8)}, "options.workspace_buffer"),
        ({"gemm1_lora_delta": torch.zeros(T, K, 128, dtype=torch.bfloat16)}, "options.gemm1_lora_delta"),
    ],
)
def test_an_option_of_the_wrong_form_is_named(sample: Sample, option: dict[str, object], argument: str) -> None:
    layer = fc.prepare(sample.weights, fc.plan(sample.weights.problem("topk"), backend="torch"))
    with pytest.raises((fc.ArgumentError, fc.TensorError)) as caught:
        fc.fp4_moe(sample.x, layer, sample.routing("topk"), fc.CallOptions(**option))
    assert caught.value.argument == argument


REPLAYED = [
    ("0.7.4", "native", "logits"),
    ("0.7.1", "native", "logits"),
    ("0.6.8", "split", "logits"),
    ("0.7.4", "split", "logits"),
    # With top-k given, or routed before the call, no kernel is needed to know it.
    ("0.5.3", "split", "topk"),
    ("0.6.12", "expanded", "topk"),
    ("0.7.4", "expanded", "topk"),
]


@pytest.mark.parametrize(("release", "strategy", "kind"), REPLAYED)
def test_the_chosen_experts_are_replayed(sample: Sample, release: str, strategy: str, kind: str) -> None:
    replay = torch.full((T + 2, K), -1, dtype=torch.int16)
    with standin.installed(release):
        layer = sample.layer(release, strategy, kind)
        fc.fp4_moe(sample.x, layer, sample.routing(kind), fc.CallOptions(routing_replay_out=replay))
    assert torch.equal(replay[:T].sort(-1).values, sample.io["topk_ids"].to(torch.int16).sort(-1).values)
    assert bool((replay[T:] == -1).all())


@pytest.mark.parametrize("kind", ["logits", "topk"])
def test_the_torch_backend_replays(sample: Sample, kind: str) -> None:
    replay = torch.zeros(T, K, dtype=torch.int16)
    layer = fc.prepare(sample.weights, fc.plan(sample.weights.problem(kind), backend="torch"))
    fc.fp4_moe(sample.x, layer, sample.routing(kind), fc.CallOptions(routing_replay_out=replay))
    assert torch.equal(replay.sort(-1).values, sample.io["topk_ids"].to(torch.int16).sort(-1).values)


@pytest.mark.parametrize(
    ("name", "release", "strategy"),
    [("grouped", "0.6.17", "native"), ("grouped", "0.7.0", "native"), ("ungrouped-2-shared", "0.6.12", "split")],
)
def test_a_replay_that_the_kernel_would_not_write_is_refused(
    checkpoints: Path, name: str, release: str, strategy: str
) -> None:
    sample = Sample(checkpoints / name)
    replay = torch.zeros_like(sample.io["topk_ids"], dtype=torch.int16)
    with standin.installed(release):
        layer = sample.layer(release, strategy, "logits")
        with pytest.raises(fc.ArgumentError, match="does not write it"):
            fc.fp4_moe(sample.x, layer, sample.routing("logits"), fc.CallOptions(routing_replay_out=replay))


@pytest.mark.parametrize(("release", "strategy"), [("0.6.18", "expanded"), ("0.7.4", "split"), ("0.7.4", "expanded")])
def test_a_lora_delta_is_added_before_the_activation(sample: Sample, release: str, strategy: str) -> None:
    generator = torch.Generator().manual_seed(5)
    delta = torch.randn(T, K, 2 * 128, generator=generator).bfloat16() * 0.2
    options = fc.CallOptions(gemm1_lora_delta=delta)
    with standin.installed(release):
        output = fc.fp4_moe(sample.x, sample.layer(release, strategy, "topk"), sample.routing("topk"), options)
    plan = fc.plan(sample.weights.problem("topk"), backend="torch", strategy=strategy)
    layer = fc.prepare(sample.weights, plan)
    expected = fc.fp4_moe(sample.x.float(), layer, sample.routing("topk"), options)
    without = fc.fp4_moe(sample.x.float(), layer, sample.routing("topk"))
    assert error(without, expected) > 0.1
    assert error(output, expected) <= 3e-2


def test_a_lora_delta_needs_one_scale_for_gate_and_up(sample: Sample) -> None:
    routed = sample.weights.routed
    scale = routed.gate_up_global_scale.clone()
    scale[:, 1] *= 2
    weights = replace(sample.weights, routed=replace(routed, gate_up_global_scale=scale))
    delta = torch.zeros(T, K, 256, dtype=torch.bfloat16)
    with standin.installed("0.7.4"):
        plan = fc.plan(weights.problem("topk"), fc.Target.from_release("0.7.4", "sm100"), strategy="split")
        with pytest.raises(fc.ArgumentError, match="different global scales"):
            fc.fp4_moe(
                sample.x, fc.prepare(weights, plan), sample.routing("topk"), fc.CallOptions(gemm1_lora_delta=delta)
            )


@pytest.mark.parametrize("backend", ["torch", "trtllm"])
def test_a_compiled_graph_writes_into_the_buffer(sample: Sample, backend: str) -> None:
    with standin.installed("0.7.4"):
        target = fc.Target.from_release("0.7.4", "sm100")
        plan = fc.plan(sample.weights.problem("topk"), target, backend=backend, strategy="split")
        layer = fc.prepare(sample.weights, plan)
        replay = torch.zeros(T, K, dtype=torch.int16)

        def step(x: torch.Tensor, output: torch.Tensor) -> torch.Tensor:
            options = fc.CallOptions(output=output, enable_pdl=True, routing_replay_out=replay)
            return fc.fp4_moe(x * 1, layer, sample.routing("topk"), options) + 1

        output = torch.zeros_like(sample.x)
        torch._dynamo.reset()
        result = torch.compile(step, fullgraph=True, backend="aot_eager")(sample.x, output)
        expected = fc.fp4_moe(sample.x, layer, sample.routing("topk"))
    assert torch.equal(output, expected)
    assert torch.equal(result, expected + 1)
    assert torch.equal(replay, sample.io["topk_ids"].to(torch.int16))


@pytest.mark.parametrize("backend", ["eager", "aot_eager", "inductor"])
@pytest.mark.parametrize("wanted", [(), ("routing_replay_out",), ("output",), ("output", "routing_replay_out")])
def test_every_compiler_takes_every_option(sample: Sample, backend: str, wanted: tuple[str, ...]) -> None:
    layer = fc.prepare(sample.weights, fc.plan(sample.weights.problem("topk"), backend="torch"))
    expected = fc.fp4_moe(sample.x, layer, sample.routing("topk"))

    def step(x: torch.Tensor, output: torch.Tensor, replay: torch.Tensor) -> torch.Tensor:
        given = {"output": output, "routing_replay_out": replay}
        options = fc.CallOptions(**{name: given[name] for name in wanted})
        return fc.fp4_moe(x * 1, layer, sample.routing("topk"), options) + 0

    output, replay = torch.zeros_like(sample.x), torch.zeros(T, K, dtype=torch.int16)
    torch._dynamo.reset()
    result = torch.compile(step, fullgraph=True, backend=backend)(sample.x, output, replay)
    assert torch.equal(result, expected)
    assert bool(output.any()) == ("output" in wanted)
    assert bool(replay.any()) == ("routing_replay_out" in wanted)


def test_buffers_share_no_memory_with_anything_of_the_call(sample: Sample) -> None:
    layer = fc.prepare(sample.weights, fc.plan(sample.weights.problem("topk"), backend="torch"))
    pool = torch.zeros(T * H * 2, dtype=torch.uint8)
    weights = pool[: T * K * 4].view(torch.float32).view(T, K)
    weights.copy_(sample.io["topk_weights"])
    routing = fc.TopKRouting(sample.io["topk_ids"], weights)
    output = pool.view(torch.bfloat16).view(T, H)
    replay = sample.x.view(torch.int16).flatten()[: T * K].view(T, K)
    for options, other in (
        (fc.CallOptions(output=output), "weights"),
        (fc.CallOptions(routing_replay_out=replay), "hidden_states"),
        (fc.CallOptions(output=output, routing_replay_out=output.view(torch.int16).flatten()[: T * K].view(T, K)), ""),
    ):
        before = sample.x.clone()
        with pytest.raises(fc.TensorError, match=f"memory of {other}"):
            fc.fp4_moe(sample.x, layer, routing, options)
        assert torch.equal(sample.x, before)


@pytest.mark.parametrize("tokens", [-1, "abc", True])
def test_a_threshold_that_is_no_number_of_tokens_is_named(sample: Sample, tokens: object) -> None:
    plan = fc.plan(sample.weights.problem("topk"), backend="torch")
    with pytest.raises(fc.ArgumentError, match="side_stream_tokens"):
        fc.prepare(sample.weights, plan, fc.LayerOptions(side_stream_tokens=tokens))


def test_an_unknown_arithmetic_is_named() -> None:
    with pytest.raises(fc.UnknownNameError, match=r"options\.quantizer.*Did you mean 'modelopt'"):
        fc.LayerOptions(quantizer="model-opt")
    assert fc.LayerOptions(quantizer="flashinfer").quantizer is QuantizerArithmetic.FLASHINFER


@pytest.mark.parametrize("tokens", [8, [8], (0,), (True,), ("8",), (8.0,)])
def test_numbers_of_tokens_to_tune_for_are_a_tuple_of_positive_integers(tokens: object) -> None:
    with pytest.raises(fc.ArgumentError, match="autotune_tokens"):
        fc.LayerOptions(autotune_tokens=tokens)


def test_options_of_a_gpu_change_nothing_on_a_cpu(sample: Sample) -> None:
    plan = fc.plan(sample.weights.problem("topk"), backend="torch")
    options = fc.LayerOptions(side_stream_tokens=8, autotune_tokens=(1, 8))
    outputs = [
        fc.fp4_moe(sample.x, fc.prepare(sample.weights, plan, one), sample.routing("topk")) for one in (None, options)
    ]
    assert torch.equal(*outputs)
    assert side_stream_for(sample.x.device, 8) is None


def test_a_layer_is_shared_by_copies_and_short_in_print(sample: Sample) -> None:
    layer = fc.prepare(sample.weights, fc.plan(sample.weights.problem("topk"), backend="torch"))
    assert copy.deepcopy([layer])[0] is layer
    assert "tensor([[" not in repr(layer)
