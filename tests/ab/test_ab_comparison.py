"""Two answers, compared. Strings are small, so that hypothesis meets equal beginnings often."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flashinfer_compat.ab.answers import Answer, Token
from flashinfer_compat.ab.comparison import compare, compare_runs

LOGPROBS = st.floats(-20, 0)
TOKENS = st.builds(Token, st.sampled_from(["a", "b", "ab", " "]), st.none() | LOGPROBS)
SEQUENCES = st.lists(TOKENS, max_size=6).map(tuple)


def answer(tokens: tuple[Token, ...] | None, text: str | None = None) -> Answer:
    return Answer("".join(one.text for one in tokens or ()) if text is None else text, tokens, "length")


ANSWERS = SEQUENCES.map(answer) | st.builds(answer, st.none(), st.text("ab ", max_size=8))


@given(ANSWERS)
def test_an_answer_matches_itself(one: Answer) -> None:
    found = compare(one, one)
    assert found.matches
    assert found.gap is None or found.gap.size == 0
    assert found.tokens == sum(token.logprob is not None for token in one.tokens or ())


@given(ANSWERS, ANSWERS)
def test_which_one_is_first_does_not_matter(one: Answer, other: Answer) -> None:
    found, turned = compare(one, other), compare(other, one)
    assert found.matches == turned.matches == (one.text == other.text)
    assert found.tokens == turned.tokens
    assert (found.gap and found.gap.size) == (turned.gap and turned.gap.size)
    if found.divergence and turned.divergence:
        assert found.divergence.position == turned.divergence.position
        assert (found.divergence.first, found.divergence.second) == (
            turned.divergence.second,
            turned.divergence.first,
        )


@given(st.text("ab", max_size=60), st.text("ab", max_size=60), st.text("ab", max_size=60))
def test_the_first_character_that_differs(common: str, one: str, other: str) -> None:
    # Digits make the place where they part certain.
    found = compare(answer(None, f"{common}1{one}"), answer(None, f"{common}2{other}")).divergence
    assert found is not None
    assert (found.unit, found.position) == ("character", len(common))
    assert found.before == common[-40:]
    assert (found.first, found.second) == (f"1{one}"[:40], f"2{other}"[:40])


@given(SEQUENCES, SEQUENCES, SEQUENCES, LOGPROBS, LOGPROBS)
def test_the_first_token_that_differs(
    common: tuple[Token, ...], one: tuple[Token, ...], other: tuple[Token, ...], mine: float, theirs: float
) -> None:
    first = answer((*common, Token("x", mine, {"x": mine, "y": mine - 0.5}), *one))
    second = answer((*common, Token("y", theirs, {"y": theirs, "z": theirs - 1}), *other))
    found = compare(first, second)
    assert found.divergence is not None
    assert (found.divergence.unit, found.divergence.position) == ("token", len(common))
    assert found.divergence.first_margin == pytest.approx(0.5)
    assert found.divergence.second_margin is None
    # Beyond the divergence the texts differ, and so do log-probabilities.
    assert found.tokens == sum(token.logprob is not None for token in common)


@given(st.lists(st.tuples(LOGPROBS, LOGPROBS), min_size=1, max_size=8))
def test_the_largest_gap(pairs: list[tuple[float, float]]) -> None:
    one, other = (answer(tuple(Token("a", pair[side]) for pair in pairs)) for side in (0, 1))
    found = compare(one, other)
    gaps = [abs(mine - theirs) for mine, theirs in pairs]
    assert found.gap is not None
    assert found.gap.size == max(gaps)
    assert gaps[found.gap.position] == max(gaps)
    assert found.tokens == len(pairs)


def test_an_answer_that_ends_earlier() -> None:
    long = answer((Token("a", -1.0), Token("b", -2.0)))
    found = compare(long, answer((Token("a", -1.5),)))
    assert found.divergence is not None
    assert (found.divergence.unit, found.divergence.position) == ("token", 1)
    assert (found.divergence.first, found.divergence.second) == ("b", "")
    assert found.divergence.first_margin is None
    assert found.gap is not None
    assert found.gap.size == 0.5


def test_one_server_without_tokens_is_compared_by_characters() -> None:
    found = compare(answer((Token("ab", -1.0), Token("c", -1.0))), answer(None, "abd"))
    assert found.divergence is not None
    assert (found.divergence.unit, found.divergence.position) == ("character", 2)
    assert (found.tokens, found.gap) == (0, None)


def test_same_tokens_with_other_texts_differ_by_characters() -> None:
    one = answer((Token("a", -1.0),))
    found = compare(one, replace(one, text="b"))
    assert found.divergence is not None
    assert (found.divergence.unit, found.divergence.position) == ("character", 0)
    assert found.tokens == 1


def test_runs() -> None:
    same, gap = answer((Token("a", -1.0),)), answer((Token("a", -3.0),))
    other = answer((Token("b", -1.0),))
    found = compare_runs([same, same, None, same], [same, gap, same, other])
    assert (found.compared, found.matched, found.rate) == (3, 2, 2 / 3)
    assert found.largest is not None
    assert (found.largest[0], found.largest[1].size) == (1, 2.0)
    nothing = compare_runs([None], [same])
    assert (nothing.compared, nothing.rate, nothing.largest) == (0, None, None)
