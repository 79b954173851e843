"""START HERE: from the graph of one micro-batch and a layout to the graph of the step.

one micro-batch --recompute--> --repeat (micro-batches)--> --copy, join by rings (replicas, ZeRO)--> step
"""

from collections.abc import Sequence

from gdp.arrays import I64
from gdp.graph import Graph
from gdp.graph.microbatches import accumulated
from gdp.parallel.buckets import BUCKET_BYTES
from gdp.parallel.layout import Layout
from gdp.parallel.replicas import replicated


def step_of(
    graph: Graph,
    layout: Layout,
    *,
    places: I64 | None = None,
    ring: Sequence[int] | None = None,
    bucket_bytes: int = BUCKET_BYTES,
) -> Graph:
    """Returns the step of `layout`, from the step `graph` of one micro-batch [N ops].

    `places` [N] are equal for ops of a replica that are sure to share a device, by default for all; `ring` is the order
    of replicas in rings. InputError where the layout does not suit the graph.
    """
    steps = {count: accumulated(graph, count) for count in set(layout.microbatches)}
    return replicated([steps[count] for count in layout.microbatches], ring=ring, bucket_bytes=bucket_bytes)
