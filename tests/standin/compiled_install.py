"""A real FlashInfer on a CPU as on an SM100: the machine's answers, and the compiled modules, are replaced.

Everything else is the release's own: its wrappers, checks, tuner and operator registration. The functions change the
process for good, which therefore is to be one of its own.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

from standin.calls import Call, Era
from standin.compiled import CompiledModule

__all__ = ["pretend_sm100", "replace_compiled_modules", "replace_libraries"]

_MAJOR, _MINOR = 10, 0
_CUDA = "13.0"

_SOURCES = {
    "gen_trtllm_gen_fused_moe_sm100_module": "trtllm_fused_moe_kernel_launcher.cu",
    # Their names up to 0.3.0, and in some of the releases before.
    "trtllm_gen_fused_moe_sm100_module": "trtllm_fused_moe_kernel_launcher.cu",
    "gen_fp4_quantization_module": "nv_internal/tensorrt_llm/thop/fp4Quantize.cpp",
    "gen_fp4_quantization_sm100_module": "nv_internal/tensorrt_llm/thop/fp4Quantize.cpp",
    "gen_gemm_sm100_module_cutlass_fp4": "fp4_gemm_cutlass.cu",
}
"""The functions that describe a library to build, and the file below csrc that exports its functions to Python."""


def pretend_sm100() -> None:
    """Let torch answer what FlashInfer asks of the machine as an SM100 would; before `import flashinfer`."""
    properties = SimpleNamespace(
        name="stand-in for an SM100",
        major=_MAJOR,
        minor=_MINOR,
        multi_processor_count=148,
        total_memory=180 * 2**30,
        shared_memory_per_multiprocessor=228 * 2**10,
    )
    cuda: Any = torch.cuda
    cuda.device_count = lambda: 1
    cuda.current_device = lambda: 0
    cuda.get_device_capability = lambda device=None: (_MAJOR, _MINOR)
    cuda.get_device_properties = lambda device=None: properties
    cuda.get_device_name = lambda device=None: properties.name
    # 0.7.4 keeps a workspace for each stream, in a pool of its own.
    internals: Any = torch._C
    internals._cuda_getCurrentRawStream = lambda index: 0
    cuda.device, cuda.MemPool, cuda.use_mem_pool = _Nothing, _Nothing, _Nothing
    torch.version.cuda = _CUDA


class _Nothing(nullcontext[None]):
    """A context that does nothing, whatever it is made from."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__()


def replace_compiled_modules(era: Era, csrc: Path) -> list[Call]:
    """Put the stand-in in the place of the libraries of the imported FlashInfer; the list takes every call made.

    Args:
        era: the release whose behaviour is stood in for.
        csrc: the release's C++ sources.
    """
    calls: list[Call] = []
    replace_libraries(lambda source: CompiledModule(era, (csrc / source).read_text("utf-8"), calls))
    return calls


def replace_libraries(load: Callable[[str], object]) -> None:
    """Let the imported FlashInfer load what `load` gives for the C++ source, below csrc, that a library's functions are
    exported from."""
    replacements: dict[str, Callable[..., Any]] = {
        # Tensors are on the CPU, about which FlashInfer's own functions refuse to answer.
        "get_compute_capability": lambda device: (_MAJOR, _MINOR),
        "device_support_pdl": lambda device: True,
        # It would hand the loaded library a way to download kernels.
        "setup_cubin_loader": lambda path: None,
    }
    for name, source in _SOURCES.items():
        replacements[name] = _describing(load, source)
    for module in [one for name, one in sys.modules.items() if name.partition(".")[0] == "flashinfer"]:
        for name in replacements.keys() & vars(module).keys():
            setattr(module, name, replacements[name])


def _describing(load: Callable[[str], object], source: str) -> Callable[..., Any]:
    def describe(*args: Any, **kwargs: Any) -> SimpleNamespace:
        module = load(source)
        return SimpleNamespace(
            build_and_load=lambda *args, **kwargs: module,
            get_library_path=lambda: source,
            get_library_paths=lambda: [source],
        )

    return describe
