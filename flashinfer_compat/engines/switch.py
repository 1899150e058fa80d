"""The environment variables that switch the plugins on."""

from __future__ import annotations

import os

__all__ = ["is_on"]

_ON = ("1", "true", "yes", "on")


def is_on(variable: str) -> bool:
    """Whether an environment variable is `1`, `true`, `yes` or `on`."""
    return os.environ.get(variable, "").strip().lower() in _ON
