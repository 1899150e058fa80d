"""How fast the Triton and cuTile kernels are on this GPU, beside bf16 `torch._grouped_mm` and the floor.

    python -m benchmarks.triton_moe [--intermediate 256 2048] [--tokens 1 8 64 512 4096] [--json FILE]

DeepSeek-R1's sizes unless told otherwise. Everything but `torch._grouped_mm` is measured as `python -m
flashinfer_compat bench` does (docs/bench.md): checked first, medians of CUDA-graph replays, from top-k. The bf16
weights of `torch._grouped_mm` are dequantized beforehand. cuTile is left out where planning refuses it.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from flashinfer_compat.bench.floor import floor_microseconds, rates_of
from flashinfer_compat.bench.measuring import Timing, microseconds
from flashinfer_compat.bench.origin import origin_of
from flashinfer_compat.bench.reference import TOLERANCE, dequantized, deviation_of
from flashinfer_compat.bench.results import Point
from flashinfer_compat.bench.run import Asked, Bed, measure, ways_of
from flashinfer_compat.bench.shapes import R1_INTERMEDIATE_SIZES, R1_TOKENS, Sizes
from flashinfer_compat.features.target import Target
from flashinfer_compat.files import write_whole
from flashinfer_compat.machine import this_environment, this_machine
from flashinfer_compat.vocabulary import Backend, Numerics, RoutingInput, Strategy
from flashinfer_compat.weights.values import MoELayerWeights, Nvfp4Experts

BASELINE = "grouped_mm bf16"


def main(arguments: Sequence[str] | None = None) -> None:
    r1 = Sizes()
    parser = argparse.ArgumentParser(prog="python -m benchmarks.triton_moe", description=__doc__)
    parser.add_argument("--intermediate", type=int, nargs="+", default=R1_INTERMEDIATE_SIZES)
    parser.add_argument("--tokens", type=int, nargs="+", default=R1_TOKENS)
    parser.add_argument("--hidden", type=int, default=r1.hidden_size)
    parser.add_argument("--experts", type=int, default=r1.num_experts)
    parser.add_argument("--device", default="cuda:0")
    parser.add_argument("--backend", type=Backend, nargs="+", default=[Backend.TRITON, Backend.CUTILE])
    parser.add_argument("--json", type=Path)
    options = parser.parse_args(arguments)
    device, target = torch.device(options.device), this_machine()
    if device.type == "cuda" and not torch.cuda.is_available():
        parser.error("it needs an NVIDIA GPU and a CUDA build of torch")
    target = target if device.type == "cuda" else replace(target, architecture=None)
    points: list[dict[str, Any]] = []
    for intermediate in options.intermediate:
        sizes = Sizes(options.hidden, intermediate, options.experts)
        points += measured(sizes, tuple(options.tokens), tuple(options.backend), target, device)
    origin = origin_of(this_environment(), device)
    print(table(points))
    if options.json:
        report = {"machine": origin.to_dict(), "unit": "microseconds", "points": points}
        write_whole(options.json, json.dumps(report, indent=1) + "\n")


def measured(
    sizes: Sizes, tokens: tuple[int, ...], backends: tuple[Backend, ...], target: Target, device: torch.device
) -> list[dict[str, Any]]:
    """One row for each number of tokens: by name the time of each way, and its relative error."""
    rows: dict[int, dict[str, Any]] = {
        one: {"intermediate_size": sizes.intermediate_size, "tokens": one} for one in tokens
    }
    asked = Asked((sizes,), (RoutingInput.TOPK,), backends, tuple(Strategy), tuple(Numerics))
    ways, _ = ways_of(asked, target)
    rates = rates_of(origin_of(this_environment(), device).gpu, None, None)
    for point in measure(ways, tokens, target, device, rates):
        print(json.dumps(point.to_dict()), flush=True)
        name = name_of(point, backends[0])
        rows[point.tokens] |= {name: point.microseconds, f"{name} error": point.found and point.found.relative_error}
    # Four times the size of the packed weights, so made after everything else.
    bed = Bed(sizes, device)
    gate_up, down = bf16_weights(bed.weights)
    for one, row in rows.items():
        inputs = bed.inputs(one)
        calls = [
            partial(grouped_mm, inputs.hidden_states, choice.ids, choice.weights, gate_up, down)
            for choice in inputs.chosen
        ]
        error = deviation_of(calls[0](), bed.expected(one, Numerics.W4A16)).relative
        if not error <= 2 * TOLERANCE:
            raise SystemExit(f"{BASELINE} is wrong: relative error {error:.2e}")
        timing = Timing.CUDA_GRAPH if device.type == "cuda" else Timing.WALL_CLOCK
        row |= {BASELINE: microseconds(calls, device, timing), f"{BASELINE} error": error}
        row["floor"] = floor_microseconds(sizes, one, inputs.touched(sizes), rates) if rates else None
    return list(rows.values())


def name_of(point: Point, first: Backend) -> str:
    """Such as `fused w4a16`; backends beside the first are named."""
    backend = "" if point.way.backend is first else f"{point.way.backend.value} "
    return f"{backend}{'fused' if point.way.strategy.is_fused else 'split'} {point.way.numerics.value}"


def bf16_weights(weights: MoELayerWeights) -> tuple[torch.Tensor, torch.Tensor]:
    """Gate and up [E + 1, 2I, H] and down [E + 1, H, I] of all experts, the shared one last."""
    assert isinstance(weights.shared, Nvfp4Experts)
    experts = [(part, e) for part in (weights.routed, weights.shared) for e in range(part.num_experts)]
    gate_up, down = (
        torch.stack([dequantized(part, name, e).to(torch.bfloat16) for part, e in experts])
        for name in ("gate_up", "down")
    )
    return gate_up.flatten(1, 2), down


def grouped_mm(
    x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor, gate_up: torch.Tensor, down: torch.Tensor
) -> torch.Tensor:
    """The layer through `torch._grouped_mm`, the shared expert as one more."""
    tokens, slots = x.shape[0], ids.shape[1] + 1
    last = gate_up.shape[0] - 1
    all_ids = torch.cat((ids, ids.new_full((tokens, 1), last)), 1).flatten()
    all_weights = torch.cat((weights, weights.new_ones(tokens, 1)), 1).flatten()
    in_order, order = all_ids.sort()
    ends = torch.searchsorted(in_order, torch.arange(last + 1, device=x.device, dtype=ids.dtype), right=True)
    offsets = ends.to(torch.int32)
    rows = torch._grouped_mm(x[order // slots], gate_up.transpose(1, 2), offs=offsets)
    gate, up = rows.chunk(2, 1)
    rows = torch._grouped_mm(torch.nn.functional.silu(gate) * up, down.transpose(1, 2), offs=offsets)
    placed = torch.empty_like(rows)
    placed[order] = rows
    weighed = placed.view(tokens, slots, x.shape[1]) * all_weights.view(tokens, slots, 1)
    return weighed.sum(1).to(x.dtype)


def table(points: Sequence[dict[str, Any]]) -> str:
    """In Markdown, the columns of docs/triton.md."""
    ways = [one for one in points[0] if f"{one} error" in points[0] and one != BASELINE]
    names = ["floor", *ways, BASELINE]
    lines = [f"| I | T | {' | '.join(names)} | fused / floor | grouped_mm / fused |", "|" + " --- |" * (len(names) + 4)]
    for point in points:
        fused, floor = point.get("fused w4a16"), point["floor"]
        numbers = [point.get(name) for name in names]
        numbers += [fused / floor if fused and floor else None, point[BASELINE] / fused if fused else None]
        told = " | ".join("-" if one is None else f"{one:.3g}" if one < 1000 else f"{one:.0f}" for one in numbers)
        lines.append(f"| {point['intermediate_size']} | {point['tokens']} | {told} |")
    return "\n".join(lines)


if __name__ == "__main__":
    main()
