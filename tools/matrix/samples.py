"""The sample checkpoints that are run, with inputs and outputs recorded with them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import load_file

import flashinfer_compat as fc
from flashinfer_compat.numerics import pack_topk

__all__ = ["SAMPLES", "Sample"]

SAMPLES = ("grouped", "ungrouped-2-shared", "shared-bf16")
"""Their hidden_size is one that the kernels take."""

_CHECKPOINTS = Path(__file__).absolute().parents[2] / "tests" / "data" / "checkpoints"
_LAYER = 1
"""Of two; the other is dense."""


@dataclass(frozen=True)
class Sample:
    """A layer, and what was recorded of it."""

    name: str
    weights: fc.MoELayerWeights
    io: dict[str, torch.Tensor]

    @staticmethod
    def load(name: str) -> Sample:
        """The sample of that name."""
        folder = _CHECKPOINTS / name
        return Sample(name, fc.load_moe_layer(folder, _LAYER), load_file(folder / "moe_io.safetensors"))

    def ranks(self, ep_size: int) -> Iterator[fc.MoELayerWeights]:
        """The weights of each rank of an expert-parallel group, each with a slice of the shared expert."""
        for rank in range(ep_size):
            yield fc.load_moe_layer(
                _CHECKPOINTS / self.name, _LAYER, ep_rank=rank, ep_size=ep_size, shared_placement="sharded"
            )

    @property
    def hidden_states(self) -> torch.Tensor:
        """bfloat16 [T, H]."""
        return self.io["hidden_states"]

    @property
    def output(self) -> torch.Tensor:
        """bfloat16 [T, H]: recorded, in w4a4."""
        return self.io["output_w4a4"]

    def routing(self, kind: str) -> fc.LogitsRouting | fc.TopKRouting | fc.PackedTopKRouting:
        """The recorded routing as router logits, top-k, or packed top-k."""
        if kind == "logits":
            return fc.LogitsRouting(self.io["router_logits"], self.io["e_score_correction_bias"])
        ids, weights = self.io["topk_ids"], self.io["topk_weights"]
        return fc.PackedTopKRouting(pack_topk(ids, weights)) if kind == "packed" else fc.TopKRouting(ids, weights)
