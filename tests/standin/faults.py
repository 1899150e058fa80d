"""What a refused call raises. The wrapper's own checks raise ValueError, AssertionError and so on, as there."""

from __future__ import annotations

__all__ = ["BackendSupportedError", "DeviceFaultError", "LaunchError", "NotATensorError", "need"]


class LaunchError(RuntimeError):
    """A check of the C++ launcher or of a routing kernel failed (TORCH_CHECK, TVM_FFI_ICHECK, FLASHINFER_CHECK)."""


class DeviceFaultError(RuntimeError):
    """The kernel reads a null pointer: on a GPU an illegal memory access, after which the process can do no more."""


class BackendSupportedError(Exception):
    """`flashinfer.utils.BackendSupportedError`: an unknown `mm_fp4` backend, or one this GPU cannot run."""


class NotATensorError(TypeError, AttributeError):
    """Something without a dtype where the wrapper expects a tensor."""


def need(condition: bool, message: str) -> None:
    """A check of the launcher.

    Raises:
        LaunchError: the condition does not hold.
    """
    if not condition:
        raise LaunchError(message)
