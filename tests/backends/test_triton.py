"""The Triton kernels, on a GPU or, where TRITON_INTERPRET=1, in the interpreter (`test_triton_interpreter` does)."""

from __future__ import annotations

import os
from dataclasses import dataclass, replace
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("triton", minversion="3.5")

import triton  # noqa: E402
import triton.language as tl  # noqa: E402
from comparison import error  # noqa: E402
from safetensors.torch import load_file  # noqa: E402

import flashinfer_compat as fc  # noqa: E402
from flashinfer_compat.errors import TensorError  # noqa: E402
from flashinfer_compat.numerics import (  # noqa: E402
    Nvfp4Tensor,
    decode_e2m1,
    dequantize_nvfp4,
    pack_topk,
    quantize_nvfp4,
    route,
    unpack_e2m1,
)
from flashinfer_compat.problem import Problem  # noqa: E402
from flashinfer_compat.vocabulary import (  # noqa: E402
    Activation,
    Numerics,
    QuantizerArithmetic,
    RoutingMethod,
    SharedExpertFormat,
)
from flashinfer_compat.weights.values import (  # noqa: E402
    DenseExperts,
    LayerConfig,
    MoELayerWeights,
    Nvfp4Experts,
    Router,
)

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
if not INTERPRETED and not torch.cuda.is_available():
    pytest.skip("needs a GPU or TRITON_INTERPRET=1", allow_module_level=True)

from flashinfer_compat.backends.triton import mlp  # noqa: E402
from flashinfer_compat.backends.triton.backend import TritonState, run_top_k  # noqa: E402
from flashinfer_compat.backends.triton.candidates import STEPS  # noqa: E402
from flashinfer_compat.backends.triton.decode import WEIGHT_UNIT, dequantize  # noqa: E402
from flashinfer_compat.backends.triton.rounding import ROUNDINGS, quantize, round_to_nvfp4  # noqa: E402
from flashinfer_compat.backends.triton.routing import route_on_gpu  # noqa: E402
from flashinfer_compat.backends.triton.tiles import Product, Tiles  # noqa: E402
from flashinfer_compat.backends.triton.weights import experts_of  # noqa: E402
from flashinfer_compat.inputs import LogitsRouting  # noqa: E402

DEVICE = "cpu" if INTERPRETED else "cuda"
# The interpreter cuts float32 to bf16 where a GPU rounds.
W4A16 = 1.5e-2 if INTERPRETED else 5e-3
# Rounded operands are exact in bf16, so float32 sums differ by their order alone, but for rare ties.
W4A4 = 1e-6 if INTERPRETED else 1e-5
ONE = torch.ones((), device=DEVICE)
TILES = Tiles(16, Product(32, 32, 4, 2), Product(32, 32, 4, 2))


@dataclass(frozen=True)
class Layer:
    problem: Problem
    routed: Nvfp4Experts
    shared: Nvfp4Experts | DenseExperts | None
    arithmetic: QuantizerArithmetic = QuantizerArithmetic.MODELOPT

    def fused(self) -> TritonState:
        count, numerics = self.problem.num_shared_experts, self.problem.numerics
        experts = experts_of(self.routed, self.shared, count, numerics, common_scale=True, arithmetic=self.arithmetic)
        return TritonState(experts, None, 0, ONE)

    def split(self, first_expert: int = 0) -> TritonState:
        numerics, given = self.problem.numerics, {"common_scale": False, "arithmetic": self.arithmetic}
        shared = self.shared
        if isinstance(shared, Nvfp4Experts):
            shared = experts_of(None, shared, 1, numerics, **given)
        return TritonState(
            experts_of(self.routed, None, 0, numerics, **given),
            shared,
            first_expert,
            ONE,
        )


def experts(count: int, hidden: int, intermediate: int, seed: int) -> Nvfp4Experts:
    random = torch.Generator().manual_seed(seed)

    def some(*shape: int, below: int) -> torch.Tensor:
        return torch.randint(0, below, shape, dtype=torch.uint8, generator=random).to(DEVICE)

    def scale(*shape: int, size: float) -> torch.Tensor:
        return (size * (0.5 + torch.rand(shape, generator=random))).to(DEVICE)

    # Every E4M3 block scale that is a number, 0 and 448 included.
    return Nvfp4Experts(
        gate_up_weight=some(count, 2, intermediate, hidden // 2, below=256),
        gate_up_block_scale=some(count, 2, intermediate, hidden // 16, below=0x7F).view(torch.float8_e4m3fn),
        gate_up_global_scale=scale(count, 2, size=1e-3),
        gate_up_input_scale=torch.full((count, 2), 2.0**-9, device=DEVICE),
        down_weight=some(count, hidden, intermediate // 2, below=256),
        down_block_scale=some(count, hidden, intermediate // 16, below=0x7F).view(torch.float8_e4m3fn),
        down_global_scale=scale(count, size=1e-3),
        down_input_scale=scale(count, size=1e-3),
    )


def layer(
    numerics: str,
    num_shared: int = 1,
    *,
    hidden: int = 64,
    intermediate: int = 32,
    num_experts: int = 5,
    top_k: int = 3,
    activation: Activation = Activation.SWIGLU,
) -> Layer:
    problem = Problem(
        hidden_size=hidden,
        intermediate_size=intermediate,
        num_experts=num_experts,
        top_k=top_k,
        num_shared_experts=num_shared,
        shared_format=SharedExpertFormat.NVFP4 if num_shared else SharedExpertFormat.NONE,
        numerics=Numerics(numerics),
        activation=activation,
    )
    shared = experts(1, hidden, num_shared * intermediate, 2) if num_shared else None
    return Layer(problem, experts(num_experts, hidden, intermediate, 1), shared)


def inputs(problem: Problem, tokens: int, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    random = torch.Generator().manual_seed(seed)
    x = torch.randn(tokens, problem.hidden_size, generator=random).bfloat16().float()
    if tokens > 2:
        x[1] = 0
    ids = torch.rand(tokens, problem.num_experts, generator=random).topk(problem.top_k, 1).indices.int()
    weights = torch.rand(tokens, problem.top_k, generator=random)
    return x.to(DEVICE), ids.to(DEVICE), weights.to(DEVICE)


def mlp_of(x: torch.Tensor, held: Nvfp4Experts, e: int, layer: Layer) -> torch.Tensor:
    problem = layer.problem

    def rounded(values: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
        if problem.numerics is Numerics.W4A16:
            return values
        return dequantize_nvfp4(quantize_nvfp4(values, scale, arithmetic=layer.arithmetic, check=False))

    gate_up = dequantize_nvfp4(
        Nvfp4Tensor(held.gate_up_weight[e], held.gate_up_block_scale[e], held.gate_up_global_scale[e])
    )
    gate, up = (rounded(x, held.gate_up_input_scale[e, side]) @ gate_up[side].T for side in (0, 1))
    act = torch.nn.functional.silu if problem.activation is Activation.SWIGLU else torch.nn.functional.gelu
    hidden = rounded(act(gate) * up, held.down_input_scale[e])
    down = dequantize_nvfp4(Nvfp4Tensor(held.down_weight[e], held.down_block_scale[e], held.down_global_scale[e]))
    return hidden @ down.T


def reference(
    given: Layer, x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor, first_expert: int = 0
) -> torch.Tensor:
    output = torch.zeros_like(x)
    if isinstance(given.shared, Nvfp4Experts):
        output += mlp_of(x, given.shared, 0, given)
    for e in range(given.routed.num_experts):
        token, slot = (ids == e + first_expert).nonzero(as_tuple=True)
        rows = mlp_of(x[token], given.routed, e, given)
        output.index_add_(0, token, weights[token, slot].float().unsqueeze(-1) * rows)
    return output


def tolerance(problem: Problem) -> float:
    return W4A16 if problem.numerics is Numerics.W4A16 else W4A4


@triton.jit
def _dequantize(words, scales, out, rows: tl.constexpr, block_k: tl.constexpr, interpreted: tl.constexpr):
    row = tl.arange(0, rows)[:, None]
    word = tl.load(words + row * (block_k // 8) + tl.arange(0, block_k // 8)[None, :])
    scale = tl.load(scales + row * (block_k // 16) + tl.arange(0, block_k // 16)[None, :])
    values = dequantize(word, scale, rows, block_k, interpreted)
    tl.store(out + row * block_k + tl.arange(0, block_k)[None, :], values.to(tl.float32))


def test_every_code_with_every_scale_is_decoded_exactly() -> None:
    scales = torch.arange(128, dtype=torch.uint8).repeat(1, 2).reshape(128, 2)
    scales[127] = 0  # 0x7F is NaN.
    scales[:, 1] = scales[:, 0].flip(0)
    codes = torch.tensor([0x10, 0x32, 0x54, 0x76, 0x98, 0xBA, 0xDC, 0xFE] * 2, dtype=torch.uint8).repeat(128, 1)
    codes[::2] = codes[::2].flip(1)
    expected = dequantize_nvfp4(Nvfp4Tensor(codes, scales.view(torch.float8_e4m3fn), torch.ones(128)))
    out = torch.empty(128, 32, device=DEVICE)
    words = codes.to(DEVICE).view(torch.int32)
    _dequantize[(1,)](words, scales.to(DEVICE), out, rows=128, block_k=32, interpreted=INTERPRETED)
    # Plane j holds value j of each of the four words.
    natural = out.cpu().reshape(128, 8, 4).transpose(1, 2).reshape(128, 32) * WEIGHT_UNIT
    assert torch.equal(natural, expected)


@triton.jit
def _round(
    values, scale, out, numbers, block_scale, blocks: tl.constexpr, rounding: tl.constexpr, interpreted: tl.constexpr
):
    block = tl.arange(0, blocks)[:, None]
    at = block * 16 + tl.arange(0, 16)[None, :]
    given = tl.load(values + at)
    tl.store(out + at, round_to_nvfp4(given, tl.load(scale), rounding, interpreted))
    own_numbers, own_scale = quantize(given, tl.load(scale), rounding, interpreted)
    tl.store(numbers + at, own_numbers)
    tl.store(block_scale + block, own_scale)


@pytest.mark.parametrize("arithmetic", QuantizerArithmetic)
@pytest.mark.parametrize("blocks", [1, 4, 256])
@pytest.mark.parametrize("scale", [2.0**-9, 0.013, 7.1, 71 / 16 / 2688])
def test_values_are_rounded_as_quantize_nvfp4_rounds_them(
    scale: float, blocks: int, arithmetic: QuantizerArithmetic
) -> None:
    if arithmetic is QuantizerArithmetic.FLASHINFER and not INTERPRETED:
        pytest.skip("a GPU's reciprocals are approximate; tests/gpu has their test")
    random = torch.Generator().manual_seed(3)
    values = torch.randn(256, 16, generator=random) * torch.logspace(-6, 6, 256).unsqueeze(1)
    values[:64] = values[:64].bfloat16().float()
    values[7] = 0
    # Multiples of an E2M1 step lie on its ties.
    values[64:96] = torch.randint(-24, 25, (32, 16), generator=random) * 0.25 * scale
    # The block scales of these are subnormal, the last zero.
    values[96:128] = torch.randn(32, 16, generator=random) * scale * torch.logspace(-2, -4, 32).unsqueeze(1)
    # bf16 multiples of 1/128 under a global scale of an amax lie on ties of the block scale: 213/128 over 71/16.
    values[128:160] = torch.randint(-568, 569, (32, 16), generator=random) / 128
    values[0, 0], values[1, 0] = 213 / 128, 71 / 16
    input_scale = torch.tensor(scale)
    expected = quantize_nvfp4(values, input_scale, arithmetic=arithmetic)
    exact = dequantize_nvfp4(replace(expected, global_scale=torch.ones(())))
    out, numbers = (torch.empty(blocks, 16, device=DEVICE) for _ in range(2))
    block_scale = torch.empty(blocks, device=DEVICE)
    _round[(1,)](
        values.to(DEVICE),
        input_scale.to(DEVICE),
        out,
        numbers,
        block_scale,
        blocks=blocks,
        rounding=ROUNDINGS[arithmetic],
        interpreted=INTERPRETED,
    )
    assert torch.equal(out.cpu(), exact[:blocks])
    scales = expected.block_scale[:blocks].float()
    assert torch.equal(block_scale.cpu(), scales.flatten())
    kept = (scales != 0).flatten()
    codes = decode_e2m1(unpack_e2m1(expected.codes))[:blocks]
    assert torch.equal(numbers.cpu()[kept], codes[kept])
    if blocks == 256:
        assert not kept.all()


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
    target = fc.Target.from_release("0.7.4", "sm90")
    plan = fc.plan(held.problem("topk"), target, strategy="expanded", backend="triton")
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
