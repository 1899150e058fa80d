"""Gathers the facts, runs the checks, and sums up."""

from __future__ import annotations

import os
from dataclasses import dataclass, replace
from typing import Any

from flashinfer_compat import __version__
from flashinfer_compat.doctor.checks import CHECKS
from flashinfer_compat.doctor.facts import Facts
from flashinfer_compat.doctor.finding import Finding, Severity
from flashinfer_compat.doctor.live import LiveImport, import_flashinfer
from flashinfer_compat.doctor.made_up import made_up_environment, made_up_target
from flashinfer_compat.doctor.question import Asked, Question, question_of
from flashinfer_compat.environment import Environment, FileCheck, collect
from flashinfer_compat.features.target import Target
from flashinfer_compat.machine import gpu_of, read_flashinfer, target_of
from flashinfer_compat.policy import PolicyError
from flashinfer_compat.policy_files import VARIABLE, load_policy
from flashinfer_compat.report import Capabilities, StrategyState, capabilities_of
from flashinfer_compat.self_checks import SelfCheck
from flashinfer_compat.verified import load
from flashinfer_compat.vocabulary import Backend, Evidence, RoutingInput

__all__ = ["SCHEMA_VERSION", "Examination", "examine", "examine_asked", "examine_environment"]

SCHEMA_VERSION = 1
"""Raised when a field changes its meaning or goes; schemas/doctor-1.json describes this one."""

_DECIDING = ("version-conflict", "installed-twice")
"""Codes of findings that decide which release is to be installed; the last one of those found counts."""
_OF_ONE_COPY = (
    "files-changed",
    "metadata-broken",
    "package-missing",
    "package-unreadable",
    "record-missing",
    "release-incomplete",
    "version-conflict",
)
"""Codes of findings about one installed copy, whose repairs could contradict theirs."""
_STOP_PLANNING = frozenset({"policy-unusable"})
"""Codes of findings that keep even the torch backend from being planned."""
_EXIT = {Severity.NOTE: 0, Severity.WARNING: 1, Severity.ERROR: 2}


@dataclass(frozen=True)
class Examination:
    """What the doctor found."""

    environment: Environment
    capabilities: Capabilities
    findings: tuple[Finding, ...]
    """Errors first."""
    live: LiveImport | None = None
    """What importing FlashInfer gave; None where it was not tried."""
    question: Question | None = None
    """The machine that was asked about; None where a real one was examined."""

    @property
    def exit_code(self) -> int:
        """0: nothing worse than notes; 1: warnings; 2: errors."""
        return max((_EXIT[finding.severity] for finding in self.findings), default=0)

    @property
    def summary(self) -> str:
        """What works for NVFP4 MoE, with which strategy, and how that is known."""
        where = "there" if self.question else "here"
        best = [_best(self.capabilities, routing_input) for routing_input in RoutingInput]
        able = [one for one in best if one is not None]
        if len(able) < len(best):
            return f"NVFP4 MoE cannot run {where}."
        ways = " and ".join(
            f"{one.strategy.value} on {one.backend.value} from {one.routing_input.value} ({one.status.value})"
            for one in able
        )
        errors = sum(finding.severity is Severity.ERROR for finding in self.findings)
        until = (
            f"until the {f'{errors} errors' if errors > 1 else 'error'} below {'are' if errors > 1 else 'is'} repaired"
        )
        stopped = any(finding.code in _STOP_PLANNING for finding in self.findings)
        if stopped or (errors and any(one.backend is not Backend.TORCH for one in able)):
            return f"NVFP4 MoE is not expected to work {where} {until}; then it runs as {ways}."
        # The torch backend computes without FlashInfer.
        broken = f" FlashInfer itself is not expected to work {until}." if errors else ""
        return f"NVFP4 MoE with a shared expert runs as {ways}.{broken}"

    def to_dict(self) -> dict[str, Any]:
        """The examination as plain JSON values, as schemas/doctor-1.json describes them."""
        return {
            "schema_version": SCHEMA_VERSION,
            "flashinfer_compat": __version__,
            "question": self.question.to_dict() if self.question else None,
            "summary": self.summary,
            "exit_code": self.exit_code,
            "findings": [finding.to_dict() for finding in self.findings],
            "live": self.live.to_dict() if self.live else None,
            "capabilities": self.capabilities.to_dict(),
            "environment": self.environment.to_dict(),
        }


def _best(capabilities: Capabilities, routing_input: RoutingInput) -> StrategyState | None:
    states = (one for one in capabilities.strategies if one.routing_input is routing_input)
    return next((one for one in states if one.status not in (Evidence.ABSENT, Evidence.REFUTED)), None)


def examine(check_files: FileCheck = FileCheck.MOE, live_limit: float | None = None) -> Examination:
    """Examine this machine. Neither torch nor flashinfer is imported here, nothing is written but a signature cache.

    Args:
        check_files: How closely installed files are compared with their record.
        live_limit: Seconds to try importing FlashInfer for, in another process; None does not try.
    """
    environment = collect(check_files=check_files)
    symbols = read_flashinfer(environment)
    live = None if live_limit is None or symbols is None else import_flashinfer(symbols, live_limit)
    return examine_environment(environment, live, load(environment), _policy_problem(environment))


def _policy_problem(environment: Environment) -> str:
    """Why planning cannot use the policy file that a variable names; empty where it can, or none is named."""
    if not os.environ.get(VARIABLE):
        return ""
    gpu = gpu_of(environment)
    try:
        load_policy(environment, gpu.name if gpu else None)
    except PolicyError as error:
        return f"{error.subject}: expected {error.expected}, got {error.actual}."
    return ""


def examine_environment(
    environment: Environment,
    live: LiveImport | None = None,
    self_checks: tuple[SelfCheck, ...] = (),
    policy_problem: str = "",
) -> Examination:
    """Examine a machine whose facts are gathered already."""
    target = replace(target_of(environment, read_flashinfer(environment)), self_checks=self_checks)
    return _examined(environment, target, live=live, policy_problem=policy_problem)


def examine_asked(asked: Asked, environment: Environment | None = None) -> Examination:
    """Examine a machine that need not exist, from recorded data.

    Args:
        asked: What is known of it.
        environment: The machine that the rest is taken from; None means this one.

    Raises:
        ArgumentError: what was asked names no release, GPU or version, or contradicts itself.
    """
    real = environment or collect(check_files=FileCheck.NONE)
    here = target_of(real, read_flashinfer(real))
    question = question_of(asked, here, real.torch.value)
    target = made_up_target(question, here)
    return _examined(made_up_environment(question, target, real), target, question=question)


def _examined(
    environment: Environment,
    target: Target,
    *,
    live: LiveImport | None = None,
    policy_problem: str = "",
    question: Question | None = None,
) -> Examination:
    report = capabilities_of(target)
    facts = Facts(environment, report, live, policy_problem, made_up=question is not None)
    findings = _agreeing([finding for check in CHECKS for finding in check.findings(facts)])
    findings.sort(key=lambda finding: -_EXIT[finding.severity])
    return Examination(environment, report, tuple(findings), live, question)


def _agreeing(findings: list[Finding]) -> list[Finding]:
    """The findings, without repairs of a copy where another finding decides which release is to be installed."""
    first = {finding.subject: finding.code for code in _DECIDING for finding in findings if finding.code == code}
    return [
        replace(finding, repair="", advice=f"First do what {first[finding.subject]} says.")
        if finding.code in _OF_ONE_COPY and first.get(finding.subject, finding.code) != finding.code
        else finding
        for finding in findings
    ]
