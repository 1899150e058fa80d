"""Tell what works for NVFP4 MoE on this machine, and what stands in the way.

Exit code: 0 nothing worse than notes, 1 warnings, 2 errors.
"""

from __future__ import annotations

import argparse
import json

from flashinfer_compat.cli.console import columns, heading, paragraph
from flashinfer_compat.doctor.examination import Examination, examine
from flashinfer_compat.environment import Environment, FileCheck

__all__ = ["HELP", "add_arguments", "run"]

HELP = "what works for NVFP4 MoE here, and what stands in the way"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The command's own options."""
    parser.add_argument(
        "--check-files",
        choices=[level.value for level in FileCheck],
        default=FileCheck.SIZES.value,
        help="how closely installed files are compared with their record (default: sizes)",
    )


def run(options: argparse.Namespace) -> int:
    """Examine and print."""
    examination = examine(FileCheck(options.check_files))
    if options.json:
        print(json.dumps(examination.to_dict(), indent=2))
    else:
        _print(examination)
    return examination.exit_code


def _print(examination: Examination) -> None:
    paragraph(examination.summary, indent=0)
    heading("Findings")
    for finding in examination.findings:
        label = f"{finding.severity.value} [{finding.code}]"
        paragraph(finding.message, label=label, style=finding.severity.value)
        if finding.repair:
            paragraph(finding.repair, label="Repair:", indent=4)
    if not examination.findings:
        paragraph("None.")
    heading("Environment")
    for line in _environment_lines(examination.environment):
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


def _environment_lines(environment: Environment) -> list[str]:
    lines = []
    if environment.python.value:
        lines.append(f"Python {environment.python.value.version} on {environment.python.value.machine}")
    found = environment.distributions.value.found if environment.distributions.value else ()
    lines.extend(
        f"{one.name} {one.version} in {one.location} (files: {one.files.state.value.replace('_', ' ')})"
        for one in found
    )
    lines.extend(
        f"import {one.name} loads {one.location}"
        for one in environment.packages.value or ()
        if one.owner is None and one.origin is not None
    )
    torch = environment.torch.value
    if torch:
        lines.append(f"torch built for CUDA {torch.cuda}" if torch.cuda else "torch built without CUDA")
    gpus = environment.gpus.value
    if gpus is None:
        lines.append(f"GPU: {environment.gpus.reason}")
    else:
        lines.extend(f"GPU {gpu.index}: {gpu.name}, {gpu.architecture}" for gpu in gpus.devices)
        lines.append(f"NVIDIA driver {gpus.driver_version}, for CUDA up to {gpus.driver_cuda_version}")
    if environment.toolchain.value:
        for name in ("nvcc", "ninja"):
            tool = getattr(environment.toolchain.value, name)
            version = (tool.value and tool.value.version) or "of unknown version"
            lines.append(f"{name} {version} at {tool.value.path}" if tool.value else f"{name}: {tool.reason}")
    lines.extend(f"{one.name}={one.value} ({one.origin.value})" for one in environment.variables.value or ())
    for cache in environment.caches.value or ():
        state = "writable" if cache.writable else f"not writable: {cache.reason}"
        lines.append(f"cache {cache.purpose.value}: {cache.path} ({state})")
    return lines
