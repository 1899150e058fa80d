"""Reads the answers of /v1/completions and /v1/chat/completions, whole or streamed.

The forms are those of OpenAI's API reference as SGLang 0.5.23, vLLM 0.33 and `transformers serve` write them.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from flashinfer_compat.ab.failures import CutAnswerError, MalformedAnswerError, ReportedError

__all__ = ["Answer", "Token", "message_of", "parse_answer", "parse_stream"]

_LONGEST = 300
"""Characters of a server's own words that are repeated."""

_FAILED = ("abort", "error")
"""Values of finish_reason of an answer that the server gave up."""


@dataclass(frozen=True)
class Token:
    """One generated token."""

    text: str
    logprob: float | None
    """Natural logarithm of its probability; None where the server wrote null, as it does for NaN."""
    alternatives: Mapping[str, float] = field(default_factory=dict)
    """The most probable tokens at this place, with their log-probabilities."""


@dataclass(frozen=True)
class Answer:
    """What a server generated for one prompt."""

    text: str
    """Reasoning, where the server separates it, and content."""
    tokens: tuple[Token, ...] | None
    """None where the server gives no log-probabilities."""
    finish_reason: str | None


def parse_answer(server: str, body: bytes, *, chat: bool) -> Answer:
    """An answer that came as a whole.

    Args:
        server: How messages name the server.
        body: The HTTP body.
        chat: Whether it is of /v1/chat/completions.

    Raises:
        MalformedAnswerError: It is not JSON, or not in the form.
        ReportedError: It says that generation failed.
    """
    return _joined(server, [_choice(server, _json(server, body))], "message" if chat else None)


def parse_stream(server: str, body: bytes, *, chat: bool) -> Answer:
    """An answer that came as server-sent events; `body` is all of them.

    Raises:
        CutAnswerError: Neither `[DONE]` nor a finish_reason came.
        MalformedAnswerError: An event is not JSON, or not in the form; or there is none.
        ReportedError: An event says that generation failed.
    """
    events = list(_events(body))
    if not events:
        raise MalformedAnswerError(server, f"asked for a stream, got no event but {_shown(body)}")
    done = b"[DONE]" in events
    choices = []
    for event in events:
        if event != b"[DONE]":
            content = _json(server, event, last=event is events[-1])
            # The last event may tell the usage only.
            if content.get("choices") != [] or "usage" not in content:
                choices.append(_choice(server, content))
    if not done and not any(one.get("finish_reason") for one in choices):
        raise CutAnswerError(server, f"the stream ended after {len(events)} events, without [DONE] or finish_reason")
    return _joined(server, choices, "delta" if chat else None)


def message_of(body: bytes) -> str:
    """What an error's body says, in one line: its message where it has the usual forms, else its beginning."""
    try:
        content: Any = json.loads(body)
    except ValueError:
        return _shown(body)
    # OpenAI and vLLM nest the error, SGLang does not, FastAPI calls it detail.
    for name in ("error", "message", "detail"):
        if isinstance(content, dict) and content.get(name):
            content = content[name]
    return repr(_line(content if isinstance(content, str) else json.dumps(content)))


def _events(body: bytes) -> Iterator[bytes]:
    # Not str.splitlines: it would also split at U+2028 and others, which may stand unescaped within JSON.
    for block in body.replace(b"\r\n", b"\n").replace(b"\r", b"\n").split(b"\n\n"):
        lines = [line[5:].removeprefix(b" ") for line in block.split(b"\n") if line.startswith(b"data:")]
        if lines:
            yield b"\n".join(lines)


def _json(server: str, body: bytes, *, last: bool = False) -> dict[str, Any]:
    try:
        content = json.loads(body)
    except ValueError as error:
        if last:
            raise CutAnswerError(server, f"the stream ended within an event: {_shown(body)}") from error
        raise MalformedAnswerError(server, f"the answer is not JSON ({error}): {_shown(body)}") from error
    if not isinstance(content, dict):
        raise MalformedAnswerError(server, f"the answer is not a JSON object: {_shown(body)}")
    if content.get("error"):
        raise ReportedError(server, f"status 200, but the answer is the error {message_of(body)}")
    return content


def _choice(server: str, content: Mapping[str, Any]) -> dict[str, Any]:
    choices = content.get("choices")
    if not isinstance(choices, list) or len(choices) != 1 or not isinstance(choices[0], dict):
        raise MalformedAnswerError(server, f"expected one entry in `choices`, got {_line(json.dumps(choices))}")
    choice: dict[str, Any] = choices[0]
    if choice.get("finish_reason") in _FAILED:
        raise ReportedError(server, f"the answer ended with finish_reason {choice['finish_reason']!r}")
    return choice


def _joined(server: str, choices: Sequence[Mapping[str, Any]], part: str | None) -> Answer:
    """One answer from its pieces; a whole one has one piece. `part` is where chat answers keep their text."""
    reasoning: list[str] = []
    content: list[str] = []
    tokens: list[Token] = []
    given = said = False
    for choice in choices:
        texts = choice if part is None else choice.get(part)
        names = ("text",) if part is None else ("content", "reasoning_content", "reasoning")
        if not isinstance(texts, dict) or not (part == "delta" or any(name in texts for name in names)):
            where = "text" if part is None else f"{part}.content"
            raise MalformedAnswerError(server, f"expected `{where}` in the choice, got {_line(json.dumps(choice))}")
        for name in names:
            text = texts.get(name)
            said = said or text is not None
            text = "" if text is None else text
            if not isinstance(text, str):
                raise MalformedAnswerError(server, f"expected text in `{name}`, got {_line(json.dumps(text))}")
            if name != "reasoning" or not texts.get("reasoning_content"):
                (reasoning if name.startswith("reasoning") else content).append(text)
        if choice.get("logprobs"):
            given = True
            tokens.extend(_tokens(server, choice["logprobs"]))
        # An answer that is a call of a tool has no text; a streamed one without text need not say so.
        said = said or part == "delta" or bool(texts.get("tool_calls"))
    if not said:
        where = "text" if part is None else f"{part}.content"
        raise MalformedAnswerError(server, f"`{where}` is null, which is no answer, not even an empty one")
    finish = next((one["finish_reason"] for one in reversed(choices) if one.get("finish_reason")), None)
    return Answer("".join([*reasoning, *content]), tuple(tokens) if given else None, finish)


def _tokens(server: str, logprobs: Any) -> Iterable[Token]:
    try:
        if "content" in logprobs:
            return [
                Token(
                    str(one["token"]),
                    _number(one["logprob"]),
                    {str(top["token"]): value for top, value in _valued(one.get("top_logprobs") or ())},
                )
                for one in logprobs["content"] or ()
            ]
        texts, values = logprobs["tokens"], logprobs["token_logprobs"]
        tops = logprobs.get("top_logprobs") or [None] * len(texts)
        if not len(texts) == len(values) == len(tops):
            raise ValueError(f"{len(texts)} tokens with {len(values)} log-probabilities and {len(tops)} alternatives")
        return [
            Token(
                str(text),
                _number(value),
                {name: number for name, one in (top or {}).items() if (number := _number(one)) is not None},
            )
            for text, value, top in zip(texts, values, tops, strict=True)
        ]
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        problem = f"`logprobs` cannot be read ({type(error).__name__}: {error}): {_line(json.dumps(logprobs))}"
        raise MalformedAnswerError(server, problem) from error


def _valued(tops: Iterable[Mapping[str, Any]]) -> Iterator[tuple[Mapping[str, Any], float]]:
    for top in tops:
        value = _number(top["logprob"])
        if value is not None:
            yield top, value


def _number(value: Any) -> float | None:
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value):
        raise ValueError(f"{value!r} is not a log-probability")
    return float(value)


def _shown(body: bytes) -> str:
    return repr(_line(body.decode("utf-8", "replace"))) if body else "an empty body"


def _line(text: str) -> str:
    line = " ".join(text.split())
    return line if len(line) <= _LONGEST else f"{line[:_LONGEST]}..."
