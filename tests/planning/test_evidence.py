"""Installs that no recorded release's version number describes: what their signatures and numbers are taken to mean."""

from __future__ import annotations

from dataclasses import replace
from itertools import product

import pytest
from packaging.version import Version
from problem_fields import changed

from flashinfer_compat.errors import StrategyUnavailableError
from flashinfer_compat.features.table import feature_states
from flashinfer_compat.features.target import FlashInfer, Target, behaviour_of
from flashinfer_compat.planning.plan import plan
from flashinfer_compat.problem import DEEPSEEK_R1, Problem
from flashinfer_compat.reasons import ReasonCode
from flashinfer_compat.signatures.model import Parameter, SymbolTable
from flashinfer_compat.signatures.recorded import recorded, releases
from flashinfer_compat.vocabulary import Backend, Evidence, Strategy

LOGITS_ENTRY = "trtllm_fp4_block_scale_moe"
ROUTED_ENTRY = "trtllm_fp4_block_scale_routed_moe"
NEWEST = "0.7.4"
R1 = DEEPSEEK_R1
R1_TOPK = changed(R1, routing_input="topk")


def installed(version: str, symbols: SymbolTable, architecture: str | None = "sm100") -> Target:
    """A machine with a FlashInfer that calls itself `version` and has `symbols`."""
    return Target(FlashInfer(version, symbols, *behaviour_of(version, symbols)), "", architecture, "2.13.0")


def symbols_of(release: str) -> SymbolTable:
    return recorded(release).symbols


def with_parameter(symbols: SymbolTable, entry: str, name: str) -> SymbolTable:
    symbol = symbols.symbols[entry]
    assert symbol.parameters is not None
    changed = replace(symbol, parameters=(*symbol.parameters, Parameter(name, default="None")))
    return SymbolTable({**symbols.symbols, entry: changed})


def without_parameter(symbols: SymbolTable, entry: str, name: str) -> SymbolTable:
    symbol = symbols.symbols[entry]
    assert symbol.parameter(name) is not None
    parameters = tuple(parameter for parameter in symbol.parameters or () if parameter.name != name)
    return SymbolTable({**symbols.symbols, entry: replace(symbol, parameters=parameters)})


def with_member(symbols: SymbolTable, entry: str, name: str, value: int) -> SymbolTable:
    symbol = symbols.symbols[entry]
    assert symbol.members is not None
    return SymbolTable({**symbols.symbols, entry: replace(symbol, members=(*symbol.members, (name, value)))})


def without(symbols: SymbolTable, entry: str) -> SymbolTable:
    assert symbols.get(entry) is not None
    return SymbolTable({name: one for name, one in symbols.symbols.items() if name != entry})


# Newer than every recorded release.


@pytest.mark.parametrize("version", ["0.7.5", "0.7.5.dev20261101", "0.8.0rc1", "1.0", "0.7.4.post1", "0.7.5+cu130"])
def test_a_newer_version_with_the_newest_signatures_behaves_like_the_newest_release(version: str) -> None:
    target = installed(version, symbols_of(NEWEST))
    assert target.flashinfer is not None
    assert target.flashinfer.behaviour_source.endswith(f"those of {NEWEST}")
    for problem in (R1, R1_TOPK, changed(R1, n_group=1, topk_group=1)):
        known, found = plan(problem, Target.from_release(NEWEST, "sm100")), plan(problem, target)
        assert (found.strategy, found.backend, found.status, found.call) == (
            known.strategy,
            known.backend,
            known.status,
            known.call,
        )


CHANGED = {
    "a keyword more": with_parameter(symbols_of(NEWEST), LOGITS_ENTRY, "new_keyword"),
    "a keyword less": without_parameter(symbols_of(NEWEST), ROUTED_ENTRY, "workspace_buffer"),
    "the quantizer's keyword": with_parameter(symbols_of(NEWEST), "fp4_quantize", "new_keyword"),
    "a member more": with_member(symbols_of(NEWEST), "RoutingMethodType", "NewMethod", 11),
    "an enumeration less": without(symbols_of(NEWEST), "RoutingInputMode"),
}


@pytest.mark.parametrize("change", CHANGED)
@pytest.mark.parametrize("problem", [R1, R1_TOPK], ids=["logits", "topk"])
def test_a_newer_version_with_changed_signatures_is_not_trusted_to_fuse(change: str, problem: Problem) -> None:
    target = installed("0.8.0", CHANGED[change])
    assert target.flashinfer is not None
    assert target.flashinfer.behaviour is None
    decision = plan(problem, target)
    assert (decision.strategy, decision.backend, decision.status) == (Strategy.SPLIT, Backend.TRTLLM, Evidence.PRESENT)
    assert decision.call is not None
    assert decision.call.num_fused_shared_experts == 0
    assert any("0.8.0" in note and "not known" in note for note in decision.notes)
    fused = "expanded" if problem is R1_TOPK else "native"
    with pytest.raises(StrategyUnavailableError, match=r"0\.8\.0 is newer than 0\.7\.4") as caught:
        plan(problem, target, strategy=fused)
    assert set(caught.value.codes) == {"behaviour_unknown"}


@pytest.mark.parametrize(("architecture", "code"), [("sm90", "architecture"), (None, "no_gpu")])
@pytest.mark.parametrize("problem", [R1, R1_TOPK], ids=["logits", "topk"])
def test_an_unknown_release_is_not_trusted_on_more_gpus_than_the_newest_known(
    architecture: str | None, code: str, problem: Problem
) -> None:
    target = installed("0.8.0", CHANGED["a keyword more"], architecture)
    assert plan(problem, target).backend is Backend.TORCH
    with pytest.raises(StrategyUnavailableError) as caught:
        plan(problem, target, backend="trtllm", strategy="split")
    assert set(caught.value.codes) == {code}
    states = feature_states(target)
    codes = {reason.code.value for reason in states["fp4_moe_logits"].reasons}
    assert codes == {"behaviour_unknown", code}


def test_a_newer_version_that_lost_the_entry_point_has_nothing_to_call() -> None:
    with pytest.raises(StrategyUnavailableError) as caught:
        plan(R1, installed("0.8.0", without(symbols_of(NEWEST), LOGITS_ENTRY)), backend="trtllm", strategy="split")
    assert set(caught.value.codes) == {"entry_point_missing"}


@pytest.mark.parametrize(
    ("change", "symbols", "note"),
    [
        ({"norm_topk_prob": False}, CHANGED["a keyword more"], "always normalises"),
        (
            {"routing_method": "renormalize", "n_group": 1, "topk_group": 1},
            CHANGED["a keyword more"],
            "ignores routed_scaling_factor",
        ),
        (
            {"routing_method": "topk_sigmoid", "n_group": 1, "topk_group": 1, "routed_scaling_factor": 1.0},
            symbols_of("0.6.17"),
            "has no TopKSigmoid",
        ),
    ],
)
def test_an_unknown_release_is_not_handed_what_no_kernel_reads(
    change: dict[str, object], symbols: SymbolTable, note: str
) -> None:
    symbols = with_parameter(symbols, ROUTED_ENTRY, "new_keyword")
    decision = plan(changed(R1, **change), installed("0.8.0", symbols))
    assert decision.call is not None
    assert (decision.call.entry_point, decision.call.routed_before) == (ROUTED_ENTRY, True)
    assert decision.status is Evidence.PRESENT
    assert any("Routing runs outside the kernel" in line and note in line for line in decision.notes)
    with pytest.raises(StrategyUnavailableError) as caught:
        plan(changed(R1, **change), installed("0.8.0", without(symbols, ROUTED_ENTRY)), backend="trtllm")
    assert "entry_point_missing" in caught.value.codes


def test_an_unknown_release_without_geglu_is_not_asked_for_it() -> None:
    symbols = without(CHANGED["a keyword more"], "ActivationType")
    for problem in (R1, R1_TOPK):
        geglu = changed(problem, activation="geglu")
        assert plan(geglu, installed("0.8.0", CHANGED["a keyword more"])).backend is Backend.TRTLLM
        with pytest.raises(StrategyUnavailableError) as caught:
            plan(geglu, installed("0.8.0", symbols), backend="trtllm", strategy="split")
        assert caught.value.codes == ("activation",)


@pytest.mark.parametrize("entry", ["silu_and_mul_nvfp4_quantize", "MoELayer", "autotune_v2"])
def test_what_no_planned_call_uses_does_not_make_a_release_unknown(entry: str) -> None:
    target = installed("0.8.0", without(symbols_of(NEWEST), entry))
    assert plan(R1, target).strategy is Strategy.NATIVE


# No version at all.


@pytest.mark.parametrize("version", ["0.0.0+unknown", "0.0.0", "not a version"])
@pytest.mark.parametrize("release", ["0.7.4", "0.6.17", "0.6.15", "0.5.3"])
def test_a_build_without_a_version_behaves_like_the_release_with_its_signatures(version: str, release: str) -> None:
    target = installed(version, symbols_of(release))
    assert target.flashinfer is not None
    assert target.flashinfer.behaviour is not None
    assert target.flashinfer.behaviour <= Version(release)
    assert target.flashinfer.behaviour_source.endswith(f"those of {target.flashinfer.behaviour}")
    decision = plan(R1, target)
    assert decision.status is Evidence.ELIGIBLE
    assert decision.strategy is (Strategy.NATIVE if release in ("0.7.4", "0.6.17") else Strategy.SPLIT)


def test_a_build_without_a_version_and_with_unknown_signatures_is_not_trusted_to_fuse() -> None:
    target = installed("0.0.0+unknown", CHANGED["a keyword more"])
    decision = plan(R1, target)
    assert (decision.strategy, decision.status) == (Strategy.SPLIT, Evidence.PRESENT)
    assert any("names no release" in note for note in decision.notes)


def _assumed(release: str) -> Version | None:
    return behaviour_of("0.0.0+unknown", symbols_of(release))[0]


LOOK_LIKE_ANOTHER = [release for release in releases() if _assumed(release) != Version(release)]
VARIED = [
    changed(
        R1,
        num_experts=num_experts,
        top_k=top_k,
        n_group=n_group,
        topk_group=n_group // 2 or 1,
        routing_input=given,
        routing_method=method,
        routed_scaling_factor=1.0,
    )
    for (num_experts, top_k), (n_group, method), given in product(
        ((30, 1), (64, 8), (128, 4), (256, 8)),
        ((8, "deepseek_v3"), (2, "deepseek_v3"), (1, "deepseek_v3"), (1, "renormalize"), (1, "topk"), (1, "minimax2")),
        ("logits", "topk"),
    )
    if num_experts % n_group == 0
]


@pytest.mark.parametrize("release", LOOK_LIKE_ANOTHER)
def test_what_is_assumed_of_an_unnamed_build_holds_for_the_release_it_is(release: str) -> None:
    target = Target.from_release(release, "sm100")
    unnamed = installed("0.0.0+unknown", symbols_of(release))
    for problem in VARIED:
        assumed = plan(problem, unnamed)
        if assumed.backend is Backend.TORCH:
            continue
        call = plan(problem, target, strategy=assumed.strategy, backend="trtllm").call
        assert assumed.call is not None
        assert call is not None
        # The build may route what the assumed release cannot, never the other way round.
        assert assumed.call.routed_before or not call.routed_before, problem


# Nightlies, whose number says less than their signatures.


@pytest.mark.parametrize("version", ["0.6.16.dev20260801", "0.6.16.dev1+g1234567", "0.6.17.dev20260815"])
def test_a_nightly_has_the_keyword_its_number_denies(version: str) -> None:
    decision = plan(R1, installed(version, symbols_of("0.6.17")))
    assert (decision.strategy, decision.backend, decision.status) == (
        Strategy.NATIVE,
        Backend.TRTLLM,
        Evidence.ELIGIBLE,
    )
    assert decision.call is not None
    assert decision.call.num_fused_shared_experts == 1


@pytest.mark.parametrize("version", ["0.6.17.dev20260815", "0.6.17", "0.7.0rc1"])
def test_a_build_without_the_keyword_its_number_promises_does_not_get_it(version: str) -> None:
    target = installed(version, symbols_of("0.6.16"))
    assert plan(R1, target).strategy is Strategy.SPLIT
    with pytest.raises(StrategyUnavailableError, match="takes no num_fused_shared_experts") as caught:
        plan(R1, target, strategy="native")
    assert caught.value.codes == ("keyword_missing",)


@pytest.mark.parametrize("version", ["0.6.16.dev20260801", "0.6.18.dev20260901", "0.6.19.dev1", "0.7.0.dev1", "0.8.0"])
@pytest.mark.parametrize("release", ["0.7.0", "0.7.4"])
def test_the_routed_keyword_of_a_nightly_is_not_a_working_feature(version: str, release: str) -> None:
    target = installed(version, symbols_of(release))
    assert feature_states(target)["fused_shared_routed"].evidence is Evidence.PRESENT
    decision = plan(R1_TOPK, target)
    assert decision.call is None or decision.call.num_fused_shared_experts == 0


@pytest.mark.parametrize("version", ["0.6.16.dev1", "0.6.17.dev1", "0.6.19.dev1", "0.7.0.dev1"])
def test_a_nightly_without_groups_is_refused_for_the_silent_defect_too(version: str) -> None:
    ungrouped = changed(R1, n_group=1, topk_group=1)
    with pytest.raises(StrategyUnavailableError) as caught:
        plan(ungrouped, installed(version, symbols_of("0.6.17")), strategy="native")
    assert set(caught.value.codes) == {"no_expert_groups", "known_issue"}


@pytest.mark.parametrize(
    ("version", "release", "change"),
    [
        ("0.6.3.dev1", "0.6.2", {"n_group": 8, "topk_group": 2}),
        ("0.5.0.dev1", "0.4.1", {"routing_method": "deepseek_v3"}),
        ("0.6.13.dev1", "0.6.12", {"routing_method": "minimax2", "n_group": 1, "topk_group": 1}),
    ],
)
def test_a_nightly_of_the_release_with_the_repair_may_lack_it(
    version: str, release: str, change: dict[str, object]
) -> None:
    problem = changed(R1, num_experts=128, top_k=4, **change)
    known = plan(problem, Target.from_release(release, "sm100"))
    found = plan(problem, installed(version, symbols_of(release)))
    assert known.call is not None
    assert known.call.routed_before
    assert found.call == known.call


# `require`


@pytest.mark.parametrize("require", [None, "absent", "present", "eligible"])
def test_an_eligible_strategy_meets_what_it_reaches(require: str | None) -> None:
    assert plan(R1, Target.from_release(NEWEST, "sm100"), require=require).strategy is Strategy.NATIVE


@pytest.mark.parametrize("architecture", ["sm100", "sm90", None])
def test_planning_alone_verifies_nothing(architecture: str | None) -> None:
    with pytest.raises(StrategyUnavailableError, match="verified was required") as caught:
        plan(R1, Target.from_release(NEWEST, architecture), require="verified")
    assert "evidence" in caught.value.codes


def test_requiring_eligible_turns_down_an_unknown_release() -> None:
    target = installed("0.8.0", CHANGED["a keyword more"])
    assert plan(R1, target, require="present").backend is Backend.TRTLLM
    assert plan(R1, target, require="eligible").backend is Backend.TORCH
    with pytest.raises(StrategyUnavailableError) as caught:
        plan(R1, target, strategy="split", require=Evidence.ELIGIBLE)
    assert caught.value.codes == ("evidence",)


@pytest.mark.parametrize("require", ["absent", "present"])
def test_requiring_less_does_not_make_an_unknown_release_fuse(require: str) -> None:
    with pytest.raises(StrategyUnavailableError) as caught:
        plan(R1, installed("0.8.0", CHANGED["a keyword more"]), strategy="native", require=require)
    assert set(caught.value.codes) == {"behaviour_unknown"}


def test_a_torch_without_cuda_runs_no_kernel() -> None:
    target = replace(Target.from_release("0.7.4", "sm100", "2.13.0+cpu"), torch_cuda=None)
    decision = plan(DEEPSEEK_R1, target)
    assert decision.backend is Backend.TORCH
    codes = {one.reason.code for one in decision.rejected if one.backend is Backend.TRTLLM}
    assert codes == {ReasonCode.TORCH_WITHOUT_CUDA, ReasonCode.NEEDS_TOPK}
    # Without a GPU that is not what is wrong.
    bare = plan(DEEPSEEK_R1, replace(target, architecture=None))
    assert ReasonCode.TORCH_WITHOUT_CUDA not in {one.reason.code for one in bare.rejected}


@pytest.mark.parametrize(
    ("changes", "code"),
    [
        ({"architecture": "sm75"}, ReasonCode.ARCHITECTURE),
        ({"architecture": None}, ReasonCode.NO_GPU),
        ({"torch_cuda": None}, ReasonCode.TORCH_WITHOUT_CUDA),
        ({"torch_version": None}, ReasonCode.TORCH_MISSING),
        ({"libraries": {}}, ReasonCode.LIBRARY_MISSING),
        ({"libraries": {"triton": "3.4.0"}}, ReasonCode.LIBRARY_MISSING),
        ({"libraries": {"pytorch-triton": "3.4.0+gitc817b9b6"}}, ReasonCode.LIBRARY_MISSING),
    ],
)
def test_what_the_triton_kernels_need(changes: dict[str, object], code: ReasonCode) -> None:
    bare = Target(None, "flashinfer is not installed.", "sm90", "2.11.0", {"triton": "3.6.0"})
    assert plan(DEEPSEEK_R1, bare).backend is Backend.TRITON
    with pytest.raises(StrategyUnavailableError) as caught:
        plan(DEEPSEEK_R1, replace(bare, **changes), backend="triton", strategy="native")
    assert caught.value.codes == (code.value,)


@pytest.mark.parametrize("libraries", [{"triton": "3.5.0"}, {"pytorch-triton": "3.6.0+git3a1d8e6f"}])
def test_which_triton_will_do(libraries: dict[str, str]) -> None:
    target = Target(None, "flashinfer is not installed.", "sm90", "2.9.0", libraries)
    assert plan(DEEPSEEK_R1, target).backend is Backend.TRITON
