"""The shared experts on a second stream, beside the routed ones."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import TypeVar

import torch

__all__ = ["SideStream", "forks", "run_both", "side_stream_for"]

_T = TypeVar("_T")


@dataclass(frozen=True)
class SideStream:
    """A second stream for calls of few tokens; more fill the GPU alone."""

    stream: torch.cuda.Stream
    most_tokens: int

    def beside(self, main: Callable[[], _T], side: Callable[[], torch.Tensor]) -> tuple[_T, torch.Tensor]:
        """Both results; both have read their input when the caller's stream goes on.

        Forks and joins by events, which a CUDA graph can capture. They are a call's own: with one kept from call to
        call, two threads could take each other's.
        """
        current = torch.cuda.current_stream(self.stream.device)
        self.stream.wait_stream(current)
        with torch.cuda.stream(self.stream):
            other = side()
        result = main()
        current.wait_stream(self.stream)
        other.record_stream(current)
        return result, other


def forks(side_stream: SideStream | None, tokens: int) -> bool:
    """Whether a call of so many tokens runs on both streams."""
    return side_stream is not None and tokens <= side_stream.most_tokens


def run_both(
    side_stream: SideStream | None, tokens: int, main: Callable[[], _T], side: Callable[[], torch.Tensor]
) -> tuple[_T, torch.Tensor]:
    """Both results of a call of so many tokens, beside each other where it forks and else one after the other."""
    if side_stream is None or not forks(side_stream, tokens):
        return main(), side()
    return side_stream.beside(main, side)


def side_stream_for(device: torch.device, most_tokens: int) -> SideStream | None:
    """The stream for calls of up to `most_tokens` tokens; None where there are none, or no GPU."""
    return SideStream(_stream(device), most_tokens) if device.type == "cuda" and most_tokens > 0 else None


@cache
def _stream(device: torch.device) -> torch.cuda.Stream:
    # One for all layers of a device, which run one after another: PyTorch keeps freed memory apart for each stream.
    return torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
