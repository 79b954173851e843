"""Graphs of ops and tensors: a step to place."""

from gdp.graph.graph import Graph, Op, Tensor

__all__ = ["Graph", "Op", "Tensor"]
