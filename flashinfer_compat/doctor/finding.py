"""One thing an operator should know."""

from __future__ import annotations

import enum
from dataclasses import dataclass

__all__ = ["DOCS", "Finding", "Group", "Severity"]

DOCS = "docs/findings"
"""The folder of this project that has a page for each code."""


class Severity(str, enum.Enum):
    """How much a finding matters."""

    ERROR = "error"
    """NVFP4 MoE will fail, or its numbers cannot be trusted."""
    WARNING = "warning"
    """It will run, but not as well as this machine could, or not as its operator thinks."""
    NOTE = "note"
    """Good to know."""


class Group(str, enum.Enum):
    """What a finding is about."""

    INSTALL = "install"
    VERSIONS = "versions"
    TORCH_AND_CUDA = "torch and CUDA"
    GPU = "GPU"
    KERNELS = "kernels"
    CACHES = "caches"
    VARIABLES = "variables"
    ENGINES = "engines"
    LIVE = "live"


@dataclass(frozen=True)
class Finding:
    """What is wrong, why it matters, and what to do."""

    code: str
    """Stable; programs may rely on it."""
    group: Group
    severity: Severity
    subject: str
    """What it is about: a distribution, a variable, an issue. Empty where the code says it all."""
    message: str
    """What is wrong."""
    why: str
    """Why it matters."""
    repair: str
    """A line for the shell; empty where no line repairs it."""
    advice: str
    """What to do beside or instead of the repair; can be empty."""

    @property
    def docs(self) -> str:
        """The page about the code."""
        return f"{DOCS}/{self.code}.md"

    def to_dict(self) -> dict[str, str]:
        """The finding as plain JSON values."""
        return {
            "code": self.code,
            "group": self.group.value,
            "severity": self.severity.value,
            "subject": self.subject,
            "message": self.message,
            "why": self.why,
            "repair": self.repair,
            "advice": self.advice,
            "docs": self.docs,
        }
