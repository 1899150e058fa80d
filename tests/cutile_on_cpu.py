"""FlashInfer's own cuTile MoE, its host code unchanged, on a CPU: only the kernel is replaced, by plain PyTorch.

Everything that FlashInfer checks and decides before a launch runs as it is: configurations, weight layouts, packs,
token buckets, tactics. The kernel's arguments are what `flashinfer/fused_moe/cutile/fp4.py::run_moe` takes.
"""

from __future__ import annotations

import contextlib
import sys
from dataclasses import dataclass, field
from types import ModuleType, SimpleNamespace
from typing import Any
from weakref import WeakValueDictionary

import pytest
import torch
from torch.nn import functional

from flashinfer_compat.backends.cutile import experts

__all__ = ["CutileOnCpu", "cutile_on_cpu"]

_E2M1 = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0])


@dataclass
class CutileOnCpu:
    """What the kernel was given, call by call."""

    capability: tuple[int, int]
    launches: list[SimpleNamespace] = field(default_factory=list)

    def run_moe(self, *tensors: Any, **options: Any) -> torch.Tensor:
        """Each token's chosen experts, added up by weight; rounded to bf16 where the kernels write to memory."""
        hidden_states, ids, weights, w1, w1_scale, w1_global, w2, w2_scale, w2_global, output, _ = tensors
        self.launches.append(SimpleNamespace(ids=ids, weights=weights, w1=w1, w1_scale=w1_scale, **options))
        result = torch.zeros(output.shape)
        for expert in ids.unique().tolist():
            token, slot = (ids == expert).nonzero(as_tuple=True)
            gate_up = self._matrix(w1[expert], w1_scale[expert]).unflatten(0, (2, -1))
            # Prepared weights and scales are in the order gate, up.
            gate, up = (
                (hidden_states[token].float() @ (gate_up * w1_global[expert].view(2, 1, 1)).mT).bfloat16().float()
            )
            act = functional.gelu if type(options["activation"]).__name__ == "GeGLU" else functional.silu
            inner = (act(gate) * up).bfloat16().float()
            rows = inner @ (self._matrix(w2[expert], w2_scale[expert]) * w2_global[expert]).T
            result.index_add_(0, token, weights[token, slot].unsqueeze(1) * rows.bfloat16())
        return output.copy_(result)

    def _matrix(self, codes: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
        values = _E2M1[torch.stack((codes & 15, codes >> 4), -1).flatten(-2).long()]
        scale = scale.float()
        if scale.ndim > 2:
            # 128x4 blocks of [32, 4, 4] bytes.
            scale = scale.unflatten(-1, (4, 4)).permute(0, 3, 2, 1, 4).flatten(3).flatten(0, 2)
        scale = scale[: values.shape[0], : values.shape[1] // 16]
        return values * scale.repeat_interleave(16, -1)


def cutile_on_cpu(monkeypatch: pytest.MonkeyPatch, capability: tuple[int, int]) -> CutileOnCpu:
    """Make the installed FlashInfer take CPU tensors for ones on a GPU of this capability.

    Raises:
        Skipped: no FlashInfer with cuTile's NVFP4 x BF16 MoE is installed.
    """
    moe = pytest.importorskip("flashinfer.fused_moe", exc_type=ImportError)
    if not hasattr(moe, "CuTileNvfp4Bf16Config"):
        pytest.skip("FlashInfer 0.7.1 or newer is needed")
    import flashinfer.cutile
    import flashinfer.fused_moe.layer
    import flashinfer.fused_moe.prepare
    import flashinfer.fused_moe.runners
    import flashinfer.utils

    machine = CutileOnCpu(capability)
    for module in (flashinfer.fused_moe.layer, flashinfer.utils):
        monkeypatch.setattr(module, "get_compute_capability", lambda device: capability)
    monkeypatch.setattr(
        torch.cuda, "get_device_properties", lambda device=None: SimpleNamespace(multi_processor_count=9)
    )
    monkeypatch.setattr(torch.cuda, "device", lambda device: contextlib.nullcontext())
    monkeypatch.setattr(flashinfer.cutile, "is_cuda_tile_available", lambda device=None: True)
    if capability < (10, 0):
        # What it does for a tensor on such a GPU.
        monkeypatch.setattr(
            flashinfer.fused_moe.prepare,
            "_prepare_cutile_fp4_scales",
            lambda scale, *, scale_block_size, device: scale.contiguous(),
        )
    runner = flashinfer.fused_moe.runners.CuTileBf16Runner
    made = runner.__init__

    def make(self: Any, config: Any, device: torch.device) -> None:
        made(self, config, torch.device("cuda", 0))
        self.device = device

    monkeypatch.setattr(runner, "__init__", make)
    package, kernels = ModuleType("flashinfer.fused_moe.cutile"), ModuleType("flashinfer.fused_moe.cutile.fp4")
    package.__path__ = []
    package.fp4 = kernels  # type: ignore[attr-defined]
    vars(kernels).update(
        allocate_workspace=lambda **sizes: SimpleNamespace(**sizes),
        GemmConfig=lambda *tile: tile,
        _use_row_major_scale_layout=lambda *sizes: False,
        run_moe=machine.run_moe,
    )
    for module in (package, kernels):
        monkeypatch.setitem(sys.modules, module.__name__, module)
    # Layers made for another GPU are not taken up.
    monkeypatch.setattr(experts, "_SHARED", WeakValueDictionary())
    return machine
