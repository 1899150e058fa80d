"""Runs the self-checks: every strategy and backend that planning lets through, on every fixed layer."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Collection, Iterator
from dataclasses import replace
from itertools import product

import torch

from flashinfer_compat.features.target import Target
from flashinfer_compat.inputs import LogitsRouting, Routing, TopKRouting
from flashinfer_compat.moe import fp4_moe, prepare
from flashinfer_compat.planning.plan import ALTERNATIVES, assess, plan
from flashinfer_compat.problem import Problem
from flashinfer_compat.reasons import Reason
from flashinfer_compat.self_checks import CheckedKind, SelfCheck
from flashinfer_compat.verification.layers import TOKENS, CheckedLayer, Inputs, checked_layers
from flashinfer_compat.verification.oracle import choose, expected
from flashinfer_compat.vocabulary import Backend, Evidence, Numerics, RoutingInput, SharedExpertFormat, Strategy

__all__ = ["failure_text", "obstacles", "self_checks", "tolerance_of"]

_FUSED_TOLERANCE = 1e-2
"""Relative error (Frobenius norms). Kernels round routing weights, each expert's row and the result to bf16."""
_SPLIT_TOLERANCE = 3e-2
"""With an NVFP4 shared expert in a dense FP4 GEMM, whose first result is rounded to bf16 before it is quantized."""

_TIMED_CALLS = 5


def self_checks(
    target: Target, device: torch.device, backends: Collection[Backend] = tuple(Backend)
) -> Iterator[SelfCheck]:
    """Run every check; results come as they are found.

    Args:
        target: this machine.
        device: where to run; on a CPU the target must have no architecture.
        backends: those to look at.
    """
    target = _unchecked(target)
    for layer, numerics in product(checked_layers(device), Numerics):
        wanted: dict[int, torch.Tensor] = {}
        for routing_input, (backend, strategy) in product(RoutingInput, ALTERNATIVES):
            problem = layer.weights.problem(routing_input, numerics=numerics)
            if backend not in backends or assess(problem, target, strategy, backend).reasons:
                continue
            wanted = wanted or {tokens: expected(layer, layer.inputs(tokens), numerics) for tokens in TOKENS}
            yield _check(layer, problem, target, strategy, backend, wanted)


def obstacles(target: Target, device: torch.device, backend: Backend) -> tuple[Reason, ...]:
    """Why no check runs on a backend: the kinds of reason that every case has, or else all there are, each once.

    Args:
        target: this machine.
        device: where it would run.
        backend: one that `self_checks` with these arguments gives nothing for.
    """
    cases = [
        assess(layer.weights.problem(routing_input, numerics=numerics), _unchecked(target), strategy, backend).reasons
        for layer, numerics in product(checked_layers(device), Numerics)
        for routing_input, (one, strategy) in product(RoutingInput, ALTERNATIVES)
        if one is backend
    ]
    found = {reason.code: reason for reasons in reversed(cases) for reason in reversed(reasons)}
    common = set(found).intersection(*({reason.code for reason in reasons} for reasons in cases))
    return tuple(reason for code, reason in found.items() if code in (common or found))


def tolerance_of(problem: Problem, strategy: Strategy, backend: Backend) -> float:
    """The relative error up to which a result is right."""
    dense = backend is Backend.TRTLLM and not strategy.is_fused and problem.shared_format is SharedExpertFormat.NVFP4
    return _SPLIT_TOLERANCE if dense else _FUSED_TOLERANCE


def failure_text(failure: Exception) -> str:
    """An exception's type and first line; FlashInfer's own can have pages."""
    lines = str(failure).splitlines()
    return f"{type(failure).__name__}: {lines[0] if lines else ''}"


def _unchecked(target: Target) -> Target:
    """What was found before must not decide what is looked at now."""
    return replace(target, self_checks=())


def _check(
    layer: CheckedLayer,
    problem: Problem,
    target: Target,
    strategy: Strategy,
    backend: Backend,
    wanted: dict[int, torch.Tensor],
) -> SelfCheck:
    kind = CheckedKind.of(problem, strategy, backend)
    tolerance = tolerance_of(problem, strategy, backend)
    try:
        prepared = prepare(layer.weights, plan(problem, target, strategy=strategy, backend=backend))
        worst, where, microseconds = 0.0, 0, 0.0
        for tokens, right in wanted.items():
            inputs = layer.inputs(tokens)
            routing = _routing(layer, inputs, problem.routing_input)

            def call(inputs: Inputs = inputs, routing: Routing = routing) -> torch.Tensor:
                return fp4_moe(inputs.hidden_states, prepared, routing)

            error = _error(call(), right)
            # NaN is worse than any number.
            if not error <= worst:
                worst, where = error, tokens
            if tokens == max(TOKENS):
                microseconds = _time(call)
    except Exception as failure:
        # Whatever a broken install raises is what this looks for.
        return SelfCheck(kind, Evidence.REFUTED, None, tolerance, None, f"it raised {failure_text(failure)}")
    if not worst <= tolerance:
        text = f"relative error {worst:.2e} with {where} tokens, more than {tolerance:.0e}"
        return SelfCheck(kind, Evidence.REFUTED, worst, tolerance, microseconds, text)
    return SelfCheck(kind, Evidence.VERIFIED, worst, tolerance, microseconds, "")


def _routing(layer: CheckedLayer, inputs: Inputs, routing_input: RoutingInput) -> Routing:
    config, bias = layer.weights.config, layer.weights.router.bias
    uses_bias = config.routing_method.value == "deepseek_v3"
    if routing_input is RoutingInput.LOGITS:
        return LogitsRouting(inputs.logits, bias if uses_bias else None)
    biases = [0.0] * config.num_experts if bias is None else bias.tolist()
    chosen = [choose(config, logits, biases) for logits in inputs.logits.tolist()]
    device = inputs.logits.device
    ids = torch.tensor([[one for one, _ in row] for row in chosen], dtype=torch.int32, device=device)
    weights = torch.tensor([[one for _, one in row] for row in chosen], dtype=torch.float32, device=device)
    return TopKRouting(ids.reshape(-1, config.top_k), weights.reshape(-1, config.top_k))


def _error(output: torch.Tensor, right: torch.Tensor) -> float:
    """0 for two empty tensors; infinite where the shapes differ or a zero row did not stay near its due."""
    if tuple(output.shape) != tuple(right.shape):
        return float("inf")
    difference = (output.double().cpu() - right).norm()
    norm = right.norm()
    return float(difference / norm) if float(norm) else float(difference)


def _time(call: Callable[[], torch.Tensor]) -> float:
    """Microseconds, median."""
    times = []
    for _ in range(_TIMED_CALLS):
        started = time.perf_counter()
        output = call()
        if output.is_cuda:
            torch.cuda.synchronize(output.device)
        times.append(time.perf_counter() - started)
    return statistics.median(times) * 1e6
