"""One release as on an SM100: fp4_moe through its own Python functions, with only its compiled modules stood in for.

    python -m tools.matrix.driven VERSION FOLDER OUTPUT.json

FOLDER holds the unpacked release and comes first on the search path; `tests`, where the stand-in lives, is on it too.
"""

from __future__ import annotations

import importlib
import sys
import warnings
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch
from standin.calls import Call, Era
from standin.compiled_install import pretend_sm100, replace_compiled_modules

import flashinfer_compat as fc
from flashinfer_compat.machine import this_machine
from flashinfer_compat.signatures.recorded import releases
from tools.matrix import references
from tools.matrix.child import main
from tools.matrix.plain import compare_signatures
from tools.matrix.results import Cell, State, failed
from tools.matrix.samples import SAMPLES, Sample
from tools.matrix.ways import WAYS, Way

__all__: list[str] = []

BF16 = 8e-3
"""Routing weights and each expert's row are bf16 in the kernels; the recorded output is rounded once."""
DENSE = 3e-2
"""The dense FP4 GEMM rounds the first projection to bf16 before it is quantized again, which moves codes."""


def _cells(version: str, folder: Path) -> Iterator[Cell]:
    pretend_sm100()
    try:
        importlib.import_module("flashinfer")
    except (Exception, SystemExit) as error:
        # Unlike the plain import, nothing excuses this one.
        yield from failed("release", ["import as on SM100"], error)
        return
    yield Cell("release", "import as on SM100", State.PASSED)
    yield compare_signatures(folder, "signatures as on SM100")
    # A release newer than the records is stood in for by the newest recorded one.
    era = Era(version if version in releases() else releases()[-1])
    calls = replace_compiled_modules(era, folder / "flashinfer" / "data" / "csrc")
    target = replace(this_machine(), architecture="sm100", torch_cuda="13.0")
    samples = {name: Sample.load(name) for name in SAMPLES}
    for way in WAYS:
        yield _cell(way, samples[way.sample], target, version, calls)
    yield from references.cells()


def _cell(way: Way, sample: Sample, target: fc.Target, version: str, calls: list[Call]) -> Cell:
    try:
        return _run(way, sample, target, version, calls)
    except Exception as error:
        return failed(way.table, [way.column], error)[0]


def _run(way: Way, sample: Sample, target: fc.Target, version: str, calls: list[Call]) -> Cell:
    cell = partial(Cell, way.table, way.column)
    weights = next(sample.ranks(way.ranks)) if way.ranks > 1 else sample.weights
    problem = weights.problem(sample.routing(way.kind).routing_input)
    found = _decide(problem, target, way.strategy)
    if version in releases():
        # A wrong reading of the install would otherwise pass as a refusal.
        recorded = _decide(problem, fc.Target.from_release(version, "sm100"), way.strategy)
        if _summary(found) != _summary(recorded):
            return cell(State.FAILED, f"planned {_summary(found)} here, {_summary(recorded)} from the record")
    if isinstance(found, tuple):
        return cell(State.REFUSED, ", ".join(found))
    calls.clear()
    before = sample.hidden_states.clone()
    with warnings.catch_warnings():
        # FlashInfer deprecates ways to call it, such as leaving out hidden_states_scale_layout.
        warnings.simplefilter("error", DeprecationWarning)
        output = way.run(sample, partial(fc.prepare, plan=found), way.kind)
    error = references.relative_error(output, sample.output)
    problems = list(_problems(found, calls, error))
    if not torch.equal(before, sample.hidden_states):
        problems.append("hidden_states were changed")
    if problems:
        return cell(State.FAILED, "; ".join(problems), error)
    return cell(State.PASSED, ", ".join(dict.fromkeys(call.name for call in calls)), error)


def _problems(plan: fc.Plan, calls: list[Call], error: float) -> Iterator[str]:
    for call in calls:
        yield from (f"{call.name}: {why}" for why in call.garbage)
    # Not `error > ...`, which NaN is not.
    if not error <= (BF16 if plan.dense is None else DENSE):
        yield f"relative error {error:.2e}"
    wanted = {plan.call.entry_point if plan.call else "", *(() if plan.dense is None else ("mm_fp4",))}
    missing = wanted - {call.name for call in calls}
    if missing:
        yield f"{', '.join(sorted(missing))} did not reach a compiled module"


def _decide(problem: fc.Problem, target: fc.Target, strategy: str) -> fc.Plan | tuple[str, ...]:
    """The plan, or the codes of the reasons against it."""
    try:
        return fc.plan(problem, target, strategy=strategy, backend="trtllm")
    except fc.StrategyUnavailableError as error:
        about = [one for one in error.rejected if (one["strategy"], one["backend"]) == (strategy, "trtllm")]
        return tuple(dict.fromkeys(one["code"] for one in about))


def _summary(found: fc.Plan | tuple[str, ...]) -> object:
    return found if isinstance(found, tuple) else (found.call, found.dense)


if __name__ == "__main__":
    sys.exit(main(_cells))
