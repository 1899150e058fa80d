"""Every release's signature takes the calls that fp4_moe builds for it, and nothing in them is misread.

The stand-in binds each call to the recorded signature, so an unknown, missing or misplaced argument is a TypeError; it
refuses what the release's launcher refuses, and notes what the release would silently misread.
"""

from __future__ import annotations

import warnings
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")

import standin  # noqa: E402
from safetensors.torch import load_file  # noqa: E402

import flashinfer_compat as fc  # noqa: E402
from flashinfer_compat.signatures.recorded import releases  # noqa: E402

LOGITS, ROUTED = "trtllm_fp4_block_scale_moe", "trtllm_fp4_block_scale_routed_moe"
WAYS = (("native", "logits"), ("expanded", "topk"), ("split", "logits"), ("split", "topk"))
# E, H, I, top_k, groups of the sample "grouped"; one shared expert.
E, H, INTER, K, S, T = 16, 256, 128, 4, 1, 33


@pytest.fixture(scope="module")
def sample(checkpoints: Path) -> tuple[dict[str, torch.Tensor], fc.MoELayerWeights]:
    folder = checkpoints / "grouped"
    return load_file(folder / "moe_io.safetensors"), fc.load_moe_layer(folder, 1)


@pytest.mark.parametrize("release", releases())
def test_every_allowed_strategy_binds_and_is_read_right(
    sample: tuple[dict[str, torch.Tensor], fc.MoELayerWeights], release: str
) -> None:
    io, weights = sample
    target = fc.Target.from_release(release, "sm100")
    ran = 0
    for strategy, routing_input in WAYS:
        try:
            plan = fc.plan(weights.problem(routing_input), target, strategy=strategy)
        except fc.StrategyUnavailableError:
            continue
        ran += 1
        with standin.installed(release) as flashinfer, warnings.catch_warnings():
            warnings.simplefilter("error")
            layer = fc.prepare(weights, plan)
            routing: fc.TopKRouting | fc.LogitsRouting = fc.TopKRouting(io["topk_ids"], io["topk_weights"])
            if routing_input == "logits":
                routing = fc.LogitsRouting(io["router_logits"], io["e_score_correction_bias"])
            before = io["hidden_states"].clone()
            output = fc.fp4_moe(io["hidden_states"], layer, routing)
        assert torch.equal(io["hidden_states"], before)
        assert (output.shape, output.dtype) == ((T, H), torch.bfloat16)
        assert bool(torch.isfinite(output).all())
        for call in flashinfer.calls:
            assert not call.garbage, (strategy, routing_input, call.name, call.garbage)
            # Everything goes by keyword.
            assert call.given <= call.keywords
        check_moe_call(plan, flashinfer)
    # 0.2.9 and its candidates have no routed entry, and ignore the sample's topk_group when they route.
    assert (ran > 0) == (not release.startswith("0.2.9"))


def check_moe_call(plan: fc.Plan, flashinfer: standin.StandIn) -> None:
    """Sizes and dtypes, from the launchers' rules."""
    (call,) = [one for one in flashinfer.calls if one.name in (LOGITS, ROUTED)]
    given = call.arguments
    fused = S if plan.strategy.is_fused else 0
    rows = E + fused
    assert given["gemm1_weights"].shape == (rows, 2 * INTER, H // 2)
    assert given["gemm1_weights_scale"].shape == (rows, 2 * INTER, H // 16)
    assert given["gemm2_weights"].shape == (rows, H, INTER // 2)
    assert given["gemm2_weights_scale"].shape == (rows, H, INTER // 16)
    assert given["hidden_states"].dtype == given["gemm1_weights"].dtype == torch.uint8
    assert given["hidden_states_scale"].dtype == given["gemm1_weights_scale"].dtype == torch.float8_e4m3fn
    assert given["hidden_states_scale"].numel() == T * H // 16
    for scalar in ("output1_scale_scalar", "output1_scale_gate_scalar", "output2_scale_scalar"):
        assert (given[scalar].dtype, tuple(given[scalar].shape)) == (torch.float32, (rows,))
    assert given["local_expert_offset"] == 0
    assert given["intermediate_size"] == INTER
    if plan.strategy is fc.Strategy.NATIVE:
        assert call.name == LOGITS
        assert (given["num_fused_shared_experts"], given["num_experts"], given["top_k"]) == (S, E, K)
        assert given["local_num_experts"] == E
    else:
        # Never on the routed entry, and absent without shared experts.
        assert "num_fused_shared_experts" not in call.given
        assert given["top_k"] == K + fused
        assert given["num_experts"] % 4 == 0 or given["num_experts"] == rows
        assert given["local_num_experts"] == rows
    if call.name == ROUTED:
        assert given["routing_method_type"] == 1
        ids = given["topk_ids"][0] if isinstance(given["topk_ids"], tuple) else given["topk_ids"] >> 16
        assert ids.shape == (T, K + fused)
        assert int(ids.max()) < rows
        if fused:
            assert bool((ids[:, K] == E).all())
    if "hidden_states_scale_layout" in given:
        assert given["hidden_states_scale_layout"].name == "layout_linear"


def test_the_ways_are_taken_where_the_release_has_them(
    sample: tuple[dict[str, torch.Tensor], fc.MoELayerWeights],
) -> None:
    """A guard for the test above: it must not pass by refusing."""
    _, weights = sample

    def can(release: str, strategy: str, routing_input: str) -> bool:
        try:
            fc.plan(weights.problem(routing_input), fc.Target.from_release(release, "sm100"), strategy=strategy)
        except fc.StrategyUnavailableError:
            return False
        return True

    assert [can("0.2.14", *way) for way in WAYS] == [False, True, True, True]
    assert [can("0.6.16", *way) for way in WAYS] == [False, True, True, True]
    assert [can("0.6.17", *way) for way in WAYS] == [True, True, True, True]
    assert [can("0.7.4", *way) for way in WAYS] == [True, True, True, True]
