"""How long a GPU takes for some calls, without what they cost the host: replays of a CUDA graph of them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import torch

__all__ = ["graph_times"]


def graph_times(calls: Sequence[Callable[[], object]], replays: int) -> Iterator[float]:
    """Microseconds of all calls, one after the other, for each replay. Each must have run before: that may compile."""
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in calls:
            call()
    for _ in range(replays):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        yield 1e3 * start.elapsed_time(end)
