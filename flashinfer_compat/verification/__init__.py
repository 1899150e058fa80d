"""Numeric self-checks: every strategy that could run here, on small fixed layers, against a computation of its own."""
