"""Graphs of ops and tensors: a step to place."""

from gdp.graph.graph import Graph, Op, Tensor
from gdp.graph.views import GraphSource

__all__ = ["Graph", "GraphSource", "Op", "Tensor"]
