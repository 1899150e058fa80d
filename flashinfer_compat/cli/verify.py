"""Check numerically, on this machine, every way to run NVFP4 MoE that planning lets through, and keep the result.

Small fixed layers are run with 0, 1, 3 and 130 tokens and compared with a computation in float64. What agrees is
`verified` from then on in plan, capabilities and doctor; what does not is `refuted` and never chosen by itself. The
result holds for exactly this install, GPU and driver.

Exit code: 0 all agree, 1 some are refuted, 2 nothing could be checked.
"""

from __future__ import annotations

import argparse
import json
from dataclasses import replace

from flashinfer_compat.cli.console import paragraph
from flashinfer_compat.cli.interrupts import raise_if_interrupted
from flashinfer_compat.errors import DependencyMissingError
from flashinfer_compat.self_checks import SelfCheck
from flashinfer_compat.vocabulary import Backend, Evidence, parse

__all__ = ["HELP", "add_arguments", "run"]

HELP = "check the numbers of every strategy on this machine"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The command's own options."""
    parser.add_argument("--device", help="cpu or cuda:N (default: the GPU if torch sees one)")
    names = ", ".join(one.value for one in Backend)
    parser.add_argument("--backend", action="append", metavar="NAME", help=f"only {names} (may be given twice)")
    parser.add_argument("--no-store", action="store_true", help="do not keep the result")


def run(options: argparse.Namespace) -> int:
    """Check, print, keep."""
    try:
        import torch
    except ImportError as error:
        raise DependencyMissingError("torch", "verify") from error
    from flashinfer_compat.machine import this_environment, this_machine_without_policy
    from flashinfer_compat.verification.run import obstacles, self_checks
    from flashinfer_compat.verified import store
    from flashinfer_compat.weights.devices import usable_device

    device = usable_device(
        options.device or ("cuda" if torch.cuda.is_available() else "cpu"), "--device", computes=True
    )
    target = this_machine_without_policy()
    # What ran on a CPU says nothing about the GPU that plans are made for.
    backends = [parse(Backend, one, "--backend") for one in options.backend or ()] or list(Backend)
    why_not = "asked not to" if options.no_store else ""
    if set(backends) != set(Backend):
        why_not = "only some backends were checked"
    if device.type == "cpu" and target.architecture is not None:
        why_not = "a run on the CPU says nothing about this machine's GPU"
        target = replace(target, architecture=None)
    raise_if_interrupted()
    checks = []
    for check in self_checks(target, device, backends):
        checks.append(check)
        if not options.json:
            _print(check)
        raise_if_interrupted()
    checked = {check.kind.backend for check in checks}
    not_run = {one.value: obstacles(target, device, one) for one in backends if one.value not in checked}
    path = None
    if not why_not:
        try:
            path = store(this_environment(), checks)
            why_not = "" if path else "there is no cache directory"
        except OSError as error:
            why_not = str(error)
    refuted = sum(one.verdict is Evidence.REFUTED for one in checks)
    if options.json:
        content = {
            "device": str(device),
            "checks": [one.to_dict() for one in checks],
            "not_run": {name: [one.to_dict() for one in reasons] for name, reasons in not_run.items()},
            "stored_in": str(path) if path else None,
        }
        print(json.dumps(content, indent=2))
    else:
        for name, reasons in not_run.items():
            paragraph(" ".join(map(str, reasons)), label=f"not run on {name}:", indent=0)
        paragraph(f"{len(checks) - refuted} of {len(checks)} verified on {device}, {refuted} refuted.", indent=0)
        paragraph(f"Kept in {path}" if path else f"Not kept: {why_not}.", indent=0)
    return 2 if not checks else int(refuted > 0)


def _print(check: SelfCheck) -> None:
    if check.verdict is Evidence.VERIFIED:
        found = f"error {check.relative_error:.1e}, {check.microseconds:.0f} us with 130 tokens"
    else:
        found = check.problem
    paragraph(f"{check.kind}: {found}", label=check.verdict.value, style=check.verdict.value, indent=0)
