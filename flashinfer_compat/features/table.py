"""Every feature of FlashInfer that this package reports or relies on. To add a feature, add a row."""

from __future__ import annotations

from collections.abc import Iterable

from flashinfer_compat.features.known_issues import KNOWN_ISSUES
from flashinfer_compat.features.model import Feature, FeatureState, Library, evaluate
from flashinfer_compat.features.target import TILEIRAS, Target

__all__ = ["FEATURES", "feature_states"]

TRTLLM_GEN = {"sm100": "0.2.9", "sm103": "0.3.1", "sm107": "0.6.16"}
_FP4_UNITS = {"sm100": "0.2.9"} | dict.fromkeys(("sm103", "sm110", "sm120", "sm121"), "0.3.1") | {"sm107": "0.6.16"}
_CUTILE = (
    # Its submodule cuda.tile.tune.
    Library("cuda-tile", "1.4"),
    Library(TILEIRAS, install="'cuda-tile[tileiras]'"),
)
_LOGITS, _ROUTED = "trtllm_fp4_block_scale_moe", "trtllm_fp4_block_scale_routed_moe"


def _trtllm(name: str, title: str, entry_point: str, parameter: str = "", since: str = "") -> Feature:
    return Feature(name, title, entry_point, parameter, since=since, architectures=TRTLLM_GEN)


def _mm_fp4(backend: str, since: str, architectures: dict[str, str]) -> Feature:
    name = "mm_fp4_" + backend.replace("-", "_")
    title = f"dense FP4 GEMM, backend {backend}"
    return Feature(name, title, "mm_fp4", "backend", backend, since=since, architectures=architectures)


def _routing_method(member: str, since: str) -> Feature:
    return Feature(f"routing_{member.lower()}", f"routing {member}", "RoutingMethodType", member=member, since=since)


FEATURES: tuple[Feature, ...] = (
    # FP4 MoE, from router logits and from top-k.
    _trtllm("fp4_moe_logits", "FP4 MoE from router logits", _LOGITS, since="0.2.9"),
    _trtllm("fp4_moe_routed", "FP4 MoE from top-k", _ROUTED, since="0.2.10"),
    _trtllm(
        "fused_shared_logits",
        "shared experts in the logits entry's kernel",
        _LOGITS,
        "num_fused_shared_experts",
        "0.6.17",
    ),
    _trtllm(
        "fused_shared_routed",
        "shared experts in the routed entry's kernel",
        _ROUTED,
        "num_fused_shared_experts",
        "0.7.0",
    ),
    _trtllm("topk_packed", "top-k as packed int32", _ROUTED, "topk_ids", "0.2.10"),
    Feature(
        "topk_tuple",
        "top-k as (ids, weights)",
        "RoutingInputMode",
        member="UnpackedPrecomputed",
        since="0.6.12",
        architectures=TRTLLM_GEN,
    ),
    _trtllm("per_token_scale", "per-token activation scale", _LOGITS, "per_token_scale", "0.6.11"),
    _trtllm("routing_replay", "chosen experts written to a buffer", _LOGITS, "routing_replay_out", "0.6.8"),
    _trtllm("norm_topk_prob", "top-k weights without renormalisation", _LOGITS, "norm_topk_prob", "0.6.8"),
    _trtllm("scale_layout", "activation scale layout argument", _LOGITS, "hidden_states_scale_layout", "0.7.0"),
    _trtllm("valid_sizes", "padded sizes with their valid part", _LOGITS, "valid_intermediate_size", "0.7.0"),
    _trtllm("workspace", "caller's workspace buffer", _LOGITS, "workspace_buffer", "0.7.4"),
    _trtllm("nvfp4_4over6", "4over6 scaling per call", _LOGITS, "nvfp4_4over6", "0.7.4"),
    _trtllm("lora_delta", "LoRA delta added to the first GEMM", _ROUTED, "gemm1_lora_delta", "0.6.18"),
    _trtllm("output_buffer", "caller's output buffer", _LOGITS, "output", "0.2.10"),
    # Routing methods of the logits entry.
    _routing_method("DeepSeekV3", "0.2.9"),
    _routing_method("Renormalize", "0.2.9"),
    _routing_method("RenormalizeNaive", "0.2.9"),
    _routing_method("Llama4", "0.2.9"),
    _routing_method("TopK", "0.2.14"),
    _routing_method("SigmoidRenorm", "0.6.8"),
    _routing_method("MiniMax2", "0.6.8"),
    _routing_method("Sigmoid", "0.6.11"),
    _routing_method("TopKSigmoid", "0.6.18"),
    # The dense NVFP4 MLP.
    Feature(
        "per_token_quantize",
        "NVFP4 quantizer with a scale for each token",
        "nvfp4_quantize",
        "per_token_activation",
        since="0.6.11",
        architectures=_FP4_UNITS,
    ),
    Feature("fp4_quantize", "NVFP4 quantizer", "fp4_quantize", since="0.2.9", architectures=_FP4_UNITS),
    Feature(
        "silu_and_mul_quantize",
        "activation and quantizer in one kernel",
        "silu_and_mul_nvfp4_quantize",
        since="0.6.16",
        architectures=_FP4_UNITS,
    ),
    _mm_fp4("cudnn", "0.2.9", _FP4_UNITS),
    _mm_fp4("trtllm", "0.2.9", TRTLLM_GEN),
    _mm_fp4("cutlass", "0.2.9", _FP4_UNITS | {"sm110": "0.5.1"}),
    _mm_fp4(
        "cute-dsl",
        "0.6.5",
        {"sm100": "0.6.5", "sm103": "0.6.5", "sm107": "0.6.18", "sm120": "0.7.1", "sm121": "0.7.1"},
    ),
    _mm_fp4("b12x", "0.6.9", {"sm120": "0.6.9", "sm121": "0.6.9"}),
    # Weight layouts; pure data movement, on any GPU.
    Feature("scale_interleave", "128x4 block scale interleave", "nvfp4_block_scale_interleave", since="0.2.9"),
    Feature("shuffle_weights", "trtllm-gen weight row shuffle", "shuffle_matrix_a", since="0.2.9"),
    Feature("shuffle_scales", "trtllm-gen block scale row shuffle", "shuffle_matrix_sf_a", since="0.2.9"),
    Feature("reorder_gate_up", "gate and up rows interleaved", "reorder_rows_for_gated_act_gemm", since="0.2.9"),
    Feature(
        "permute_indices_w13",
        "row permutation of the first GEMM's weights",
        "_maybe_get_cached_w3_w1_permute_indices",
        since="0.2.11",
    ),
    Feature(
        "permute_indices_w2",
        "row permutation of the second GEMM's weights",
        "get_w2_permute_indices_with_cache",
        since="0.4.1",
    ),
    # Other NVFP4 MoE.
    Feature(
        "cutile_nvfp4_bf16",
        "cuTile MoE, NVFP4 weights and bf16 activations",
        "CuTileNvfp4Bf16Config",
        since="0.7.1",
        architectures=dict.fromkeys(("sm89", "sm90", "sm120", "sm121"), "0.7.1"),
        libraries=_CUTILE,
    ),
    Feature(
        "cutile_nvfp4",
        "cuTile MoE, NVFP4 weights and activations",
        "CuTileNvfp4Config",
        since="0.7.0",
        architectures=dict.fromkeys(("sm120", "sm121"), "0.7.0"),
        libraries=_CUTILE,
    ),
    Feature("autotune", "kernel autotuning", "autotune", since="0.2.9"),
    Feature("autotune_v2", "autotuning with a persistent cache", "autotune_v2", since="0.7.0"),
)


def feature_states(target: Target, features: Iterable[Feature] = FEATURES) -> dict[str, FeatureState]:
    """How each feature stands on `target`, by name, in the table's order."""
    return {row.name: evaluate(row, target, KNOWN_ISSUES) for row in features}
