"""Replicas: a step on several parts of the batch, with a copy of all parameters each and sums of gradients between.

    forward, backward    -- gradients --.                   .--> updates
    forward#1, backward#1 -- gradients -+--> rings of buckets +--> updates#1

The replica d of op `x` is called `x#d`, the first one `x`. N ops of a replica, R replicas.
"""

from collections.abc import Sequence

import numpy as np

from gdp.arrays import I64
from gdp.errors import InputError
from gdp.graph import Graph
from gdp.graph.microbatches import shared_ops
from gdp.parallel.buckets import BUCKET_BYTES, buckets_of, gradients_of
from gdp.parallel.columns import Columns
from gdp.parallel.rings import add_ring, suffix


def replicated(
    replicas: Sequence[Graph],
    *,
    places: Sequence[I64] | None = None,
    ring: Sequence[int] | None = None,
    bucket_bytes: int = BUCKET_BYTES,
) -> Graph:
    """Returns the step of all `replicas`: graphs of one model whose numbers of micro-batches may differ.

    `places` [R][N] are equal for ops of a replica that are sure to share a device, by default for all of them: a bucket
    does not cross them, and the parameters of a bucket are one group. `ring` [R] is the order of replicas in rings.
    InputError where the graphs have no gradients, or not the same ones.
    """
    if len(replicas) == 1:
        return replicas[0]
    count = len(replicas)
    places = [np.zeros(graph.num_ops, np.int64) for graph in replicas] if places is None else places
    ring = range(count) if ring is None else ring
    is_update = [shared_ops(graph)[1] for graph in replicas]
    gradients = [gradients_of(graph, late) for graph, late in zip(replicas, is_update, strict=True)]
    if not gradients[0]:
        raise InputError(f"graph {replicas[0].name!r}: has no gradients to sum over replicas; capture a training step")
    for graph, others in zip(replicas, gradients, strict=True):
        if {name: item.num_bytes for name, item in others.items()} != {n: g.num_bytes for n, g in gradients[0].items()}:
            raise InputError(f"graph {graph.name!r}: its gradients are not those of {replicas[0].name!r}")
    buckets = buckets_of(gradients[0], places[0].tolist(), bucket_bytes)

    groups, next_group = [], 0
    for graph, own in zip(replicas, gradients, strict=True):
        joined = _joined_groups(
            graph, [[op for name in bucket.names for op in own[name].updates] for bucket in buckets]
        )
        groups.append(np.where(joined >= 0, joined + next_group, -1))
        next_group = int(groups[-1].max()) + 1

    columns = Columns()
    numbers = [np.empty(graph.num_ops, np.int64) for graph in replicas]

    def copy(replica: int, ops: I64) -> None:
        graph = replicas[replica]
        names = [graph.op_names[op] + suffix(replica) for op in ops.tolist()]
        numbers[replica][ops] = columns.copy_ops(graph, ops, names, groups[replica][ops])

    for replica in range(count):
        copy(replica, np.flatnonzero(~is_update[replica]))
    ends: list[tuple[I64, I64]] = []
    for index, bucket in enumerate(buckets):
        owners = [gradients[replica][bucket.names[0]].updates[0] for replica in range(count)]
        of_bucket = [int(groups[replica][owner]) for replica, owner in enumerate(owners)]
        ends.append(add_ring(columns, bucket, f"all_reduce.{index}", of_bucket, ring))
    for replica in range(count):
        copy(replica, np.flatnonzero(is_update[replica]))
    for replica, graph in enumerate(replicas):
        columns.copy_tensors(graph, numbers[replica])
        own = gradients[replica]
        for bucket, (ready, done) in zip(buckets, ends, strict=True):
            made = numbers[replica][np.unique([own[name].producer for name in bucket.names])]
            columns.control(made, np.full(len(made), ready[replica]))
            waiting = numbers[replica][np.unique([op for name in bucket.names for op in own[name].updates])]
            columns.control(np.full(len(waiting), done[replica]), waiting)
    return columns.build(replicas[0].name)


def _joined_groups(graph: Graph, together: Sequence[Sequence[int]]) -> I64:
    """Returns the groups [N] of `graph`, where the groups of each list of ops are one, and each list has one."""
    groups = graph.groups.copy()
    for ops in together:
        own = np.unique(groups[ops])
        number = int(groups.max()) + 1
        groups[ops] = number
        groups[np.isin(groups, own[own >= 0])] = number
    return groups
