"""The two helpers for engines: gate, guards and keyword, on real signatures."""

from __future__ import annotations

import subprocess
import sys

import pytest
import standin

import flashinfer_compat as fc

LOGITS, ROUTED = "trtllm_fp4_block_scale_moe", "trtllm_fp4_block_scale_routed_moe"
R1 = {"num_experts": 256, "num_shared": 1, "top_k": 8, "n_group": 8, "topk_group": 4}


def blackwell(release: str) -> fc.Target:
    return fc.Target.from_release(release, "sm100")


# Flag detection, on both entry points.


@pytest.mark.parametrize(("release", "expected"), [("0.6.15.post1", False), ("0.6.17", True), ("0.7.4", True)])
def test_native_is_supported_where_the_logits_entry_has_the_keyword(release: str, expected: bool) -> None:
    found = fc.supports_fp4_shared(**R1, target=blackwell(release))
    assert found.ok is bool(found) is expected
    assert found.strategy is (fc.Strategy.NATIVE if expected else None)
    assert found.status is (fc.Evidence.ELIGIBLE if expected else fc.Evidence.ABSENT)
    assert bool(found.reasons) is not expected


@pytest.mark.parametrize("release", ["0.5.0", "0.6.15.post1", "0.7.0", "0.7.4"])
def test_from_topk_the_answer_is_expanded_whatever_keyword_the_routed_entry_has(release: str) -> None:
    found = fc.supports_fp4_shared(**R1, routing_input="topk", target=blackwell(release))
    assert found.strategy is fc.Strategy.EXPANDED


# The gate.


@pytest.mark.parametrize(
    ("change", "code"),
    [
        ({"shared_format": "bf16"}, "shared_format"),
        ({"num_shared": 0}, "no_shared_experts"),
        ({"ep_size": 8}, "expert_parallelism"),
        ({"apply_scale_to_output": True}, "routed_scaling"),
        ({"apply_scale_to_output": True, "routed_scaling_factor": 16.0}, "routed_scaling"),
        ({"n_group": 1, "topk_group": 1}, "no_expert_groups"),
        ({"routing_method": "renormalize", "n_group": 1, "topk_group": 1}, "routing_method"),
        ({"num_shared": 25}, "num_shared_experts"),
    ],
)
def test_what_cannot_be_fused_is_refused_with_its_reason(change: dict[str, object], code: str) -> None:
    found = fc.supports_fp4_shared(**{**R1, **change}, target=blackwell("0.7.4"))
    assert not found
    assert code in {reason.code.value for reason in found.reasons}


def test_hopper_and_no_gpu_are_refused() -> None:
    for architecture in ("sm90", None):
        assert not fc.supports_fp4_shared(**R1, target=fc.Target.from_release("0.7.4", architecture))


def test_the_question_imports_neither_torch_nor_flashinfer() -> None:
    code = f"import flashinfer_compat as fc, sys; fc.supports_fp4_shared(**{R1})\n"
    code += "assert not {'torch', 'flashinfer'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)


# The keyword.


def test_the_keyword_is_passed_on_the_logits_entry() -> None:
    assert fc.fused_shared_kwargs(standin.release("0.7.4").objects[LOGITS], 1) == {"num_fused_shared_experts": 1}
    assert fc.fused_shared_kwargs(standin.release("0.6.17").objects[LOGITS], 2) == {"num_fused_shared_experts": 2}


@pytest.mark.parametrize("release", ["0.6.15.post1", "0.6.17", "0.7.4"])
@pytest.mark.parametrize("name", [LOGITS, ROUTED])
def test_the_keyword_is_absent_without_shared_experts(release: str, name: str) -> None:
    assert fc.fused_shared_kwargs(standin.release(release).objects[name], 0) == {}


def test_a_missing_keyword_names_flashinfer_and_the_keyword() -> None:
    with pytest.raises(fc.StrategyUnavailableError, match=r"FlashInfer.*num_fused_shared_experts.*0\.6\.17"):
        fc.fused_shared_kwargs(standin.release("0.6.15.post1").objects[LOGITS], 1)


@pytest.mark.parametrize("release", ["0.6.17", "0.7.0", "0.7.4"])
def test_the_routed_entry_never_gets_the_keyword(release: str) -> None:
    with pytest.raises(fc.StrategyUnavailableError, match="Append the shared experts"):
        fc.fused_shared_kwargs(standin.release(release).objects[ROUTED], 1)


@pytest.mark.parametrize(("function", "num_shared"), [(print, -1), (print, True), (print, 1.0), (None, 1)])
def test_nonsense_is_named(function: object, num_shared: object) -> None:
    with pytest.raises(fc.ArgumentError):
        fc.fused_shared_kwargs(function, num_shared)
