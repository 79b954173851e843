"""Sums of gradients over replicas: where one replica waits for the others, at the end of its backward pass.

    zero=0   gradients -> all_reduce -> updates
    zero=1   gradients -> reduce_scatter -> updates of one's own chunk -> all_gather
             '------------------------------^
    zero=2   gradients -> reduce_scatter -> updates of one's own chunk -> all_gather

With zero=2 gradients are freed when they have been sent: updates read the chunk. S. Rajbhandari et al., "ZeRO: Memory
Optimizations Toward Training Trillion Parameter Models", SC 2020. N ops of one replica.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from gdp.arrays import I64
from gdp.errors import InputError
from gdp.graph import Graph
from gdp.parallel.buckets import Bucket, Gradient, gradients_of
from gdp.parallel.graph_builder import GraphBuilder
from gdp.parallel.held_state import HeldState, copy_times, joined_groups
from gdp.parallel.rings import Collective


@dataclass(frozen=True, eq=False)
class Sums:
    """The sums over R replicas of what one of them makes, for buckets that are the same in all."""

    buckets: Sequence[Bucket]
    count: int  # R
    zero: int = 0  # to 2

    def insert(self, graph: Graph) -> tuple[Graph, list[Collective]]:
        """Returns the step of one replica with the first and last op of each exchange, and the exchanges.

        Hops between replicas are left to `joined`. InputError if `graph` has other gradients than the buckets.
        """
        state = HeldState.of(graph)
        gradients = gradients_of(graph, state.is_late)
        sizes = {name: gradient.num_bytes for name, gradient in gradients.items()}
        if sorted(sizes) != sorted(name for bucket in self.buckets for name in bucket.names) or any(
            bucket.num_bytes != sum(sizes[name] for name in bucket.names) for bucket in self.buckets
        ):
            raise InputError(f"graph {graph.name!r}: its gradients are not those of the other replicas")
        together = [bucket.updates(gradients) for bucket in self.buckets]
        writers = state.writers(graph) if self.zero else {}
        groups = joined_groups(graph, [*together, *([op, *ops] for op, ops in writers.items())])
        builder, number = GraphBuilder(), np.full(graph.num_ops, -1)

        def copy(chosen: I64, **changed: I64) -> None:
            names = [graph.op_names[op] for op in chosen.tolist()]
            number[chosen] = builder.copy_ops(graph, chosen, names, groups[chosen], **changed)

        early = np.flatnonzero(~state.is_late)
        resident = state.cut_resident(graph, self.count, with_parameters=False) if self.zero else graph.resident_bytes
        copy(early, resident_bytes=resident[early])
        exchange = "reduce_scatter" if self.zero else "all_reduce"
        collectives = [
            Collective(exchange, index, bucket.num_bytes, bucket.dtype, "backward")
            for index, bucket in enumerate(self.buckets)
        ]
        ends = [
            collective.add_ends(builder, int(groups[updates[0]]))
            for collective, updates in zip(collectives, together, strict=True)
        ]
        starts = [(start, updates[0]) for (start, _), updates in zip(ends, together, strict=True)]  # and what for
        waits: list[tuple[int, int]] = []  # (op, op) of the new graph
        late_waits: list[tuple[int, int]] = []  # (op of the new graph, op of `graph` that is numbered later)
        sizes_cut, is_edge = graph.tensor_bytes, np.ones(len(graph.consumers), np.bool_)
        if self.zero:
            sizes_cut = state.cut_tensors(graph, self.count)
            number[state.is_update] = state.add_updates(builder, graph, self.count, groups)
            bucket_of = _buckets_of_updates(graph, state, together)
            for index, parameters in enumerate(_alike(writers, bucket_of)):
                size = int(state.own_bytes[parameters].sum())
                collective = Collective("all_gather", index, size, graph.dtypes[parameters[0]], "update")
                own = sorted({writer for op in parameters for writer in writers[op]})
                copied = copy_times(graph, own, size - size // self.count)  # of other replicas' pieces
                ready, done = collective.add_ends(builder, int(groups[parameters[0]]), ({}, copied))
                waits += [(int(number[writer]), ready) for writer in own]
                late_waits += [(done, op) for op in state.followers(graph, own)]
                starts.append((ready, parameters[0]))
                collectives.append(collective)
        copy(np.flatnonzero(number < 0))
        if self.zero == 2:
            is_summed = np.zeros(graph.num_tensors, np.bool_)
            is_summed[[gradient.tensor for gradient in gradients.values()]] = True
            is_edge = ~(is_summed[graph.edge_tensors] & state.is_late[graph.consumers])
        builder.copy_origins(graph, number)
        starts_of, origins = np.array(starts, np.int64).T
        builder.set_origins(starts_of, number[origins])
        builder.copy_tensors(graph, number, tensor_bytes=sizes_cut, is_edge=is_edge)  # they keep their numbers
        for bucket, (ready, done) in zip(self.buckets, ends, strict=True):
            members = [gradients[name] for name in bucket.names]
            tensors = np.array([gradient.tensor for gradient in members])
            builder.add_edges(tensors, np.full(len(tensors), ready))
            if self.zero == 2:
                builder.add_edges(tensors, np.full(len(tensors), done))
                add_chunks(builder, members, number, done, self.count)
            else:
                late_waits += [(done, op) for op in bucket.updates(gradients)]
        waits += [(source, int(number[op])) for source, op in late_waits]
        sources, targets = np.array(waits, np.int64).reshape(-1, 2).T
        builder.control(sources, targets)
        return builder.build(graph.name), collectives


def _buckets_of_updates(graph: Graph, state: HeldState, together: Sequence[Sequence[int]]) -> list[int]:
    """Returns the bucket that each op waits for [N]; -1 for none or for several."""
    none, several = -1, -2
    bucket_of = [none] * graph.num_ops
    for index, updates in enumerate(together):
        for op in updates:
            bucket_of[op] = index if bucket_of[op] in (none, index) else several
    sources, targets = graph.producers[graph.edge_tensors], graph.consumers
    within = np.flatnonzero(state.is_update[sources] & state.is_update[targets])
    within = within[np.argsort(targets[within], kind="stable")]
    for source, target in zip(sources[within].tolist(), targets[within].tolist(), strict=True):
        if bucket_of[source] not in (none, bucket_of[target]):
            bucket_of[target] = bucket_of[source] if bucket_of[target] == none else several
    return [max(bucket, none) for bucket in bucket_of]


def _alike(writers: Mapping[int, Sequence[int]], bucket_of: Sequence[int]) -> list[list[int]]:
    """Returns the parameters that are gathered together: those of a bucket, and each other one alone."""
    alike: dict[tuple[int, int], list[int]] = {}
    for parameter, ops in writers.items():
        buckets = {bucket_of[op] for op in ops}
        bucket = buckets.pop() if len(buckets) == 1 else -1
        alike.setdefault((bucket, -1) if bucket >= 0 else (len(bucket_of), parameter), []).append(parameter)
    return [alike[key] for key in sorted(alike)]


def add_chunks(builder: GraphBuilder, gradients: Sequence[Gradient], number: I64, done: int, count: int) -> None:
    """Adds the chunks of gradients that updates read after a reduce-scatter over `count` replicas, made by `done`."""
    sizes = np.array([-(-gradient.num_bytes // count) for gradient in gradients])
    chunks = builder.add_tensors(np.full(len(gradients), done), sizes)
    readers = [len(gradient.updates) for gradient in gradients]
    updates = np.array([op for gradient in gradients for op in gradient.updates])
    builder.add_edges(np.repeat(chunks, readers), number[updates])
