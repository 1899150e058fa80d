"""The command: what it asks two servers, what it finds in their answers, and how it tells it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from faulty_server import MODELS, Ask, Behaviour, echo, serving
from processes import interrupted, started, wait_for
from server_pairs import PROMPTS, on, pair

from flashinfer_compat.cli import main

pytest.importorskip("httpx")

ROOT = Path(__file__).parents[2]


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
