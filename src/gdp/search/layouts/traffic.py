r"""Traffic: how long the replicas of an arrangement, all together, keep the links that they share.

A replica that is simulated alone has every link to itself. Two pipelines over the network of a host share it:

    host 0   gpu0 --\          /-- gpu2   host 1
             gpu1 ---- network ---- gpu3
"""

import numpy as np

from gdp.arrays import I64
from gdp.cluster import Cluster
from gdp.graph import Graph
from gdp.search.candidate import Arrangement


def busiest_channel_ns(cluster: Cluster, arrangement: Arrangement, graph: Graph, places: I64) -> int:
    """Returns the time for which the passes of all micro-batches keep the busiest channel, in ns.

    `graph` is the step of one micro-batch, and `places` [N] are those of its ops in a replica.
    """
    num_places = arrangement.num_places
    if num_places == 1:
        return 0
    num_moves, num_bytes = _moved(graph, places, num_places)
    busy_ns = np.zeros(len(cluster.channels))
    for devices, count in zip(arrangement.devices, arrangement.layout.microbatches, strict=True):
        for start, end in np.argwhere(num_moves).tolist():
            source, target = devices[start], devices[end]
            move_ns = num_bytes[start, end] * 1e9 / cluster.bytes_per_second[source, target]
            move_ns += num_moves[start, end] * cluster.latency_ns[source, target]
            busy_ns[list(cluster.route_channels[source][target])] += count * move_ns
    return int(busy_ns.max(initial=0))


def _moved(graph: Graph, places: I64, num_places: int) -> tuple[I64, I64]:
    """Returns the number of tensors [P, P] that go from place to place, and their bytes; resident ones stay."""
    is_moved = ~graph.is_resident[graph.edge_tensors]
    tensors, targets = graph.edge_tensors[is_moved], places[graph.consumers[is_moved]]
    tensors, targets = np.divmod(np.unique(tensors * num_places + targets), num_places)  # once to each place
    pair = places[graph.producers[tensors]] * num_places + targets
    is_apart = places[graph.producers[tensors]] != targets
    size = num_places * num_places
    counts = np.bincount(pair[is_apart], minlength=size)
    sums = np.bincount(pair[is_apart], graph.tensor_bytes[tensors[is_apart]], size)
    shape = num_places, num_places
    return counts.reshape(shape), sums.astype(np.int64).reshape(shape)
