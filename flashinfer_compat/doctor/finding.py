"""One thing an operator should know."""

from __future__ import annotations

import enum
from dataclasses import dataclass

__all__ = ["Finding", "Severity"]


class Severity(str, enum.Enum):
    """How much a finding matters."""

    ERROR = "error"
    """NVFP4 MoE will fail, or its numbers cannot be trusted."""
    WARNING = "warning"
    """It will run, but not as well as this machine could, or not as its operator thinks."""
    NOTE = "note"
    """Good to know."""


@dataclass(frozen=True)
class Finding:
    """What is wrong, why it matters, and what to type."""

    code: str
    """Stable; programs may rely on it."""
    severity: Severity
    message: str
    repair: str = ""

    def to_dict(self) -> dict[str, str]:
        """The finding as plain JSON values."""
        return {"code": self.code, "severity": self.severity.value, "message": self.message, "repair": self.repair}
