"""Experts that an engine has laid out itself: used as they are, and checked where the launcher does not."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")

import standin  # noqa: E402
from comparison import error  # noqa: E402
from safetensors.torch import load_file  # noqa: E402

import flashinfer_compat as fc  # noqa: E402
from flashinfer_compat.backends.trtllm.weights import prepare_experts  # noqa: E402
from flashinfer_compat.numerics import interleave_gate_up, shuffle_rows  # noqa: E402

SM100 = fc.Target.from_release("0.7.4", "sm100")
E, H, INTER = 16, 256, 128


class Sample:
    def __init__(self, folder: Path) -> None:
        self.io = load_file(folder / "moe_io.safetensors")
        self.weights = fc.load_moe_layer(folder, 1)
        self.x = self.io["hidden_states"]
        self.topk = fc.TopKRouting(self.io["topk_ids"], self.io["topk_weights"])
        self.problem = replace(self.weights.problem("topk"), num_shared_experts=0, shared_format="none")

    def experts(self, plan: fc.Plan) -> fc.TrtllmExperts:
        return prepare_experts(self.weights, plan.call)


@pytest.fixture(scope="module")
def sample(checkpoints: Path) -> Sample:
    return Sample(checkpoints / "grouped")


@pytest.mark.parametrize(("strategy", "kind"), [("native", "logits"), ("expanded", "topk")])
def test_they_run_like_the_checkpoints_own(sample: Sample, strategy: str, kind: str) -> None:
    routing = sample.topk if kind == "topk" else fc.LogitsRouting(sample.io["router_logits"])
    plan = fc.plan(sample.weights.problem(kind), SM100, strategy=strategy)
    with standin.installed("0.7.4") as flashinfer:
        expected = fc.fp4_moe(sample.x, fc.prepare(sample.weights, plan), routing)
        experts = sample.experts(plan)
        layer = fc.prepare(experts, plan)
        assert torch.equal(fc.fp4_moe(sample.x, layer, routing), expected)
        assert flashinfer.calls[-1].arguments["gemm1_weights"] is experts.gemm1_weights
    assert torch.equal(layer.input_scale, experts.input_scale)


def test_a_shared_expert_beside_the_kernel_is_the_engines_own(sample: Sample) -> None:
    plan = fc.plan(sample.weights.problem("topk"), SM100, strategy="split")
    with standin.installed("0.7.4"):
        with pytest.raises(fc.ArgumentError, match="num_shared_experts=0"):
            fc.prepare(sample.experts(plan), plan)
        alone = fc.plan(sample.problem, SM100)
        routed = fc.fp4_moe(sample.x, fc.prepare(sample.experts(plan), alone), sample.topk)
        whole = fc.prepare(sample.weights, plan)
        expected = fc.fp4_moe(sample.x, whole, sample.topk)
        assert error(routed + whole.state.shared(sample.x), expected) == 0


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("gemm1_weights", lambda one: one[:-1]),
        ("gemm1_weights", lambda one: one.transpose(1, 2)),
        ("gemm1_weights_scale", lambda one: one.view(torch.uint8)),
        ("gemm1_weights_scale", lambda one: one.flatten()),
        ("gemm2_weights", lambda one: one[:, :, :-1]),
        ("gemm2_weights_scale", lambda one: one[:-1]),
        ("output1_scale_scalar", lambda one: one.bfloat16()),
        ("output1_scale_gate_scalar", lambda one: one[:-1]),
        ("output2_scale_scalar", lambda one: one[:1].expand(E)),
        ("input_scale", lambda one: one.double()),
    ],
)
def test_a_tensor_that_does_not_fit_is_named(sample: Sample, name: str, change: object) -> None:
    plan = fc.plan(sample.problem, SM100)
    experts = sample.experts(plan)
    with standin.installed("0.7.4"), pytest.raises(fc.TensorError) as caught:
        fc.prepare(replace(experts, **{name: change(getattr(experts, name))}), plan)
    assert caught.value.argument == f"weights.{name}"


@pytest.mark.parametrize("offset", [-1, 1, 16])
def test_experts_outside_the_layer_are_refused(sample: Sample, offset: int) -> None:
    plan = fc.plan(sample.problem, SM100)
    with standin.installed("0.7.4"), pytest.raises(fc.ArgumentError, match="local_expert_offset"):
        fc.prepare(replace(sample.experts(plan), local_expert_offset=offset), plan)


def test_the_torch_backend_does_not_take_them(sample: Sample) -> None:
    experts = sample.experts(fc.plan(sample.problem, SM100))
    with pytest.raises(fc.ArgumentError, match="backend='trtllm'"):
        fc.prepare(experts, fc.plan(sample.problem, backend="torch"))


def laid_out(values: torch.Tensor) -> torch.Tensor:
    """Rows [up; gate] in the order of gemm1_weights."""
    return torch.stack([shuffle_rows(interleave_gate_up(one.unsqueeze(1))).flatten() for one in values])


def test_alpha_beta_and_clamp_are_those_of_the_formula(sample: Sample) -> None:
    """`up` is clamped and shifted, `gate` clamped: out = (up + beta) * gate * sigmoid(alpha * gate)."""
    generator = torch.Generator().manual_seed(11)
    alpha, beta, limit = (0.5 + torch.rand(E, generator=generator) for _ in range(3))
    plan = fc.plan(sample.problem, SM100)
    experts = sample.experts(plan)
    scale = experts.output1_scale_gate_scalar
    extra = replace(experts, gemm1_alpha=alpha, gemm1_beta=beta / scale, gemm1_clamp_limit=limit / scale)
    with standin.installed("0.7.4"):
        output = fc.fp4_moe(sample.x, fc.prepare(extra, plan), sample.topk)

    def activation(gate: torch.Tensor, up: torch.Tensor, expert: int) -> torch.Tensor:
        gate, up = gate.clamp(max=limit[expert]), up.clamp(-limit[expert], limit[expert])
        return (up + beta[expert]) * gate * torch.sigmoid(alpha[expert] * gate)

    assert error(output, by_hand(sample, activation)) <= 3e-2
    plain = by_hand(sample, lambda gate, up, _: torch.nn.functional.silu(gate) * up)
    assert error(output, plain) > 0.1


def test_biases_are_those_of_the_formula(sample: Sample) -> None:
    generator = torch.Generator().manual_seed(12)
    first = torch.randn(E, 2 * INTER, generator=generator) * 0.3
    second = torch.randn(E, H, generator=generator) * 0.3
    plan = fc.plan(sample.problem, SM100)
    experts = sample.experts(plan)
    scaled = first / experts.output1_scale_gate_scalar[:, None]
    down = torch.stack(
        [shuffle_rows(one.unsqueeze(1)).flatten() for one in second / experts.output2_scale_scalar[:, None]]
    )
    with standin.installed("0.7.4"):
        layer = fc.prepare(replace(experts, gemm1_bias=laid_out(scaled), gemm2_bias=down), plan)
        output = fc.fp4_moe(sample.x, layer, sample.topk)

    def activation(gate: torch.Tensor, up: torch.Tensor, expert: int) -> torch.Tensor:
        return torch.nn.functional.silu(gate + first[expert, INTER:]) * (up + first[expert, :INTER])

    expected = by_hand(sample, activation)
    expected += torch.einsum("tk,tkh->th", sample.topk.weights.float(), second[sample.topk.ids.long()])
    assert error(output, expected) <= 3e-2


def by_hand(sample: Sample, activation: object) -> torch.Tensor:
    """The routed experts in float32, w4a4, with the experts' own input scales, which are all the same."""
    from flashinfer_compat.numerics import Nvfp4Tensor, dequantize_nvfp4, quantize_nvfp4

    routed, x = sample.weights.routed, sample.x.float()
    output = torch.zeros_like(x)
    x = dequantize_nvfp4(quantize_nvfp4(x, routed.gate_up_input_scale[0, 0]))
    gate_up = dequantize_nvfp4(
        Nvfp4Tensor(routed.gate_up_weight, routed.gate_up_block_scale, routed.gate_up_global_scale)
    )
    down = dequantize_nvfp4(Nvfp4Tensor(routed.down_weight, routed.down_block_scale, routed.down_global_scale))
    for token in range(x.shape[0]):
        for expert, weight in zip(sample.topk.ids[token].tolist(), sample.topk.weights[token].tolist(), strict=True):
            gate, up = gate_up[expert] @ x[token]
            hidden = activation(gate, up, expert)
            hidden = dequantize_nvfp4(quantize_nvfp4(hidden, routed.down_input_scale[expert]))
            output[token] += weight * (down[expert] @ hidden)
    return output


@pytest.mark.parametrize(
    ("name", "value", "expected"),
    [
        ("gemm1_weights", None, "of type Tensor"),
        ("input_scale", 0.5, "of type Tensor"),
        ("gemm1_alpha", [1.0], "of type Tensor or None"),
        ("local_expert_offset", "0", "of type int"),
    ],
)
def test_a_value_of_another_type_is_named_when_they_are_made(
    sample: Sample, name: str, value: object, expected: str
) -> None:
    experts = sample.experts(fc.plan(sample.problem, SM100))
    with pytest.raises(fc.ArgumentError) as caught:
        replace(experts, **{name: value})
    assert (caught.value.argument, caught.value.expected) == (f"TrtllmExperts.{name}", expected)
