"""What stands in the way of NVFP4 MoE on this machine: small checks over facts, each with a finding and a repair."""
