"""Whether torch can use a device that somebody named."""

from __future__ import annotations

from typing import TYPE_CHECKING

from flashinfer_compat.errors import ArgumentError

if TYPE_CHECKING:
    import torch

__all__ = ["usable_device"]


def usable_device(name: str, argument: str, *, computes: bool = False) -> torch.device:
    """The device that `name` means.

    Args:
        name: such as "cpu" or "cuda:0".
        argument: what the error calls it.
        computes: whether it must compute, as "meta" does not.

    Raises:
        ArgumentError: this torch cannot use it.
    """
    import torch

    try:
        device = torch.device(name)
        tensor = torch.zeros(1, device=device)
        if computes:
            tensor.item()
    # A CPU build answers "cuda" with an AssertionError, a missing driver with a RuntimeError.
    except (RuntimeError, AssertionError, NotImplementedError, TypeError) as error:
        does = "computes on" if computes else "can use"
        expected = f"a device that this torch {does}, such as 'cpu' or 'cuda:0'"
        # torch goes on for a page about where the kernels could be.
        lacks = isinstance(error, NotImplementedError)
        why = "it has no kernels for that" if lacks else str(error).splitlines()[0]
        raise ArgumentError(argument, expected, f"{name!r} ({why})") from error
    return device
