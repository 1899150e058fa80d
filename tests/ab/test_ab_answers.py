"""Answers as servers write them. The forms are copied from SGLang 0.5.23's, vLLM's and transformers' sources."""

from __future__ import annotations

import contextlib
import json
from typing import Any

import pytest
from faulty_server import stream_of, whole
from hypothesis import given
from hypothesis import strategies as st

from flashinfer_compat.ab.answers import Answer, Token, message_of, parse_answer, parse_stream
from flashinfer_compat.ab.failures import CutAnswerError, MalformedAnswerError, ReportedError

# With what str.splitlines splits at and JSON may hold unescaped, and what SSE gives a meaning.
TEXTS = st.text(st.sampled_from("ab \u2028\u2029\x85\n\r:é🙂") | st.characters(codec="utf-8"), max_size=8)
PIECES = st.lists(st.tuples(TEXTS, st.floats(-20, 0)), max_size=5).map(tuple)


@given(PIECES, st.booleans(), st.booleans())
def test_a_streamed_answer_is_the_whole_one(pieces: Any, chat: bool, with_logprobs: bool) -> None:
    asked = {"messages" if chat else "prompt": [], "logprobs": with_logprobs}
    streamed = parse_stream("A", stream_of(asked, pieces), chat=chat)
    once = parse_answer("A", whole(asked, pieces), chat=chat)
    assert streamed.text == once.text == "".join(text for text, _ in pieces)
    assert (streamed.tokens or ()) == (once.tokens or ())
    assert streamed.finish_reason == once.finish_reason == "length"
    assert [one.logprob for one in once.tokens or ()] == ([value for _, value in pieces] if with_logprobs else [])


@given(st.binary(max_size=60), st.booleans())
def test_no_body_crashes_the_readers(body: bytes, chat: bool) -> None:
    for parse in (parse_answer, parse_stream):
        with pytest.raises((MalformedAnswerError, CutAnswerError, ReportedError)):
            parse("A", body, chat=chat)
    assert "\n" not in message_of(body)


JSON = st.recursive(
    st.none() | st.booleans() | st.floats() | st.text(max_size=3),
    lambda inner: (
        st.lists(inner, max_size=2)
        | st.dictionaries(
            st.sampled_from(
                ["text", "message", "delta", "content", "logprobs", "tokens", "token_logprobs", "top_logprobs", "token"]
                + ["logprob", "finish_reason", "error", "reasoning"]
            ),
            inner,
            max_size=4,
        )
    ),
    max_leaves=12,
)


@given(JSON, st.booleans())
def test_no_json_crashes_the_readers(choice: Any, chat: bool) -> None:
    body = json.dumps({"choices": [choice]}).encode()
    stream = b"data: " + body + b"\n\ndata: [DONE]\n\n"
    with contextlib.suppress(MalformedAnswerError, ReportedError):
        assert isinstance(parse_answer("A", body, chat=chat), Answer)
    with contextlib.suppress(MalformedAnswerError, ReportedError):
        assert isinstance(parse_stream("A", stream, chat=chat), Answer)


def test_reasoning_is_part_of_the_text() -> None:
    for names in (["reasoning_content"], ["reasoning"], ["reasoning_content", "reasoning"]):
        message = {"content": "4", **dict.fromkeys(names, "2+2=")}
        body = json.dumps({"choices": [{"message": message, "finish_reason": "stop"}]}).encode()
        assert parse_answer("A", body, chat=True).text == "2+2=4"
    message = {"content": None, "reasoning": "2+2="}
    body = json.dumps({"choices": [{"message": message, "finish_reason": "length"}]}).encode()
    assert parse_answer("A", body, chat=True).text == "2+2="


def test_null_is_no_answer() -> None:
    with pytest.raises(MalformedAnswerError, match="`text` is null"):
        parse_answer("A", b'{"choices":[{"text":null,"finish_reason":"stop"}]}', chat=False)
    with pytest.raises(MalformedAnswerError, match="`text` is null"):
        parse_stream("A", event({"choices": [{"text": None, "finish_reason": "stop"}]}), chat=False)
    for calls, empty in ((None, False), ([], False), ([{"function": {"name": "f"}}], True)):
        message = {"role": "assistant", "content": None, "tool_calls": calls}
        body = json.dumps({"choices": [{"message": message, "finish_reason": "stop"}]}).encode()
        if empty:
            assert parse_answer("A", body, chat=True) == Answer("", None, "stop")
        else:
            with pytest.raises(MalformedAnswerError, match=r"`message.content` is null"):
                parse_answer("A", body, chat=True)


def test_logprobs_of_both_endpoints() -> None:
    chat = {"content": [{"token": "a", "logprob": -0.5, "top_logprobs": [{"token": "b", "logprob": -1.0}]}]}
    body = json.dumps({"choices": [{"message": {"content": "a"}, "logprobs": chat}]}).encode()
    assert parse_answer("A", body, chat=True).tokens == (Token("a", -0.5, {"b": -1.0}),)
    # null is what SGLang and vLLM write for NaN, and where they have no alternatives.
    old = {"tokens": ["a", "b"], "token_logprobs": [-0.5, None], "top_logprobs": [{"b": -1.0}, None]}
    body = json.dumps({"choices": [{"text": "ab", "logprobs": old}]}).encode()
    assert parse_answer("A", body, chat=False).tokens == (Token("a", -0.5, {"b": -1.0}), Token("b", None))


def event(content: Any) -> bytes:
    return b"data: " + (content if isinstance(content, bytes) else json.dumps(content).encode()) + b"\n\n"


PIECE = {"choices": [{"text": "a"}]}


@pytest.mark.parametrize(
    ("body", "text"),
    [
        (b'{"choices": [{"text": "a"', "not JSON"),
        (b"", "an empty body"),
        (b"<html>gateway</html>", "<html>gateway</html>"),
        (b"[]", "not a JSON object"),
        (b"{}", "one entry in `choices`, got null"),
        (b'{"choices": []}', "one entry in `choices`, got []"),
        (b'{"choices": [{"text": "a"}, {"text": "b"}]}', "one entry in `choices`"),
        (b'{"choices": [{"message": {"content": "a"}}]}', "expected `text`"),
        (b'{"choices": [{"text": 7}]}', "expected text in `text`, got 7"),
        (b'{"choices": [{"text": "a", "logprobs": {"tokens": ["a"]}}]}', "token_logprobs"),
        (b'{"choices": [{"text": "a", "logprobs": {"tokens": ["a"], "token_logprobs": []}}]}', "1 tokens with 0"),
        (b'{"choices": [{"text": "a", "logprobs": {"tokens": ["a"], "token_logprobs": [NaN]}}]}', "nan"),
        (b'{"choices": [{"text": "a", "logprobs": {"tokens": ["a"], "token_logprobs": ["-1"]}}]}', "'-1'"),
    ],
)
def test_a_malformed_answer_says_what_is_wrong(body: bytes, text: str) -> None:
    with pytest.raises(MalformedAnswerError) as caught:
        parse_answer("server A", body, chat=False)
    assert str(caught.value).startswith("server A: ")
    assert text in str(caught.value)
    assert len(str(caught.value)) < 800


@pytest.mark.parametrize(
    ("body", "kind", "text"),
    [
        (event(PIECE) * 3, CutAnswerError, "after 3 events"),
        (event(PIECE) + b'data: {"choices": [{"te', CutAnswerError, "within an event"),
        (event(b"{broken") + event(PIECE), MalformedAnswerError, "not JSON"),
        (b'{"choices": [{"text": "a"}]}', MalformedAnswerError, "asked for a stream"),
        (event(PIECE) + event({"error": {"message": "out of memory", "code": 500}}), ReportedError, "out of memory"),
        (event(PIECE) + event({"error": "CUDA error"}), ReportedError, "CUDA error"),
        (event({"choices": [{"text": "a", "finish_reason": "abort"}]}), ReportedError, "'abort'"),
    ],
)
def test_a_stream_that_goes_wrong(body: bytes, kind: type[Exception], text: str) -> None:
    with pytest.raises(kind, match=text):
        parse_stream("A", body, chat=False)


def test_a_stream_without_done_is_whole_with_a_finish_reason() -> None:
    # transformers ends so.
    body = event(PIECE) + event({"choices": [{"text": "b", "finish_reason": "stop"}]})
    assert parse_stream("A", body, chat=False) == Answer("ab", None, "stop")
    comments = b": ping\r\n\r\n" + body.replace(b"\n", b"\r\n") + b"data: [DONE]\r\n\r\n"
    assert parse_stream("A", comments, chat=False) == Answer("ab", None, "stop")


@pytest.mark.parametrize(
    ("body", "said"),
    [
        (b'{"error": {"message": "no such model", "code": 404}}', "'no such model'"),  # OpenAI, vLLM
        (b'{"object": "error", "message": "too long", "code": 400}', "'too long'"),  # SGLang
        (b'{"detail": "Not Found"}', "'Not Found'"),  # FastAPI
        (b'{"error": "busy"}', "'busy'"),
        (b'{"other": 1}', "'{\"other\": 1}'"),
        (b"Bad\n gateway", "'Bad gateway'"),
        (b"", "an empty body"),
    ],
)
def test_the_message_of_an_error(body: bytes, said: str) -> None:
    assert message_of(body) == said
