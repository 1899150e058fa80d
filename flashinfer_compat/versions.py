"""FlashInfer's version numbers: PEP 440, with local parts and pre-releases handled on purpose."""

from __future__ import annotations

from functools import lru_cache

from packaging.specifiers import SpecifierSet
from packaging.version import InvalidVersion, Version

__all__ = ["at_least", "in_range", "parse_version"]


@lru_cache(maxsize=1024)
def parse_version(text: str) -> Version | None:
    """The version without its local part (`0.7.4+cu130` is 0.7.4); None for text that names no release.

    `0.0.0+unknown` is what FlashInfer reports for a source checkout without build information: it names no release.
    """
    try:
        version = Version(text)
    except InvalidVersion:
        return None
    public = Version(version.public)
    return None if public.release == (0, 0, 0) else public


def at_least(version: Version, since: str) -> bool:
    """Whether `version` is `since` or newer.

    A nightly or candidate of `since` itself (0.6.8.dev1, 0.6.8rc1) counts as older: what 0.6.8 brought may not be in
    it yet. Use this for limits that were lifted.
    """
    return version >= _version(since)


def in_range(version: Version, specifier: str) -> bool:
    """Whether a PEP 440 specifier holds for a version, which may be a nightly or candidate.

    Write a lower bound with `.dev0` where a defect may be in the nightlies of that release already (`>=0.6.17.dev0`),
    and an upper bound as `<=0.6.3,!=0.6.3` where it may be in the nightlies of the release that mends it: PEP 440's
    `<0.6.3` leaves those out.
    """
    return _specifier(specifier).contains(version, prereleases=True)


@lru_cache(maxsize=256)
def _version(text: str) -> Version:
    return Version(text)


@lru_cache(maxsize=256)
def _specifier(text: str) -> SpecifierSet:
    return SpecifierSet(text)
