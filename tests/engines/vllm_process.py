"""The real vLLM on a CPU as on an SM100: what a process must do before it imports it. The process is changed for good.

vLLM's Python is its own. Its compiled libraries need CUDA's; of what they hold, a layer needs the quantizer of
activations, which is stood in for with this package's numerics.
"""

from __future__ import annotations

import os
import shutil
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from standin.calls import Call, Era
from standin.compiled_install import pretend_sm100, replace_compiled_modules

from flashinfer_compat.numerics.layouts import interleave_block_scale
from flashinfer_compat.numerics.nvfp4 import quantize_nvfp4

__all__ = ["as_a_server_has_it", "engine_config", "pretend", "stand_in", "start_ranks"]

_COMPILED = ("vllm._C_stable_libtorch", "vllm._moe_C_stable_libtorch", "vllm.vllm_flash_attn._vllm_fa2_C")
_ASKED_AT_IMPORT = (
    "cutlass_scaled_mm_supports_fp4",
    "cutlass_scaled_mm_supports_fp8",
    "cutlass_scaled_mm_supports_block_fp8",
    "cutlass_group_gemm_supported",
)
_ASKED_WHEN_BUILT = ("silu_and_mul(Tensor! out, Tensor input) -> ()",)
_COMMUNICATOR = "vllm.distributed.device_communicators.base_device_communicator.DeviceCommunicatorBase"
_QUANT = (
    "scaled_fp4_quant.out(Tensor input, Tensor input_scale, bool is_sf_swizzled_layout, *, "
    "Tensor(a!) output, Tensor(b!) output_scale) -> ()"
)
_kept: list[Any] = []


def pretend() -> None:
    """Let vLLM find an SM100, before anything of it is imported."""
    pretend_sm100()
    # What is made on the GPU is made on the CPU.
    accelerator: Any = torch.accelerator
    accelerator.current_device_index = lambda: "cpu"
    accelerator.empty_cache = lambda: None
    for name in _COMPILED:
        sys.modules[name] = ModuleType(name)
    library = torch.library.Library("_C", "FRAGMENT")
    _kept.append(library)
    for name in _ASKED_AT_IMPORT:
        library.define(f"{name}(int capability) -> bool")
        library.impl(name, lambda capability: False, "CompositeExplicitAutograd")
    for schema in _ASKED_WHEN_BUILT:
        library.define(schema)
    import vllm.platforms
    from vllm.platforms.cuda import NonNvmlCudaPlatform

    # Where vLLM registers its own operators; tensors are on the CPU.
    platform: Any = NonNvmlCudaPlatform
    platform.dispatch_key = "CPU"
    # Through torch.distributed and nothing else.
    platform.get_device_communicator_cls = classmethod(lambda cls: _COMMUNICATOR)
    vllm.platforms._current_platform = platform()
    from vllm import _custom_ops

    assert _custom_ops
    library.define(_QUANT)
    library.impl("scaled_fp4_quant.out", _quantize, "CPU")


def stand_in(flashinfer: Any) -> list[Call]:
    """Put the stand-in in the place of the imported FlashInfer's compiled parts; the list takes every call made."""
    # The stand-in has none of this function.
    flashinfer.nvfp4_block_scale_interleave = lambda scale: interleave_block_scale(scale).flatten()
    csrc = Path(flashinfer.__file__).parent / "data" / "csrc"
    return replace_compiled_modules(Era(flashinfer.__version__), csrc)


def _quantize(
    values: torch.Tensor, scale: torch.Tensor, swizzled: bool, *, output: torch.Tensor, output_scale: torch.Tensor
) -> None:
    # vLLM passes one for each expert, all equal; the kernel reads the first.
    rounded = quantize_nvfp4(values.float(), scale.flatten()[0].reciprocal())
    block_scale = rounded.block_scale.view(torch.uint8)
    output.copy_(rounded.codes)
    output_scale.view(torch.uint8).copy_(interleave_block_scale(block_scale) if swizzled else block_scale)


def as_a_server_has_it(folder: Path) -> Path:
    """Without the recorded inputs and outputs, which vLLM would take for weights."""
    own = Path(os.environ["HOME"]) / "model"
    shutil.copytree(folder, own, ignore=shutil.ignore_patterns("moe_io*"))
    return own


def engine_config(folder: Path, **arguments: Any) -> Any:
    """What vLLM settles for a sample checkpoint, by its own argument resolution."""
    from vllm.engine.arg_utils import EngineArgs

    # Newer versions of transformers leave out what DeepSeek's own config.json says.
    overrides = {"topk_method": "noaux_tc", "scoring_func": "sigmoid"}
    settled = {"enforce_eager": True, "skip_tokenizer_init": True, "max_model_len": 128, **arguments}
    return EngineArgs(model=str(folder), hf_overrides=overrides, **settled).create_engine_config()


def start_ranks(rank: int, ranks: int, method: str, **sizes: int) -> None:
    """Join the ranks of a server, in the context of its configuration."""
    from vllm.distributed import parallel_state

    os.environ.update({"RANK": str(rank), "LOCAL_RANK": str(rank)})
    parallel_state.init_distributed_environment(ranks, rank, method, rank, "gloo")
    parallel_state.initialize_model_parallel(ranks, backend="gloo", **sizes)
