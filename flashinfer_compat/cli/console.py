"""Text for people: wrapped plain text, in colour where rich is installed and a terminal reads it."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import sys
import textwrap
from collections.abc import Iterator, Sequence
from typing import Any, TextIO

__all__ = ["columns", "command", "heading", "paragraph", "readers_may_leave", "styled"]

_STYLES = {
    "error": "bold red",
    "warning": "bold yellow",
    "note": "cyan",
    "refuted": "bold red",
    "absent": "dim",
    "present": "yellow",
    "eligible": "green",
    "verified": "bold green",
    "heading": "bold",
}


@contextlib.contextmanager
def readers_may_leave() -> Iterator[None]:
    """Go on to the command's own exit code when the reader of a pipe has gone, as `head` does."""
    stdout = sys.stdout
    if stdout is None:
        # Closed by the caller.
        sys.stdout = open(os.devnull, "w", encoding="utf-8")  # noqa: PTH123, SIM115
        yield
        return
    sys.stdout = _Patient(stdout)
    try:
        yield
        sys.stdout.flush()
    finally:
        sys.stdout = stdout


class _Patient:
    """A stream that swallows what nobody reads any more."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def write(self, text: str) -> int:
        with self._pipe():
            self._stream.write(text)
        return len(text)

    def flush(self) -> None:
        with self._pipe():
            self._stream.flush()

    @contextlib.contextmanager
    def _pipe(self) -> Iterator[None]:
        try:
            yield
        except BrokenPipeError:
            # Python flushes once more at exit and must not complain.
            os.dup2(os.open(os.devnull, os.O_WRONLY), self._stream.fileno())

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


def styled(text: str, style: str) -> str:
    """`text` with terminal colours, or as it is where there are none to show."""
    if not _in_colour():
        return text
    from rich.console import Console

    console = Console(force_terminal=True, width=10_000, highlight=False)
    with console.capture() as capture:
        console.print(text, style=_STYLES[style], end="", markup=False)
    return capture.get()


def heading(text: str) -> None:
    """A section's title, after an empty line."""
    print(f"\n{styled(text, 'heading')}")


def paragraph(text: str, *, label: str = "", style: str = "", indent: int = 2, hanging: int = 2) -> None:
    """Wrapped text behind a label; lines after the first stand `hanging` further in."""
    first, later = " " * indent, " " * (indent + hanging)
    # Wrap with the bare label, so that colour codes do not count as text.
    lines = textwrap.wrap(
        f"{label} {text}" if label else text,
        _width(),
        initial_indent=first,
        subsequent_indent=later,
        break_on_hyphens=False,
        break_long_words=False,
    ) or [first.rstrip()]
    if label and style:
        lines[0] = lines[0].replace(label, styled(label, style), 1)
    print("\n".join(lines))


def command(line: str, *, indent: int = 6) -> None:
    """A line for the shell, broken so that it can be pasted as it stands."""
    room = _width() - indent - len(" \\")
    lines = [""]
    # A quoted part stays whole.
    for word in re.findall(r"""(?:[^\s'"]|'[^']*'|"[^"]*")+""", line):
        if lines[-1] and len(lines[-1]) + 1 + len(word) > room - (2 if len(lines) > 1 else 0):
            lines.append(word)
        else:
            lines[-1] = f"{lines[-1]} {word}" if lines[-1] else word
    for number, part in enumerate(lines):
        print(" " * (indent + (2 if number else 0)) + part + (" \\" if number < len(lines) - 1 else ""))


def columns(rows: Sequence[tuple[str, str, str]]) -> None:
    """(name, status, remark) rows; remarks wrap below each other."""
    names = max((len(name) for name, _, _ in rows), default=0)
    statuses = max((len(status) for _, status, _ in rows), default=0)
    for name, status, remark in rows:
        first = f"  {name:<{names}}  {status:<{statuses}}  "
        lines = textwrap.wrap(
            remark, _width(), initial_indent=first, subsequent_indent=" " * len(first), break_on_hyphens=False
        ) or [first.rstrip()]
        head = f"  {name:<{names}}  "
        lines[0] = head + styled(f"{status:<{statuses}}", status) + lines[0][len(head) + statuses :]
        print("\n".join(lines))


def _width() -> int:
    return min(100, shutil.get_terminal_size((80, 24)).columns) if sys.stdout.isatty() else 80


def _in_colour() -> bool:
    if not sys.stdout.isatty() or os.environ.get("NO_COLOR"):
        return False
    try:
        import rich  # noqa: F401
    except ImportError:
        return False
    return True
