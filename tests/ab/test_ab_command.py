"""The command against servers on the loopback that do what servers should not."""

from __future__ import annotations

import contextlib
import json
import os
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from faulty_server import MODELS, Ask, Behaviour, echo, serving, stream_of, whole
from processes import interrupted, started, wait_for

import flashinfer_compat as fc
from flashinfer_compat.cli import main

pytest.importorskip("httpx")

ROOT = Path(__file__).parents[2]
VALIDATOR = jsonschema.Draft202012Validator(
    json.loads((Path(fc.__file__).parent / "schemas" / "ab-1.json").read_text("utf-8"))
)
PROMPTS = [f"one two three {number}" for number in range(6)]


@pytest.fixture
def prompts(tmp_path: Path) -> str:
    path = tmp_path / "prompts.txt"
    path.write_text("\n".join(PROMPTS))
    return str(path)


@pytest.fixture
def ab(prompts: str, capsys: pytest.CaptureFixture[str]) -> Callable[..., tuple[int, Any]]:
    """Runs the command with --json; returns its exit code and what it printed."""

    def run(*arguments: str) -> tuple[int, Any]:
        code = main(["ab", *arguments, "--prompts", prompts, "--json"])
        content = json.loads(capsys.readouterr().out)
        if "error" not in content:
            VALIDATOR.validate(content)
            assert content["exit_code"] == code
        return code, content

    return run


@contextlib.contextmanager
def pair(b: Behaviour, a: Behaviour = echo, pages: Mapping[str, Any] = MODELS) -> Iterator[tuple[str, str]]:
    with serving(a) as first, serving(b, pages) as second:
        yield first.url, second.url


def on(prompt: int, behaviour: Behaviour) -> Behaviour:
    """`behaviour` for one prompt, right answers for the others."""
    return lambda ask: behaviour(ask) if ask.prompt == PROMPTS[prompt] else echo(ask)


def closed_port() -> str:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return f"http://127.0.0.1:{one.getsockname()[1]}"


@pytest.mark.parametrize("stream", [[], ["--stream"]])
@pytest.mark.parametrize("chat", [[], ["--chat"]])
def test_servers_that_agree(ab: Callable[..., Any], chat: list[str], stream: list[str]) -> None:
    with serving(echo) as a, serving(echo) as b:
        code, found = ab(a.url, f"{b.url}/v1/", "--max-tokens", "9", "--logprob-tolerance", "0", *chat, *stream)
    assert code == 0
    assert found["comparison"]["exact_match_rate"] == found["determinism"]["exact_match_rate"] == 1
    assert found["comparison"]["logprobs_compared"] == 4 * len(PROMPTS)
    assert found["comparison"]["largest_logprob_gap"]["size"] == 0
    assert found["settings"]["endpoint"] == ("/v1/chat/completions" if chat else "/v1/completions")
    # One prompt more than the runs: the first is asked alone, to see whether the server can be used.
    assert (len(a.asks), len(b.asks)) == (2 * len(PROMPTS) + 1, len(PROMPTS) + 1)
    for ask in (*a.asks, *b.asks):
        assert (ask["temperature"], ask["max_tokens"], ask["model"]) == (0, 9, "tiny")
        assert ask.get("stream", False) is bool(stream)
        assert ask["path"] == found["settings"]["endpoint"]


def test_prompts_are_asked_at_the_same_time(ab: Callable[..., Any]) -> None:
    def slow(ask: Ask) -> None:
        ask.released.wait(0.1)
        echo(ask)

    for number in (1, 3):
        with serving(slow) as a, serving(echo) as b:
            assert ab(a.url, b.url, "--concurrency", str(number))[0] == 0
        assert a.busiest == number


def test_another_text_is_found_where_it_begins(ab: Callable[..., Any]) -> None:
    def other(ask: Ask) -> None:
        ask.answer((" one", -0.5), (" two", -0.75), (" other", -0.5))

    with pair(on(2, other)) as urls:
        code, found = ab(*urls)
        assert code == 1
        assert ab(*urls, "--tolerance", "0.8")[0] == 0
        assert ab(*urls, "--tolerance", "0.8", "--logprob-tolerance", "0.2")[0] == 1
    (differing,) = [one for one in found["prompts"] if not one["matches"]]
    assert differing["number"] == 3
    assert differing["divergence"] == {
        "unit": "token",
        "position": 2,
        "before": " one two ",
        "first": "three 2",
        "second": "other",
        "first_margin": 0.25,
        "second_margin": None,
    }
    assert found["comparison"]["largest_logprob_gap"] == {"size": 0.25, "prompt": 3, "position": 1, "token": " two"}
    assert differing["answers"] == {"a": " one two three 2", "a_again": " one two three 2", "b": " one two other"}


def test_a_server_that_does_not_repeat_itself_is_named(ab: Callable[..., Any]) -> None:
    def moody(ask: Ask) -> None:
        # The first prompt is asked once more, before the runs.
        ask.answer((f"answer {ask.time % 2}", -0.5))

    def steady(ask: Ask) -> None:
        ask.answer(("answer 1", -0.5))

    with pair(a=on(4, moody), b=on(4, steady)) as urls:
        code, found = ab(*urls)
    assert code == 0
    assert found["determinism"]["deterministic"] is False
    assert found["determinism"]["exact_match_rate"] == found["tolerance"]["least_rate"] == 5 / 6
    assert found["prompts"][4]["repeated"] is False
    assert found["prompts"][4]["self_divergence"]["unit"] == "token"
    assert "Server A is not deterministic against itself" in found["notes"][0]
    with pair(a=steady, b=moody) as urls:
        assert ab(*urls)[0] == 1


def no_logprobs(ask: Ask) -> None:
    ask.body.pop("logprobs", None)
    echo(ask)


def refuses_logprobs(ask: Ask) -> None:
    if "logprobs" in ask.body:
        ask.send(400, b'{"error": {"message": "logprobs are not supported"}}')
    else:
        echo(ask)


@pytest.mark.parametrize(("behaviour", "text"), [(no_logprobs, ""), (refuses_logprobs, "logprobs are not supported")])
def test_missing_log_probabilities(ab: Callable[..., Any], behaviour: Behaviour, text: str) -> None:
    with pair(behaviour) as urls:
        code, found = ab(*urls)
        assert code == 0
        assert (found["servers"]["a"]["logprobs"], found["servers"]["b"]["logprobs"]) == (True, False)
        assert found["comparison"]["largest_logprob_gap"] is None
        (note,) = found["notes"]
        assert "Server B gives no log-probabilities" in note
        assert text in note
        code, found = ab(*urls, "--logprob-tolerance", "0.1")
    assert (code, found["error"]["type"]) == (2, "LogprobsMissingError")


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


def test_a_name_of_a_model_does_not_steer_the_terminal(prompts: str, capsys: pytest.CaptureFixture[str]) -> None:
    name = "m\x1b[31mred"
    with serving(echo, {"/v1/models": {"data": [{"id": name}]}}) as a, serving(echo) as b:
        assert main(["ab", a.url, b.url, "--prompts", prompts]) == 0
        assert {ask["model"] for ask in a.asks} == {name}
    shown = capsys.readouterr().out
    assert "\x1b" not in shown
    assert shown.count("m\\x1b[31mred") == 2
    with serving(echo, {"/v1/models": {"data": [{"id": name}, {"id": "y"}]}}) as a, serving(echo) as b:
        assert main(["ab", a.url, b.url, "--prompts", prompts]) == 2
    assert "m\\x1b[31mred, y" in capsys.readouterr().err


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


def test_named_models_need_no_list(ab: Callable[..., Any]) -> None:
    with serving(echo, {}) as a, serving(echo, {"/v1/models": {"data": [{"id": "x"}, {"id": "y"}]}}) as b:
        code, found = ab(a.url, b.url, "--model-a", "first", "--model-b", "y")
    assert code == 0
    assert {ask["model"] for ask in a.asks} == {"first"}
    assert {ask["model"] for ask in b.asks} == {"y"}
    assert "The models have different names: first and y." in found["notes"]


def test_what_servers_say_about_themselves(ab: Callable[..., Any]) -> None:
    info = {"version": "0.5.23", "moe_runner_backend": "flashinfer_trtllm", "api_key": "secret"}
    old = {**MODELS, "/get_server_info": {**info, "disable_shared_experts_fusion": True}}
    new = {
        **MODELS,
        "/server_info": {**info, "disable_shared_experts_fusion": False},
        "/model_info": {"model_path": "/models/r1"},
        "/version": lambda ask: ask.send(500, b"oops"),
    }
    with serving(echo, old) as a, serving(echo, new) as b:
        code, found = ab(a.url, b.url)
    assert code == 0
    first, second = found["servers"]["a"], found["servers"]["b"]
    assert (first["engine"], first["version"]) == (second["engine"], second["version"]) == ("sglang", "0.5.23")
    assert first["flags"] == {"disable_shared_experts_fusion": True, "moe_runner_backend": "flashinfer_trtllm"}
    assert second["flags"]["disable_shared_experts_fusion"] is False
    assert second["model_path"] == "/models/r1"
    assert "secret" not in json.dumps(found)


def test_the_key_is_sent_and_not_told(ab: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("THE_KEY", "sesame")
    with serving(echo) as a, serving(echo) as b:
        code, found = ab(a.url, b.url, "--key-variable", "THE_KEY")
    assert code == 0
    assert a.keys == b.keys == {"Bearer sesame"}
    assert "sesame" not in json.dumps(found)


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["127.0.0.1:30000", "http://b"], "URL_A"),
        (["http://a", "ftp://b"], "URL_B"),
        (["http://a", "http://b:99999"], "URL_B"),
        (["http://user:word@a", "http://b"], "URL_A"),
        (["http://a", "http://b", "--timeout", "0"], "--timeout"),
        (["http://a", "http://b", "--timeout", "nan"], "--timeout"),
        (["http://a", "http://b", "--concurrency", "0"], "--concurrency"),
        (["http://a", "http://b", "--max-tokens", "-1"], "--max-tokens"),
        (["http://a", "http://b", "--tolerance", "99"], "--tolerance"),
        (["http://a", "http://b", "--logprob-tolerance", "-1"], "--logprob-tolerance"),
        (["http://a", "http://b", "--key-variable", "NOT_SET_ANYWHERE"], "--key-variable"),
    ],
)
def test_arguments_without_sense(ab: Callable[..., Any], arguments: list[str], text: str) -> None:
    code, found = ab(*arguments)
    assert code == 2
    assert found["error"]["message"].startswith(text)


def test_as_people_run_it(prompts: str) -> None:
    def other(ask: Ask) -> None:
        ask.answer((" one", -0.5), (" zwei", -0.75))

    with pair(on(2, other)) as urls:
        command = [sys.executable, "-m", "flashinfer_compat", "ab", *urls, "--prompts", prompts]
        done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=ROOT)
    assert done.returncode == 1
    first, *_ = done.stdout.splitlines()
    assert first.startswith("Not within tolerance: 5 of 6 (83.3%) of B's answers are A's")
    assert "prompt 3: token 1, after ' one ': 'two three 2' and 'zwei'" in done.stdout
    assert all(len(line) <= 80 or " " not in line.strip() for line in done.stdout.splitlines())
    # Not a terminal: a line for each run, and no other.
    assert done.stderr.splitlines() == [f"server {run}: 6 prompts asked" for run in ("A", "A again", "B")]


def test_a_terminal_sees_a_count(prompts: str) -> None:
    pty = pytest.importorskip("pty")
    reader, writer = pty.openpty()
    with pair(echo) as urls:
        command = [sys.executable, "-m", "flashinfer_compat", "ab", *urls, "--prompts", prompts, "--json"]
        done = subprocess.run(command, stdout=subprocess.PIPE, stderr=writer, check=False, cwd=ROOT)
    os.close(writer)
    seen = os.read(reader, 10_000).decode()
    os.close(reader)
    assert done.returncode == json.loads(done.stdout)["exit_code"] == 0
    assert "\rserver A again: 3 of 6 " in seen


def test_without_httpx_it_says_what_to_install(tmp_path: Path) -> None:
    (tmp_path / "httpx.py").write_text("raise ImportError('httpx is not installed')\n")
    environ = {**os.environ, "PYTHONPATH": f"{tmp_path}{os.pathsep}{ROOT}"}
    command = [sys.executable, "-m", "flashinfer_compat", "ab", "http://127.0.0.1:1", "http://127.0.0.1:1"]
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=ROOT, env=environ)
    assert done.returncode == 2
    assert "pip install httpx" in done.stderr


def test_an_interrupt_is_one_line() -> None:
    with serving(lambda ask: ask.released.wait()) as a, serving(echo) as b, started("ab", a.url, b.url) as process:
        wait_for(lambda: bool(a.asks))
        assert interrupted(process) == (130, "interrupted\n")
