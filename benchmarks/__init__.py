"""Scripts that measure; no test depends on their figures."""
