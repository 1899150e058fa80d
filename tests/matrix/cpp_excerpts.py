"""Bindings as they stand in FlashInfer's sources, with empty bodies."""

from __future__ import annotations

# csrc/fp4_gemm_cutlass.cu of 0.2.13.
GEMM_0_2_13 = """
at::Tensor fp4_bmm_impl(at::Tensor const& mat1, at::Tensor const& mat2, at::Tensor const& mat1Scale,
                        at::Tensor const& mat2Scale, at::Tensor const& globalScale, at::Tensor out,
                        at::Tensor workspace_buffer, int64_t tactic) {
  return out;
}

at::Tensor fp4_gemm(at::Tensor const& mat1, at::Tensor const& mat2, at::Tensor const& mat1Scale,
                    at::Tensor const& mat2Scale, at::Tensor const& globalScale, at::Tensor out,
                    at::Tensor workspace_buffer, int64_t tactic) {
  return fp4_bmm_impl(mat1, mat2, mat1Scale, mat2Scale, globalScale, out, workspace_buffer, tactic);
}

int64_t fp4_gemm_tactic_num() {
  return totalTactics;
}

}  // namespace torch_ext

TORCH_LIBRARY_FRAGMENT(TORCH_EXTENSION_NAME, m) {
  m.def("fp4_gemm", &torch_ext::fp4_gemm);
  m.def("fp4_gemm_tactic_num", &torch_ext::fp4_gemm_tactic_num);
}
"""

# csrc/nv_internal/tensorrt_llm/thop/fp4Quantize.cpp of 0.2.13.
QUANTIZER_0_2_13 = """
std::tuple<at::Tensor, at::Tensor> fp4_quantize(at::Tensor const& self,
                                                std::optional<at::Tensor> const& globalScale,
                                                int64_t sfVecSize, bool sfUseUE8M0,
                                                bool isSfSwizzledLayout, bool isSf8x4Layout,
                                                bool enable_pdl) {
}

TORCH_LIBRARY_FRAGMENT(TORCH_EXTENSION_NAME, m) {
  m.def("fp4_quantize", &torch_ext::fp4_quantize);
}
"""

# csrc/nv_internal/tensorrt_llm/thop/fp4Quantize.cpp of 0.7.4.
QUANTIZER_0_7_4 = """
// self: [M, K], fp16/bf16/fp8_quantized
// globalScale: [1] float, = (448 * 6) / self.abs().max(). Not used when sfUseUE8M0 is true.
// returns self_fp4, self_block_scale_factors
void fp4_quantize(TensorView self, Optional<TensorView> const& globalScale, TensorView valueE2M1,
                  TensorView scaleFP8SF, int64_t sfVecSize, bool sfUseUE8M0,
                  bool isSfSwizzledLayout, bool isSf8x4Layout, bool isGlobalScaleInversed,
                  bool enable_pdl, int64_t nvfp44Over6Code) {
}

TVM_FFI_DLL_EXPORT_TYPED_FUNC(fp4_quantize, fp4_quantize);
"""

# csrc/trtllm_fused_moe_kernel_launcher.cu of 0.6.17.
LAUNCHER_0_6_17 = """
Array<Tensor> trtllm_fp4_block_scale_moe(
    int64_t routing_input_mode, Optional<TensorView> routing_logits, TensorView topk_ids,
    TensorView topk_weights, Optional<TensorView> routing_bias, TensorView hidden_states,
    Optional<TensorView> hidden_states_scale, TensorView gemm1_weights,
    TensorView gemm1_weights_scale, Optional<TensorView> gemm1_bias,
    Optional<TensorView> gemm1_alpha, Optional<TensorView> gemm1_beta,
    Optional<TensorView> gemm1_clamp_limit, TensorView gemm2_weights,
    TensorView gemm2_weights_scale, Optional<TensorView> gemm2_bias,
    Optional<TensorView> output1_scales_scalar, Optional<TensorView> output1_scales_gate_scalar,
    Optional<TensorView> output2_scales_scalar, Optional<TensorView> per_token_scales,
    int64_t num_experts, int64_t top_k, Optional<int64_t> num_fused_shared_experts,
    Optional<int64_t> n_group, Optional<int64_t> topk_group, int64_t intermediate_size,
    int64_t local_expert_offset, int64_t local_num_experts, Optional<double> routed_scaling_factor,
    int64_t routing_method_type, bool do_finalize, bool enable_pdl, int64_t act_type,
    TensorView output, Array<int64_t> config_index, bool norm_topk_prob,
    Optional<TensorView> routing_replay_out) {
  // Determine data types based on input format
  int const num_tokens = hidden_states.size(0);
}

TVM_FFI_DLL_EXPORT_TYPED_FUNC(trtllm_fp4_block_scale_moe, trtllm_fp4_block_scale_moe);
"""
