"""The self-checks agree with recorded outputs, pass on what is right, and refute what is wrong."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")

import standin  # noqa: E402
from comparison import error  # noqa: E402
from safetensors.torch import load_file  # noqa: E402

import flashinfer_compat as fc  # noqa: E402
from flashinfer_compat.self_checks import CheckedKind, SelfCheck  # noqa: E402
from flashinfer_compat.verification.layers import TOKENS, CheckedLayer, Inputs, checked_layers  # noqa: E402
from flashinfer_compat.verification.oracle import choose, expected  # noqa: E402
from flashinfer_compat.verification.run import self_checks  # noqa: E402

CPU = torch.device("cpu")
SM100 = fc.Target.from_release("0.7.4", "sm100")
BARE = fc.Target(None, "flashinfer is not installed.", None, "2.13.0")


@pytest.mark.parametrize("numerics", ["w4a4", "w4a16"])
@pytest.mark.parametrize("name", ["grouped", "shared-bf16", "ungrouped-2-shared"])
def test_the_oracle_gives_what_was_recorded(checkpoints: Path, name: str, numerics: str) -> None:
    folder = checkpoints / name
    io = load_file(folder / "moe_io.safetensors")
    weights = fc.load_moe_layer(folder, 1)
    layer = CheckedLayer(name, replace(weights, router=replace(weights.router, bias=io["e_score_correction_bias"])))
    inputs = Inputs(io["hidden_states"][:5], io["router_logits"][:5])
    chosen = choose(weights.config, inputs.logits[0].tolist(), io["e_score_correction_bias"].tolist())
    assert sorted(one for one, _ in chosen) == sorted(io["topk_ids"][0].tolist())
    # In float32 the record and the oracle would be equal; here in bf16, as recorded.
    assert error(expected(layer, inputs, fc.Numerics(numerics)), io[f"output_{numerics}"][:5]) <= 2e-3


def test_the_fixed_inputs_are_what_they_are_said_to_be() -> None:
    layer = next(checked_layers(CPU))
    for tokens in TOKENS:
        inputs = layer.inputs(tokens)
        assert inputs.hidden_states.shape == (tokens, 256)
        assert bool((inputs.hidden_states[:1] == 0).all())
        assert all(len(set(row.tolist())) == 16 for row in inputs.logits)
        assert torch.equal(inputs.hidden_states, layer.inputs(tokens).hidden_states)
    bias = layer.weights.router.bias
    assert sum(float(one) == 100.0 for one in bias) == 4


def test_the_torch_backend_is_verified() -> None:
    checks = list(self_checks(BARE, CPU))
    assert {one.verdict for one in checks} == {fc.Evidence.VERIFIED}
    assert {(one.kind.strategy, one.kind.numerics) for one in checks} == {
        (strategy, numerics) for strategy in ("native", "expanded", "split") for numerics in ("w4a4", "w4a16")
    }
    assert all(one.kind.backend == "torch" and one.microseconds > 0 for one in checks)


def test_the_kernels_stand_in_is_verified() -> None:
    with standin.installed("0.7.4"):
        checks = list(self_checks(SM100, CPU, [fc.Backend.TRTLLM]))
    assert [one.problem for one in checks if one.problem] == []
    assert {(one.kind.strategy, one.kind.routing_input) for one in checks} == {
        ("native", "logits"),
        ("expanded", "topk"),
        ("split", "logits"),
        ("split", "topk"),
    }


def forgets_the_shared_expert(output: torch.Tensor, call: Any) -> torch.Tensor:
    return output * 0.9


def leaves_memory_unwritten(output: torch.Tensor, call: Any) -> torch.Tensor:
    output = output.clone()
    output[-1, 0] = float("nan")
    return output


def is_wrong_in_large_batches(output: torch.Tensor, call: Any) -> torch.Tensor:
    return output.roll(1, 0) if output.shape[0] > 100 else output


def does_not_launch(output: torch.Tensor, call: Any) -> torch.Tensor:
    raise RuntimeError("no kernel image is available for execution on the device")


@pytest.mark.parametrize(
    ("fault", "said"),
    [
        (forgets_the_shared_expert, "relative error 1.00e-01"),
        (leaves_memory_unwritten, "relative error nan"),
        (is_wrong_in_large_batches, "with 130 tokens"),
        (does_not_launch, "RuntimeError: no kernel image"),
    ],
)
def test_a_kernel_that_is_wrong_is_refuted(fault: Any, said: str) -> None:
    with standin.installed("0.7.4") as flashinfer:
        module = flashinfer.modules["flashinfer.fused_moe"]
        right = module.trtllm_fp4_block_scale_moe

        def wrong(**arguments: Any) -> list[torch.Tensor]:
            return [fault(right(**arguments)[0], arguments)]

        wrong.__signature__ = right.__signature__  # type: ignore[attr-defined]
        module.trtllm_fp4_block_scale_moe = wrong
        # The first that is run is the first that planning prefers.
        check = next(self_checks(SM100, CPU, [fc.Backend.TRTLLM]))
    assert check.kind.strategy == "native"
    assert check.verdict is fc.Evidence.REFUTED
    assert said in check.problem


def checked(target: fc.Target, problem: fc.Problem, verdict: str, strategy: str = "native") -> fc.Target:
    kind = CheckedKind.of(problem, fc.Strategy(strategy), fc.Backend.TRTLLM)
    check = SelfCheck(kind, fc.Evidence(verdict), 0.5, 0.01, 10.0, "" if verdict == "verified" else "it is wrong")
    return replace(target, self_checks=(check,))


@pytest.fixture
def problem(checkpoints: Path) -> fc.Problem:
    return fc.load_moe_layer(checkpoints / "grouped", 1).problem("logits")


def test_what_agreed_is_verified(problem: fc.Problem) -> None:
    plan = fc.plan(problem, checked(SM100, problem, "verified"), require="verified")
    assert (plan.strategy, plan.status) == (fc.Strategy.NATIVE, fc.Evidence.VERIFIED)
    # A check speaks of its kind only.
    other = replace(problem, activation="geglu")
    assert fc.plan(other, checked(SM100, problem, "verified")).status is fc.Evidence.ELIGIBLE
    larger = replace(problem, hidden_size=7168, intermediate_size=2048)
    assert fc.plan(larger, checked(SM100, problem, "verified")).status is fc.Evidence.VERIFIED


def test_what_was_refuted_is_never_chosen_by_itself(problem: fc.Problem) -> None:
    target = checked(SM100, problem, "refuted")
    plan = fc.plan(problem, target)
    assert plan.strategy is fc.Strategy.SPLIT
    (rejection,) = [
        one for one in plan.rejected if one.strategy is fc.Strategy.NATIVE and one.backend.value == "trtllm"
    ]
    assert rejection.reason.code is fc.ReasonCode.REFUTED
    assert "it is wrong" in rejection.reason.message
    with pytest.raises(fc.StrategyUnavailableError) as caught:
        fc.plan(problem, target, strategy="native")
    assert "refuted" in caught.value.codes
    insisted = fc.plan(problem, target, strategy="native", require="refuted")
    assert insisted.status is fc.Evidence.REFUTED
    assert any("it is wrong" in note for note in insisted.notes)


def test_a_refuted_split_is_not_the_last_resort(problem: fc.Problem) -> None:
    target = replace(
        SM100,
        self_checks=(
            *checked(SM100, problem, "refuted").self_checks,
            *checked(SM100, problem, "refuted", "split").self_checks,
        ),
    )
    assert fc.plan(problem, target).backend is fc.Backend.TRITON
