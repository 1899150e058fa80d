"""What the check found, and the judgement; pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any
from urllib.parse import urlsplit

from flashinfer_compat import __version__
from flashinfer_compat.ab.answers import Answer
from flashinfer_compat.ab.comparison import Comparison, Gap, PromptComparison, compare_runs
from flashinfer_compat.ab.facts import ServerFacts, fusion_is_off
from flashinfer_compat.ab.failures import ServerError
from flashinfer_compat.ab.printable import counted, printable

__all__ = ["SCHEMA_VERSION", "Failure", "Outcome", "Report", "Side", "Tolerance"]

SCHEMA_VERSION = 1
"""Raised when a field changes its meaning or goes; schemas/ab-1.json describes this one."""

Outcome = Answer | ServerError | None
"""What came of a prompt; None where it was not asked."""

_REPEATS_ITSELF = 0.5
"""Least self-match rate of an A by which B is judged, unless a rate was given."""

_ROUNDING = 1e-9
"""Rates are quotients; one that equals the least rate in exact numbers is enough."""


@dataclass(frozen=True)
class Tolerance:
    """What is still good enough."""

    rate: float | None = None
    """Least exact-match rate, 0 to 1, against a server A that repeats itself. None: 1, and nothing is judged by an A
    that does not."""
    logprob: float | None = None
    """Largest log-probability gap; None: not judged."""

    @property
    def least(self) -> float:
        """The rate, also where none was given."""
        return 1.0 if self.rate is None else self.rate


@dataclass(frozen=True)
class Side:
    """One server, and what it answered."""

    facts: ServerFacts
    model: str
    refusal: str | None
    """What it said when it refused to give log-probabilities."""
    runs: tuple[tuple[Outcome, ...], ...]
    """Of server A two, of server B one; each in the order of the prompts."""

    @property
    def gives_logprobs(self) -> bool:
        """Whether any answer has them."""
        return any(isinstance(one, Answer) and one.tokens for run in self.runs for one in run)

    @property
    def null_logprobs(self) -> int:
        """Tokens without a log-probability, in answers that have them."""
        answers = [one for run in self.runs for one in run if isinstance(one, Answer)]
        return sum(token.logprob is None for one in answers for token in one.tokens or ())

    def answers(self, run: int) -> list[Answer | None]:
        """One run's answers; None where there is none."""
        return [one if isinstance(one, Answer) else None for one in self.runs[run]]


@dataclass(frozen=True)
class Failure:
    """One prompt that a server did not answer."""

    server: str
    """`A` or `B`."""
    run: int
    """1, or 2 where A is asked again."""
    prompt: int
    """From 1."""
    error: ServerError

    def to_dict(self) -> dict[str, Any]:
        """The failure as plain JSON values."""
        return {"server": self.server, "run": self.run, "prompt": self.prompt, **self.error.to_dict()}


@dataclass(frozen=True)
class Report:
    """The whole check."""

    settings: dict[str, Any]
    """How the prompts were asked, as plain JSON values."""
    prompts: tuple[str, ...]
    a: Side
    b: Side
    tolerance: Tolerance

    @cached_property
    def repetition(self) -> Comparison:
        """A's two runs against each other."""
        return compare_runs(self.a.answers(0), self.a.answers(1))

    @cached_property
    def comparison(self) -> Comparison:
        """B against A: against A's second answer where B gave exactly that one, else against the first."""
        first, again = (compare_runs(self.a.answers(run), self.b.answers(0)) for run in (0, 1))
        pairs = zip(first.prompts, again.prompts, strict=True)
        return Comparison(tuple(_nearer(one, other) for one, other in pairs))

    @property
    def deterministic(self) -> bool | None:
        """Whether A answered every prompt twice with the same text; None where nothing could be compared."""
        return None if self.repetition.rate is None else self.repetition.rate == 1

    @property
    def least_rate(self) -> float:
        """B need not agree with A more than A agrees with itself: the tolerance times A's self-match rate."""
        return self.tolerance.least * (1.0 if self.repetition.rate is None else self.repetition.rate)

    @property
    def largest_gap_allowed(self) -> float | None:
        """The tolerance, or A's gap to itself where that is larger."""
        if self.tolerance.logprob is None:
            return None
        own = self.repetition.largest
        return max(self.tolerance.logprob, own[1].size if own else 0.0)

    @property
    def failures(self) -> tuple[Failure, ...]:
        """Every prompt without an answer."""
        return tuple(
            Failure(name, run, number, one)
            for name, side in (("A", self.a), ("B", self.b))
            for run, outcomes in enumerate(side.runs, 1)
            for number, one in enumerate(outcomes, 1)
            if isinstance(one, ServerError)
        )

    @property
    def within(self) -> bool | None:
        """Whether B is within tolerance; None where it is not judged."""
        rate = self.comparison.rate
        if self.failures or rate is None or not self._a_repeats_itself:
            return None
        if rate < self.least_rate - _ROUNDING:
            return False
        allowed, largest = self.largest_gap_allowed, self.comparison.largest
        if allowed is None:
            return True
        # A kernel that computes NaN gives no number where the other gives one.
        if self.comparison.one_sided:
            return False
        return None if largest is None else largest[1].size <= allowed

    @property
    def _a_repeats_itself(self) -> bool:
        own = self.repetition.rate
        return self.tolerance.rate is not None or own is None or own >= _REPEATS_ITSELF

    @property
    def exit_code(self) -> int:
        """0 within tolerance, 1 not, 2 when it was not judged."""
        return {True: 0, False: 1, None: 2}[self.within]

    @property
    def summary(self) -> str:
        """The judgement in a sentence."""
        compared = self.comparison
        rate = "nothing could be compared" if compared.rate is None else f"{_share(compared)} of B's answers are A's"
        if self.within is None:
            return f"Not judged: {self._why_not_judged}; {rate}."
        verdict = "Within tolerance" if self.within else "Not within tolerance"
        gap = ""
        if compared.largest is not None:
            allowed = self.largest_gap_allowed
            limit = "" if allowed is None else f", at most {allowed:.3g} allowed"
            gap = f"; the largest log-probability gap is {compared.largest[1].size:.3g}{limit}"
        if self.tolerance.logprob is not None and compared.one_sided:
            gap += f"; for {counted(compared.one_sided, 'token')} only one of the servers gave a log-probability"
        return f"{verdict}: {rate}, at least {self.least_rate:.1%} needed{gap}."

    @property
    def _why_not_judged(self) -> str:
        if missing := Counter(one.server for one in self.failures):
            return " and ".join(f"server {name} left {count} without an answer" for name, count in missing.items())
        if not self._a_repeats_itself:
            return (
                f"A does not repeat itself, {_share(self.repetition)} of its answers came again"
                " (--tolerance judges B all the same)"
            )
        return "no log-probability could be compared, as --logprob-tolerance asks"

    @property
    def notes(self) -> tuple[str, ...]:
        """What to know about the numbers."""
        return tuple(_notes(self))

    def to_dict(self) -> dict[str, Any]:
        """The report as plain JSON values, as schemas/ab-1.json describes them."""
        return {
            "schema_version": SCHEMA_VERSION,
            "flashinfer_compat": __version__,
            "summary": self.summary,
            "exit_code": self.exit_code,
            "within_tolerance": self.within,
            "settings": self.settings,
            "servers": {
                name: {**side.facts.to_dict(), "model": side.model, "logprobs": side.gives_logprobs}
                for name, side in (("a", self.a), ("b", self.b))
            },
            "determinism": {"deterministic": self.deterministic, **_numbers(self.repetition)},
            "comparison": _numbers(self.comparison),
            "tolerance": {
                "rate": self.tolerance.least,
                "least_rate": self.least_rate,
                "logprob": self.tolerance.logprob,
                "largest_gap_allowed": self.largest_gap_allowed,
            },
            "failures": [one.to_dict() for one in self.failures],
            "notes": list(self.notes),
            "prompts": [self._prompt(number) for number in range(len(self.prompts))],
        }

    def _prompt(self, number: int) -> dict[str, Any]:
        repeated, compared = self.repetition.prompts[number], self.comparison.prompts[number]
        runs = {"a": self.a.answers(0), "a_again": self.a.answers(1), "b": self.b.answers(0)}
        texts = {name: run[number] for name, run in runs.items()}
        return {
            "number": number + 1,
            "prompt": self.prompts[number],
            "repeated": None if repeated is None else repeated.matches,
            "self_divergence": repeated.divergence.to_dict() if repeated and repeated.divergence else None,
            "matches": None if compared is None else compared.matches,
            "divergence": compared.divergence.to_dict() if compared and compared.divergence else None,
            "logprob_gap": compared.gap.size if compared and compared.gap else None,
            "answers": {name: None if one is None else one.text for name, one in texts.items()},
        }


def _nearer(first: PromptComparison | None, again: PromptComparison | None) -> PromptComparison | None:
    return again if again and again.matches and first and not first.matches else first


def _notes(report: Report) -> list[str]:
    notes = []
    if report.deterministic is False:
        own = f"Server A is not deterministic against itself: it repeated {_share(report.repetition)} of its answers."
        judged = (
            " B is judged against that: the least rate is the tolerance times A's self-match rate, and B may give"
            " either of A's two answers."
        )
        notes.append(own + ("" if report.within is None else judged))
    sides: Sequence[tuple[str, Side]] = (("A", report.a), ("B", report.b))
    for name, side in sides:
        if not side.gives_logprobs:
            why = f": {side.refusal}" if side.refusal else ""
            notes.append(f"Server {name} gives no log-probabilities{why}. Only texts are compared.")
        if nulls := side.null_logprobs:
            told = f"{nulls} log-probabilit{'y' if nulls == 1 else 'ies'}"
            notes.append(f"Server {name} wrote null for {told}, as SGLang and vLLM do for NaN.")
    off = {fusion_is_off(side.facts) for _, side in sides}
    if off in ({True}, {False}):
        notes.append(f"Both servers say that shared-expert fusion is {'off' if off == {True} else 'not disabled'}.")
    if report.a.model != report.b.model:
        names = f"{printable(report.a.model)} and {printable(report.b.model)}"
        notes.append(f"The models have different names: {names}.")
    pairs = zip(report.a.answers(0), report.b.answers(0), strict=True)
    empty = sum(one is not None and other is not None and one.text == other.text == "" for one, other in pairs)
    if empty:
        have = "has" if empty == 1 else "have"
        notes.append(f"{counted(empty, 'prompt')} {have} an empty answer from both, which says little.")
    if _address(report.a.facts.url) == _address(report.b.facts.url):
        notes.append("A and B are the same address: one server was compared with itself.")
    return notes


def _address(url: str) -> tuple[str, str | None, int | None, str]:
    """What two spellings of one address have in common."""
    parts = urlsplit(url)
    # The scheme and the host's name come in lower case.
    return parts.scheme, parts.hostname, parts.port or _PORTS.get(parts.scheme), parts.path.rstrip("/")


_PORTS = {"http": 80, "https": 443}


def _share(comparison: Comparison) -> str:
    return f"{comparison.matched} of {comparison.compared} ({comparison.rate or 0:.1%})"


def _numbers(comparison: Comparison) -> dict[str, Any]:
    largest = comparison.largest
    return {
        "compared": comparison.compared,
        "matched": comparison.matched,
        "exact_match_rate": comparison.rate,
        "logprobs_compared": comparison.tokens,
        "logprobs_one_sided": comparison.one_sided,
        "largest_logprob_gap": None if largest is None else _gap(*largest),
    }


def _gap(number: int, gap: Gap) -> dict[str, Any]:
    return {"size": gap.size, "prompt": number + 1, "position": gap.position, "token": gap.token}
