"""What the backends need that call no FlashInfer: the kernels in Triton, and the reference in plain PyTorch."""

from __future__ import annotations

from collections.abc import Iterator

from flashinfer_compat.architectures import ARCHITECTURES
from flashinfer_compat.features.model import Library, library_reasons
from flashinfer_compat.features.target import Target
from flashinfer_compat.planning.trtllm import Answer
from flashinfer_compat.problem import Problem
from flashinfer_compat.reasons import Reason, ReasonCode
from flashinfer_compat.vocabulary import Evidence, Strategy

__all__ = ["torch_answer", "triton_answer"]

_TRITON_FROM = "sm80"
"""bf16 tensor cores."""
_TRITONS = tuple(Library(name, "3.5", "'torch>=2.9', which brings it") for name in ("triton", "pytorch-triton"))
"""Distributions of Triton, of which a CUDA build of torch for Linux requires one. Before 3.5 its `dot` takes no fewer
than 16 columns, and its `gdc_wait` is missing or broken."""


def torch_answer(problem: Problem, target: Target, strategy: Strategy) -> Answer:
    """The reference runs wherever torch is."""
    if target.torch_version is None:
        return Answer((_torch_missing(),))
    return Answer(status=Evidence.ELIGIBLE, notes=("The torch backend is a reference: right, not fast.",))


def triton_answer(problem: Problem, target: Target, strategy: Strategy) -> Answer:
    """The portable kernels need a GPU, a CUDA build of torch, and Triton."""
    reasons = tuple(_triton_reasons(target))
    if reasons:
        return Answer(reasons)
    # Where the trtllm kernels run they are taken first; nobody has tried these there.
    return Answer(status=Evidence.ELIGIBLE)


def _triton_reasons(target: Target) -> Iterator[Reason]:
    if target.architecture is None:
        yield Reason(ReasonCode.NO_GPU, f"There is no NVIDIA GPU; the Triton kernels run on {_TRITON_FROM} and newer.")
        return
    if ARCHITECTURES.index(target.architecture) < ARCHITECTURES.index(_TRITON_FROM):
        message = f"The Triton kernels run on {_TRITON_FROM} and newer; not on {target.architecture}."
        yield Reason(ReasonCode.ARCHITECTURE, message)
    if target.torch_version is None:
        yield _torch_missing()
    elif target.torch_cuda is None:
        message = f"torch {target.torch_version} was built without CUDA."
        yield Reason(ReasonCode.TORCH_WITHOUT_CUDA, message, "Install a CUDA build of torch.")
    else:
        installed = next((one for one in _TRITONS if one.name in target.libraries), _TRITONS[0])
        yield from library_reasons("The triton backend", installed, target)


def _torch_missing() -> Reason:
    return Reason(ReasonCode.TORCH_MISSING, "torch is not installed.", "Run: pip install torch")
