"""Run one MoE layer of a ModelOpt NVFP4 checkpoint and compare with a recorded output.

Exit code: 0 done, 1 when the asked-for strategy is refused or the error is above --tolerance, 2 bad input.

FILE holds hidden_states [T, hidden_size], and may hold topk_ids and topk_weights [T, top_k] (otherwise the layer's own
router chooses) and output_w4a4 or output_w4a16 [T, hidden_size] to compare with.
"""

from __future__ import annotations

import argparse
import json
import math
import time
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from flashinfer_compat.cli.console import paragraph
from flashinfer_compat.errors import ArgumentError, CheckpointError, DependencyMissingError
from flashinfer_compat.files import write_named
from flashinfer_compat.machine import this_machine
from flashinfer_compat.planning.plan import AUTO, plan
from flashinfer_compat.vocabulary import Backend, Numerics, RoutingInput, Strategy, parse

if TYPE_CHECKING:
    import torch

    from flashinfer_compat.inputs import Routing
    from flashinfer_compat.weights.values import MoELayerWeights

__all__ = ["HELP", "add_arguments", "run"]

HELP = "run one MoE layer of a checkpoint and compare with a recorded output"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The command's own options."""
    parser.add_argument("checkpoint", type=Path, metavar="CHECKPOINT", help="folder of a ModelOpt NVFP4 checkpoint")
    parser.add_argument("--layer", type=int, required=True, metavar="N")
    parser.add_argument("--input", type=Path, required=True, metavar="FILE.safetensors")
    parser.add_argument("--output", type=Path, metavar="FILE.safetensors", help="where to write the tensor `output`")
    names = ", ".join([AUTO, *(one.value for one in Strategy)])
    parser.add_argument("--strategy", default=AUTO, metavar="NAME", help=f"{names} (default: {AUTO})")
    names = ", ".join([AUTO, *(one.value for one in Backend)])
    parser.add_argument("--backend", default=AUTO, metavar="NAME", help=f"{names} (default: {AUTO})")
    names = ", ".join(one.value for one in Numerics)
    parser.add_argument("--numerics", default=Numerics.W4A4.value, metavar="NAME", help=f"{names} (default: w4a4)")
    parser.add_argument("--tolerance", type=float, metavar="E", help="largest relative error for exit code 0")
    parser.add_argument("--device", default="cpu", help="torch device (default: cpu)")


def run(options: argparse.Namespace) -> int:
    """Load, plan, compute, compare, print."""
    numerics = parse(Numerics, options.numerics, "--numerics")
    tolerance = options.tolerance
    if tolerance is not None and not 0 <= tolerance < math.inf:
        raise ArgumentError("--tolerance", "a finite relative error of at least 0", str(tolerance))
    strategy = options.strategy if options.strategy == AUTO else parse(Strategy, options.strategy, "--strategy", AUTO)
    if options.output is not None and (options.output.is_dir() or not options.output.absolute().parent.is_dir()):
        raise CheckpointError(str(options.output), "a file name in an existing folder", "none", "Create the folder.")
    tensors, recorded = _read(options.input), f"output_{numerics.value}"
    if tolerance is not None and recorded not in tensors:
        expected, actual = "a recorded output, for --tolerance to compare with", "no such tensor"
        raise CheckpointError(f"{options.input}: {recorded}", expected, actual, "Leave --tolerance out.")
    # Importing torch takes seconds; what can be refused without it has been by now.
    from flashinfer_compat.moe import fp4_moe, prepare
    from flashinfer_compat.weights.checkpoint import load_moe_layer

    weights = load_moe_layer(options.checkpoint, options.layer, device=options.device)
    hidden_states = tensors["hidden_states"].to(weights.routed.down_weight.device)
    if hidden_states.is_meta:
        raise ArgumentError("--device", "a device that computes", "'meta'")
    routing = _routing(options.input, tensors, hidden_states, weights, strategy)
    target = this_machine()
    if options.device == "cpu":
        target = replace(target, architecture=None)
    problem = weights.problem(routing.routing_input, numerics=numerics)
    decision = plan(problem, target, strategy=strategy, backend=options.backend)
    layer = prepare(weights, decision)
    started = time.perf_counter()
    output = fp4_moe(hidden_states, layer, routing).cpu()
    seconds = time.perf_counter() - started
    result: dict[str, Any] = {
        "strategy": decision.strategy.value,
        "backend": decision.backend.value,
        "status": decision.status.value,
        "numerics": numerics.value,
        "routing_input": routing.routing_input.value,
        "tokens": output.shape[0],
        "hidden_size": output.shape[1],
        "seconds": round(seconds, 4),
        "input_scale_spread": weights.input_scale_spread,
        "compared_with": recorded if recorded in tensors else None,
        "relative_error": None,
        "notes": list(decision.notes),
    }
    if recorded in tensors:
        result["relative_error"] = _relative_error(options.input, recorded, output, tensors[recorded])
    if options.output is not None:
        _write(options.output, output)
        result["output"] = str(options.output)
    if options.json:
        print(json.dumps(result, indent=2))
    else:
        _print(result, options)
    error = result["relative_error"]
    return int(tolerance is not None and error > tolerance)


def _read(path: Path) -> dict[str, torch.Tensor]:
    try:
        from safetensors import SafetensorError
        from safetensors.torch import load_file
    except ImportError as error:
        library = "torch" if "torch" in str(error) else "safetensors"
        raise DependencyMissingError(library, "run-layer") from error
    try:
        tensors: dict[str, torch.Tensor] = load_file(path)
    except FileNotFoundError:
        raise CheckpointError(str(path), "a safetensors file", "no such file") from None
    except (OSError, SafetensorError) as error:
        raise CheckpointError(str(path), "a safetensors file", str(error)) from error
    if "hidden_states" not in tensors:
        raise CheckpointError(f"{path}: hidden_states", "a tensor [tokens, hidden_size]", f"only {sorted(tensors)}")
    if ("topk_ids" in tensors) != ("topk_weights" in tensors):
        given = "topk_ids" if "topk_ids" in tensors else "topk_weights"
        raise CheckpointError(str(path), "both topk_ids and topk_weights, or neither", f"only {given}")
    return tensors


def _routing(
    path: Path,
    tensors: dict[str, torch.Tensor],
    hidden_states: torch.Tensor,
    weights: MoELayerWeights,
    strategy: Strategy | str,
) -> Routing:
    """The file's top-k; without one, or for the strategy that routes itself, what the layer's router says."""
    from flashinfer_compat.backends.routing import topk_from_logits
    from flashinfer_compat.errors import TensorError
    from flashinfer_compat.inputs import TopKRouting
    from flashinfer_compat.moe import route_logits

    if hidden_states.ndim != 2 or hidden_states.shape[1] != weights.config.hidden_size:
        raise TensorError(
            "hidden_states",
            f"shape [tokens, {weights.config.hidden_size}], as {path.name} is given to this layer",
            f"shape {list(hidden_states.shape)}",
        )
    if strategy is not Strategy.NATIVE and "topk_ids" in tensors:
        device = hidden_states.device
        return TopKRouting(tensors["topk_ids"].to(device), tensors["topk_weights"].to(device))
    logits = route_logits(hidden_states, weights.router)
    if strategy is not Strategy.EXPANDED:
        return logits
    chosen = topk_from_logits(weights.problem(RoutingInput.LOGITS), logits)
    return TopKRouting(chosen.ids, chosen.weights)


def _relative_error(path: Path, name: str, output: torch.Tensor, recorded: torch.Tensor) -> float:
    """Frobenius norm of the difference over that of the recorded output."""
    if recorded.shape != output.shape:
        raise CheckpointError(f"{path}: {name}", f"shape {list(output.shape)}", f"shape {list(recorded.shape)}")
    if not bool(recorded.isfinite().all()):
        raise CheckpointError(f"{path}: {name}", "finite values", "NaN or infinity")
    norm = float(recorded.double().norm())
    difference = float((output.double() - recorded.double()).norm())
    return difference / norm if norm else difference


def _write(path: Path, output: torch.Tensor) -> None:
    from safetensors.torch import save

    content = save({"output": output.contiguous()})
    try:
        write_named(path, content)
    except OSError as error:
        raise CheckpointError(str(path), "a place to write the output", str(error)) from error


def _print(result: dict[str, Any], options: argparse.Namespace) -> None:
    how = f"{result['strategy']} on {result['backend']} ({result['status']}), {result['numerics']}"
    print(f"layer {options.layer} of {options.checkpoint}: {how}, routed from {result['routing_input']}")
    print(f"{result['tokens']} tokens in {result['seconds'] * 1e3:.1f} ms")
    if result["relative_error"] is not None:
        print(f"relative error to {result['compared_with']}: {result['relative_error']:.2e}")
    if result["input_scale_spread"] > 1:
        print(f"input scales spread by {result['input_scale_spread']:.3g} between experts")
    if "output" in result:
        print(f"output written to {result['output']}")
    for note in result["notes"]:
        paragraph(note, label="note:", indent=0)
