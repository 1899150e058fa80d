"""Ask two running OpenAI-compatible servers the same prompts and compare: with fused shared experts, and without.

A is the server to judge by, B the one to judge. Every prompt is asked at temperature 0, of A twice: B need not agree
with A more than A agrees with itself. Beside the texts it compares the log-probabilities of the tokens up to the first
difference, where the servers give them.

Exit code: 0 within tolerance, 1 not, 2 when a server cannot be used or leaves a prompt without an answer, when A does
not repeat itself, or when log-probabilities are to be judged and none can be compared.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import sys
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from flashinfer_compat.ab.comparison import Comparison, Divergence
from flashinfer_compat.ab.printable import counted, printable
from flashinfer_compat.ab.prompts import BUILT_IN, read_prompts
from flashinfer_compat.ab.report import Report, Side, Tolerance
from flashinfer_compat.cli.console import heading, paragraph
from flashinfer_compat.errors import ArgumentError, DependencyMissingError

if TYPE_CHECKING:
    from flashinfer_compat.ab.run import Progress

__all__ = ["HELP", "add_arguments", "run"]

HELP = "compare the answers of two running servers, with fusion and without"
_MOST_SHOWN = 5
"""Differences and failures of each kind that are printed without --verbose."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The command's own options."""
    parser.add_argument("url_a", metavar="URL_A", help="such as http://127.0.0.1:30000")
    parser.add_argument("url_b", metavar="URL_B")
    parser.add_argument("--model-a", metavar="NAME", help="default: the only one that the server lists")
    parser.add_argument("--model-b", metavar="NAME")
    parser.add_argument(
        "--key-variable", metavar="NAME", help="environment variable with the key that both servers want"
    )
    asking = parser.add_argument_group("asking")
    asking.add_argument(
        "--prompts",
        type=Path,
        metavar="FILE",
        help=f"one a line; in *.jsonl a string, or an object with `prompt` (default: {len(BUILT_IN)} built in)",
    )
    asking.add_argument("--chat", action="store_true", help="ask /v1/chat/completions (default: /v1/completions)")
    asking.add_argument("--stream", action="store_true", help="ask for streamed answers")
    asking.add_argument("--max-tokens", type=int, metavar="N", default=64, help="of an answer (default: 64)")
    asking.add_argument("--concurrency", type=int, metavar="N", default=8, help="prompts at a time (default: 8)")
    asking.add_argument("--timeout", type=float, metavar="SECONDS", default=120.0, help="for an answer (default: 120)")
    judging = parser.add_argument_group("judging")
    judging.add_argument(
        "--tolerance",
        type=float,
        metavar="R",
        help="least exact-match rate (default: 1, if A repeats at least half of its answers)",
    )
    judging.add_argument("--logprob-tolerance", type=float, metavar="G", help="largest gap (default: not judged)")
    parser.add_argument("--verbose", action="store_true", help="print every difference")


def run(options: argparse.Namespace) -> int:
    """Ask, compare, print."""
    _check_numbers(options)
    urls = [_server_url(getattr(options, name), name.upper()) for name in ("url_a", "url_b")]
    key = os.environ.get(options.key_variable) if options.key_variable else None
    if options.key_variable and not key:
        raise ArgumentError("--key-variable", "a variable that is set", options.key_variable)
    prompts = BUILT_IN if options.prompts is None else read_prompts(options.prompts)
    try:
        from flashinfer_compat.ab.client import Request
    except ImportError as error:
        raise DependencyMissingError("httpx", "ab") from error
    from flashinfer_compat.ab.run import Target, check

    report = check(
        Target(urls[0], options.model_a, key),
        Target(urls[1], options.model_b, key),
        prompts,
        Request(options.chat, options.stream, options.max_tokens, options.timeout, options.concurrency),
        Tolerance(options.tolerance, options.logprob_tolerance),
        _progress(),
    )
    if options.json:
        print(json.dumps(report.to_dict(), indent=2))
    else:
        _print(report, verbose=options.verbose)
    return report.exit_code


def _check_numbers(options: argparse.Namespace) -> None:
    gap = options.logprob_tolerance
    for name, fits, expected in (
        ("max-tokens", options.max_tokens > 0, "a positive number"),
        ("concurrency", options.concurrency > 0, "a positive number"),
        ("timeout", 0 < options.timeout < math.inf, "a positive number of seconds"),
        ("tolerance", options.tolerance is None or 0 <= options.tolerance <= 1, "a rate from 0 to 1"),
        ("logprob-tolerance", gap is None or 0 <= gap < math.inf, "a number from 0"),
    ):
        if not fits:
            raise ArgumentError(f"--{name}", expected, str(getattr(options, name.replace("-", "_"))))


def _server_url(text: str, argument: str) -> str:
    """The server's root; people also give the address with /v1, as OpenAI's client wants it."""
    try:
        parts = urlsplit(text)
        fits = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:
        fits = False
    if not fits or parts.username or parts.query or parts.fragment:
        raise ArgumentError(argument, "an address such as http://127.0.0.1:30000", repr(text))
    return text.rstrip("/").removesuffix("/v1").rstrip("/")


def _progress() -> Progress:
    """On a terminal a line that counts; elsewhere a line for each run."""
    terminal = sys.stderr is not None and sys.stderr.isatty()

    def told(what: str, done: int, total: int) -> None:
        if terminal:
            print(
                f"\rserver {what}: {done} of {total} ", end="\n" if done == total else "", file=sys.stderr, flush=True
            )
        elif done == total:
            print(f"server {what}: {counted(total, 'prompt')} asked", file=sys.stderr)

    return told


def _print(report: Report, *, verbose: bool) -> None:
    """The judgement, the servers, what failed, and where the answers first differ."""
    most = sys.maxsize if verbose else _MOST_SHOWN
    paragraph(report.summary, indent=0)
    for note in report.notes:
        paragraph(note, label="note:", style="note", indent=0)
    heading("Servers")
    for name, side in (("A", report.a), ("B", report.b)):
        paragraph(_side(side), label=f"{name}:")
    differing = list(_differing(report))
    if differing:
        paragraph(printable("; ".join(differing)) + ".", label="They differ in:")
    if report.failures:
        heading("Without an answer")
    told = Counter(str(one.error) for one in report.failures)
    for message, count in told.most_common(most):
        paragraph(message, label=f"{counted(count, 'prompt')}:", style="error")
    _left_out(len(told) - most)
    _print_differences("A against itself", report.prompts, report.repetition, most)
    _print_differences("B against A", report.prompts, report.comparison, most)


def _side(side: Side) -> str:
    facts = side.facts
    engine = " ".join(part for part in (facts.engine, facts.version) if part) or "does not say what it is"
    flags = [f"{name}={_said(value)}" for name, value in facts.flags.items()]
    model = side.model if facts.model_path in (None, side.model) else f"{side.model} ({facts.model_path})"
    return printable(", ".join([f"{facts.url}: {engine}", f"model {model}", *flags]) + ".")


def _differing(report: Report) -> Sequence[str]:
    a, b = report.a.facts, report.b.facts
    pairs = {"engine": (a.engine, b.engine), "version": (a.version, b.version)}
    pairs |= {name: (a.flags.get(name), b.flags.get(name)) for name in [*a.flags, *b.flags]}
    return [f"{name} {_said(one)} and {_said(other)}" for name, (one, other) in pairs.items() if one != other]


def _said(value: object) -> str:
    return "(not said)" if value is None else str(value)


def _print_differences(title: str, prompts: Sequence[str], comparison: Comparison, most: int) -> None:
    found = [
        (number, one.divergence)
        for number, one in enumerate(comparison.prompts)
        if one is not None and one.divergence is not None
    ]
    if found:
        heading(f"{title}: {len(found)} of {comparison.compared} answers differ")
    for number, divergence in found[:most]:
        paragraph(f"{_divergence(divergence)} Prompt: {_short(prompts[number])}", label=f"prompt {number + 1}:")
    _left_out(len(found) - most)
    if comparison.largest is not None and comparison.largest[1].size:
        number, gap = comparison.largest
        where = f"prompt {number + 1}, token {gap.position}, {gap.token!r}"
        paragraph(f"{gap.size:.3g} ({where}).", label=f"{title}, largest log-probability gap:", indent=0)


def _divergence(one: Divergence) -> str:
    margins = ""
    if one.first_margin is not None and one.second_margin is not None:
        margins = f" Each held its own token more probable by {one.first_margin:.3g} and {one.second_margin:.3g}."
    return f"{one.unit} {one.position}, after {one.before!r}: {one.first!r} and {one.second!r}.{margins}"


def _short(prompt: str) -> str:
    return repr(prompt if len(prompt) <= _PROMPT_SHOWN else f"{prompt[:_PROMPT_SHOWN]}...")


_PROMPT_SHOWN = 60
"""Characters."""


def _left_out(count: int) -> None:
    if count > 0:
        paragraph(f"{count} more with --verbose.")
