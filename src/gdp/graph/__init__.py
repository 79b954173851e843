"""Graphs of ops and tensors: a step to place."""

from gdp.graph.document import Op, Tensor
from gdp.graph.graph import Graph, GraphSource

__all__ = ["Graph", "GraphSource", "Op", "Tensor"]
