"""One micro-batch of a step of several: the way back from `accumulated`.

gradient -----------+                           gradient ------> update
gradient@1 --> accumulate@1 --> update
"""

from dataclasses import replace

import numpy as np

from gdp.errors import InputError
from gdp.graph.accumulation import accumulated
from gdp.graph.copies import ACCUMULATE
from gdp.graph.document import Tensor
from gdp.graph.graph import Graph
from gdp.graph.microbatches import SHARED, microbatch_of


def one_microbatch(graph: Graph) -> Graph:
    """Returns the step of one micro-batch of `graph`, a step of several.

    InputError where it has none, or where that step in as many micro-batches is another one.
    """
    microbatch = microbatch_of(graph)
    count = int(microbatch.max()) + 1
    if count < 2 or graph.replicas.any():
        raise InputError(
            f"graph {graph.name!r}: has no micro-batches of one copy of the model; if it is the step of one "
            "micro-batch, say how many there are with --microbatches"
        )
    kept = np.flatnonzero((microbatch == SHARED) | (microbatch == 0))
    number = np.full(graph.num_ops, -1)
    number[kept] = np.arange(len(kept))
    readers = _readers_of_sums(graph, count)
    tensors: list[Tensor] = []
    position: dict[int, int] = {}
    for tensor in np.flatnonzero(number[graph.producers] >= 0).tolist():
        row = graph.tensor(tensor)
        consumers = {int(number[op]) for op in row.consumers if number[op] >= 0}
        consumers.update(int(number[op]) for sums in row.consumers for op in readers.get(sums, ()))
        if row.consumers and not consumers and not row.bytes:  # a wait of the next micro-batch
            continue
        position[tensor] = len(tensors)
        tensors.append(replace(row, producer=int(number[row.producer]), consumers=tuple(sorted(consumers))))
    rows = [replace(row, view_of=position[row.view_of]) if row.view_of >= 0 else row for row in tensors]
    one = Graph.build(graph.name, graph.chosen_ops(kept.tolist()), rows)
    again = accumulated(one, count)
    if (again.num_ops, int(again.flops.sum())) != (graph.num_ops, int(graph.flops.sum())):
        raise InputError(f"graph {graph.name!r}: its {count} micro-batches are not alike; name the model itself")
    return one


def _readers_of_sums(graph: Graph, count: int) -> dict[int, tuple[int, ...]]:
    """Maps each first sum of gradients to the ops that read the last one."""
    sums = np.flatnonzero(graph.is_in_role(ACCUMULATE) & (graph.microbatches == count - 1))
    results = dict(zip(graph.producers.tolist(), range(graph.num_tensors), strict=True))
    return {int(graph.first_copy[op]): tuple(graph.consumers_of(results[op]).tolist()) for op in sums.tolist()}
