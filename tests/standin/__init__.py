"""A stand-in for FlashInfer's NVFP4 kernels: what each recorded release computes and refuses, in plain PyTorch.

The trtllm-gen kernels need a Blackwell GPU. The stand-in takes exactly what they take (shuffled weights, swizzled
scales, scalars, precomputed top-k) and computes what they compute, on whatever device the tensors are:

    with standin.installed("0.7.4") as flashinfer:
        ...  # import flashinfer now finds fake modules
    flashinfer.calls[-1].arguments["top_k"]

Each function has the recorded signature and really binds its arguments. What the release's Python wrapper or C++
launcher refuses raises here; what it silently misreads comes back as NaN, and `Call.garbage` says why. Where a release
divides by zero in the host code, which ends the process, ZeroDivisionError is raised instead.

Every fact was read in FlashInfer's sources and is summed up in docs/launcher-limits.md; none was tried on a GPU. The
GPU is taken to be an SM100. Release candidates count as the release they lead to, unless a source says otherwise.
"""

from __future__ import annotations

from standin.calls import UNSET, Call
from standin.faults import BackendSupportedError, DeviceFaultError, LaunchError, NotATensorError
from standin.install import StandIn, installed, release

__all__ = [
    "UNSET",
    "BackendSupportedError",
    "Call",
    "DeviceFaultError",
    "LaunchError",
    "NotATensorError",
    "StandIn",
    "installed",
    "release",
]
