"""How fast the triton backend is on this GPU, at DeepSeek-R1's sizes, beside bf16 `torch._grouped_mm` and the floor.

    python -m benchmarks.triton_moe [--intermediate 256 2048] [--tokens 1 8 64 512 4096] [--json FILE]

Every way of computing is compared with plain PyTorch in float32 first. A time is the median of CUDA-graph replays; at
few tokens a graph holds several calls with other experts each, so that weights come from memory, not from the cache.
The floor is the larger of the bytes of the experts touched over 4.3 TB/s and the operations over 790 TFLOP/s, a copy's
and a large bf16 product's rates on an H200. The bf16 weights of `torch._grouped_mm` are dequantized beforehand.
"""

from __future__ import annotations

import argparse
import datetime
import json
import statistics
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import triton

from flashinfer_compat.backends.triton.backend import TritonState, run_top_k
from flashinfer_compat.backends.triton.weights import experts_of
from flashinfer_compat.numerics.nvfp4 import Nvfp4Tensor, dequantize_nvfp4, quantize_nvfp4
from flashinfer_compat.problem import Problem
from flashinfer_compat.vocabulary import Numerics, SharedExpertFormat
from flashinfer_compat.weights.values import Nvfp4Experts

HIDDEN, EXPERTS, TOP_K = 7168, 256, 8
BYTES_PER_SECOND, FLOPS_PER_SECOND = 4.3e12, 790e12
TOLERANCE = 5e-3
_CALLS = {1: 8, 8: 3}
"""Calls in one graph, by tokens; 1 otherwise."""

Call = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]
"""Hidden states, expert ids and their weights to the output."""


@dataclass(frozen=True)
class Layer:
    """The weights of one layer."""

    routed: Nvfp4Experts
    shared: Nvfp4Experts


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.triton_moe", description=__doc__)
    parser.add_argument("--intermediate", type=int, nargs="+", default=[256, 2048])
    parser.add_argument("--tokens", type=int, nargs="+", default=[1, 8, 64, 512, 4096])
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    points = []
    for intermediate in options.intermediate:
        points += _measure(intermediate, options.tokens)
        torch.cuda.empty_cache()
    report = {"machine": _machine(), "unit": "microseconds", "points": points}
    print(_table(points))
    if options.json:
        options.json.write_text(json.dumps(report, indent=1) + "\n", "utf-8")


def _measure(intermediate: int, sizes: list[int]) -> list[dict[str, Any]]:
    layer = Layer(_experts(EXPERTS, intermediate, 1), _experts(1, intermediate, 2))
    points: list[dict[str, Any]] = [{"intermediate_size": intermediate, "tokens": tokens} for tokens in sizes]
    for tokens, point in zip(sizes, points, strict=True):
        x, choices = _input(tokens)
        ids, weights = choices[0]
        point["floor"] = _floor(tokens, intermediate, choices)
        for numerics in Numerics:
            expected = reference(x, ids, weights, layer, numerics)
            for name, call in _triton(layer, intermediate, numerics).items():
                point[f"{name} {numerics.value} error"] = _check(call(x, ids, weights), expected)
                point[f"{name} {numerics.value}"] = _time(call, x, choices)
    # Twice four times the size of the packed weights: made once, after everything else.
    dense = _grouped_mm(layer)
    for tokens, point in zip(sizes, points, strict=True):
        x, choices = _input(tokens)
        ids, weights = choices[0]
        point["grouped_mm bf16 error"] = _check(
            dense(x, ids, weights), reference(x, ids, weights, layer, Numerics.W4A16), limit=2 * TOLERANCE
        )
        point["grouped_mm bf16"] = _time(dense, x, choices)
        print(json.dumps(point), flush=True)
    return points


def _input(tokens: int) -> tuple[torch.Tensor, list[tuple[torch.Tensor, torch.Tensor]]]:
    random = torch.Generator("cuda").manual_seed(tokens)
    x = torch.randn(tokens, HIDDEN, device="cuda", generator=random).to(torch.bfloat16)
    if tokens > 2:
        x[1] = 0
    choices = []
    for _ in range(_CALLS.get(tokens, 1)):
        ids = torch.rand(tokens, EXPERTS, device="cuda", generator=random).topk(TOP_K, 1).indices.to(torch.int32)
        weights = torch.rand(tokens, TOP_K, device="cuda", generator=random)
        choices.append((ids, 2.5 * weights / weights.sum(1, keepdim=True)))
    return x, choices


def _experts(count: int, intermediate: int, seed: int) -> Nvfp4Experts:
    """Random codes, block scales over all of E4M3, and global scales that keep outputs moderate."""
    random = torch.Generator("cuda").manual_seed(seed)

    def some(*shape: int, below: int) -> torch.Tensor:
        return torch.randint(0, below, shape, dtype=torch.uint8, device="cuda", generator=random)

    def scale(*shape: int) -> torch.Tensor:
        return 1e-4 * (0.5 + torch.rand(shape, device="cuda", generator=random))

    return Nvfp4Experts(
        gate_up_weight=some(count, 2, intermediate, HIDDEN // 2, below=256),
        gate_up_block_scale=some(count, 2, intermediate, HIDDEN // 16, below=0x7F).view(torch.float8_e4m3fn),
        gate_up_global_scale=scale(count, 2),
        gate_up_input_scale=torch.full((count, 2), 2e-3, device="cuda"),
        down_weight=some(count, HIDDEN, intermediate // 2, below=256),
        down_block_scale=some(count, HIDDEN, intermediate // 16, below=0x7F).view(torch.float8_e4m3fn),
        down_global_scale=scale(count),
        down_input_scale=torch.full((count,), 1e-2, device="cuda"),
    )


def _triton(layer: Layer, intermediate: int, numerics: Numerics) -> Mapping[str, Call]:
    problem = Problem(
        hidden_size=HIDDEN,
        intermediate_size=intermediate,
        num_experts=EXPERTS,
        top_k=TOP_K,
        num_shared_experts=1,
        shared_format=SharedExpertFormat.NVFP4,
        numerics=numerics,
    )
    scale = layer.routed.gate_up_input_scale.amax()
    fused = TritonState(experts_of(layer.routed, layer.shared, 1, numerics, common_scale=True), None, 0, scale)
    split = TritonState(
        experts_of(layer.routed, None, 0, numerics, common_scale=False),
        experts_of(None, layer.shared, 1, numerics, common_scale=False),
        0,
        scale,
    )
    return {
        "fused": lambda x, ids, weights: run_top_k(x, fused, problem, ids, weights),
        "split": lambda x, ids, weights: run_top_k(x, split, problem, ids, weights),
    }


def _grouped_mm(layer: Layer) -> Call:
    both = (layer.routed, layer.shared)
    gate_up = torch.cat([_dequantized(part, "gate_up").flatten(1, 2) for part in both])
    down = torch.cat([_dequantized(part, "down") for part in both])

    def call(x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        tokens = x.shape[0]
        all_ids = torch.cat((ids, ids.new_full((tokens, 1), EXPERTS)), 1).flatten()
        all_weights = torch.cat((weights, weights.new_ones(tokens, 1)), 1).flatten()
        in_order, order = all_ids.sort()
        ends = torch.searchsorted(in_order, torch.arange(EXPERTS + 1, device=x.device, dtype=ids.dtype), right=True)
        offsets = ends.to(torch.int32)
        rows = torch._grouped_mm(x[order // (TOP_K + 1)], gate_up.transpose(1, 2), offs=offsets)
        gate, up = rows.chunk(2, 1)
        rows = torch._grouped_mm(torch.nn.functional.silu(gate) * up, down.transpose(1, 2), offs=offsets)
        placed = torch.empty_like(rows)
        placed[order] = rows
        weighed = placed.view(tokens, TOP_K + 1, HIDDEN) * all_weights.view(tokens, TOP_K + 1, 1)
        return weighed.sum(1).to(x.dtype)

    return call


def _dequantized(experts: Nvfp4Experts, name: str) -> torch.Tensor:
    """bf16 weights of one kind, an expert at a time."""
    codes, scales, global_scale = (
        getattr(experts, f"{name}_{kind}") for kind in ("weight", "block_scale", "global_scale")
    )
    return torch.stack(
        [
            dequantize_nvfp4(Nvfp4Tensor(codes[e], scales[e], global_scale[e])).to(torch.bfloat16)
            for e in range(experts.num_experts)
        ]
    )


def reference(
    x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor, layer: Layer, numerics: Numerics
) -> torch.Tensor:
    """The layer in float32 [T, H], an expert at a time."""
    values = x.float()
    output = _mlp(values, layer.shared, 0, numerics)
    for expert in sorted(set(ids.flatten().tolist())):
        token, slot = (ids == expert).nonzero(as_tuple=True)
        output.index_add_(0, token, weights[token, slot, None] * _mlp(values[token], layer.routed, expert, numerics))
    return output


def _mlp(values: torch.Tensor, experts: Nvfp4Experts, e: int, numerics: Numerics) -> torch.Tensor:
    def rounded(activations: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
        if numerics is Numerics.W4A16:
            return activations
        return dequantize_nvfp4(quantize_nvfp4(activations, scale, check=False))

    tensors = experts.gate_up_weight, experts.gate_up_block_scale, experts.gate_up_global_scale
    gate_up = dequantize_nvfp4(Nvfp4Tensor(*(tensor[e] for tensor in tensors)))
    gate, up = (rounded(values, experts.gate_up_input_scale[e, side]) @ gate_up[side].T for side in (0, 1))
    hidden = rounded(torch.nn.functional.silu(gate) * up, experts.down_input_scale[e])
    tensors = experts.down_weight, experts.down_block_scale, experts.down_global_scale
    return hidden @ dequantize_nvfp4(Nvfp4Tensor(*(tensor[e] for tensor in tensors))).T


def _check(output: torch.Tensor, expected: torch.Tensor, limit: float = TOLERANCE) -> float:
    """The relative error; a row of `w4a4` that a tie throws elsewhere is told from a wrong one by being alone."""
    difference, size = (output.double() - expected.double()).norm(dim=1), expected.double().norm(dim=1)
    error = float(difference.norm() / size.norm())
    typical = float((difference / size.clamp(min=1e-30)).median())
    if not torch.isfinite(output).all() or typical > limit:
        raise SystemExit(f"wrong result: relative error {error:.2e}, of the median row {typical:.2e}")
    return error


def _time(call: Call, x: torch.Tensor, choices: list[tuple[torch.Tensor, torch.Tensor]]) -> float:
    """Microseconds of one call."""
    graph = torch.cuda.CUDAGraph()
    for ids, weights in choices:
        call(x, ids, weights)
    torch.cuda.synchronize()
    with torch.cuda.graph(graph):
        for ids, weights in choices:
            call(x, ids, weights)
    times: list[float] = []
    for _ in range(25):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(1e3 * start.elapsed_time(end) / len(choices))
    return statistics.median(times[5:])


def _floor(tokens: int, intermediate: int, choices: list[tuple[torch.Tensor, torch.Tensor]]) -> float:
    touched = statistics.mean(len(set(ids.flatten().tolist())) + 1 for ids, _ in choices)
    values = 3 * HIDDEN * intermediate
    moved = touched * values * 9 / 16 / BYTES_PER_SECOND
    computed = 2 * values * tokens * (TOP_K + 1) / FLOPS_PER_SECOND
    return 1e6 * max(moved, computed)


def _table(points: list[dict[str, Any]]) -> str:
    names = ("floor", "fused w4a16", "split w4a16", "fused w4a4", "split w4a4", "grouped_mm bf16")
    lines = [
        "| I | T | " + " | ".join(names) + " | fused / floor | grouped_mm / fused |",
        "|" + " --- |" * (len(names) + 4),
    ]
    for point in points:
        times = " | ".join(f"{point[name]:.1f}" for name in names)
        best = point["fused w4a16"]
        ratios = f"{best / point['floor']:.2f} | {point['grouped_mm bf16'] / best:.2f}"
        lines.append(f"| {point['intermediate_size']} | {point['tokens']} | {times} | {ratios} |")
    return "\n".join(lines)


def _machine() -> dict[str, str]:
    return {
        "gpu": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "triton": triton.__version__,
        "date": datetime.datetime.now(datetime.timezone.utc).date().isoformat(),
    }


if __name__ == "__main__":
    main()
