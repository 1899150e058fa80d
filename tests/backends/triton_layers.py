"""Small random layers for the Triton kernels, and what they must give.

On a GPU or, where TRITON_INTERPRET=1, in the interpreter; whoever imports this is skipped where there is neither.
"""

from __future__ import annotations

import os
from dataclasses import dataclass

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("triton", minversion="3.5")

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
if not INTERPRETED and not torch.cuda.is_available():
    pytest.skip("needs a GPU or TRITON_INTERPRET=1", allow_module_level=True)

from flashinfer_compat.backends.triton.layer import TritonState  # noqa: E402
from flashinfer_compat.backends.triton.tiles import Product, Tiles  # noqa: E402
from flashinfer_compat.backends.triton.weights import experts_of  # noqa: E402
from flashinfer_compat.numerics import Nvfp4Tensor, dequantize_nvfp4, quantize_nvfp4  # noqa: E402
from flashinfer_compat.problem import Problem  # noqa: E402
from flashinfer_compat.vocabulary import Activation, Numerics, QuantizerArithmetic, SharedExpertFormat  # noqa: E402
from flashinfer_compat.weights.values import DenseExperts, Nvfp4Experts  # noqa: E402

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
