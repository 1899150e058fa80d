"""(problem, target) -> decision, with every rejected alternative. Pure: no torch, no effects."""
