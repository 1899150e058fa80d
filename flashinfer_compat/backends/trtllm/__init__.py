"""FlashInfer's trtllm-gen FP4 MoE kernels, and the dense FP4 GEMM for the shared expert beside them."""
