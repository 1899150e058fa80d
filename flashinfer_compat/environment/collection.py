"""Gathers the whole environment."""

from __future__ import annotations

import os
import sys
from typing import TYPE_CHECKING

from flashinfer_compat.environment.caches import gather_caches
from flashinfer_compat.environment.distributions import gather_distributions
from flashinfer_compat.environment.gpus import gather_gpus
from flashinfer_compat.environment.kernels import gather_kernels
from flashinfer_compat.environment.model import Environment, FileCheck, PythonRuntime
from flashinfer_compat.environment.packages import gather_packages
from flashinfer_compat.environment.reading import gather, path_entries
from flashinfer_compat.environment.toolchain import gather_toolchain
from flashinfer_compat.environment.torch_build import gather_torch
from flashinfer_compat.environment.variables import gather_variables

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

__all__ = ["collect"]


def collect(
    search_path: Sequence[str] | None = None,
    environ: Mapping[str, str] | None = None,
    check_files: FileCheck = FileCheck.MOE,
) -> Environment:
    """Describe this machine and what is installed on it.

    Imports and runs nothing of the packages it describes, starts no process, opens no connection, initialises no CUDA
    and writes nothing. Whatever cannot be read becomes the reason of its own section; nothing is raised.

    Args:
        search_path: Directories to look for packages in; .pth files in them are not followed. None means this
            interpreter's own (`sys.path` and its import finders).
        environ: Environment variables; None means this process's own.
        check_files: How closely to compare installed files with the RECORD they were installed with.
    """
    variables = os.environ if environ is None else environ
    distributions = gather(lambda: gather_distributions(search_path, check_files))
    found = distributions.value.found if distributions.value else ()
    packages = gather(lambda: gather_packages(search_path, found))
    caches = gather(lambda: gather_caches(variables))
    return Environment(
        python=gather(lambda: _gather_python(search_path)),
        distributions=distributions,
        packages=packages,
        torch=gather(lambda: gather_torch(search_path)),
        gpus=gather(lambda: gather_gpus(variables)),
        toolchain=gather(lambda: gather_toolchain(variables, search_path)),
        variables=gather(lambda: gather_variables(environ)),
        caches=caches,
        kernels=gather(lambda: gather_kernels(packages.value or (), caches.value or ())),
    )


def _gather_python(search_path: Sequence[str] | None) -> PythonRuntime:
    system = os.uname() if hasattr(os, "uname") else None
    return PythonRuntime(
        version=sys.version.split()[0],
        implementation=sys.implementation.name,
        executable=sys.executable or None,
        platform=sys.platform,
        kernel=system.release if system else None,
        machine=system.machine if system else None,
        libc=_libc(),
        search_path=path_entries(search_path),
    )


def _libc() -> str | None:
    try:
        return os.confstr("CS_GNU_LIBC_VERSION")
    except (AttributeError, OSError, ValueError):
        return None
