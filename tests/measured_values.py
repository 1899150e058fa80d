"""Made-up measurements."""

from __future__ import annotations

from collections.abc import Mapping

from flashinfer_compat.bench.results import Found, Point, Way
from flashinfer_compat.bench.shapes import Sizes
from flashinfer_compat.policy import Origin, PolicyRow, Times
from flashinfer_compat.vocabulary import Backend, Numerics, RoutingInput, Strategy

H200 = Origin("NVIDIA H200", "sm90", "580.159", (("torch", "2.11.0"), ("triton", "3.6.0")), "2026-11-30")
R1 = Sizes()


def way(strategy: str, backend: str = "triton", numerics: str = "w4a16", sizes: Sizes = R1) -> Way:
    return Way(sizes, RoutingInput.TOPK, Backend(backend), Strategy(strategy), Numerics(numerics))


def point(of: Way, tokens: int, microseconds: float | None, floor: float | None = 50.0) -> Point:
    found = Found(microseconds, "cuda_graph", 1, 2e-3, 1.8e-3, 5e-3, floor, 6_400_000_000, 2000, 15_000_000)
    return Point(of, tokens, found, "" if microseconds else "wrong result: relative error 1.0e+00, above 5e-03")


def row(
    times: Mapping[int, tuple[float, float]],
    split_from: int | None,
    *,
    backend: str = "triton",
    fused: str = "expanded",
    numerics: str = "w4a16",
    origin: Origin = H200,
    sizes: Sizes = R1,
) -> PolicyRow:
    return PolicyRow(
        Backend(backend),
        Numerics(numerics),
        **sizes.to_dict(),
        fused=Strategy(fused),
        split_from_tokens=split_from,
        times=tuple(Times(tokens, *pair) for tokens, pair in times.items()),
        origin=origin,
    )
