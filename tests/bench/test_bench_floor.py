"""The floor's figures, reckoned by hand."""

from __future__ import annotations

import pytest

from flashinfer_compat.bench.floor import RATES, Rates, floor_microseconds, rates_of
from flashinfer_compat.bench.shapes import Sizes
from flashinfer_compat.errors import ArgumentError
from flashinfer_compat.vocabulary import Numerics, RoutingInput

H200 = RATES["NVIDIA H200"]


def test_few_tokens_wait_for_memory() -> None:
    # 3 * 7168 * 256 = 5,505,024 values in 4.5 bits of 8: 3,096,576 bytes; nine experts are 27,869,184 bytes.
    assert Sizes(intermediate_size=256).expert_bytes == 3_096_576
    assert floor_microseconds(Sizes(intermediate_size=256), 1, 9, H200) == pytest.approx(27_869_184 / 4.3e6)
    assert floor_microseconds(Sizes(intermediate_size=256), 1, 9, H200) == pytest.approx(6.48, abs=0.01)


def test_many_tokens_wait_for_the_products() -> None:
    # 2 * 3 * 7168 * 2048 * 4096 * 9 = 3.247e12 operations.
    assert floor_microseconds(Sizes(), 4096, 257, H200) == pytest.approx(3.24696e12 / 790e6, rel=1e-4)
    # All 257 experts' bytes would take less: 257 * 24,772,608 / 4.3e12.
    assert floor_microseconds(Sizes(), 1, 257, H200) == pytest.approx(1480.6, abs=0.1)


def test_shared_experts_count_in_both() -> None:
    rates = Rates(1e12, 1e12, "given")
    without, with_two = (Sizes(64, 32, 8, 2, shared) for shared in (0, 2))
    assert floor_microseconds(with_two, 10, 4, rates) == 2 * floor_microseconds(without, 10, 2, rates)


def test_no_rate_is_guessed() -> None:
    assert rates_of("NVIDIA H200", None, None) == H200
    assert rates_of("NVIDIA B300", None, None) is None
    assert rates_of(None, None, None) is None


def test_given_rates_come_first() -> None:
    assert rates_of("NVIDIA B300", 8.0, 2000.0) == Rates(8e12, 2000e12, "given")
    half = rates_of("NVIDIA H200", 4.0, None)
    assert half is not None
    assert (half.bytes_per_second, half.flops_per_second) == (4e12, 790e12)
    assert "measured" in half.source


@pytest.mark.parametrize(
    ("gpu", "given", "named"),
    [
        ("NVIDIA B300", (8.0, None), "--flops"),
        (None, (None, 100.0), "--bandwidth"),
        ("NVIDIA H200", (0.0, None), "--bandwidth"),
        ("NVIDIA H200", (None, float("nan")), "--flops"),
        ("NVIDIA H200", (float("inf"), None), "--bandwidth"),
    ],
)
def test_half_a_floor_is_refused(gpu: str | None, given: tuple[float | None, float | None], named: str) -> None:
    with pytest.raises(ArgumentError) as caught:
        rates_of(gpu, *given)
    assert caught.value.argument == named


def test_r1_has_its_groups_and_other_layers_have_none() -> None:
    r1 = Sizes().problem(RoutingInput.TOPK, Numerics.W4A4)
    other = Sizes(num_experts=128).problem(RoutingInput.TOPK, Numerics.W4A4)
    assert (r1.n_group, r1.topk_group, other.n_group, other.topk_group) == (8, 4, 1, 1)
    assert Sizes.of(r1) == Sizes()
    # More experts a token than its groups hold: then it has none.
    assert Sizes(top_k=130).problem(RoutingInput.TOPK, Numerics.W4A4).n_group == 1
