"""Reads how PyTorch was built from its version file; importing torch takes seconds and can initialise CUDA."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from flashinfer_compat.environment.model import TorchBuild
from flashinfer_compat.environment.packages import literals, locate
from flashinfer_compat.environment.reading import NotAvailableError

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["gather_torch"]


def gather_torch(search_path: Sequence[str] | None) -> TorchBuild:
    """The build that torch/version.py describes.

    Raises:
        NotAvailableError: torch is not installed, or its version file does not say.
    """
    spec = locate("torch", search_path)
    folders = list(spec.submodule_search_locations or ()) if spec else []
    if not folders:
        raise NotAvailableError("torch is not installed")
    path = Path(folders[0], "version.py")
    try:
        stated = literals(path)
    except (OSError, SyntaxError, ValueError) as error:
        raise NotAvailableError(f"{path} cannot be read: {error}") from error
    version = stated.get("__version__")
    if version is None:
        raise NotAvailableError(f"{path} states no __version__")
    return TorchBuild(version, stated.get("cuda"), stated.get("hip"), stated.get("git_version"))
