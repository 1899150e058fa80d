"""Weights: from a checkpoint to one MoE layer's values, and the reshaping that fused strategies need."""
