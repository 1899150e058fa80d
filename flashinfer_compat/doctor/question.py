"""What a machine that need not exist is made of: what was asked, and where the rest of it comes from."""

from __future__ import annotations

import enum
import re
from dataclasses import dataclass, fields

from packaging.version import InvalidVersion, Version

from flashinfer_compat.architectures import parse_architecture
from flashinfer_compat.doctor.repairs import newest_release
from flashinfer_compat.environment import TorchBuild
from flashinfer_compat.errors import ArgumentError
from flashinfer_compat.features.target import Target
from flashinfer_compat.signatures.recorded import recorded

__all__ = ["ANY", "Asked", "Premise", "Question", "Source", "premise_of_architecture", "question_of"]

ANY = "any"
"""Of torch's version, or of the CUDA it is built for: one that fits the rest."""
_NONE = "none"


class Source(str, enum.Enum):
    """Where a premise comes from."""

    ASKED = "asked"
    THIS_MACHINE = "this machine"
    TORCH_VERSION = "torch version"
    """The local part of the version that was asked, such as +cu129."""
    ASSUMED = "assumed"
    """Neither asked, nor is there anything on this machine that could be taken."""


@dataclass(frozen=True)
class Premise:
    """One thing that is taken to be so."""

    value: str | None
    """None where there is none of it."""
    source: Source

    def to_dict(self) -> dict[str, str | None]:
        """The premise as plain JSON values."""
        return {"value": self.value, "source": self.source.value}


@dataclass(frozen=True)
class Asked:
    """The options as they were given: a version, an architecture, `none`, or None where nothing was said."""

    flashinfer: str | None = None
    architecture: str | None = None
    torch: str | None = None
    cuda: str | None = None

    @property
    def anything(self) -> bool:
        """Whether there is a question at all."""
        return any(getattr(self, field.name) is not None for field in fields(self))


@dataclass(frozen=True)
class Question:
    """A whole machine, as far as release, GPU, torch and CUDA make one."""

    flashinfer: Premise
    architecture: Premise
    torch: Premise
    """`ANY` where neither told nor taken from this machine."""
    cuda: Premise
    """What torch is built for; None without torch or in a build without CUDA. Where asked, of the toolkit too."""

    def to_dict(self) -> dict[str, dict[str, str | None]]:
        """The question as plain JSON values."""
        return {field.name: getattr(self, field.name).to_dict() for field in fields(self)}


def question_of(asked: Asked, here: Target, torch: TorchBuild | None) -> Question:
    """The question that `asked` makes, with the rest taken from this machine where that makes sense.

    Args:
        asked: the options.
        here: this machine.
        torch: this machine's.

    Raises:
        UnknownReleaseError: the FlashInfer release is not recorded.
        UnknownNameError: the architecture is not known.
        ArgumentError: a version is none, or torch's own says another CUDA.
    """
    architecture = premise_of_architecture(asked.architecture, here.architecture)
    # This machine's torch without CUDA says nothing about a machine that has a GPU.
    other_kind = torch is not None and torch.cuda is None and architecture.source is Source.ASKED
    taken = None if other_kind and architecture.value is not None else torch
    return Question(
        _flashinfer(asked.flashinfer, here),
        architecture,
        _torch(asked, torch if asked.cuda else taken),
        _cuda(asked, taken),
    )


def premise_of_architecture(asked: str | None, here: str | None) -> Premise:
    """The GPU that was asked for, otherwise this machine's.

    Raises:
        UnknownNameError: it is not known.
    """
    if asked is None:
        return Premise(here, Source.THIS_MACHINE)
    return Premise(None if asked == _NONE else parse_architecture(asked), Source.ASKED)


def _flashinfer(asked: str | None, here: Target) -> Premise:
    if asked is not None:
        recorded(asked)
        return Premise(asked, Source.ASKED)
    if here.flashinfer is not None:
        return Premise(here.flashinfer.version, Source.THIS_MACHINE)
    return Premise(newest_release(), Source.ASSUMED)


def _torch(asked: Asked, here: TorchBuild | None) -> Premise:
    if asked.torch is not None:
        return Premise(None if asked.torch == _NONE else str(_torch_version(asked.torch)), Source.ASKED)
    if here is None:
        return Premise(ANY, Source.ASSUMED)
    # Its local part names the CUDA that it has, not the one that is asked about.
    return Premise(here.version.partition("+")[0] if asked.cuda else here.version, Source.THIS_MACHINE)


def _cuda(asked: Asked, here: TorchBuild | None) -> Premise:
    told = _cuda_in(asked.torch) if asked.torch not in (None, _NONE) else ANY
    if asked.cuda is not None:
        if asked.cuda != _NONE and not re.fullmatch(r"\d{1,2}(\.\d+){1,2}", asked.cuda):
            raise ArgumentError("--cuda", "a version such as 12.8, or none", repr(asked.cuda))
        cuda = None if asked.cuda == _NONE else asked.cuda
        if told != ANY and (told and Version(told).release) != (cuda and Version(cuda).release[:2]):
            expected = f"{told or _NONE}, as --torch {asked.torch} says"
            raise ArgumentError("--cuda", expected, asked.cuda, "Leave one of the two out.")
        return Premise(cuda, Source.ASKED)
    if asked.torch == _NONE:
        return Premise(None, Source.ASKED)
    if asked.torch is not None:
        return Premise(told, Source.ASSUMED if told == ANY else Source.TORCH_VERSION)
    return Premise(ANY, Source.ASSUMED) if here is None else Premise(here.cuda, Source.THIS_MACHINE)


def _torch_version(text: str) -> Version:
    try:
        return Version(text)
    except InvalidVersion:
        raise ArgumentError("--torch", "a version such as 2.9.0 or 2.9.0+cu129, or none", repr(text)) from None


def _cuda_in(torch_version: str | None) -> str | None:
    """The CUDA that the local part of torch's version names: None in `+cpu`, `ANY` where it names nothing."""
    local = _torch_version(torch_version or "").local or ""
    if local.startswith(("cpu", "rocm")):
        return None
    match = re.fullmatch(r"cu(\d{2})(\d)", local)
    return f"{match[1]}.{match[2]}" if match else ANY
