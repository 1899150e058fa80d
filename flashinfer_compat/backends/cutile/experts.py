"""Some experts on FlashInfer's unified MoE API with its cuTile kernels, set up once and called often.

The classes and what they take are alike in FlashInfer 0.7.1rc1 to 0.7.4; arguments go by keyword, so that a parameter
more changes nothing.
"""

from __future__ import annotations

import importlib
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any
from weakref import WeakValueDictionary

import torch

from flashinfer_compat.backends.trtllm.kernels import find, find_member
from flashinfer_compat.errors import BackendUnavailableError
from flashinfer_compat.vocabulary import Activation
from flashinfer_compat.weights.values import Nvfp4Experts

__all__ = ["TOKENS_AT_ONCE", "CutileExperts", "prepare_experts"]

TOKENS_AT_ONCE = 8192
"""More tokens run in several calls: FlashInfer takes as many as a layer was made for, and keeps scratch memory for
them."""

_VIEW = "cutile_nvfp4"
"""The name under which FlashInfer's runner looks for the weights. Source: 0.7.4, `CuTileNvfp4Bf16Runner`."""
_CHUNK_BYTES = 256 * 2**20
"""Experts are laid out this many bytes at a time, which bounds the memory beyond input and output."""
_ACTIVATIONS = {Activation.SWIGLU: "SwiGLU", Activation.GEGLU: "GeGLU"}


@dataclass(frozen=True)
class _Sizes:
    num_experts: int
    top_k: int
    intermediate_size: int
    activation: Activation
    device: torch.device


@dataclass(frozen=True, eq=False)
class _SharedLayer:
    """FlashInfer's `MoELayer` for all experts of equal sizes, one for each thread.

    It holds what it has tuned and gigabytes of scratch memory, but no weights, and must not be called twice at a time.
    It lives as long as experts that use it, not as long as its thread: CUDA graphs keep its scratch memory's address.
    """

    sizes: _Sizes
    by_thread: dict[int, Callable[..., torch.Tensor]] = field(default_factory=dict)

    def __call__(self, activations: Any, weights: Any) -> torch.Tensor:
        thread = threading.get_ident()
        found = self.by_thread.get(thread)
        if found is None:
            found = self.by_thread[thread] = _moe_layer(self.sizes)
        return found(activations, weights)


_SHARED: WeakValueDictionary[tuple[_Sizes, object], _SharedLayer] = WeakValueDictionary()


@dataclass(frozen=True)
class CutileExperts:
    """R experts whose weights are laid out for the kernels."""

    weights: Any
    """A `MoEWeightPack`."""
    layer: Callable[[Any, Any], torch.Tensor]
    """A `MoELayer`."""
    activations: Callable[..., Any]
    """`MoEActivationPack`."""

    def __call__(self, hidden_states: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        """bfloat16 [T, H], new: each token's chosen experts, added up by weight.

        Args:
            hidden_states: bfloat16 [T, H], contiguous, T >= 1.
            ids: int32 [T, K], contiguous.
            weights: float32 [T, K], contiguous.
        """
        tokens = hidden_states.shape[0]
        if tokens <= TOKENS_AT_ONCE:
            return self._run(hidden_states, ids, weights)
        parts = (slice(start, start + TOKENS_AT_ONCE) for start in range(0, tokens, TOKENS_AT_ONCE))
        return torch.cat([self._run(hidden_states[part], ids[part], weights[part]) for part in parts])

    def _run(self, hidden_states: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        pack = self.activations(
            hidden_states_q=hidden_states, hidden_states_scale=None, topk_ids=ids, topk_weights=weights
        )
        return self.layer(pack, self.weights)


def prepare_experts(parts: Sequence[Nvfp4Experts], top_k: int, activation: Activation) -> CutileExperts:
    """Lay out the experts of all parts, in their order; this imports flashinfer.

    Args:
        parts: experts of one hidden and one intermediate size, on one device.
        top_k: experts of each token in a call.
        activation: between the two GEMMs.

    Raises:
        BackendUnavailableError: FlashInfer cannot be imported, lacks the API, or cannot run it here: it says why.
    """
    first = parts[0]
    device = first.down_weight.device
    sizes = _Sizes(sum(part.num_experts for part in parts), top_k, first.intermediate_size, activation, device)
    kernel = find("MoEActivationPack")
    kernel.fit({}, later=("hidden_states_q", "hidden_states_scale", "topk_ids", "topk_weights"))
    layer = _SHARED.setdefault((sizes, find("MoELayer").function), _SharedLayer(sizes))
    if threading.get_ident() not in layer.by_thread:
        # Now, so that what is missing is told while loading.
        layer.by_thread[threading.get_ident()] = _moe_layer(sizes)
    weights = _make("MoEWeightPack")
    weights.prepare_for(_VIEW, _laid_out(parts, sizes))
    return CutileExperts(weights, layer, kernel.function)


def _moe_layer(sizes: _Sizes) -> Callable[..., torch.Tensor]:
    config = _make(
        "MoEConfig",
        routing=_make("RoutingConfig", num_experts=sizes.num_experts, top_k=sizes.top_k),
        quant=_make(
            "QuantConfig", weight=find_member("QuantFormat", "NVFP4"), activation=find_member("QuantFormat", "BF16")
        ),
        experts=_make("ExpertConfig", intermediate_size=sizes.intermediate_size),
        activation=_activation(sizes.activation),
        backend=_make("BackendOptions", candidates=(_make("CuTileNvfp4Bf16Config"),)),
        execution=_make("ExecutionConfig", tune_max_num_tokens=TOKENS_AT_ONCE),
    )
    try:
        layer: Callable[..., torch.Tensor] = _make("MoELayer", config=config, device=sizes.device)
    except (RuntimeError, ValueError, NotImplementedError) as error:
        # Behind these words it says why; before them it lists every runner it knows.
        why = str(error).rpartition("Backends rejected this configuration: ")[2]
        raise BackendUnavailableError(
            f"FlashInfer cannot run its cuTile MoE here: {why} Run: pip install 'cuda-tile[tileiras]'"
        ) from error
    return layer


def _laid_out(parts: Sequence[Nvfp4Experts], sizes: _Sizes) -> dict[str, torch.Tensor]:
    prepare = find("CuTileNvfp4Bf16Config").function.prepare_weights  # type: ignore[attr-defined]
    first, laid_out, start = parts[0], dict[str, torch.Tensor](), 0
    for chunk in _chunks(parts):
        count = chunk[0].shape[0]
        view: Mapping[str, torch.Tensor] = prepare(
            *chunk,
            num_local_experts=count,
            hidden_size=first.hidden_size,
            intermediate_size=sizes.intermediate_size,
            activation=_activation(sizes.activation),
            source_format="modelopt",
            # The layout is that of this device's architecture.
            device=sizes.device,
        )
        for name, tensor in view.items():
            if name not in laid_out:
                laid_out[name] = tensor.new_empty((sizes.num_experts, *tensor.shape[1:]))
            laid_out[name][start : start + count].copy_(tensor)
        start += count
    return laid_out


def _chunks(parts: Sequence[Nvfp4Experts]) -> Iterator[tuple[torch.Tensor, ...]]:
    """The arguments of `prepare_weights`: gate and up change places, for it takes [up; gate]."""
    for part in parts:
        bytes_of_one = part.gate_up_weight[0].numel() + part.down_weight[0].numel()
        step = max(1, _CHUNK_BYTES // bytes_of_one)
        for start in range(0, part.num_experts, step):
            rows = slice(start, start + step)
            scale = part.gate_up_block_scale[rows].view(torch.uint8).flip(1).flatten(1, 2)
            yield (
                part.gate_up_weight[rows].flip(1).flatten(1, 2),
                scale.view(torch.float8_e4m3fn),
                part.gate_up_global_scale[rows].flip(1),
                part.down_weight[rows],
                part.down_block_scale[rows],
                part.down_global_scale[rows],
            )


def _activation(activation: Activation) -> Any:
    """FlashInfer's own value for it; these classes are in no record of signatures."""
    name = _ACTIVATIONS[activation]
    found = getattr(importlib.import_module("flashinfer.fused_moe"), name, None)
    if found is None:
        raise BackendUnavailableError(f"flashinfer.fused_moe has no {name}. Use a recorded FlashInfer release.")
    return found()


def _make(name: str, **arguments: Any) -> Any:
    kernel = find(name)
    return kernel.function(**kernel.fit(arguments))
