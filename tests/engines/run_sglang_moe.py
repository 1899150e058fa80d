"""One MoE layer of a sample checkpoint in the real SGLang, its shared expert fused, as on an SM100.

SGLang's own model code, loader, weight processing, top-k and FlashInfer call run, and FlashInfer's own Python. Only
FlashInfer's compiled part is stood in for. In: the checkpoint's folder. Out: for each runner what reached the kernel,
and how far its output is from the routed and the shared experts' sum.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

from sglang_process import make_torchvision_importable

make_torchvision_importable()

from standin.calls import Call, Era  # noqa: E402
from standin.compiled_install import pretend_sm100, replace_compiled_modules  # noqa: E402

pretend_sm100()

import flashinfer  # noqa: E402
import torch  # noqa: E402
from safetensors.torch import load_file  # noqa: E402
from sglang.srt.configs.shared_experts import SharedExpertsConfig  # noqa: E402
from sglang.srt.distributed import parallel_state  # noqa: E402
from sglang.srt.layers.moe.moe_runner import flashinfer_trtllm as runner  # noqa: E402
from sglang.srt.layers.moe.utils import initialize_moe_config  # noqa: E402
from sglang.srt.layers.quantization import fp4_utils  # noqa: E402
from sglang.srt.layers.quantization.modelopt_quant import ModelOptFp4Config  # noqa: E402
from sglang.srt.models.deepseek_v2 import DeepseekV2MoE, DeepseekV2WeightLoaderMixin  # noqa: E402
from sglang.srt.runtime_context import (  # noqa: E402
    derive_spawn_ranks,
    get_context,
    get_model,
    get_parallel,
    override_platform,
)
from torch import nn  # noqa: E402
from transformers import AutoConfig  # noqa: E402

import flashinfer_compat as fc  # noqa: E402
from flashinfer_compat.backends.trtllm.weights import prepare_experts  # noqa: E402
from flashinfer_compat.numerics.layouts import interleave_block_scale  # noqa: E402

LAYER = 1
PREFIX = f"model.layers.{LAYER}.mlp"


class Model(nn.Module, DeepseekV2WeightLoaderMixin):
    """One MoE layer under the names that SGLang's loader knows."""

    def __init__(self, config: Any, quantization: Any) -> None:
        super().__init__()
        self.config, self.quant_config, self.num_fused_shared_experts = config, quantization, 1
        self.pp_group = get_parallel().pp_group
        layer, self.model = nn.Module(), nn.Module()
        layer.mlp = DeepseekV2MoE(config, LAYER, quantization, PREFIX)
        self.model.layers = nn.ModuleDict({str(LAYER): layer})
        self.model.start_layer, self.model.end_layer = LAYER, LAYER + 1

    def post_load_weights(self, **_: object) -> None:
        """Nothing of attention is here."""


def build(folder: Path, quantization: Any) -> DeepseekV2MoE:
    config = AutoConfig.from_pretrained(folder)
    # Newer versions of transformers leave out what DeepSeek's own config.json says.
    config.topk_method, config.scoring_func = "noaux_tc", "sigmoid"
    torch.set_default_dtype(torch.bfloat16)
    try:
        model = Model(config, quantization)
    finally:
        torch.set_default_dtype(torch.float32)
    weights = load_file(folder / "model.safetensors")
    model.do_load_weights((name, tensor) for name, tensor in weights.items() if name.startswith(PREFIX))
    moe = model.model.layers[str(LAYER)].mlp
    moe.experts.quant_method.process_weights_after_loading(moe.experts)
    return moe


def expected_sum(weights: fc.MoELayerWeights, io: dict[str, torch.Tensor], topk: Any) -> tuple[float, torch.Tensor]:
    """The largest share of the shared expert, and R + S with SGLang's scales, from the torch backend in float32."""
    for part in (weights.routed, weights.shared):
        # SGLang takes one input scale for the second GEMM of all experts, the largest.
        largest = torch.maximum(weights.routed.down_input_scale.max(), weights.shared.down_input_scale.max())
        part.down_input_scale.fill_(largest)
    plan = fc.plan(weights.problem("topk"), fc.Target.from_release("0.7.2", None), strategy="expanded", backend="torch")
    layer = fc.prepare(weights, plan)
    routing = fc.TopKRouting(topk.topk_ids[:, :-1].long().contiguous(), topk.topk_weights[:, :-1].float().contiguous())
    hidden_states = io["hidden_states"].float()
    whole = fc.fp4_moe(hidden_states, layer, routing)
    nothing = fc.TopKRouting(routing.ids, torch.zeros_like(routing.weights))
    shared = fc.fp4_moe(hidden_states, layer, nothing)
    return float(shared.norm() / whole.norm()), whole


def run(folder: Path, name: str, calls: list[Call]) -> dict[str, Any]:
    quantization = ModelOptFp4Config.from_config(json.loads((folder / "hf_quant_config.json").read_text("utf-8")))
    io = load_file(folder / "moe_io.safetensors")
    arguments = {"moe_runner_backend": name, "quantization": "modelopt_fp4", "model_path": str(folder)}
    with get_context().override_server_args(**arguments), override_platform(is_blackwell=True):
        initialize_moe_config()
        with get_model().override(shared_experts=SharedExpertsConfig(num_fused_shared_experts=1)):
            moe = build(folder, quantization)
            calls.clear()
            with torch.inference_mode():
                topk = moe.topk(io["hidden_states"], io["router_logits"])
                output = moe.experts(io["hidden_states"], topk)
    last = calls[-1]
    weights = fc.load_moe_layer(folder, LAYER)
    target = fc.Target.from_release("0.7.2", "sm100")
    plan = fc.plan(weights.problem("topk"), target, strategy="expanded", backend="trtllm")
    laid_out = prepare_experts(weights, plan.call)
    names = ("gemm1_weights", "gemm1_weights_scale", "gemm2_weights", "gemm2_weights_scale")
    share, whole = expected_sum(weights, io, topk)
    sizes = ("num_experts", "local_num_experts", "top_k", "local_expert_offset", "intermediate_size")
    return {
        "calls": [call.name for call in calls],
        "garbage": [why for call in calls for why in call.garbage],
        "keyword": last.arguments.get("num_fused_shared_experts"),
        "sizes": {one: last.arguments[one] for one in sizes},
        "planned": {one: getattr(plan.call, one) for one in ("num_experts", "local_num_experts", "top_k")},
        "method": last.arguments["routing_method_type"],
        "rows": {one: last.arguments[one].shape[0] for one in names},
        "same_layout": {
            one: bool(torch.equal(last.arguments[one].view(torch.uint8), getattr(laid_out, one).view(torch.uint8)))
            for one in names
        },
        "scaling_is_in_topk": moe.experts.should_fuse_routed_scaling_factor_in_topk,
        "topk_shape": list(topk.topk_ids.shape),
        "shared_ids": topk.topk_ids[:, -1].unique().tolist(),
        "shared_weights": topk.topk_weights[:, -1].unique().tolist(),
        "routed_ids_agree": bool(
            torch.equal(topk.topk_ids[:, :-1].long().sort(1).values, io["topk_ids"].sort(1).values)
        ),
        "sum_of_routed_weights": topk.topk_weights[:, :-1].sum(1).aminmax()[0].item(),
        "shared_part": share,
        "error": float((output.float() - whole).norm() / whole.norm()),
        "error_of_the_recorded": float((output.float() - io["output_w4a4"]).norm() / io["output_w4a4"].norm()),
    }


folder = Path(json.load(sys.stdin))
recorded = replace_compiled_modules(Era(flashinfer.__version__), Path(flashinfer.__file__).parent / "data" / "csrc")
# The stand-in has none of this compiled function.
flashinfer.nvfp4_block_scale_interleave = lambda scale: interleave_block_scale(scale).flatten()
# On an NVIDIA machine SGLang imports it itself.
runner.fp4_quantize = fp4_utils._flashinfer_fp4_quantize_impl
with get_context().override_server_args():
    parallel_state.init_distributed_environment(
        world_size=1, rank=0, local_rank=0, distributed_init_method=os.environ["STORE"], backend="gloo"
    )
    parallel_state.initialize_model_parallel("gloo")
    widths = {"tp_size": 1, "attn_cp_size": 1, "attn_tp_size": 1, "moe_dp_size": 1, "moe_ep_size": 1}
    get_parallel().override_permanently(**derive_spawn_ranks(world_rank=0, ep_join_rank_offset=0, **widths))
    answers = {name: run(folder, name, recorded) for name in ("flashinfer_trtllm", "flashinfer_trtllm_routed")}
print(json.dumps(answers))
