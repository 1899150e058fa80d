"""The machine of a question, as the values that checks look at: nothing of it is read from files."""

from __future__ import annotations

from dataclasses import replace

from flashinfer_compat.doctor.question import ANY, Question, Source
from flashinfer_compat.environment import (
    Distribution,
    Distributions,
    Environment,
    FileCheck,
    Gpu,
    Gpus,
    ImportablePackage,
    KernelFiles,
    Owner,
    RecordCheck,
    RecordState,
    Section,
    Tool,
    Toolchain,
    TorchBuild,
)
from flashinfer_compat.environment.distributions import is_relevant
from flashinfer_compat.features.target import Target

__all__ = ["made_up_environment", "made_up_target"]

_NOT_KNOWN = "not part of the question"
_UNCHECKED = RecordCheck(RecordState.NOT_CHECKED, FileCheck.NONE, reason=_NOT_KNOWN)


def made_up_target(question: Question, here: Target) -> Target:
    """The planning target. A recorded release has everything installed that it requires; nothing was run there."""
    if question.flashinfer.source is not Source.THIS_MACHINE:
        version, architecture = str(question.flashinfer.value), question.architecture.value
        target = Target.from_release(version, architecture, question.torch.value)
    else:
        target = replace(here, architecture=question.architecture.value, torch_version=question.torch.value)
    return replace(target, torch_cuda=question.cuda.value, self_checks=())


def made_up_environment(question: Question, target: Target, real: Environment) -> Environment:
    """The environment. What only files, drivers or variables tell is empty or unknown, so its checks stay silent."""
    version = target.flashinfer.version if target.flashinfer else None
    apart = ("flashinfer-python", "torch", "triton")
    libraries = (name for name in target.libraries if is_relevant(name) and name not in apart)
    distributions = (_distribution("flashinfer-python", version), *(_distribution(name, None) for name in libraries))
    return Environment(
        python=Section(reason=_NOT_KNOWN),
        distributions=Section(Distributions(distributions, ())),
        packages=Section((_package(question, version, real),)),
        torch=_torch(question),
        gpus=_gpus(question),
        toolchain=_toolchain(question),
        variables=Section(()),
        caches=Section(()),
        kernels=Section(KernelFiles(None, None, None, (), ())),
    )


def _distribution(name: str, version: str | None) -> Distribution:
    return Distribution(name, version, "", "", False, None, (), _UNCHECKED)


def _package(question: Question, version: str | None, real: Environment) -> ImportablePackage:
    installed = real.package("flashinfer")
    if question.flashinfer.source is Source.THIS_MACHINE and installed is not None:
        return replace(installed, shadowed=False)
    return ImportablePackage("flashinfer", None, None, Owner("flashinfer-python", version), None, False)


def _torch(question: Question) -> Section[TorchBuild]:
    if question.torch.value is None:
        return Section(reason="torch is not installed")
    # Checks tell the version in sentences.
    version = "of any version" if question.torch.value == ANY else question.torch.value
    return Section(TorchBuild(version, question.cuda.value, None, None))


def _gpus(question: Question) -> Section[Gpus]:
    architecture = question.architecture.value
    if architecture is None:
        asked = question.architecture.source is Source.ASKED
        return Section(reason="as was asked" if asked else "as on this machine")
    capability = int(architecture[2:-1]), int(architecture[-1])
    return Section(Gpus(None, None, (Gpu(0, architecture, capability, None, None),), None))


def _toolchain(question: Question) -> Section[Toolchain]:
    # Only who names a CUDA speaks of the toolkit too; what torch was built with may be another.
    if question.cuda.source is not Source.ASKED or question.cuda.value is None:
        return Section(reason=_NOT_KNOWN)
    nvcc = Tool("--cuda", question.cuda.value, "--cuda", "--cuda")
    ninja = Tool("ninja", None, _NOT_KNOWN, "taken to be there")
    return Section(Toolchain(Section(nvcc), Section(ninja)))
