"""Tile shapes found by measuring: a few beside the one that `tiles_for` chooses, while a layer is prepared."""

from __future__ import annotations

import hashlib
import math
import statistics
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from pathlib import Path
from typing import Any

import torch
import triton

from flashinfer_compat.backends.graph_times import graph_times
from flashinfer_compat.backends.triton.candidates import STEPS, Step, fits
from flashinfer_compat.backends.triton.layer import TritonState, run_top_k, untuned
from flashinfer_compat.backends.triton.mlp import INTERPRETED
from flashinfer_compat.backends.triton.tuned import Cut, Measured, load, store
from flashinfer_compat.backends.triton.weights import Experts
from flashinfer_compat.problem import Problem
from flashinfer_compat.vocabulary import Numerics

__all__ = ["autotuned", "search", "steps_of"]

_WIN = 1.02
"""A candidate must be faster by so much; less is within the noise."""
_REPLAYS = 15
_CALLS, _MANY_TOKENS = 8, 64
"""Calls of one replay, each with other experts, so that few tokens do not find their weights in the L2 cache."""
_TOLERANCE = {Numerics.W4A16: 1e-2, Numerics.W4A4: 5e-2}
"""Relative difference of two right results: the order of sums, and in w4a4 the ties that it moves."""


def autotuned(state: TritonState, problem: Problem, tokens: Iterable[int]) -> TritonState:
    """The state with tiles for calls of so many tokens: those found here before, else measured now.

    A layer's call then looks at nothing but the dictionary in its state. Measuring waits for the GPU.
    """
    wanted = sorted(set(tokens))
    if INTERPRETED or not wanted or state.input_scale.device.type != "cuda":
        return state
    facts = _facts(state, problem)
    known = _known(hashlib.sha256(repr(sorted(facts.items())).encode()).hexdigest())
    for count, measured in load(facts).items():
        if _runs(measured.cut, state):
            known.setdefault(count, measured)
    for count in wanted:
        if count not in known:
            known[count] = _measure(state, problem, count)
            store(facts, {count: known[count]})
    return replace(state, cuts={count: known[count].cut for count in wanted})


@cache
def _known(facts: str) -> dict[int, Measured]:
    """What this process has found, for where there is no cache directory: a model has many layers of one size."""
    return {}


def search(
    start: Cut, steps: Sequence[Callable[[Cut], Iterable[Cut]]], time: Callable[[Cut], float]
) -> tuple[Cut, float, float]:
    """The best cut that a few steps lead to, its time and that of `start`.

    Each step tries its candidates around the best so far. `start` stays unless the winner, timed again, beats it by 2%.

    Args:
        start: where to begin.
        steps: what to try beside a cut.
        time: microseconds; infinite for what does not run or is wrong.
    """
    best, fastest = start, time(start)
    for step in steps:
        for one in tuple(step(best)):
            taken = time(one)
            if taken < fastest:
                best, fastest = one, taken
    # The fastest of many is so by luck too.
    of_start, of_best = time(start), time(best)
    return (best, of_best, of_start) if of_start > _WIN * of_best else (start, of_start, of_start)


def steps_of(state: TritonState) -> tuple[Callable[[Cut], Iterable[Cut]], ...]:
    """The steps for a layer's experts, and for its shared MLP apart."""
    experts, shared = state.experts, state.shared

    def of_experts(step: Step) -> Callable[[Cut], Iterable[Cut]]:
        sizes = experts.hidden_size, experts.intermediate_size
        return lambda cut: (replace(cut, experts=one) for one in step(cut.experts, *sizes))

    def of_shared(step: Step, apart: Experts) -> Callable[[Cut], Iterable[Cut]]:
        sizes = apart.hidden_size, apart.intermediate_size
        return lambda cut: (replace(cut, shared=one) for one in (step(cut.shared, *sizes) if cut.shared else ()))

    steps = tuple(of_experts(step) for step in STEPS)
    return steps + tuple(of_shared(step, shared) for step in STEPS) if isinstance(shared, Experts) else steps


def _runs(cut: Cut, state: TritonState) -> bool:
    """Whether a stored cut suits the layer; a file may hold anything."""
    shared = state.shared if isinstance(state.shared, Experts) else None
    if (cut.shared is None) != (shared is None):
        return False
    pairs = [(cut.experts, state.experts), *([] if cut.shared is None or shared is None else [(cut.shared, shared)])]
    return all(fits(tiles, experts.hidden_size, experts.intermediate_size) for tiles, experts in pairs)


@torch.no_grad()
def _measure(state: TritonState, problem: Problem, tokens: int) -> Measured:
    start = untuned(state, problem, tokens)
    found, microseconds, before = search(start, steps_of(state), _Clock.of(state, problem, tokens, start))
    return Measured(found, microseconds, before)


@dataclass(frozen=True)
class _Clock:
    """Times calls of one number of tokens by replaying a CUDA graph of them."""

    state: TritonState
    problem: Problem
    x: torch.Tensor
    """bfloat16 [T, H], random."""
    ids: tuple[torch.Tensor, ...]
    """int32 [T, top_k], for each call of the graph."""
    weights: torch.Tensor
    expected: torch.Tensor
    """[T, H]: of the first call."""

    @classmethod
    def of(cls, state: TritonState, problem: Problem, tokens: int, cut: Cut) -> _Clock:
        device = state.input_scale.device
        random = torch.Generator(device).manual_seed(tokens)
        x = torch.randn(tokens, problem.hidden_size, device=device, generator=random).to(torch.bfloat16)
        ids = tuple(
            torch.rand(tokens, problem.num_experts, device=device, generator=random)
            .topk(problem.top_k, 1)
            .indices.to(torch.int32)
            for _ in range(_CALLS if tokens <= _MANY_TOKENS else 2)
        )
        weights = torch.rand(tokens, problem.top_k, device=device, generator=random)
        unchecked = cls(state, problem, x, ids, weights, x)
        return replace(unchecked, expected=unchecked._call(ids[0], cut).float())

    def __call__(self, cut: Cut) -> float:
        """Microseconds of one call."""
        try:
            output = self._call(self.ids[0], cut)
        except triton.TritonError:
            # Too much shared memory for this GPU, say.
            return math.inf
        difference = (output.float() - self.expected).norm()
        # Not smaller, rather than larger: a NaN is wrong too.
        if not bool(difference <= _TOLERANCE[self.problem.numerics] * self.expected.norm()):
            return math.inf
        calls = [partial(self._call, ids, cut) for ids in self.ids]
        return statistics.median(graph_times(calls, _REPLAYS)) / len(calls)

    def _call(self, ids: torch.Tensor, cut: Cut) -> torch.Tensor:
        return run_top_k(
            self.x, self.state, self.problem, ids, self.weights, tiles=cut.experts, shared_tiles=cut.shared
        )


def _facts(state: TritonState, problem: Problem) -> dict[str, Any]:
    """Everything that decides which tiles are fastest, as plain JSON values."""
    experts, shared = state.experts, state.shared
    side_stream = state.side_stream
    return {
        "gpu": torch.cuda.get_device_name(state.input_scale.device),
        "triton": triton.__version__,
        "torch": torch.__version__,
        "kernels": _kernels(),
        "experts": _sizes(experts),
        "shared": _sizes(shared) if isinstance(shared, Experts) else type(shared).__name__,
        "side_stream_tokens": None if side_stream is None else side_stream.most_tokens,
        "num_experts": problem.num_experts,
        "top_k": problem.top_k,
        "numerics": problem.numerics.value,
        "activation": problem.activation.value,
    }


def _sizes(experts: Experts) -> list[Any]:
    return [
        experts.num_routed,
        experts.num_appended,
        experts.hidden_size,
        experts.intermediate_size,
        experts.scale_per_pair,
        experts.scale_sides,
        experts.arithmetic.value,
    ]


@cache
def _kernels() -> str:
    """What changes with any of the kernels' sources."""
    digest = hashlib.sha256()
    for path in sorted(Path(__file__).parent.glob("*.py")):
        digest.update(path.name.encode() + b"\0" + path.read_bytes())
    return digest.hexdigest()[:16]
