"""What a process that asks a real engine needs: the plugin's log lines, and another machine than this one."""

from __future__ import annotations

import logging
from dataclasses import replace

from flashinfer_compat.problem import DEEPSEEK_R1
from flashinfer_compat.self_checks import CheckedKind, SelfCheck
from flashinfer_compat.vocabulary import Backend, Evidence, RoutingInput, Strategy

__all__ = ["Lines", "tell"]


class Lines(logging.Handler):
    """What this package logged."""

    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []
        logging.getLogger("flashinfer_compat").addHandler(self)

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())

    def take(self) -> list[str]:
        lines, self.lines = self.lines, []
        return lines


def tell(site: str, capability: tuple[int, int] | None, refuted: bool = False) -> None:
    """Let the package find the FlashInfer and torch installed in `site`, and one GPU of that compute capability."""
    from flashinfer_compat import machine
    from flashinfer_compat.environment import FileCheck, Gpu, Gpus, Section, collect

    found = collect([site], {"HOME": site}, FileCheck.NONE)
    gpus = () if capability is None else (Gpu(0, "GPU", capability, "GPU-0", 1 << 37),)
    found = replace(found, gpus=Section(Gpus("580.1", "13.0", gpus, None)))
    target = machine.target_of(found, machine.read_flashinfer(found))
    if refuted:
        problem = replace(DEEPSEEK_R1, routing_input=RoutingInput.TOPK)
        kind = CheckedKind.of(problem, Strategy.EXPANDED, Backend.TRTLLM)
        target = replace(target, self_checks=(SelfCheck(kind, Evidence.REFUTED, 1.0, 0.1, None, "it was wrong"),))
    machine.this_machine = lambda: target
