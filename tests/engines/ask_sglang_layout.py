"""Ask the real SGLang for the layout of models, with the plugin, as one rank of several.

In: `{"rank", "port", "ranks", "site", "cases": [{"arguments", "quantization", "draft", "said"}, ...]}`; arguments that
were said, not only settled, come from the user. Out: for each case the fused shared experts, or the error.
"""

from __future__ import annotations

import json
import sys

from engine_process import tell
from sglang_process import make_torchvision_importable

make_torchvision_importable()

from sglang.srt.distributed import parallel_state  # noqa: E402
from sglang.srt.layers.moe import utils  # noqa: E402
from sglang.srt.layers.moe.utils import draft_model_build_scope, initialize_moe_config  # noqa: E402
from sglang.srt.layers.quantization.modelopt_quant import ModelOptFp4Config  # noqa: E402
from sglang.srt.model_loader import loader  # noqa: E402
from sglang.srt.plugins import load_plugins  # noqa: E402
from sglang.srt.runtime_context import get_context  # noqa: E402
from sglang.srt.server_args import ServerArgs  # noqa: E402


class Model:
    """What SGLang asks of a model class that can fuse."""

    @staticmethod
    def shared_experts_fusion_disable_reason(hf_config: object, quant_config: object) -> None:
        return None

    @staticmethod
    def num_fusable_shared_experts(hf_config: object) -> int:
        return 1


def layout(case: dict[str, object]) -> object:
    config = ModelOptFp4Config(True, None, 16, []) if case["quantization"] == "modelopt_fp4" else None
    with get_context().override_server_args(**({} if case["said"] else case["arguments"])):
        if case["said"]:
            server_args = ServerArgs(device="cpu", skip_tokenizer_init=True, **case["arguments"])
            server_args.resolve_once()
            get_context().set_server_args(server_args)
        initialize_moe_config()
        try:
            if case["draft"]:
                with draft_model_build_scope():
                    return loader.resolve_shared_experts_config(Model, None, config).num_fused_shared_experts
            return loader.resolve_shared_experts_config(Model, None, config).num_fused_shared_experts
        except Exception as error:
            return f"{type(error).__name__}: {error}"


question = json.load(sys.stdin)
with get_context().override_server_args():
    parallel_state.init_distributed_environment(
        world_size=question["ranks"],
        rank=question["rank"],
        local_rank=question["rank"],
        distributed_init_method=f"tcp://127.0.0.1:{question['port']}",
        backend="gloo",
    )
load_plugins()
tell(question["site"], (10, 0))
assert loader.resolve_shared_experts_config is utils.resolve_shared_experts_config
print(json.dumps([layout(case) for case in question["cases"]]))
