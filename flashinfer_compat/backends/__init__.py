"""The code that computes a layer: one module a backend. To add one, add a row to `registry`."""
