"""The size limits of FlashInfer's trtllm-gen routing, as read in the sources of the releases.

Each era is what the launcher and the routing kernel of its releases take. Beyond them a release raises or, without a
word, leaves its output unwritten, so both sides of every number are checked in every release of the era.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cache

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from packaging.version import Version
from problem_fields import changed

from flashinfer_compat.errors import StrategyUnavailableError
from flashinfer_compat.features.target import FlashInfer, Target
from flashinfer_compat.planning.limits import (
    DEEPSEEK_V3_GROUPED,
    DEEPSEEK_V3_UNGROUPED,
    METHODS,
    ROUTED,
    Limits,
    Sizes,
    limits_for,
    violations,
)
from flashinfer_compat.planning.plan import plan
from flashinfer_compat.problem import DEEPSEEK_R1, Problem
from flashinfer_compat.reasons import ReasonCode
from flashinfer_compat.signatures.recorded import recorded, releases
from flashinfer_compat.vocabulary import RoutingMethod

FINAL = tuple(release for release in releases() if not Version(release).is_prerelease)
CANDIDATES = tuple(release for release in releases() if Version(release).is_prerelease)

TABLES: dict[str, tuple[Limits, ...]] = {
    "routed": ROUTED,
    "grouped": DEEPSEEK_V3_GROUPED,
    "ungrouped": DEEPSEEK_V3_UNGROUPED,
    **{method.value: rows for method, rows in METHODS.items()},
}


@cache
def _limits(table: str, release: str) -> tuple[Limits, ...]:
    return limits_for(TABLES[table], Version(release))


def takes(table: str, release: str, *sizes: int) -> bool:
    """Whether `release` takes (num_experts, top_k, n_group, topk_group)."""
    rows = _limits(table, release)
    return bool(rows) and not any(reason for row in rows for reason in violations(row, Sizes(*sizes), "kernel"))


@dataclass(frozen=True)
class Era:
    """What a table's kernel takes from one release to another, both included."""

    table: str
    first: str
    last: str
    experts: tuple[int, int]
    """Fewest and most."""
    multiple: int
    top_k: tuple[int, int]
    top_k_below_experts: bool = False
    """top_k < num_experts; otherwise at most."""

    def __str__(self) -> str:
        return f"{self.table}-{self.first}"

    @property
    def releases(self) -> tuple[str, ...]:
        return FINAL[FINAL.index(self.first) : FINAL.index(self.last) + 1]


LAST = "0.7.4"
ERAS = (
    # The entry for top-k, called with routing method Renormalize.
    Era("routed", "0.2.10", "0.4.1", (1, 128), 4, (1, 8), True),
    Era("routed", "0.5.0", "0.5.2", (1, 512), 4, (1, 10), True),
    Era("routed", "0.5.3", "0.6.6", (1, 512), 4, (1, 10)),
    Era("routed", "0.6.7", "0.6.7.post3", (1, 2048), 4, (1, 32)),
    Era("routed", "0.6.8", LAST, (1, 2048), 1, (1, 32)),
    # DeepSeekV3 without groups. 0.4.x also takes 257..384 experts, but is refused for what it computes; 0.6.3 to 0.6.6
    # also take 385..512 with top_k up to 22, which is not offered.
    Era("ungrouped", "0.2.9", "0.4.1", (8, 128), 4, (1, 8), True),
    Era("ungrouped", "0.6.3", "0.6.6", (8, 384), 4, (1, 8)),
    Era("ungrouped", "0.6.7", "0.6.7.post3", (32, 512), 1, (1, 22)),
    Era("ungrouped", "0.6.8", "0.6.10.post1", (1, 1024), 4, (1, 32)),
    Era("ungrouped", "0.6.11", LAST, (1, 1024), 1, (1, 32)),
    *(
        era
        for method in ("renormalize", "renormalize_naive")
        for era in (
            Era(method, "0.2.9", "0.2.9", (12, 128), 4, (8, 8), True),
            Era(method, "0.2.10", "0.4.1", (1, 128), 4, (1, 8), True),
            Era(method, "0.5.0", "0.5.2", (1, 512), 4, (1, 10), True),
            Era(method, "0.5.3", "0.6.6", (1, 512), 4, (1, 10)),
            Era(method, "0.6.7", "0.6.7.post3", (1, 2048), 4, (1, 32)),
            Era(method, "0.6.8", "0.6.10.post1", (1, 2048), 4, (1, 32)),
            Era(method, "0.6.11", LAST, (1, 2048), 1, (1, 32)),
        )
    ),
    Era("topk", "0.2.14", "0.4.1", (1, 128), 4, (1, 8), True),
    Era("topk", "0.5.0", "0.5.2", (1, 512), 4, (1, 10), True),
    Era("topk", "0.5.3", "0.6.6", (1, 512), 4, (1, 10)),
    Era("topk", "0.6.7", "0.6.7.post3", (1, 2048), 4, (1, 32)),
    Era("topk", "0.6.8", "0.6.10.post1", (1, 256), 4, (1, 8)),
    Era("topk", "0.6.11", LAST, (1, 256), 1, (1, 8)),
    Era("llama4", "0.2.9", "0.6.10.post1", (1, 128), 4, (1, 1)),
    Era("llama4", "0.6.11", LAST, (1, 128), 1, (1, 1)),
    Era("default", "0.6.8", "0.6.10.post1", (1, 256), 4, (1, 8)),
    Era("default", "0.6.11", LAST, (1, 256), 1, (1, 8)),
    Era("sigmoid_renorm", "0.6.8", "0.6.10.post1", (1, 256), 4, (1, 8)),
    Era("sigmoid_renorm", "0.6.11", LAST, (1, 256), 1, (1, 8)),
    Era("minimax2", "0.6.8", "0.6.10.post1", (1, 1024), 4, (1, 32)),
    Era("minimax2", "0.6.11", LAST, (1, 1024), 1, (1, 32)),
    Era("sigmoid", "0.6.11", LAST, (1, 256), 1, (1, 8)),
    Era("topk_sigmoid", "0.6.18", LAST, (1, 256), 1, (1, 8)),
)


def _boundaries(era: Era) -> Iterator[tuple[bool, int, int]]:
    """(taken, num_experts, top_k) on both sides of each of the era's numbers."""
    (fewest, most), (least_k, most_k), multiple = era.experts, era.top_k, era.multiple
    fewest = -(-max(fewest, least_k) // multiple) * multiple
    yield True, most, least_k
    yield False, most + multiple, least_k
    yield True, most, most_k
    yield False, most, most_k + 1
    yield True, most - multiple, least_k
    if multiple > 1:
        yield from ((False, most - over, least_k) for over in range(1, multiple))
    if least_k > 1:
        yield False, most, least_k - 1
    yield True, fewest, least_k
    if era.experts[0] > multiple:
        yield False, fewest - multiple, least_k
    # As many chosen as there are, where the kernel is not too small for it.
    equal = most_k // multiple * multiple
    if equal >= fewest and least_k == 1:
        yield not era.top_k_below_experts, equal, equal
        yield True, equal, max(1, equal - 1)


@pytest.mark.parametrize("era", ERAS, ids=str)
def test_both_sides_of_every_limit(era: Era) -> None:
    wrong = [
        (release, experts, top_k, f"should be {'taken' if taken else 'refused'}")
        for release in era.releases
        for taken, experts, top_k in _boundaries(era)
        if takes(era.table, release, experts, top_k) is not taken
    ]
    assert not wrong


@pytest.mark.parametrize("table", sorted({era.table for era in ERAS} - {"ungrouped"}))
def test_the_eras_leave_no_release_out(table: str) -> None:
    listed = [release for era in ERAS if era.table == table for release in era.releases]
    assert listed == list(FINAL[FINAL.index(listed[0]) :])
    # Before its first release a kernel is not there, and nothing is taken.
    assert not any(takes(table, release, 64, 8) or takes(table, release, 64, 1) for release in FINAL[: -len(listed)])


def test_every_routing_method_has_its_eras() -> None:
    assert {era.table for era in ERAS} | {"grouped"} == set(TABLES)
    assert set(METHODS) == set(RoutingMethod) - {RoutingMethod.DEEPSEEK_V3}


def _between(first: str, last: str) -> tuple[str, ...]:
    return FINAL[FINAL.index(first) : FINAL.index(last) + 1]


@pytest.mark.parametrize("release", _between("0.5.0", "0.6.2"))
def test_without_groups_and_over_128_experts_top_k_is_8(release: str) -> None:
    # The kernel reads eight slots a warp and writes top_k of them; repaired in 0.6.3.
    strict = Version(release) < Version("0.5.3")
    assert [takes("ungrouped", release, 384, top_k) for top_k in (7, 8, 9)] == [False, True, False]
    assert [takes("ungrouped", release, 132, top_k) for top_k in (1, 7, 8)] == [False, False, True]
    assert [takes("ungrouped", release, 128, top_k) for top_k in (1, 7, 8, 9)] == [True, True, True, False]
    assert [takes("ungrouped", release, experts, 8) for experts in (386, 388)] == [False, False]
    assert [takes("ungrouped", release, experts, 7) for experts in (4, 8)] == [False, True]
    assert takes("ungrouped", release, 8, 8) is not strict


# DeepSeekV3 with groups: n_group <= 8 of at most 32 experts, topk_group <= 4, so at most 256 experts. (0.4.0 and 0.4.1
# take 12 groups, but are refused for what they compute.) top_k * topk_group <= 32, up to 0.6.6, follows from the rest.
GROUPED = [
    # first, last, most top_k, fewest experts, top_k below the reachable
    ("0.2.9", "0.5.2", 8, 8, True),
    ("0.5.3", "0.6.6", 8, 8, False),
    ("0.6.7", "0.6.7.post3", 22, 32, False),
    # 0.6.11 to 0.6.14 also take numbers that are no multiple of 4, which is not offered.
    ("0.6.8", LAST, 22, 4, False),
]


@pytest.mark.parametrize(("first", "last", "most_k", "fewest", "below"), GROUPED)
def test_both_sides_of_every_limit_with_groups(first: str, last: str, most_k: int, fewest: int, below: bool) -> None:
    cases = {
        # (num_experts, top_k, n_group, topk_group)
        (256, 8, 8, 4): True,
        (256, most_k, 8, 4): True,
        (256, most_k + 1, 8, 4): False,
        (256, 8, 8, 5): False,
        # More groups, and larger ones, than the kernel has lanes for.
        (160, 4, 10, 4): False,
        (264, 4, 8, 4): False,
        (128, 4, 4, 4): True,
        (132, 4, 4, 4): False,
        (64, 4, 2, 1): True,
        (66, 4, 2, 1): False,
        # Multiples of 4, with group sizes that divide.
        (60, 4, 4, 2): True,
        (62, 4, 2, 1): False,
        (63, 4, 3, 2): False,
        (fewest, 1, 2, 1): True,
        (fewest - 4, 1, 2, 1): False,
        # top_k * topk_group beside a warp's 32 lanes.
        (256, 9, 8, 4): most_k > 8,
        (256, 8, 8, 3): True,
        # All the experts that topk_group groups have.
        (32, 8, 8, 2): not below,
        (32, 7, 8, 2): True,
    }
    cases = {sizes: taken for sizes, taken in cases.items() if sizes[0] >= sizes[1] and sizes[0] >= sizes[2]}
    for release in _between(first, last):
        assert {sizes: takes("grouped", release, *sizes) for sizes in cases} == cases, release


# The logits entry's own shared experts: limits beside those of DeepSeekV3 with groups.

R1 = DEEPSEEK_R1


def _native(problem: Problem, release: str = "0.7.4") -> tuple[str, ...]:
    """() where native runs, else the codes it is refused with."""
    try:
        plan(problem, Target.from_release(release, "sm100"), strategy="native")
    except StrategyUnavailableError as error:
        return error.codes
    return ()


@pytest.mark.parametrize("release", ["0.6.17", "0.6.18.post1", "0.7.0", "0.7.2.post1", "0.7.4"])
@pytest.mark.parametrize(
    ("changes", "codes"),
    [
        ({"num_shared_experts": 1}, ()),
        ({"num_shared_experts": 24}, ()),
        ({"num_shared_experts": 25}, ("num_shared_experts",)),
        ({"num_shared_experts": 10, "top_k": 22}, ()),
        ({"num_shared_experts": 11, "top_k": 22}, ("num_shared_experts",)),
        ({"num_shared_experts": 1, "top_k": 23}, ("top_k",)),
        ({"num_shared_experts": 31, "top_k": 1}, ()),
        ({"num_shared_experts": 32, "top_k": 1}, ("num_shared_experts",)),
        ({"topk_group": 5}, ("expert_groups",)),
        ({"num_experts": 264}, ("num_experts", "expert_groups")),
        ({"num_experts": 160, "n_group": 10}, ("expert_groups",)),
        # E must be a multiple of 4; E + S need not.
        ({"num_experts": 252, "n_group": 6, "num_shared_experts": 1}, ("expert_groups",)),
        ({"num_experts": 248, "num_shared_experts": 3}, ()),
    ],
)
def test_both_sides_of_the_limits_of_native(release: str, changes: dict[str, int], codes: tuple[str, ...]) -> None:
    assert tuple(dict.fromkeys(_native(changed(R1, **changes), release))) == codes


# Candidates and nightlies keep the limits of the release they lead to and of the one before it.

EXPERTS = (8, 32, 96, 100, 128, 130, 132, 256, 260, 384, 512, 516)
SIZES: list[tuple[int, ...]] = [
    *((experts, top_k) for experts in EXPERTS for top_k in (1, 7, 8, 10, 22, 32)),
    *((experts, top_k, 8, 4) for experts in (16, 32, 256, 264) for top_k in (1, 8, 9, 23)),
    *((experts, 4, 2, 1) for experts in (8, 16, 30, 32, 62, 64, 66)),
    (256, 8, 8, 5),
    (32, 8, 8, 2),
]
NIGHTLIES = tuple(dict.fromkeys(f"{Version(release).base_version}.dev20260101" for release in FINAL))
FEW_KERNELS = ("0.4.0rc0", "0.4.0rc1", "0.4.0rc2")


def _before(version: Version) -> str | None:
    earlier = [release for release in FINAL if Version(release) < version]
    return earlier[-1] if earlier else None


def _sizes_for(table: str) -> Iterable[tuple[int, ...]]:
    return [sizes for sizes in SIZES if sizes[0] >= sizes[1] and (len(sizes) == 4) is (table == "grouped")]


@pytest.mark.parametrize("version", [*CANDIDATES, *NIGHTLIES])
def test_candidates_and_nightlies_satisfy_both_neighbours(version: str) -> None:
    before, after = _before(Version(version)), Version(version).base_version
    for table in TABLES:
        for sizes in _sizes_for(table):
            both = before is not None and takes(table, before, *sizes) and takes(table, after, *sizes)
            if version in FEW_KERNELS:
                assert both or not takes(table, version, *sizes)
            else:
                assert takes(table, version, *sizes) is both, (table, sizes)


@pytest.mark.parametrize("version", FEW_KERNELS)
@pytest.mark.parametrize("table", ["routed", "renormalize", "topk"])
def test_candidates_with_few_kernels_get_numbers_they_have(version: str, table: str) -> None:
    # The switch over template instances in these candidates' trtllm_fused_moe_routing_renormalize.cu.
    have = {8, 16, 24, 32, 48, 64, 72, 96, 128}
    taken = {experts for experts in range(8, 200) if takes(table, version, experts, 7)}
    assert taken <= have
    assert taken >= {32, 64, 128}


@given(
    st.sampled_from(sorted(TABLES)),
    st.sampled_from(releases()),
    st.tuples(st.integers(1, 2100), st.integers(1, 40), st.integers(1, 12), st.integers(1, 8)),
)
@settings(max_examples=100, deadline=None)
def test_a_refusal_names_the_number_at_fault(table: str, release: str, sizes: tuple[int, int, int, int]) -> None:
    for row in limits_for(TABLES[table], Version(release)):
        for reason in violations(row, Sizes(*sizes), "The kernel"):
            assert reason.code in (ReasonCode.NUM_EXPERTS, ReasonCode.TOP_K, ReasonCode.EXPERT_GROUPS)
            assert reason.message.startswith("The kernel takes ")
            assert "got" in reason.message


def test_no_limits_are_made_up_for_a_release_before_the_routed_entry() -> None:
    # A nightly of 0.2.10 may have the entry; no release tells what it takes.
    target = Target(
        FlashInfer("0.2.10.dev1", recorded("0.2.10").symbols, Version("0.2.10.dev1"), "version"), "", "sm100", "2.13.0"
    )
    with pytest.raises(StrategyUnavailableError) as caught:
        plan(changed(R1, routing_input="topk"), target, strategy="expanded")
    assert "behaviour_unknown" in caught.value.codes
