"""The real SGLang on a CPU: what a process must do before it imports it. The process is changed for good."""

from __future__ import annotations

import importlib.util
from typing import Any

import torch

__all__ = ["make_torchvision_importable"]

_kept: list[Any] = []


def make_torchvision_importable() -> None:
    """Declare the two operators for which torchvision asks at import; its library fits CUDA builds of torch only."""
    if importlib.util.find_spec("torchvision") is None:
        return
    library = torch.library.Library("torchvision", "FRAGMENT")
    for name in ("nms", "qnms"):
        library.define(f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
    _kept.append(library)
