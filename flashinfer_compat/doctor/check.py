"""What a check is: a function over facts, declared with the code, the group and the reason of what it finds."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from flashinfer_compat.doctor.facts import Facts
from flashinfer_compat.doctor.finding import Finding, Group, Severity

__all__ = ["Check", "Checks", "Found"]


@dataclass(frozen=True)
class Found:
    """What a check function yields: the part of a finding that differs from machine to machine."""

    severity: Severity
    message: str
    repair: str = ""
    advice: str = ""
    subject: str = ""


Look = Callable[[Facts], Iterator[Found]]


@dataclass(frozen=True)
class Check:
    """One check."""

    code: str
    group: Group
    why: str
    look: Look

    def findings(self, facts: Facts) -> Iterator[Finding]:
        """What it finds."""
        for one in self.look(facts):
            yield Finding(
                self.code, self.group, one.severity, one.subject, one.message, self.why, one.repair, one.advice
            )


class Checks(list[Check]):
    """The checks of one group. `@CHECKS.add(code, why)` above a function declares one."""

    def __init__(self, group: Group) -> None:
        super().__init__()
        self.group = group

    def add(self, code: str, why: str) -> Callable[[Look], Look]:
        """Declare the decorated function as the check for `code`; `why` says in one sentence why it matters."""

        def declare(look: Look) -> Look:
            self.append(Check(code, self.group, why, look))
            return look

        return declare
