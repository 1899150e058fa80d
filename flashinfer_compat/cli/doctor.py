"""Tell what works for NVFP4 MoE on this machine, and what stands in the way.

Reads files, and keeps a cache of FlashInfer's signatures in
FLASHINFER_COMPAT_CACHE_DIR; --live also imports FlashInfer, in a process of its
own.
With --flashinfer, --arch, --torch or --cuda it speaks of a machine that is not
this one, from recorded data. --compare tells what another release changes.
Exit code: 0 nothing worse than notes, 1 warnings, 2 errors or a question that
makes no sense; of --compare 0.
"""

from __future__ import annotations

import argparse
import json
from collections import Counter

from flashinfer_compat.cli.comparison import print_comparison
from flashinfer_compat.cli.console import columns, command, heading, paragraph
from flashinfer_compat.cli.what_if import print_question
from flashinfer_compat.doctor.compare import compare
from flashinfer_compat.doctor.examination import Examination, examine, examine_asked
from flashinfer_compat.doctor.finding import Finding, Severity
from flashinfer_compat.doctor.live import DEFAULT_LIMIT
from flashinfer_compat.doctor.question import Asked, Premise, Source, premise_of_architecture
from flashinfer_compat.environment import Environment, FileCheck
from flashinfer_compat.errors import ArgumentError
from flashinfer_compat.machine import architecture_of, this_environment
from flashinfer_compat.signatures.recorded import recorded

__all__ = ["HELP", "add_arguments", "print_examination", "run"]

HELP = "what works for NVFP4 MoE here, and what stands in the way"
_MOST_FILES = 10
"""How many files of one distribution --verbose names."""
_USUAL = "sm100"
"""The GPU that releases are compared for on a machine without one."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The command's own options."""
    parser.add_argument("--verbose", action="store_true", help="print every fact")
    parser.add_argument(
        "--check-files",
        choices=[level.value for level in FileCheck],
        help="how closely installed files are compared with their record (default: moe, sizes of what FP4 MoE runs)",
    )
    parser.add_argument("--live", action="store_true", help="import FlashInfer too, in a process of its own")
    parser.add_argument(
        "--live-limit",
        type=float,
        metavar="SECONDS",
        help=f"how long that import may take (default: {DEFAULT_LIMIT:g})",
    )
    what_if = parser.add_argument_group("what if", "another machine; what is not said is taken from this one")
    what_if.add_argument("--flashinfer", metavar="VERSION", help="a recorded release")
    what_if.add_argument("--arch", metavar="ARCH", help="such as sm100, or none")
    what_if.add_argument("--torch", metavar="VERSION", help="such as 2.9.0 or 2.9.0+cu129, or none")
    what_if.add_argument("--cuda", metavar="VERSION", help="of torch and of the toolkit, such as 12.8, or none")
    what_if.add_argument(
        "--compare",
        nargs=2,
        metavar=("OLD", "NEW"),
        help="what changing between two recorded releases changes; with --arch for that GPU",
    )


def run(options: argparse.Namespace) -> int:
    """Examine and print."""
    if options.live_limit is not None and not options.live_limit > 0:
        raise ArgumentError("--live-limit", "a positive number of seconds", options.live_limit)
    if options.live_limit is not None and not options.live:
        raise ArgumentError("--live-limit", "to be given with --live only", options.live_limit)
    if options.compare:
        return _compare(options)
    asked = Asked(options.flashinfer, options.arch, options.torch, options.cuda)
    if asked.anything:
        _refuse(options, "--flashinfer, --arch, --torch or --cuda", "live", "check_files")
        examination = examine_asked(asked)
    else:
        limit = (options.live_limit or DEFAULT_LIMIT) if options.live else None
        examination = examine(FileCheck(options.check_files or FileCheck.MOE), limit)
    if options.json:
        print(json.dumps(examination.to_dict(), indent=2))
    else:
        print_examination(examination, verbose=options.verbose)
    return examination.exit_code


def _compare(options: argparse.Namespace) -> int:
    _refuse(options, "--compare", "flashinfer", "torch", "cuda", "live", "check_files")
    old, new = (recorded(version) for version in options.compare)
    architecture = premise_of_architecture(options.arch, architecture_of(this_environment()))
    if architecture == Premise(None, Source.THIS_MACHINE):
        architecture = Premise(_USUAL, Source.ASSUMED)
    comparison = compare(old, new, architecture)
    if options.json:
        print(json.dumps(comparison.to_dict(), indent=2))
    else:
        print_comparison(comparison, verbose=options.verbose)
    return 0


def _refuse(options: argparse.Namespace, what: str, *names: str) -> None:
    """Refuse options that have no meaning beside others."""
    for name in names:
        if getattr(options, name):
            option = f"--{name.replace('_', '-')}"
            raise ArgumentError(option, f"not to be given with {what}", str(getattr(options, name)))


def print_examination(examination: Examination, *, verbose: bool = False) -> None:
    """The examination for people: summary, findings, environment, features."""
    if examination.question is not None:
        print_question(examination.question)
    paragraph(examination.summary, indent=0)
    counts = Counter(finding.severity for finding in examination.findings)
    told = [f"{counts[one]} {one.value}{'s' if counts[one] > 1 else ''}" for one in Severity if counts[one]]
    heading(f"Findings: {', '.join(told) or 'none'}")
    for finding in examination.findings:
        _print_finding(finding)
    if examination.question is None:
        heading("Environment")
        for line in _facts(examination) if verbose else _short(examination):
            paragraph(line)
    heading("Features of FlashInfer")
    states = examination.capabilities.features.values()
    if examination.capabilities.target.flashinfer is None:
        paragraph(f"All {len(states)} are absent: {examination.capabilities.target.flashinfer_problem}")
        return
    columns(
        [
            (one.feature.name, one.evidence.value, one.feature.title if not one.reasons else str(one.reasons[0]))
            for one in states
        ]
    )


def _print_finding(finding: Finding) -> None:
    label = f"{finding.severity.value} [{finding.code}]"
    paragraph(finding.message, label=label, style=finding.severity.value)
    paragraph(finding.why, indent=4, hanging=0)
    if finding.repair:
        paragraph("Repair:", indent=4)
        command(finding.repair)
    if finding.advice:
        paragraph(finding.advice, indent=4, hanging=0)
    paragraph(f"More: {finding.docs}", indent=4)


def _short(examination: Examination) -> list[str]:
    environment, target = examination.environment, examination.capabilities.target
    python, torch, gpus = environment.python.value, environment.torch.value, environment.gpus.value
    parts = [f"Python {python.version}"] if python else []
    parts.append(f"FlashInfer {target.flashinfer.version}" if target.flashinfer else "no FlashInfer")
    parts.append(f"torch {torch.version}" if torch else "no torch")
    if gpus is None or not gpus.devices:
        parts.append("no GPU")
    else:
        names = Counter((gpu.name, gpu.architecture) for gpu in gpus.devices)
        parts += [f"{f'{count} x ' if count > 1 else ''}{name} ({arch})" for (name, arch), count in names.items()]
        parts.append(f"driver {gpus.driver_version} for CUDA {gpus.driver_cuda_version}")
    live = examination.live
    if live is not None and not live.problem and not live.timed_out:
        parts.append(f"import flashinfer took {live.seconds:.1f} s")
    return [", ".join(parts), "More with --verbose."]


def _facts(examination: Examination) -> list[str]:
    environment = examination.environment
    return [*_short(examination)[:1], *_install_lines(environment), *_machine_lines(environment)]


def _install_lines(environment: Environment) -> list[str]:
    found = environment.distributions.value.found if environment.distributions.value else ()
    lines = [
        f"{one.name} {one.version} in {one.location} (files: {one.files.state.value.replace('_', ' ')})"
        for one in found
    ]
    for one in found:
        wrong = one.files.wrong
        lines.extend(f"missing or changed: {path}" for path in wrong[:_MOST_FILES])
        if len(wrong) > _MOST_FILES:
            lines.append(f"missing or changed: {len(wrong) - _MOST_FILES} more files of {one.name}")
    lines.extend(
        f"import {one.name} loads {one.location}"
        for one in environment.packages.value or ()
        if one.owner is None and one.origin is not None
    )
    torch = environment.torch.value
    if torch:
        lines.append(f"torch built for CUDA {torch.cuda}" if torch.cuda else "torch built without CUDA")
    return lines


def _machine_lines(environment: Environment) -> list[str]:
    lines = [f"{environment.python.value.machine}, {environment.python.value.libc}"] if environment.python.value else []
    gpus = environment.gpus.value
    if gpus is None:
        lines.append(f"GPU: {environment.gpus.reason}")
    else:
        lines.extend(f"GPU {gpu.index}: {gpu.name}, {gpu.architecture}" for gpu in gpus.devices)
    if environment.toolchain.value:
        for name in ("nvcc", "ninja"):
            tool = getattr(environment.toolchain.value, name)
            version = (tool.value and tool.value.version) or "of unknown version"
            lines.append(f"{name} {version} at {tool.value.path}" if tool.value else f"{name}: {tool.reason}")
    lines.extend(f"{one.name}={one.value} ({one.origin.value})" for one in environment.variables.value or ())
    for cache in environment.caches.value or ():
        state = "writable" if cache.writable else f"not writable: {cache.reason}"
        lines.append(f"cache {cache.purpose.value}: {cache.path} ({state})")
    return [*lines, *_kernel_lines(environment)]


def _kernel_lines(environment: Environment) -> list[str]:
    files = environment.kernels.value
    if files is None or files.batched_gemm is None:
        return []
    lines = [f"FP4 MoE kernels wanted: {files.batched_gemm}"]
    folders = [folder for folder in (files.packaged, files.cached) if folder is not None]
    lines.extend(f"  {'in' if one.has_batched_gemm else 'not in'} {one.path}" for one in folders)
    lines.extend(f"compiled in a package: {one}" for one in files.prebuilt)
    lines.extend(f"compiled here: {one.path}" for one in files.compiled)
    return lines
