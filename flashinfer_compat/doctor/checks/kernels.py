"""Can the FP4 MoE kernels of this release be compiled and downloaded, where they must be?"""

from __future__ import annotations

import shlex
from collections.abc import Iterator
from pathlib import Path

from packaging.version import Version

from flashinfer_compat.doctor.check import Checks, Found
from flashinfer_compat.doctor.facts import Facts
from flashinfer_compat.doctor.finding import Group, Severity
from flashinfer_compat.doctor.repairs import install_cubins, install_jit_cache, remove
from flashinfer_compat.versions import parse_version

__all__ = ["CHECKS"]

CHECKS = Checks(Group.KERNELS)

_FIRST_NVCC = {"sm100": "12.8", "sm103": "12.9", "sm107": "12.9"}
"""The first nvcc for compute_100a, compute_103a and the family compute_100f, which are what FlashInfer compiles for."""


@CHECKS.add("nvcc-missing", "The FP4 MoE kernels are compiled at the first call, and no package brings them compiled.")
def _nvcc_missing(facts: Facts) -> Iterator[Found]:
    toolchain = facts.environment.toolchain.value
    if not facts.compiles or toolchain is None or toolchain.nvcc.reason is None or facts.variable("FLASHINFER_NVCC"):
        return
    compiled = any(one.release == facts.own_version for one in (facts.kernels.compiled if facts.kernels else ()))
    repair = install_jit_cache(facts)
    yield Found(
        Severity.WARNING if compiled else Severity.ERROR,
        f"There is {toolchain.nvcc.reason}"
        + ("; the kernels that were compiled earlier still work until a setting changes." if compiled else "."),
        repair,
        _install_toolkit(_FIRST_NVCC.get(facts.architecture or "", "12.8"), repair),
    )


@CHECKS.add("nvcc-too-old", "It cannot compile FP4 instructions: kernels fail to build, or are built without FP4.")
def _nvcc_too_old(facts: Facts) -> Iterator[Found]:
    tool = facts.environment.toolchain.value.nvcc.value if facts.environment.toolchain.value else None
    first = _FIRST_NVCC.get(facts.architecture or "")
    version = parse_version(tool.version) if tool and tool.version else None
    if facts.compiles and tool and version and first and version < Version(first):
        repair = install_jit_cache(facts)
        yield Found(
            Severity.ERROR,
            f"nvcc {tool.version} ({tool.path}) is too old for {facts.architecture}, which needs {first}.",
            repair,
            _install_toolkit(first, repair),
        )


def _install_toolkit(version: str, repair: str) -> str:
    return f"{'Or install' if repair else 'Install'} the CUDA toolkit {version} or newer, and set CUDA_HOME."


@CHECKS.add("ninja-missing", "FlashInfer runs ninja by name before it loads a module, even one compiled earlier.")
def _ninja_missing(facts: Facts) -> Iterator[Found]:
    ninja = facts.environment.toolchain.value.ninja if facts.environment.toolchain.value else None
    if not facts.compiles or ninja is None:
        return
    if ninja.value is None:
        yield Found(Severity.ERROR, f"There is {ninja.reason}.", "pip install ninja")
    elif "not on PATH" in ninja.value.origin:
        folder = shlex.quote(str(Path(ninja.value.path).parent))
        yield Found(Severity.ERROR, f"{ninja.value.path} is not on PATH.", f'export PATH={folder}:"$PATH"')


@CHECKS.add("jit-disabled", "FlashInfer may not compile, and no package brings the FP4 MoE kernels compiled.")
def _jit_disabled(facts: Facts) -> Iterator[Found]:
    if facts.compiles and facts.since("0.4.0") and facts.variable("FLASHINFER_DISABLE_JIT"):
        jit_cache = install_jit_cache(facts)
        yield Found(
            Severity.ERROR,
            "FLASHINFER_DISABLE_JIT is set, but the FP4 MoE kernels have to be compiled here.",
            "unset FLASHINFER_DISABLE_JIT",
            f"Or run: {jit_cache}" if jit_cache else "",
        )


@CHECKS.add("arch-list-wrong", "FlashInfer compiles for exactly these GPUs; a value it cannot read stops the import.")
def _arch_list_wrong(facts: Facts) -> Iterator[Found]:
    given = facts.setting("FLASHINFER_CUDA_ARCH_LIST")
    if given is None or not facts.since("0.3.1"):
        return
    architecture = facts.architecture
    wanted = f"{architecture[2:-1]}.{architecture[-1]}a" if architecture else ""
    repair = f"export FLASHINFER_CUDA_ARCH_LIST={wanted}" if wanted else "unset FLASHINFER_CUDA_ARCH_LIST"
    entries = given.split(" ")
    # compilation_context.py: entries are split at single spaces and at one point.
    wrong = next((one for one in entries if not _is_capability(one)), None)
    if wrong is not None:
        yield Found(
            Severity.ERROR,
            f"FLASHINFER_CUDA_ARCH_LIST={given!r} cannot be read at {wrong!r}; FlashInfer wants entries such as 10.0a "
            "with one space between them, and import flashinfer raises ValueError.",
            repair,
        )
    elif facts.compiles and architecture and not any(_covers(one, architecture, facts) for one in entries):
        yield Found(Severity.ERROR, f"FLASHINFER_CUDA_ARCH_LIST={given!r} leaves out this GPU, {architecture}.", repair)


def _is_capability(entry: str) -> bool:
    major, point, minor = entry.partition(".")
    return bool(point) and major.isdecimal() and minor.rstrip("af").isdecimal() and len(minor) <= 2


def _covers(entry: str, architecture: str, facts: Facts) -> bool:
    major, _, minor = entry.partition(".")
    if f"sm{major}" != architecture[:-1]:
        return False
    if minor.endswith("f"):
        return minor[:-1] <= architecture[-1]
    # FlashInfer adds the missing "a", without which there are no FP4 instructions, since 0.6.7.
    return minor.rstrip("a") == architecture[-1] and (minor.endswith("a") or facts.since("0.6.7"))


@CHECKS.add("cubins-missing", "The FP4 MoE runs prebuilt kernels (cubins); without network the first call fails.")
def _cubins_missing(facts: Facts) -> Iterator[Found]:
    folder, artifact = facts.cubins, facts.kernels.batched_gemm if facts.kernels else None
    if not facts.has_kernels or folder is None or folder.has_batched_gemm is not False:
        return
    message = f"{folder.path} does not hold the kernels of FlashInfer {facts.own_version} ({artifact})"
    repair = install_cubins(facts)
    chosen = folder.origin == "FLASHINFER_CUBIN_DIR"
    if chosen and repair:
        repair = f"unset FLASHINFER_CUBIN_DIR && {repair}"
    if facts.variable("FLASHINFER_NO_DOWNLOAD") and facts.since("0.6.7.post1"):
        yield Found(
            Severity.ERROR, f"{message}, and FLASHINFER_NO_DOWNLOAD forbids to download them.", repair, _copy(repair)
        )
    else:
        yield Found(
            Severity.WARNING if chosen else Severity.NOTE,
            f"{message}; the first call downloads them.",
            repair,
            _copy(repair),
        )


def _copy(repair: str) -> str:
    return "" if repair else "No package has them: call once with network, and copy the folder to machines without."


@CHECKS.add("cubins-unwritable", "FlashInfer writes there before the first FP4 MoE call: PermissionError.")
def _cubins_unwritable(facts: Facts) -> Iterator[Found]:
    folder = facts.cubins
    if not facts.has_kernels or folder is None or folder.path is None or folder.writable:
        return
    packaged = folder.origin == "flashinfer_cubin"
    if not packaged and folder.origin != "FLASHINFER_CUBIN_DIR":
        return  # It lies in the workspace, of which cache-unwritable tells.
    # These releases make a link to C++ headers in the folder even when every cubin is there (jit/fused_moe.py).
    links = facts.between("0.6.5", "0.6.16rc3")
    if links or folder.has_batched_gemm is False:
        movable = not packaged or facts.since("0.6.16rc3")
        yield Found(
            Severity.ERROR,
            f"FlashInfer {facts.own_version} has to write into {folder.path}, but cannot: {folder.reason}.",
            'export FLASHINFER_CUBIN_DIR="$(mktemp -d)"' if movable else f"chmod -R a+rwX {shlex.quote(folder.path)}",
            "" if movable else "Run it as the owner of that folder, as when the image is built.",
        )


@CHECKS.add("cubin-directory-ignored", "Kernels are read from and written to the package instead.")
def _cubin_directory_ignored(facts: Facts) -> Iterator[Found]:
    packaged = facts.kernels.packaged if facts.kernels else None
    if facts.variable("FLASHINFER_CUBIN_DIR") and packaged is not None and facts.between("0.4.0", "0.6.16rc3"):
        yield Found(
            Severity.WARNING,
            f"FlashInfer {facts.own_version} ignores FLASHINFER_CUBIN_DIR, because flashinfer-cubin is installed.",
            "pip uninstall -y flashinfer-cubin",
        )


@CHECKS.add("headers-stale", "The first FP4 MoE call raises RuntimeError: 'Detected inconsistent cached artifacts'.")
def _headers_stale(facts: Facts) -> Iterator[Found]:
    folder, artifact = facts.cubins, facts.kernels.batched_gemm if facts.kernels else None
    if not facts.has_kernels or folder is None or folder.path is None or not facts.between("0.6.5", "0.6.7.post1"):
        return
    if artifact is not None and folder.headers_of not in (None, artifact):
        headers = Path(folder.path, "flashinfer", "trtllm", "batched_gemm", "trtllmGen_bmm_export")
        yield Found(
            Severity.ERROR,
            f"The C++ headers in {headers} are of another release ({folder.headers_of}).",
            remove(str(headers)),
        )
