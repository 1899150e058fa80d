"""Arguments of `moe`'s functions that cannot be used are refused by name."""

from __future__ import annotations

import copy
import pickle
from dataclasses import replace
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")

from safetensors.torch import load_file  # noqa: E402

import flashinfer_compat as fc  # noqa: E402

NO_GPU = fc.Target.from_release("0.7.4", None)


class Sample:
    def __init__(self, folder: Path) -> None:
        self.io = load_file(folder / "moe_io.safetensors")
        self.weights = fc.load_moe_layer(folder, 1)
        self.layer = fc.prepare(self.weights, fc.plan(self.weights.problem("logits"), NO_GPU))


@pytest.fixture(scope="module")
def sample(checkpoints: Path) -> Sample:
    return Sample(checkpoints / "grouped")


@pytest.mark.parametrize(
    ("hidden_states", "actual"),
    [
        (torch.zeros(3, 128), "torch.float32 [3, 128]"),
        (torch.zeros(256), "torch.float32 [256]"),
        (torch.zeros(2, 3, 256), "torch.float32 [2, 3, 256]"),
        (torch.zeros(3, 256, dtype=torch.int32), "torch.int32 [3, 256]"),
        (torch.zeros(3, 256, device="meta"), "one on meta"),
        ([[0.0] * 256], "list"),
    ],
)
def test_hidden_states_that_the_router_cannot_score(sample: Sample, hidden_states: object, actual: str) -> None:
    with pytest.raises(fc.ArgumentError) as caught:
        fc.route_logits(hidden_states, sample.weights.router)  # type: ignore[arg-type]
    assert (caught.value.argument, caught.value.actual) == ("hidden_states", actual)


def test_a_router_is_a_router(sample: Sample) -> None:
    with pytest.raises(fc.ArgumentError, match="router: expected a Router, got Tensor"):
        fc.route_logits(sample.io["hidden_states"], sample.weights.router.weight)  # type: ignore[arg-type]


def test_the_torch_backend_names_a_bias_that_is_not_finite(sample: Sample) -> None:
    routing = fc.LogitsRouting(sample.io["router_logits"], sample.io["e_score_correction_bias"].clone())
    assert routing.bias is not None
    routing.bias[2] = float("nan")
    with pytest.raises(fc.TensorError) as caught:
        fc.fp4_moe(sample.io["hidden_states"], sample.layer, routing)
    assert (caught.value.argument, caught.value.actual) == ("bias", f"1 of {len(routing.bias)} infinite or NaN")
    fc.fp4_moe(sample.io["hidden_states"], sample.layer, replace(routing, bias=torch.zeros_like(routing.bias)))


def test_a_prepared_layer_stays_in_its_process_and_its_plan_does_not(sample: Sample) -> None:
    with pytest.raises(fc.ArgumentError, match="Pickle the plan, and prepare the layer again"):
        pickle.dumps(sample.layer)
    assert copy.copy(sample.layer) is copy.deepcopy(sample.layer) is sample.layer
    assert pickle.loads(pickle.dumps(sample.layer.plan)) == sample.layer.plan


def test_layer_options_of_another_type_are_refused(sample: Sample) -> None:
    plan = fc.plan(sample.weights.problem("logits"), NO_GPU)
    with pytest.raises(fc.ArgumentError, match="options: expected a LayerOptions, got dict"):
        fc.prepare(sample.weights, plan, {"quantizer": None})  # type: ignore[arg-type]


def test_a_triton_layer_is_not_prepared_without_a_gpu(sample: Sample) -> None:
    pytest.importorskip("triton", minversion="3.5")
    plan = fc.plan(sample.weights.problem("topk"), fc.Target.from_release("0.7.4", "sm90"), backend="triton")
    with pytest.raises(fc.BackendUnavailableError, match="the weights are on cpu"):
        fc.prepare(sample.weights, plan)


def test_releases_and_architectures_of_another_type_are_refused() -> None:
    with pytest.raises(fc.UnknownReleaseError, match=r"0\.7"):
        fc.Target.from_release(0.7, "sm90")  # type: ignore[arg-type]
    with pytest.raises(fc.UnknownNameError, match="sm90"):
        fc.Target.from_release("0.7.4", ["sm90"])  # type: ignore[arg-type]
