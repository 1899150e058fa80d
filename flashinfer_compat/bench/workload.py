"""Random NVFP4 layers made on the device, and inputs for them."""

from __future__ import annotations

from dataclasses import dataclass, fields

import torch

from flashinfer_compat.backends.routing import topk_from_logits
from flashinfer_compat.bench.shapes import Sizes
from flashinfer_compat.inputs import LogitsRouting, Routing, TopKRouting
from flashinfer_compat.numerics.routing import TopK
from flashinfer_compat.vocabulary import Numerics, RoutingInput
from flashinfer_compat.weights.values import LayerConfig, MoELayerWeights, Nvfp4Experts, Router

__all__ = ["Inputs", "make_inputs", "make_layer", "weight_bytes"]

_MOST_CALLS = 8
_PAIRS = 24
"""So many calls times tokens touch more weights than a GPU's cache holds, at DeepSeek-R1's sizes."""
_SCORE_SPREAD = 2.0
"""Standard deviation of router logits."""


@dataclass(frozen=True)
class Inputs:
    """Hidden states, and for each of several calls the experts they go to."""

    hidden_states: torch.Tensor
    """bfloat16 [T, H]; with more than two tokens the second is zero."""
    logits: tuple[torch.Tensor, ...]
    """float32 [T, E], one for each call, all different within a row."""
    chosen: tuple[TopK, ...]
    """What they mean: int32 and float32 [T, top_k]."""

    def routings(self, routing_input: RoutingInput) -> tuple[Routing, ...]:
        """The same choices in the form that a plan takes."""
        if routing_input is RoutingInput.LOGITS:
            return tuple(LogitsRouting(one) for one in self.logits)
        return tuple(TopKRouting(one.ids, one.weights) for one in self.chosen)

    def touched(self, sizes: Sizes) -> float:
        """How many experts a call reads, the shared ones among them; the mean over calls."""
        different = sum(len(set(one.ids.flatten().tolist())) for one in self.chosen)
        return different / len(self.chosen) + sizes.num_shared_experts


def make_layer(sizes: Sizes, device: torch.device) -> MoELayerWeights:
    """Random codes and scales; always the same for the same sizes and kind of device.

    Raises:
        ArgumentError: no layer has such sizes.
    """
    problem = sizes.problem(RoutingInput.TOPK, Numerics.W4A16)
    config = LayerConfig(**{field.name: getattr(problem, field.name) for field in fields(LayerConfig)})
    router = Router(torch.zeros(sizes.num_experts, sizes.hidden_size, dtype=torch.bfloat16, device=device), None)
    routed = _experts(sizes, sizes.num_experts, sizes.intermediate_size, device, seed=1)
    count = sizes.num_shared_experts
    # Checkpoints store several shared experts as one wide one.
    shared = _experts(sizes, 1, count * sizes.intermediate_size, device, seed=2) if count else None
    return MoELayerWeights(config, router, routed, shared, layer=0, tp_rank=0, tp_size=1)


def make_inputs(sizes: Sizes, tokens: int, device: torch.device) -> Inputs:
    """Random inputs; at few tokens for several calls with other experts each, so that weights come from memory."""
    random = torch.Generator(device).manual_seed(tokens)
    x = torch.randn(tokens, sizes.hidden_size, device=device, generator=random).to(torch.bfloat16)
    if tokens > 2:
        x[1] = 0
    problem = sizes.problem(RoutingInput.LOGITS, Numerics.W4A16)
    logits, chosen = [], []
    for _ in range(max(1, min(_MOST_CALLS, _PAIRS // tokens))):
        # Quantiles in random order: no two experts so near that a kernel's rounding decides between them.
        rank = torch.rand(tokens, sizes.num_experts, device=device, generator=random).argsort(1)
        scores = _SCORE_SPREAD * torch.special.ndtri((rank + 0.5) / sizes.num_experts)
        logits.append(scores.to(torch.float32))
        found = topk_from_logits(problem, LogitsRouting(logits[-1]))
        chosen.append(TopK(found.ids.to(torch.int32).contiguous(), found.weights.contiguous()))
    return Inputs(x, tuple(logits), tuple(chosen))


def weight_bytes(weights: MoELayerWeights) -> int:
    """Bytes of the routed and shared experts' tensors, as a checkpoint stores them."""
    return sum(tensor.nbytes for tensor in _tensors(weights))


def _tensors(weights: MoELayerWeights) -> list[torch.Tensor]:
    return [getattr(part, one.name) for part in (weights.routed, weights.shared) if part for one in fields(part)]


def _experts(sizes: Sizes, count: int, width: int, device: torch.device, *, seed: int) -> Nvfp4Experts:
    """Random codes, block scales over all of E4M3, and global scales that keep outputs moderate."""
    random = torch.Generator(device).manual_seed(seed)
    hidden = sizes.hidden_size

    def some(*shape: int, below: int) -> torch.Tensor:
        return torch.randint(0, below, shape, dtype=torch.uint8, device=device, generator=random)

    def scale(*shape: int) -> torch.Tensor:
        return 1e-4 * (0.5 + torch.rand(shape, device=device, generator=random))

    return Nvfp4Experts(
        gate_up_weight=some(count, 2, width, hidden // 2, below=256),
        gate_up_block_scale=some(count, 2, width, hidden // 16, below=0x7F).view(torch.float8_e4m3fn),
        gate_up_global_scale=scale(count, 2),
        gate_up_input_scale=torch.full((count, 2), 2e-3, device=device),
        down_weight=some(count, hidden, width // 2, below=256),
        down_block_scale=some(count, hidden, width // 16, below=0x7F).view(torch.float8_e4m3fn),
        down_global_scale=scale(count),
        down_input_scale=torch.full((count,), 1e-2, device=device),
    )
