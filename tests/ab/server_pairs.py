"""Two servers on the loopback and the prompts they are asked."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from typing import Any

from faulty_server import MODELS, Behaviour, echo, serving

PROMPTS = [f"one two three {number}" for number in range(6)]


@contextlib.contextmanager
def pair(b: Behaviour, a: Behaviour = echo, pages: Mapping[str, Any] = MODELS) -> Iterator[tuple[str, str]]:
    with serving(a) as first, serving(b, pages) as second:
        yield first.url, second.url


def on(prompt: int, behaviour: Behaviour) -> Behaviour:
    """`behaviour` for one prompt, right answers for the others."""
    return lambda ask: behaviour(ask) if ask.prompt == PROMPTS[prompt] else echo(ask)
