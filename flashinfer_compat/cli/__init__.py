"""`python -m flashinfer_compat`: doctor, plan, run-layer. To add a command, add its module to `COMMANDS`."""

from __future__ import annotations

import argparse
import importlib
import json
import os
import sys
from collections.abc import Sequence

from flashinfer_compat import __version__
from flashinfer_compat.errors import FlashInferCompatError, StrategyUnavailableError

__all__ = ["COMMANDS", "main"]

COMMANDS = ("doctor", "plan", "run_layer")
"""Modules of this package, each with HELP, add_arguments(parser) and run(options) -> exit code."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; returns its exit code."""
    options = _parser().parse_args(arguments)
    try:
        code: int = options.run(options)
        sys.stdout.flush()
    except FlashInferCompatError as error:
        _report(error, as_json=options.json)
        return 1 if isinstance(error, StrategyUnavailableError) else 2
    except BrokenPipeError:
        # The reader of a pipe has gone; Python must not complain when it flushes at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    return code


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
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
