"""GPU architectures by the name CUDA gives them, such as sm100."""

from __future__ import annotations

import re

from flashinfer_compat.errors import UnknownNameError

__all__ = ["ARCHITECTURES", "parse_architecture"]

ARCHITECTURES: tuple[str, ...] = (
    "sm75",
    "sm80",
    "sm86",
    "sm87",
    "sm89",
    "sm90",
    "sm100",
    "sm103",
    "sm107",
    "sm110",
    "sm120",
    "sm121",
)
"""Those that FlashInfer's releases name."""

_RENAMED = {"sm101": "sm110"}
"""CUDA 13.0 gave Thor another name."""

_FORMS = re.compile(r"(?:sm_?)?(\d{2,3})[af]?|(\d{1,2})\.(\d)[af]?")


def parse_architecture(text: str) -> str:
    """The architecture that `sm100`, `sm_100a`, `100`, `10.0` or `10.0a` names.

    Raises:
        UnknownNameError: none of the known ones.
    """
    match = _FORMS.fullmatch(str(text).strip().lower())
    name = "sm" + (match.group(1) or f"{match.group(2)}{match.group(3)}") if match else str(text)
    if name not in ARCHITECTURES:
        raise UnknownNameError("architecture", str(text), ARCHITECTURES, _RENAMED.get(name))
    return name
