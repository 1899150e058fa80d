"""Rank agreement: all ranks of a server must have come to the same decision before any of them loads weights.

Ranks that lay out or route one layer differently compute wrong numbers or wait for each other for ever, without an
error. What they depend on is exchanged while nothing is loaded yet, and the first difference is named.
"""

from __future__ import annotations

import re
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from flashinfer_compat import machine
from flashinfer_compat.errors import ArgumentError, FlashInferCompatError
from flashinfer_compat.features.target import Target
from flashinfer_compat.planning.decision import Plan
from flashinfer_compat.verified import fingerprint

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

__all__ = ["Difference", "RankDisagreementError", "facts_of", "require_agreement", "require_same"]

TIMEOUT = timedelta(minutes=5)
"""How long a rank waits for the others; they reach this point of loading within seconds of each other."""
_ABSENT = "nothing"


@dataclass(frozen=True)
class Difference:
    """One fact of one rank that is not what most ranks have."""

    rank: int
    """In the whole world, not in the group."""
    fact: str
    """Such as `flashinfer.version` or `call.top_k`."""
    value: str
    most: str
    """What most ranks have; among equals, what the lowest rank has."""

    def __str__(self) -> str:
        return f"rank {self.rank} has {self.fact} = {self.value}, most ranks {self.most}"


class RankDisagreementError(FlashInferCompatError):
    """The ranks of a group would run a layer differently, or some of them did not answer."""

    def __init__(self, message: str, differences: tuple[Difference, ...] = ()) -> None:
        self.differences = differences
        super().__init__(message)


def facts_of(plan: Plan, target: Target | None = None) -> dict[str, str]:
    """What a plan depends on and what it decides, in words, by name.

    Evidence and notes are left out: a self-check that ran on one host only changes no number.

    Args:
        plan: of one layer.
        target: what it was made for; this machine unless given.
    """
    target = target or machine.this_machine()
    found = plan.to_dict()
    flashinfer = target.flashinfer
    return _flat(
        {
            "flashinfer": flashinfer
            and {"version": flashinfer.version, "behaviour": str(flashinfer.behaviour or "unknown")},
            "architecture": target.architecture,
            "strategy": found["strategy"],
            "split_from_tokens": found["split_from_tokens"],
            "backend": found["backend"],
            "call": found["call"],
            "dense": plan.dense and plan.dense.backend,
            "problem": found["problem"],
        }
    )


def require_agreement(
    plan: Plan, group: ProcessGroup | None = None, *, target: Target | None = None, timeout: timedelta = TIMEOUT
) -> None:
    """Do nothing if all ranks of `group` hold an equal plan, made from equal facts; call it before loading weights.

    It is a collective call: every rank of the group must make it. Without torch.distributed it does nothing.

    Args:
        plan: this rank's.
        group: the ranks that run the layer together; None is all. On a gloo group a rank that does not answer is named.
        target: what the plan was made for; this machine unless given.
        timeout: how long to wait for the others on a gloo group; other backends wait as long as their group does.

    Raises:
        RankDisagreementError: on every rank, naming each rank that differs and the facts it differs in; or some rank
            did not answer in time.
        ArgumentError: this rank is not in the group.
    """
    if not isinstance(plan, Plan):
        raise ArgumentError("plan", "what plan returned", type(plan).__name__)
    if _distributed() is not None:
        require_same(facts_of(plan, target), group, timeout=timeout)


def require_same(facts: Mapping[str, str], group: ProcessGroup | None = None, *, timeout: timedelta = TIMEOUT) -> None:
    """Do nothing if all ranks of `group` hold equal facts; `require_agreement` says the rest."""
    distributed = _distributed()
    if distributed is None:
        return
    world = distributed.get_world_size(group)
    if world < 1:
        raise ArgumentError("group", "a group that this rank is in", "one without it")
    ranks = distributed.get_process_group_ranks(group or distributed.group.WORLD)
    if distributed.get_backend(group) == "gloo":
        try:
            distributed.monitored_barrier(group, timeout, wait_all_ranks=True)
        except RuntimeError as error:
            raise RankDisagreementError(_absence(str(error), ranks, distributed.get_rank(), timeout)) from error
    gathered: list[Any] = [None] * world
    distributed.all_gather_object(gathered, dict(facts), group)
    differences = _differences(dict(zip(ranks, gathered, strict=True)))
    if differences:
        listed = "\n".join(f"  {one}" for one in differences)
        raise RankDisagreementError(
            f"The ranks would not run the layer alike:\n{listed}\n"
            "Install the same packages on every host, and set the same environment variables.",
            differences,
        )


def _absence(said: str, ranks: Sequence[int], own: int, timeout: timedelta) -> str:
    """What is known of a barrier that failed: only the group's first rank waits for each of the others.

    Args:
        said: monitored_barrier's text, such as `[Rank 0]: Ranks 1, 3 failed to pass monitoredBarrier in 3000 ms`.
        ranks: the group's, by their number in the whole world.
        own: this rank.
        timeout: how long it waited.
    """
    if own != ranks[0]:
        which = f"rank {ranks[0]}'s log names it."
    elif named := _FAILED.search(said):
        absent = [ranks[int(one)] for one in re.findall(r"\d+", named[1])]
        which = f"rank{'s'[: len(absent) > 1]} {', '.join(map(str, absent))} did not."
    else:
        which = f"which is not known.\nPyTorch says: {said}"
    return (
        f"Not every rank compared its plan within {timeout}: {which}\n"
        "Start every rank, with the same packages and the same environment variables."
    )


_FAILED = re.compile(r"Ranks? ([\d, ]+) failed to pass")


def _differences(facts_by_rank: Mapping[int, Mapping[str, str]]) -> tuple[Difference, ...]:
    prints = {rank: fingerprint(dict(facts)) for rank, facts in facts_by_rank.items()}
    # Of equally common ones, Counter names the first that it met.
    common = Counter(prints.values()).most_common(1)[0][0]
    model = next(facts for rank, facts in facts_by_rank.items() if prints[rank] == common)
    return tuple(one for rank, facts in facts_by_rank.items() for one in _differences_of(rank, facts, model))


def _differences_of(rank: int, facts: Mapping[str, str], most: Mapping[str, str]) -> list[Difference]:
    """Of the facts that both have, where one of those differs; a rank without a plan has none of the plan's."""
    in_both = [Difference(rank, one, facts[one], most[one]) for one in most if facts.get(one, most[one]) != most[one]]
    return in_both or [
        Difference(rank, one, facts.get(one, _ABSENT), most.get(one, _ABSENT))
        for one in dict.fromkeys((*most, *facts))
        if (one in most) != (one in facts)
    ]


def _flat(values: Mapping[str, Any], prefix: str = "") -> dict[str, str]:
    """Nested values as text, by dotted name."""
    flat: dict[str, str] = {}
    for name, value in values.items():
        if isinstance(value, Mapping):
            flat.update(_flat(value, f"{prefix}{name}."))
        else:
            flat[prefix + name] = _ABSENT if value is None else str(value)
    return flat


def _distributed() -> Any:
    """torch.distributed where this process is one of several ranks; None elsewhere."""
    if "torch" not in sys.modules:
        return None
    import torch.distributed as distributed

    return distributed if distributed.is_available() and distributed.is_initialized() else None
