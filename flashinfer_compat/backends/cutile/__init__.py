"""The cutile backend: NVFP4 weights and bf16 activations on FlashInfer's cuTile kernels."""
