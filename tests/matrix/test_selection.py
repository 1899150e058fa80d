from __future__ import annotations

import pytest

pytest.importorskip("pypi_simple")

from flashinfer_compat.signatures.recorded import releases
from tools.matrix.selection import CI_RELEASES, named_exactly, select

PUBLISHED = ("0.2.9rc1", "0.5.3", "0.6.0", "0.6.9", "0.6.10rc1", "0.6.10", "0.6.10.post1", "0.7.0", "0.8.0rc1")


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["all"], list(PUBLISHED)),
        (["newest"], ["0.7.0"]),
        (["0.6.10"], ["0.6.10"]),
        (["0.6.10-1"], ["0.6.10.post1"]),
        (["v0.7.0"], ["0.7.0"]),
        (["0.6"], ["0.6.0", "0.6.9", "0.6.10rc1", "0.6.10", "0.6.10.post1"]),
        (["0.7.0", "0.5.3", "newest"], ["0.5.3", "0.7.0"]),
    ],
)
def test_words_name_releases(words: list[str], expected: list[str]) -> None:
    assert select(words, PUBLISHED) == expected


@pytest.mark.parametrize("word", ["0.6.11", "0.9", "6", "nightly", ""])
def test_a_word_that_names_none_is_an_error(word: str) -> None:
    with pytest.raises(ValueError, match="no published release"):
        select([word], PUBLISHED)


def test_the_releases_of_every_change_are_recorded() -> None:
    assert select(["ci"], releases()) == list(CI_RELEASES)
    assert len(CI_RELEASES) == 7


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["ci"], list(CI_RELEASES)),
        (["0.7.4", "v0.5.3"], ["0.5.3", "0.7.4"]),
        (["newest"], None),
        (["all"], None),
        (["0.7.4", "0.4"], None),
        (["0.7.4", "0.9"], None),
    ],
)
def test_some_words_mean_the_same_whatever_was_published_since(words: list[str], expected: list[str] | None) -> None:
    assert named_exactly(words, releases()) == expected
