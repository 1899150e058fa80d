"""The shipped record, against facts read by hand from FlashInfer's sources."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
from final_releases import FINALS

from flashinfer_compat.signatures.model import SymbolTable
from flashinfer_compat.signatures.recorded import recorded, releases

LOGITS = "trtllm_fp4_block_scale_moe"
ROUTED = "trtllm_fp4_block_scale_routed_moe"

# (entry point, first release that has it, first one that does not any more)
ENTRY_POINT_FACTS = [
    (LOGITS, "0.2.9", None),
    (ROUTED, "0.2.10", None),
    ("fp4_quantize", "0.2.9", None),
    ("nvfp4_quantize", "0.2.9", None),
    ("mm_fp4", "0.2.9", None),
    ("silu_and_mul", "0.2.9", None),
    ("silu_and_mul_nvfp4_quantize", "0.6.16", None),
    ("block_scale_interleave", "0.2.13", None),
    ("nvfp4_block_scale_interleave", "0.2.9", None),
    ("shuffle_matrix_a", "0.2.9", None),
    ("shuffle_matrix_sf_a", "0.2.9", None),
    ("reorder_rows_for_gated_act_gemm", "0.2.9", None),
    ("_maybe_get_cached_w3_w1_permute_indices", "0.2.11", None),
    ("get_w2_permute_indices_with_cache", "0.4.1", None),
    ("cutlass_fused_moe", "0.2.9", None),
    ("cute_dsl_fused_moe_nvfp4", "0.6.4", None),
    ("cute_dsl_fused_moe", "0.7.0", None),
    ("b12x_fused_moe", "0.6.9", None),
    ("MoELayer", "0.6.14", None),
    ("MoEConfig", "0.6.14", None),
    ("CuTileNvfp4Config", "0.7.0", None),
    ("CuTileNvfp4Bf16Config", "0.7.1", None),
    ("prepare_cutile_nvfp4_weights", "0.7.0", None),
    ("autotune", "0.2.9", None),
    ("autotune_v2", "0.7.0", None),
    ("RoutingMethodType", "0.2.9", None),
    ("ActivationType", "0.5.0", None),
    ("GatedActType", "0.2.14", "0.6.3"),
    ("GatedActType", "0.6.4", None),
    ("SfLayout", "0.2.9", None),
    ("RoutingInputMode", "0.6.12", None),
    ("QuantVariant", "0.6.14", "0.7.0"),
    ("QuantFormat", "0.7.0", None),
]

# (entry point, parameter, first release that takes it, first one that does not any more)
PARAMETER_FACTS = [
    (LOGITS, "routing_logits", "0.2.9", None),
    (LOGITS, "tile_tokens_dim", "0.2.9", "0.6.0"),
    (LOGITS, "gemm1_bias", "0.2.10", None),
    (LOGITS, "gemm1_clamp_limit", "0.2.10", None),
    (LOGITS, "output", "0.2.10", None),
    (LOGITS, "enable_pdl", "0.2.11.post3", None),
    (LOGITS, "tune_max_num_tokens", "0.2.13", None),
    (LOGITS, "gated_act_type", "0.2.14", "0.6.3"),
    (LOGITS, "activation_type", "0.6.3", None),
    (LOGITS, "norm_topk_prob", "0.6.8", None),
    (LOGITS, "routing_replay_out", "0.6.8", None),
    (LOGITS, "per_token_scale", "0.6.11", None),
    (LOGITS, "num_fused_shared_experts", "0.6.17", None),
    (LOGITS, "valid_hidden_size", "0.7.0", None),
    (LOGITS, "hidden_states_scale_layout", "0.7.0", None),
    (LOGITS, "workspace_buffer", "0.7.4", None),
    (LOGITS, "nvfp4_4over6", "0.7.4", None),
    (ROUTED, "topk_ids", "0.2.10", None),
    (ROUTED, "tile_tokens_dim", "0.2.10", "0.6.0"),
    (ROUTED, "enable_pdl", "0.2.11.post2", None),
    (ROUTED, "gated_act_type", "0.2.14", "0.6.3"),
    (ROUTED, "activation_type", "0.6.3", None),
    (ROUTED, "per_token_scale", "0.6.11", None),
    (ROUTED, "gemm1_lora_delta", "0.6.18", None),
    (ROUTED, "num_fused_shared_experts", "0.7.0", None),
    (ROUTED, "valid_intermediate_size", "0.7.0", None),
    (ROUTED, "routing_metadata", "0.7.4", None),
    ("fp4_quantize", "is_sf_8x4_layout", "0.2.9", None),
    ("fp4_quantize", "enable_pdl", "0.2.11.post2", None),
    ("fp4_quantize", "backend", "0.6.8", None),
    ("fp4_quantize", "is_global_scale_inversed", "0.6.11", None),
    ("fp4_quantize", "nvfp4_4over6", "0.7.1", None),
    ("fp4_quantize", "batch_invariant", "0.7.4", None),
    ("nvfp4_quantize", "sfLayout", "0.2.9", None),
    ("nvfp4_quantize", "enable_pdl", "0.2.11.post2", None),
    ("nvfp4_quantize", "backend", "0.6.8", None),
    ("nvfp4_quantize", "per_token_activation", "0.6.11", None),
    ("nvfp4_quantize", "out_scale", "0.7.1", None),
    ("nvfp4_quantize", "batch_invariant", "0.7.4", None),
    ("mm_fp4", "use_8x4_sf_layout", "0.2.9", None),
    ("mm_fp4", "use_nvfp4", "0.4.0", None),
    ("mm_fp4", "enable_pdl", "0.6.5", None),
    ("mm_fp4", "batch_invariant", "0.7.4", None),
    ("silu_and_mul", "enable_pdl", "0.2.9", None),
    ("silu_and_mul_nvfp4_quantize", "nvfp4_4over6", "0.7.1", None),
    ("block_scale_interleave", "out", "0.7.2.post1", None),
    ("_maybe_get_cached_w3_w1_permute_indices", "is_gated_act_gemm", "0.6.3", None),
    ("get_w2_permute_indices_with_cache", "is_gated_act_gemm", "0.7.0", None),
    ("cutlass_fused_moe", "use_w4a8_group_scaling", "0.2.9", "0.2.13"),
    ("cutlass_fused_moe", "use_w4_group_scaling", "0.2.13", None),
    ("cutlass_fused_moe", "swiglu_alpha", "0.2.13", None),
    ("cutlass_fused_moe", "activation_type", "0.5.0", None),
    ("cutlass_fused_moe", "use_packed_weights", "0.6.0", None),
    ("cutlass_fused_moe", "swizzled_input_sf", "0.6.8", None),
    ("cutlass_fused_moe", "use_fused_finalize", "0.6.15", None),
    ("cutlass_fused_moe", "profile_ids", "0.6.16", None),
    ("cutlass_fused_moe", "use_wfp4afp8_humming", "0.6.16", "0.6.16.post3"),
    ("cutlass_fused_moe", "use_wfp4afp8_humming", "0.6.18", None),
    ("cutlass_fused_moe", "situ_beta", "0.7.0", None),
    ("cutlass_fused_moe", "backend", "0.7.1", None),
    ("cutlass_fused_moe", "clamped_relu2_limit", "0.7.2", None),
    ("cute_dsl_fused_moe_nvfp4", "enable_pdl", "0.6.7", None),
    ("cute_dsl_fused_moe_nvfp4", "activation", "0.6.14", "0.6.15"),
    ("cute_dsl_fused_moe_nvfp4", "activation_type", "0.6.15", None),
    ("cute_dsl_fused_moe_nvfp4", "per_token_scale", "0.6.16", None),
    ("cute_dsl_fused_moe_nvfp4", "quant_mode", "0.6.18", None),
    ("cute_dsl_fused_moe_nvfp4", "localized_weights", "0.7.2.post1", None),
    ("cute_dsl_fused_moe", "tactic", "0.7.0", None),
    ("cute_dsl_fused_moe", "swap_ab", "0.7.4", None),
    ("b12x_fused_moe", "activation_precision", "0.6.11.post1", None),
    ("b12x_fused_moe", "quant_mode", "0.6.11.post3", None),
    ("b12x_fused_moe", "swiglu_alpha", "0.6.15", None),
    ("b12x_fused_moe", "input_global_scale", "0.6.17", None),
    ("b12x_fused_moe", "expert_map", "0.7.1", None),
    ("MoEConfig", "finalize", "0.6.17", None),
    ("ExpertConfig", "num_fused_shared_experts", "0.6.18", None),
    ("ExecutionConfig", "do_finalize", "0.6.14", "0.6.17"),
    ("MoEActivationPack", "selected_experts", "0.6.14", "0.6.16"),
    ("MoEActivationPack", "topk_ids", "0.6.16", None),
    ("MoEActivationPack", "per_token_scale", "0.6.18", None),
    ("QuantConfig", "variant", "0.6.14", "0.7.0"),
    ("QuantConfig", "weight", "0.7.0", None),
    ("QuantConfig", "nvfp4_4over6", "0.7.1", None),
    ("autotune", "cache", "0.6.7", None),
    ("autotune", "tuning_buckets", "0.6.9", None),
    ("autotune", "skip_ops", "0.6.13", None),
    ("autotune", "cuda_graph_profile_replays", "0.7.0", None),
    ("autotune", "tie_tolerance", "0.7.4", None),
    ("autotune_v2", "strict_replay", "0.7.4", None),
]

REQUIRED = None
# (entry point, parameter, default, first release with this default, first one without)
DEFAULT_FACTS = [
    (LOGITS, "tile_tokens_dim", "8", "0.2.9", "0.4.1"),
    (LOGITS, "tile_tokens_dim", "None", "0.4.1", "0.5.0"),
    (LOGITS, "tile_tokens_dim", REQUIRED, "0.5.0", "0.6.0"),
    (ROUTED, "tile_tokens_dim", REQUIRED, "0.5.0", "0.6.0"),
    (LOGITS, "do_finalize", "False", "0.2.9", "0.2.10"),
    (LOGITS, "do_finalize", "True", "0.2.10", None),
    (LOGITS, "tune_max_num_tokens", "1024", "0.2.13", "0.3.0"),
    (LOGITS, "tune_max_num_tokens", "8192", "0.3.0", None),
    (LOGITS, "gated_act_type", "0", "0.2.14", "0.6.3"),
    (LOGITS, "activation_type", "3", "0.6.3", None),
    (LOGITS, "num_fused_shared_experts", "None", "0.6.17", None),
    (LOGITS, "nvfp4_4over6", "<object>", "0.7.4", None),
    ("nvfp4_quantize", "sfLayout", "SfLayout.layout_128x4", "0.2.9", None),
    ("fp4_quantize", "backend", "'cuda'", "0.6.8", "0.7.4"),
    ("fp4_quantize", "backend", "'auto'", "0.7.4", None),
    ("nvfp4_quantize", "backend", "'cuda'", "0.6.8", "0.7.4"),
    ("mm_fp4", "backend", "'cudnn'", "0.2.9", "0.6.0"),
    ("mm_fp4", "backend", "'auto'", "0.6.0", None),
    ("mm_fp4", "alpha", REQUIRED, "0.2.9", "0.4.0"),
    ("mm_fp4", "alpha", "None", "0.4.0", None),
    ("mm_fp4", "out_dtype", REQUIRED, "0.2.9", "0.4.0"),
    ("mm_fp4", "out_dtype", "torch.bfloat16", "0.4.0", None),
    ("cutlass_fused_moe", "activation_type", "ActivationType.Swiglu", "0.5.0", None),
    ("cutlass_fused_moe", "use_fused_finalize", "True", "0.6.15", "0.7.4"),
    ("cutlass_fused_moe", "use_fused_finalize", "None", "0.7.4", None),
    ("b12x_fused_moe", "fc2_input_scale", REQUIRED, "0.6.9", "0.6.11.post1"),
    ("b12x_fused_moe", "fc2_input_scale", "None", "0.6.11.post1", None),
    ("b12x_fused_moe", "swiglu_alpha", "1.702", "0.6.15", None),
    ("MoEConfig", "activation", "<factory>", "0.6.14", None),
    ("MoEActivationPack", "routing_input_mode", "RoutingInputMode.PackedPrecomputed", "0.6.16", None),
    ("RoutingConfig", "method", "RoutingMethodType.Default", "0.6.14", None),
    ("QuantConfig", "output", "QuantFormat.BF16", "0.7.0", None),
]

# (entry point, parameter, kind, first release, first one without)
KIND_FACTS = [
    ("nvfp4_quantize", "per_token_activation", "KEYWORD_ONLY", "0.6.11", "0.6.13"),
    ("nvfp4_quantize", "per_token_activation", "POSITIONAL_OR_KEYWORD", "0.6.13", None),
    ("mm_fp4", "batch_invariant", "KEYWORD_ONLY", "0.7.4", None),
    ("cutlass_fused_moe", "situ_beta", "KEYWORD_ONLY", "0.7.0", None),
    ("b12x_fused_moe", "w1_alpha", "KEYWORD_ONLY", "0.6.9", None),
    ("MoEActivationPack", "routing_logits", "KEYWORD_ONLY", "0.6.16", None),
]

# (enumeration, member, value, first release with this value, first one without)
MEMBER_FACTS = [
    ("RoutingMethodType", "Default", 0, "0.2.9", None),
    ("RoutingMethodType", "Renormalize", 1, "0.2.9", None),
    ("RoutingMethodType", "DeepSeekV3", 2, "0.2.9", None),
    ("RoutingMethodType", "Llama4", 3, "0.2.9", None),
    ("RoutingMethodType", "RenormalizeNaive", 4, "0.2.9", None),
    ("RoutingMethodType", "TopK", 5, "0.2.14", None),
    ("RoutingMethodType", "SigmoidRenorm", 6, "0.6.8", None),
    ("RoutingMethodType", "MiniMax2", 7, "0.6.8", None),
    ("RoutingMethodType", "Sigmoid", 8, "0.6.11", None),
    ("RoutingMethodType", "TopKSigmoid", 9, "0.6.18", None),
    ("RoutingMethodType", "Unspecified", 5, "0.2.9", "0.2.14"),
    ("RoutingMethodType", "Unspecified", 6, "0.2.14", "0.6.8"),
    ("RoutingMethodType", "Unspecified", 8, "0.6.8", "0.6.11"),
    ("RoutingMethodType", "Unspecified", 9, "0.6.11", "0.6.18"),
    ("RoutingMethodType", "Unspecified", 10, "0.6.18", None),
    ("ActivationType", "Swiglu", 3, "0.5.0", None),
    ("ActivationType", "Geglu", 4, "0.5.0", None),
    ("ActivationType", "Relu2", 6, "0.5.0", None),
    ("ActivationType", "Identity", 7, "0.5.0", "0.6.13"),
    ("ActivationType", "Identity", 8, "0.6.13", "0.6.14"),
    ("ActivationType", "Identity", 9, "0.6.14", None),
    ("ActivationType", "SwigluStep", 7, "0.6.13", None),
    ("ActivationType", "GegluTanh", 8, "0.6.14", None),
    ("ActivationType", "Situ", 10, "0.6.16", None),
    ("ActivationType", "ClampedRelu2", 12, "0.7.2", None),
    ("ActivationType", "PowLU", 13, "0.7.4", None),
    ("GatedActType", "GeGlu", 1, "0.2.14", "0.6.3"),
    ("GatedActType", "GeGlu", 1, "0.6.4", None),
    ("SfLayout", "layout_128x4", 0, "0.2.9", None),
    ("SfLayout", "layout_8x4", 1, "0.2.9", None),
    ("SfLayout", "layout_linear", 2, "0.2.9", None),
    ("RoutingInputMode", "PackedPrecomputed", 1, "0.6.12", None),
    ("RoutingInputMode", "UnpackedPrecomputed", 2, "0.6.12", None),
    ("QuantVariant", "NVFP4", 4, "0.6.14", "0.7.0"),
    ("QuantVariant", "W4A16", 7, "0.6.16", "0.7.0"),
    ("QuantFormat", "NVFP4", 5, "0.7.0", None),
]

# mm_fp4 backends: (first release, what was added then)
MM_FP4_BACKENDS = [
    ("0.2.9", {"cudnn", "trtllm", "cutlass"}),
    ("0.6.0", {"auto"}),
    ("0.6.5", {"cute-dsl"}),
    ("0.6.9", {"b12x"}),
    ("0.7.0", {"cutedsl_low_latency"}),
    ("0.7.2", {"cake"}),
]

# (entry point, a parameter inserted then, the older one it pushed back, the release)
INSERTIONS = [
    (LOGITS, "gemm1_bias", "gemm2_weights", "0.2.10"),
    (LOGITS, "enable_pdl", "output", "0.2.11.post3"),
    (LOGITS, "gated_act_type", "output", "0.2.14"),
    (LOGITS, "per_token_scale", "output", "0.6.11"),
    (ROUTED, "per_token_scale", "output", "0.6.11"),
    ("fp4_quantize", "is_global_scale_inversed", "enable_pdl", "0.6.11"),
    ("cutlass_fused_moe", "use_packed_weights", "tune_max_num_tokens", "0.6.0"),
]

MODULE_FACTS = [
    ("mm_fp4", "flashinfer.gemm", "0.2.9", "0.5.3"),
    ("mm_fp4", "flashinfer.gemm.gemm_base", "0.5.3", None),
    ("fp4_quantize", "flashinfer.fp4_quantization", "0.2.9", "0.6.7"),
    ("fp4_quantize", "flashinfer.quantization.fp4_quantization", "0.6.7", None),
    ("RoutingMethodType", "flashinfer.fused_moe.core", "0.2.9", "0.6.7"),
    ("RoutingMethodType", "flashinfer.tllm_enums", "0.6.7", None),
    ("RoutingInputMode", "flashinfer.fused_moe.core", "0.6.12", "0.6.16"),
    ("RoutingInputMode", "flashinfer.tllm_enums", "0.6.16", None),
    ("autotune", "flashinfer.autotuner", "0.2.9", "0.6.15"),
    ("autotune", "flashinfer.autotuner.autotuner", "0.6.15", None),
]


def symbols(version: str) -> SymbolTable:
    return recorded(version).symbols


def span(first: str, gone: str | None) -> list[str]:
    """The final releases from `first` up to, not including, `gone`."""
    assert first in FINALS
    assert gone is None or gone in FINALS
    return FINALS[FINALS.index(first) : FINALS.index(gone) if gone else None]


def spans(facts: Sequence[tuple[Any, ...]], subject: tuple[object, ...]) -> list[str]:
    """The final releases in which one of the facts about a subject holds."""
    found = [span(*fact[-2:]) for fact in facts if fact[:-2] == subject]
    return [version for one in found for version in one]


def subjects(facts: Sequence[tuple[Any, ...]]) -> list[tuple[Any, ...]]:
    return list(dict.fromkeys(fact[:-2] for fact in facts))


@pytest.mark.parametrize("subject", subjects(ENTRY_POINT_FACTS), ids=lambda subject: str(subject[0]))
def test_entry_points_exist_in_exactly_these_releases(subject: tuple[str]) -> None:
    (name,) = subject
    assert [version for version in FINALS if symbols(version).get(name)] == spans(ENTRY_POINT_FACTS, subject)


@pytest.mark.parametrize("subject", subjects(PARAMETER_FACTS), ids="-".join)
def test_parameters_exist_in_exactly_these_releases(subject: tuple[str, str]) -> None:
    found = [version for version in FINALS if symbols(version).has_parameter(*subject)]
    assert found == spans(PARAMETER_FACTS, subject)


@pytest.mark.parametrize("keyword", ["norm_topk_prob", "routing_replay_out"])
def test_the_routed_call_never_takes(keyword: str) -> None:
    assert not any(symbols(version).has_parameter(ROUTED, keyword) for version in releases())


@pytest.mark.parametrize("subject", subjects(DEFAULT_FACTS), ids=str)
def test_defaults_are_these_in_exactly_these_releases(subject: tuple[str, str, str | None]) -> None:
    name, parameter, default = subject
    found = [
        version
        for version in FINALS
        if (symbol := symbols(version).get(name))
        and (one := symbol.parameter(parameter)) is not None
        and one.default == default
    ]
    assert found == spans(DEFAULT_FACTS, subject)


@pytest.mark.parametrize("subject", subjects(KIND_FACTS), ids="-".join)
def test_kinds_are_these_in_exactly_these_releases(subject: tuple[str, str, str]) -> None:
    name, parameter, kind = subject
    found = [
        version
        for version in FINALS
        if (symbol := symbols(version).get(name)) and (one := symbol.parameter(parameter)) and one.kind == kind
    ]
    assert found == spans(KIND_FACTS, subject)


@pytest.mark.parametrize("subject", subjects(MEMBER_FACTS), ids=str)
def test_members_have_these_values_in_exactly_these_releases(subject: tuple[str, str, int]) -> None:
    name, member, value = subject
    found = [version for version in FINALS if (symbol := symbols(version).get(name)) and symbol.member(member) == value]
    assert found == spans(MEMBER_FACTS, subject)


@pytest.mark.parametrize("subject", subjects(MODULE_FACTS), ids="-".join)
def test_defining_modules_are_these_in_exactly_these_releases(subject: tuple[str, str]) -> None:
    name, module = subject
    found = [version for version in FINALS if (symbol := symbols(version).get(name)) and symbol.module == module]
    assert found == spans(MODULE_FACTS, subject)


def test_the_first_candidate_with_a_keyword_precedes_its_release() -> None:
    assert symbols("0.6.8rc1").has_parameter(LOGITS, "norm_topk_prob")
    assert not symbols("0.6.7.post3").has_parameter(LOGITS, "norm_topk_prob")


@pytest.mark.parametrize("version", FINALS)
def test_backends_of_mm_fp4(version: str) -> None:
    known = [backends for since, backends in MM_FP4_BACKENDS if FINALS.index(since) <= FINALS.index(version)]
    assert set(symbols(version).choices("mm_fp4", "backend")) == set().union(*known)


@pytest.mark.parametrize(("name", "inserted", "pushed", "version"), INSERTIONS)
def test_insertions_in_the_middle(name: str, inserted: str, pushed: str, version: str) -> None:
    previous = FINALS[FINALS.index(version) - 1]
    before, after = (symbols(one).get(name) for one in (previous, version))
    assert before is not None
    assert after is not None
    names = [parameter.name for parameter in after.parameters or ()]
    assert inserted not in before.parameter_names
    assert pushed in before.parameter_names
    assert names.index(inserted) < names.index(pushed)
