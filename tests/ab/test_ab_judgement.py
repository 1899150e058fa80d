"""When B is within tolerance. Texts stand for answers; None is a prompt that failed."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import jsonschema
import pytest
from hypothesis import given
from hypothesis import strategies as st

import flashinfer_compat as fc
from flashinfer_compat.ab.answers import Answer, Token
from flashinfer_compat.ab.facts import ServerFacts
from flashinfer_compat.ab.failures import MalformedAnswerError
from flashinfer_compat.ab.report import Outcome, Report, Side, Tolerance

VALIDATOR = jsonschema.Draft202012Validator(
    json.loads((Path(fc.__file__).parent / "schemas" / "ab-1.json").read_text("utf-8"))
)
SETTINGS = {
    "endpoint": "/v1/completions",
    "stream": False,
    "temperature": 0,
    "max_tokens": 4,
    "concurrency": 1,
    "timeout": 1.0,
}
RUN = st.lists(st.sampled_from(["a", "b", "", None]), min_size=4, max_size=4)


def outcome(text: str | None, tokens: tuple[float | None] | None) -> Outcome:
    if text is None:
        return MalformedAnswerError("server", "the answer is not JSON")
    return Answer(text, tokens and (Token(text, tokens[0]),), "length")


def report(
    once: list[str | None],
    again: list[str | None],
    other: list[str | None],
    tolerance: Tolerance | None = None,
    logprobs: tuple[float | None, float | None, float | None] | None = None,
    flags: tuple[bool | None, bool | None] = (None, None),
    urls: tuple[str, str] = ("http://x", "http://y"),
) -> Report:
    runs = [
        tuple(outcome(text, logprobs and (logprobs[number],)) for text in run)
        for number, run in enumerate((once, again, other))
    ]
    facts = [
        ServerFacts(url, flags={} if off is None else {"disable_shared_experts_fusion": off})
        for url, off in zip(urls, flags, strict=True)
    ]
    return Report(
        {**SETTINGS, "prompts": len(once)},
        tuple(f"prompt {number}" for number in range(len(once))),
        Side(facts[0], "m", None, (runs[0], runs[1])),
        Side(facts[1], "m", None, (runs[2],)),
        tolerance or Tolerance(),
    )


@given(RUN, RUN, RUN, st.floats(0, 1), st.none() | st.floats(0, 5), st.none() | st.tuples(*[st.floats(-9, 0)] * 3))
def test_every_report_follows_the_schema_and_the_rule(
    once: list[str | None],
    again: list[str | None],
    other: list[str | None],
    rate: float,
    gap: float | None,
    logprobs: tuple[float, float, float] | None,
) -> None:
    found = report(once, again, other, Tolerance(rate, gap), logprobs)
    content = found.to_dict()
    VALIDATOR.validate(json.loads(json.dumps(content, allow_nan=False)))
    answered = None not in (*once, *again, *other)
    # The first token is the whole text: where no text is the same, there is no pair of log-probabilities.
    unjudged = found.comparison.tokens == 0 and gap is not None and found.exit_code == 2
    assert (found.exit_code == 2) == (not answered or unjudged)
    if answered:
        repeated = sum(one == two for one, two in zip(once, again, strict=True)) / len(once)
        matched = sum(b in pair for *pair, b in zip(once, again, other, strict=True)) / len(once)
        assert content["determinism"]["exact_match_rate"] == repeated
        assert content["comparison"]["exact_match_rate"] == matched
        if gap is None:
            assert found.within == (matched >= rate * repeated - 1e-9)
    assert found.summary.startswith({0: "Within", 1: "Not within", 2: "Not judged"}[found.exit_code])


SAME = ["a", "b", "a", "b"]


@pytest.mark.parametrize(
    ("other", "rate", "code"),
    [(SAME, 1.0, 0), (["a", "b", "a", "x"], 1.0, 1), (["a", "b", "a", "x"], 0.75, 0), (["x"] * 4, 0.0, 0)],
)
def test_a_deterministic_a(other: list[str | None], rate: float, code: int) -> None:
    found = report(SAME, SAME, other, Tolerance(rate))
    assert found.exit_code == code
    assert found.deterministic
    assert not any("deterministic" in note for note in found.notes)


@pytest.mark.parametrize(
    ("other", "code"),
    [
        (["a", "b", "a", "x"], 0),  # no worse than A itself
        (["a", "b", "a", "c"], 0),  # A's second answer
        (["a", "b", "x", "x"], 1),
        (["a", "b", "x", "c"], 0),
    ],
)
def test_b_is_judged_by_how_well_a_repeats_itself(other: list[str | None], code: int) -> None:
    found = report(SAME, ["a", "b", "a", "c"], other)
    assert found.least_rate == 0.75
    assert found.exit_code == code
    assert found.deterministic is False
    assert "not deterministic against itself: it repeated 3 of 4 (75.0%)" in found.notes[0]


def test_a_rate_that_equals_the_least_one_is_enough() -> None:
    # 0.9 * 0.9 is a little more than 0.81 in floating point.
    once = [str(number) for number in range(100)]
    again = [*once[:90], *["x"] * 10]
    other = [*once[:81], *["y"] * 19]
    assert report(once, again, other, Tolerance(0.9)).exit_code == 0
    assert report(once, again, [*once[:80], *["y"] * 20], Tolerance(0.9)).exit_code == 1


@pytest.mark.parametrize(
    ("logprobs", "code", "allowed"),
    [((-1.0, -1.0, -1.25), 0, 0.25), ((-1.0, -1.0, -1.5), 1, 0.25), ((-1.0, -1.5, -1.5), 0, 0.5)],
)
def test_log_probabilities_are_judged_by_a_too(logprobs: tuple[float, float, float], code: int, allowed: float) -> None:
    found = report(SAME, SAME, SAME, Tolerance(1.0, 0.25), logprobs)
    assert found.exit_code == code
    assert found.largest_gap_allowed == allowed


@pytest.mark.parametrize(
    ("logprobs", "tolerance", "code", "text"),
    [
        ((-1.0, -1.0, None), None, 0, "Within"),
        ((-1.0, -1.0, None), 0.5, 1, "for 4 tokens only one of the servers gave a log-probability"),
        ((None, None, -1.0), 0.5, 1, "for 4 tokens only one of the servers gave a log-probability"),
        ((None, None, None), 0.5, 2, "no log-probability could be compared"),
        ((None, None, None), None, 0, "Within"),
    ],
)
def test_null_log_probabilities_are_not_within_a_tolerance(
    logprobs: tuple[float | None, float | None, float | None], tolerance: float | None, code: int, text: str
) -> None:
    found = report(SAME, SAME, SAME, Tolerance(logprob=tolerance), logprobs)
    assert found.exit_code == code
    assert text in found.summary
    assert found.to_dict()["comparison"]["logprobs_one_sided"] == (4 if set(logprobs) == {None, -1.0} else 0)


def test_answers_without_tokens_among_others_are_not_within_a_tolerance() -> None:
    found = report(SAME, SAME, SAME, Tolerance(logprob=0.5), (-1.0, -1.0, -1.0))
    (run,) = found.b.runs
    run = (*run[:3], Answer("b", None, "length"))
    found = dataclasses.replace(found, b=dataclasses.replace(found.b, runs=(run,)))
    assert found.exit_code == 1
    assert "for 1 token only one of the servers" in found.summary


def test_texts_that_differ_are_told_before_log_probabilities() -> None:
    found = report(SAME, SAME, ["x"] * 4, Tolerance(logprob=0.5), (-1.0, -1.0, -1.0))
    assert (found.exit_code, found.comparison.tokens) == (1, 0)
    assert report(SAME, SAME, ["x"] * 4, Tolerance(0.0, 0.5), (-1.0, -1.0, -1.0)).exit_code == 2


@pytest.mark.parametrize(
    ("again", "rate", "code"),
    [
        (["x", "x", "x", "x"], None, 2),
        (["a", "x", "x", "x"], None, 2),
        (["a", "b", "x", "x"], None, 0),
        (["x", "x", "x", "x"], 1.0, 0),
    ],
)
def test_an_a_that_does_not_repeat_itself_judges_nothing_unless_told_to(
    again: list[str | None], rate: float | None, code: int
) -> None:
    found = report(SAME, again, SAME, Tolerance(rate))
    assert found.exit_code == code
    assert ("Not judged: A does not repeat itself" in found.summary) == (code == 2)
    assert found.to_dict()["tolerance"]["rate"] == 1


@pytest.mark.parametrize(
    ("other", "same"),
    [("http://x:80/", True), ("http://X", True), ("http://x:81", False), ("https://x", False), ("http://x/b", False)],
)
def test_two_spellings_of_one_address_are_told(other: str, same: bool) -> None:
    notes = report(SAME, SAME, SAME, urls=("http://x", other)).notes
    assert any("the same address" in note for note in notes) == same


def test_a_missing_answer_is_not_judged() -> None:
    found = report(SAME, SAME, ["a", None, "a", None])
    assert (found.exit_code, found.within) == (2, None)
    assert "server B left 2 without an answer" in found.summary
    assert [(one.server, one.run, one.prompt, one.error.code) for one in found.failures] == [
        ("B", 1, 2, "malformed"),
        ("B", 1, 4, "malformed"),
    ]


@pytest.mark.parametrize(
    ("flags", "text"),
    [((True, True), "is off"), ((False, False), "is not disabled"), ((True, False), None), ((None, True), None)],
)
def test_two_servers_with_the_same_fusion_are_told(flags: tuple[bool | None, bool | None], text: str | None) -> None:
    told = [note for note in report(SAME, SAME, SAME, flags=flags).notes if "fusion" in note]
    assert bool(told) == (text is not None)
    assert text is None or text in told[0]


def test_empty_answers_are_told() -> None:
    assert any(note.startswith("2 prompts have an empty answer") for note in report(*[["", "", "a", "b"]] * 3).notes)
    assert any(note.startswith("1 prompt has an empty") for note in report(*[["", "c", "a", "b"]] * 3).notes)


def test_what_may_be_nan_is_told() -> None:
    nan: Outcome = Answer("ab", (Token("a", None), Token("b", -1.0)), "length")
    found = report(SAME, SAME, SAME, logprobs=(-1.0, -1.0, -1.0))
    found = dataclasses.replace(found, b=dataclasses.replace(found.b, runs=((nan,) * 4,)))
    assert "Server B wrote null for 4 log-probabilities" in "".join(found.notes)
