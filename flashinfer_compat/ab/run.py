"""Runs the check: asks A, A again, and B."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from flashinfer_compat.ab.answers import Answer
from flashinfer_compat.ab.client import Request, Server
from flashinfer_compat.ab.failures import LogprobsMissingError, ServerError
from flashinfer_compat.ab.report import Outcome, Report, Side, Tolerance

__all__ = ["Progress", "Target", "check"]

Progress = Callable[[str, int, int], None]
"""Called with what is asked, how many prompts are done, and of how many."""


@dataclass(frozen=True)
class Target:
    """A server to ask."""

    url: str
    """Its root, without /v1."""
    model: str | None = None
    """None: the only one that it lists."""
    key: str | None = None
    """Sent as a bearer token."""


def check(
    a: Target, b: Target, prompts: Sequence[str], request: Request, tolerance: Tolerance, progress: Progress
) -> Report:
    """Ask both servers the same prompts, A twice, and compare.

    Each server is asked alone, so that two servers that share a GPU do not disturb each other.

    Args:
        a: The server to judge by, such as the one without fusion.
        b: The server to judge.
        prompts: What to ask; at least one.
        request: How to ask.
        tolerance: What is still good enough.
        progress: Told after every answer.

    Raises:
        ServerError: A server is not there, has no model to ask, or does not answer the first prompt.
    """
    return asyncio.run(_check(a, b, tuple(prompts), request, tolerance, progress))


async def _check(
    a: Target, b: Target, prompts: tuple[str, ...], request: Request, tolerance: Tolerance, progress: Progress
) -> Report:
    async with Server("A", a.url, request, key=a.key) as first, Server("B", b.url, request, key=b.key) as second:
        facts = []
        for server, target in ((first, a), (second, b)):
            facts.append(await server.facts())
            server.choose(facts[-1], target.model)
        for server in (first, second):
            answer = await server.probe(prompts[0])
            if tolerance.logprob is not None and answer.tokens is None:
                problem = f"gives no log-probabilities ({server.refusal or 'without saying why'})"
                raise LogprobsMissingError(server.title, problem, "Leave out --logprob-tolerance.")
        once = await _answers(first, "A", prompts, progress)
        again: list[Outcome] = [None] * len(prompts)
        if not any(isinstance(one, ServerError) and one.gives_up for one in once):
            again = await _answers(first, "A again", prompts, progress)
        other = await _answers(second, "B", prompts, progress)
        settings = {
            "endpoint": request.path,
            "stream": request.stream,
            "temperature": 0,
            "max_tokens": request.max_tokens,
            "concurrency": request.concurrency,
            "timeout": request.timeout,
            "prompts": len(prompts),
        }
        sides = (
            Side(facts[0], first.model, first.refusal, (tuple(once), tuple(again))),
            Side(facts[1], second.model, second.refusal, (tuple(other),)),
        )
        return Report(settings, prompts, *sides, tolerance)


async def _answers(server: Server, what: str, prompts: Sequence[str], progress: Progress) -> list[Outcome]:
    answers: Sequence[Answer | ServerError] = await server.answers(
        prompts, lambda done: progress(what, done, len(prompts))
    )
    return list(answers)
