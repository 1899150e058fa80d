"""Time every strategy and backend on this machine, for DeepSeek-R1's MoE layers or given sizes.

Random NVFP4 layers are made on the device. Each way that planning lets through is prepared and called through the
public functions, compared with a float32 reference, and timed: medians of CUDA-graph replays on a GPU, of the wall
clock on a CPU. What is wrong or fails gets a reason in place of a time.

--write-policy keeps from how many tokens on split is faster than fused; `plan` reads that on this machine.

Exit code: 0 all were measured, 1 some way is wrong or failed, planning lets none through or there is no policy to
write, 2 the question makes no sense or a file cannot be written, 130 interrupted: what was measured until then is told
and written all the same.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import json
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from flashinfer_compat.bench.derivation import ADVISED, pairs_of, policy_rows
from flashinfer_compat.bench.floor import rates_of
from flashinfer_compat.bench.results import Point, Refusal, Report
from flashinfer_compat.bench.shapes import R1_INTERMEDIATE_SIZES, R1_TOKENS, Sizes
from flashinfer_compat.bench.table import point_line, policy_sentence, refusal_lines, tables
from flashinfer_compat.cli.bench_files import CACHE, STDOUT, check_files, told
from flashinfer_compat.cli.console import heading, paragraph
from flashinfer_compat.cli.interrupts import raise_if_interrupted
from flashinfer_compat.errors import ArgumentError, DependencyMissingError, StrategyUnavailableError
from flashinfer_compat.files import write_named
from flashinfer_compat.machine import this_environment, this_machine_without_policy
from flashinfer_compat.policy_files import kept_in, store_policy
from flashinfer_compat.vocabulary import Backend, Numerics, RoutingInput, Strategy, parse

if TYPE_CHECKING:
    import enum

    import torch

    from flashinfer_compat.bench.results import Way
    from flashinfer_compat.features.target import Target

    _E = TypeVar("_E", bound=enum.Enum)

__all__ = ["HELP", "add_arguments", "run"]

HELP = "time every strategy and backend on this machine"

_LARGE = 2**30
"""Bytes of a layer's weights from which on one measurement takes minutes on a CPU."""
_CPU_NOTE = (
    "Times are medians of the wall clock on a CPU: they show that the command works and which way does less work, not "
    "what a GPU would take."
)

_TUNED_NOTE = "Triton's layers were prepared with tile shapes found for these numbers of tokens (--autotune)."


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The command's own options."""
    r1 = Sizes()
    layer = parser.add_argument_group("layer", "DeepSeek-R1's unless given")
    _several(layer, "--intermediate-size", R1_INTERMEDIATE_SIZES)
    for name in ("hidden_size", "num_experts", "top_k", "num_shared_experts"):
        value = getattr(r1, name)
        layer.add_argument(
            f"--{name.replace('_', '-')}", type=int, metavar="N", default=value, help=f"default: {value}"
        )
    what = parser.add_argument_group("what to measure; all that planning lets through unless given")
    _several(what, "--tokens", R1_TOKENS)
    for kind, name, default in (
        (Backend, "backend", "default: all, on a GPU without torch"),
        (Strategy, "strategy", "default: all"),
        (Numerics, "numerics", "default: both"),
        (RoutingInput, "input", "default: topk"),
    ):
        names = ", ".join(one.value for one in kind)
        what.add_argument(f"--{name}", nargs="+", metavar="NAME", help=f"{names} ({default})")
    parser.add_argument("--device", help="cpu or cuda:0 (default: the GPU if torch sees one)")
    what.add_argument("--autotune", action="store_true", help="find tile shapes first, on triton; takes minutes")
    floor = parser.add_argument_group("floor", "known for some GPUs; without both rates none is told")
    floor.add_argument("--bandwidth", type=float, metavar="TB_S", help="of the memory, in 1e12 bytes/s")
    floor.add_argument("--flops", type=float, metavar="TFLOP_S", help="of the products, in 1e12 operations/s")
    output = parser.add_argument_group("output")
    # Its default is no None, so that no other --json is added.
    output.add_argument(
        "--json", nargs="?", const=STDOUT, default=False, metavar="FILE", help="write JSON (without FILE print it)"
    )
    output.add_argument("--plot", type=Path, metavar="FILE", help="draw the times, to *.svg or *.png; needs matplotlib")
    output.add_argument(
        "--write-policy",
        nargs="?",
        const=CACHE,
        metavar="FILE",
        help="keep what planning should prefer (without FILE in the cache, where plan finds it)",
    )


def run(options: argparse.Namespace) -> int:
    """Measure, print, write."""
    tokens, sizes = _tokens(options), _sizes(options)
    routing_inputs = _names(options.input or ["topk"], RoutingInput, "--input")
    backends = _names(options.backend, Backend, "--backend")
    strategies = _names(options.strategy, Strategy, "--strategy")
    numerics = _names(options.numerics, Numerics, "--numerics")
    check_files(options)
    try:
        import torch  # noqa: F401
    except ImportError as error:
        raise DependencyMissingError("torch", "bench") from error
    from flashinfer_compat.bench.origin import origin_of
    from flashinfer_compat.bench.run import Asked, measure, ways_of

    device = _device(options.device)
    target = _target(options, device)
    if device.type != "cpu" and not options.backend:
        # The reference takes seconds at sizes that are worth measuring on a GPU.
        backends = tuple(one for one in backends if one is not Backend.TORCH)
    ways, refusals = ways_of(Asked(sizes, routing_inputs, backends, strategies, numerics), target)
    if not ways:
        raise _nothing(refusals)
    if options.write_policy is not None and not pairs_of(ways):
        raise _no_policy(ways)
    origin = origin_of(this_environment(), device)
    rates = rates_of(origin.gpu, options.bandwidth, options.flops)
    tuned = options.autotune and any(one.backend is Backend.TRITON for one in ways)
    largest = max(one.num_experts * one.expert_bytes for one in sizes)
    if device.type == "cpu" and largest > _LARGE:
        size, count = f"{largest / 2**30:.0f} GiB of weights", len(ways) * len(tokens)
        note = f"note: on a CPU each of the {count} measurements takes minutes: up to {size}."
        print(note, "Name smaller sizes to try it.", file=sys.stderr)
    raise_if_interrupted()
    points, interrupted = _collect(ways, tokens, lambda: measure(ways, tokens, target, device, rates, autotune=tuned))
    report = Report(
        device=str(device),
        origin=origin,
        tokens=tokens,
        rates=rates,
        points=tuple(points),
        refusals=tuple(refusals),
        policy=() if interrupted else policy_rows(points, origin),
        policy_file=None,
        notes=(*([_CPU_NOTE] if device.type == "cpu" else []), *([_TUNED_NOTE] if tuned else [])),
        interrupted=interrupted,
        policy_asked=options.write_policy is not None,
    )
    failures: list[str] = []
    if options.write_policy is not None:
        path = None if options.write_policy is CACHE else Path(options.write_policy)
        with told(failures, "--write-policy", path or kept_in(this_environment())):
            report = _keep(report, path)
    if options.json == STDOUT:
        print(_json(report))
    else:
        _print(report, ways)
    if options.json not in (False, STDOUT):
        with told(failures, "--json", options.json):
            write_named(Path(options.json), _json(report) + "\n")
    if options.plot is not None:
        from flashinfer_compat.bench.plot import draw

        with told(failures, "--plot", options.plot):
            draw(report, options.plot)
    for one in failures:
        print(f"error: {one}", file=sys.stderr)
    return 2 if failures else report.exit_code


def _several(group: argparse._ArgumentGroup, name: str, default: Sequence[int]) -> None:
    told = " ".join(map(str, default))
    group.add_argument(name, type=int, nargs="+", metavar="N", default=list(default), help=f"default: {told}")


def _tokens(options: argparse.Namespace) -> tuple[int, ...]:
    for one in options.tokens:
        if one < 1:
            raise ArgumentError("--tokens", "positive numbers", str(one))
    return tuple(sorted(set(options.tokens)))


def _sizes(options: argparse.Namespace) -> tuple[Sizes, ...]:
    several = tuple(
        Sizes(options.hidden_size, one, options.num_experts, options.top_k, options.num_shared_experts)
        for one in dict.fromkeys(options.intermediate_size)
    )
    for one in several:
        # What makes no layer is refused before torch is loaded.
        one.problem(RoutingInput.TOPK, Numerics.W4A16)
    return several


def _device(name: str | None) -> torch.device:
    import torch

    from flashinfer_compat.weights.devices import usable_device

    device = usable_device(name or ("cuda:0" if torch.cuda.is_available() else "cpu"), "--device", computes=True)
    if device.index:
        expected = "cpu or cuda:0; planning speaks of the first GPU that is visible"
        raise ArgumentError("--device", expected, str(device), "Choose another GPU with CUDA_VISIBLE_DEVICES.")
    return device


def _target(options: argparse.Namespace, device: torch.device) -> Target:
    # Ways name their strategy, which no policy speaks of.
    target = this_machine_without_policy()
    if device.type != "cpu" or target.architecture is None:
        return target
    if options.write_policy is not None:
        expected = "a run on the GPU that plans are made for"
        raise ArgumentError("--write-policy", expected, f"--device {device}", "Leave --device or --write-policy out.")
    return replace(target, architecture=None)


def _names(given: Sequence[str] | None, kind: type[_E], option: str) -> tuple[_E, ...]:
    return tuple(dict.fromkeys(parse(kind, one, option) for one in given or [one.value for one in kind]))


def _nothing(refusals: Sequence[Refusal]) -> StrategyUnavailableError:
    found = [
        {"strategy": one.way.strategy.value, "backend": one.way.backend.value, **reason.to_dict()}
        for one in refusals
        for reason in one.reasons
    ]
    lines = list(refusal_lines(refusals, ())) or ["native needs --input logits, expanded --input topk"]
    return StrategyUnavailableError("nothing that was asked for can run here:\n  " + "\n  ".join(lines), found)


def _no_policy(ways: Sequence[Way]) -> ArgumentError:
    backends = ", ".join(one.value for one in Backend if one in ADVISED)
    expected = f"split and, from the same --input, a fused strategy to measure on one of {backends}"
    found = ", ".join(dict.fromkeys(f"{one.strategy.value} on {one.backend.value}" for one in ways))
    return ArgumentError("--write-policy", expected, f"only {found}", "Ask for both, or leave --write-policy out.")


def _collect(
    ways: Sequence[Way], tokens: Sequence[int], measuring: Callable[[], Iterator[Point]]
) -> tuple[list[Point], bool]:
    """What was measured, and whether it was interrupted before the end."""
    points: list[Point] = []
    try:
        with _progress(len(ways) * len(tokens)) as tell:
            for point in measuring():
                points.append(point)
                tell(point)
                raise_if_interrupted()
    except KeyboardInterrupt:
        return points, True
    return points, False


@contextlib.contextmanager
def _progress(total: int) -> Iterator[Callable[[Point], None]]:
    """On a terminal a bar, where rich is installed; elsewhere a line for each measurement. Both on stderr."""
    if not sys.stderr.isatty() or importlib.util.find_spec("rich") is None:
        yield lambda point: print(point_line(point), file=sys.stderr, flush=True)
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True)) as bar:
        task = bar.add_task("preparing", total=total)
        yield lambda point: bar.update(task, advance=1, description=point_line(point))


def _json(report: Report) -> str:
    return json.dumps(report.to_dict(), indent=1)


def _keep(report: Report, path: Path | None) -> Report:
    if report.interrupted or not report.policy:
        missing = "it was interrupted" if report.interrupted else "fused and split were not both measured throughout"
        return replace(report, notes=(*report.notes, f"No policy was written: {missing}."))
    written = store_policy(this_environment(), report.policy, path)
    if written is None:
        return replace(report, notes=(*report.notes, "No policy was written: there is no cache directory."))
    return replace(report, policy_file=str(written))


def _print(report: Report, ways: Sequence[Way]) -> None:
    paragraph(f"{report.origin}, device {report.device}", indent=0)
    if report.rates is None:
        paragraph("No floor is told: this machine's rates are not known; --bandwidth and --flops give them.", indent=0)
    for note in report.notes:
        paragraph(note, label="note:", style="note", indent=0)
    for line in tables(report):
        print(line)
    if report.policy:
        heading("What planning should prefer")
    for row in report.policy:
        paragraph(policy_sentence(row))
    if report.policy_file:
        paragraph(f"Kept in {report.policy_file}", indent=0)
    refused = list(refusal_lines(report.refusals, ways))
    if refused:
        heading("Not run, because planning refuses it")
    for one in refused:
        paragraph(one)
    if report.interrupted:
        paragraph("Interrupted: only what was measured until then is told.", indent=0)
