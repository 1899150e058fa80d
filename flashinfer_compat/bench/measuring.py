"""Times and memory of calls: CUDA-graph replays on a GPU, the wall clock elsewhere."""

from __future__ import annotations

import enum
import statistics
import time
import types
from collections.abc import Callable, Iterator, Mapping, Sequence

import torch

from flashinfer_compat.backends.graph_times import graph_times

__all__ = ["Call", "Timing", "bytes_beyond", "microseconds", "peak_bytes"]

Call = Callable[[], torch.Tensor]

_REPLAYS, _FIRST_REPLAYS = 25, 5
"""Of a graph, and how many of them are not counted."""
_ROUNDS = 5
"""By the wall clock."""


class Timing(str, enum.Enum):
    """How a time was taken."""

    CUDA_GRAPH = "cuda_graph"
    """Between two events around a graph's replay: without what a call costs the host."""
    WALL_CLOCK = "wall_clock"
    """From the call to its result, the host's part included."""


def microseconds(calls: Sequence[Call], device: torch.device, timing: Timing) -> float:
    """The median time of one of `calls`, which are run one after the other, each at least once before."""
    for call in calls:
        call()
    _wait(device)
    times = (
        list(graph_times(calls, _REPLAYS))[_FIRST_REPLAYS:] if timing is Timing.CUDA_GRAPH else _rounds(calls, device)
    )
    return statistics.median(times) / len(calls)


def peak_bytes(call: Call, device: torch.device) -> int | None:
    """Memory that one call needs at once beyond what was there before, its output included; None on a CPU."""
    if device.type != "cuda":
        return None
    torch.cuda.synchronize(device)
    before = torch.cuda.memory_allocated(device)
    torch.cuda.reset_peak_memory_stats(device)
    call()
    torch.cuda.synchronize(device)
    return torch.cuda.max_memory_allocated(device) - before


def bytes_beyond(state: object, given: object) -> int:
    """Bytes of the tensors that `state` holds in memory of its own, beside that of the tensors that `given` holds."""
    own, theirs = ({one.data_ptr(): one.nbytes() for one in _storages(value)} for value in (state, given))
    return sum(size for address, size in own.items() if address not in theirs)


def _rounds(calls: Sequence[Call], device: torch.device) -> Iterator[float]:
    for _ in range(_ROUNDS):
        started = time.perf_counter()
        for call in calls:
            call()
        _wait(device)
        yield 1e6 * (time.perf_counter() - started)


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _storages(value: object) -> Iterator[torch.UntypedStorage]:
    """Of every tensor within a value: in its attributes, items and elements."""
    left, seen = [value], set()
    while left:
        one = left.pop()
        if id(one) in seen or isinstance(one, _WITHOUT_TENSORS):
            continue
        seen.add(id(one))
        if isinstance(one, torch.Tensor):
            yield one.untyped_storage()
        elif isinstance(one, Mapping):
            left.extend(one.values())
        elif isinstance(one, (tuple, list)):
            left.extend(one)
        else:
            left.extend(getattr(one, "__dict__", {}).values())


_WITHOUT_TENSORS = (type, str, bytes, types.ModuleType, types.FunctionType)
"""What is not looked into: tensors behind these belong to nobody's layer."""
