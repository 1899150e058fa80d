"""Which sizes FlashInfer's trtllm-gen MoE can take, release by release.

Every number was read in the launcher and the routing kernels of the release that a row begins with
(docs/launcher-limits.md has file and line); none was tried on a GPU. Beyond its limits a release raises, or, which is
why they are checked here, returns memory that nothing has written. To add a release whose limits changed, add a row.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from packaging.version import Version

from flashinfer_compat.reasons import Reason, ReasonCode
from flashinfer_compat.versions import at_least
from flashinfer_compat.vocabulary import RoutingMethod

__all__ = [
    "DEEPSEEK_V3_GROUPED",
    "DEEPSEEK_V3_UNGROUPED",
    "FUSED_SHARED",
    "METHODS",
    "REPLAY_FUSED_SHARED",
    "REPLAY_GROUPED",
    "REPLAY_LLAMA4",
    "REPLAY_OTHER",
    "ROUTED",
    "WEIGHTS_LABELLED",
    "FusedSharedLimits",
    "Limits",
    "Sizes",
    "limits_for",
    "violations",
]


@dataclass(frozen=True)
class Sizes:
    """The numbers a launch is given."""

    num_experts: int
    top_k: int
    n_group: int = 1
    topk_group: int = 1


@dataclass(frozen=True)
class Limits:
    """What one kernel takes from a release on, until the next row."""

    since: str
    max_experts: int
    max_top_k: int
    multiple: int = 1
    """num_experts must be a multiple of it."""
    min_experts: int = 1
    min_top_k: int = 1
    top_k_below: bool = False
    """Whether top_k must be less than num_experts, not just at most."""
    top_k_8_above: int | None = None
    """With more experts than this, top_k must be 8: the kernel reads all 8 slots and writes top_k."""
    max_n_group: int = 1
    max_group_size: int = 0
    """Most experts in a group; 0 where there are no groups."""
    max_topk_group: int = 1
    max_top_k_times_topk_group: int | None = None
    top_k_below_reachable: bool = False
    """Whether top_k must be less than the experts in topk_group groups."""


ROUTED: tuple[Limits, ...] = (
    Limits("0.2.10", 128, 8, multiple=4, top_k_below=True),
    # These candidates have kernels for nine numbers of experts up to 128 only, the multiples of 32 among them.
    Limits("0.4.0rc0", 128, 8, multiple=32, top_k_below=True),
    Limits("0.4.0rc3", 128, 8, multiple=4, top_k_below=True),
    Limits("0.5.0", 512, 10, multiple=4, top_k_below=True),
    Limits("0.5.3", 512, 10, multiple=4),
    Limits("0.6.7", 2048, 32, multiple=4),
    Limits("0.6.8", 2048, 32),
)
"""The routed entry with precomputed top-k and routing method Renormalize."""

DEEPSEEK_V3_GROUPED: tuple[Limits, ...] = (
    Limits(
        "0.2.9",
        256,
        8,
        multiple=4,
        min_experts=8,
        top_k_below=True,
        max_n_group=8,
        max_group_size=32,
        max_topk_group=4,
        max_top_k_times_topk_group=32,
        top_k_below_reachable=True,
    ),
    Limits(
        "0.5.3",
        256,
        8,
        multiple=4,
        min_experts=8,
        max_n_group=8,
        max_group_size=32,
        max_topk_group=4,
        max_top_k_times_topk_group=32,
    ),
    Limits("0.6.7", 256, 22, multiple=4, min_experts=32, max_n_group=8, max_group_size=32, max_topk_group=4),
    # 0.6.11 to 0.6.14 take any number of experts; left out, for an unnamed build of 0.6.15 looks like 0.6.14.
    Limits("0.6.8", 256, 22, multiple=4, max_n_group=8, max_group_size=32, max_topk_group=4),
)
"""The logits entry, DeepSeekV3 with expert groups."""

DEEPSEEK_V3_UNGROUPED: tuple[Limits, ...] = (
    Limits("0.2.9", 128, 8, multiple=4, min_experts=8, top_k_below=True),
    Limits("0.5.0", 384, 8, multiple=4, min_experts=8, top_k_below=True, top_k_8_above=128),
    Limits("0.5.3", 384, 8, multiple=4, min_experts=8, top_k_8_above=128),
    # 0.6.3 also takes 385 to 512 experts, with top_k up to 22; left out until a model needs it.
    Limits("0.6.3", 384, 8, multiple=4, min_experts=8),
    Limits("0.6.7", 512, 22, min_experts=32),
    Limits("0.6.8", 1024, 32, multiple=4),
    Limits("0.6.11", 1024, 32),
)
"""The logits entry, DeepSeekV3 without groups (n_group=1, topk_group=1)."""

_RENORMALIZE = (
    Limits("0.2.9", 128, 8, multiple=4, min_top_k=8, top_k_below=True),
    *ROUTED[:-1],
    Limits("0.6.8", 2048, 32, multiple=4),
    Limits("0.6.11", 2048, 32),
)


def _smallest_tier(since: str) -> tuple[Limits, ...]:
    """Policies compiled for at most 256 experts and top_k 8 only."""
    rows = (Limits(since, 256, 8, multiple=4), Limits("0.6.11", 256, 8))
    return rows if since == "0.6.8" else (Limits(since, 256, 8),)


METHODS: Mapping[RoutingMethod, tuple[Limits, ...]] = {
    RoutingMethod.RENORMALIZE: _RENORMALIZE,
    RoutingMethod.RENORMALIZE_NAIVE: _RENORMALIZE,
    RoutingMethod.LLAMA4: (Limits("0.2.9", 128, 1, multiple=4), Limits("0.6.11", 128, 1)),
    RoutingMethod.DEFAULT: _smallest_tier("0.6.8"),
    RoutingMethod.TOPK: (
        Limits("0.2.14", 128, 8, multiple=4, top_k_below=True),
        *ROUTED[1:-1],
        *_smallest_tier("0.6.8"),
    ),
    RoutingMethod.SIGMOID_RENORM: _smallest_tier("0.6.8"),
    RoutingMethod.MINIMAX2: (Limits("0.6.8", 1024, 32, multiple=4), Limits("0.6.11", 1024, 32)),
    RoutingMethod.SIGMOID: _smallest_tier("0.6.11"),
    RoutingMethod.TOPK_SIGMOID: _smallest_tier("0.6.18"),
}
"""The logits entry with any method but DeepSeekV3; before the first row a method is not implemented."""


@dataclass(frozen=True)
class FusedSharedLimits:
    """What `num_fused_shared_experts` of the logits entry adds to DeepSeekV3 with groups (0.6.17 to 0.7.4)."""

    max_slots: int = 32
    """top_k + num_shared_experts."""
    max_rows: int = 512
    """num_experts + num_shared_experts."""


FUSED_SHARED = FusedSharedLimits()

WEIGHTS_LABELLED = "0.6.15"
"""From here on the logits entry labels unfinalized expert weights bf16, which they always are."""

REPLAY_GROUPED, REPLAY_OTHER, REPLAY_LLAMA4, REPLAY_FUSED_SHARED = "0.6.8", "0.6.13", "0.6.18", "0.7.1"
"""From here on the logits entry writes `routing_replay_out`: for DeepSeekV3 with groups; for other methods, which
accept it before and write nothing; for Llama4; beside fused shared experts, where it is refused before."""


def limits_for(rows: tuple[Limits, ...], version: Version) -> tuple[Limits, ...]:
    """The rows a version must satisfy, all of them; empty where the kernel does not exist yet.

    A nightly or candidate of a release may behave like that release or like the one before it, so it must satisfy both.
    """
    current = [row for row in rows if at_least(version, row.since)][-1:]
    if version.is_prerelease and current:
        upcoming = [row for row in rows if at_least(Version(version.base_version), row.since)][-1:]
        return tuple(dict.fromkeys([*current, *upcoming]))
    return tuple(current)


def violations(limits: Limits, sizes: Sizes, kernel: str) -> Iterator[Reason]:
    """Why `kernel` cannot take `sizes`; nothing where it can."""
    experts, top_k, groups = sizes.num_experts, sizes.top_k, sizes.n_group
    if not limits.min_experts <= experts <= limits.max_experts or experts % limits.multiple:
        least = f"at least {limits.min_experts} and " if limits.min_experts > 1 else ""
        multiple = f", a multiple of {limits.multiple}" if limits.multiple > 1 else ""
        message = f"{kernel} takes {least}at most {limits.max_experts} experts{multiple}, got {experts}."
        yield Reason(ReasonCode.NUM_EXPERTS, message)
    most = min(limits.max_top_k, experts - 1 if limits.top_k_below else experts)
    if not limits.min_top_k <= top_k <= most:
        wanted = f"at most {most}" if limits.min_top_k == 1 else f"{limits.min_top_k} to {most}"
        if limits.min_top_k == most:
            wanted = str(most)
        yield Reason(ReasonCode.TOP_K, f"{kernel} takes top_k {wanted} with {experts} experts, got {top_k}.")
    if limits.top_k_8_above is not None and experts > limits.top_k_8_above and top_k != 8:
        yield Reason(
            ReasonCode.TOP_K, f"{kernel} takes top_k 8 only with over {limits.top_k_8_above} experts, got {top_k}."
        )
    if limits.max_group_size:
        yield from _group_violations(limits, sizes, kernel, experts // groups)


def _group_violations(limits: Limits, sizes: Sizes, kernel: str, group_size: int) -> Iterator[Reason]:
    if sizes.n_group > limits.max_n_group or group_size > limits.max_group_size:
        message = (
            f"{kernel} takes at most {limits.max_n_group} groups of at most {limits.max_group_size} experts, "
            f"got n_group={sizes.n_group} of {group_size}."
        )
        yield Reason(ReasonCode.EXPERT_GROUPS, message)
    if sizes.topk_group > limits.max_topk_group:
        message = f"{kernel} takes topk_group of at most {limits.max_topk_group}, got {sizes.topk_group}."
        yield Reason(ReasonCode.EXPERT_GROUPS, message)
    product = limits.max_top_k_times_topk_group
    if product is not None and sizes.top_k * sizes.topk_group > product:
        message = f"{kernel} takes top_k * topk_group of at most {product}, got {sizes.top_k * sizes.topk_group}."
        yield Reason(ReasonCode.TOP_K, message)
    if limits.top_k_below_reachable and sizes.top_k >= sizes.topk_group * group_size:
        message = (
            f"{kernel} takes top_k below the {sizes.topk_group * group_size} experts of topk_group groups, "
            f"got {sizes.top_k}."
        )
        yield Reason(ReasonCode.TOP_K, message)
