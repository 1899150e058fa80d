"""Two ranks of the real vLLM build a model: what they hold, and what happens where they differ."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

if any(importlib.util.find_spec(name) is None for name in ("vllm", "flashinfer")):
    pytest.skip("needs vLLM and flashinfer-python: scripts/test-engines.sh vllm", allow_module_level=True)

RELEASES = {
    "alike": ("0.7.2.post1", "0.7.2.post1"),
    "another release": ("0.7.2.post1", "0.7.4"),
    "too old": ("0.7.2.post1", "0.6.15.post1"),
    "expert parallel": ("0.7.2.post1", "0.6.15.post1"),
}


@pytest.fixture(scope="module")
def answers(run_child: Callable[..., Any], tmp_path_factory: pytest.TempPathFactory, checkpoints: Path) -> Any:
    store = (tmp_path_factory.mktemp("store") / "file").as_uri()

    def ask(rank: int) -> Any:
        cases = [
            {"release": releases[rank], "arguments": {"enable_expert_parallel": True} if name[0] == "e" else {}}
            for name, releases in RELEASES.items()
        ]
        question = {"rank": rank, "store": store, "folder": str(checkpoints / "grouped"), "cases": cases}
        return run_child(
            "ask_vllm_layout.py",
            question,
            FLASHINFER_COMPAT_VLLM_FUSION="1",
            VLLM_MLA_DISABLE="1",
            VLLM_DISABLE_SHARED_EXPERTS_STREAM="1",
        )

    with ThreadPoolExecutor(2) as pool:
        ranks = list(pool.map(ask, range(2)))
    return {name: [one[number] for one in ranks] for number, name in enumerate(RELEASES)}


def test_ranks_that_agree_hold_their_slice_of_the_shared_expert(answers: Any) -> None:
    for found in answers["alike"]:
        assert found["experts"] == "FusedMonolithic"
        assert not found["shared_mlp"]
        assert set(found["same_rows"].values()) == {True}


def test_the_ranks_outputs_add_up_to_the_routed_experts_and_the_shared_one(answers: Any) -> None:
    for found in answers["alike"]:
        assert found["error"] < 8e-3


def test_only_the_first_rank_says_what_was_decided(answers: Any) -> None:
    first, second = answers["alike"]
    assert ["on: native is eligible" in line for line in first["lines"]] == [True]
    assert second["lines"] == []


def test_vllms_own_functions_are_back_in_their_places(answers: Any) -> None:
    assert {found["restored"] for found in answers["alike"]} == {True}


@pytest.mark.parametrize(
    ("name", "fact"),
    [
        ("another release", "rank 1 has flashinfer.version = 0.7.4, most ranks 0.7.2.post1"),
        ("too old", "rank 1 has fusion = left as it is, most ranks on"),
    ],
)
def test_ranks_that_differ_are_named_before_anything_is_loaded(answers: Any, name: str, fact: str) -> None:
    for found in answers[name]:
        assert found["error"].startswith("RankDisagreementError")
        assert fact in found["error"]


def test_a_setting_keeps_it_off_and_builds_what_vllm_builds(answers: Any) -> None:
    for found in answers["expert parallel"]:
        assert found["experts"] == "TrtLlmNvFp4ExpertsMonolithic"
        assert found["shared_mlp"]
    assert "kept off: expert parallelism is on" in answers["expert parallel"][0]["lines"][0]
