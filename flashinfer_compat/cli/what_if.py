"""Says for people which machine was asked about, and what of it was taken from elsewhere."""

from __future__ import annotations

from collections.abc import Iterator

from flashinfer_compat.cli.console import paragraph
from flashinfer_compat.doctor.question import ANY, Premise, Question, Source

__all__ = ["print_question"]


def print_question(question: Question) -> None:
    """The first line says that it is a question; then what was not asked but assumed."""
    machine = [f"FlashInfer {question.flashinfer.value}", question.architecture.value or "no GPU", _torch(question)]
    paragraph(f"{', '.join(machine)}.", label="What if (not this machine):", indent=0)
    here = list(_of(question, Source.THIS_MACHINE))
    assumed = list(_of(question, Source.ASSUMED))
    if here:
        paragraph(f"{', '.join(here)}.", label="Taken from this machine:")
    if assumed:
        paragraph(f"{', '.join(assumed)}.", label="Assumed:")
    paragraph("Not known, so not judged: files, kernel packages, caches, variables and the driver there.")


def _torch(question: Question) -> str:
    torch, cuda = question.torch.value, question.cuda.value
    if torch is None:
        return "no torch"
    name = "any torch" if torch == ANY else f"torch {torch}"
    if cuda is None:
        return f"{name} without CUDA"
    return f"{name} for {_cuda(question.cuda)}"


def _cuda(cuda: Premise) -> str:
    return "a CUDA that fits" if cuda.value == ANY else f"CUDA {cuda.value}"


def _of(question: Question, source: Source) -> Iterator[str]:
    if question.flashinfer.source is source:
        newest = ", the newest one recorded" if source is Source.ASSUMED else ""
        yield f"FlashInfer {question.flashinfer.value}{newest}"
    if question.architecture.source is source:
        yield question.architecture.value or "no GPU"
    if question.torch.source is source:
        yield "any torch" if question.torch.value == ANY else f"torch {question.torch.value}"
    if question.cuda.source is source:
        yield _cuda(question.cuda) if question.cuda.value else "no CUDA"
