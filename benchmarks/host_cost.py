"""What fp4_moe costs the host beyond the FlashInfer calls it makes, with FlashInfer's compiled libraries stubbed.

    PYTHONPATH=tests python -m benchmarks.host_cost [--rounds N] [--calls N]

It needs an installed FlashInfer (tests/requirements-flashinfer.txt) and no GPU: its wrappers run as on an SM100, and
the compiled functions return at once. The direct calls are what an engine would write by hand for the same kernels.
Both run in one process, one token, in turns; the figures are medians over the turns.
"""

from __future__ import annotations

import argparse
import gc
import importlib
import importlib.util
import platform
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

import flashinfer_compat as fc

_SAMPLE = Path(__file__).parents[1] / "tests" / "data" / "checkpoints" / "grouped"


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.host_cost", description=__doc__)
    parser.add_argument("--rounds", type=int, default=200)
    parser.add_argument("--calls", type=int, default=20)
    options = parser.parse_args()
    if importlib.util.find_spec("flashinfer") is None:
        parser.error("it needs FlashInfer: pip install --no-deps -r tests/requirements-flashinfer.txt")
    torch.set_num_threads(1)
    version = _stub_flashinfer()
    print(f"FlashInfer {version}, torch {torch.__version__}, Python {platform.python_version()}, 1 token")
    print("| strategy, input | direct, us | fp4_moe, us | more, us | ratio |")
    print("| --- | --- | --- | --- | --- |")
    for case in _cases(version):
        direct, ours = _medians(case, options.rounds, options.calls)
        print(f"| {case.title} | {direct:.1f} | {ours:.1f} | {ours - direct:.1f} | {ours / direct:.2f} |", flush=True)


@dataclass(frozen=True)
class Case:
    """One call, written by hand and through fp4_moe."""

    title: str
    direct: Callable[[], torch.Tensor]
    ours: Callable[[], torch.Tensor]


def _medians(case: Case, rounds: int, calls: int) -> tuple[float, float]:
    """Microseconds a call."""
    times: dict[str, list[float]] = {"direct": [], "ours": []}
    for _ in range(calls):
        case.direct()
        case.ours()
    gc.disable()
    for _ in range(rounds):
        for name, function in (("direct", case.direct), ("ours", case.ours)):
            started = time.perf_counter()
            for _ in range(calls):
                function()
            times[name].append((time.perf_counter() - started) / calls * 1e6)
        gc.collect()
    gc.enable()
    return statistics.median(times["direct"]), statistics.median(times["ours"])


def _cases(version: str) -> list[Case]:
    io, weights = load_file(_SAMPLE / "moe_io.safetensors"), fc.load_moe_layer(_SAMPLE, 1)
    x = io["hidden_states"][:1].contiguous()
    logits, bias = io["router_logits"][:1].contiguous(), io["e_score_correction_bias"]
    ids, topk_weights = io["topk_ids"][:1].to(torch.int32), io["topk_weights"][:1].contiguous()
    target = fc.Target.from_release(version, "sm100")
    cases = []
    for strategy, kind in (("native", "logits"), ("expanded", "topk"), ("split", "logits"), ("split", "topk")):
        plan = fc.plan(weights.problem(kind), target, strategy=strategy)
        layer = fc.prepare(weights, plan)
        routing: Any = fc.TopKRouting(ids, topk_weights) if kind == "topk" else fc.LogitsRouting(logits, bias)

        def ours(layer: fc.PreparedLayer = layer, routing: Any = routing) -> torch.Tensor:
            return fc.fp4_moe(x, layer, routing)

        cases.append(Case(f"{strategy}, {kind}", _direct(layer, x, routing), ours))
    return cases


def _direct(layer: fc.PreparedLayer, x: torch.Tensor, routing: Any) -> Callable[[], torch.Tensor]:
    """The same calls written out, with the layer's own tensors."""
    flashinfer: Any = importlib.import_module("flashinfer")
    moe: Any = importlib.import_module("flashinfer.fused_moe")
    fused, shared = layer.state.fused, layer.state.shared
    fixed = dict(fused.arguments)
    scale = layer.input_scale.reciprocal().reshape(1)
    shared_id = torch.full((1, 1), layer.plan.problem.num_experts, dtype=torch.int32)
    shared_weight = torch.ones(1, 1)
    is_topk, is_fused = isinstance(routing, fc.TopKRouting), layer.plan.strategy.is_fused

    def dense(values: torch.Tensor, linear: Any) -> torch.Tensor:
        codes, block_scale = flashinfer.fp4_quantize(values, linear.quantize_scale)
        output: torch.Tensor = flashinfer.mm_fp4(
            codes, linear.weight.T, block_scale, linear.block_scale.T, linear.alpha, torch.bfloat16, backend="cutlass"
        )
        return output

    def call() -> torch.Tensor:
        codes, block_scale = flashinfer.fp4_quantize(x, scale, is_sf_swizzled_layout=False)
        block_scale = block_scale.view(torch.float8_e4m3fn).reshape(1, -1)
        if is_topk:
            topk = (routing.ids, routing.weights)
            if is_fused:
                topk = torch.cat((routing.ids, shared_id), 1), torch.cat((routing.weights, shared_weight), 1)
            result = moe.trtllm_fp4_block_scale_routed_moe(
                topk_ids=topk,
                routing_bias=None,
                hidden_states=codes,
                hidden_states_scale=block_scale,
                do_finalize=True,
                **fixed,
            )
        else:
            result = moe.trtllm_fp4_block_scale_moe(
                routing_logits=routing.logits,
                routing_bias=routing.bias,
                hidden_states=codes,
                hidden_states_scale=block_scale,
                do_finalize=True,
                **fixed,
            )
        output: torch.Tensor = result[0]
        if shared is None:
            return output
        gate, up = dense(x, shared.weights.gate_up[0]).chunk(2, -1)
        hidden = (torch.nn.functional.silu(gate.float()) * up.float()).to(torch.bfloat16)
        return output + dense(hidden, shared.weights.down)

    return call


def _stub_flashinfer() -> str:
    """Its version."""
    from standin.compiled_install import pretend_sm100, replace_libraries

    pretend_sm100()
    import flashinfer

    output = torch.zeros(1, 256, dtype=torch.bfloat16)
    results = {"trtllm_fp4_block_scale_moe": [output]}

    class Stub:
        def __getattr__(self, name: str) -> Callable[..., Any]:
            result = 1 if name.endswith("tactic_num") else results.get(name)
            return lambda *arguments: result

    replace_libraries(lambda source: Stub())
    return str(flashinfer.__version__)


if __name__ == "__main__":
    main()
