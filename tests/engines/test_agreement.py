"""Ranks that would run a layer differently find out before they load it."""

from __future__ import annotations

import json
import os
import pickle
import subprocess
import sys
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")

import flashinfer_compat as fc
from flashinfer_compat.engines.agreement import Difference, RankDisagreementError, _absence, facts_of, require_agreement
from flashinfer_compat.problem import DEEPSEEK_R1

HERE = Path(__file__).parent
RANKS = 4


OTHER: dict[str, Any] = {"release": "0.7.2"}
OUTER, LATER = {"group": [0, 2, 3]}, {"group": [1, 2, 3]}
WAITS = {"timeout": 3}
# What is different about each rank.
SCENARIOS: dict[str, list[dict[str, Any]]] = {
    "equal": [{}, {}, {}, {}],
    "release": [{}, {}, OTHER, {}],
    "first rank": [{"release": "0.6.17"}, {}, {}, {}],
    "two and two": [{}, OTHER, {}, OTHER],
    "strategy": [{}, {"strategy": "split"}, {}, {}],
    "architecture": [{}, {"architecture": "sm103"}, {}, {}],
    "top_k": [{}, {"top_k": 4}, {}, {}],
    "routing input": [{}, {"routing_input": "logits"}, {}, {}],
    "outside the group": [OUTER, {**OUTER, **OTHER}, OUTER, OUTER],
    "inside the group": [LATER, LATER, LATER, {**LATER, **OTHER}],
    # The last one, for it leaves the ranks out of step.
    "absent": [WAITS, WAITS, WAITS, {"absent": True}],
}


@pytest.fixture(scope="module")
def answers(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[Any]]:
    """By scenario, what each of four processes says."""
    store = (tmp_path_factory.mktemp("ranks") / "store").as_uri()
    environ = {**os.environ, "PYTHONPATH": str(HERE.parents[1]), "OMP_NUM_THREADS": "1"}
    script, scenarios = str(HERE / "agree_as_rank.py"), json.dumps(list(SCENARIOS.values()))
    children = [
        subprocess.Popen(
            [sys.executable, script, str(rank), str(RANKS), store, scenarios],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=environ,
        )
        for rank in range(RANKS)
    ]
    lines = [child.stdout.readline() for child in children]
    complaints = [child.communicate()[1] for child in children]
    assert all(lines), "\n".join(complaints)[-4000:]
    by_rank = [json.loads(line) for line in lines]
    return {name: [one[number] for one in by_rank] for number, name in enumerate(SCENARIOS)}


def test_equal_plans_agree(answers: dict[str, list[Any]]) -> None:
    assert answers["equal"] == [None] * RANKS


def test_a_rank_with_another_release_is_named_with_the_fact_on_every_rank(answers: dict[str, list[Any]]) -> None:
    assert len({json.dumps(one) for one in answers["release"]}) == 1
    message, differences = answers["release"][0]
    assert "rank 2 has flashinfer.version = 0.7.2, most ranks 0.7.4" in message
    assert [2, "flashinfer.version", "0.7.2", "0.7.4"] in differences
    assert {one[0] for one in differences} == {2}


def test_the_first_rank_can_be_the_different_one(answers: dict[str, list[Any]]) -> None:
    _, differences = answers["first rank"][3]
    assert {one[0] for one in differences} == {0}
    assert ["0.6.17", "0.7.4"] in [one[2:] for one in differences]


def test_two_against_two_are_told_apart_from_the_lowest_rank(answers: dict[str, list[Any]]) -> None:
    assert {one[0] for one in answers["two and two"][2][1]} == {1, 3}


@pytest.mark.parametrize(
    ("scenario", "fact", "value", "most"),
    [
        ("strategy", "strategy", "split", "expanded"),
        ("architecture", "architecture", "sm103", "sm100"),
        ("top_k", "call.top_k", "5", "9"),
        (
            "routing input",
            "call.entry_point",
            "trtllm_fp4_block_scale_moe",
            "trtllm_fp4_block_scale_routed_moe",
        ),
    ],
)
def test_the_differing_fact_is_named(
    answers: dict[str, list[Any]], scenario: str, fact: str, value: str, most: str
) -> None:
    assert [1, fact, value, most] in answers[scenario][0][1]


def test_only_the_group_has_to_agree(answers: dict[str, list[Any]]) -> None:
    found = answers["outside the group"]
    assert [found[rank] for rank in (0, 2, 3)] == [None] * 3
    assert "group: expected a group that this rank is in" in found[1][0]


def test_ranks_of_a_group_are_named_by_their_number_in_the_world(answers: dict[str, list[Any]]) -> None:
    assert {one[0] for one in answers["inside the group"][1][1]} == {3}


def test_a_rank_that_does_not_compare_is_named(answers: dict[str, list[Any]]) -> None:
    found = answers["absent"]
    assert "Not every rank compared its plan within 0:00:03" in found[0][0]
    first, *others = (one[0].splitlines()[0] for one in found[:3])
    assert first == "Not every rank compared its plan within 0:00:03: rank 3 did not."
    assert others == ["Not every rank compared its plan within 0:00:03: rank 0's log names it."] * 2


@pytest.mark.parametrize(
    ("said", "own", "text"),
    [
        ("[Rank 0]: Ranks 1, 2 failed to pass monitoredBarrier in 3000 ms", 4, "ranks 5, 7 did not."),
        ("[Rank 0]: Rank 1 failed to pass monitoredBarrier in 3000 ms", 4, "rank 5 did not."),
        ("Connection reset", 4, "which is not known.\nPyTorch says: Connection reset"),
        ("Connection reset", 5, "rank 4's log names it."),
    ],
)
def test_absent_ranks_have_their_number_in_the_world(said: str, own: int, text: str) -> None:
    message = _absence(said, [4, 5, 7], own, timedelta(seconds=3))
    assert message.startswith(f"Not every rank compared its plan within 0:00:03: {text}\n")


def test_without_torch_distributed_nothing_is_done_and_torch_is_not_loaded() -> None:
    code = """
import sys
from dataclasses import replace
import flashinfer_compat as fc
from flashinfer_compat.engines.agreement import require_agreement
from flashinfer_compat.problem import DEEPSEEK_R1
target = fc.Target.from_release("0.7.4", "sm100")
require_agreement(fc.plan(DEEPSEEK_R1, target))
assert "torch" not in sys.modules
import torch
require_agreement(fc.plan(DEEPSEEK_R1, target))
"""
    subprocess.run([sys.executable, "-c", code], check=True)


def test_something_else_than_a_plan_is_refused() -> None:
    with pytest.raises(fc.ArgumentError, match="plan: expected what plan returned, got str"):
        require_agreement("native")  # type: ignore[arg-type]


def test_evidence_and_notes_are_no_facts() -> None:
    target = fc.Target.from_release("0.7.4", "sm100")
    names = set(facts_of(fc.plan(DEEPSEEK_R1, target), target))
    assert {"flashinfer.version", "flashinfer.behaviour", "architecture", "strategy", "backend"} <= names
    assert {"call.num_experts", "call.top_k", "call.weight_rows", "problem.hidden_size"} <= names
    assert not {"status", "notes", "rejected"} & names


def test_ranks_that_run_split_from_other_token_counts_on_do_not_agree() -> None:
    target = fc.Target.from_release("0.7.4", "sm90")
    fused = fc.plan(DEEPSEEK_R1, target)
    one, other = (facts_of(replace(fused, split_from_tokens=tokens), target) for tokens in (None, 512))
    assert {name for name in one if one[name] != other[name]} == {"split_from_tokens"}


def test_the_error_can_leave_its_process() -> None:
    error = RankDisagreementError("text", (Difference(2, "strategy", "split", "native"),))
    again = pickle.loads(pickle.dumps(error))
    assert (str(again), again.differences) == (str(error), error.differences)
