"""What is known to be wrong in which FlashInfer releases. To add an issue, add a row."""

from __future__ import annotations

import enum
from collections.abc import Callable
from dataclasses import dataclass

from packaging.version import Version

from flashinfer_compat.problem import Problem
from flashinfer_compat.versions import in_range
from flashinfer_compat.vocabulary import ActivationScaling, RoutingMethod, Strategy

__all__ = ["KNOWN_ISSUES", "Effect", "KnownIssue"]

_REPOSITORY = "https://github.com/flashinfer-ai/flashinfer"


class Effect(str, enum.Enum):
    """What this package does about an issue."""

    REFUSED = "refused"
    """Strategies that would meet it are refused."""
    AVOIDED = "avoided"
    """Calls are made so that it cannot occur."""
    TOLD = "told"
    """It cannot be avoided or its extent is not known; plans and the doctor tell of it."""


@dataclass(frozen=True)
class KnownIssue:
    """One defect of FlashInfer."""

    id: str
    """Stable; programs may rely on it."""
    title: str
    releases: str
    """PEP 440 specifiers of the affected releases, alternatives separated by `|`. `<0.6.3` would leave out 0.6.3's
    nightlies, which may not have the repair yet: write `<=0.6.3,!=0.6.3`, or `<0.6.8rc1` where a candidate has it."""
    effect: Effect
    source: str
    """Where it can be read up."""
    entry_points: frozenset[str] = frozenset()
    """The entry points that have it."""
    strategies: frozenset[Strategy] = frozenset(Strategy)
    """The strategies that meet it there."""
    features: frozenset[str] = frozenset()
    """The features (`features.table`) that do not work because of it."""
    condition: Callable[[Problem], bool] = lambda _: True
    """Whether a problem meets it."""
    way_out: str = ""

    def affects(self, version: Version) -> bool:
        """Whether a release has the defect."""
        return any(in_range(version, part.strip()) for part in self.releases.split("|"))


KNOWN_ISSUES: tuple[KnownIssue, ...] = (
    KnownIssue(
        id="routed-fused-shared",
        title="the routed entry accepts num_fused_shared_experts, but computes from slots that nothing has written",
        # Nightlies carry a keyword before their number says so.
        releases=">=0.6.16.dev0",
        effect=Effect.AVOIDED,
        source=f"{_REPOSITORY}/blob/v0.7.0/csrc/fused_moe/trtllm_backend/trtllm_fused_moe_routing_deepseek.cu",
        features=frozenset({"fused_shared_routed"}),
        way_out="Append the shared experts to the top-k instead (strategy expanded).",
    ),
    KnownIssue(
        id="ungrouped-fused-shared",
        title="the logits entry with num_fused_shared_experts and no expert groups returns wrong numbers silently",
        releases=">=0.6.16.dev0,<0.7.0rc3",
        effect=Effect.REFUSED,
        source=f"{_REPOSITORY}/blob/v0.6.17/csrc/trtllm_fused_moe_runner.cu",
        entry_points=frozenset({"trtllm_fp4_block_scale_moe"}),
        strategies=frozenset({Strategy.NATIVE}),
        condition=lambda problem: not problem.is_grouped,
        way_out="Pass top-k and use strategy expanded, or use split.",
    ),
    KnownIssue(
        id="topk-group-ignored",
        title="DeepSeekV3 routing from logits ignores topk_group and always keeps min(4, n_group) groups",
        releases=">=0.2.9.dev0,<=0.6.3,!=0.6.3",
        effect=Effect.REFUSED,
        source=f"{_REPOSITORY}/blob/v0.6.2/csrc/trtllm_fused_moe_routing_deepseek.cu",
        entry_points=frozenset({"trtllm_fp4_block_scale_moe"}),
        condition=lambda problem: problem.is_grouped and problem.topk_group != min(4, problem.n_group),
        way_out="Route outside the kernel; fp4_moe does.",
    ),
    KnownIssue(
        id="deepseek-uninitialised-scores",
        title="DeepSeekV3 routing from logits sorts registers that nothing has written",
        releases=">=0.4.0.dev0,<0.5.0rc1",
        effect=Effect.REFUSED,
        source=f"{_REPOSITORY}/blob/v0.4.1/csrc/trtllm_fused_moe_routing_deepseek.cu",
        entry_points=frozenset({"trtllm_fp4_block_scale_moe"}),
        condition=lambda problem: problem.routing_method is RoutingMethod.DEEPSEEK_V3,
        way_out="Route outside the kernel; fp4_moe does.",
    ),
    KnownIssue(
        id="negative-bias-misroutes",
        title="DeepSeekV3 routing from logits prefers padding to experts whose biased score is below -1",
        releases=">=0.2.9.dev0,<=0.6.2,!=0.6.2",
        effect=Effect.TOLD,
        source=f"{_REPOSITORY}/blob/v0.6.1/csrc/trtllm_fused_moe_routing_deepseek.cu",
        entry_points=frozenset({"trtllm_fp4_block_scale_moe"}),
        condition=lambda problem: problem.routing_method is RoutingMethod.DEEPSEEK_V3,
        way_out="Pass top-k where the router's bias has values near -1 or below.",
    ),
    KnownIssue(
        id="no-groups-divides-by-zero",
        title="DeepSeekV3 routing from logits with n_group None or 0 divides by zero and kills the process",
        releases=">=0.2.9.dev0,<0.6.8rc1",
        effect=Effect.AVOIDED,
        source=f"{_REPOSITORY}/blob/v0.6.7/include/flashinfer/trtllm/fused_moe/RoutingKernel.h",
        way_out="Pass n_group=1, topk_group=1.",
    ),
    KnownIssue(
        id="missing-bias-dereferenced",
        title="DeepSeekV3 routing from logits without a routing_bias reads address 0",
        releases=">=0.2.9.dev0",
        effect=Effect.AVOIDED,
        source=f"{_REPOSITORY}/blob/v0.7.4/include/flashinfer/trtllm/fused_moe/RoutingCustomPolicy.cuh",
        way_out="Pass a bias of zeros.",
    ),
    KnownIssue(
        id="float32-bias-read-as-bf16",
        title="a float32 routing_bias is accepted and read as bf16",
        releases=">=0.6.7.dev0,<0.6.8rc1",
        effect=Effect.AVOIDED,
        source=f"{_REPOSITORY}/blob/v0.6.7/include/flashinfer/trtllm/fused_moe/RoutingKernel.h",
        way_out="Pass a bf16 bias.",
    ),
    KnownIssue(
        id="float32-logits-read-as-bf16",
        title="every routing method but DeepSeekV3 accepts float32 logits and reads them as bf16",
        releases=">=0.2.10.dev0,<0.6.8rc1",
        effect=Effect.AVOIDED,
        source=f"{_REPOSITORY}/blob/v0.6.6/csrc/trtllm_fused_moe_runner.cu",
        way_out="Pass bf16 logits.",
    ),
    KnownIssue(
        id="minimax2-scaling-ignored",
        title="MiniMax2 routing ignores routed_scaling_factor",
        releases=">=0.6.8.dev0,<0.6.13rc1",
        effect=Effect.REFUSED,
        source=f"{_REPOSITORY}/blob/v0.6.12/csrc/trtllm_fused_moe_runner.cu",
        entry_points=frozenset({"trtllm_fp4_block_scale_moe"}),
        condition=lambda problem: (
            problem.routing_method is RoutingMethod.MINIMAX2 and problem.routed_scaling_factor != 1.0
        ),
        way_out="Route outside the kernel; fp4_moe does.",
    ),
    KnownIssue(
        id="routed-batch-dependent",
        title="FP4 routed output depends on the batch size at 8 tokens (seen in 0.6.8.post1; no fix is known)",
        releases=">=0.6.8.post1",
        effect=Effect.TOLD,
        source=f"{_REPOSITORY}/issues/3559",
        entry_points=frozenset({"trtllm_fp4_block_scale_routed_moe"}),
        way_out="Compare small batches with a padded one.",
    ),
    KnownIssue(
        id="per-token-tile-192",
        title="kernels of tile 192 return NaN with per-token activation scales at large batches",
        releases=">=0.6.16.dev0,<0.6.18rc1",
        effect=Effect.REFUSED,
        source=f"{_REPOSITORY}/issues/4486",
        entry_points=frozenset({"trtllm_fp4_block_scale_moe", "trtllm_fp4_block_scale_routed_moe"}),
        features=frozenset({"per_token_scale"}),
        condition=lambda problem: problem.activation_scaling is ActivationScaling.PER_TOKEN,
        way_out="Use the checkpoint's input scales, or FlashInfer 0.6.18 or newer.",
    ),
    KnownIssue(
        id="bf16-logits-read-as-float32",
        title="DeepSeekV3 routing accepts bf16 logits and reads them as float32",
        releases=">=0.2.10.dev0,<0.6.0rc1",
        effect=Effect.AVOIDED,
        source=f"{_REPOSITORY}/blob/v0.5.3/csrc/trtllm_fused_moe_kernel_launcher.cu",
        way_out="Pass float32 logits; fp4_moe does.",
    ),
    KnownIssue(
        id="tuple-topk-float32",
        title="a (ids, weights) top-k with float32 weights is read as bf16",
        releases=">=0.6.12.dev0,<=0.6.15,!=0.6.15",
        effect=Effect.AVOIDED,
        source=f"{_REPOSITORY}/blob/v0.6.12/csrc/trtllm_fused_moe_kernel_launcher.cu",
        way_out="Pass packed top-k, or bf16 weights.",
    ),
    KnownIssue(
        id="linear-layout-ignored",
        title="nvfp4_quantize(sfLayout=layout_linear) returns 128x4 block scales",
        releases=">=0.2.9.dev0,<=0.6.7,!=0.6.7",
        effect=Effect.AVOIDED,
        source=f"{_REPOSITORY}/blob/v0.6.6/flashinfer/fp4_quantization.py",
        way_out="Use fp4_quantize(is_sf_swizzled_layout=False).",
    ),
    KnownIssue(
        id="mm-fp4-positional-backend",
        title="mm_fp4 sees its backend only when it is passed as a keyword",
        releases=">=0.5.0.dev0,<=0.5.1,!=0.5.1",
        effect=Effect.AVOIDED,
        source=f"{_REPOSITORY}/blob/v0.5.0/flashinfer/gemm.py",
        way_out="Pass backend= by keyword.",
    ),
    KnownIssue(
        id="fp4-quantize-unchecked-gpu",
        title="fp4_quantize on a GPU older than SM100 returns memory that nothing has written, without an error",
        releases=">=0.3.1.dev0,<=0.7.4,!=0.7.4",
        effect=Effect.AVOIDED,
        source=f"{_REPOSITORY}/blob/v0.7.2/flashinfer/quantization/fp4_quantization.py",
        way_out="Use the torch backend there.",
    ),
    KnownIssue(
        id="import-needs-cuda",
        title="import flashinfer raises AssertionError where torch is a CPU build and nvidia-cutlass-dsl is installed",
        releases=">=0.6.8.dev0,<0.6.12rc1|>=0.6.14.dev0,<0.7.1rc1",
        effect=Effect.TOLD,
        source=f"{_REPOSITORY}/blob/v0.7.0/flashinfer/gdn_kernels/gdn_decode_bf16_state.py",
        way_out="Use a CUDA build of torch, or another release.",
    ),
)
