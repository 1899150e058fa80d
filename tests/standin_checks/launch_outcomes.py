"""A launch of the sample with changed arguments, and how it ends: good, refused or misread."""

from __future__ import annotations

from typing import Any

import pytest
import standin
import torch
from launches import ROUTED, Layer


def run(layer: Layer, version: str, entry: str = ROUTED, shared: bool = False, **changes: Any) -> Any:
    flashinfer = standin.release(version)
    result = flashinfer.objects[entry](**layer.arguments(flashinfer, entry, shared=shared, **changes))
    return flashinfer.calls[-1], result


def good(layer: Layer, version: str, entry: str = ROUTED, shared: bool = False, **changes: Any) -> torch.Tensor:
    call, result = run(layer, version, entry, shared, **changes)
    assert call.garbage == []
    found: torch.Tensor = result[0]
    return found


def refused(layer: Layer, version: str, outcome: type[Exception], entry: str = ROUTED, **changes: Any) -> None:
    with pytest.raises(outcome):
        run(layer, version, entry, **changes)


def misread(layer: Layer, version: str, entry: str = ROUTED, **changes: Any) -> None:
    call, [output, *_] = run(layer, version, entry, **changes)
    assert call.garbage
    assert output.isnan().all()
