"""Our own Triton kernels over checkpoint-layout weights, for GPUs without FP4 units."""
