"""This machine as a planning target: the environment's facts and the installed FlashInfer's signatures."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

from flashinfer_compat.environment import Environment, FileCheck, Gpu, ImportablePackage, cache_directory, collect
from flashinfer_compat.errors import ArgumentError
from flashinfer_compat.features.target import TILEIRAS, FlashInfer, Target, behaviour_of
from flashinfer_compat.planning import plan as planning
from flashinfer_compat.policy_files import load_policy
from flashinfer_compat.problem import Problem
from flashinfer_compat.signatures.cache import read_installed
from flashinfer_compat.verified import load
from flashinfer_compat.versions import parse_version

if TYPE_CHECKING:
    from flashinfer_compat.planning.decision import Plan
    from flashinfer_compat.signatures.model import SymbolTable
    from flashinfer_compat.vocabulary import Backend, Evidence, Strategy

__all__ = [
    "architecture_of",
    "gpu_of",
    "plan",
    "read_flashinfer",
    "target_of",
    "this_environment",
    "this_machine",
    "this_machine_without_policy",
]


@cache
def this_environment() -> Environment:
    """The environment, gathered once in a process; installed files are not compared with their records."""
    return collect(check_files=FileCheck.NONE)


@cache
def this_machine() -> Target:
    """This machine, looked at once in a process. Neither torch nor flashinfer is imported.

    Raises:
        PolicyError: FLASHINFER_COMPAT_POLICY names a file that is missing, no policy, or of another GPU.
    """
    environment = this_environment()
    gpu = gpu_of(environment)
    return replace(this_machine_without_policy(), policy=load_policy(environment, gpu.name if gpu else None))


@cache
def this_machine_without_policy() -> Target:
    """This machine for who names a strategy, which no policy speaks of; a broken policy file does not matter."""
    environment = this_environment()
    return replace(target_of(environment, read_flashinfer(environment)), self_checks=load(environment))


def plan(
    problem: Problem,
    target: Target | None = None,
    *,
    strategy: Strategy | str = planning.AUTO,
    backend: Backend | str = planning.AUTO,
    require: Evidence | str | None = None,
) -> Plan:
    """How `problem` will run on `target`, which is this machine unless given; see `planning.plan.plan`."""
    for name, value, kind in (("problem", problem, Problem), ("target", target or this_machine(), Target)):
        if not isinstance(value, kind):
            raise ArgumentError(name, f"a {kind.__name__}", type(value).__name__)
    return planning.plan(problem, target or this_machine(), strategy=strategy, backend=backend, require=require)


def read_flashinfer(environment: Environment) -> SymbolTable | None:
    """The signatures of the FlashInfer that would be imported; None where there is none."""
    package = environment.package("flashinfer")
    if package is None or package.location is None or package.origin is None or package.is_module:
        return None
    directory = cache_directory().value
    return read_installed(Path(package.location).parent, Path(directory) if directory else None)


def target_of(environment: Environment, symbols: SymbolTable | None) -> Target:
    """The planning target that an environment and its FlashInfer's signatures amount to."""
    package = environment.package("flashinfer")
    flashinfer, problem = None, ""
    if package is None:
        problem = environment.packages.reason or "flashinfer is not installed."
    elif symbols is None:
        what = "a single file" if package.is_module else "a folder without an __init__.py"
        problem = f"{package.origin or package.location} is {what}, not the FlashInfer package."
    else:
        version = _version(package)
        flashinfer = FlashInfer(version, symbols, *behaviour_of(version, symbols))
    distributions = environment.distributions.value.found if environment.distributions.value else ()
    return Target(
        flashinfer,
        problem,
        architecture_of(environment),
        environment.torch.value.version if environment.torch.value else None,
        _compiler_of_cutile(environment) | {one.name: one.version or "" for one in reversed(distributions)},
        environment.torch.value.cuda if environment.torch.value else None,
    )


def _compiler_of_cutile(environment: Environment) -> dict[str, str]:
    """The tileiras of a CUDA toolkit lies beside nvcc and does what the distribution's would."""
    tool = environment.toolchain.value.nvcc.value if environment.toolchain.value else None
    return {TILEIRAS: ""} if tool is not None and Path(tool.path).with_name("tileiras").is_file() else {}


def _version(package: ImportablePackage) -> str:
    """What the source says of itself where that differs from the metadata beside it, which may be of another copy."""
    owner, own = package.owner.version if package.owner else None, package.version_from_source
    if own and parse_version(own) and (not owner or parse_version(own) != parse_version(owner)):
        return own
    return owner or own or "0.0.0+unknown"


def architecture_of(environment: Environment) -> str | None:
    """The architecture of the first GPU that CUDA_VISIBLE_DEVICES leaves; None where there is none."""
    gpu = gpu_of(environment)
    return gpu.architecture if gpu else None


def gpu_of(environment: Environment) -> Gpu | None:
    """The first GPU that CUDA_VISIBLE_DEVICES leaves; None where there is none."""
    gpus = environment.gpus.value
    if gpus is None:
        return None
    first = None if gpus.visible is None else gpus.visible.split(",")[0].strip()
    if first is None:
        chosen = gpus.devices[:1]
    elif first.isdecimal():
        chosen = tuple(gpu for gpu in gpus.devices if gpu.index == int(first))
    else:
        # CUDA hides every GPU from a value that names none, such as "" or "-1".
        chosen = tuple(gpu for gpu in gpus.devices if first and gpu.uuid and gpu.uuid.startswith(first))
    return chosen[0] if chosen else None
