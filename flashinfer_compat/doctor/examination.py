"""Gathers the facts, runs the checks, and sums up."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from flashinfer_compat.doctor.checks import CHECKS
from flashinfer_compat.doctor.finding import Finding, Severity
from flashinfer_compat.environment import Environment, FileCheck, collect
from flashinfer_compat.machine import read_flashinfer, target_of
from flashinfer_compat.report import Capabilities, capabilities_of
from flashinfer_compat.vocabulary import Evidence, RoutingInput

__all__ = ["Examination", "examine", "examine_environment"]

_EXIT = {Severity.NOTE: 0, Severity.WARNING: 1, Severity.ERROR: 2}


@dataclass(frozen=True)
class Examination:
    """What the doctor found."""

    environment: Environment
    capabilities: Capabilities
    findings: tuple[Finding, ...]
    """Errors first."""

    @property
    def exit_code(self) -> int:
        """0: nothing worse than notes; 1: warnings; 2: errors."""
        return max((_EXIT[finding.severity] for finding in self.findings), default=0)

    @property
    def summary(self) -> str:
        """One sentence: what works for NVFP4 MoE here."""
        best = []
        for routing_input in RoutingInput:
            states = [one for one in self.capabilities.strategies if one.routing_input is routing_input]
            able = next((one for one in states if one.status is not Evidence.ABSENT), None)
            if able is None:
                return "NVFP4 MoE cannot run here."
            best.append(
                f"{able.strategy.value} on {able.backend.value} from {routing_input.value} ({able.status.value})"
            )
        return f"NVFP4 MoE with a shared expert runs as {' and '.join(best)}."

    def to_dict(self) -> dict[str, Any]:
        """The examination as plain JSON values."""
        return {
            "summary": self.summary,
            "exit_code": self.exit_code,
            "findings": [finding.to_dict() for finding in self.findings],
            "capabilities": self.capabilities.to_dict(),
            "environment": self.environment.to_dict(),
        }


def examine(check_files: FileCheck = FileCheck.SIZES) -> Examination:
    """Examine this machine. Neither torch nor flashinfer is imported, nothing is written but a signature cache."""
    return examine_environment(collect(check_files=check_files))


def examine_environment(environment: Environment) -> Examination:
    """Examine a machine whose facts are gathered already."""
    report = capabilities_of(target_of(environment, read_flashinfer(environment)))
    findings = [finding for check in CHECKS for finding in check(environment, report)]
    findings.sort(key=lambda finding: -_EXIT[finding.severity])
    return Examination(environment, report, tuple(findings))
