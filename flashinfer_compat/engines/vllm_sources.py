"""The files of vLLM on whose exact text the plugin relies, by release.

A release is added when its files were read and `tests/engines/test_vllm_*.py` passed with it.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from pathlib import Path

from flashinfer_compat.environment.reading import read_regular

__all__ = ["SOURCES", "differing"]

SOURCES: Mapping[str, Mapping[str, Mapping[str, str]]] = {
    "0.33.0": {
        "config": {
            "vllm.py": "892088ef8dc5c7fa9d50cdf083dd776fd45e8d148d53b4a3279b2e79abeab0ca",
        },
        "model_executor/layers/fused_moe": {
            "config.py": "9da7b7b7f825e466792fc47efad92d47c46716a2e5774ec112d945c5ada5d2ad",
            "experts/trtllm_nvfp4_moe.py": "bb925c60fa867354a17431ff6cae5dd0fd37f565b0a1c09fa6430be64827dd5b",
            "expert_map_manager.py": "c00b240b4ff48894f653a24c3a24c14cb72ed45b6292c1e975077fa4c02de382",
            "layer.py": "c9af2eed017387380ec43ac1aa41dc11a05c42bcbab1fc4fa1cc8971bde0bebd",
            "modular_kernel.py": "86d79f4b86bc6fdd5192bdf0fce83506d40955f8e23e88f9c4322c257b5a5de2",
            "oracle/nvfp4.py": "7508ae9c8cc248ee14e664ec51481bb10ba38e3891e2e4a5e509be13198e5fab",
            "prepare_finalize/no_dp_ep.py": "1f3c0bc71e01209690e787c52554eb358ae56eb78b730a9572ba047f8ba2593b",
            "routed_experts.py": "31e77226425db7eea658e1f273627dca8fb3d423119c3857f8aa5fc6b0d3bd07",
            "router/grouped_topk_router.py": "add3764cec2bb08d121610673b06a09e89e78c11ea45de8d4ab1c1cd24cfcf71",
            "router/router_factory.py": "8b0eee85ada1a92e89bc346c076d97c08e3b6edb5a66686267929c364c2b17a5",
            "runner/moe_runner.py": "64eee9565bdb2c599c8f3341c24e50062b80b9e625e544db44250372311289ef",
            "utils.py": "3ddb067e3937b1311209435e9ac58f4932f37168e04f628d05be82ca7117b4da",
        },
        "model_executor/layers/quantization": {
            "modelopt.py": "e76a666bdb653f86effc1094e9427e89a9acba99f0673f1c9e2f0a8784366b4f",
            "utils/flashinfer_fp4_moe.py": "f8b82c03c9648682b72598e755e5f60e229034c64095275f49ad99991409952d",
            "utils/flashinfer_utils.py": "b97a58d5a4a744fa549a181eebb8293717cb066cdeba45da1a7eb68b47044345",
        },
        "model_executor/models": {
            "deepseek_v2.py": "96f4f755f62caa85869fb884209e7f8869882ddb6efbd40c930778b27bd3e39d",
        },
    },
}
"""SHA-256 of each file, by its folder below the package's."""


def differing(folder: Path, release: str) -> tuple[str, ...]:
    """The files of `release` that are missing in `folder` or hold another text.

    Args:
        folder: of the package vllm.
        release: one of `SOURCES`.
    """
    return tuple(
        f"{below}/{name}"
        for below, files in SOURCES[release].items()
        for name, expected in files.items()
        if _digest(folder / below / name) != expected
    )


def _digest(path: Path) -> str:
    try:
        return hashlib.sha256(read_regular(path)).hexdigest()
    except OSError:
        return ""
