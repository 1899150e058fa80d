"""Does the installed FlashInfer read the FLASHINFER_* variables that are set?"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterator, Mapping

from flashinfer_compat.doctor.check import Checks, Found
from flashinfer_compat.doctor.facts import Facts
from flashinfer_compat.doctor.finding import Group, Severity
from flashinfer_compat.doctor.variables import known_variables, read_by, spans
from flashinfer_compat.policy_files import VARIABLE as POLICY

__all__ = ["CHECKS"]

CHECKS = Checks(Group.VARIABLES)

_INSTEAD = {
    "FLASHINFER_CACHE_DIR": "FLASHINFER_WORKSPACE_BASE",
    "FLASHINFER_CUBINS_DIR": "FLASHINFER_CUBIN_DIR",
    "FLASHINFER_JIT_DIR": "FLASHINFER_WORKSPACE_BASE",
    "FLASHINFER_WORKSPACE_DIR": "FLASHINFER_WORKSPACE_BASE",
}
"""Names of FlashInfer's Python constants that people take for variables, and what they can set instead."""


def _level(value: str) -> None:
    """As `logging.Logger.setLevel(value.upper())`, without importing logging for it."""
    if value.upper() not in _LEVELS:
        raise ValueError(f"Unknown level: {value!r}")


_LEVELS = ("CRITICAL", "DEBUG", "ERROR", "FATAL", "INFO", "NOTSET", "WARN", "WARNING")
_READ_AT_IMPORT: Mapping[str, tuple[Callable[[str], object], str]] = {
    "FLASHINFER_DUMP_MAX_COUNT": (int, "a whole number"),
    "FLASHINFER_DUMP_MAX_SIZE_GB": (float, "a number"),
    "FLASHINFER_LOGGING_LEVEL": (_level, "a level such as info or debug"),
    "FLASHINFER_LOGLEVEL": (int, "a whole number such as 0, 1, 3 or 5"),
}
"""What `import flashinfer` makes of a value, and what it should be (0.7.4, api_logging.py and jit/core.py)."""
_CLOSE = 0.9
"""How alike two names must be (`difflib` ratio) for one to be a slip of the other."""


@CHECKS.add("variable-unknown", "No FlashInfer release reads it, so it has no effect.")
def _variable_unknown(facts: Facts) -> Iterator[Found]:
    for name in _set(facts):
        if name in known_variables():
            continue
        near = difflib.get_close_matches(name, sorted(known_variables()), n=1, cutoff=_CLOSE)
        meant = _INSTEAD.get(name) or next(iter(near), None)
        # Build files and engines use names of their own: only a likely slip is worth a warning.
        yield Found(
            Severity.WARNING if meant else Severity.NOTE,
            f"{name} is not a variable of FlashInfer" + (f"; {meant} is." if meant else "."),
            f'export {meant}="${name}" && unset {name}' if near and name not in _INSTEAD else "",
            subject=name,
        )


@CHECKS.add("variable-ignored", "This release does not read it, so it has no effect.")
def _variable_ignored(facts: Facts) -> Iterator[Found]:
    read = read_by(facts.rules) if facts.rules else None
    for name in _set(facts):
        if read is None or name in read or name not in known_variables():
            continue
        runs = ", ".join(first if first == last else f"{first} to {last}" for first, last in spans(name))
        yield Found(
            Severity.WARNING,
            f"{name} is set, but FlashInfer {facts.own_version} does not read it; releases {runs} do.",
            f"unset {name}",
            subject=name,
        )


@CHECKS.add("variable-unreadable", "It is read while FlashInfer is imported: import flashinfer raises ValueError.")
def _variable_unreadable(facts: Facts) -> Iterator[Found]:
    read = read_by(facts.rules) if facts.rules else None
    for name, (taken, expected) in _READ_AT_IMPORT.items():
        value = facts.setting(name)
        if value is None or name not in (read or ()):
            continue
        try:
            taken(value)
        except ValueError:
            yield Found(
                Severity.ERROR,
                f"{name}={value!r} cannot be read; FlashInfer {facts.own_version} wants {expected}.",
                f"unset {name}",
                subject=name,
            )


@CHECKS.add("policy-unusable", "Every plan for this machine fails while the variable names it.")
def _policy_unusable(facts: Facts) -> Iterator[Found]:
    if facts.policy_problem:
        advice = "Or measure here with: python -m flashinfer_compat bench --write-policy"
        yield Found(Severity.ERROR, facts.policy_problem, f"unset {POLICY}", advice, POLICY)


def _set(facts: Facts) -> list[str]:
    if facts.flashinfer is None:
        return []
    names = (one.name for one in facts.environment.variables.value or ())
    return [name for name in names if name.startswith("FLASHINFER_") and not name.startswith("FLASHINFER_COMPAT_")]
