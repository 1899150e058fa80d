from __future__ import annotations

import json
import re
from collections import Counter
from dataclasses import replace
from functools import cache
from typing import Any
from urllib.parse import urlsplit

import pytest
from packaging.specifiers import SpecifierSet
from packaging.version import Version

from flashinfer_compat.architectures import ARCHITECTURES
from flashinfer_compat.features.known_issues import KNOWN_ISSUES, Effect, KnownIssue
from flashinfer_compat.features.model import Feature
from flashinfer_compat.features.table import FEATURES, feature_states
from flashinfer_compat.features.target import FlashInfer, Target
from flashinfer_compat.problem import DEEPSEEK_R1
from flashinfer_compat.reasons import ReasonCode
from flashinfer_compat.signatures.entry_points import ENTRY_POINTS
from flashinfer_compat.signatures.model import SymbolTable
from flashinfer_compat.signatures.recorded import recorded, releases
from flashinfer_compat.vocabulary import Evidence, Strategy

NAMES = {feature.name for feature in FEATURES}
ISSUES = {issue.id: issue for issue in KNOWN_ISSUES}


@cache
def _target(release: str, architecture: str | None, torch_version: str | None = "2.13.0") -> Target:
    return Target.from_release(release, architecture, torch_version)


def _codes(target: Target) -> dict[str, tuple[str, ...]]:
    """Status and reason codes of each feature."""
    return {
        name: (state.evidence.value, *(reason.code.value for reason in state.reasons))
        for name, state in feature_states(target).items()
    }


# The table of features.


def test_names_and_titles_are_unique() -> None:
    assert Counter(feature.name for feature in FEATURES).most_common(1)[0][1] == 1
    assert Counter(feature.title for feature in FEATURES).most_common(1)[0][1] == 1
    assert all(re.fullmatch(r"[a-z][a-z0-9_]*", name) for name in NAMES)


@pytest.mark.parametrize("feature", FEATURES, ids=lambda feature: feature.name)
def test_a_row_is_well_formed(feature: Feature) -> None:
    assert feature.entry_point in {entry.name for entry in ENTRY_POINTS}
    assert feature.title
    assert feature.since in releases()
    assert not Version(feature.since).is_prerelease
    assert feature.parameter or not feature.choice, "a choice is one of a parameter's"
    for architecture, since in (feature.architectures or {}).items():
        assert architecture in ARCHITECTURES
        assert since in releases()


@pytest.mark.parametrize("feature", FEATURES, ids=lambda feature: feature.name)
def test_since_is_the_first_release_whose_signatures_show_it(feature: Feature) -> None:
    shown = {
        release: feature_states(_target(release, "sm100"), [feature])[feature.name].evidence is not Evidence.ABSENT
        for release in releases()
    }
    since = Version(feature.since)
    for release, has_it in shown.items():
        version = Version(release)
        # Candidates of the first release may have it already.
        if version >= since:
            assert has_it, release
        elif Version(version.base_version) < since:
            assert not has_it, release


# When each kind of GPU began to work, from FlashInfer's launchers and its per-backend capability checks.
GPUS = {
    "fp4_moe_logits": {"sm100": "0.2.9", "sm103": "0.3.1", "sm107": "0.6.16"},
    "fp4_moe_routed": {"sm100": "0.2.9", "sm103": "0.3.1", "sm107": "0.6.16"},
    "fused_shared_logits": {"sm100": "0.2.9", "sm103": "0.3.1", "sm107": "0.6.16"},
    "mm_fp4_trtllm": {"sm100": "0.2.9", "sm103": "0.3.1", "sm107": "0.6.16"},
    "mm_fp4_cutlass": {
        "sm100": "0.2.9",
        "sm103": "0.3.1",
        "sm107": "0.6.16",
        "sm110": "0.5.1",
        "sm120": "0.3.1",
        "sm121": "0.3.1",
    },
    "mm_fp4_cute_dsl": {"sm100": "0.6.5", "sm103": "0.6.5", "sm107": "0.6.18", "sm120": "0.7.1", "sm121": "0.7.1"},
    "mm_fp4_b12x": {"sm120": "0.6.9", "sm121": "0.6.9"},
    # Any from SM100 up, where the FP4 units are.
    "silu_and_mul_quantize": dict.fromkeys(("sm100", "sm103", "sm110", "sm120", "sm121"), "0.6.16rc3")
    | {"sm107": "0.6.16"},
    "cutile_nvfp4_bf16": {"sm89": "0.7.1", "sm90": "0.7.1", "sm120": "0.7.1", "sm121": "0.7.1"},
    "cutile_nvfp4": {"sm120": "0.7.0", "sm121": "0.7.0"},
}


@pytest.mark.parametrize("name", GPUS)
def test_a_gpu_works_from_its_release_on_and_no_other_does(name: str) -> None:
    row = [feature for feature in FEATURES if feature.name == name]
    for release in releases():
        for architecture in ARCHITECTURES:
            since = GPUS[name].get(architecture)
            works = since is not None and Version(release) >= Version(since)
            state = feature_states(_target(release, architecture), row)[name]
            if state.evidence is not Evidence.ABSENT:
                refused = ReasonCode.ARCHITECTURE in {reason.code for reason in state.reasons}
                assert refused is not works, (release, architecture)


# What it says of some targets.

MOE = {
    "fp4_moe_logits",
    "fp4_moe_routed",
    "topk_packed",
    "topk_tuple",
    "per_token_scale",
    "routing_replay",
    "norm_topk_prob",
    "output_buffer",
}
MOE_SINCE_0_6_17 = {
    "fused_shared_logits",
    "scale_layout",
    "valid_sizes",
    "workspace",
    "nvfp4_4over6",
    "lora_delta",
}
DENSE = {"fp4_quantize", "per_token_quantize", "mm_fp4_cudnn", "mm_fp4_trtllm", "mm_fp4_cutlass", "mm_fp4_cute_dsl"}
ANYWHERE = {
    *(name for name in NAMES if name.startswith("routing_") and name != "routing_replay"),
    "scale_interleave",
    "shuffle_weights",
    "shuffle_scales",
    "reorder_gate_up",
    "permute_indices_w13",
    "permute_indices_w2",
    "autotune",
    "autotune_v2",
}


def _states(**groups: set[str]) -> dict[str, tuple[str, ...]]:
    """{name: (status, *codes)} from `status__code__code={names}`; statuses and codes joined by two underscores."""
    return {name: tuple(key.split("__")) for key, names in groups.items() for name in names}


def test_states_of_0_7_4_on_sm100() -> None:
    assert _codes(_target("0.7.4", "sm100")) == _states(
        eligible=MOE | MOE_SINCE_0_6_17 | DENSE | {"silu_and_mul_quantize"} | ANYWHERE,
        present__known_issue={"fused_shared_routed"},
        present__architecture={"mm_fp4_b12x", "cutile_nvfp4", "cutile_nvfp4_bf16"},
    )


def test_states_of_0_6_15_post1_on_sm100() -> None:
    assert _codes(_target("0.6.15.post1", "sm100")) == _states(
        eligible=MOE | DENSE | ANYWHERE - {"routing_topksigmoid", "autotune_v2"},
        absent__keyword_missing=MOE_SINCE_0_6_17 | {"fused_shared_routed"},
        absent__member_missing={"routing_topksigmoid"},
        absent__entry_point_missing={"silu_and_mul_quantize", "cutile_nvfp4", "cutile_nvfp4_bf16", "autotune_v2"},
        present__architecture={"mm_fp4_b12x"},
    )


def test_states_of_0_7_4_on_sm90() -> None:
    assert _codes(_target("0.7.4", "sm90")) == _states(
        eligible=ANYWHERE | {"cutile_nvfp4_bf16"},
        present__architecture=MOE | MOE_SINCE_0_6_17 | DENSE | {"silu_and_mul_quantize", "mm_fp4_b12x", "cutile_nvfp4"},
        present__known_issue__architecture={"fused_shared_routed"},
    )


def test_states_without_a_gpu() -> None:
    assert _codes(_target("0.7.4", None)) == _states(
        present__no_gpu=NAMES - {"fused_shared_routed"},
        present__known_issue__no_gpu={"fused_shared_routed"},
    )


def test_states_without_flashinfer() -> None:
    states = feature_states(Target(None, "flashinfer is not installed.", "sm100", "2.13.0"))
    assert {state.evidence for state in states.values()} == {Evidence.ABSENT}
    assert {reason.code for state in states.values() for reason in state.reasons} == {ReasonCode.FLASHINFER_MISSING}
    assert {reason.message for state in states.values() for reason in state.reasons} == {"flashinfer is not installed."}
    assert all(len(state.reasons) == 1 for state in states.values())


def test_without_torch_nothing_is_more_than_present() -> None:
    for evidence, *codes in _codes(_target("0.7.4", "sm100", None)).values():
        assert evidence == "absent" or (evidence == "present" and "torch_missing" in codes)


def test_a_missing_library_is_named() -> None:
    target = replace(_target("0.7.4", "sm90"), libraries={})
    assert _codes(target)["cutile_nvfp4_bf16"] == ("present", "library_missing", "library_missing")
    library, compiler = feature_states(target)["cutile_nvfp4_bf16"].reasons
    assert "needs cuda-tile 1.4 or newer." in library.message
    assert library.way_out == "Run: pip install 'cuda-tile>=1.4'"
    assert "needs nvidia-cuda-tileiras." in compiler.message
    assert compiler.way_out == "Run: pip install 'cuda-tile[tileiras]'"


@pytest.mark.parametrize(
    ("version", "enough"), [("1.2.0", False), ("1.4.0rc1", False), ("1.4.0", True), ("1.7.0+cu13", True), ("", True)]
)
def test_an_old_library_is_named_with_its_version(version: str, enough: bool) -> None:
    target = replace(_target("0.7.4", "sm90"), libraries={"cuda-tile": version, "nvidia-cuda-tileiras": "13.4.92"})
    reasons = feature_states(target)["cutile_nvfp4_bf16"].reasons
    assert [one.code for one in reasons] == ([] if enough else [ReasonCode.LIBRARY_MISSING])
    assert all(f"{version} is installed" in one.message for one in reasons)


def test_what_cannot_be_read_is_absent_and_says_so() -> None:
    name = "trtllm_fp4_block_scale_moe"
    symbols = {key: value for key, value in recorded("0.7.4").symbols.symbols.items() if key != name}
    table = SymbolTable(symbols, {name: "SyntaxError on line 3"})
    states = feature_states(Target(FlashInfer("0.7.4", table, Version("0.7.4"), "version"), "", "sm100", "2.13.0"))
    assert states["fp4_moe_logits"].evidence is Evidence.ABSENT
    (reason,) = states["fp4_moe_logits"].reasons
    assert reason.code is ReasonCode.UNREADABLE
    assert "SyntaxError on line 3" in reason.message
    assert states["fp4_moe_routed"].evidence is Evidence.ELIGIBLE


def test_an_absence_tells_the_first_release_that_has_it() -> None:
    (reason,) = feature_states(_target("0.6.16", "sm100"))["fused_shared_logits"].reasons
    assert reason.message == "trtllm_fp4_block_scale_moe of FlashInfer 0.6.16 takes no num_fused_shared_experts."
    assert reason.way_out == "FlashInfer has it since 0.6.17."


@pytest.mark.parametrize("architecture", ["sm100", "sm103", "sm107", "sm90", None])
def test_the_routed_keyword_is_never_better_than_present(architecture: str | None) -> None:
    for release in releases():
        row = [feature for feature in FEATURES if feature.name == "fused_shared_routed"]
        for behaviour in (Version(release), Version("0.6.16.dev1"), Version("0.9.0"), None):
            flashinfer = FlashInfer(release, recorded(release).symbols, behaviour, "a test")
            state = feature_states(Target(flashinfer, "", architecture, "2.13.0"), row)["fused_shared_routed"]
            assert state.evidence is (Evidence.PRESENT if Version(release) >= Version("0.7.0rc3") else Evidence.ABSENT)


@pytest.mark.parametrize("release", releases())
def test_a_feature_that_is_not_eligible_says_why_in_words(release: str) -> None:
    for name, state in feature_states(_target(release, "sm107")).items():
        assert bool(state.reasons) is (state.evidence is not Evidence.ELIGIBLE), name
        for reason in state.reasons:
            assert reason.message.endswith(".")
            assert len(reason.message.split()) >= 4
        written = json.loads(json.dumps(state.to_dict()))
        assert written["status"] == state.evidence.value
        assert [one["code"] for one in written["reasons"]] == [reason.code.value for reason in state.reasons]


# The table of known issues.


def test_issues_are_well_formed() -> None:
    assert len(ISSUES) == len(KNOWN_ISSUES)
    entry_points = {entry.name for entry in ENTRY_POINTS}
    for issue in KNOWN_ISSUES:
        assert re.fullmatch(r"[a-z0-9]+(-[a-z0-9]+)+", issue.id)
        assert len(issue.title.split()) >= 4
        assert not issue.title.endswith(".")
        assert issue.way_out.endswith(".")
        assert issue.entry_points <= entry_points
        assert issue.features <= NAMES
        assert issue.strategies <= set(Strategy)
        url = urlsplit(issue.source)
        assert (url.scheme, url.netloc) == ("https", "github.com")
        assert url.path.startswith("/flashinfer-ai/flashinfer/")


@pytest.mark.parametrize("issue", KNOWN_ISSUES, ids=lambda issue: issue.id)
def test_an_issue_says_which_releases_have_it(issue: KnownIssue) -> None:
    for part in issue.releases.split("|"):
        assert len(SpecifierSet(part.strip())) >= 1
    assert any(issue.affects(Version(release)) for release in releases())
    source = re.search(r"/blob/v([^/]+)/", issue.source)
    assert source is None or issue.affects(Version(source.group(1))), "the source shows an affected release"


@pytest.mark.parametrize("issue", KNOWN_ISSUES, ids=lambda issue: issue.id)
def test_a_refusing_issue_says_which_calls_it_refuses(issue: KnownIssue) -> None:
    # An issue that nothing meets would refuse nothing.
    if issue.effect is Effect.REFUSED:
        assert issue.entry_points
        assert issue.strategies


# Versions on both sides of each border: those without the defect, and those with it. A nightly of the release that
# repairs it counts as having it, unless a candidate is known to have the repair.
BORDERS: dict[str, tuple[str, str]] = {
    # Harmless before the keyword exists; nightlies have it before 0.7.0.
    "routed-fused-shared": ("0.6.15.post1", "0.6.16.dev1 0.6.19.dev1 0.7.0rc3 0.7.0 0.7.4 0.9.0"),
    "ungrouped-fused-shared": (
        "0.6.15.post1 0.7.0rc3 0.7.0 0.7.4",
        "0.6.16.dev1 0.6.17.dev1 0.6.17rc1 0.6.17 0.6.18 0.6.18.post1 0.6.19.dev1 0.7.0.dev1",
    ),
    "topk-group-ignored": ("0.6.3 0.6.4 0.7.4", "0.2.9 0.2.10 0.4.1 0.6.2 0.6.3.dev1"),
    "deepseek-uninitialised-scores": (
        "0.3.1.post1 0.5.0rc1 0.5.0 0.7.4",
        "0.4.0.dev1 0.4.0rc0 0.4.0 0.4.1 0.5.0.dev1",
    ),
    "negative-bias-misroutes": ("0.6.2 0.7.4", "0.2.9 0.6.1 0.6.2.dev1"),
    "no-groups-divides-by-zero": ("0.6.8rc1 0.6.8 0.7.4", "0.2.9 0.2.10 0.6.7.post3 0.6.8.dev1"),
    "missing-bias-dereferenced": ("", "0.2.9 0.6.7 0.6.8 0.7.4 0.9.0"),
    "float32-bias-read-as-bf16": ("0.6.6 0.6.8rc1 0.6.8", "0.6.7.dev1 0.6.7 0.6.7.post3 0.6.8.dev1"),
    "float32-logits-read-as-bf16": ("0.2.9 0.6.8rc1 0.6.8", "0.2.10.dev1 0.2.10 0.6.6 0.6.7.post3 0.6.8.dev1"),
    "minimax2-scaling-ignored": (
        "0.6.7.post3 0.6.13rc1 0.6.13 0.7.4",
        "0.6.8.dev1 0.6.8rc1 0.6.8 0.6.12rc3 0.6.12 0.6.13.dev1",
    ),
    # No fix is known.
    "routed-batch-dependent": ("0.6.7.post3 0.6.8", "0.6.8.post1 0.6.9rc1 0.6.9 0.7.4"),
    "per-token-tile-192": (
        "0.6.15.post1 0.6.18rc1 0.6.18 0.7.4",
        "0.6.16.dev1 0.6.16rc5 0.6.16 0.6.16.post4 0.6.17 0.6.18.dev1",
    ),
    "bf16-logits-read-as-float32": ("0.2.9 0.6.0rc1 0.6.0", "0.2.10.dev1 0.2.10 0.5.3 0.6.0.dev1"),
    "tuple-topk-float32": ("0.6.11.post3 0.6.15 0.7.4", "0.6.12.dev1 0.6.12rc1 0.6.12 0.6.14 0.6.15.dev1"),
    "linear-layout-ignored": ("0.6.7 0.7.4", "0.2.9 0.6.6 0.6.7.dev1"),
    "mm-fp4-positional-backend": ("0.4.1 0.5.1 0.5.2", "0.5.0.dev1 0.5.0rc1 0.5.0rc3 0.5.0 0.5.1.dev1"),
    "fp4-quantize-unchecked-gpu": ("0.3.0.post1 0.7.4", "0.3.1 0.6.7 0.7.2.post1 0.7.4.dev1"),
    "import-needs-cuda": (
        "0.6.7.post3 0.6.12rc1 0.6.12 0.6.13rc1 0.6.13 0.7.1rc1 0.7.1 0.7.4",
        "0.6.8.dev1 0.6.8rc1 0.6.8 0.6.11.post3 0.6.12.dev1 0.6.14 0.6.18.post1 0.7.0rc3 0.7.0.post1 0.7.1.dev1",
    ),
}


def test_every_issue_has_its_borders() -> None:
    assert set(BORDERS) == set(ISSUES)


@pytest.mark.parametrize("name", BORDERS)
def test_an_issue_affects_what_it_should_on_both_sides_of_its_borders(name: str) -> None:
    without, having = (versions.split() for versions in BORDERS[name])
    found = {version: ISSUES[name].affects(Version(version)) for version in (*without, *having)}
    assert found == {**dict.fromkeys(without, False), **dict.fromkeys(having, True)}


@pytest.mark.parametrize(
    ("name", "change", "met"),
    [
        ("ungrouped-fused-shared", {"n_group": 1, "topk_group": 1}, True),
        ("ungrouped-fused-shared", {}, False),
        # The kernel keeps four groups, or all if there are fewer.
        ("topk-group-ignored", {}, False),
        ("topk-group-ignored", {"topk_group": 3}, True),
        ("topk-group-ignored", {"topk_group": 5}, True),
        ("topk-group-ignored", {"n_group": 2, "topk_group": 2}, False),
        ("topk-group-ignored", {"n_group": 2, "topk_group": 1}, True),
        ("topk-group-ignored", {"n_group": 1, "topk_group": 1}, False),
        ("deepseek-uninitialised-scores", {}, True),
        ("deepseek-uninitialised-scores", {"n_group": 1, "topk_group": 1, "routing_method": "renormalize"}, False),
        ("minimax2-scaling-ignored", {"n_group": 1, "topk_group": 1, "routing_method": "minimax2"}, True),
        (
            "minimax2-scaling-ignored",
            {"n_group": 1, "topk_group": 1, "routing_method": "minimax2", "routed_scaling_factor": 1.0},
            False,
        ),
        ("minimax2-scaling-ignored", {}, False),
    ],
)
def test_which_layers_meet_an_issue(name: str, change: dict[str, Any], met: bool) -> None:
    assert ISSUES[name].condition(replace(DEEPSEEK_R1, **change)) is met
