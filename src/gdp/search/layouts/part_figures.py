"""Figures of the step of one micro-batch for estimates: sums over its ops, and gradients that replicas share."""

from dataclasses import dataclass, replace

import numpy as np

from gdp.arrays import I64
from gdp.cluster import Cluster
from gdp.graph import Graph
from gdp.graph.microbatches import shared_ops
from gdp.parallel.buckets import gradients_of
from gdp.simulator.costs import op_time_classes


@dataclass(frozen=True, eq=False)
class PartFigures:
    """Sums over the ops of one micro-batch [N] on each device [D], in ns, and over its parameters, in bytes."""

    once_ns: I64  # [D] updates
    backward_ns: I64  # [D]
    each_ns: I64  # [D] what is done for every micro-batch, the backward pass too
    gradient_bytes: int
    state_bytes: int  # of the optimizer
    parameter_bytes: int
    resident_bytes: int  # of these two, and of buffers

    @classmethod
    def of(cls, graph: Graph, cluster: Cluster) -> "PartFigures":
        """Returns the sums of the step `graph`."""
        times_ns, device_class = op_time_classes(graph, cluster)
        is_source, is_update = shared_ops(graph)
        is_backward = graph.is_in_phase("backward") & ~is_update
        times = np.maximum(times_ns, 0)
        gradients = gradients_of(graph, is_update)
        has_update = np.isin(graph.groups, graph.groups[is_update & (graph.groups >= 0)])
        own = is_source & has_update
        is_own = graph.is_resident & own[graph.producers] & (graph.view_of < 0)
        parameter_bytes = int(graph.tensor_bytes[is_own].sum())
        return cls(
            once_ns=times[is_update].sum(axis=0)[device_class],
            backward_ns=times[is_backward].sum(axis=0)[device_class],
            each_ns=times[~is_update & ~is_source].sum(axis=0)[device_class],
            gradient_bytes=sum(gradient.num_bytes for gradient in gradients.values()),
            state_bytes=max(int(graph.resident_bytes[own].sum()) - parameter_bytes, 0),
            parameter_bytes=parameter_bytes,
            resident_bytes=int(graph.resident_bytes.sum()),
        )


def with_gradients_cut(graph: Graph, count: int) -> Graph:
    """Returns the step with gradients of a `count`-th of their bytes: one replica's chunks, when the rest is sent."""
    if count == 1:
        return graph
    gradients = [gradient.tensor for gradient in gradients_of(graph, shared_ops(graph)[1]).values()]
    sizes = graph.tensor_bytes.copy()
    sizes[gradients] = -(-sizes[gradients] // count)
    return replace(graph, tensor_bytes=sizes)
