"""`python -m flashinfer_compat`: doctor, plan, verify, bench, run-layer, ab. To add one, see `COMMANDS`."""

from __future__ import annotations

import argparse
import importlib
import json
import sys
from collections.abc import Sequence
from typing import NoReturn

from flashinfer_compat import __version__
from flashinfer_compat.cli.console import readers_may_leave
from flashinfer_compat.cli.interrupts import remembered_interrupts
from flashinfer_compat.errors import FlashInferCompatError, StrategyUnavailableError

__all__ = ["COMMANDS", "main"]

COMMANDS = ("doctor", "plan", "verify", "bench", "run_layer", "ab")
"""Modules of this package, each with HELP, add_arguments(parser) and run(options) -> exit code."""


_INTERRUPTED = 130
"""What shells say of a command that Ctrl-C ended."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; returns its exit code."""
    given = sys.argv[1:] if arguments is None else list(arguments)
    try:
        with remembered_interrupts():
            return _run(_parser(as_json="--json" in given).parse_args(given))
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return _INTERRUPTED


def _run(options: argparse.Namespace) -> int:
    try:
        with readers_may_leave():
            code: int = options.run(options)
    except FlashInferCompatError as error:
        _report(error, as_json=options.json in (True, "-"))
        return 1 if isinstance(error, StrategyUnavailableError) else 2
    except OSError as error:
        print(f"error: output: {error}", file=sys.stderr)
        return 2
    return code


class _JsonParser(argparse.ArgumentParser):
    """Says what is wrong with the arguments as JSON."""

    def error(self, message: str) -> NoReturn:
        print(json.dumps({"error": {"type": "UsageError", "message": message}}, indent=2))
        super().error(message)


def _parser(*, as_json: bool) -> argparse.ArgumentParser:
    parser = (_JsonParser if as_json else argparse.ArgumentParser)(
        prog="python -m flashinfer_compat", description="NVFP4 mixture-of-experts over every FlashInfer release."
    )
    parser.add_argument("--version", action="version", version=f"flashinfer-compat {__version__}")
    commands = parser.add_subparsers(metavar="COMMAND", required=True)
    for name in COMMANDS:
        module = importlib.import_module(f"{__name__}.{name}")
        command = commands.add_parser(
            name.replace("_", "-"),
            help=module.HELP,
            description=module.__doc__,
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )
        module.add_arguments(command)
        # A command that writes files has a --json of its own.
        if command.get_default("json") is None:
            command.add_argument("--json", action="store_true", help="print JSON")
        command.set_defaults(run=module.run)
    return parser


def _report(error: FlashInferCompatError, *, as_json: bool) -> None:
    if as_json:
        content: dict[str, object] = {"error": {"type": type(error).__name__, "message": str(error)}}
        if isinstance(error, StrategyUnavailableError):
            content |= {"strategy": None, "backend": None, "status": "absent", "rejected": list(error.rejected)}
        print(json.dumps(content, indent=2))
    else:
        print(f"error: {error}", file=sys.stderr)
