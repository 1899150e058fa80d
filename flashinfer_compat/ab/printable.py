"""What a server wrote, for a terminal."""

from __future__ import annotations

__all__ = ["counted", "printable"]


def printable(text: str) -> str:
    """`text` with what is not printable escaped as `repr` does, so that it cannot steer a terminal."""
    return "".join(one if one.isprintable() else repr(one)[1:-1] for one in text)


def counted(count: int, noun: str) -> str:
    """A number and its noun, which takes an s."""
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"
