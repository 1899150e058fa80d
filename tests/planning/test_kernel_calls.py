"""The sizes that each strategy hands to FlashInfer, in full."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from packaging.version import Version
from problem_fields import changed

from flashinfer_compat.features.target import FlashInfer, Target
from flashinfer_compat.planning.decision import KernelCall
from flashinfer_compat.planning.plan import plan
from flashinfer_compat.problem import DEEPSEEK_R1
from flashinfer_compat.signatures.model import SymbolTable
from flashinfer_compat.signatures.recorded import recorded
from flashinfer_compat.vocabulary import RoutingMethod

LOGITS_CALL = KernelCall(
    entry_point="trtllm_fp4_block_scale_moe",
    num_experts=256,
    local_num_experts=256,
    weight_rows=256,
    top_k=8,
    routing_method=RoutingMethod.DEEPSEEK_V3,
    n_group=8,
    topk_group=4,
    intermediate_size=2048,
    num_fused_shared_experts=0,
    routed_before=False,
    topk_format="",
    logits_dtype="float32",
    bias_dtype="float32",
    flat_scale=False,
    per_token_scale=False,
    writes_replay=True,
    mislabels_weights=False,
)
TOPK_CALL = replace(
    LOGITS_CALL,
    entry_point="trtllm_fp4_block_scale_routed_moe",
    routing_method=RoutingMethod.RENORMALIZE,
    n_group=None,
    topk_group=None,
    topk_format="tuple",
    writes_replay=False,
)
EP8 = {"ep_size": 8, "shared_placement": "replicated"}


@pytest.mark.parametrize(
    ("release", "fields", "strategy", "expected"),
    [
        # The routed counts only; every per-expert tensor has one row more.
        ("0.7.4", {}, "native", replace(LOGITS_CALL, weight_rows=257, num_fused_shared_experts=1)),
        (
            "0.7.4",
            {"num_shared_experts": 3},
            "native",
            replace(LOGITS_CALL, weight_rows=259, num_fused_shared_experts=3),
        ),
        ("0.7.4", {}, "split", LOGITS_CALL),
        # The shared expert is one more expert, and one more choice of every token.
        (
            "0.7.4",
            {"routing_input": "topk"},
            "expanded",
            replace(TOPK_CALL, num_experts=257, local_num_experts=257, weight_rows=257, top_k=9),
        ),
        (
            "0.7.4",
            {"routing_input": "topk", "num_shared_experts": 3},
            "expanded",
            replace(TOPK_CALL, num_experts=259, local_num_experts=259, weight_rows=259, top_k=11),
        ),
        # Three ids that are never chosen make a multiple of 4; they have no rows.
        (
            "0.6.7",
            {"routing_input": "topk"},
            "expanded",
            replace(
                TOPK_CALL,
                num_experts=260,
                local_num_experts=257,
                weight_rows=257,
                top_k=9,
                topk_format="packed",
                bias_dtype="bfloat16",
            ),
        ),
        ("0.7.4", {"routing_input": "topk"}, "split", TOPK_CALL),
        ("0.7.4", {"norm_topk_prob": False}, "split", replace(TOPK_CALL, routed_before=True)),
        # One rank of eight holds 32 of the 256.
        ("0.7.4", EP8, "split", replace(LOGITS_CALL, local_num_experts=32, weight_rows=32)),
        (
            "0.7.4",
            {**EP8, "routing_input": "topk"},
            "split",
            replace(TOPK_CALL, local_num_experts=32, weight_rows=32),
        ),
        # Other methods refuse n_group before 0.5.3.
        (
            "0.5.0",
            {"n_group": 1, "topk_group": 1, "routing_method": "renormalize", "routed_scaling_factor": 1.0},
            "split",
            replace(
                LOGITS_CALL,
                routing_method=RoutingMethod.RENORMALIZE,
                n_group=None,
                topk_group=None,
                logits_dtype="bfloat16",
                writes_replay=False,
                mislabels_weights=True,
            ),
        ),
        # No n_group at all would divide by zero before 0.6.8.
        (
            "0.5.3",
            {"n_group": 1, "topk_group": 1},
            "split",
            replace(LOGITS_CALL, n_group=1, topk_group=1, writes_replay=False, mislabels_weights=True),
        ),
        # Grouped DeepSeekV3 is replayed since 0.6.8, the others since 0.6.13; beside fused shared experts since 0.7.1.
        ("0.6.8", {}, "split", replace(LOGITS_CALL, mislabels_weights=True)),
        (
            "0.6.12",
            {"n_group": 1, "topk_group": 1},
            "split",
            replace(LOGITS_CALL, n_group=1, topk_group=1, writes_replay=False, mislabels_weights=True),
        ),
        (
            "0.6.13",
            {"n_group": 1, "topk_group": 1},
            "split",
            replace(LOGITS_CALL, n_group=1, topk_group=1, mislabels_weights=True),
        ),
        (
            "0.6.17",
            {},
            "native",
            replace(LOGITS_CALL, weight_rows=257, num_fused_shared_experts=1, writes_replay=False),
        ),
        ("0.7.4", {"activation_scaling": "per_token"}, "split", replace(LOGITS_CALL, per_token_scale=True)),
        # Rows of 2 * intermediate_size are shuffled by 128.
        ("0.7.4", {"intermediate_size": 2000}, "split", replace(LOGITS_CALL, intermediate_size=2048)),
        ("0.7.4", {"intermediate_size": 2032}, "split", replace(LOGITS_CALL, intermediate_size=2048)),
        ("0.7.4", {"intermediate_size": 64}, "split", replace(LOGITS_CALL, intermediate_size=64)),
    ],
)
def test_a_call_in_full(release: str, fields: dict[str, Any], strategy: str, expected: KernelCall) -> None:
    assert (
        plan(changed(DEEPSEEK_R1, **fields), Target.from_release(release, "sm100"), strategy=strategy).call == expected
    )


def test_padding_is_told() -> None:
    padded = changed(DEEPSEEK_R1, routing_input="topk", intermediate_size=2000)
    notes = plan(padded, Target.from_release("0.6.7", "sm100")).notes
    assert "intermediate_size 2000 is padded to 2048." in notes
    assert "num_experts is raised by 3 ids that are never chosen, to a multiple the kernel takes." in notes
    notes = plan(changed(DEEPSEEK_R1, routing_input="topk"), Target.from_release("0.7.4", "sm100")).notes
    assert not [note for note in notes if "is padded to" in note or "is raised by" in note]


@pytest.mark.parametrize(
    ("release", "form"),
    [
        # (ids, weights) exists from 0.6.12 and keeps float32 weights from 0.6.16.
        ("0.5.0", "packed"),
        ("0.6.11.post3", "packed"),
        ("0.6.12", "packed"),
        ("0.6.15.post1", "packed"),
        ("0.6.16rc5", "packed"),
        ("0.6.16", "tuple"),
        ("0.7.4", "tuple"),
    ],
)
def test_the_form_of_top_k(release: str, form: str) -> None:
    call = plan(changed(DEEPSEEK_R1, routing_input="topk"), Target.from_release(release, "sm100")).call
    assert call is not None
    assert call.topk_format == form


def test_top_k_is_packed_where_the_signatures_know_no_tuple() -> None:
    symbols = {name: one for name, one in recorded("0.7.4").symbols.symbols.items() if name != "RoutingInputMode"}
    flashinfer = FlashInfer("0.7.4", SymbolTable(symbols), Version("0.7.4"), "version")
    call = plan(changed(DEEPSEEK_R1, routing_input="topk"), Target(flashinfer, "", "sm100", "2.13.0")).call
    assert call is not None
    assert call.topk_format == "packed"


@pytest.mark.parametrize(
    ("release", "method", "logits", "bias", "flat"),
    [
        # docs/launcher-limits.md (f); 1-D block scales until 0.2.12.
        ("0.2.12", "deepseek_v3", "float32", "bfloat16", True),
        ("0.2.13", "deepseek_v3", "float32", "bfloat16", False),
        ("0.3.1", "renormalize", "bfloat16", "bfloat16", False),
        ("0.5.0", "deepseek_v3", "float32", "float32", False),
        ("0.6.6", "renormalize", "bfloat16", "float32", False),
        ("0.6.7", "deepseek_v3", "float32", "bfloat16", False),
        ("0.6.7.post3", "renormalize", "bfloat16", "bfloat16", False),
        ("0.6.8", "renormalize", "float32", "float32", False),
    ],
)
def test_what_the_kernel_reads_routing_inputs_as(release: str, method: str, logits: str, bias: str, flat: bool) -> None:
    fields = {"routing_method": method, "num_experts": 64, "top_k": 8, "n_group": 1, "topk_group": 1}
    problem = changed(DEEPSEEK_R1, **fields, routed_scaling_factor=1.0)
    call = plan(problem, Target.from_release(release, "sm100"), strategy="split").call
    assert call is not None
    assert (call.logits_dtype, call.bias_dtype, call.flat_scale) == (logits, bias, flat)


def test_the_dense_gemm_has_an_explicit_backend_and_says_what_it_passed_over() -> None:
    for release in ("0.2.14", "0.5.0", "0.7.4"):
        dense = plan(DEEPSEEK_R1, Target.from_release(release, "sm100"), strategy="split").dense
        assert dense is not None
        assert (dense.backend, dense.passed_over) == ("cutlass", ())
    sm107 = plan(DEEPSEEK_R1, Target.from_release("0.7.4", "sm107"), strategy="split").dense
    assert sm107 is not None
    assert sm107.backend in ("cutlass", "cudnn")
    assert plan(DEEPSEEK_R1, Target.from_release("0.7.4", "sm100")).dense is None
    bf16 = changed(DEEPSEEK_R1, shared_format="bf16")
    assert plan(bf16, Target.from_release("0.7.4", "sm100")).dense is None
