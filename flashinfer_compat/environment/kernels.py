"""Finds the files FlashInfer's FP4 MoE kernels come from: downloaded or packaged cubins, and compiled modules."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

from flashinfer_compat.environment.caches import describe_directory
from flashinfer_compat.environment.model import (
    CacheDirectory,
    CachePurpose,
    CompiledModule,
    CubinFolder,
    KernelFiles,
)
from flashinfer_compat.environment.mounts import read_mounts
from flashinfer_compat.environment.reading import read_regular

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from flashinfer_compat.environment.model import ImportablePackage

__all__ = ["MODULES", "gather_kernels"]

MODULES = ("fused_moe_trtllm_sm100", "fused_moe_trtllm_sm107", "fused_moe_sm100")
"""Names that releases gave the compiled module of the trtllm-gen FP4 MoE; the last one until 0.2.x."""


def gather_kernels(packages: Sequence[ImportablePackage], caches: Sequence[CacheDirectory]) -> KernelFiles:
    """The kernel files of the FlashInfer among `packages`, in its packages and in `caches`."""
    # A folder without an __init__.py, whose origin is None, is no package that FlashInfer could ask.
    folders = {one.name: Path(one.location) for one in packages if one.location is not None and one.origin is not None}
    directories = {cache.purpose: cache for cache in caches}
    cubins = directories.get(CachePurpose.CUBINS)
    artifact = _batched_gemm(folders["flashinfer"]) if "flashinfer" in folders else None
    return KernelFiles(
        batched_gemm=artifact,
        packaged=_packaged(folders.get("flashinfer_cubin"), artifact),
        cached=_cubin_folder(cubins, artifact) if cubins is not None else None,
        prebuilt=tuple(_prebuilt(folders)),
        compiled=tuple(_compiled(directories.get(CachePurpose.FLASHINFER))),
    )


def _batched_gemm(flashinfer: Path) -> str | None:
    """FlashInfer 0.7.4, artifacts.py, `ArtifactPath.TRTLLM_GEN_BMM`; the same since 0.2.9."""
    import ast

    try:
        tree = ast.parse(read_regular(flashinfer / "artifacts.py"))
    except (OSError, SyntaxError, ValueError):
        return None
    for node in tree.body:
        if isinstance(node, ast.ClassDef) and node.name == "ArtifactPath":
            for line in node.body:
                if (
                    isinstance(line, ast.AnnAssign)
                    and isinstance(line.target, ast.Name)
                    and line.target.id == "TRTLLM_GEN_BMM"
                    and isinstance(line.value, ast.Constant)
                ):
                    return str(line.value.value).rstrip("/")
    return None


def _packaged(package: Path | None, artifact: str | None) -> CubinFolder | None:
    """FlashInfer 0.7.4, jit/env.py: `flashinfer_cubin.get_cubin_dir()`."""
    if package is None:
        return None
    described = describe_directory(CachePurpose.CUBINS, package / "cubins", "flashinfer_cubin", read_mounts())
    return _cubin_folder(described, artifact)


def _cubin_folder(directory: CacheDirectory, artifact: str | None) -> CubinFolder:
    path = Path(directory.path) if directory.path else None
    return CubinFolder(
        path=directory.path,
        origin=directory.origin,
        exists=directory.exists,
        writable=directory.writable,
        reason=directory.reason,
        has_batched_gemm=_has_files(path / artifact) if path and artifact else None,
        headers_of=_headers_of(path) if path else None,
    )


def _has_files(folder: Path) -> bool:
    try:
        with os.scandir(folder) as entries:
            return any(entry.name.endswith((".cubin", "checksums.txt")) for entry in entries)
    except OSError:
        return False


def _headers_of(folder: Path) -> str | None:
    """FlashInfer 0.6.7, jit/cubin_loader.py, `download_trtllm_headers`."""
    path = folder / "flashinfer" / "trtllm" / "batched_gemm" / "trtllmGen_bmm_export" / ".artifact_hash"
    try:
        return read_regular(path).decode("utf-8").strip().rstrip("/")
    except (OSError, ValueError):
        return None


def _prebuilt(folders: dict[str, Path]) -> Iterator[str]:
    """Compiled modules inside the packages flashinfer and flashinfer_jit_cache."""
    for package, below in (("flashinfer", "data/aot"), ("flashinfer_jit_cache", "jit_cache")):
        for module in MODULES:
            if package in folders and (folders[package] / below / module / f"{module}.so").is_file():
                yield f"{package}/{module}"


def _compiled(cache: CacheDirectory | None) -> Iterator[CompiledModule]:
    """Modules that FlashInfer compiled here: <release>/<architectures>/cached_ops/<module>; no release until 0.4.0."""
    if cache is None or not cache.exists or cache.path is None:
        return
    root = Path(cache.path)
    for module in MODULES:
        for pattern in (f"*/*/cached_ops/{module}/{module}.so", f"*/cached_ops/{module}/{module}.so"):
            for library in _matching(root, pattern):
                parts = library.relative_to(root).parts
                yield CompiledModule(module, parts[0] if len(parts) == 5 else None, parts[-4], str(library))


def _matching(root: Path, pattern: str) -> list[Path]:
    try:
        return sorted(root.glob(pattern))
    except OSError:
        return []
