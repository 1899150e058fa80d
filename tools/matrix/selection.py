"""Which releases a command line names."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from packaging.version import InvalidVersion, Version

__all__ = ["CI_RELEASES", "named_exactly", "select"]

CI_RELEASES = ("0.5.3", "0.6.7.post3", "0.6.12", "0.6.15.post1", "0.6.17", "0.7.0", "0.7.4")
"""Each end of a change of the calls that fp4_moe makes; run with every change of this repository."""


def select(words: Sequence[str], published: Sequence[str]) -> list[str]:
    """The releases named by `words`, oldest first, each once.

    Args:
        words: a release, a line of releases such as `0.6`, `ci`, `newest` (no candidate), or `all`.
        published: every release there is.

    Raises:
        ValueError: a word names none.
    """
    chosen = {release for word in words for release in _named(word, published)}
    return sorted(chosen, key=Version)


def named_exactly(words: Sequence[str], known: Sequence[str]) -> list[str] | None:
    """The releases, where every word is `ci` or one of `known`: those mean the same whatever else was published."""
    told = [one for word in words for one in (CI_RELEASES if word == "ci" else (word,))]
    return select(told, known) if all(_exact(one, known) for one in told) else None


def _named(word: str, published: Sequence[str]) -> Iterable[str]:
    if word == "all":
        return published
    if word == "ci":
        return [release for one in CI_RELEASES for release in _named(one, published)]
    if word == "newest":
        return [max((one for one in published if not Version(one).is_prerelease), key=Version)]
    version = _version(word)
    found = _exact(word, published) or [
        one for one in published if version and Version(one).release[:2] == version.release
    ]
    if not found:
        raise ValueError(f"{word!r} is no published release, no line of releases, and none of: all, ci, newest")
    return found


def _exact(word: str, published: Sequence[str]) -> list[str]:
    version = _version(word)
    # Two numbers are a line: 0.6 is not 0.6.0.
    return [one for one in published if version and len(version.release) > 2 and Version(one) == version]


def _version(word: str) -> Version | None:
    try:
        return Version(word)
    except InvalidVersion:
        return None
