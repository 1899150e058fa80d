"""The environment as frozen values: what is installed, on what machine, under which settings.

Nothing here reads anything; `collect` fills these values. All paths are strings. CUDA versions are strings such as
"13.0" or "13.0.88".
"""

from __future__ import annotations

import enum
from dataclasses import dataclass, fields, is_dataclass
from pathlib import PurePath
from typing import Any, Generic, TypeVar, cast

from flashinfer_compat.errors import ArgumentError

__all__ = [
    "Beside",
    "CacheDirectory",
    "CachePurpose",
    "CompiledModule",
    "CubinFolder",
    "Distribution",
    "Distributions",
    "Environment",
    "EnvironmentVariable",
    "FileCheck",
    "Gpu",
    "Gpus",
    "ImportablePackage",
    "KernelFiles",
    "Owner",
    "PythonRuntime",
    "RecordCheck",
    "RecordState",
    "Section",
    "Tool",
    "Toolchain",
    "TorchBuild",
    "VariableOrigin",
    "to_plain",
]

T = TypeVar("T")


@dataclass(frozen=True)
class Section(Generic[T]):
    """A part of the environment, or why it could not be read: exactly one of the two is set."""

    value: T | None = None
    reason: str | None = None

    def __post_init__(self) -> None:
        if (self.value is None) == (self.reason is None):
            found = "neither" if self.value is None else "both"
            raise ArgumentError("Section", "exactly one of value and reason", found)


class FileCheck(str, enum.Enum):
    """How closely installed files are compared with the RECORD their distribution was installed with."""

    NONE = "none"
    MOE = "moe"
    """Presence and size of what FP4 MoE runs: FlashInfer's Python files and compiled modules, the sources and cubins of
    its trtllm-gen MoE and quantizer, and the libraries it calls kernels through."""
    SIZES = "sizes"
    """Presence and size of all files of FlashInfer and of those libraries: one stat call a file."""
    HASHES = "hashes"
    """Presence, size and hash: reads every file."""


class RecordState(str, enum.Enum):
    """What comparing files with RECORD found."""

    MATCHES = "matches"
    DIFFERS = "differs"
    NO_RECORD = "no_record"
    """The distribution has no RECORD (a development install, or a system package manager's)."""
    NOT_CHECKED = "not_checked"
    """Not asked for, or RECORD cannot be read; `RecordCheck.reason` says which."""


@dataclass(frozen=True)
class RecordCheck:
    """The outcome of comparing one distribution's files with its RECORD."""

    state: RecordState
    level: FileCheck
    """The level asked for. Entries RECORD gives no size or hash for are checked for presence only."""
    checked: int = 0
    """Recorded files looked at; compiled .pyc files are not among them, since deleting or renewing them is normal."""
    missing: tuple[str, ...] = ()
    """Recorded paths that are not there or cannot be read."""
    changed: tuple[str, ...] = ()
    """Recorded paths whose size or hash differs, or that are no regular file any more."""
    reason: str | None = None

    @property
    def wrong(self) -> tuple[str, ...]:
        """Those missing or changed, modules of the package flashinfer first."""
        ranked = sorted(
            (*self.missing, *self.changed),
            key=lambda path: (not path.startswith("flashinfer/"), not path.endswith((".py", ".so"))),
        )
        return tuple(ranked)


@dataclass(frozen=True)
class Distribution:
    """One installed copy of a distribution, as its .dist-info or .egg-info describes it."""

    name: str
    """Normalised: lower case, words joined by "-"."""
    version: str | None
    """As written in the metadata, even if it is no PEP 440 version; None where the metadata gives none."""
    location: str
    """The search path entry it was found in."""
    metadata_path: str
    """Its .dist-info or .egg-info."""
    editable: bool
    source: str | None
    """The project folder of an editable install."""
    requires: tuple[str, ...]
    """The Requires-Dist lines."""
    files: RecordCheck
    problems: tuple[str, ...] = ()
    """What is wrong with the metadata."""

    @property
    def title(self) -> str:
        """Name and version, for a sentence."""
        return f"{self.name} {self.version or 'of unknown version'}"


@dataclass(frozen=True)
class Beside:
    """An installed distribution of which nothing but the name of its metadata folder was read."""

    name: str
    """Normalised."""
    version: str | None


@dataclass(frozen=True)
class Distributions:
    """The copies found of every distribution this package asks about."""

    found: tuple[Distribution, ...]
    """In search order: of several copies of one name, Python's metadata functions report the first."""
    unreadable: tuple[str, ...]
    """Search path entries that exist but cannot be listed, each with the reason."""
    beside: tuple[Beside, ...] = ()
    """What flashinfer-python requires too; of several copies, the first one."""


@dataclass(frozen=True)
class Owner:
    """The distribution a package folder belongs to."""

    name: str
    version: str | None


@dataclass(frozen=True)
class ImportablePackage:
    """What an import statement would load."""

    name: str
    origin: str | None
    """Its __init__.py (or the module file); None for a namespace folder."""
    location: str | None
    """Its folder; for a plain module, the folder the file is in."""
    owner: Owner | None
    """The distribution whose RECORD, or editable project folder, holds it."""
    version_from_source: str | None
    """`__version__` as its own source files state it."""
    shadowed: bool
    """Whether the installed distribution of this package (the first copy) is not the one that owns the folder."""

    @property
    def is_module(self) -> bool:
        """Whether it is a single file and no folder."""
        return self.origin is not None and not PurePath(self.origin).name.startswith("__init__.")


@dataclass(frozen=True)
class PythonRuntime:
    """The running interpreter."""

    version: str
    implementation: str
    executable: str | None
    platform: str
    """`sys.platform`."""
    kernel: str | None
    """The operating system's release; contains "microsoft" under WSL."""
    machine: str | None
    """Such as "x86_64"."""
    libc: str | None
    """Such as "glibc 2.36"; None where the C library does not say."""
    search_path: tuple[str, ...]
    """Where distributions and packages were looked for."""


@dataclass(frozen=True)
class TorchBuild:
    """How the installed PyTorch was built."""

    version: str
    cuda: str | None
    """None for a build without CUDA."""
    hip: str | None
    git: str | None


@dataclass(frozen=True)
class Gpu:
    """One GPU, as the driver reports it."""

    index: int
    """The driver's own number (PCI order), before CUDA_VISIBLE_DEVICES."""
    name: str
    compute_capability: tuple[int, int]
    uuid: str | None
    memory_bytes: int | None
    """None where the GPU shares the machine's memory."""

    @property
    def architecture(self) -> str:
        """Such as "sm90" or "sm120"."""
        major, minor = self.compute_capability
        return f"sm{major}{minor}"


@dataclass(frozen=True)
class Gpus:
    """The NVIDIA driver and every GPU it sees."""

    driver_version: str | None
    driver_cuda_version: str | None
    """The newest CUDA the driver supports."""
    devices: tuple[Gpu, ...]
    visible: str | None
    """CUDA_VISIBLE_DEVICES as given; it does not filter `devices`."""
    problems: tuple[str, ...] = ()
    """GPUs the driver counts but cannot describe, such as one that has fallen off the bus."""


@dataclass(frozen=True)
class Tool:
    """A build tool found on this machine; it was not run."""

    path: str
    version: str | None
    version_source: str
    """Where the version was read, or why it is unknown."""
    origin: str
    """How the tool was found."""


@dataclass(frozen=True)
class Toolchain:
    """What FlashInfer compiles kernels with."""

    nvcc: Section[Tool]
    ninja: Section[Tool]


class VariableOrigin(str, enum.Enum):
    """Where an environment variable got its value."""

    INHERITED = "inherited"
    """The process was started with it."""
    SET_IN_PROCESS = "set in process"
    """The process was started without it or with another value."""
    UNKNOWN = "unknown"
    """The system does not tell what the process was started with."""


@dataclass(frozen=True)
class EnvironmentVariable:
    """A variable that is set; secrets in its value are replaced by "***"."""

    name: str
    value: str
    origin: VariableOrigin


class CachePurpose(str, enum.Enum):
    """Whose files a cache directory holds."""

    FLASHINFER = "flashinfer"
    """FlashInfer's workspace: compiled modules and generated sources."""
    CUBINS = "cubins"
    """Where FlashInfer downloads prebuilt kernels to; a matching flashinfer-cubin package replaces the default one."""
    TRITON = "triton"
    OWN = "flashinfer_compat"


@dataclass(frozen=True)
class CacheDirectory:
    """A directory that caches are kept in; it may not exist yet."""

    purpose: CachePurpose
    path: str | None
    origin: str
    """The setting that chose the path."""
    exists: bool
    writable: bool
    """Whether it can be written to or, where it does not exist, created; decided without writing."""
    filesystem: str | None
    """The mount's type, such as "ext4"; None where the system does not tell."""
    is_network: bool | None
    """Whether that type is a network file system, on which file locks and renames are less dependable."""
    reason: str | None = None
    """Why `path` is None or not writable."""


@dataclass(frozen=True)
class CubinFolder:
    """A folder that FlashInfer can take prebuilt kernels (cubins) from."""

    path: str | None
    origin: str
    """The package or setting that chose the path."""
    exists: bool
    writable: bool
    reason: str | None
    """Why `path` is None or not writable."""
    has_batched_gemm: bool | None
    """Whether files of `KernelFiles.batched_gemm` are in it; None where that is not known."""
    headers_of: str | None
    """The artifact that FlashInfer 0.6.5 to 0.6.7 downloaded C++ headers of."""


@dataclass(frozen=True)
class CompiledModule:
    """A module of the FP4 MoE that FlashInfer compiled on this machine."""

    name: str
    release: str | None
    """The FlashInfer whose folder it lies in; None in the folder that all releases until 0.4.0 share."""
    architectures: str
    """The folder's name, such as "100a"."""
    path: str


@dataclass(frozen=True)
class KernelFiles:
    """Where the kernels of FlashInfer's FP4 MoE come from."""

    batched_gemm: str | None
    """The artifact of trtllm-gen kernels that the installed FlashInfer names; None where it names none."""
    packaged: CubinFolder | None
    """The folder inside the package flashinfer_cubin."""
    cached: CubinFolder | None
    """Where FlashInfer downloads to, or FLASHINFER_CUBIN_DIR."""
    prebuilt: tuple[str, ...]
    """Compiled modules of the FP4 MoE inside installed packages, as <package>/<module>."""
    compiled: tuple[CompiledModule, ...]


@dataclass(frozen=True)
class Environment:
    """Everything `collect` found."""

    python: Section[PythonRuntime]
    distributions: Section[Distributions]
    packages: Section[tuple[ImportablePackage, ...]]
    torch: Section[TorchBuild]
    gpus: Section[Gpus]
    toolchain: Section[Toolchain]
    variables: Section[tuple[EnvironmentVariable, ...]]
    caches: Section[tuple[CacheDirectory, ...]]
    kernels: Section[KernelFiles]

    def copies(self, name: str) -> tuple[Distribution, ...]:
        """Every copy found of the distribution with this normalised name, in search order."""
        found = self.distributions.value.found if self.distributions.value else ()
        return tuple(copy for copy in found if copy.name == name)

    def package(self, name: str) -> ImportablePackage | None:
        """What `import name` would load, or None."""
        return next((package for package in self.packages.value or () if package.name == name), None)

    def to_dict(self) -> dict[str, Any]:
        """The environment as plain JSON data."""
        return cast("dict[str, Any]", to_plain(self))


def to_plain(value: object) -> object:
    """`value` as JSON data: dataclasses become objects, enumerations their value, tuples arrays."""
    if is_dataclass(value):
        return {field.name: to_plain(getattr(value, field.name)) for field in fields(value)}
    if isinstance(value, enum.Enum):
        return value.value
    if isinstance(value, (tuple, list)):
        return [to_plain(item) for item in value]
    return value
