"""Compares two answers, and two runs of answers; pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from flashinfer_compat.ab.answers import Answer, Token

__all__ = ["Comparison", "Divergence", "Gap", "PromptComparison", "compare", "compare_runs"]

_CONTEXT = 40
"""Characters shown before a divergence, and of each answer after it."""


@dataclass(frozen=True)
class Divergence:
    """Where two answers first differ."""

    unit: str
    """`token` where both servers gave their tokens and those differ, else `character`."""
    position: int
    """From 0, in that unit."""
    before: str
    """The end of what they have in common."""
    first: str
    """How the first answer goes on; empty where it ends."""
    second: str
    first_margin: float | None
    """By how much the first server held its own token more probable than the other's, as a difference of
    log-probabilities; near 0 is a near tie, which rounding decides. None where it did not tell."""
    second_margin: float | None

    def to_dict(self) -> dict[str, Any]:
        """The divergence as plain JSON values."""
        return {
            "unit": self.unit,
            "position": self.position,
            "before": self.before,
            "first": self.first,
            "second": self.second,
            "first_margin": self.first_margin,
            "second_margin": self.second_margin,
        }


@dataclass(frozen=True)
class Gap:
    """The largest difference between the log-probabilities of one token."""

    size: float
    """abs(first - second), in natural logarithms."""
    position: int
    """In tokens, from 0."""
    token: str


@dataclass(frozen=True)
class PromptComparison:
    """Two answers to one prompt."""

    divergence: Divergence | None
    """None where the texts are the same."""
    tokens: int
    """How many tokens both gave a log-probability for, up to the divergence."""
    one_sided: int
    """How many tokens only one of the two gave a log-probability for, up to the divergence."""
    gap: Gap | None
    """Over the former tokens; None without any. Beyond the divergence the servers see different text."""

    @property
    def matches(self) -> bool:
        """Whether the texts are the same, character for character."""
        return self.divergence is None


@dataclass(frozen=True)
class Comparison:
    """Two runs over the same prompts."""

    prompts: tuple[PromptComparison | None, ...]
    """None where one of the two has no answer."""

    @property
    def compared(self) -> int:
        """Prompts that both answered."""
        return sum(one is not None for one in self.prompts)

    @property
    def matched(self) -> int:
        """Prompts that both answered with the same text."""
        return sum(one is not None and one.matches for one in self.prompts)

    @property
    def rate(self) -> float | None:
        """The quotient of the two; None where nothing was compared."""
        return self.matched / self.compared if self.compared else None

    @property
    def largest(self) -> tuple[int, Gap] | None:
        """The prompt with the largest gap, and that gap."""
        found = [(number, one.gap) for number, one in enumerate(self.prompts) if one is not None and one.gap]
        return max(found, key=lambda pair: pair[1].size, default=None)

    @property
    def tokens(self) -> int:
        """Tokens that both gave a log-probability for."""
        return sum(one.tokens for one in self.prompts if one is not None)

    @property
    def one_sided(self) -> int:
        """Tokens that only one of the two gave a log-probability for."""
        return sum(one.one_sided for one in self.prompts if one is not None)


def compare_runs(first: Sequence[Answer | None], second: Sequence[Answer | None]) -> Comparison:
    """Compare answer by answer; None is a prompt without an answer."""
    pairs = zip(first, second, strict=True)
    return Comparison(tuple(compare(one, other) if one and other else None for one, other in pairs))


def compare(first: Answer, second: Answer) -> PromptComparison:
    """Where two answers first differ, and how far their log-probabilities are apart until then."""
    mine, theirs = first.tokens or (), second.tokens or ()
    common = _common([one.text for one in mine], [one.text for one in theirs])
    return PromptComparison(
        _divergence(first, second, common),
        sum(one.logprob is not None and other.logprob is not None for one, other in _until(mine, theirs, common)),
        _one_sided(first, second, common),
        _gap(mine, theirs, common),
    )


def _divergence(first: Answer, second: Answer, common: int) -> Divergence | None:
    if first.text == second.text:
        return None
    at = _common(first.text, second.text)
    before = first.text[max(0, at - _CONTEXT) : at]
    onward = first.text[at : at + _CONTEXT], second.text[at : at + _CONTEXT]
    mine, theirs = first.tokens, second.tokens
    if mine is None or theirs is None or common == len(mine) == len(theirs):
        return Divergence("character", at, before, *onward, None, None)
    margins: list[float | None] = [None, None]
    if common < len(mine) and common < len(theirs):
        margins = [_margin(mine[common], theirs[common]), _margin(theirs[common], mine[common])]
    return Divergence("token", common, before, *onward, *margins)


def _one_sided(first: Answer, second: Answer, common: int) -> int:
    mine, theirs = first.tokens or (), second.tokens or ()
    # The same text, and one of the two without any token: it left them out.
    if first.text == second.text != "" and not (mine and theirs):
        return sum(one.logprob is not None for one in mine or theirs)
    return sum((one.logprob is None) != (other.logprob is None) for one, other in _until(mine, theirs, common))


def _margin(own: Token, other: Token) -> float | None:
    held = own.alternatives.get(other.text)
    return None if held is None or own.logprob is None else own.logprob - held


def _gap(mine: Sequence[Token], theirs: Sequence[Token], common: int) -> Gap | None:
    gaps = [
        Gap(abs(one.logprob - other.logprob), position, one.text)
        for position, (one, other) in enumerate(_until(mine, theirs, common))
        if one.logprob is not None and other.logprob is not None
    ]
    return max(gaps, key=lambda gap: gap.size, default=None)


def _until(mine: Sequence[Token], theirs: Sequence[Token], common: int) -> list[tuple[Token, Token]]:
    return list(zip(mine[:common], theirs[:common], strict=True))


def _common(first: Sequence[str], second: Sequence[str]) -> int:
    """Length of the common beginning."""
    for number, (one, other) in enumerate(zip(first, second)):  # noqa: B905
        if one != other:
            return number
    return min(len(first), len(second))
