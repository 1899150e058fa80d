from __future__ import annotations

import enum
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flashinfer_compat import vocabulary
from flashinfer_compat.errors import UnknownNameError
from flashinfer_compat.signatures.recorded import recorded, releases
from flashinfer_compat.vocabulary import Activation, Backend, Evidence, RoutingMethod, Strategy, parse

ENUMERATIONS = [
    value for value in vars(vocabulary).values() if isinstance(value, type) and issubclass(value, enum.Enum)
]


def test_every_enumeration_is_public() -> None:
    assert {kind.__name__ for kind in ENUMERATIONS} | {"parse"} == set(vocabulary.__all__)


@pytest.mark.parametrize("kind", ENUMERATIONS)
def test_names_are_plain_json_strings(kind: type[enum.Enum]) -> None:
    for member in kind:
        assert json.loads(json.dumps(member)) == member.value == member.name.lower()


@pytest.mark.parametrize("kind", ENUMERATIONS)
def test_a_name_or_a_member_is_parsed(kind: type[enum.Enum]) -> None:
    for member in kind:
        assert parse(kind, member, "argument") is member
        assert parse(kind, member.value, "argument") is member


@pytest.mark.parametrize("kind", ENUMERATIONS)
@pytest.mark.parametrize("value", [None, 3, ["split"], {}, "", " split", b"split"])
def test_anything_else_is_refused(kind: type[enum.Enum], value: object) -> None:
    with pytest.raises(UnknownNameError) as caught:
        parse(kind, value, "argument")  # type: ignore[arg-type]
    assert caught.value.argument == "argument"
    assert caught.value.choices == tuple(member.value for member in kind)
    assert repr(str(value)) in str(caught.value)


@pytest.mark.parametrize(
    ("kind", "written", "nearest"),
    [
        (Strategy, "splitt", "split"),
        (Strategy, "NATIVE", "native"),
        (Backend, "TRT-LLM", "trtllm"),
        (RoutingMethod, "DeepSeekV3", "deepseek_v3"),
        (RoutingMethod, "renormalise", "renormalize"),
        (Activation, "SwiGLU", "swiglu"),
        (Activation, "quite different", None),
    ],
)
def test_the_nearest_name_is_offered(kind: type[enum.Enum], written: str, nearest: str | None) -> None:
    with pytest.raises(UnknownNameError) as caught:
        parse(kind, written, "name")
    assert caught.value.nearest == nearest
    assert ("Did you mean" in str(caught.value)) == (nearest is not None)


@given(st.sampled_from(ENUMERATIONS), st.text())
def test_any_text_is_a_name_or_refused(kind: type[enum.Enum], text: str) -> None:
    if text in {member.value for member in kind}:
        assert parse(kind, text, "argument").value == text
    else:
        with pytest.raises(UnknownNameError, match="argument: expected one of"):
            parse(kind, text, "argument")


def test_evidence_is_ordered() -> None:
    weakest_first = [one.value for one in sorted(Evidence, key=lambda one: one.rank)]
    assert weakest_first == ["refuted", "absent", "present", "eligible", "verified"]


def test_only_split_is_not_fused() -> None:
    assert [one for one in Strategy if not one.is_fused] == [Strategy.SPLIT]


@pytest.mark.parametrize("method", RoutingMethod)
def test_routing_methods_are_members_of_some_release(method: RoutingMethod) -> None:
    having = [
        one for one in releases() if recorded(one).symbols.has_member("RoutingMethodType", method.flashinfer_name)
    ]
    assert having[-1] == releases()[-1]


@pytest.mark.parametrize("activation", Activation)
def test_activations_are_members_of_some_release(activation: Activation) -> None:
    having = [
        one for one in releases() if recorded(one).symbols.has_member("ActivationType", activation.flashinfer_name)
    ]
    assert having[-1] == releases()[-1]


def test_flashinfer_names_are_distinct() -> None:
    assert len({one.flashinfer_name for one in RoutingMethod}) == len(RoutingMethod)
    assert len({one.flashinfer_name for one in Activation}) == len(Activation)
