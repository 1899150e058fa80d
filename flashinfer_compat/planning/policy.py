"""What a measured policy says about a fused alternative that would be chosen."""

from __future__ import annotations

from dataclasses import dataclass

from flashinfer_compat.features.target import Target
from flashinfer_compat.policy import PolicyRow
from flashinfer_compat.problem import Problem
from flashinfer_compat.reasons import Reason, ReasonCode
from flashinfer_compat.vocabulary import Backend, Numerics, Strategy

__all__ = ["NO_ADVICE", "SWITCHING", "Advice", "advice"]

SWITCHING = frozenset({Backend.TRITON})
"""Backends whose weights lie the same for both ways, so that each call can take the faster."""


@dataclass(frozen=True)
class Advice:
    """What follows for the plan."""

    against_fused: Reason | None = None
    """Why split is taken altogether; None: the fused strategy stays."""
    split_from_tokens: int | None = None
    """For `Plan.split_from_tokens`."""
    notes: tuple[str, ...] = ()
    """For `Plan.notes`."""


NO_ADVICE = Advice()
"""Nothing was measured, or fused is faster."""

_ROUNDING = (
    "Where input scales differ between experts, fused and split round activations differently in w4a4: fused with one "
    "common scale, split with each expert's own where the kernel can."
)


def advice(problem: Problem, target: Target, strategy: Strategy, backend: Backend) -> Advice:
    """What was measured of `strategy`, a fused one, against split on the same backend; split must be able to run."""
    rows = (one for one in target.policy if one.speaks_of(problem, strategy, backend, target.architecture))
    row = next(rows, None)
    if row is None or row.at_switch is None:
        return NO_ADVICE
    times = row.at_switch
    rounding = (_ROUNDING,) if problem.numerics is Numerics.W4A4 else ()
    measured = f"{_measured(row)}; at {times.tokens} it takes {times.split:.0f} us, {strategy.value} {times.fused:.0f}"
    if row.split_always and (times.tokens == 1 or backend not in SWITCHING):
        reason = Reason(ReasonCode.POLICY, f"{measured}.", f"To run it all the same, ask with {_asking(strategy)}.")
        return Advice(reason, notes=(f"{measured}. Split is taken.", *rounding))
    if backend in SWITCHING:
        note = f"{measured}. Calls of at least {times.tokens} tokens run split."
        return Advice(split_from_tokens=times.tokens, notes=(note, *rounding))
    note = f"{measured}. The {backend.value} backend lays weights out for one strategy; {_asking(Strategy.SPLIT)}"
    return Advice(notes=(f"{note} gives split.",))


def _measured(row: PolicyRow) -> str:
    return f"Measured on {row.origin}: split is preferred from {row.split_from_tokens} tokens on"


def _asking(strategy: Strategy) -> str:
    return f"strategy={strategy.value!r}"
