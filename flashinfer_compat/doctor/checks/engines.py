"""Do the engines installed beside FlashInfer expect the release that is installed?"""

from __future__ import annotations

from collections.abc import Iterator

from packaging.requirements import InvalidRequirement, Requirement
from packaging.version import InvalidVersion, Version

from flashinfer_compat.doctor.check import Checks, Found
from flashinfer_compat.doctor.facts import Facts
from flashinfer_compat.doctor.finding import Group, Severity

__all__ = ["CHECKS"]

CHECKS = Checks(Group.ENGINES)

_ENGINES = ("sglang", "vllm", "tensorrt-llm")


@CHECKS.add("engine-pin", "The engine calls FlashInfer as that release wants it and was tested with no other.")
def _engine_pin(facts: Facts) -> Iterator[Found]:
    for engine in _ENGINES:
        copy = facts.first_copy(engine)
        if copy is None:
            continue
        wrong, wanted = [], []
        for requirement in _pins(copy.requires):
            installed = facts.first_copy(requirement.name)
            wanted.append(f"'{requirement.name}{requirement.specifier}'")
            version = _version(installed.version if installed else None)
            if version is not None and not requirement.specifier.contains(version, prereleases=True):
                wrong.append(f"{requirement.name}{requirement.specifier}, and {version} is installed")
        if wrong:
            yield Found(
                Severity.WARNING,
                f"{engine} {copy.version} requires {'; '.join(wrong)}.",
                f"pip install {' '.join(wanted)}",
                subject=engine,
            )


def _pins(lines: tuple[str, ...]) -> Iterator[Requirement]:
    for line in lines:
        if not line.lower().startswith("flashinfer"):
            continue
        try:
            requirement = Requirement(line)
        except InvalidRequirement:
            continue
        requirement.name = requirement.name.lower().replace("_", "-")
        if requirement.marker is None or requirement.marker.evaluate({"extra": ""}):
            yield requirement


def _version(text: str | None) -> Version | None:
    try:
        return Version(text) if text else None
    except InvalidVersion:
        return None
