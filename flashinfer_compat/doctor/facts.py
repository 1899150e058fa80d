"""What the checks look at: the environment, the capabilities, and questions about both that several checks ask."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

from packaging.version import Version

from flashinfer_compat.features.table import TRTLLM_GEN
from flashinfer_compat.signatures.recorded import releases
from flashinfer_compat.versions import at_least, parse_version

if TYPE_CHECKING:
    from flashinfer_compat.doctor.live import LiveImport
    from flashinfer_compat.environment import CubinFolder, Distribution, Environment, ImportablePackage, KernelFiles
    from flashinfer_compat.features.target import FlashInfer
    from flashinfer_compat.report import Capabilities

__all__ = ["UNKNOWN_VERSION", "Facts"]

UNKNOWN_VERSION = "0.0.0+unknown"
"""What a FlashInfer without build information calls itself (version.py)."""


@dataclass(frozen=True)
class Facts:
    """One machine. Nothing here reads anything."""

    environment: Environment
    report: Capabilities
    live: LiveImport | None = None
    """What importing FlashInfer gave; None where it was not tried."""
    policy_problem: str = ""
    """Why the policy file that a variable names cannot be used here; empty where none is named, or it can."""
    made_up: bool = False
    """Whether it is the machine of a question, of which only release, GPU, torch and CUDA are known."""

    @property
    def flashinfer(self) -> FlashInfer | None:
        """The FlashInfer that would be imported."""
        return self.report.target.flashinfer

    @property
    def architecture(self) -> str | None:
        """The GPU's, such as sm100; None where there is none."""
        return self.report.target.architecture

    @property
    def package(self) -> ImportablePackage | None:
        """The flashinfer package."""
        return self.environment.package("flashinfer")

    @cached_property
    def own_version(self) -> str | None:
        """`flashinfer.__version__`, which FlashInfer compares its kernel packages with; None without FlashInfer."""
        if self.flashinfer is None or self.package is None:
            return None
        return self.package.version_from_source or self.flashinfer.version

    @cached_property
    def rules(self) -> Version | None:
        """The release whose rules apply; of an unknown FlashInfer those of the newest recorded one."""
        if self.flashinfer is None:
            return None
        return self.flashinfer.behaviour or Version(releases()[-1])

    def since(self, release: str) -> bool:
        """Whether the rules are those of `release` or a newer one."""
        return self.rules is not None and at_least(self.rules, release)

    def between(self, first: str, later: str) -> bool:
        """Whether the rules are those of `first` or newer, but older than those of `later`."""
        return self.since(first) and not self.since(later)

    def variable(self, name: str) -> str:
        """The value of an environment variable; empty where it is not set, as `os.getenv` users take it."""
        return self.setting(name) or ""

    def setting(self, name: str) -> str | None:
        """The value of an environment variable; None where it is not set."""
        found = (one for one in self.environment.variables.value or () if one.name == name)
        return next((one.value for one in found), None)

    def first_copy(self, distribution: str) -> Distribution | None:
        """The copy of a distribution that counts."""
        return next(iter(self.environment.copies(distribution)), None)

    def package_version(self, package: str, distribution: str) -> str | None:
        """`__version__` of a package that can be imported; None where it cannot, or states none."""
        found = self.environment.package(package)
        if found is None or found.origin is None:
            return None
        copy = self.first_copy(distribution)
        return found.version_from_source or (copy.version if copy else None)

    @cached_property
    def covers_gpu(self) -> bool:
        """Whether this FlashInfer release has trtllm-gen FP4 MoE kernels for this GPU."""
        since = TRTLLM_GEN.get(self.architecture or "")
        return since is not None and self.since(since)

    @cached_property
    def has_kernels(self) -> bool:
        """Whether they can be called: the entry point is in the source too."""
        return (
            self.covers_gpu
            and self.flashinfer is not None
            and self.flashinfer.symbols.get("trtllm_fp4_block_scale_moe") is not None
        )

    @property
    def kernels(self) -> KernelFiles | None:
        """The kernel files, where they could be looked for."""
        return self.environment.kernels.value

    @cached_property
    def compiles(self) -> bool:
        """Whether the FP4 MoE kernels must be compiled on this machine before they run."""
        return self.has_kernels and not self.has_prebuilt

    @cached_property
    def has_prebuilt(self) -> bool:
        """Whether an installed package brings the FP4 MoE compiled for this GPU, and FlashInfer takes it."""
        prebuilt = self.kernels.prebuilt if self.kernels else ()
        if any(one.startswith("flashinfer/") for one in prebuilt):
            return True
        if not self.takes_jit_cache:
            return False
        if self.since("0.7.0rc3"):
            return bool(self.jit_cache_providers)
        return any(one.startswith("flashinfer_jit_cache/") for one in prebuilt)

    @cached_property
    def takes_jit_cache(self) -> bool:
        """Whether FlashInfer loads from the installed flashinfer-jit-cache."""
        version = self.package_version("flashinfer_jit_cache", "flashinfer-jit-cache")
        if version is None or self.own_version is None or not self.since("0.4.0"):
            return False
        unchecked = bool(self.variable("FLASHINFER_DISABLE_VERSION_CHECK")) or self.is_exempt
        return unchecked or self.accepts_jit_cache(version)

    @cached_property
    def is_exempt(self) -> bool:
        """Whether FlashInfer leaves out its version checks because it does not know its own version."""
        return self.own_version == UNKNOWN_VERSION and self.since("0.6.10rc1")

    def accepts_jit_cache(self, version: str) -> bool:
        """FlashInfer's own comparison (jit/env.py): the beginning only, until 0.7.0rc3 made it exact."""
        own = self.own_version or ""
        if self.since("0.7.0rc3"):
            return version == own or version.startswith(f"{own}+")
        return version.startswith(own)

    @cached_property
    def jit_cache_providers(self) -> tuple[str, ...]:
        """FlashInfer 0.7.0 and later: the installed parts of flashinfer-jit-cache whose kernels run on this GPU."""
        shim = self.package_version("flashinfer_jit_cache", "flashinfer-jit-cache")
        found = self.environment.distributions.value.found if self.environment.distributions.value else ()
        return tuple(
            one.name
            for one in found
            if one.name.startswith("flashinfer-jit-cache-")
            and one.version == shim
            and _runs_on(one.name.removeprefix("flashinfer-jit-cache-"), self.architecture)
        )

    @cached_property
    def cubins(self) -> CubinFolder | None:
        """The folder FlashInfer takes cubins from (jit/env.py, `_get_cubin_dir`)."""
        files = self.kernels
        if files is None:
            return None
        chosen = bool(self.variable("FLASHINFER_CUBIN_DIR"))
        if files.packaged is None or not self.since("0.4.0") or (chosen and self.since("0.6.16rc3")):
            return files.cached
        if not self.since("0.7.2rc3") or self.takes_cubin_package:
            return files.packaged
        return files.cached

    @cached_property
    def takes_cubin_package(self) -> bool:
        """Whether the version of flashinfer-cubin is right or is not looked at."""
        version = self.package_version("flashinfer_cubin", "flashinfer-cubin")
        unchecked = bool(self.variable("FLASHINFER_DISABLE_VERSION_CHECK")) or self.is_exempt
        return version is not None and (version == self.own_version or unchecked)

    @cached_property
    def public_version(self) -> str | None:
        """The release that kernel packages must have; None where FlashInfer does not say."""
        version = parse_version(self.own_version or "")
        return str(version) if version else None


def _runs_on(tag: str, architecture: str | None) -> bool:
    """FlashInfer 0.7.4, jit/_cuda_architecture.py: `a` needs the same GPU, `f` and none a newer one of the family."""
    if architecture is None:
        return False
    kind, digits = tag[-1:], tag.removeprefix("sm").rstrip("af")
    if kind == "a" or not digits.isdecimal():
        return f"sm{digits}" == architecture
    own = architecture.removeprefix("sm")
    return digits[:-1] == own[:-1] and digits[-1] <= own[-1]
