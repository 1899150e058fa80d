"""The ways in which fp4_moe is called, each a cell of its own."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

import flashinfer_compat as fc
from tools.matrix.samples import SAMPLES, Sample

__all__ = ["WAYS", "Run", "Way"]

Run = Callable[[Sample, Callable[[fc.MoELayerWeights], fc.PreparedLayer], str], torch.Tensor]
"""The output of a sample, given how its weights are prepared and what routing is given as."""


@dataclass(frozen=True)
class Way:
    """One way to call fp4_moe, on one sample."""

    table: str
    sample: str
    strategy: str
    kind: str
    """What routing is given as: `logits`, `topk` or `packed`."""
    run: Run
    column: str
    ranks: int = 1


def _plain(sample: Sample, prepare: Callable[[fc.MoELayerWeights], fc.PreparedLayer], kind: str) -> torch.Tensor:
    return fc.fp4_moe(sample.hidden_states, prepare(sample.weights), sample.routing(kind))


def _given_output(sample: Sample, prepare: Callable[[fc.MoELayerWeights], fc.PreparedLayer], kind: str) -> torch.Tensor:
    output = torch.full_like(sample.hidden_states, torch.nan)
    options = fc.CallOptions(output=output)
    result = fc.fp4_moe(sample.hidden_states, prepare(sample.weights), sample.routing(kind), options)
    assert result.data_ptr() == output.data_ptr(), "another tensor than options.output came back"
    return output


def _unfinalized(sample: Sample, prepare: Callable[[fc.MoELayerWeights], fc.PreparedLayer], kind: str) -> torch.Tensor:
    layer = prepare(sample.weights)
    return fc.fp4_moe_unfinalized(sample.hidden_states, layer, sample.routing(kind)).finalize()


def _ranks(sample: Sample, prepare: Callable[[fc.MoELayerWeights], fc.PreparedLayer], kind: str) -> torch.Tensor:
    parts = [fc.fp4_moe(sample.hidden_states, prepare(one), sample.routing(kind)) for one in sample.ranks(_RANKS)]
    return torch.stack(parts).float().sum(0)


_RANKS = 2

_STRATEGIES = (
    ("native", "logits"),
    ("expanded", "topk"),
    ("expanded", "packed"),
    ("split", "logits"),
    ("split", "topk"),
    ("split", "packed"),
)
"""Strategy and routing; the other pairs are refused whatever the release."""

_OTHER_CALLS = "grouped, other calls"

WAYS: tuple[Way, ...] = (
    *(
        Way(sample, sample, strategy, kind, _plain, f"{strategy}, {kind}")
        for sample in SAMPLES
        for strategy, kind in _STRATEGIES
    ),
    *(
        Way(_OTHER_CALLS, "grouped", strategy, kind, _unfinalized, f"unfinalized {strategy}, {kind}")
        for strategy, kind in _STRATEGIES
        if kind != "packed"
    ),
    Way(_OTHER_CALLS, "grouped", "expanded", "topk", _given_output, "output given, expanded"),
    *(
        Way(_OTHER_CALLS, "grouped", "split", kind, _ranks, f"{_RANKS} ranks split, {kind}", _RANKS)
        for kind in ("logits", "topk")
    ),
)
