"""Asks one server: what it is, and for answers, each failure by its own exception."""

from __future__ import annotations

import asyncio
import functools
import itertools
import os
import ssl
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Any

import httpx

from flashinfer_compat import __version__
from flashinfer_compat.ab.answers import Answer, message_of, parse_answer, parse_stream
from flashinfer_compat.ab.facts import PAGES, ServerFacts, facts_from
from flashinfer_compat.ab.failures import (
    ConnectionFailedError,
    CutAnswerError,
    HTTPStatusError,
    MalformedAnswerError,
    ModelNotChosenError,
    RateLimitedError,
    ServerError,
    TimedOutError,
)
from flashinfer_compat.ab.printable import can_be_sent

__all__ = ["Request", "Server"]

_PAUSES = (1.0, 2.0, 4.0, 8.0)
"""Seconds to wait after status 429, where the server does not say how long."""
_ALTERNATIVES = 5
"""How many of the most probable tokens are asked for; what completions take at most."""
_PATIENCE = 10.0
"""Seconds for each page on which a server tells about itself."""


@dataclass(frozen=True)
class Request:
    """How every prompt is asked."""

    chat: bool = False
    stream: bool = False
    max_tokens: int = 64
    timeout: float = 120.0
    """Seconds for one whole answer."""
    concurrency: int = 8

    @property
    def path(self) -> str:
        """The endpoint."""
        return "/v1/chat/completions" if self.chat else "/v1/completions"

    def body(self, model: str, prompt: str, *, logprobs: bool) -> dict[str, Any]:
        """The JSON to post: greedy decoding."""
        content: dict[str, Any] = {"model": model, "max_tokens": self.max_tokens, "temperature": 0}
        if self.chat:
            content["messages"] = [{"role": "user", "content": prompt}]
        else:
            content["prompt"] = prompt
        if logprobs:
            content |= {"logprobs": True, "top_logprobs": _ALTERNATIVES} if self.chat else {"logprobs": _ALTERNATIVES}
        return content | {"stream": True} if self.stream else content


class Server:
    """One server; use it as an asynchronous context manager."""

    def __init__(self, name: str, url: str, request: Request, *, key: str | None = None) -> None:
        self.name = name
        self.url = url
        self.request = request
        self.model = ""
        self.logprobs = True
        """Whether it is asked for log-probabilities."""
        self.refusal: str | None = None
        """What it said when it refused to give them."""
        # A connection for each request: a kept one that the server closes just then would look like a fault.
        self._client = httpx.AsyncClient(
            base_url=url,
            timeout=None,
            verify=_trusted(),
            limits=httpx.Limits(max_keepalive_connections=0),
            headers={"user-agent": f"flashinfer-compat/{__version__}"}
            | ({"authorization": f"Bearer {key}"} if key else {}),
        )

    async def __aenter__(self) -> Server:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._client.aclose()

    @property
    def title(self) -> str:
        """How messages name it."""
        return f"server {self.name} ({self.url})"

    async def facts(self) -> ServerFacts:
        """What it tells about itself.

        Raises:
            ConnectionFailedError: It is not there.
            TimedOutError: It does not answer even /v1/models.
        """
        pages = {"models": await self._page("models")}
        others = [name for name in PAGES if name != "models"]
        found = await asyncio.gather(*map(self._optional_page, others))
        return facts_from(self.url, pages | dict(zip(others, found, strict=True)))

    def choose(self, facts: ServerFacts, model: str | None) -> None:
        """Settle which model is asked.

        Raises:
            ModelNotChosenError: None was named, and it does not list exactly one.
        """
        option = f"--model-{self.name.lower()}"
        if model is None and len(facts.models) != 1:
            listed = ", ".join(facts.models)
            found = f"it lists {len(facts.models)} models: {listed}" if listed else "its /v1/models lists no model"
            raise ModelNotChosenError(self.title, found, f"Name one with {option}.")
        self.model = model or facts.models[0]
        if not can_be_sent(self.model):
            problem = f"the model's name, {self.model!r}, holds a lone surrogate and cannot be sent"
            raise ModelNotChosenError(self.title, problem, f"Name another with {option}.")

    async def probe(self, prompt: str) -> Answer:
        """Answer one prompt, and find out whether log-probabilities may be asked for."""
        try:
            return await self.answer(prompt)
        except HTTPStatusError as error:
            if error.status not in (400, 422):
                raise
            self.logprobs = False
            answer = await self.answer(prompt)
            self.refusal = error.problem
            return answer

    async def answers(self, prompts: Sequence[str], progress: Callable[[int], None]) -> list[Answer | ServerError]:
        """Every prompt's answer or failure, in order; after a failure that gives up the rest is not asked.

        Args:
            prompts: What to ask, `request.concurrency` at a time.
            progress: Called with the number of prompts done.
        """
        slots = asyncio.Semaphore(self.request.concurrency)
        done = itertools.count(1)
        fatal: list[ServerError] = []

        async def ask(prompt: str) -> Answer | ServerError:
            async with slots:
                try:
                    result: Answer | ServerError = fatal[0] if fatal else await self.answer(prompt)
                except ServerError as error:
                    result = error
                    if error.gives_up:
                        fatal.append(error)
                progress(next(done))
                return result

        return await asyncio.gather(*map(ask, prompts))

    async def answer(self, prompt: str) -> Answer:
        """One prompt's answer.

        Raises:
            ServerError: Of the kind of what went wrong.
        """
        body = self.request.body(self.model, prompt, logprobs=self.logprobs)
        waited = 0.0
        for pause in (*_PAUSES, None):
            response = await self._sent("POST", self.request.path, self.request.timeout, json=body)
            if response.status_code != httpx.codes.TOO_MANY_REQUESTS:
                break
            wait = _retry_after(response) if pause is not None else None
            wait = pause if wait is None else wait
            if wait is None or waited + wait > self.request.timeout:
                problem = f"HTTP 429 again after {waited:g} s of waiting, {message_of(response.content)}"
                raise RateLimitedError(self.title, problem, "Lower --concurrency, or raise --timeout.")
            await asyncio.sleep(wait)
            waited += wait
        self._check(response, self.request.path)
        parse = parse_stream if self.request.stream else parse_answer
        return parse(self.title, response.content, chat=self.request.chat)

    def _check(self, response: httpx.Response, path: str) -> None:
        target = response.headers.get("location")
        if response.is_redirect and target:
            problem = f"{path} is redirected to {target!r}, which is not followed"
            raise HTTPStatusError(self.title, response.status_code, problem, "Give the address that answers itself.")
        if response.status_code != httpx.codes.OK:
            way_out = _WAYS_OUT.get(response.status_code, "")
            raise HTTPStatusError(
                self.title, response.status_code, f"{path} says {message_of(response.content)}", way_out
            )

    async def _page(self, name: str) -> Any:
        """The JSON of one of `PAGES`; None where the server does not have it."""
        for path in PAGES[name]:
            response = await self._sent("GET", path, min(_PATIENCE, self.request.timeout))
            if response.status_code in (httpx.codes.NOT_FOUND, httpx.codes.METHOD_NOT_ALLOWED):
                continue
            self._check(response, path)
            try:
                return response.json()
            except ValueError as error:
                raise MalformedAnswerError(self.title, f"{path} is not JSON ({error})") from error
        return None

    async def _optional_page(self, name: str) -> Any:
        try:
            return await self._page(name)
        except ServerError:
            return None

    async def _sent(self, method: str, path: str, limit: float, **content: Any) -> httpx.Response:
        try:
            # httpx limits each read; a server that sends a byte now and then would never end.
            return await asyncio.wait_for(self._client.request(method, path, **content), limit)
        except asyncio.TimeoutError:
            way_out = "Raise --timeout." if limit == self.request.timeout else "Is it still starting?"
            raise TimedOutError(self.title, f"{path} gave no whole answer in {limit:g} s", way_out) from None
        except httpx.RemoteProtocolError as error:
            problem = f"{path}: {error}"
            if "without sending a response" in str(error):
                raise ConnectionFailedError(self.title, problem, _proxies(self.url)) from error
            raise CutAnswerError(self.title, problem) from error
        except httpx.DecodingError as error:
            raise MalformedAnswerError(self.title, f"{path}: {error}") from error
        except (httpx.TransportError, httpx.InvalidURL) as error:
            problem = f"{path}: {str(error) or type(error).__name__}"
            way_out = f"Is it running there? {_proxies(self.url)}".rstrip()
            raise ConnectionFailedError(self.title, problem, way_out) from error


_WAYS_OUT = {
    401: "Name the variable that holds its key with --key-variable.",
    404: "Is the URL the server's root, and the model's name one of /v1/models?",
}


def _proxies(url: str) -> str:
    """Says which variables may have sent the request to a proxy instead; empty where none is set."""
    kinds = (f"{url.partition(':')[0]}_proxy", "all_proxy")
    found = [name for name in os.environ if name.lower() in kinds and os.environ[name]]
    if not found:
        return ""
    are = "is set: it is" if len(found) == 1 else "are set: they are"
    return f"{' and '.join(found)} {are} honoured, except for hosts in NO_PROXY."


@functools.cache
def _trusted() -> ssl.SSLContext:
    # Reading the certificates takes longer than a prompt on a small server.
    return httpx.create_ssl_context()


def _retry_after(response: httpx.Response) -> float | None:
    said = response.headers.get("retry-after", "")
    return float(said) if said.isdigit() else None
