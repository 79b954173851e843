"""Replicas: a step on several parts of the batch, with a copy of all parameters each and exchanges between.

    forward, backward    -- gradients --.                   .--> updates
    forward#1, backward#1 -- gradients -+--> rings of buckets +--> updates#1

The replica d of op `x` is called `x#d`, the first one `x`. N ops of a replica, R replicas."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from gdp.arrays import I64
from gdp.errors import InputError
from gdp.graph import Graph
from gdp.graph.builder import GraphBuilder
from gdp.graph.copies import exchange_ends, label_end
from gdp.graph.microbatches import shared_ops
from gdp.parallel.replica_step import ReplicaStep
from gdp.parallel.rings import (
    FIRST_BUCKET_BYTES,
    Collective,
    Exchange,
    Rings,
    bucket_bytes_over,
    buckets_of,
    gradients_of,
)


def replicated(
    replicas: Sequence[Graph],
    *,
    zero: int = 0,
    places: I64 | None = None,
    rings: Rings | None = None,
    bucket_bytes: int | None = None,
) -> Graph:
    """Returns the step of all `replicas`: graphs of one model whose numbers of micro-batches may differ. With `zero` 1
    or 2 optimizer state and updates are cut over replicas. `places` [N] of the first replica are equal for ops that are
    sure to share a device, by default for all of them: a bucket does not cross them, and the parameters of a bucket are
    one group. InputError where the graphs have no gradients, or not the same ones."""
    if len(replicas) == 1:
        return replicas[0]
    first = replicas[0]
    gradients = gradients_of(first, shared_ops(first)[1])
    if not gradients:
        raise InputError(f"graph {first.name!r}: has no gradients to sum over replicas; capture a training step")
    of_first = [0] * first.num_ops if places is None else places.tolist()
    rings = rings or Rings.of(len(replicas))
    if bucket_bytes is None:
        num_bytes = sum(gradient.num_bytes for gradient in gradients.values())
        bucket_bytes = bucket_bytes_over(len(replicas), num_bytes, rings.num_hops)
    first_bytes = min(FIRST_BUCKET_BYTES, bucket_bytes) if rings.times is not None and not zero else None
    buckets = buckets_of(gradients, of_first, bucket_bytes, first_bytes)
    distinct = {id(graph): graph for graph in replicas}
    steps = {key: ReplicaStep.of(graph, buckets, len(replicas), zero) for key, graph in distinct.items()}
    return joined([steps[id(graph)].graph for graph in replicas], steps[id(first)].collectives, rings)


def joined(
    replicas: Sequence[Graph], collectives: Sequence[Collective], rings: Rings, releases: I64 | None = None
) -> Graph:
    """Returns the step of `replicas`, each with the first and last ops of `collectives`, and what is between. All
    replicas have the same exchanges in the same order, and `collectives` are in that of their first ops. `releases` [2,
    X] are ops of a replica, of which each second one waits for the first."""
    builder, numbers = GraphBuilder(), []
    next_group = 0
    groups, positions = [], []
    distinct = {id(graph): graph for graph in replicas}
    exchanges = {key: _ReplicaExchanges.of(graph) for key, graph in distinct.items()}
    of_first = exchanges[id(replicas[0])]
    known: dict[str, int] = {}  # the first copy that has a name
    first_copies: dict[int, I64] = {}  # of the ops of each graph
    for replica, graph in enumerate(replicas):
        own_groups = np.where(graph.groups >= 0, graph.groups + next_group, -1)
        next_group = int(own_groups.max()) + 1
        everything = np.arange(graph.num_ops)
        end = label_end(0, replica)
        names = graph.op_names if not replica else [name + end for name in graph.op_names]
        of_replica = {"op_names": names, "groups": own_groups, "replicas": np.full(graph.num_ops, replica)}
        number = builder.copy_ops(graph, everything, **of_replica)
        if id(graph) not in first_copies:
            own = np.flatnonzero(graph.first_copy == everything)
            first = np.full(graph.num_ops, -1)
            first[own] = [known.setdefault(graph.op_names[op], int(number[op])) for op in own.tolist()]
            first_copies[id(graph)] = first[graph.first_copy]
        first = first_copies[id(graph)]
        made_for = np.where(graph.origins >= 0, first[graph.origins], -1)
        builder.set_origins(number, np.where(first == number, made_for, first))
        builder.copy_tensors(graph, number)
        own_exchanges = exchanges[id(graph)]
        if not own_exchanges.are_alike(of_first):
            raise InputError(f"graph {graph.name!r}: its replicas differ in what they exchange, or in its order")
        positions.append(2 * np.searchsorted(own_exchanges.ends, everything, side="right"))
        groups.append(own_groups)
        numbers.append(number)
    of_replicas = [exchanges[id(graph)].pairs for graph in replicas]
    for place in range(len(of_first.ends)):
        start, done = (
            np.array([number[pairs[end, place]] for number, pairs in zip(numbers, of_replicas, strict=True)])
            for end in (0, 1)
        )
        end_groups = np.array([own[pairs[0, place]] for own, pairs in zip(groups, of_replicas, strict=True)])
        before = builder.num_ops
        first_start = int(first_copies[id(replicas[0])][of_first.pairs[0, place]])
        collective, microbatch = collectives[of_first.index[place]], int(of_first.microbatches[place])
        Exchange(builder, collective, microbatch, first_start, start, done, end_groups).build(rings)
        positions.append(np.full(builder.num_ops - before, 2 * place + 1))
    for number in numbers if releases is not None else ():
        builder.control(*number[releases])
    return builder.build(replicas[0].name, np.concatenate(positions))


@dataclass(frozen=True, eq=False)
class _ReplicaExchanges:
    """The X exchanges of a replica and its micro-batches, in the order of their last ops."""

    pairs: I64  # [2, X] first and last ops
    index: I64  # [X] the exchange among those of a micro-batch, by first ops
    microbatches: I64  # [X]

    @classmethod
    def of(cls, graph: Graph) -> "_ReplicaExchanges":
        """Finds the exchanges of one replica."""
        pairs = np.stack(exchange_ends(graph))
        pairs = pairs[:, np.argsort(pairs[1])]
        index = np.unique(graph.first_copy[pairs[0]], return_inverse=True)[1]
        return cls(pairs, index, graph.microbatches[pairs[0]])

    @property
    def ends(self) -> I64:
        """[X] the last ops, ascending."""
        return np.asarray(self.pairs[1], np.int64)

    def are_alike(self, other: "_ReplicaExchanges") -> bool:
        """Returns whether another replica has the same exchanges in the same order."""
        return np.array_equal(self.index, other.index) and np.array_equal(self.microbatches, other.microbatches)
