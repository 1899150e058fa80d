"""What it costs to lay out one layer's experts for FlashInfer's trtllm-gen kernels, in time and memory.

    python -m benchmarks.weight_preparation [--device cuda] [EXPERTS,HIDDEN,INTERMEDIATE ...]

The last expert is the shared one. Each size runs in a process of its own, on random bytes. Memory is the highest
resident set (on a GPU the allocator's peak) less what is there before the call and less the output. The copy is what
copying as many bytes to new memory takes.

The loop is what engines do with FlashInfer's helpers, expert by expert: its own permutation indices, an index, and its
interleaving of block scales, which is compiled; on a CPU the same permutation in PyTorch stands in for that one. It
needs an installed FlashInfer.
"""

from __future__ import annotations

import argparse
import dataclasses
import importlib.util
import json
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from flashinfer_compat.backends.trtllm.weights import TrtllmExperts, prepare_experts
from flashinfer_compat.features.target import Target
from flashinfer_compat.planning.plan import plan
from flashinfer_compat.vocabulary import Activation, RoutingMethod, Strategy
from flashinfer_compat.weights.values import LayerConfig, MoELayerWeights, Nvfp4Experts, Router

_SIZES = ("33,2048,1024", "257,7168,256", "257,7168,2048")
_GB = 1e9


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.weight_preparation", description=__doc__)
    parser.add_argument("sizes", nargs="*", default=_SIZES, metavar="EXPERTS,HIDDEN,INTERMEDIATE")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--measure", help=argparse.SUPPRESS)
    parser.add_argument("--loop", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    device = torch.device(options.device)
    if options.measure:
        measure = _measure_loop if options.loop else _measure
        print(json.dumps(measure(*_numbers(options.measure), device)))
        return
    print("| experts | hidden | intermediate | layer, GB | prepare, s | FlashInfer's loop, s | copy, s | beyond |")
    print("| --- | --- | --- | --- | --- | --- | --- | --- |")
    has_flashinfer = importlib.util.find_spec("flashinfer") is not None
    for size in options.sizes:
        found = _in_new_process(size, options.device)
        beyond = f"{found['beyond'] / _GB:.3f} GB, {found['beyond'] / found['layer']:.1%} of the layer"
        loop = f"{_in_new_process(size, options.device, '--loop')['loop']:.4f}" if has_flashinfer else "not run"
        times = f"{found['prepare']:.4f} | {loop} | {found['copy']:.4f}"
        print(f"| {size.replace(',', ' | ')} | {found['layer'] / _GB:.3f} | {times} | {beyond} |", flush=True)


def _in_new_process(size: str, device: str, *more: str) -> dict[str, float]:
    command = [sys.executable, "-m", "benchmarks.weight_preparation", "--device", device, "--measure", size, *more]
    run = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    found: dict[str, float] = json.loads(run.stdout)
    return found


def _measure_loop(experts: int, hidden: int, inter: int, device: torch.device) -> dict[str, float]:
    _loop(_experts(2, 256, 128, device))
    weights = _experts(experts, hidden, inter, device)
    _wait(device)
    started = time.perf_counter()
    _loop(weights)
    _wait(device)
    return {"loop": time.perf_counter() - started}


def _loop(weights: Nvfp4Experts) -> list[torch.Tensor]:
    """As vLLM 0.33 and SGLang 0.5.23 prepare weights."""
    core = importlib.import_module("flashinfer.fused_moe.core")
    on_gpu = weights.down_weight.device.type == "cuda"
    interleave = importlib.import_module("flashinfer").nvfp4_block_scale_interleave if on_gpu else _interleave
    prepared = []
    for weight, scale, permutation in (
        (weights.gate_up_weight, weights.gate_up_block_scale, core._maybe_get_cached_w3_w1_permute_indices),
        (weights.down_weight, weights.down_block_scale, core.get_w2_permute_indices_with_cache),
    ):
        # One cache each: the indices of weights and of scales are not the same.
        caches: tuple[dict[Any, Any], dict[Any, Any]] = {}, {}
        codes, scales = [], []
        for expert in range(weight.shape[0]):
            matrix = weight[expert].flatten(0, -2)
            codes.append(matrix[permutation(caches[0], matrix, 128).to(matrix.device)].contiguous())
            matrix = scale[expert].view(torch.uint8).flatten(0, -2)
            rows = permutation(caches[1], matrix, 128, num_elts_per_sf=16).to(matrix.device)
            scales.append(interleave(matrix[rows].contiguous()))
        prepared += [torch.stack(codes), torch.stack(scales)]
        del codes, scales
    return prepared


def _interleave(scale: torch.Tensor) -> torch.Tensor:
    rows, columns = scale.shape
    return scale.view(rows // 128, 4, 32, columns // 4, 4).permute(0, 3, 2, 1, 4).reshape(-1)


def _measure(experts: int, hidden: int, inter: int, device: torch.device) -> dict[str, float]:
    weights = _layer(experts, hidden, inter, device)
    call = plan(weights.problem("topk"), Target.from_release("0.7.4", "sm100"), strategy=Strategy.EXPANDED).call
    assert call is not None
    stored = [weights.routed, weights.shared]
    layer = sum(_bytes(part) for part in stored if isinstance(part, Nvfp4Experts))

    # Starts PyTorch's threads and, on a GPU, loads its kernels.
    tiny = _layer(3, 128, 64, device)
    prepare_experts(tiny, dataclasses.replace(call, weight_rows=3, intermediate_size=64))
    before = _resident(device)
    prepared, first = _timed(lambda: prepare_experts(weights, call), device)
    beyond = _peak(device) - before - _bytes(prepared)
    times = [first]
    if device.type == "cuda":
        # The first time waits for the driver's allocations; the allocator keeps them.
        del prepared
        times = [_timed(lambda: prepare_experts(weights, call), device)[1] for _ in range(5)]
    return {"layer": layer, "prepare": min(times), "beyond": beyond, "copy": _copy_time(layer, device)}


def _layer(experts: int, hidden: int, inter: int, device: torch.device) -> MoELayerWeights:
    """`experts` - 1 routed experts and one shared."""
    config = LayerConfig(
        hidden_size=hidden,
        intermediate_size=inter,
        num_experts=experts - 1,
        top_k=2,
        num_shared_experts=1,
        n_group=1,
        topk_group=1,
        routed_scaling_factor=1.0,
        norm_topk_prob=True,
        routing_method=RoutingMethod.DEEPSEEK_V3,
        activation=Activation.SWIGLU,
    )
    router = Router(torch.zeros(experts - 1, hidden, device=device), None)
    routed, shared = (_experts(count, hidden, inter, device) for count in (experts - 1, 1))
    return MoELayerWeights(config, router, routed, shared, layer=0, tp_rank=0, tp_size=1)


def _experts(count: int, hidden: int, inter: int, device: torch.device) -> Nvfp4Experts:
    def random(below: int, *shape: int) -> torch.Tensor:
        # In place, so that making the input leaves no higher peak behind.
        return torch.empty(shape, dtype=torch.uint8, device=device).random_(0, below)

    def scales(*shape: int) -> torch.Tensor:
        return random(0x7F, *shape).view(torch.float8_e4m3fn)

    return Nvfp4Experts(
        random(256, count, 2, inter, hidden // 2),
        scales(count, 2, inter, hidden // 16),
        torch.rand(count, 2, device=device),
        torch.rand(count, 2, device=device),
        random(256, count, hidden, inter // 2),
        scales(count, hidden, inter // 16),
        torch.rand(count, device=device),
        torch.rand(count, device=device),
    )


def _timed(action: Callable[[], TrtllmExperts], device: torch.device) -> tuple[TrtllmExperts, float]:
    _wait(device)
    started = time.perf_counter()
    result = action()
    _wait(device)
    return result, time.perf_counter() - started


def _copy_time(layer: int, device: torch.device) -> float:
    """Of a piece that fits beside the layer, scaled up."""
    piece = torch.ones(min(layer, 2**28), dtype=torch.uint8, device=device)
    piece.clone()
    _wait(device)
    started = time.perf_counter()
    for _ in range(5):
        piece.clone()
    _wait(device)
    return (time.perf_counter() - started) / 5 * layer / piece.numel()


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _resident(device: torch.device) -> int:
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
        return torch.cuda.memory_allocated(device)
    return _status("VmRSS")


def _peak(device: torch.device) -> int:
    return torch.cuda.max_memory_allocated(device) if device.type == "cuda" else _status("VmHWM")


def _status(name: str) -> int:
    """A figure of Linux's /proc/self/status, in bytes."""
    for line in Path("/proc/self/status").read_text("ascii").splitlines():
        if line.startswith(f"{name}:"):
            return int(line.split()[1]) * 1024
    raise SystemExit(f"/proc/self/status has no {name}: memory is measured on Linux only")


def _bytes(tensors: Nvfp4Experts | TrtllmExperts) -> int:
    return sum(one.nbytes for one in vars(tensors).values() if isinstance(one, torch.Tensor))


def _numbers(size: str) -> tuple[int, int, int]:
    experts, hidden, inter = map(int, size.split(","))
    return experts, hidden, inter


if __name__ == "__main__":
    main()
