"""Every FlashInfer release through fp4_moe on a CPU: its own Python code, only its compiled kernels stood in for."""
