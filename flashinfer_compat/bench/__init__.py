"""Times every strategy and backend on the GPU at hand, checks each first, and derives a policy for planning."""
