"""A sample layer brought into the kernels' layout with FlashInfer's own steps, and the arguments of a launch."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from standin import StandIn

import flashinfer_compat as fc
from flashinfer_compat.numerics import pack_topk, route
from flashinfer_compat.vocabulary import RoutingMethod
from flashinfer_compat.weights.shared import append_shared, common_input_scale, split_shared

Tensors = dict[str, torch.Tensor]
LOGITS, ROUTED = "trtllm_fp4_block_scale_moe", "trtllm_fp4_block_scale_routed_moe"


class Layer:
    """The grouped sample: H=256, I=128, 16 experts, top-4 of 2 of 4 groups, one shared expert."""

    def __init__(self, folder: Path) -> None:
        self._prepared: dict[bool, Tensors] = {}
        self._references: dict[tuple[object, ...], torch.Tensor] = {}
        self.weights = fc.load_moe_layer(folder, 1)
        self.io = load_file(folder / "moe_io.safetensors")
        self.x: torch.Tensor = self.io["hidden_states"]
        self.config = self.weights.config

    def reference(self, routing: Any, strategy: str, shared: bool) -> torch.Tensor:
        """What the torch backend computes in float32."""
        key = (routing.ids.numpy().tobytes(), strategy, shared)
        if key not in self._references:
            self._references[key] = self._reference(routing, strategy, shared)
        return self._references[key]

    def _reference(self, routing: Any, strategy: str, shared: bool) -> torch.Tensor:
        weights = self.weights
        if not shared:
            weights = replace(weights, shared=None, config=replace(self.config, num_shared_experts=0))
        problem = weights.problem(routing.routing_input)
        plan = fc.plan(problem, strategy=strategy, backend="torch")
        return fc.fp4_moe(self.x.float(), fc.prepare(weights, plan), routing)

    def topk(self, topk_group: int = 2, n_group: int = 4, bf16_bias: bool = False) -> fc.TopKRouting:
        bias = self.io["e_score_correction_bias"]
        chosen = route(
            self.io["router_logits"],
            bias.bfloat16() if bf16_bias else bias,
            method=RoutingMethod.DEEPSEEK_V3,
            top_k=self.config.top_k,
            n_group=n_group,
            topk_group=topk_group,
            routed_scaling_factor=self.config.routed_scaling_factor,
        )
        return fc.TopKRouting(chosen.ids.int(), chosen.weights)

    def prepared(self, standin: StandIn, shared: bool) -> Tensors:
        """`prepare`, once: the steps give the same bytes in every release."""
        if shared not in self._prepared:
            self._prepared[shared] = self.prepare(standin, shared)
        return dict(self._prepared[shared])

    def prepare(self, standin: StandIn, shared: bool) -> Tensors:
        """Weights, scales and scalars, expert by expert, by the steps FlashInfer's tests and documentation give."""
        experts = self.weights.routed
        if shared:
            split = split_shared(self.weights)
            assert isinstance(split, type(experts))
            experts = append_shared(experts, split)
        experts = common_input_scale(experts)
        reorder, shuffle = standin.objects["reorder_rows_for_gated_act_gemm"], standin.objects["shuffle_matrix_a"]
        shuffle_scale = standin.objects["shuffle_matrix_sf_a"]
        made: dict[str, list[torch.Tensor]] = {
            name: [] for name in ("gemm1_weights", "gemm1_weights_scale", "gemm2_weights", "gemm2_weights_scale")
        }
        for index in range(experts.num_experts):
            gate, up = experts.gate_up_weight[index]
            gate_scale, up_scale = experts.gate_up_block_scale[index].view(torch.uint8)
            made["gemm1_weights"].append(shuffle(reorder(torch.cat((up, gate))), 128))
            stacked = torch.cat((up_scale, gate_scale))
            scale = shuffle_scale(reorder(stacked), 128)
            made["gemm1_weights_scale"].append(scale.reshape(stacked.shape))
            made["gemm2_weights"].append(shuffle(experts.down_weight[index], 128))
            down_scale = experts.down_block_scale[index].view(torch.uint8)
            made["gemm2_weights_scale"].append(shuffle_scale(down_scale, 128).reshape(down_scale.shape))
        arguments = {name: torch.stack(parts) for name, parts in made.items()}
        for name in ("gemm1_weights_scale", "gemm2_weights_scale"):
            arguments[name] = arguments[name].view(torch.float8_e4m3fn)
        gate_scale, up_scale = (experts.gate_up_input_scale * experts.gate_up_global_scale).unbind(1)
        arguments["output1_scale_scalar"] = up_scale / experts.down_input_scale
        arguments["output1_scale_gate_scalar"] = gate_scale.contiguous()
        arguments["output2_scale_scalar"] = experts.down_input_scale * experts.down_global_scale
        codes, scale = standin.objects["fp4_quantize"](
            self.x, 1.0 / experts.gate_up_input_scale[0, 0], is_sf_swizzled_layout=False
        )
        arguments["hidden_states"] = codes
        arguments["hidden_states_scale"] = scale.view(torch.float8_e4m3fn)
        return arguments

    def arguments(self, standin: StandIn, entry: str, shared: bool = False, **changes: Any) -> dict[str, Any]:
        """A good launch on this release, but for `changes`; a change may be a function of the good argument."""
        era, config = standin.era, self.config
        topk = self.topk()
        known: dict[str, Any] = {
            "routing_logits": self.io["router_logits"],
            "routing_bias": self.io["e_score_correction_bias"],
            "topk_ids": pack_topk(topk.ids, topk.weights),
            "gemm1_bias": None,
            "gemm1_alpha": None,
            "gemm1_beta": None,
            "gemm1_clamp_limit": None,
            "gemm2_bias": None,
            "num_experts": config.num_experts,
            "top_k": config.top_k,
            "n_group": config.n_group,
            "topk_group": config.topk_group,
            "intermediate_size": config.intermediate_size,
            "local_expert_offset": 0,
            "local_num_experts": config.num_experts,
            "routed_scaling_factor": config.routed_scaling_factor,
            "routing_method_type": 2,
            "do_finalize": True,
            "tile_tokens_dim": 8,
            "hidden_states_scale_layout": standin.objects["SfLayout"].layout_linear,
            **self.prepared(standin, shared),
        }
        if entry == ROUTED:
            known.update(routing_bias=None, n_group=None, topk_group=None, routing_method_type=1)
        elif era.before("0.5.0") or (era.since("0.6.7") and era.before("0.6.8")):
            known["routing_bias"] = known["routing_bias"].bfloat16()
        if era.before("0.2.13"):
            known["hidden_states_scale"] = known["hidden_states_scale"].flatten()
        if shared:
            known["num_fused_shared_experts"] = config.num_shared_experts
        symbol = standin.symbols[entry]
        known = {name: value for name, value in known.items() if name in symbol.parameter_names}
        for name, change in changes.items():
            known[name] = change(known.get(name)) if callable(change) else change
        return known
