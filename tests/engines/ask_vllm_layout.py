"""Build models in the real vLLM as one rank of two, with the plugin, as on an SM100.

In: `{"rank", "store", "folder", "cases": [{"release", "arguments"}, ...]}`. Out: for each case the lines logged, the
experts of the MoE layer, whether a shared MLP was built, and whether the rank's rows are this package's; or the error.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from engine_process import Lines
from vllm_process import as_a_server_has_it, engine_config, pretend, stand_in, start_ranks

pretend()

import flashinfer  # noqa: E402
import torch  # noqa: E402
from safetensors.torch import load_file  # noqa: E402
from standin.calls import Call  # noqa: E402
from vllm.config import set_current_vllm_config  # noqa: E402
from vllm.forward_context import set_forward_context  # noqa: E402
from vllm.model_executor.layers.fused_moe import layer as fused_moe_layer  # noqa: E402
from vllm.model_executor.model_loader.default_loader import DefaultModelLoader  # noqa: E402
from vllm.model_executor.model_loader.utils import initialize_model  # noqa: E402
from vllm.model_executor.models import deepseek_v2  # noqa: E402
from vllm.plugins import load_general_plugins  # noqa: E402
from vllm_reference import sums, with_vllms_scales  # noqa: E402

import flashinfer_compat as fc  # noqa: E402
from flashinfer_compat import machine  # noqa: E402
from flashinfer_compat.backends.trtllm.weights import prepare_experts  # noqa: E402

LAYER = 1


def config_of(folder: Path, arguments: dict[str, Any]) -> Any:
    return engine_config(
        folder,
        attention_backend="TRITON_ATTN",
        tensor_parallel_size=2,
        distributed_executor_backend="external_launcher",
        # It asks the compiled library at once.
        compilation_config={"pass_config": {"fuse_allreduce_rms": False}},
        **arguments,
    )


def build(folder: Path, rank: int, case: dict[str, Any], lines: Lines) -> dict[str, Any]:
    target = fc.Target.from_release(case["release"], "sm100")
    machine.this_machine = lambda: target
    config = config_of(folder, case["arguments"])
    lines.take()
    with set_current_vllm_config(config):
        torch.set_default_dtype(torch.bfloat16)
        try:
            model = initialize_model(config)
        except Exception as error:
            return {"error": f"{type(error).__name__}: {error}", "lines": lines.take()}
        finally:
            torch.set_default_dtype(torch.float32)
        moe = model.model.layers[LAYER].mlp
        experts = moe.experts.routed_experts
        found = {
            "lines": lines.take(),
            "experts": experts.quant_method.experts_cls.__name__,
            "shared_mlp": moe.shared_experts is not None,
            "restored": deepseek_v2.FusedMoEFactory is fused_moe_layer.FusedMoEFactory,
        }
        if moe.shared_experts is None:
            DefaultModelLoader(config.load_config).load_weights(model, config.model_config)
            experts.quant_method.process_weights_after_loading(experts)
            weights = fc.load_moe_layer(folder, LAYER, tp_rank=rank, tp_size=2)
            mine = prepare_experts(weights, experts.moe_config.plan.call)
            rows = {"w13_weight": mine.gemm1_weights, "w2_weight": mine.gemm2_weights}
            scales = {"w13_weight_scale": mine.gemm1_weights_scale, "w2_weight_scale": mine.gemm2_weights_scale}
            found["error"] = output_error(config, moe, experts, calls)
            found["same_rows"] = {
                name: bool(torch.equal(getattr(experts, name).data.view(torch.uint8), one.view(torch.uint8)))
                for name, one in {**rows, **scales}.items()
            }
        return found


def output_error(config: Any, moe: Any, experts: Any, calls: list[Call]) -> float:
    """How far the ranks' summed output is from R + S of the whole layer."""
    hidden_states = load_file(Path(question["folder"]) / "moe_io.safetensors")["hidden_states"]
    with set_forward_context(None, config), torch.inference_mode():
        output = moe(hidden_states)
    whole, _ = sums(with_vllms_scales(fc.load_moe_layer(folder, LAYER)), calls[-1].arguments)
    return float((output.float() - whole).norm() / whole.norm())


question = json.load(sys.stdin)
folder = as_a_server_has_it(Path(question["folder"]))
load_general_plugins()
calls = stand_in(flashinfer)
on_an_sm100 = fc.Target.from_release("0.7.2.post1", "sm100")
machine.this_machine = lambda: on_an_sm100
lines = Lines()
with set_current_vllm_config(config_of(folder, {})):
    start_ranks(question["rank"], 2, question["store"])
print(json.dumps([build(folder, question["rank"], one, lines) for one in question["cases"]]), flush=True)
