"""Every FlashInfer function, class and enumeration this package uses, and where each is imported from.

To use another one, add a row here and run `python -m tools.record_signatures`.
"""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["ENTRY_POINTS", "EntryPoint"]


@dataclass(frozen=True)
class EntryPoint:
    """A public name and the modules that have exported it, newest first; the first one that has it counts."""

    name: str
    modules: tuple[str, ...]


_TOP = ("flashinfer",)
_MOE = ("flashinfer.fused_moe",)
_MOE_CORE = ("flashinfer.fused_moe.core",)
_ENUMS = ("flashinfer.tllm_enums", "flashinfer.fused_moe.core", "flashinfer.fused_moe", "flashinfer.fp4_quantization")

ENTRY_POINTS: tuple[EntryPoint, ...] = (
    # The fused NVFP4 MoE.
    EntryPoint("trtllm_fp4_block_scale_moe", _MOE),
    EntryPoint("trtllm_fp4_block_scale_routed_moe", _MOE),
    # The dense NVFP4 MLP of a shared expert.
    EntryPoint("fp4_quantize", _TOP),
    EntryPoint("nvfp4_quantize", _TOP),
    EntryPoint("mm_fp4", _TOP),
    EntryPoint("silu_and_mul", _TOP),
    EntryPoint("silu_and_mul_nvfp4_quantize", _TOP),
    # Weight layouts.
    EntryPoint("block_scale_interleave", (*_TOP, "flashinfer.fp4_quantization")),
    EntryPoint("nvfp4_block_scale_interleave", (*_TOP, "flashinfer.fp4_quantization")),
    EntryPoint("shuffle_matrix_a", _TOP),
    EntryPoint("shuffle_matrix_sf_a", _TOP),
    EntryPoint("reorder_rows_for_gated_act_gemm", _MOE),
    EntryPoint("_maybe_get_cached_w3_w1_permute_indices", _MOE_CORE),
    EntryPoint("get_w2_permute_indices_with_cache", _MOE_CORE),
    # Other NVFP4 MoE backends.
    EntryPoint("cutlass_fused_moe", _MOE),
    EntryPoint("cute_dsl_fused_moe_nvfp4", _MOE),
    EntryPoint("cute_dsl_fused_moe", _MOE),
    EntryPoint("b12x_fused_moe", _MOE),
    # The unified API, which carries the cuTile backends.
    EntryPoint("MoELayer", _MOE),
    EntryPoint("MoEConfig", _MOE),
    EntryPoint("RoutingConfig", _MOE),
    EntryPoint("QuantConfig", _MOE),
    EntryPoint("ExpertConfig", _MOE),
    EntryPoint("ExecutionConfig", _MOE),
    EntryPoint("BackendOptions", _MOE),
    EntryPoint("MoEActivationPack", _MOE),
    EntryPoint("MoEWeightPack", _MOE),
    EntryPoint("CuTileNvfp4Config", _MOE),
    EntryPoint("CuTileNvfp4Bf16Config", _MOE),
    EntryPoint("prepare_cutile_nvfp4_weights", ("flashinfer.fused_moe.prepare",)),
    # Tuning.
    EntryPoint("autotune", _TOP),
    EntryPoint("autotune_v2", _TOP),
    # Enumerations, whose numbers change between releases.
    EntryPoint("RoutingMethodType", _ENUMS),
    EntryPoint("ActivationType", _ENUMS),
    EntryPoint("GatedActType", _ENUMS),
    EntryPoint("SfLayout", _ENUMS),
    EntryPoint("RoutingInputMode", _ENUMS),
    EntryPoint("QuantVariant", _MOE),
    EntryPoint("QuantFormat", _MOE),
)
