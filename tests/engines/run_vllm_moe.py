"""A sample checkpoint's model in the real vLLM, its shared expert fused, as on an SM100; one MoE layer of it runs.

vLLM's own argument resolution, plugin loader, model registry, model code, loader, weight processing, runner, routing
and call run, and FlashInfer's own Python. Only compiled parts are stood in for. In: the checkpoint's folder, and
whether vLLM is to choose its modular experts. Out: what was built, what reached the kernel, and how far its output is
from the routed and the shared experts' sum.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

from engine_process import Lines
from vllm_process import as_a_server_has_it, engine_config, pretend, stand_in, start_ranks

pretend()

import flashinfer  # noqa: E402
import torch  # noqa: E402
from safetensors.torch import load_file  # noqa: E402
from vllm.config import set_current_vllm_config  # noqa: E402
from vllm.forward_context import set_forward_context  # noqa: E402
from vllm.model_executor.layers.fused_moe.experts.trtllm_nvfp4_moe import TrtLlmNvFp4ExpertsMonolithic  # noqa: E402
from vllm.model_executor.model_loader.default_loader import DefaultModelLoader  # noqa: E402
from vllm.model_executor.model_loader.utils import initialize_model  # noqa: E402
from vllm.plugins import load_general_plugins  # noqa: E402
from vllm.v1.worker.workspace import init_workspace_manager  # noqa: E402
from vllm_reference import sums, with_vllms_scales  # noqa: E402

import flashinfer_compat as fc  # noqa: E402
from flashinfer_compat import machine  # noqa: E402
from flashinfer_compat.backends.trtllm.weights import prepare_experts  # noqa: E402

LAYER = 1
TENSORS = (
    "gemm1_weights",
    "gemm1_weights_scale",
    "gemm2_weights",
    "gemm2_weights_scale",
    "output1_scale_scalar",
    "output1_scale_gate_scalar",
    "output2_scale_scalar",
)
SIZES = (
    "num_experts",
    "local_num_experts",
    "top_k",
    "local_expert_offset",
    "intermediate_size",
    "n_group",
    "topk_group",
)


def run(folder: Path, modular: bool) -> dict[str, Any]:
    lines = Lines()
    config = engine_config(as_a_server_has_it(folder), attention_backend="TRITON_ATTN")
    hash_before = config.compute_hash()
    calls = stand_in(flashinfer)
    if modular:
        TrtLlmNvFp4ExpertsMonolithic._supports_router_logits_dtype = staticmethod(lambda *_: False)
    with set_current_vllm_config(config):
        start_ranks(0, 1, os.environ["STORE"])
        torch.set_default_dtype(torch.bfloat16)
        model = initialize_model(config)
        DefaultModelLoader(config.load_config).load_weights(model, config.model_config)
        torch.set_default_dtype(torch.float32)
        moe = model.model.layers[LAYER].mlp
        experts = moe.experts.routed_experts
        experts.quant_method.process_weights_after_loading(experts)
        hidden_states = load_file(folder / "moe_io.safetensors")["hidden_states"]
        init_workspace_manager(torch.device("cpu"))
        calls.clear()
        with set_forward_context(None, config), torch.inference_mode():
            output = moe(hidden_states)
    last = calls[-1].arguments
    weights = with_vllms_scales(fc.load_moe_layer(folder, LAYER))
    whole, shared = sums(weights, last)
    plan = experts.moe_config.plan
    laid_out = prepare_experts(weights, plan.call)
    return {
        "lines": lines.take(),
        "hash_differs": config.compute_hash() != hash_before,
        "experts": type(experts.quant_method.moe_kernel.fused_experts).__name__,
        "shared_mlp": [name for name, _ in model.named_modules() if "shared_experts" in name],
        "runner_scale": moe.experts.routed_scaling_factor,
        "calls": [call.name for call in calls],
        "garbage": [why for call in calls for why in call.garbage],
        "keyword": last.get("num_fused_shared_experts"),
        "given": sorted(calls[-1].given),
        "sizes": {name: last[name] for name in SIZES},
        "factor": last["routed_scaling_factor"],
        "method": last["routing_method_type"],
        "rows": {name: last[name].shape[0] for name in TENSORS},
        "same_layout": {
            name: bool(torch.equal(last[name].view(torch.uint8), getattr(laid_out, name).view(torch.uint8)))
            for name in TENSORS[:4]
        },
        "scalars": {
            name: float((last[name] - getattr(laid_out, name)).abs().max() / getattr(laid_out, name).abs().max())
            for name in TENSORS[4:]
        },
        "logits_shape": None if last.get("routing_logits") is None else list(last["routing_logits"].shape),
        "shared_slots": _shared_slots(last) if "topk_ids" in last else None,
        "shared_part": float(shared.norm() / whole.norm()),
        "error": float((output.float() - whole).norm() / whole.norm()),
    }


def _shared_slots(arguments: dict[str, Any]) -> dict[str, Any]:
    ids, weights = arguments["topk_ids"]
    return {
        "ids": ids[:, -1].unique().tolist(),
        "weights": weights[:, -1].unique().tolist(),
        "routed_sum": weights[:, :-1].sum(1).aminmax()[0].item(),
    }


question = json.load(sys.stdin)
load_general_plugins()
on_an_sm100 = fc.Target.from_release("0.7.2.post1", "sm100")
machine.this_machine = lambda: on_an_sm100
print(json.dumps(run(Path(question["folder"]), question["modular"])))
