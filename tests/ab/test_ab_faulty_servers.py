"""The command against servers on the loopback that do what servers should not."""

from __future__ import annotations

import socket
from collections.abc import Callable
from typing import Any

import pytest
from faulty_server import Ask, Behaviour, echo, serving, stream_of, whole
from server_pairs import on, pair

pytest.importorskip("httpx")


def closed_port() -> str:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return f"http://127.0.0.1:{one.getsockname()[1]}"


def rude(ask: Ask) -> None:
    ask.handler.close_connection = True
    ask.handler.connection.shutdown(socket.SHUT_RDWR)


def hangs(ask: Ask) -> None:
    ask.released.wait(20)


def drips(ask: Ask) -> None:
    ask.send(200, b"", length=10_000)
    while not ask.released.wait(0.05):
        ask.handler.wfile.write(b" ")
        ask.handler.wfile.flush()


def cut_body(ask: Ask) -> None:
    body = whole(ask.body, ((" one", -0.5),))
    ask.send(200, body[:20], length=len(body))
    rude(ask)


def says(status: int, body: bytes, **headers: str) -> Behaviour:
    return lambda ask: ask.send(status, body, **headers)


WRONG = {
    "closes": (rude, "ConnectionFailedError", "connection_failed", "without sending a response"),
    "hangs": (hangs, "TimedOutError", "timed_out", "no whole answer in 0.5 s"),
    "drips": (drips, "TimedOutError", "timed_out", "no whole answer in 0.5 s"),
    "fails": (says(500, b'{"error": {"message": "CUDA error"}}'), "HTTPStatusError", "http_error", "'CUDA error'"),
    "html": (says(502, b"<h1>Bad gateway</h1>"), "HTTPStatusError", "http_error", "HTTP 502"),
    "forbids": (says(401, b'{"error": "Unauthorized"}'), "HTTPStatusError", "http_error", "--key-variable"),
    "limits": (
        says(429, b'{"detail": "slow down"}', retry_after="0"),
        "RateLimitedError",
        "rate_limited",
        "'slow down'",
    ),
    "limits long": (says(429, b"", retry_after="60"), "RateLimitedError", "rate_limited", "after 0 s of waiting"),
    "broken": (says(200, b'{"choices": [{"text": '), "MalformedAnswerError", "malformed", "not JSON"),
    "other form": (says(200, b'{"result": "x"}'), "MalformedAnswerError", "malformed", "choices"),
    "encoding": (says(200, b"abc", content_encoding="gzip"), "MalformedAnswerError", "malformed", "incorrect header"),
    "cut": (cut_body, "CutAnswerError", "cut", "peer closed connection"),
    "reports": (says(200, b'{"error": {"message": "aborted"}}'), "ReportedError", "reported", "'aborted'"),
}


GIVES_UP = ("closes", "hangs", "drips", "limits", "limits long")


@pytest.mark.parametrize("name", WRONG)
def test_a_server_that_answers_no_prompt_is_an_error(ab: Callable[..., Any], name: str) -> None:
    behaviour, kind, _, text = WRONG[name]
    with pair(behaviour) as urls:
        code, found = ab(*urls, "--timeout", "0.5")
    assert code == 2
    assert found["error"]["type"] == kind
    assert f"server B ({urls[1]})" in found["error"]["message"]
    assert text in found["error"]["message"]


@pytest.mark.parametrize("name", WRONG)
def test_a_prompt_without_an_answer_is_told_with_the_others(ab: Callable[..., Any], name: str) -> None:
    behaviour, kind, code_name, text = WRONG[name]
    with pair(on(3, behaviour)) as urls:
        code, found = ab(*urls, "--timeout", "0.5", "--concurrency", "1")
    assert code == 2
    assert found["within_tolerance"] is None
    # After what gives the server up the rest is not asked, and so fails the same way.
    failed = [4, 5, 6] if name in GIVES_UP else [4]
    assert [(one["server"], one["run"], one["prompt"]) for one in found["failures"]] == [("B", 1, x) for x in failed]
    for one in found["failures"]:
        assert (one["code"], one["type"]) == (code_name, kind)
        assert text in one["message"]
    assert found["comparison"]["compared"] == found["comparison"]["matched"] == 6 - len(failed)


def test_a_that_gives_up_is_not_asked_again(ab: Callable[..., Any]) -> None:
    with serving(on(3, hangs)) as a, serving(echo) as b:
        code, found = ab(a.url, b.url, "--timeout", "0.3", "--concurrency", "1")
    assert code == 2
    assert len(a.asks) == 1 + 4
    assert {(one["server"], one["run"]) for one in found["failures"]} == {("A", 1)}
    assert found["determinism"] == {
        "deterministic": None,
        "compared": 0,
        "matched": 0,
        "exact_match_rate": None,
        "logprobs_compared": 0,
        "logprobs_one_sided": 0,
        "largest_logprob_gap": None,
    }


def test_a_rate_limit_that_passes_is_waited_for(ab: Callable[..., Any]) -> None:
    def limited(ask: Ask) -> None:
        if ask.time % 3:
            ask.send(429, b"{}", retry_after="0")
        else:
            echo(ask)

    with pair(limited, limited) as urls:
        assert ab(*urls)[0] == 0


@pytest.mark.parametrize("chat", [[], ["--chat"]])
@pytest.mark.parametrize(
    ("end", "kind", "text"),
    [
        (b"", "CutAnswerError", "without [DONE] or finish_reason"),
        (b'data: {"choi', "CutAnswerError", "within an event"),
        (b'data: {"error": {"message": "died"}}\n\n', "ReportedError", "'died'"),
        (b"data: nonsense\n\ndata: [DONE]\n\n", "MalformedAnswerError", "not JSON"),
    ],
)
def test_streams_that_go_wrong(ab: Callable[..., Any], chat: list[str], end: bytes, kind: str, text: str) -> None:
    def broken(ask: Ask) -> None:
        good = stream_of(ask.body, ((" one", -0.5), (" two", -0.5)))
        ask.send(200, b"\n\n".join(good.split(b"\n\n")[:2]) + b"\n\n" + end, content_type="text/event-stream")

    with pair(broken) as urls:
        code, found = ab(*urls, "--stream", *chat)
    assert (code, found["error"]["type"]) == (2, kind)
    assert text in found["error"]["message"]


def test_a_server_that_does_not_stream(ab: Callable[..., Any]) -> None:
    with pair(lambda ask: ask.send(200, whole(ask.body, ((" one", -0.5),)))) as urls:
        code, found = ab(*urls, "--stream")
    assert (code, found["error"]["type"]) == (2, "MalformedAnswerError")
    assert "asked for a stream" in found["error"]["message"]


def test_a_server_that_is_not_there(ab: Callable[..., Any]) -> None:
    nowhere = closed_port()
    with serving(echo) as one:
        for urls, name in (((nowhere, one.url), "A"), ((one.url, nowhere), "B")):
            code, found = ab(*urls)
            assert (code, found["error"]["type"]) == (2, "ConnectionFailedError")
            assert f"server {name} ({nowhere})" in found["error"]["message"]


@pytest.mark.parametrize(
    ("pages", "arguments", "kind", "text"),
    [
        ({}, [], "ModelNotChosenError", "--model-b"),
        ({"/v1/models": {"data": []}}, [], "ModelNotChosenError", "lists no model"),
        ({"/v1/models": {"data": [{"id": "x"}, {"id": "y"}]}}, [], "ModelNotChosenError", "2 models: x, y"),
        ({"/v1/models": lambda ask: ask.send(200, b"<html>")}, [], "MalformedAnswerError", "/v1/models is not JSON"),
        ({"/v1/models": lambda ask: ask.send(503, b'{"error": "loading"}')}, [], "HTTPStatusError", "'loading'"),
        ({"/v1/models": hangs}, ["--timeout", "0.3"], "TimedOutError", "/v1/models"),
    ],
)
def test_models_that_cannot_be_chosen(
    ab: Callable[..., Any], pages: dict[str, Any], arguments: list[str], kind: str, text: str
) -> None:
    with pair(echo, pages=pages) as urls:
        code, found = ab(*urls, *arguments)
    assert (code, found["error"]["type"]) == (2, kind)
    assert text in found["error"]["message"]


def test_a_redirect_names_where_to(ab: Callable[..., Any]) -> None:
    def moved(ask: Ask) -> None:
        ask.send(307, b"", location="http://127.0.0.1:9/v1/completions")

    with pair(moved) as urls:
        code, found = ab(*urls)
    assert (code, found["error"]["type"]) == (2, "HTTPStatusError")
    assert "redirected to 'http://127.0.0.1:9/v1/completions'" in found["error"]["message"]


def test_a_proxy_that_may_be_the_reason_is_told(ab: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> None:
    nowhere = closed_port()
    for name in ("no_proxy", "NO_PROXY", "all_proxy", "ALL_PROXY", "http_proxy", "HTTP_PROXY"):
        monkeypatch.delenv(name, raising=False)
    assert "honoured" not in ab(nowhere, nowhere)[1]["error"]["message"]
    monkeypatch.setenv("HTTP_PROXY", nowhere)
    with serving(echo) as one:
        code, found = ab(one.url, one.url)
    assert (code, found["error"]["type"]) == (2, "ConnectionFailedError")
    assert "HTTP_PROXY is set: it is honoured, except for hosts in NO_PROXY." in found["error"]["message"]


def test_a_model_whose_name_cannot_be_sent(ab: Callable[..., Any]) -> None:
    with pair(echo, pages={"/v1/models": {"data": [{"id": "m\ud800"}]}}) as urls:
        code, found = ab(*urls)
    assert (code, found["error"]["type"]) == (2, "ModelNotChosenError")
    assert "lone surrogate" in found["error"]["message"]
