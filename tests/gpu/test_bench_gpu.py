"""Times and memory on a GPU, of a small layer; and a measured policy at work."""

from __future__ import annotations

from dataclasses import replace

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("triton")

if not torch.cuda.is_available():
    pytest.skip("needs a CUDA GPU", allow_module_level=True)

from measured_values import row  # noqa: E402

import flashinfer_compat as fc  # noqa: E402
from flashinfer_compat.bench.reference import deviation_of, expected  # noqa: E402
from flashinfer_compat.bench.run import Asked, measure, ways_of  # noqa: E402
from flashinfer_compat.bench.shapes import Sizes  # noqa: E402
from flashinfer_compat.bench.workload import make_inputs, make_layer  # noqa: E402
from flashinfer_compat.machine import architecture_of, this_environment, this_machine  # noqa: E402
from flashinfer_compat.vocabulary import Backend, Numerics, RoutingInput, Strategy  # noqa: E402

pytestmark = pytest.mark.gpu

DEVICE = torch.device("cuda", 0)
SIZES = Sizes(512, 256, 16, 4, 1)


def test_every_way_of_triton_is_timed_in_a_graph() -> None:
    asked = Asked((SIZES,), tuple(RoutingInput), (Backend.TRITON,), tuple(Strategy), tuple(Numerics))
    ways, refusals = ways_of(asked, this_machine())
    assert len(ways) == 8
    assert refusals == []
    for point in measure(ways, (1, 64, 300), this_machine(), DEVICE, None):
        assert point.problem == ""
        assert point.found is not None
        assert point.found.timing == "cuda_graph"
        assert 0 < point.found.microseconds < 1e5
        # A bf16 output of its own, at least.
        assert point.found.peak_bytes >= point.tokens * SIZES.hidden_size * 2
        # Weights lie as the checkpoint has them; scales are copied.
        assert point.found.beyond_bytes < 0.05 * point.found.weight_bytes


def test_the_reference_is_timed_by_the_clock() -> None:
    asked = Asked((SIZES,), (RoutingInput.TOPK,), (Backend.TORCH,), (Strategy.SPLIT,), (Numerics.W4A16,))
    (point,) = measure(ways_of(asked, this_machine())[0], (3,), this_machine(), DEVICE, None)
    assert point.found is not None
    assert (point.problem, point.found.timing) == ("", "wall_clock")


@pytest.mark.parametrize("tokens", [1, 63, 64, 200])
def test_a_layer_that_switches_is_right_on_both_sides(tokens: int) -> None:
    origin = replace(row({1: (1, 2)}, None).origin, architecture=architecture_of(this_environment()))
    policy = (row({1: (10, 20), 64: (20, 10)}, 64, origin=origin, sizes=SIZES),)
    problem = SIZES.problem(RoutingInput.TOPK, Numerics.W4A16)
    plan = fc.plan(problem, replace(this_machine(), policy=policy), backend="triton")
    assert (plan.strategy, plan.split_from_tokens) == (Strategy.EXPANDED, 64)
    layer, inputs = make_layer(SIZES, DEVICE), make_inputs(SIZES, tokens, DEVICE)
    output = fc.fp4_moe(inputs.hidden_states, fc.prepare(layer, plan), inputs.routings(RoutingInput.TOPK)[0])
    right = expected(layer, inputs.hidden_states, inputs.chosen[0], Numerics.W4A16)
    assert deviation_of(output, right).relative < 5e-3
