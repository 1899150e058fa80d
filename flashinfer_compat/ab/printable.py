"""Text that goes to a server, or came from one and goes to a terminal."""

from __future__ import annotations

__all__ = ["can_be_sent", "counted", "printable"]


def can_be_sent(text: str) -> bool:
    """Whether it is UTF-8: a lone surrogate is not."""
    return not any("\ud800" <= one <= "\udfff" for one in text)


def printable(text: str) -> str:
    """`text` with what is not printable escaped as `repr` does, so that it cannot steer a terminal."""
    return "".join(one if one.isprintable() else repr(one)[1:-1] for one in text)


def counted(count: int, noun: str) -> str:
    """A number and its noun, which takes an s."""
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"
