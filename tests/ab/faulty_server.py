"""A small OpenAI-compatible server on the loopback that does what a test tells it to, right or wrong."""

from __future__ import annotations

import contextlib
import json
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

MODELS = {"/v1/models": {"object": "list", "data": [{"id": "tiny", "owned_by": "sglang"}]}}


@dataclass
class Ask:
    """One request for an answer."""

    handler: BaseHTTPRequestHandler
    body: dict[str, Any]
    time: int
    """How often this prompt has been asked, this time included."""
    released: threading.Event
    """Set when the test is over."""

    @property
    def prompt(self) -> str:
        return self.body["prompt"] if "prompt" in self.body else self.body["messages"][-1]["content"]

    def send(self, status: int, body: bytes, *, length: int | None = None, **headers: str) -> None:
        self.handler.send_response(status)
        for name, value in {"content-type": "application/json", **headers}.items():
            self.handler.send_header(name.replace("_", "-"), value)
        self.handler.send_header("content-length", str(len(body) if length is None else length))
        self.handler.end_headers()
        self.handler.wfile.write(body)

    def answer(self, *tokens: tuple[str, float]) -> None:
        """A right answer, in the form that was asked for."""
        self.send(200, stream_of(self.body, tokens) if self.body.get("stream") else whole(self.body, tokens))


Behaviour = Callable[[Ask], None]


@dataclass
class Running:
    """A server that runs."""

    url: str
    asks: list[dict[str, Any]] = field(default_factory=list)
    keys: set[str | None] = field(default_factory=set)
    busiest: int = 0
    """The most requests that were being answered at the same time."""


@contextlib.contextmanager
def serving(behaviour: Behaviour, pages: Mapping[str, Any] = MODELS) -> Iterator[Running]:
    """Serve until the block ends; `pages` are answers to GET, by path without the query."""
    released, lock = threading.Event(), threading.Lock()
    times: Counter[str] = Counter()
    busy = 0

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            page = pages.get(self.path.partition("?")[0])
            ask = Ask(self, {}, 0, released)
            if callable(page):
                page(ask)
            elif page is None:
                ask.send(404, b'{"detail":"Not Found"}')
            else:
                ask.send(200, json.dumps(page).encode())

        def do_POST(self) -> None:
            nonlocal busy
            body = json.loads(self.rfile.read(int(self.headers["content-length"])))
            with lock:
                ask = Ask(self, body, 0, released)
                times[ask.prompt] += 1
                ask.time = times[ask.prompt]
                running.asks.append({**body, "path": self.path})
                running.keys.add(self.headers["authorization"])
                busy += 1
                running.busiest = max(running.busiest, busy)
            with contextlib.suppress(ConnectionError):
                behaviour(ask)
            with lock:
                busy -= 1

        def log_message(self, *_: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    running = Running(f"http://127.0.0.1:{server.server_address[1]}")
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
    thread.start()
    try:
        yield running
    finally:
        released.set()
        server.shutdown()
        thread.join()
        server.server_close()


def whole(asked: Mapping[str, Any], tokens: tuple[tuple[str, float], ...]) -> bytes:
    text = "".join(token for token, _ in tokens)
    choice = {"index": 0, "finish_reason": "length", "logprobs": logprobs(asked, tokens)}
    choice |= {"message": {"role": "assistant", "content": text}} if "messages" in asked else {"text": text}
    return json.dumps({"choices": [choice]}).encode()


def stream_of(asked: Mapping[str, Any], tokens: tuple[tuple[str, float], ...]) -> bytes:
    """As servers send it: a first event with the role, one for each token, one with the reason, and the usage."""
    chat = "messages" in asked
    events: list[Any] = [{"choices": [{"index": 0, "delta": {"role": "assistant"}}]}] if chat else []
    for token in tokens:
        piece = {"delta": {"content": token[0]}} if chat else {"text": token[0]}
        events.append({"choices": [{"index": 0, **piece, "logprobs": logprobs(asked, (token,))}]})
    last = {"delta": {}} if chat else {"text": ""}
    events += [{"choices": [{"index": 0, **last, "finish_reason": "length"}]}, {"choices": [], "usage": {}}]
    lines = [json.dumps(one, ensure_ascii=False).encode() for one in events]
    return b"".join(b"data: " + line + b"\n\n" for line in [*lines, b"[DONE]"])


def logprobs(asked: Mapping[str, Any], tokens: tuple[tuple[str, float], ...]) -> Any:
    if not asked.get("logprobs"):
        return None
    if "messages" in asked:
        return {"content": [{"token": token, "logprob": value, "top_logprobs": []} for token, value in tokens]}
    return {
        "tokens": [token for token, _ in tokens],
        "token_logprobs": [value for _, value in tokens],
        "top_logprobs": [{token: value, " other": value - 0.25} for token, value in tokens],
    }


def echo(ask: Ask) -> None:
    """The prompt's words, each with the log-probability -0.5."""
    ask.answer(*((f" {word}", -0.5) for word in ask.prompt.split()))
