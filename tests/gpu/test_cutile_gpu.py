"""The cutile backend on a GPU, against the torch backend in float32."""

from __future__ import annotations

from dataclasses import replace

import pytest

torch = pytest.importorskip("torch")

from comparison import error  # noqa: E402

import flashinfer_compat as fc  # noqa: E402
from flashinfer_compat.verification.layers import TOKENS, CheckedLayer, checked_layers  # noqa: E402
from flashinfer_compat.verification.run import self_checks  # noqa: E402
from flashinfer_compat.weights.values import LayerConfig, MoELayerWeights, Nvfp4Experts, Router  # noqa: E402

pytestmark = [pytest.mark.gpu, pytest.mark.flashinfer]

if not torch.cuda.is_available():
    pytest.skip("needs a CUDA GPU", allow_module_level=True)
cutile = pytest.importorskip("flashinfer.cutile", exc_type=ImportError)
ARCHITECTURE = "sm{}{}".format(*torch.cuda.get_device_capability())
if ARCHITECTURE not in ("sm89", "sm90", "sm120", "sm121"):
    pytest.skip(f"FlashInfer's cuTile MoE does not run on {ARCHITECTURE}", allow_module_level=True)
if not cutile.is_cuda_tile_available():
    pytest.skip("needs cuda-tile and its compiler: pip install 'cuda-tile[tileiras]'", allow_module_level=True)

DEVICE = torch.device("cuda", 0)
TARGET = fc.Target.from_release("0.7.4", ARCHITECTURE)
TOLERANCE = 1e-2
"""The kernels round both GEMMs' results, the activation between them and the sum to bf16 (FlashInfer 0.7.4,
`_run_w4a16_moe`). With one token 6.5e-3 was seen on an H200."""


def prepared(weights: MoELayerWeights, given: str, strategy: str) -> fc.PreparedLayer:
    problem = weights.problem(given, numerics="w4a16")
    return fc.prepare(weights, fc.plan(problem, TARGET, strategy=strategy, backend="cutile"))


def reference(weights: MoELayerWeights, x: torch.Tensor, routing: fc.TopKRouting | fc.LogitsRouting) -> torch.Tensor:
    plan = fc.plan(weights.problem(routing.routing_input, numerics="w4a16"), TARGET, backend="torch")
    return fc.fp4_moe(x.float(), fc.prepare(weights, plan), routing)


def chosen(weights: MoELayerWeights, tokens: int, seed: int = 0) -> tuple[torch.Tensor, fc.TopKRouting]:
    config, generator = weights.config, torch.Generator().manual_seed(tokens + seed)
    ids = torch.rand(tokens, config.num_experts, generator=generator).topk(config.top_k).indices
    x = torch.randn(tokens, config.hidden_size, generator=generator).bfloat16()
    weight = torch.rand(tokens, config.top_k, generator=generator)
    return x.to(DEVICE), fc.TopKRouting(ids.to(DEVICE, torch.int32), weight.to(DEVICE))


@pytest.fixture(scope="module")
def layers() -> dict[str, CheckedLayer]:
    return {layer.title: layer for layer in checked_layers(DEVICE)}


@pytest.fixture(scope="module")
def grouped(layers: dict[str, CheckedLayer]) -> MoELayerWeights:
    weights = layers["DeepSeekV3 with groups, NVFP4 shared expert"].weights
    # Gate and up with global scales of their own.
    scale = weights.routed.gate_up_global_scale * torch.tensor([1.0, 0.25], device=DEVICE)
    return replace(weights, routed=replace(weights.routed, gate_up_global_scale=scale))


@pytest.mark.parametrize(("strategy", "given"), [("expanded", "topk"), ("split", "topk"), ("split", "logits")])
@pytest.mark.parametrize("tokens", TOKENS)
def test_it_agrees_with_the_reference(
    layers: dict[str, CheckedLayer], grouped: MoELayerWeights, strategy: str, given: str, tokens: int
) -> None:
    layer = prepared(grouped, given, strategy)
    x, routing = chosen(grouped, tokens)
    if given == "logits":
        inputs = CheckedLayer("", grouped).inputs(tokens)
        routing = fc.LogitsRouting(inputs.logits, grouped.router.bias)
    output = fc.fp4_moe(x, layer, routing)
    assert (output.shape, output.dtype) == (x.shape, torch.bfloat16)
    if tokens:
        assert error(output, reference(grouped, x, routing)) <= TOLERANCE
        assert torch.equal(output, fc.fp4_moe(x, layer, routing))


@pytest.mark.parametrize("title", ["DeepSeekV3 with groups, bf16 shared expert", "Renormalize, no shared expert"])
def test_what_else_may_stand_beside_the_routed_experts(layers: dict[str, CheckedLayer], title: str) -> None:
    weights = layers[title].weights
    x, routing = chosen(weights, 33)
    assert (
        error(fc.fp4_moe(x, prepared(weights, "topk", "split"), routing), reference(weights, x, routing)) <= TOLERANCE
    )


def test_geglu_and_a_gate_of_the_shared_expert(grouped: MoELayerWeights) -> None:
    gate = (torch.randn(1, 256, generator=torch.Generator().manual_seed(3)) * 0.2).bfloat16().to(DEVICE)
    weights = replace(grouped, config=replace(grouped.config, activation=fc.Activation.GEGLU), shared_gate=gate)
    x, routing = chosen(weights, 33)
    assert (
        error(fc.fp4_moe(x, prepared(weights, "topk", "split"), routing), reference(weights, x, routing)) <= TOLERANCE
    )


@pytest.mark.parametrize("strategy", ["expanded", "split"])
def test_a_graph_replays_with_other_inputs(grouped: MoELayerWeights, strategy: str) -> None:
    layer = prepared(grouped, "topk", strategy)
    x, routing = chosen(grouped, 33)
    output = torch.empty_like(x)
    fc.fp4_moe(x, layer, routing)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        fc.fp4_moe(x, layer, routing, fc.CallOptions(output=output))
    for seed in (5, 6):
        other, choice = chosen(grouped, 33, seed)
        # One expert for all.
        choice.ids[:, 0] = seed
        for tensor, value in ((x, other), (routing.ids, choice.ids), (routing.weights, choice.weights)):
            tensor.copy_(value)
        output.fill_(float("nan"))
        graph.replay()
        assert error(output, reference(grouped, x, routing)) <= TOLERANCE
        assert torch.equal(output, fc.fp4_moe(x, layer, routing))


def test_more_tokens_than_one_call_takes(grouped: MoELayerWeights) -> None:
    layer = prepared(grouped, "topk", "expanded")
    x, routing = chosen(grouped, 8192 + 3)
    output = fc.fp4_moe(x, layer, routing)
    assert error(output, reference(grouped, x, routing)) <= TOLERANCE
    assert (
        error(output[-3:], reference(grouped, x[-3:], fc.TopKRouting(routing.ids[-3:], routing.weights[-3:])))
        <= TOLERANCE
    )


@pytest.mark.parametrize("strategy", ["expanded", "split"])
def test_a_large_layer_agrees(strategy: str) -> None:
    weights = large(64)
    layer = prepared(weights, "topk", strategy)
    for tokens in (1, 64):
        x, routing = chosen(weights, tokens)
        assert error(fc.fp4_moe(x, layer, routing), reference(weights, x, routing)) <= TOLERANCE


def test_this_machine_can_verify_it() -> None:
    checks = list(self_checks(TARGET, DEVICE, [fc.Backend.CUTILE]))
    assert [one.problem for one in checks if one.problem] == []
    assert {one.kind.strategy for one in checks} == {"expanded", "split"}


def test_this_machine_plans_it(grouped: MoELayerWeights) -> None:
    problem = grouped.problem("topk", numerics="w4a16")
    plan = fc.plan(problem, backend="cutile")
    assert (plan.strategy, plan.status) == (fc.Strategy.EXPANDED, fc.Evidence.ELIGIBLE)
    x, routing = chosen(grouped, 3)
    assert error(fc.fp4_moe(x, fc.prepare(grouped, plan), routing), reference(grouped, x, routing)) <= TOLERANCE


def large(num_experts: int) -> MoELayerWeights:
    """DeepSeek-R1's hidden_size, and its intermediate_size on eight ranks."""
    hidden, intermediate, generator = 7168, 256, torch.Generator(DEVICE).manual_seed(1)

    def nibbles(*shape: int) -> torch.Tensor:
        return torch.randint(0, 256, shape, dtype=torch.uint8, device=DEVICE, generator=generator)

    def scale(*shape: int) -> torch.Tensor:
        bits = torch.randint(0x30, 0x40, shape, dtype=torch.uint8, device=DEVICE, generator=generator)
        return bits.view(torch.float8_e4m3fn)

    def some(count: int) -> Nvfp4Experts:
        return Nvfp4Experts(
            gate_up_weight=nibbles(count, 2, intermediate, hidden // 2),
            gate_up_block_scale=scale(count, 2, intermediate, hidden // 16),
            gate_up_global_scale=torch.full((count, 2), 0.01, device=DEVICE),
            gate_up_input_scale=torch.full((count, 2), 2.0**-9, device=DEVICE),
            down_weight=nibbles(count, hidden, intermediate // 2),
            down_block_scale=scale(count, hidden, intermediate // 16),
            down_global_scale=torch.full((count,), 0.01, device=DEVICE),
            down_input_scale=torch.full((count,), 2.0**-7, device=DEVICE),
        )

    config = LayerConfig(
        hidden_size=hidden,
        intermediate_size=intermediate,
        num_experts=num_experts,
        top_k=8,
        num_shared_experts=1,
        n_group=8,
        topk_group=4,
        routed_scaling_factor=2.5,
        norm_topk_prob=True,
        routing_method=fc.RoutingMethod.DEEPSEEK_V3,
        activation=fc.Activation.SWIGLU,
    )
    router = Router(torch.zeros(num_experts, hidden, device=DEVICE), torch.zeros(num_experts, device=DEVICE))
    return MoELayerWeights(config, router, some(num_experts), some(1), layer=0, tp_rank=0, tp_size=1)
