"""Every FP4 MoE call that vLLM 0.33, SGLang 0.5.23 and TensorRT-LLM make can be said through fp4_moe.

The lists are the arguments that the engines pass (their sources are named in docs/engine-calls.md).
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")

import standin  # noqa: E402
from safetensors.torch import load_file  # noqa: E402

import flashinfer_compat as fc  # noqa: E402
from flashinfer_compat.backends.trtllm.weights import prepare_experts  # noqa: E402
from flashinfer_compat.numerics import per_token_scale, quantize_nvfp4  # noqa: E402

_WEIGHTS = (
    "gemm1_weights gemm1_weights_scale gemm1_bias gemm1_alpha gemm1_beta gemm1_clamp_limit gemm2_weights "
    "gemm2_weights_scale gemm2_bias output1_scale_scalar output1_scale_gate_scalar output2_scale_scalar"
)
_SIZES = (
    "num_experts top_k n_group topk_group intermediate_size local_expert_offset local_num_experts "
    "routed_scaling_factor routing_method_type do_finalize"
)
_LOGITS, _TOPK = "routing_logits routing_bias", "topk_ids routing_bias"
_INPUT = "hidden_states hidden_states_scale"

CALLS = {
    # Routing from logits, a scale for each token, replay.
    "vLLM, monolithic": (
        "logits",
        {"activation_scaling": "per_token"},
        ("tune_max_num_tokens", "routing_replay_out"),
        f"{_LOGITS} {_INPUT} {_WEIGHTS} {_SIZES} per_token_scale tune_max_num_tokens routing_replay_out",
    ),
    "vLLM, modular": (
        "topk",
        {"activation_scaling": "per_token"},
        ("tune_max_num_tokens", "output"),
        f"{_TOPK} {_INPUT} {_WEIGHTS} {_SIZES} per_token_scale tune_max_num_tokens output",
    ),
    "SGLang, top-k": (
        "topk",
        {},
        ("tune_max_num_tokens", "enable_pdl", "output"),
        f"{_TOPK} {_INPUT} {_WEIGHTS} {_SIZES} tune_max_num_tokens enable_pdl output",
    ),
    "SGLang, logits": (
        "logits",
        {},
        ("tune_max_num_tokens", "enable_pdl", "output"),
        f"{_LOGITS} {_INPUT} {_WEIGHTS} {_SIZES} tune_max_num_tokens enable_pdl output",
    ),
    "TensorRT-LLM": (
        "topk",
        {},
        ("tune_max_num_tokens", "enable_pdl", "output"),
        f"{_TOPK} {_INPUT} {_WEIGHTS} {_SIZES} enable_pdl output tune_max_num_tokens",
    ),
}


@pytest.mark.parametrize("name", CALLS)
@pytest.mark.parametrize("release", ["0.6.18", "0.7.2", "0.7.4"])
def test_the_engines_arguments_reach_the_kernel(checkpoints: Path, name: str, release: str) -> None:
    kind, fields, wanted, arguments = CALLS[name]
    folder = checkpoints / "grouped"
    io, weights = load_file(folder / "moe_io.safetensors"), fc.load_moe_layer(folder, 1)
    # The engine has its own weights, adds its own shared expert, and has rounded its own activations.
    problem = replace(weights.problem(kind, **fields), num_shared_experts=0, shared_format="none")
    plan = fc.plan(problem, fc.Target.from_release(release, "sm100"))
    assert plan.call is not None
    x = io["hidden_states"]
    with standin.installed(release) as flashinfer:
        layer = fc.prepare(prepare_experts(weights, plan.call), plan)
        own = per_token_scale(x.float()) if fields else None
        rounded = quantize_nvfp4(x, layer.input_scale if own is None else own)
        routing: fc.TopKRouting | fc.LogitsRouting = fc.TopKRouting(io["topk_ids"], io["topk_weights"])
        if kind == "logits":
            routing = fc.LogitsRouting(io["router_logits"], io["e_score_correction_bias"])
        options = {
            "output": torch.empty_like(x),
            "enable_pdl": True,
            "tune_max_num_tokens": 8192,
            "routing_replay_out": torch.empty_like(io["topk_ids"], dtype=torch.int16),
        }
        fc.fp4_moe(
            fc.QuantizedInput(rounded.codes, rounded.block_scale, own),
            layer,
            routing,
            fc.CallOptions(**{one: options[one] for one in wanted}),
        )
    (call,) = flashinfer.calls
    assert not call.garbage
    assert set(arguments.split()) <= call.given
    # Beyond the engine's own list stand only the layout of the scales, which avoids a warning, and 4over6 switched off.
    assert call.given - set(arguments.split()) <= {"hidden_states_scale_layout", "nvfp4_4over6"}
    assert all(call.arguments[one] is options[one] for one in wanted)
