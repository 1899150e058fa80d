from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from packaging.specifiers import SpecifierSet
from packaging.version import Version

from flashinfer_compat.versions import at_least, in_range, parse_version

# Oldest first.
ORDERED = [
    "0.2.9rc1", "0.2.9", "0.2.11.post3", "0.6.7.post3", "0.6.8.dev20250101", "0.6.8a1", "0.6.8rc1", "0.6.8",
    "0.6.8.post1.dev1",    "0.6.8.post1", "0.6.9.dev0", "0.6.9", "0.6.10", "0.7.0rc3", "0.7.0", "1.0",
]  # fmt: skip


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("0.7.4", "0.7.4"),
        ("0.7.4+cu130", "0.7.4"),
        ("0.7.4+cu130torch2.9", "0.7.4"),
        ("0.7.4rc1+cu130", "0.7.4rc1"),
        ("0.6.7.post3+local", "0.6.7.post3"),
        ("0.7.5.dev20251130", "0.7.5.dev20251130"),
        ("v0.7.4", "0.7.4"),
        ("0.6.8-rc1", "0.6.8rc1"),
        (" 0.7.4\n", "0.7.4"),
    ],
)
def test_the_local_part_is_dropped_and_nothing_else(text: str, expected: str) -> None:
    assert str(parse_version(text)) == expected


@pytest.mark.parametrize(
    "text", ["0.0.0+unknown", "0.0.0", "0.0.0.dev0", "", "unknown", "main", "0.7.x", "0.7.4 +cu130"]
)
def test_what_names_no_release(text: str) -> None:
    assert parse_version(text) is None


@pytest.mark.parametrize("position", range(len(ORDERED)))
def test_at_least_follows_the_order_of_releases(position: int) -> None:
    since = ORDERED[position]
    assert [at_least(Version(version), since) for version in ORDERED] == [
        number >= position for number in range(len(ORDERED))
    ]


@pytest.mark.parametrize("version", ["0.6.8rc1", "0.6.8.dev1", "0.6.8a1", "0.6.8rc1+cu130", "0.6.7.post9"])
def test_a_candidate_or_nightly_of_a_release_is_not_that_release(version: str) -> None:
    assert not at_least(Version(version), "0.6.8")


@pytest.mark.parametrize("version", ["0.6.8", "0.6.8+cu130", "0.6.8.post1", "0.6.9.dev0", "0.6.10"])
def test_later_ones_are(version: str) -> None:
    assert at_least(Version(version), "0.6.8")


@pytest.mark.parametrize(
    ("version", "specifier", "expected"),
    [
        # A lower bound with .dev0 takes in the nightlies and candidates of that release.
        ("0.6.17.dev20250601", ">=0.6.17.dev0,<0.7.0", True),
        ("0.6.17rc1", ">=0.6.17.dev0,<0.7.0", True),
        ("0.6.17", ">=0.6.17.dev0,<0.7.0", True),
        ("0.6.17.post1", ">=0.6.17.dev0,<0.7.0", True),
        ("0.6.18rc10", ">=0.6.17.dev0,<0.7.0", True),
        ("0.6.16.post4", ">=0.6.17.dev0,<0.7.0", False),
        ("0.7.0", ">=0.6.17.dev0,<0.7.0", False),
        # Without .dev0 they are older.
        ("0.6.17rc1", ">=0.6.17,<0.7.0", False),
        ("0.6.17.dev20250601", ">=0.6.17,<0.7.0", False),
        # PEP 440: `<0.7.0` leaves out the pre-releases of 0.7.0, `<0.7.0rc4` does not.
        ("0.7.0rc3", "<0.7.0", False),
        ("0.7.0rc3", "<0.7.0rc4", True),
        ("0.7.0rc3", "<=0.7.0", True),
        ("0.7.0.dev1", "<0.7.0.dev2", True),
        # PEP 440: `>0.6.8` leaves out 0.6.8.post1, `>=0.6.8.post0` does not.
        ("0.6.8.post1", ">0.6.8", False),
        ("0.6.8.post1", ">=0.6.8.post0", True),
        ("0.6.8.post1", "==0.6.8", False),
        ("0.6.8.post1", "==0.6.8.*", True),
        ("0.6.8rc1", "==0.6.8.*", True),
        # Local parts do not matter.
        ("0.6.8+cu130", "==0.6.8", True),
        ("0.6.8+cu130", "<=0.6.8", True),
        ("0.6.8+cu130", ">=0.6.8,<0.6.9", True),
        ("0.6.8", "", True),
        ("0.6.8rc1", "", True),
    ],
)
def test_ranges(version: str, specifier: str, expected: bool) -> None:
    assert in_range(Version(version), specifier) is expected


versions = st.builds(
    lambda release, pre, post, dev, local: Version(".".join(map(str, release)) + pre + post + dev + local),
    st.tuples(st.integers(0, 1), st.integers(0, 9), st.integers(0, 20)),
    st.sampled_from(["", "a1", "b2", "rc1", "rc10"]),
    st.sampled_from(["", ".post1"]),
    st.sampled_from(["", ".dev0", ".dev20251130"]),
    st.sampled_from(["", "+cu130", "+unknown"]),
)


@given(versions, versions)
def test_at_least_agrees_with_a_specifier(version: Version, since: Version) -> None:
    assert at_least(Version(version.public), since.public) == in_range(version, f">={since.public}")


@given(versions)
def test_a_parsed_version_is_public_and_parses_to_itself(version: Version) -> None:
    parsed = parse_version(str(version))
    if version.release == (0, 0, 0):
        assert parsed is None
    else:
        assert parsed is not None
        assert parsed.local is None
        assert parse_version(str(parsed)) == parsed
        assert parsed in SpecifierSet(f"=={version.public}", prereleases=True)
