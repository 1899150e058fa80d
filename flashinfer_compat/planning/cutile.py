"""Whether FlashInfer's cuTile MoE can run: NVFP4 weights and bf16 activations, through its unified API."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from flashinfer_compat.features.table import FEATURES, feature_states
from flashinfer_compat.features.target import FlashInfer, Target
from flashinfer_compat.planning.trtllm import Answer
from flashinfer_compat.problem import Problem
from flashinfer_compat.reasons import Reason, ReasonCode
from flashinfer_compat.vocabulary import Evidence, Strategy

__all__ = ["PASSED", "cutile_answer"]

_FEATURE = next(row for row in FEATURES if row.name == "cutile_nvfp4_bf16")

PASSED: Mapping[str, tuple[str, ...]] = {
    "MoELayer": ("config", "device"),
    "MoEConfig": ("routing", "quant", "experts", "activation", "backend", "execution"),
    "RoutingConfig": ("num_experts", "top_k"),
    "QuantConfig": ("weight", "activation"),
    "ExpertConfig": ("intermediate_size",),
    "ExecutionConfig": ("tune_max_num_tokens",),
    "BackendOptions": ("candidates",),
    "MoEActivationPack": ("hidden_states_q", "hidden_states_scale", "topk_ids", "topk_weights"),
    "MoEWeightPack": (),
}
"""The classes of the unified API that a call goes through, and the keywords each is given. 0.7.1 to 0.7.4 are alike."""


def cutile_answer(problem: Problem, target: Target, strategy: Strategy) -> Answer:
    """The kernels need a GPU they are written for, FlashInfer 0.7.1 or newer, cuda-tile and its compiler."""
    state = feature_states(target, [_FEATURE])[_FEATURE.name]
    unknown = tuple(one for one in state.reasons if one.code is ReasonCode.BEHAVIOUR_UNKNOWN)
    reasons = tuple(one for one in state.reasons if one not in unknown)
    if target.flashinfer is not None and state.evidence is not Evidence.ABSENT:
        reasons += tuple(_missing(target.flashinfer))
    if unknown and strategy.is_fused:
        # As with FlashInfer's other kernels: where the rules are not known, no fused call is trusted.
        reasons += unknown
    if reasons:
        return Answer(reasons)
    if unknown:
        note = f"The rules of this release are not known: {unknown[0].message}"
        return Answer(status=Evidence.PRESENT, notes=(note,))
    return Answer(status=Evidence.ELIGIBLE)


def _missing(flashinfer: FlashInfer) -> Iterator[Reason]:
    """What a newer release may have renamed."""
    for name, keywords in PASSED.items():
        if flashinfer.symbols.get(name) is None:
            yield Reason(ReasonCode.ENTRY_POINT_MISSING, f"FlashInfer {flashinfer.version} has no {name}.")
            continue
        lacking = [one for one in keywords if not flashinfer.symbols.has_parameter(name, one)]
        if lacking:
            message = f"{name} of FlashInfer {flashinfer.version} takes no {', '.join(lacking)}."
            yield Reason(ReasonCode.KEYWORD_MISSING, message)
