"""Plans, prepares, checks and times every way to run the asked layers."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from itertools import groupby, product

import torch

from flashinfer_compat.backends.base import PreparedLayer
from flashinfer_compat.bench.floor import Rates, floor_microseconds
from flashinfer_compat.bench.measuring import Timing, bytes_beyond, microseconds, peak_bytes
from flashinfer_compat.bench.reference import TOLERANCE, deviation_of, expected
from flashinfer_compat.bench.results import Found, Point, Refusal, Way
from flashinfer_compat.bench.shapes import Sizes
from flashinfer_compat.bench.workload import Inputs, make_inputs, make_layer, weight_bytes
from flashinfer_compat.features.target import Target
from flashinfer_compat.moe import fp4_moe, prepare
from flashinfer_compat.options import LayerOptions
from flashinfer_compat.planning.plan import ALTERNATIVES, assess, plan
from flashinfer_compat.reasons import ReasonCode
from flashinfer_compat.verification.run import failure_text, tolerance_of
from flashinfer_compat.vocabulary import Backend, Numerics, RoutingInput, Strategy
from flashinfer_compat.weights.values import MoELayerWeights

__all__ = ["Asked", "Bed", "measure", "ways_of"]

_ROUNDING_ROWS = frozenset({Backend.TRTLLM, Backend.CUTILE})
"""FlashInfer's kernels round each expert's row to bf16 before the sum."""
_OTHER_INPUT = frozenset({ReasonCode.NEEDS_LOGITS, ReasonCode.NEEDS_TOPK})


@dataclass(frozen=True)
class Asked:
    """What to measure: every combination that planning lets through."""

    sizes: tuple[Sizes, ...]
    routing_inputs: tuple[RoutingInput, ...]
    backends: tuple[Backend, ...]
    strategies: tuple[Strategy, ...]
    numerics: tuple[Numerics, ...]


def ways_of(asked: Asked, target: Target) -> tuple[list[Way], list[Refusal]]:
    """The ways that can be measured on `target`, and those that planning refuses; pure.

    A strategy that wants the other routing input is neither: it is no way to run what was asked.

    Raises:
        ArgumentError: no layer has such sizes.
    """
    ways, refusals = [], []
    for sizes, routing_input, numerics in product(asked.sizes, asked.routing_inputs, asked.numerics):
        problem = sizes.problem(routing_input, numerics)
        for backend, strategy in ALTERNATIVES:
            if backend not in asked.backends or strategy not in asked.strategies:
                continue
            way = Way(sizes, routing_input, backend, strategy, numerics)
            reasons = assess(problem, target, strategy, backend).reasons
            if not reasons:
                ways.append(way)
            elif not any(one.code in _OTHER_INPUT for one in reasons):
                refusals.append(Refusal(way, reasons))
    return ways, refusals


class Bed:
    """One layer on a device, with its inputs and what they must give, each made when it is first asked for."""

    def __init__(self, sizes: Sizes, device: torch.device) -> None:
        self.sizes, self.device = sizes, device
        self.weights: MoELayerWeights = make_layer(sizes, device)
        self._inputs: dict[int, Inputs] = {}
        self._expected: dict[tuple[int, Numerics], torch.Tensor] = {}

    def inputs(self, tokens: int) -> Inputs:
        """Those of so many tokens."""
        if tokens not in self._inputs:
            self._inputs[tokens] = make_inputs(self.sizes, tokens, self.device)
        return self._inputs[tokens]

    def expected(self, tokens: int, numerics: Numerics) -> torch.Tensor:
        """float32 [T, H]: what the first of the calls must give."""
        key = tokens, numerics
        if key not in self._expected:
            inputs = self.inputs(tokens)
            self._expected[key] = expected(self.weights, inputs.hidden_states, inputs.chosen[0], numerics)
        return self._expected[key]


def measure(
    ways: list[Way],
    tokens: tuple[int, ...],
    target: Target,
    device: torch.device,
    rates: Rates | None,
    *,
    autotune: bool = False,
) -> Iterator[Point]:
    """Every way at every number of tokens, in order; what fails is a point that says why.

    Args:
        ways: from `ways_of`, those of one layer next to each other.
        tokens: T of the calls.
        target: what the ways were found for.
        device: where to run.
        rates: the GPU's, to tell the floor.
        autotune: whether triton's layers are prepared with tile shapes found for `tokens`.
    """
    for sizes, group in groupby(ways, key=lambda way: way.sizes):
        try:
            bed, problem = Bed(sizes, device), ""
        except Exception as failure:
            bed, problem = None, _told(failure)
        for way in group:
            if bed is None:
                yield from (Point(way, one, None, problem) for one in tokens)
            else:
                tuned = tokens if autotune and way.backend is Backend.TRITON else ()
                options = LayerOptions(autotune_tokens=tuned)
                yield from _measure_way(bed, way, tokens, target, rates, options)
        del bed
        _release(device)


def _measure_way(
    bed: Bed, way: Way, tokens: tuple[int, ...], target: Target, rates: Rates | None, options: LayerOptions
) -> Iterator[Point]:
    problem = way.sizes.problem(way.routing_input, way.numerics)
    try:
        found = plan(problem, target, strategy=way.strategy, backend=way.backend)
        layer, text = prepare(bed.weights, found, options), ""
        beyond = bytes_beyond(layer.state, bed.weights)
    except Exception as failure:
        # Whatever a broken install raises is a finding about it, and no reason to lose the other ways' times.
        layer, text = None, _told(failure)
    for one in tokens:
        if layer is None:
            yield Point(way, one, None, text)
            continue
        try:
            point = _point(bed, way, one, layer, beyond, rates)
        except Exception as failure:
            point = Point(way, one, None, _told(failure))
        if point.found is None:
            _release(bed.device)
        yield point
    del layer
    _release(bed.device)


def _point(bed: Bed, way: Way, tokens: int, layer: PreparedLayer, beyond: int, rates: Rates | None) -> Point:
    inputs = bed.inputs(tokens)
    calls = [partial(fp4_moe, inputs.hidden_states, layer, one) for one in inputs.routings(way.routing_input)]
    deviation = deviation_of(calls[0](), bed.expected(tokens, way.numerics))
    tolerance = _tolerance(way)
    right = deviation.judged(way.numerics) <= tolerance
    # The reference waits for the GPU in the midst of a call, which a graph cannot hold.
    captured = bed.device.type == "cuda" and way.backend is not Backend.TORCH
    timing = Timing.CUDA_GRAPH if captured else Timing.WALL_CLOCK
    found = Found(
        microseconds=microseconds(calls, bed.device, timing) if right else None,
        timing=timing.value,
        calls=len(calls),
        relative_error=deviation.relative,
        median_row_error=deviation.median_row,
        tolerance=tolerance,
        floor_microseconds=floor_microseconds(bed.sizes, tokens, inputs.touched(bed.sizes), rates) if rates else None,
        weight_bytes=weight_bytes(bed.weights),
        beyond_bytes=beyond,
        peak_bytes=peak_bytes(calls[0], bed.device),
    )
    what = "of the median row " if way.numerics is Numerics.W4A4 else ""
    wrong = f"wrong result: relative error {what}{deviation.judged(way.numerics):.1e}, above {tolerance:.0e}"
    return Point(way, tokens, found, "" if right else wrong)


def _tolerance(way: Way) -> float:
    if way.backend not in _ROUNDING_ROWS:
        return TOLERANCE
    return tolerance_of(way.sizes.problem(way.routing_input, way.numerics), way.strategy, way.backend)


def _told(failure: Exception) -> str:
    text = failure_text(failure)
    if isinstance(failure, torch.OutOfMemoryError) or "can't allocate memory" in text:
        return f"out of memory; measure fewer --tokens or a smaller --intermediate-size ({text})"
    return f"it raised {text}"


def _release(device: torch.device) -> None:
    """Give memory back, so that what comes next has what it would have alone."""
    gc.collect()
    if device.type == "cuda":
        # After an illegal access every call fails; the points say so.
        with contextlib.suppress(RuntimeError):
            torch.cuda.empty_cache()
