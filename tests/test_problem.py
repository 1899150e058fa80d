from __future__ import annotations

import dataclasses
import enum
import json
import math
import pickle
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flashinfer_compat.errors import ArgumentError, UnknownNameError
from flashinfer_compat.problem import DEEPSEEK_R1, Problem
from flashinfer_compat.vocabulary import (
    Activation,
    ActivationScaling,
    Numerics,
    RoutedScaling,
    RoutingInput,
    RoutingMethod,
    SharedExpertFormat,
    SharedExpertPlacement,
)

SMALL: dict[str, Any] = {"hidden_size": 32, "intermediate_size": 16, "num_experts": 8, "top_k": 2}


def problem(**changes: Any) -> Problem:
    return Problem(**{**SMALL, **changes})


@pytest.mark.parametrize(
    ("changes", "argument"),
    [
        ({"hidden_size": 0}, "hidden_size"),
        ({"hidden_size": 24}, "hidden_size"),
        ({"hidden_size": 32.0}, "hidden_size"),
        ({"hidden_size": "32"}, "hidden_size"),
        ({"intermediate_size": -16}, "intermediate_size"),
        ({"intermediate_size": 8}, "intermediate_size"),
        ({"num_experts": True}, "num_experts"),
        ({"num_experts": 0}, "num_experts"),
        ({"top_k": 0}, "top_k"),
        ({"top_k": 9}, "top_k"),
        ({"top_k": None}, "top_k"),
        ({"n_group": -1}, "n_group"),
        ({"n_group": 2, "routing_method": "renormalize"}, "n_group"),
        ({"n_group": 3}, "n_group"),
        ({"num_experts": 8, "n_group": 8, "topk_group": 4, "top_k": 2}, "n_group"),
        ({"topk_group": 2}, "topk_group"),
        ({"n_group": 4, "topk_group": 5}, "topk_group"),
        ({"n_group": 4, "topk_group": 1, "top_k": 3}, "top_k"),
        ({"ep_size": 0}, "ep_size"),
        ({"ep_size": 3}, "ep_size"),
        ({"num_shared_experts": -1}, "num_shared_experts"),
        ({"num_shared_experts": 1}, "shared_format"),
        ({"shared_format": "nvfp4"}, "shared_format"),
        ({"routed_scaling_factor": 0}, "routed_scaling_factor"),
        ({"routed_scaling_factor": -1.0}, "routed_scaling_factor"),
        ({"routed_scaling_factor": math.nan}, "routed_scaling_factor"),
        ({"routed_scaling_factor": math.inf}, "routed_scaling_factor"),
        ({"routed_scaling_factor": "2.5"}, "routed_scaling_factor"),
        ({"routed_scaling_factor": None}, "routed_scaling_factor"),
        ({"routed_scaling_factor": True}, "routed_scaling_factor"),
        ({"norm_topk_prob": "false"}, "norm_topk_prob"),
        ({"norm_topk_prob": None}, "norm_topk_prob"),
        ({"norm_topk_prob": 1}, "norm_topk_prob"),
    ],
)
def test_impossible_layers_are_refused_by_field(changes: dict[str, Any], argument: str) -> None:
    with pytest.raises(ArgumentError) as caught:
        problem(**changes)
    assert caught.value.argument == argument
    assert str(caught.value).startswith(f"{argument}: expected ")


ENUMERATIONS: dict[str, type[enum.Enum]] = {
    "shared_format": SharedExpertFormat,
    "routing_method": RoutingMethod,
    "routing_input": RoutingInput,
    "routed_scaling": RoutedScaling,
    "activation": Activation,
    "numerics": Numerics,
    "activation_scaling": ActivationScaling,
    "shared_placement": SharedExpertPlacement,
}


@pytest.mark.parametrize("field", ENUMERATIONS)
@pytest.mark.parametrize("value", ["unknown", "", 3])
def test_unknown_names_are_refused(field: str, value: object) -> None:
    with pytest.raises(UnknownNameError) as caught:
        problem(**{field: value})
    assert caught.value.argument == field
    assert caught.value.choices == tuple(member.value for member in ENUMERATIONS[field])


@pytest.mark.parametrize("field", sorted(set(ENUMERATIONS) - {"shared_placement"}))
def test_none_is_no_name(field: str) -> None:
    with pytest.raises(UnknownNameError) as caught:
        problem(**{field: None})
    assert caught.value.argument == field


def test_every_field_is_in_the_tests_of_names_or_sizes() -> None:
    sizes = {"hidden_size", "intermediate_size", "num_experts", "top_k", "num_shared_experts", "n_group", "topk_group"}
    others = {"ep_size", "routed_scaling_factor", "norm_topk_prob", "shared_gate"}
    assert {field.name for field in dataclasses.fields(Problem)} == sizes | others | set(ENUMERATIONS)


def test_what_has_no_meaning_is_refused() -> None:
    with pytest.raises(ArgumentError, match="activation_scaling"):
        problem(activation_scaling="per_token", numerics="w4a16")
    with pytest.raises(ArgumentError, match="shared_gate"):
        problem(shared_gate=True)
    with pytest.raises(ArgumentError, match="shared_gate"):
        problem(shared_gate="yes")


def test_names_become_members() -> None:
    made = problem(activation="relu2", numerics="w4a16", shared_placement="sharded", routing_method="topk")
    assert made.activation is Activation.RELU2
    assert made.numerics is Numerics.W4A16
    assert made.shared_placement is SharedExpertPlacement.SHARDED
    assert made.routing_method is RoutingMethod.TOPK
    assert made == problem(
        activation=Activation.RELU2,
        numerics=Numerics.W4A16,
        shared_placement=SharedExpertPlacement.SHARDED,
        routing_method=RoutingMethod.TOPK,
    )


@st.composite
def problems(draw: st.DrawFn) -> Problem:
    n_group = draw(st.sampled_from([1, 2, 4]))
    per_group = draw(st.integers(1 if n_group == 1 else 2, 16))
    topk_group = draw(st.integers(1, n_group))
    experts = n_group * per_group
    shared = draw(st.integers(0, 2))
    formats = [SharedExpertFormat.NVFP4, SharedExpertFormat.BF16] if shared else [SharedExpertFormat.NONE]
    return Problem(
        hidden_size=16 * draw(st.integers(1, 512)),
        intermediate_size=16 * draw(st.integers(1, 512)),
        num_experts=experts,
        top_k=draw(st.integers(1, topk_group * per_group)),
        num_shared_experts=shared,
        shared_format=draw(st.sampled_from(formats)),
        routing_method=draw(st.sampled_from(RoutingMethod)) if n_group == 1 else RoutingMethod.DEEPSEEK_V3,
        routing_input=draw(st.sampled_from(RoutingInput)),
        n_group=n_group,
        topk_group=topk_group,
        routed_scaling_factor=draw(st.floats(1e-3, 100) | st.integers(1, 4)),
        norm_topk_prob=draw(st.booleans()),
        routed_scaling=draw(st.sampled_from(RoutedScaling)),
        activation=draw(st.sampled_from(Activation)),
        numerics=draw(st.sampled_from(Numerics)),
        ep_size=draw(st.sampled_from([size for size in (1, 2, 4, 8) if experts % size == 0])),
        shared_placement=draw(st.none() | st.sampled_from(SharedExpertPlacement)),
    )


@given(problems())
def test_a_problem_reads_back_from_json(made: Problem) -> None:
    values = json.loads(json.dumps(made.to_dict()))
    assert Problem(**values) == made
    assert Problem(**made.to_dict()) == made
    assert list(values) == [field.name for field in dataclasses.fields(Problem)]


@given(problems())
def test_a_problem_is_a_value(made: Problem) -> None:
    again = pickle.loads(pickle.dumps(made))
    assert again == made
    assert hash(again) == hash(made)
    assert again.is_grouped == (made.n_group > 1)
    with pytest.raises(dataclasses.FrozenInstanceError):
        made.top_k = 1  # type: ignore[misc]


def test_a_replacement_is_checked_too() -> None:
    with pytest.raises(ArgumentError, match="ep_size"):
        dataclasses.replace(DEEPSEEK_R1, ep_size=7)


def test_deepseek_r1() -> None:
    assert DEEPSEEK_R1.to_dict() == {
        "hidden_size": 7168,
        "intermediate_size": 2048,
        "num_experts": 256,
        "top_k": 8,
        "num_shared_experts": 1,
        "shared_format": "nvfp4",
        "routing_method": "deepseek_v3",
        "routing_input": "logits",
        "n_group": 8,
        "topk_group": 4,
        "routed_scaling_factor": 2.5,
        "norm_topk_prob": True,
        "routed_scaling": "routing_weights",
        "activation": "swiglu",
        "numerics": "w4a4",
        "activation_scaling": "checkpoint",
        "shared_gate": False,
        "ep_size": 1,
        "shared_placement": None,
    }
    assert DEEPSEEK_R1.is_grouped


def test_the_reachable_experts_are_the_limit_of_top_k() -> None:
    assert problem(n_group=4, topk_group=2, top_k=4).top_k == 4
    with pytest.raises(ArgumentError, match="at most the 4 experts"):
        problem(n_group=4, topk_group=2, top_k=5)


@pytest.mark.parametrize("written", [0, None, 1])
def test_no_groups_can_be_written_in_three_ways(written: int | None) -> None:
    problem = Problem(256, 128, 16, 4, n_group=written, topk_group=written)  # type: ignore[arg-type]
    assert (problem.n_group, problem.topk_group, problem.is_grouped) == (1, 1, False)
