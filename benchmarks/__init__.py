"""Benchmarks: one file a published table. Each has a `run` that returns the figures and the Markdown made of them."""
