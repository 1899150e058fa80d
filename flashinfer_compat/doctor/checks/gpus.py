"""Is there a GPU, and does this FlashInfer have FP4 MoE kernels for it that can be trusted?"""

from __future__ import annotations

from collections.abc import Iterator

from flashinfer_compat.doctor.check import Checks, Found
from flashinfer_compat.doctor.facts import Facts
from flashinfer_compat.doctor.finding import Group, Severity
from flashinfer_compat.doctor.repairs import install_release, newest_release
from flashinfer_compat.features.known_issues import Effect
from flashinfer_compat.features.table import TRTLLM_GEN
from flashinfer_compat.reasons import ReasonCode
from flashinfer_compat.vocabulary import Backend, Evidence, RoutingInput

__all__ = ["CHECKS"]

CHECKS = Checks(Group.GPU)


@CHECKS.add("no-gpu", "fp4_moe runs on the CPU, which is a reference.")
def _no_gpu(facts: Facts) -> Iterator[Found]:
    gpus = facts.environment.gpus
    if gpus.value is None:
        # The loader's own words about each library are among the facts.
        reason = (gpus.reason or "").partition(": OSError")[0]
    elif not gpus.value.devices and not gpus.value.problems:
        reason = f"driver {gpus.value.driver_version} sees none"
    else:
        return
    advice = "In a container, start it with --gpus all." if facts.flashinfer is not None and not facts.made_up else ""
    yield Found(Severity.NOTE, f"There is no NVIDIA GPU: {reason}.", advice=advice)


@CHECKS.add("gpus-hidden", "CUDA sees no GPU, so fp4_moe runs on the CPU.")
def _gpus_hidden(facts: Facts) -> Iterator[Found]:
    gpus = facts.environment.gpus.value
    if gpus is not None and gpus.devices and facts.architecture is None:
        yield Found(
            Severity.WARNING,
            f"CUDA_VISIBLE_DEVICES={gpus.visible!r} hides {'all ' if len(gpus.devices) > 1 else 'the '}"
            f"{len(gpus.devices)} GPU{'s' if len(gpus.devices) > 1 else ''} of this machine.",
            "unset CUDA_VISIBLE_DEVICES",
        )


@CHECKS.add("gpu-unreadable", "The driver counts a GPU that it cannot describe: it may have fallen off the bus.")
def _gpu_unreadable(facts: Facts) -> Iterator[Found]:
    for problem in facts.environment.gpus.value.problems if facts.environment.gpus.value else ():
        yield Found(Severity.WARNING, f"{problem}.", advice="Look at nvidia-smi and dmesg; a reboot may bring it back.")


@CHECKS.add("gpus-differ", "Plans are made for the first visible GPU only.")
def _gpus_differ(facts: Facts) -> Iterator[Found]:
    gpus = facts.environment.gpus.value
    kinds = sorted({gpu.architecture for gpu in gpus.devices}) if gpus and gpus.visible is None else []
    if len(kinds) > 1:
        yield Found(
            Severity.NOTE,
            f"The GPUs of this machine differ: {', '.join(kinds)}.",
            advice="Choose those of one kind with CUDA_VISIBLE_DEVICES.",
        )


@CHECKS.add("no-fp4-moe-kernel", "The functions can be imported, and fail or return garbage when they are called.")
def _no_fp4_moe_kernel(facts: Facts) -> Iterator[Found]:
    if facts.flashinfer is None or facts.architecture is None or facts.covers_gpu:
        return
    since = TRTLLM_GEN.get(facts.architecture)
    way_out = f"FlashInfer has them since {since}" if since else "no FlashInfer release has them"
    able = (one.backend for one in facts.report.strategies if one.status is not Evidence.ABSENT)
    backend = next(able, Backend.TORCH)
    yield Found(
        Severity.WARNING if backend is Backend.TORCH else Severity.NOTE,
        f"FlashInfer {facts.flashinfer.version} has no trtllm-gen FP4 MoE kernels for {facts.architecture}; {way_out}. "
        f"fp4_moe runs on the {backend.value} backend.",
        install_release(facts, newest_release()) if since else "",
    )


@CHECKS.add("release-unusable", "fp4_moe takes another backend, although other releases have kernels for this GPU.")
def _release_unusable(facts: Facts) -> Iterator[Found]:
    if facts.flashinfer is None or facts.flashinfer.behaviour is None or not facts.has_kernels:
        return
    for routing_input in RoutingInput:
        states = [
            one
            for one in facts.report.strategies
            if one.routing_input is routing_input and one.backend is Backend.TRTLLM
        ]
        if any(one.status.rank > Evidence.ABSENT.rank for one in states):
            continue
        reasons = [reason for one in states for reason in one.reasons if reason.code not in _NOT_THE_RELEASE]
        if reasons:
            yield Found(
                Severity.WARNING,
                f"FlashInfer {facts.flashinfer.version} cannot run DeepSeek-R1's MoE from {routing_input.value} on "
                f"{facts.architecture}: {reasons[-1].message}",
                install_release(facts, newest_release()),
                subject=routing_input.value,
            )


_NOT_THE_RELEASE = (
    ReasonCode.TORCH_MISSING,
    ReasonCode.TORCH_WITHOUT_CUDA,
    ReasonCode.REFUTED,
    ReasonCode.NEEDS_LOGITS,
    ReasonCode.NEEDS_TOPK,
)
"""Reasons that another release would not change."""


@CHECKS.add("known-issue", "fp4_moe avoids or refuses what it can; an engine's own calls are not guarded.")
def _known_issue(facts: Facts) -> Iterator[Found]:
    if not facts.has_kernels:
        return
    for issue in facts.report.known_issues:
        if issue.entry_points and (issue.effect is Effect.TOLD or issue.effect is Effect.REFUSED):
            handled = " (fp4_moe refuses it)" if issue.effect is Effect.REFUSED else ""
            yield Found(
                Severity.NOTE,
                f"{issue.title[0].upper()}{issue.title[1:]}{handled}.",
                advice=issue.way_out,
                subject=issue.id,
            )


@CHECKS.add("strategy-refuted", "Its numbers are wrong here, so it is not chosen unless it is asked for by name.")
def _strategy_refuted(facts: Facts) -> Iterator[Found]:
    for check in facts.report.target.self_checks:
        if check.verdict is Evidence.REFUTED:
            yield Found(
                Severity.WARNING,
                f"A self-check refuted {check.kind}: {check.problem}.",
                "python -m flashinfer_compat verify",
                "If it is refuted again, use another FlashInfer release.",
                f"{check.kind.strategy} on {check.kind.backend}",
            )
