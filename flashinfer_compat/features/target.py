"""What a question is asked of: a FlashInfer, a GPU and the libraries beside them, as one frozen value."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from packaging.version import Version

from flashinfer_compat.architectures import parse_architecture
from flashinfer_compat.policy import PolicyRow
from flashinfer_compat.self_checks import SelfCheck
from flashinfer_compat.signatures.model import SymbolTable
from flashinfer_compat.signatures.recorded import recorded, releases
from flashinfer_compat.versions import parse_version

__all__ = ["TILEIRAS", "FlashInfer", "Target", "behaviour_of"]

TILEIRAS = "nvidia-cuda-tileiras"
"""The distribution of cuTile's compiler, which also comes with a CUDA toolkit from 13.1 on."""


@dataclass(frozen=True)
class FlashInfer:
    """A FlashInfer release, installed or recorded."""

    version: str
    """As the distribution gives it, local part included."""
    symbols: SymbolTable
    behaviour: Version | None
    """The release whose known behaviour applies; None where no known release has these signatures."""
    behaviour_source: str
    """How `behaviour` was found, in words."""


@dataclass(frozen=True)
class Target:
    """A FlashInfer, a GPU architecture and library versions."""

    flashinfer: FlashInfer | None
    flashinfer_problem: str
    """Why there is no FlashInfer; empty where there is one."""
    architecture: str | None
    """Such as sm100; None where there is no GPU."""
    torch_version: str | None
    """None where torch is not installed; "any" where it is taken to be."""
    libraries: Mapping[str, str] = field(default_factory=dict)
    """Versions of other distributions by name (cuda-tile, nvidia-cuda-tileiras, ...)."""
    torch_cuda: str | None = "any"
    """The CUDA that torch was built for; None for a build without, "any" where one that fits is taken for granted."""
    self_checks: tuple[SelfCheck, ...] = ()
    """What numeric self-checks found on this machine with this install."""
    policy: tuple[PolicyRow, ...] = ()
    """From how many tokens on split was measured to be faster than fused."""

    @staticmethod
    def from_release(version: str, architecture: str | None, torch_version: str | None = "any") -> Target:
        """A machine with a recorded release, on which everything that release requires is installed.

        Raises:
            UnknownReleaseError: the release is not recorded.
            UnknownNameError: the architecture is not known.
        """
        release = recorded(version)
        return Target(
            FlashInfer(version, release.symbols, parse_version(release.version), "recorded release"),
            "",
            parse_architecture(architecture) if architecture else None,
            torch_version,
            # A CUDA build of torch for Linux brings Triton, and a CUDA toolkit the compiler of cuTile.
            dict.fromkeys([*_distribution_names(release.requires), "triton", TILEIRAS], ""),
        )

    def to_dict(self) -> dict[str, Any]:
        """The target as plain JSON values, without the signatures."""
        found = self.flashinfer
        return {
            "flashinfer": found
            and {
                "version": found.version,
                "behaviour": str(found.behaviour) if found.behaviour else None,
                "behaviour_source": found.behaviour_source,
            },
            "flashinfer_problem": self.flashinfer_problem or None,
            "architecture": self.architecture,
            "torch": self.torch_version,
        }


def behaviour_of(version: str, symbols: SymbolTable) -> tuple[Version | None, str]:
    """Which release's rules apply to an installed FlashInfer, and how that is known.

    A version within the recorded range speaks for itself (nightlies fall between their neighbours). A newer one, and
    one that names no release, behaves like a recorded release only where every signature is the same.
    """
    named = parse_version(version)
    newest = releases()[-1]
    if named is not None and named <= Version(newest):
        return named, "version"
    # The oldest release that looks the same has the strictest limits.
    like = next((one for one in releases() if _looks_like(symbols, recorded(one).symbols)), None)
    if like is not None:
        return parse_version(like), f"its FP4 MoE signatures are those of {like}"
    if named is None:
        return None, f"version {version!r} names no release and no recorded release has its FP4 MoE signatures"
    return None, f"{version} is newer than {newest}, the newest recorded release, and its FP4 MoE signatures differ"


_TELLING = (
    "trtllm_fp4_block_scale_moe",
    "trtllm_fp4_block_scale_routed_moe",
    "fp4_quantize",
    "mm_fp4",
    "RoutingMethodType",
    "ActivationType",
    "RoutingInputMode",
)
"""The entry points by which an unnamed build is recognised: those that the planned calls use."""


def _looks_like(symbols: SymbolTable, other: SymbolTable) -> bool:
    for name in _TELLING:
        one, two = symbols.get(name), other.get(name)
        if one is None or two is None:
            if one is not two:
                return False
        elif (one.members, one.passing) != (two.members, two.passing):
            return False
    return True


def _distribution_names(requirements: tuple[str, ...]) -> list[str]:
    from packaging.requirements import InvalidRequirement, Requirement

    names = []
    for text in requirements:
        try:
            requirement = Requirement(text)
        except InvalidRequirement:
            continue
        if requirement.marker is None or "extra" not in str(requirement.marker):
            names.append(requirement.name.lower().replace("_", "-"))
    return names
