"""The layers that are measured, what they must give, and what memory is counted."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest

torch = pytest.importorskip("torch")

import standin  # noqa: E402

import flashinfer_compat as fc  # noqa: E402
from flashinfer_compat.bench.measuring import Timing, bytes_beyond, microseconds, peak_bytes  # noqa: E402
from flashinfer_compat.bench.reference import deviation_of, expected  # noqa: E402
from flashinfer_compat.bench.results import Point  # noqa: E402
from flashinfer_compat.bench.run import Asked, measure, ways_of  # noqa: E402
from flashinfer_compat.bench.shapes import Sizes  # noqa: E402
from flashinfer_compat.bench.workload import make_inputs, make_layer, weight_bytes  # noqa: E402
from flashinfer_compat.vocabulary import Backend, Numerics, RoutingInput, Strategy  # noqa: E402

CPU = torch.device("cpu")
BARE = fc.Target(None, "flashinfer is not installed.", None, "2.13.0")
SM100 = fc.Target.from_release("0.7.4", "sm100")
TINY = Sizes(64, 32, 6, 2, 1)
KERNEL = Sizes(256, 128, 16, 4, 1)
"""The least that FlashInfer's kernels take."""


def asked(sizes: Sizes, *backends: str, **changes: Any) -> Asked:
    known = {"routing_inputs": (RoutingInput.TOPK,), "strategies": tuple(Strategy), "numerics": tuple(Numerics)}
    return Asked((sizes,), backends=tuple(map(Backend, backends)), **{**known, **changes})


def points(sizes: Sizes, target: fc.Target, *backends: str, **changes: Any) -> list[Point]:
    ways, _ = ways_of(asked(sizes, *backends, **changes), target)
    return list(measure(ways, (30, 40), target, CPU, None))


def test_a_layer_is_as_large_as_it_is_said_to_be() -> None:
    layer = make_layer(TINY, CPU)
    # An expert's global and input scales, of gate, up and down, are six float32.
    assert weight_bytes(layer) == 7 * (TINY.expert_bytes + 6 * 4)


def test_several_shared_experts_are_one_wide_one() -> None:
    layer = make_layer(Sizes(64, 32, 6, 2, 3), CPU)
    assert layer.shared is not None
    assert (layer.shared.num_experts, layer.shared.intermediate_size) == (1, 96)
    assert make_layer(Sizes(64, 32, 6, 2, 0), CPU).shared is None


def test_equal_sizes_give_equal_layers_and_inputs() -> None:
    one, other = make_layer(TINY, CPU), make_layer(TINY, CPU)
    assert torch.equal(one.routed.down_weight, other.routed.down_weight)
    assert torch.equal(make_inputs(TINY, 3, CPU).hidden_states, make_inputs(TINY, 3, CPU).hidden_states)


@pytest.mark.parametrize(("tokens", "calls"), [(1, 8), (3, 8), (8, 3), (24, 1), (64, 1)])
def test_few_tokens_come_in_several_calls_with_other_experts(tokens: int, calls: int) -> None:
    sizes = Sizes(64, 32, 64, 4, 1)
    inputs = make_inputs(sizes, tokens, CPU)
    assert len(inputs.chosen) == len(inputs.logits) == calls
    assert len({tuple(one.ids.flatten().tolist()) for one in inputs.chosen}) == calls
    assert inputs.touched(sizes) <= min(64, 4 * tokens) + 1
    assert inputs.touched(sizes) >= 5
    for scores, choice in zip(inputs.logits, inputs.chosen, strict=True):
        assert all(len(set(row.tolist())) == 64 for row in scores)
        assert torch.allclose(choice.weights.sum(1), torch.tensor(2.5))


@pytest.mark.parametrize("numerics", list(Numerics))
@pytest.mark.parametrize("shared", [0, 1, 2])
def test_the_reference_gives_what_the_torch_backend_gives(numerics: Numerics, shared: int) -> None:
    sizes = Sizes(64, 32, 6, 2, shared)
    layer, inputs = make_layer(sizes, CPU), make_inputs(sizes, 9, CPU)
    plan = fc.plan(sizes.problem(RoutingInput.TOPK, numerics), BARE, strategy="split", backend="torch")
    output = fc.fp4_moe(inputs.hidden_states.float(), fc.prepare(layer, plan), inputs.routings(RoutingInput.TOPK)[0])
    right = expected(layer, inputs.hidden_states, inputs.chosen[0], numerics)
    assert deviation_of(output, right).relative < 1e-5


def test_an_output_that_is_not_finite_is_infinitely_far() -> None:
    right = torch.ones(3, 4)
    assert deviation_of(right * float("nan"), right).relative == float("inf")
    assert deviation_of(right, right).relative == 0
    # One row of three is off: the median row is not.
    off = right.clone()
    off[1] = 2
    assert deviation_of(off, right).median_row == 0
    assert deviation_of(off, right).relative == pytest.approx(3**-0.5)


def test_logits_and_top_k_ask_for_the_same_experts() -> None:
    outputs = {}
    layer, inputs = make_layer(TINY, CPU), make_inputs(TINY, 4, CPU)
    for routing_input in RoutingInput:
        plan = fc.plan(TINY.problem(routing_input, Numerics.W4A16), BARE, backend="torch")
        routing = inputs.routings(routing_input)[0]
        outputs[routing_input] = fc.fp4_moe(inputs.hidden_states, fc.prepare(layer, plan), routing)
    assert deviation_of(*(one.float() for one in outputs.values())).relative < 5e-3


def test_only_memory_of_its_own_is_counted() -> None:
    @dataclass(frozen=True)
    class State:
        kept: torch.Tensor
        parts: dict[str, tuple[torch.Tensor, ...]]

    class Opaque:
        def __init__(self, state: State) -> None:
            self.state, self.again = state, self

        def __call__(self) -> None: ...

    given = torch.zeros(100, dtype=torch.float32)
    own = torch.zeros(10, dtype=torch.float32)
    state = Opaque(State(given[50:], {"a": (own, own[2:]), "b": (torch.zeros(3, dtype=torch.uint8),)}))
    assert bytes_beyond(state, {"weights": given}) == 40 + 3
    assert bytes_beyond(given.view(10, 10), given) == 0


def test_a_time_is_that_of_one_call() -> None:
    ran: list[int] = []

    def call(number: int) -> Any:
        return lambda: ran.append(number) or torch.zeros(1)

    found = microseconds([call(1), call(2)], CPU, Timing.WALL_CLOCK)
    assert 0 < found < 1e5
    assert ran.count(1) == ran.count(2) > 2
    assert peak_bytes(call(3), CPU) is None


def test_what_is_let_through_is_measured_and_the_rest_is_told() -> None:
    ways, refusals = ways_of(asked(TINY, "torch", "triton", "trtllm"), BARE)
    assert {(one.backend.value, one.strategy.value) for one in ways} == {("torch", "split"), ("torch", "expanded")}
    assert {(one.way.backend.value, one.way.strategy.value) for one in refusals} == {
        (backend, strategy) for backend in ("triton", "trtllm") for strategy in ("split", "expanded")
    }
    logits, _ = ways_of(asked(TINY, "torch", routing_inputs=(RoutingInput.LOGITS,)), BARE)
    assert {one.strategy.value for one in logits} == {"split", "native"}


def test_kernels_that_are_right_get_times() -> None:
    with standin.installed("0.7.4"):
        found = points(KERNEL, SM100, "trtllm", routing_inputs=tuple(RoutingInput))
    assert [one.problem for one in found] == [""] * len(found)
    assert {one.way.strategy for one in found} == {Strategy.EXPANDED, Strategy.SPLIT}
    assert all(one.microseconds for one in found)
    # These kernels have a layout of their own.
    assert all(one.found and one.found.beyond_bytes > 0.9 * one.found.weight_bytes for one in found)


def forgets_the_shared_expert(output: torch.Tensor) -> torch.Tensor:
    return output * 0.9


def leaves_memory_unwritten(output: torch.Tensor) -> torch.Tensor:
    return output * float("nan")


def does_not_launch(output: torch.Tensor) -> torch.Tensor:
    raise RuntimeError("no kernel image is available\nand more")


def has_no_memory_left(output: torch.Tensor) -> torch.Tensor:
    raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 6 GiB")


@pytest.mark.parametrize(
    ("fault", "said"),
    [
        (forgets_the_shared_expert, "wrong result: relative error of the median row 1.0e-01, above 1e-02"),
        (leaves_memory_unwritten, "wrong result: relative error of the median row inf"),
        (does_not_launch, "it raised RuntimeError: no kernel image is available"),
        (has_no_memory_left, "out of memory; measure fewer --tokens or a smaller --intermediate-size"),
    ],
)
def test_kernels_that_are_wrong_or_fail_get_a_reason_and_no_time(fault: Any, said: str) -> None:
    with standin.installed("0.7.4") as flashinfer:
        module = flashinfer.modules["flashinfer.fused_moe"]
        right = module.trtllm_fp4_block_scale_routed_moe

        def wrong(**arguments: Any) -> list[torch.Tensor]:
            return [fault(right(**arguments)[0])]

        wrong.__signature__ = right.__signature__  # type: ignore[attr-defined]
        module.trtllm_fp4_block_scale_routed_moe = wrong
        found = points(KERNEL, SM100, "trtllm", strategies=(Strategy.EXPANDED,), numerics=(Numerics.W4A4,))
    assert len(found) == 2
    for one in found:
        assert one.microseconds is None
        assert one.problem.startswith(said)


def test_what_cannot_be_prepared_is_a_reason_too() -> None:
    # Planned for a FlashInfer that is not there.
    found = points(KERNEL, SM100, "trtllm", strategies=(Strategy.EXPANDED,))
    assert len(found) == 2
    assert all(one.found is None and "it raised" in one.problem for one in found)


def test_a_layer_that_does_not_fit_is_a_reason_for_each_way() -> None:
    huge = Sizes(2**24, 2**20, 2**14, 2, 1)
    found = points(huge, BARE, "torch")
    assert len(found) == 2 * 2 * 2
    assert all(one.found is None and one.problem.startswith("out of memory") for one in found)
