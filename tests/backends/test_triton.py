"""The layer that the Triton kernels compute, and their routing."""

from __future__ import annotations

from dataclasses import replace

import pytest

torch = pytest.importorskip("torch")

from comparison import error  # noqa: E402
from triton_layers import DEVICE, INTERPRETED, TILES, W4A4, W4A16, inputs, layer, reference, tolerance  # noqa: E402

from flashinfer_compat.backends.triton import mlp  # noqa: E402
from flashinfer_compat.backends.triton.candidates import STEPS  # noqa: E402
from flashinfer_compat.backends.triton.layer import run_top_k  # noqa: E402
from flashinfer_compat.backends.triton.routing import route_on_gpu  # noqa: E402
from flashinfer_compat.backends.triton.tiles import Product, Tiles  # noqa: E402
from flashinfer_compat.errors import TensorError  # noqa: E402
from flashinfer_compat.inputs import LogitsRouting  # noqa: E402
from flashinfer_compat.numerics import pack_topk, route  # noqa: E402
from flashinfer_compat.problem import Problem  # noqa: E402
from flashinfer_compat.vocabulary import Activation, QuantizerArithmetic, RoutingMethod  # noqa: E402
from flashinfer_compat.weights.values import DenseExperts, Nvfp4Experts  # noqa: E402

CASES = [
    # tokens, hidden_size, intermediate_size, experts, top_k, shared, tiles
    (1, 64, 32, 5, 3, 1, Tiles(8, Product(32, 32, 4, 2, split_k=2), Product(32, 32, 4, 2, tiles=2))),
    (3, 96, 96, 7, 1, 0, None),
    (3, 96, 32, 3, 3, 2, Tiles(16, Product(64, 32, 4, 2), Product(64, 32, 4, 2, tiles=2))),
    (17, 64, 64, 5, 2, 1, TILES),
]


@pytest.mark.parametrize("numerics", ["w4a16", "w4a4"])
@pytest.mark.parametrize("case", CASES, ids=lambda case: f"T{case[0]}-H{case[1]}-I{case[2]}-E{case[3]}-S{case[5]}")
def test_fused_agrees_with_the_reference(
    case: tuple[int, int, int, int, int, int, Tiles | None], numerics: str
) -> None:
    tokens, hidden, intermediate, num_experts, top_k, num_shared, tiles = case
    given = layer(numerics, num_shared, hidden=hidden, intermediate=intermediate, num_experts=num_experts, top_k=top_k)
    x, ids, weights = inputs(given.problem, tokens)
    state = given.fused() if num_shared else given.split()
    output = run_top_k(x, state, given.problem, ids, weights, tiles=tiles)
    assert error(output, reference(given, x, ids, weights)) <= tolerance(given.problem)
    if tokens > 2:
        assert output[1].abs().max() == 0


@pytest.mark.gpu
@pytest.mark.skipif(INTERPRETED, reason="the interpreter has no layouts that could differ")
@pytest.mark.parametrize("warps", [1, 2, 4, 8])
@pytest.mark.parametrize("block_m", [32, 64, 128])
@pytest.mark.parametrize(("block_t", "block_k"), [(8, 32), (16, 64), (32, 32), (64, 64)])
def test_every_way_to_cut_gives_the_same(block_t: int, block_k: int, block_m: int, warps: int) -> None:
    given = layer("w4a4", hidden=192, intermediate=64)
    x, ids, weights = inputs(given.problem, 21)
    product = Product(block_m, block_k, warps, 3)
    output = run_top_k(x, given.fused(), given.problem, ids, weights, tiles=Tiles(block_t, product, product))
    assert error(output, reference(given, x, ids, weights)) <= W4A4


def test_every_candidate_gives_the_same() -> None:
    given = layer("w4a4", intermediate=64, num_experts=2, top_k=1)
    x, ids, weights = inputs(given.problem, 2)
    start = Tiles(8, Product(64, 32, 4, 3), Product(64, 64, 4, 3, tiles=2))
    candidates = [one for step in STEPS for one in step(start, 64, 64)]
    assert len(candidates) >= 12
    # The interpreter has neither warps nor stages.
    if INTERPRETED:
        candidates = list({_without_threads(one): one for one in candidates}.values())
    expected = reference(given, x, ids, weights)
    for tiles in candidates:
        assert error(run_top_k(x, given.fused(), given.problem, ids, weights, tiles=tiles), expected) <= W4A4


def _without_threads(tiles: Tiles) -> Tiles:
    first, second = (replace(one, warps=4, stages=3) for one in (tiles.gate_up, tiles.down))
    return Tiles(tiles.block_t, first, second)


@pytest.mark.parametrize("numerics", ["w4a16", "w4a4"])
def test_split_agrees_where_every_input_scale_differs(numerics: str) -> None:
    given = layer(numerics)
    scales = torch.linspace(1.0, 3.0, 10, device=DEVICE).reshape(5, 2) * 2.0**-9
    given = replace(given, routed=replace(given.routed, gate_up_input_scale=scales))
    x, ids, weights = inputs(given.problem, 5)
    output = run_top_k(x, given.split(), given.problem, ids, weights, tiles=TILES, shared_tiles=TILES)
    assert error(output, reference(given, x, ids, weights)) <= tolerance(given.problem)


@pytest.mark.parametrize("fused", [True, False])
def test_a_layer_is_rounded_in_the_arithmetic_asked_for(fused: bool) -> None:
    given = layer("w4a4")
    x, ids, weights = inputs(given.problem, 1)
    # A quotient on a tie, where the arithmetics part.
    x[0, :16] = x[0, :16].clamp(-1.5, 1.5)
    x[0, 0], x[0, 16] = 213 / 128, 71 / 16
    scale = torch.full((5, 2), 71 / 16 / 2688, device=DEVICE)
    given = replace(given, routed=replace(given.routed, gate_up_input_scale=scale))
    assert isinstance(given.shared, Nvfp4Experts)
    given = replace(given, shared=replace(given.shared, gate_up_input_scale=scale[:1]))
    outputs = {}
    for arithmetic in QuantizerArithmetic:
        given = replace(given, arithmetic=arithmetic)
        state = given.fused() if fused else given.split()
        outputs[arithmetic] = run_top_k(x, state, given.problem, ids, weights, tiles=TILES, shared_tiles=TILES)
        if INTERPRETED or arithmetic is QuantizerArithmetic.MODELOPT:
            assert error(outputs[arithmetic], reference(given, x, ids, weights)) <= W4A4
    assert error(*outputs.values()) > 10 * W4A4


def test_a_bf16_shared_expert_is_added() -> None:
    given = layer("w4a16")
    assert isinstance(given.shared, Nvfp4Experts)
    shared = DenseExperts(
        torch.randn(1, 2, 32, 64, device=DEVICE).bfloat16() * 0.1,
        torch.randn(1, 64, 32, device=DEVICE).bfloat16() * 0.1,
    )
    x, ids, weights = inputs(given.problem, 3)
    output = run_top_k(x, replace(given, shared=shared).split(), given.problem, ids, weights, tiles=TILES)
    gate, up = (x @ weight.float().T for weight in shared.gate_up_weight[0])
    dense = (torch.nn.functional.silu(gate) * up) @ shared.down_weight[0].float().T
    expected = reference(replace(given, shared=None), x, ids, weights) + dense
    assert error(output, expected) <= W4A16


def test_a_gate_scales_the_shared_expert() -> None:
    given = layer("w4a4")
    x, ids, weights = inputs(given.problem, 3)
    gate = torch.randn(1, 64, generator=torch.Generator().manual_seed(4)).to(DEVICE)
    state = replace(given.split(), shared_gate=gate)
    output = run_top_k(x, state, given.problem, ids, weights, tiles=TILES, shared_tiles=TILES)
    routed = reference(replace(given, shared=None), x, ids, weights)
    expected = routed + torch.sigmoid(x @ gate.T) * (reference(given, x, ids, weights) - routed)
    assert error(output, expected) <= W4A4


def test_sizes_that_are_no_multiple_of_32_are_refused() -> None:
    for hidden, intermediate, name in ((48, 32, "hidden_size"), (64, 48, "intermediate_size")):
        with pytest.raises(TensorError, match="multiple of 32") as caught:
            layer("w4a16", hidden=hidden, intermediate=intermediate).fused()
        assert caught.value.argument == name


def test_gelu() -> None:
    given = layer("w4a4", activation=Activation.GEGLU)
    x, ids, weights = inputs(given.problem, 3)
    output = run_top_k(x, given.fused(), given.problem, ids, weights, tiles=TILES)
    assert error(output, reference(given, x, ids, weights)) <= W4A4


def test_packed_wide_and_bf16_routing_are_the_same_layer() -> None:
    given = layer("w4a4")
    x, ids, weights = inputs(given.problem, 3)
    weights = weights.bfloat16()
    state, problem = given.fused(), given.problem
    expected = run_top_k(x, state, problem, ids, weights.float(), tiles=TILES)
    assert torch.equal(run_top_k(x, state, problem, ids.long(), weights, tiles=TILES), expected)
    packed = pack_topk(ids, weights)
    assert torch.equal(run_top_k(x, state, problem, packed, packed, packed=True, tiles=TILES), expected)


def test_tokens_of_other_ranks_experts_add_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    given = layer("w4a4", num_shared=0)
    x, ids, weights = inputs(given.problem, 4)
    expected = reference(given, x, ids, weights, first_expert=2)
    for counted_pairs in (1, 2048):
        monkeypatch.setattr(mlp, "_COUNTED_PAIRS", counted_pairs)
        output = run_top_k(x, given.split(first_expert=2), given.problem, ids, weights, tiles=TILES)
        assert error(output, expected) <= W4A4


def test_equal_input_gives_equal_output_whatever_memory_held() -> None:
    given = layer("w4a4")
    x, ids, weights = inputs(given.problem, 3)
    state = given.fused()
    first = run_top_k(x, state, given.problem, ids, weights, tiles=TILES)
    filler = [torch.full((1 << 16,), float("nan"), device=DEVICE) for _ in range(4)]
    del filler
    assert torch.equal(run_top_k(x, state, given.problem, ids, weights, tiles=TILES), first)


def test_no_tokens() -> None:
    given = layer("w4a16")
    x, ids, weights = inputs(given.problem, 0)
    assert run_top_k(x, given.fused(), given.problem, ids, weights).shape == (0, 64)


def test_weights_are_not_copied() -> None:
    given = layer("w4a16")
    state = given.fused()
    assert isinstance(given.shared, Nvfp4Experts)
    assert state.experts.routed.gate_up_weight.data_ptr() == given.routed.gate_up_weight.data_ptr()
    assert state.experts.appended.down_block_scale.data_ptr() == given.shared.down_block_scale.data_ptr()


ROUTINGS = [(method, 1, 1) for method in RoutingMethod] + [(RoutingMethod.DEEPSEEK_V3, 4, 2)]


@pytest.mark.parametrize(
    ("method", "n_group", "topk_group"), ROUTINGS, ids=lambda value: str(getattr(value, "value", value))
)
def test_routing_is_that_of_route(method: RoutingMethod, n_group: int, topk_group: int) -> None:
    for num_experts in (12, 16):
        problem = Problem(
            hidden_size=16,
            intermediate_size=16,
            num_experts=num_experts,
            top_k=1 if method is RoutingMethod.LLAMA4 else 3,
            routing_method=method,
            n_group=n_group,
            topk_group=topk_group,
            routed_scaling_factor=2.5,
        )
        random = torch.Generator().manual_seed(num_experts)
        logits = torch.randn(6, num_experts, generator=random) * 3
        logits[1] = 0.5
        logits[2, 4:9] = 1.0
        bias = torch.randn(num_experts, generator=random) * 0.1
        bias[3] = bias[5]
        expected = route(
            logits,
            bias,
            method=method,
            top_k=problem.top_k,
            n_group=n_group,
            topk_group=topk_group,
            routed_scaling_factor=2.5,
        )
        ids, weights = route_on_gpu(problem, LogitsRouting(logits.to(DEVICE), bias.to(DEVICE)))
        assert torch.equal(ids.cpu().long(), expected.ids)
        torch.testing.assert_close(weights.cpu(), expected.weights, rtol=2e-6, atol=1e-7)


@pytest.mark.gpu
@pytest.mark.skipif(INTERPRETED, reason="too large for the interpreter")
@pytest.mark.parametrize("numerics", ["w4a16", "w4a4"])
@pytest.mark.parametrize("tokens", [1, 7, 64, 700])
def test_a_large_layer_agrees(tokens: int, numerics: str) -> None:
    given = layer(numerics, hidden=7168, intermediate=256, num_experts=64, top_k=8)
    x, ids, weights = inputs(given.problem, tokens)
    expected = reference(given, x, ids, weights)
    for state in (given.fused(), given.split()):
        output = run_top_k(x.bfloat16(), state, given.problem, ids, weights)
        # Ties of w4a4 move single rows; bf16 rounding of the result moves all.
        rows = (output.double() - expected.double()).norm(dim=1) / expected.double().norm(dim=1).clamp(min=1e-9)
        assert float(rows.median()) <= 5e-3
        assert error(output, expected) <= (5e-3 if numerics == "w4a16" else 2e-2)


@pytest.mark.gpu
@pytest.mark.skipif(INTERPRETED, reason="needs a GPU")
def test_a_graph_replays_with_other_routing() -> None:
    given = layer("w4a16", hidden=512, intermediate=256, num_experts=16)
    x, ids, weights = inputs(given.problem, 33)
    state = given.fused()
    run_top_k(x, state, given.problem, ids, weights)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = run_top_k(x, state, given.problem, ids, weights)
    for seed in (5, 6):
        for tensor, other in zip((x, ids, weights), inputs(given.problem, 33, seed), strict=True):
            tensor.copy_(other)
        # One expert for all, and experts nobody chose.
        ids[:, 0] = seed
        graph.replay()
        assert torch.equal(captured, run_top_k(x, state, given.problem, ids, weights))
