"""Engines: the switches that let SGLang and vLLM use fused shared experts, and what their ranks must agree on."""
