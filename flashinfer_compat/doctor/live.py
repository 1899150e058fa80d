"""Imports FlashInfer in a process of its own, with a time limit, and tells what came of it."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from flashinfer_compat.signatures.live import differences
from flashinfer_compat.signatures.model import Symbol, SymbolTable

__all__ = ["DEFAULT_LIMIT", "LiveImport", "import_flashinfer"]

DEFAULT_LIMIT = 120.0
"""Seconds. With cold files and an old disk an import can take a minute."""

_LAST_LINES = 3
"""Of what a process that died wrote to stderr."""


@dataclass(frozen=True)
class LiveImport:
    """What importing FlashInfer gave."""

    seconds: float
    """How long the import took, or how long it was waited for."""
    limit: float
    timed_out: bool
    problem: str
    """The exception, or how the process died; empty where the import worked."""
    version: str | None
    """`flashinfer.__version__`."""
    torch_architectures: tuple[str, ...]
    """What torch was compiled for, such as "sm_100"; empty where torch could not be asked."""
    differences: tuple[str, ...]
    """Where the imported signatures are not those in the source."""

    def to_dict(self) -> dict[str, Any]:
        """The outcome as plain JSON values."""
        return {
            "seconds": round(self.seconds, 2),
            "limit": self.limit,
            "timed_out": self.timed_out,
            "problem": self.problem or None,
            "version": self.version,
            "torch_architectures": list(self.torch_architectures),
            "differences": list(self.differences),
        }


def import_flashinfer(
    static: SymbolTable | None,
    limit: float = DEFAULT_LIMIT,
    environ: Mapping[str, str] | None = None,
    search_path: Sequence[str] = (),
) -> LiveImport:
    """Import FlashInfer in a new process. That makes FlashInfer's cache folder and can initialise CUDA there.

    Args:
        static: What the source says; None compares nothing.
        limit: Seconds after which the process is killed.
        environ: Its environment variables; None means this process's own.
        search_path: Folders it looks in before its own.
    """
    variables = dict(os.environ if environ is None else environ)
    paths = [*search_path, *filter(None, sys.path)]
    variables["PYTHONPATH"] = os.pathsep.join(dict.fromkeys(paths))
    started = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        answer, errors = Path(folder, "answer.json"), Path(folder, "stderr")
        with errors.open("wb") as stream:
            process = subprocess.Popen(
                [sys.executable, "-c", _CHILD, str(answer)],
                env=variables,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=stream,
                start_new_session=True,
            )
            code = _wait(process, limit)
        seconds = time.perf_counter() - started
        told = _read(answer)
        last = errors.read_text("utf-8", errors="replace").strip().splitlines()[-_LAST_LINES:]
    if code is None:
        return LiveImport(seconds, limit, True, "", None, (), ())
    if told is None:
        return LiveImport(seconds, limit, False, _death(code, last), None, (), ())
    live = SymbolTable({one[0]: Symbol.from_data(one) for one in told["symbols"]}, told["problems"])
    return LiveImport(
        told["seconds"],
        limit,
        False,
        told["problem"] or next(iter(told["problems"].values()), ""),
        told["version"],
        tuple(told["torch_architectures"]),
        differences(static, live) if static is not None and not told["problem"] else (),
    )


def _wait(process: subprocess.Popen[bytes], limit: float) -> int | None:
    """The exit code; None where the process had to be killed, with all that it started."""
    try:
        return process.wait(limit)
    except subprocess.TimeoutExpired:
        return None
    finally:
        # After the limit, or an interrupt.
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def _read(answer: Path) -> dict[str, Any] | None:
    try:
        found: dict[str, Any] = json.loads(answer.read_text("utf-8"))
    except (OSError, ValueError):
        return None
    return found


def _death(code: int, last: Sequence[str]) -> str:
    try:
        how = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"exited with code {code}"
    except ValueError:
        how = f"exited with code {code}"
    return f"the process {how}" + (f": {' / '.join(last)}" if last else "")


_CHILD = """
import json, sys, time
from flashinfer_compat.signatures.live import read_live

told = {"problem": "", "version": None, "torch_architectures": [], "symbols": [], "problems": {}}
started = time.perf_counter()
try:
    import flashinfer
except BaseException as error:
    if isinstance(error, KeyboardInterrupt):
        raise
    told["problem"] = f"{type(error).__name__}: {error}"
else:
    told["version"] = str(getattr(flashinfer, "__version__", None))
told["seconds"] = time.perf_counter() - started
if not told["problem"]:
    table = read_live()
    told["symbols"] = [symbol.to_data() for symbol in table.symbols.values()]
    told["problems"] = dict(table.problems)
torch = sys.modules.get("torch")
try:
    # Not torch.cuda.get_arch_list(), which initialises CUDA.
    told["torch_architectures"] = (torch._C._cuda_getArchFlags() or "").split()
except Exception:
    pass
with open(sys.argv[1], "w", encoding="utf-8") as file:
    json.dump(told, file, default=str)
"""
