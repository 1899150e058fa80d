"""How far an output is from what it should be."""

from __future__ import annotations

import torch


def error(output: torch.Tensor, expected: torch.Tensor) -> float:
    """Relative, in Frobenius norms."""
    return float((output.double() - expected.double()).norm() / expected.double().norm())
