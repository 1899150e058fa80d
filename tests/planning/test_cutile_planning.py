"""When FlashInfer's cuTile MoE is planned, and what is said where it is not."""

from __future__ import annotations

from dataclasses import replace

import pytest
from packaging.version import Version
from problem_fields import changed

from flashinfer_compat.architectures import ARCHITECTURES
from flashinfer_compat.errors import StrategyUnavailableError
from flashinfer_compat.features import known_issues, table
from flashinfer_compat.features.target import FlashInfer, Target
from flashinfer_compat.planning.cutile import PASSED
from flashinfer_compat.planning.plan import plan
from flashinfer_compat.problem import DEEPSEEK_R1
from flashinfer_compat.reasons import ReasonCode
from flashinfer_compat.signatures.model import SymbolTable
from flashinfer_compat.signatures.recorded import recorded, releases
from flashinfer_compat.vocabulary import Backend, Evidence, Strategy

TOPK = changed(DEEPSEEK_R1, numerics="w4a16", routing_input="topk")
LOGITS = changed(DEEPSEEK_R1, numerics="w4a16")
H200 = Target.from_release("0.7.4", "sm90")


def codes(target: Target, strategy: str = "split") -> list[str]:
    with pytest.raises(StrategyUnavailableError) as caught:
        plan(TOPK, target, strategy=strategy, backend="cutile")
    return list(caught.value.codes)


@pytest.mark.parametrize("release", ["0.7.1", "0.7.2", "0.7.2.post1", "0.7.4"])
@pytest.mark.parametrize("architecture", ["sm89", "sm90", "sm120", "sm121"])
def test_it_is_planned_where_flashinfer_has_it(release: str, architecture: str) -> None:
    target = Target.from_release(release, architecture)
    chosen = plan(TOPK, target, backend="cutile")
    assert (chosen.strategy, chosen.status, chosen.call) == (Strategy.EXPANDED, Evidence.ELIGIBLE, None)
    assert plan(LOGITS, target, backend="cutile").strategy is Strategy.SPLIT


def test_triton_is_preferred_and_cutile_comes_before_the_reference() -> None:
    assert plan(TOPK, H200).backend is Backend.TRITON
    without = replace(H200, libraries={name: "" for name in H200.libraries if name != "triton"})
    for strategy in ("auto", "expanded", "split"):
        assert plan(TOPK, without, strategy=strategy).backend is Backend.CUTILE


def test_other_gpus_and_releases_have_none() -> None:
    for architecture in set(ARCHITECTURES) - {"sm89", "sm90", "sm120", "sm121"}:
        assert codes(Target.from_release("0.7.4", architecture)) == ["architecture"]
    assert codes(Target.from_release("0.7.4", None)) == ["no_gpu"]
    for release in releases():
        if Version(release) < Version("0.7.1rc1"):
            assert codes(Target.from_release(release, "sm90")) == ["entry_point_missing"]


@pytest.mark.parametrize(
    ("target", "found"),
    [
        (Target(None, "flashinfer is not installed.", "sm90", "2.11.0"), ["flashinfer_missing"]),
        (replace(H200, torch_version=None), ["torch_missing"]),
        (replace(H200, torch_version="2.11.0", torch_cuda=None), ["torch_without_cuda"]),
        (replace(H200, libraries={}), ["library_missing", "library_missing"]),
        (replace(H200, libraries={"cuda-tile": "1.7.0"}), ["library_missing"]),
        (replace(H200, libraries={"cuda-tile": "1.2.0", "nvidia-cuda-tileiras": "13.4.92"}), ["library_missing"]),
    ],
)
def test_what_an_install_may_lack(target: Target, found: list[str]) -> None:
    assert codes(target) == found
    assert codes(target, "expanded") == found


def test_every_release_that_has_it_takes_what_is_passed() -> None:
    for release in releases():
        symbols = recorded(release).symbols
        if symbols.get("CuTileNvfp4Bf16Config") is not None:
            for name, keywords in PASSED.items():
                assert all(symbols.has_parameter(name, one) for one in keywords), (release, name)


def newer(symbols: SymbolTable, behaviour: str | None = "0.7.4") -> Target:
    like = None if behaviour is None else Version(behaviour)
    return replace(H200, flashinfer=FlashInfer("0.8.0", symbols, like, "it looks like none"))


def test_a_renamed_class_or_keyword_is_told() -> None:
    symbols = recorded("0.7.4").symbols.symbols
    gone = SymbolTable({name: one for name, one in symbols.items() if name != "ExecutionConfig"}, {})
    assert codes(newer(gone)) == ["entry_point_missing"]
    config = symbols["RoutingConfig"]
    without = replace(config, parameters=tuple(one for one in config.parameters or () if one.name != "top_k"))
    assert codes(newer(SymbolTable({**symbols, "RoutingConfig": without}, {}))) == ["keyword_missing"]


def test_of_an_unknown_release_split_is_present_and_nothing_is_fused() -> None:
    target = newer(recorded("0.7.4").symbols, None)
    chosen = plan(TOPK, target, backend="cutile", strategy="split")
    assert chosen.status is Evidence.PRESENT
    assert any("rules of this release are not known" in note for note in chosen.notes)
    assert codes(target, "expanded") == ["behaviour_unknown"]


def test_a_known_issue_refuses_it(monkeypatch: pytest.MonkeyPatch) -> None:
    issue = known_issues.KnownIssue(
        id="made-up",
        title="it is wrong",
        releases=">=0.7.1",
        effect=known_issues.Effect.REFUSED,
        source="nowhere",
        features=frozenset({"cutile_nvfp4_bf16"}),
    )
    monkeypatch.setattr(table, "KNOWN_ISSUES", (issue,))
    assert codes(H200) == [ReasonCode.KNOWN_ISSUE.value]
