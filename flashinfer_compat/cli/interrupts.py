"""Ctrl-C is remembered: a library that swallows KeyboardInterrupt, as in a callback, does not lose it."""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Iterator

__all__ = ["raise_if_interrupted", "remembered_interrupts"]

_SEEN: list[int] = []
"""Signals since the command began. A list, because a handler must not wait for a lock that it may itself hold."""


@contextlib.contextmanager
def remembered_interrupts() -> Iterator[None]:
    """Within it SIGINT raises KeyboardInterrupt and is remembered; elsewhere than in the main thread nothing changes.

    A handler that the caller has installed stays.
    """
    _SEEN.clear()
    main = threading.current_thread() is threading.main_thread()
    if not main or signal.getsignal(signal.SIGINT) is not signal.default_int_handler:
        yield
        return
    signal.signal(signal.SIGINT, _remember)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def raise_if_interrupted() -> None:
    """Between steps of work.

    Raises:
        KeyboardInterrupt: SIGINT has come since the command began.
    """
    if _SEEN:
        raise KeyboardInterrupt


def _remember(number: int, _frame: object) -> None:
    _SEEN.append(number)
    raise KeyboardInterrupt
