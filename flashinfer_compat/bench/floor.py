"""The least time that a layer can take on a GPU: its memory's, or its tensor cores'; pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from flashinfer_compat.bench.shapes import Sizes
from flashinfer_compat.errors import ArgumentError

__all__ = ["RATES", "Rates", "floor_microseconds", "rates_of"]


@dataclass(frozen=True)
class Rates:
    """What a GPU reaches."""

    bytes_per_second: float
    flops_per_second: float
    source: str

    def to_dict(self) -> dict[str, Any]:
        """The rates as plain JSON values."""
        return asdict(self)


RATES: Mapping[str, Rates] = {
    "NVIDIA H200": Rates(4.3e12, 790e12, "measured: a copy, and a large bf16 product on random data"),
}
"""By the name that the driver gives a GPU. No rate is guessed: a GPU gets a row when it was measured."""


def rates_of(gpu: str | None, terabytes: float | None, teraflops: float | None) -> Rates | None:
    """The rates to draw a floor from: those given, else the table's; None where neither says.

    Args:
        gpu: its name; None for a CPU.
        terabytes: given bandwidth, 1e12 bytes/s.
        teraflops: given rate of products, 1e12 operations/s.

    Raises:
        ArgumentError: a rate is not positive, or only one is given and the table has no other.
    """
    for name, value in (("--bandwidth", terabytes), ("--flops", teraflops)):
        if value is not None and not 0 < value < float("inf"):
            raise ArgumentError(name, "a positive number", f"{value}")
    known = RATES.get(gpu or "")
    if terabytes is None and teraflops is None:
        return known
    read, computed = (known.bytes_per_second, known.flops_per_second) if known else (None, None)
    read = read if terabytes is None else 1e12 * terabytes
    computed = computed if teraflops is None else 1e12 * teraflops
    if read is None or computed is None:
        missing, given = ("--bandwidth", "--flops") if read is None else ("--flops", "--bandwidth")
        raise ArgumentError(missing, f"a rate beside {given}; none is known of {gpu or 'a CPU'}", "none")
    both = known is None or None not in (terabytes, teraflops)
    return Rates(read, computed, "given" if both else f"one given, one {known and known.source}")


def floor_microseconds(sizes: Sizes, tokens: int, touched: float, rates: Rates) -> float:
    """The larger of reading the touched experts' codes and scales once, and of the products' multiply-adds.

    Args:
        sizes: the layer's.
        tokens: T.
        touched: how many experts some token goes to, shared ones among them; a mean over calls.
        rates: the GPU's.
    """
    read = touched * sizes.expert_bytes / rates.bytes_per_second
    pairs = tokens * (sizes.top_k + sizes.num_shared_experts)
    computed = 2 * sizes.expert_values * pairs / rates.flops_per_second
    return 1e6 * max(read, computed)
