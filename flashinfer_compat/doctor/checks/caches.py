"""Can FlashInfer keep what it compiles, and is what it kept of this release?"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from flashinfer_compat.doctor.check import Checks, Found
from flashinfer_compat.doctor.facts import UNKNOWN_VERSION, Facts
from flashinfer_compat.doctor.finding import Group, Severity
from flashinfer_compat.doctor.repairs import remove
from flashinfer_compat.environment import CacheDirectory, CachePurpose

__all__ = ["CHECKS"]

CHECKS = Checks(Group.CACHES)

_SETTINGS = {
    CachePurpose.FLASHINFER: "FLASHINFER_WORKSPACE_BASE",
    CachePurpose.TRITON: "TRITON_CACHE_DIR",
    CachePurpose.OWN: "FLASHINFER_COMPAT_CACHE_DIR",
}


@CHECKS.add("cache-unwritable", "import flashinfer makes its workspace there and fails where it cannot.")
def _cache_unwritable(facts: Facts) -> Iterator[Found]:
    cache = _cache(facts, CachePurpose.FLASHINFER)
    if cache is not None and not cache.writable and facts.flashinfer is not None:
        yield Found(
            Severity.ERROR,
            f"FlashInfer cannot write to its workspace {cache.path or ''}: {cache.reason}.",
            'export FLASHINFER_WORKSPACE_BASE="$(mktemp -d)"',
            "Better a folder that stays: what is compiled there takes minutes.",
        )


@CHECKS.add("cache-not-kept", "Work is done again in every process; nothing fails.")
def _cache_not_kept(facts: Facts) -> Iterator[Found]:
    for purpose in (CachePurpose.TRITON, CachePurpose.OWN):
        cache = _cache(facts, purpose)
        needed = facts.flashinfer is not None if purpose is CachePurpose.OWN else facts.environment.package("triton")
        if cache is not None and not cache.writable and needed:
            yield Found(
                Severity.NOTE,
                f"The cache of {purpose.value} cannot be written: {cache.reason}.",
                f'export {_SETTINGS[purpose]}="$(mktemp -d)"',
                subject=purpose.value,
            )


@CHECKS.add("cache-on-network", "File locks and renames are less dependable there, and machines overwrite each other.")
def _cache_on_network(facts: Facts) -> Iterator[Found]:
    cache = _cache(facts, CachePurpose.FLASHINFER)
    if cache is not None and cache.is_network and facts.flashinfer is not None:
        yield Found(
            Severity.NOTE,
            f"FlashInfer's workspace {cache.path} is on a network file system ({cache.filesystem}).",
            advice="Set FLASHINFER_WORKSPACE_BASE to a folder on a local disk.",
        )


@CHECKS.add("compiled-for-another-release", "Where releases share a folder, ninja alone decides what is rebuilt.")
def _compiled_for_another_release(facts: Facts) -> Iterator[Found]:
    compiled = facts.kernels.compiled if facts.kernels else ()
    if facts.flashinfer is None:
        return
    shared = not facts.since("0.4.1")
    if shared:
        # jit/env.py names the folder by GPU only until 0.4.0, and by release since.
        for one in (one for one in compiled if one.release is None):
            yield Found(
                Severity.NOTE,
                f"{one.path} may be of another release: all releases until 0.4.0 compile into that folder.",
                remove(str(Path(one.path).parent)),
                "After changing between such releases.",
            )
    elif facts.own_version == UNKNOWN_VERSION:
        for one in (one for one in compiled if one.release == UNKNOWN_VERSION):
            yield Found(
                Severity.NOTE,
                f"{one.path} may be of another state of the sources: all checkouts compile into that folder.",
                remove(str(Path(one.path).parent)),
                "After checking out another state.",
            )
    else:
        others = sorted({one.release for one in compiled if one.release} - {facts.own_version or ""})
        if others:
            yield Found(
                Severity.NOTE,
                f"Kernels that FlashInfer {', '.join(others)} compiled take up space; {facts.own_version} "
                "does not use them.",
            )


def _cache(facts: Facts, purpose: CachePurpose) -> CacheDirectory | None:
    return next((one for one in facts.environment.caches.value or () if one.purpose is purpose), None)
