from __future__ import annotations

import pytest

from flashinfer_compat.architectures import ARCHITECTURES, parse_architecture
from flashinfer_compat.errors import ArgumentError, UnknownNameError


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_every_way_to_write_an_architecture(name: str) -> None:
    number = name.removeprefix("sm")
    dotted = f"{number[:-1]}.{number[-1]}"
    forms = [
        name,
        name.upper(),
        f"sm_{number}",
        f"SM_{number}a",
        f"{name}f",
        number,
        f"{number}a",
        dotted,
        f"{dotted}a",
        f" {name}\n",
    ]
    assert {parse_architecture(form) for form in forms} == {name}


def test_the_architectures_are_in_order() -> None:
    numbers = [int(name.removeprefix("sm")) for name in ARCHITECTURES]
    assert numbers == sorted(set(numbers))


@pytest.mark.parametrize(
    "text",
    [
        "sm102",
        "sm_101",
        "11.1",
        "0",
        "",
        "H200",
        "sm",
        "sm100b",
        "100.0",
        "-90",
        "sm90 sm100",
        "compute_90",
        "sm 90",
        "9.0.0",
    ],
)
def test_an_unknown_architecture_is_refused(text: str) -> None:
    with pytest.raises(UnknownNameError) as caught:
        parse_architecture(text)
    assert isinstance(caught.value, ArgumentError)
    assert (caught.value.argument, caught.value.choices) == ("architecture", ARCHITECTURES)
    assert f"got {text!r}" in str(caught.value)


@pytest.mark.parametrize(
    ("text", "near"), [("sm1000", "sm100"), ("SM100X", "sm100"), ("sm-121", "sm121"), ("H200", None)]
)
def test_a_near_architecture_is_offered(text: str, near: str | None) -> None:
    with pytest.raises(UnknownNameError) as caught:
        parse_architecture(text)
    assert caught.value.nearest == near


def test_a_renamed_architecture_is_told_by_its_new_name() -> None:
    for text in ("sm101", "sm_101a", "10.1"):
        with pytest.raises(UnknownNameError, match=r"Did you mean 'sm110'\?"):
            parse_architecture(text)
