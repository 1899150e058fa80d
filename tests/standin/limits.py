"""Which sizes each release takes, and whether others raise or leave the output unwritten (docs/launcher-limits.md).

These are the releases' own limits, line by line of that document; `planning/limits.py` is stricter in a few places.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from flashinfer_compat.vocabulary import RoutingMethod
from standin.calls import Call, Era
from standin.faults import LaunchError, need

__all__ = ["Sizes", "check_launcher", "check_logits", "check_precomputed"]


@dataclass(frozen=True)
class Sizes:
    """The numbers that routing depends on."""

    num_experts: int
    top_k: int
    n_group: int | None
    topk_group: int | None
    shared: int
    """num_fused_shared_experts."""
    local_offset: int
    local: int
    """local_num_experts."""
    method: RoutingMethod | None
    """None for a number that is no method of this release."""

    @property
    def is_grouped(self) -> bool:
        """Whether DeepSeekV3's kernel with groups runs."""
        return self.method is RoutingMethod.DEEPSEEK_V3 and (self.n_group or 0) > 1


@dataclass(frozen=True)
class _Row:
    since: str
    experts: int
    top_k: int
    multiple: int = 1
    fewest: int = 1
    exact_top_k: bool = False
    among: frozenset[int] = frozenset()
    """The only numbers of experts with a kernel; empty where there is none such."""


_FIRST_TEMPLATES = frozenset((8, 16, 24, 32, 48, 64, 72, 96, 128))
_RENORMALIZE_UP_TO_0_6_7 = (
    _Row("0.2.10", 128, 8, 4),
    _Row("0.4.0rc0", 128, 8, 4, among=_FIRST_TEMPLATES),
    _Row("0.4.0rc3", 128, 8, 4),
    _Row("0.5.0", 512, 10, 4),
    _Row("0.6.7", 2048, 32, 4),
)
_PRECOMPUTED = (*_RENORMALIZE_UP_TO_0_6_7, _Row("0.6.8", 2048, 32))
_RENORMALIZE = (
    _Row("0.2.9", 128, 8, 4, exact_top_k=True),
    *_RENORMALIZE_UP_TO_0_6_7,
    _Row("0.6.8", 2048, 32, 4),
    _Row("0.6.11", 2048, 32),
)
_SMALL = (_Row("0.6.8", 256, 8, 4), _Row("0.6.11", 256, 8))
_METHODS: Mapping[RoutingMethod, tuple[_Row, ...]] = {
    RoutingMethod.DEFAULT: _SMALL,
    RoutingMethod.RENORMALIZE: _RENORMALIZE,
    RoutingMethod.RENORMALIZE_NAIVE: _RENORMALIZE,
    RoutingMethod.LLAMA4: (_Row("0.2.9", 128, 1, 4, exact_top_k=True), _Row("0.6.11", 128, 1, exact_top_k=True)),
    RoutingMethod.TOPK: (
        _Row("0.2.14", 128, 8, 4),
        *_RENORMALIZE_UP_TO_0_6_7[1:],
        *_SMALL,
    ),
    RoutingMethod.SIGMOID_RENORM: _SMALL,
    RoutingMethod.MINIMAX2: (_Row("0.6.8", 1024, 32, 4), _Row("0.6.11", 1024, 32)),
    RoutingMethod.SIGMOID: (_Row("0.6.11", 256, 8),),
    RoutingMethod.TOPK_SIGMOID: (_Row("0.6.18", 256, 8),),
}
_UNGROUPED = (
    _Row("0.2.9", 128, 8, 4, fewest=8),
    _Row("0.4.0rc0", 384, 8, 4, fewest=8),
    _Row("0.6.3", 512, 22, 4),
    _Row("0.6.7", 512, 22, fewest=32),
    _Row("0.6.8", 1024, 32, 4),
    _Row("0.6.11", 1024, 32),
)
_GROUPED = (
    _Row("0.2.9", 256, 8, 4, fewest=8),
    _Row("0.4.0rc0", 384, 8, 4, fewest=8),
    _Row("0.5.0", 256, 8, 4, fewest=8),
    _Row("0.6.3", 256, 8, 4),
    _Row("0.6.7", 256, 22, 4, fewest=32),
    _Row("0.6.8", 256, 22, 4),
    _Row("0.6.11", 256, 22),
    _Row("0.6.15", 256, 22, 4),
)


def check_launcher(era: Era, sizes: Sizes) -> None:
    """What the launcher checks, whichever way experts are chosen.

    Raises:
        LaunchError: a size is refused.
    """
    experts, top_k = sizes.num_experts, sizes.top_k
    most = experts if era.since("0.5.3") else experts - 1
    need(0 < top_k <= most, f"top_k must be between 1 and {most}, got {top_k}")
    if era.since("0.5.3"):
        need(0 < sizes.local <= experts, "local_num_experts must be between 1 and num_experts")
        inside = sizes.local_offset >= 0 and sizes.local_offset + sizes.local <= experts
        need(inside, "expert offset and count must be within valid range")
    if sizes.method is RoutingMethod.DEEPSEEK_V3 or era.since("0.5.3"):
        return
    refused = sizes.n_group is not None if era.before("0.2.10") else bool(sizes.n_group)
    need(not refused, "Routing kernel with groups implies DeepSeekV3 routing method.")


def check_precomputed(era: Era, call: Call, sizes: Sizes) -> None:
    """What the kernel that takes chosen experts checks.

    Raises:
        LaunchError: a size or the method is refused.
        NotImplementedError: a method this release may run, but that is not modelled.
    """
    method = sizes.method
    if method is None or (method is RoutingMethod.DEFAULT and era.before("0.6.8")):
        raise LaunchError("Unimplemented routing method")
    if method in (RoutingMethod.DEEPSEEK_V3, RoutingMethod.LLAMA4) and era.before("0.6.8"):
        raise NotImplementedError(f"precomputed top-k with {method.flashinfer_name} before 0.6.8 is not modelled")
    need(method is not RoutingMethod.LLAMA4 or sizes.top_k == 1, "For Llama routing method, must have topK == 1")
    if sizes.is_grouped:
        need(sizes.top_k <= 22, "For DeepSeek routing method, must have topK <= 22")
        need((sizes.topk_group or 0) <= 4, "For DeepSeek routing method, must have topkGroup <= 4")
    _check_row(era, call, _row(era, _PRECOMPUTED), sizes, precomputed=True)


def check_logits(era: Era, call: Call, sizes: Sizes) -> None:
    """What the kernel that routes from logits checks, and what it does not check though it should.

    Raises:
        LaunchError: a size or the method is refused.
        ZeroDivisionError: the host code divides by n_group, which is 0 (on x86-64 this ends the process).
    """
    method = sizes.method
    if method is not RoutingMethod.DEEPSEEK_V3:
        row = None if method is None else _row(era, _METHODS[method])
        need(row is not None, "Unimplemented routing method")
        _check_row(era, call, row, sizes, precomputed=False)
    elif sizes.is_grouped:
        _check_grouped(era, call, sizes)
    else:
        _check_ungrouped(era, call, sizes)


def _check_grouped(era: Era, call: Call, sizes: Sizes) -> None:
    experts, top_k = sizes.num_experts, sizes.top_k
    groups, kept = sizes.n_group or 0, sizes.topk_group or 0
    _check_row(era, call, _row(era, _GROUPED), sizes, precomputed=False)
    most = 12 if era.since("0.4.0rc0") and era.before("0.5.0") else 8
    need(groups <= most, f"Routing kernel expects #expert groups {groups} to be <= max groups {most}")
    need(experts % groups == 0, "num_experts must be divisible by n_group")
    need(experts // groups <= 32, "Routing kernel expects #experts per group <= warp size (32)")
    need(kept <= 4, "Routing kernel expects <= 4 top groups")
    need(kept <= groups, "n_group must not be smaller than topk_group")
    need(era.since("0.6.7") or top_k * kept <= 32, "Routing kernel expects topK * topk_group <= 32")
    reachable = kept * experts // groups
    if era.before("0.5.3"):
        need(sizes.topk_group is not None, "if n_group is given, topk_group must be given")
        need(top_k < reachable, "top_k must be less than total number of experts in selected groups")
    else:
        call.misread(top_k > reachable and era.since("0.6.3"), "topk_group groups do not hold top_k experts")
        call.misread(top_k > min(4, groups) * experts // groups, "the kept groups do not hold top_k experts")
    call.misread(experts == groups, "each group holds one expert, and is scored by two")
    call.misread(era.since("0.4.0rc0") and era.before("0.5.0"), "the kernel sorts scores that nothing has written")
    if sizes.shared:
        need(sizes.shared <= 32, "Number of fused shared experts must be less than warp size.")
        need(experts + sizes.shared <= 512, "Routing kernel expects total experts (routed + fused shared) <= 512")
        need(top_k + sizes.shared <= 32, "Routing kernel expects topK experts <= 32")


def _check_ungrouped(era: Era, call: Call, sizes: Sizes) -> None:
    experts, top_k = sizes.num_experts, sizes.top_k
    if era.before("0.2.10") and sizes.n_group is None:
        # n_group becomes 1 and topk_group, where it is None, top_k.
        kept = top_k if sizes.topk_group is None else sizes.topk_group
        need(kept <= 1, "Routing kernel expects top groups to be limited by #expert groups")
    elif era.before("0.6.8") and not sizes.n_group:
        raise ZeroDivisionError("the host code divides num_experts by n_group, which is 0: SIGFPE")
    elif era.before("0.5.3"):
        need(sizes.topk_group == 1, "topk_group must be between 1 and n_group")
    _check_row(era, call, _row(era, _UNGROUPED), sizes, precomputed=False)
    unsorted_scores = era.since("0.4.0rc0") and era.before("0.5.0")
    need(not unsorted_scores or experts <= 128 or experts > 256, "Routing kernel expects #experts per group <= 128")
    call.misread(unsorted_scores and experts <= 128, "the kernel sorts scores that nothing has written")
    eight_only = era.since("0.5.0") and era.before("0.6.3") and experts > 128
    call.misread(eight_only and top_k != 8, "over 128 experts the kernel reads 8 slots and writes top_k")
    few_only = era.since("0.6.3") and era.before("0.6.7") and experts <= 384
    need(not few_only or top_k <= 8, "Routing kernel expects topK experts <= 8")
    if sizes.shared:
        need(era.before("0.7.0"), "DeepSeek no-groups routing path does not support fusing shared expert")
        call.misread(True, "without groups the slots of the shared experts are left unwritten")


def _row(era: Era, rows: tuple[_Row, ...]) -> _Row | None:
    return next((row for row in reversed(rows) if era.since(row.since)), None)


def _check_row(era: Era, call: Call, row: _Row | None, sizes: Sizes, *, precomputed: bool) -> None:
    assert row is not None
    experts, top_k = sizes.num_experts, sizes.top_k
    need(experts % row.multiple == 0, f"num_experts must be a multiple of {row.multiple}, got {experts}")
    need(experts >= row.fewest, f"num_experts must be at least {row.fewest}, got {experts}")
    need(not row.among or experts in row.among, f"no routing kernel for {experts} experts")
    need(not row.exact_top_k or top_k == row.top_k, f"top_k must be {row.top_k}, got {top_k}")
    if experts <= row.experts and top_k <= row.top_k:
        return
    message = f"no compiled tier covers {experts} experts and top_k {top_k} (at most {row.experts} and {row.top_k})"
    # From 0.6.8 to 0.6.15 the policies warn, and no kernel is launched.
    fits_largest = precomputed or (experts <= 2048 and top_k <= 32)
    tiered = sizes.method is not RoutingMethod.LLAMA4 and not (sizes.is_grouped and not precomputed)
    silent = era.since("0.6.8") and era.before("0.6.16") and tiered and fits_largest
    need(silent, message)
    call.misread(True, message)
