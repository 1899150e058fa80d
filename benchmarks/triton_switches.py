"""What overlapping launches and a second stream gain on this GPU: the triton backend with each of them off and on.

    python -m benchmarks.triton_switches [--intermediate 256 2048] [--tokens 1 2 8 32 64 256] [--json FILE]

DeepSeek-R1's other sizes, w4a16, from top-k. Off and on take turns; each time is the median of three medians of
CUDA-graph replays.
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch

import flashinfer_compat as fc
from flashinfer_compat.bench.measuring import Call, Timing, microseconds
from flashinfer_compat.bench.origin import origin_of
from flashinfer_compat.bench.shapes import R1_INTERMEDIATE_SIZES, Sizes
from flashinfer_compat.bench.workload import Inputs, make_inputs, make_layer
from flashinfer_compat.files import write_whole
from flashinfer_compat.machine import this_environment, this_machine
from flashinfer_compat.vocabulary import Backend, Numerics, RoutingInput, Strategy
from flashinfer_compat.weights.values import DenseExperts, MoELayerWeights

TOKENS = (1, 2, 8, 32, 64, 256)
_ROUNDS = 3
_APART = fc.CallOptions(enable_pdl=False)
_ONE_STREAM, _TWO_STREAMS = (fc.LayerOptions(side_stream_tokens=tokens) for tokens in (0, 1024))

Switch = tuple[str, Sequence[Call], Sequence[Call]]
"""What is switched in which layer, and its calls with the switch off and on."""


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.triton_switches", description=__doc__)
    parser.add_argument("--intermediate", type=int, nargs="+", default=R1_INTERMEDIATE_SIZES)
    parser.add_argument("--tokens", type=int, nargs="+", default=TOKENS)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args(arguments)
    if not torch.cuda.is_available():
        parser.error("it needs an NVIDIA GPU and a CUDA build of torch")
    device = torch.device("cuda", 0)
    found: list[Mapping[str, object]] = []
    for intermediate in options.intermediate:
        sizes = replace(Sizes(), intermediate_size=intermediate)
        layers = prepared(make_layer(sizes, device), sizes)
        for tokens in options.tokens:
            for name, off, on in switches(layers, make_inputs(sizes, tokens, device)):
                rounds = [
                    [microseconds(calls, device, Timing.CUDA_GRAPH) for calls in (off, on)] for _ in range(_ROUNDS)
                ]
                times = [statistics.median(one) for one in zip(*rounds, strict=True)]
                row = {
                    "intermediate_size": intermediate,
                    "tokens": tokens,
                    "switch": name,
                    "off": times[0],
                    "on": times[1],
                }
                print(json.dumps(row), flush=True)
                found.append(row)
    if options.json:
        machine = origin_of(this_environment(), device).to_dict()
        write_whole(
            options.json, json.dumps({"machine": machine, "unit": "microseconds", "rows": found}, indent=1) + "\n"
        )


def prepared(layer: MoELayerWeights, sizes: Sizes) -> Mapping[str, fc.PreparedLayer]:
    """Fused, and split in one stream and in two with a shared expert in NVFP4 and in bf16."""

    def one(weights: MoELayerWeights, strategy: Strategy, options: fc.LayerOptions) -> fc.PreparedLayer:
        problem = weights.problem(RoutingInput.TOPK, numerics=Numerics.W4A16)
        plan = fc.plan(problem, replace(this_machine(), policy=()), strategy=strategy, backend=Backend.TRITON)
        return fc.prepare(weights, plan, options)

    device = layer.routed.down_weight.device
    random = torch.Generator(device).manual_seed(3)
    shapes = (1, 2, sizes.intermediate_size, sizes.hidden_size), (1, sizes.hidden_size, sizes.intermediate_size)
    matrices = [0.02 * torch.randn(shape, device=device, generator=random) for shape in shapes]
    dense = replace(layer, shared=DenseExperts(*(matrix.to(torch.bfloat16) for matrix in matrices)))
    return {
        "fused": one(layer, Strategy.EXPANDED, _ONE_STREAM),
        "one stream": one(layer, Strategy.SPLIT, _ONE_STREAM),
        "two streams": one(layer, Strategy.SPLIT, _TWO_STREAMS),
        "one stream, bf16": one(dense, Strategy.SPLIT, _ONE_STREAM),
        "two streams, bf16": one(dense, Strategy.SPLIT, _TWO_STREAMS),
    }


def switches(layers: Mapping[str, fc.PreparedLayer], inputs: Inputs) -> Iterator[Switch]:
    """Everything that is compared."""

    def calls(name: str, options: fc.CallOptions) -> Sequence[Call]:
        routings = inputs.routings(RoutingInput.TOPK)
        return [partial(fc.fp4_moe, inputs.hidden_states, layers[name], one, options) for one in routings]

    both = fc.CallOptions()
    for name in ("fused", "one stream", "two streams"):
        yield f"overlapping launches, {name}", calls(name, _APART), calls(name, both)
    for kind in ("", ", bf16"):
        yield f"second stream{kind}", calls(f"one stream{kind}", both), calls(f"two streams{kind}", both)


if __name__ == "__main__":
    main()
