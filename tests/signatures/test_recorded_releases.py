"""The shipped record: which releases it has, how it is encoded, and how a release is found in it."""

from __future__ import annotations

import json
from bisect import bisect_left

import pytest
from final_releases import FINALS
from packaging.version import Version

from flashinfer_compat.errors import ArgumentError, UnknownReleaseError
from flashinfer_compat.signatures.entry_points import ENTRY_POINTS
from flashinfer_compat.signatures.recorded import DATA, decode, encode, recorded, releases

CANDIDATES = [version for version in releases() if Version(version).is_prerelease]


def test_the_releases_are_sorted_and_complete() -> None:
    versions = [Version(version) for version in releases()]
    assert versions == sorted(versions)
    assert len(set(versions)) == len(versions)
    assert (FINALS[0], CANDIDATES[0]) == ("0.2.9", "0.2.9rc1")
    assert len(FINALS[: FINALS.index("0.7.4") + 1]) >= 59
    assert len(CANDIDATES) >= 35


def test_the_shipped_file_is_what_its_own_content_encodes_to() -> None:
    text = DATA.read_text("utf-8")
    records = list(decode(json.loads(text)).values())
    assert json.dumps(encode(records), indent=1) + "\n" == text
    assert json.dumps(encode(records[::-1]), indent=1) + "\n" == text


def test_a_release_that_loses_an_entry_point_survives_encoding() -> None:
    first, second = (recorded(version) for version in ("0.6.18.post1", "0.7.0"))
    assert "QuantVariant" in first.texts
    assert "QuantVariant" not in second.texts
    decoded = decode(json.loads(json.dumps(encode([first, second]))))
    assert list(decoded.values()) == [first, second]


def test_every_recorded_text_is_in_its_normal_form() -> None:
    for version in releases():
        release = recorded(version)
        assert {name: symbol.to_text() for name, symbol in release.symbols.symbols.items()} == release.texts


def test_every_release_has_archive_hash_and_requirements() -> None:
    for version in releases():
        release = recorded(version)
        assert release.archive.startswith(f"flashinfer_python-{version}")
        assert release.archive.endswith((".whl", ".tar.gz"))
        assert len(bytes.fromhex(release.sha256)) == 32
        assert "torch" in {requirement.split(";")[0].split(">")[0].strip() for requirement in release.requires}


def test_every_entry_point_is_in_some_release() -> None:
    seen = {name for version in releases() for name in recorded(version).texts}
    assert seen == {entry.name for entry in ENTRY_POINTS}


@pytest.mark.parametrize("written", ["0.7.4", "0.7.4+cu130", "v0.7.4", " 0.7.4 "])
def test_a_release_is_found_under_any_spelling(written: str) -> None:
    assert recorded(written).version == "0.7.4"


@pytest.mark.parametrize(
    ("written", "near"),
    [
        ("0.7.3", "0.7.2.post1"),
        ("0.6.19", "0.6.18.post1"),
        ("0.7.4.dev20250101", "0.7.2.post1"),
        ("0.7.4.post9+cu130", "0.7.4"),
        ("0.6.16-rc9", "0.6.16rc5"),
        ("0.7", "0.7.4"),
        ("0.6", "0.6.18.post1"),
        ("0.8", releases()[-1]),
        ("99.0", releases()[-1]),
        ("0.7,4", "0.7.4"),
    ],
)
def test_an_unknown_release_is_refused_with_a_near_one(written: str, near: str) -> None:
    with pytest.raises(UnknownReleaseError) as caught:
        recorded(written)
    assert caught.value.nearest == near
    assert f"got {written!r}. Did you mean {near!r}?" in str(caught.value)
    assert isinstance(caught.value, ArgumentError)


@pytest.mark.parametrize("written", ["", "latest", "0.0.0+unknown", "?"])
def test_what_is_no_release_is_refused(written: str) -> None:
    with pytest.raises(UnknownReleaseError, match="flashinfer version"):
        recorded(written)


def test_the_finals_are_ordered_as_versions_not_as_text() -> None:
    assert bisect_left([Version(one) for one in FINALS], Version("0.6.10")) == FINALS.index("0.6.10")
    assert FINALS.index("0.6.9") < FINALS.index("0.6.10")
