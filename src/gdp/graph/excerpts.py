"""Excerpts: a part of a step that stands for the whole, a few of its micro-batches or one of its replicas. All copies
of an op over micro-batches share a device, and replicas are placed alike, so a placement of the part is one of the
whole. N ops of the whole, n of the part, T tensors of the whole."""

from dataclasses import dataclass

import numpy as np

from gdp.arrays import I64, position_in, scattered
from gdp.graph.builder import GraphBuilder
from gdp.graph.copies import EXCHANGE_END, EXCHANGE_START, exchange_ends
from gdp.graph.graph import Graph


@dataclass(frozen=True, eq=False)
class Excerpt:
    """A smaller graph whose placements carry over to the whole."""

    graph: Graph
    ops: I64  # [n] their numbers in the whole
    twin: I64  # [N] the op of the excerpt that each is, or is a copy of; -1 for hops between replicas

    @classmethod
    def of_microbatches(cls, graph: Graph, microbatch: I64, count: int) -> "Excerpt":
        """Takes the first `count` micro-batches, at least two; `microbatch` [ops] is the result of `microbatch_of`."""
        ops = np.flatnonzero(microbatch < count)
        number = position_in(ops, graph.num_ops)
        copies = _copies(graph, microbatch)
        row, column = np.nonzero(copies >= 0)
        row_of = scattered(copies[row, column], row, graph.num_ops)
        left_out = np.flatnonzero(number < 0)
        rows = row_of[left_out]
        nearest = copies[rows, microbatch[left_out] % count]
        nearest = np.where(nearest < 0, copies[rows, 1], nearest)  # sums begin with the second micro-batch
        assert (nearest >= 0).all(), "each replica has one for another micro-batch"
        twin = number.copy()
        twin[left_out] = number[nearest]
        last = np.flatnonzero(microbatch == count - 1)
        numbers = np.arange(copies.shape[1])
        final = np.full(graph.num_ops, -1)  # of ops of the excerpt's last micro-batch: their copies of the last of all
        final[last] = copies[row_of[last], np.where(copies >= 0, numbers, -1).max(axis=1)[row_of[last]]]
        tensors, stand_ins = _twin_tensors(graph, number, final)
        is_shared = microbatch < 0
        stands_for = scattered(stand_ins, tensors, graph.num_tensors)
        of_edges = stands_for[graph.edge_tensors]
        is_final = (of_edges >= 0) & is_shared[graph.consumers]
        return cls(_excerpt(graph, ops, number, of_edges[is_final], graph.consumers[is_final]), ops, twin)

    @classmethod
    def of_replica(cls, graph: Graph) -> "Excerpt | None":
        """Takes the first replica, in which the end of an exchange follows its beginning. None without replicas, and
        where they have different numbers of micro-batches."""
        replica = graph.replicas
        is_end = graph.is_in_role(EXCHANGE_START, EXCHANGE_END)
        has_twin = is_end | ~graph.is_collective
        sizes = np.bincount(replica[has_twin])
        if len(sizes) < 2 or (sizes != sizes[0]).any():
            return None
        ops = np.flatnonzero(has_twin & (replica == 0))
        number = position_in(ops, graph.num_ops)
        copy = graph.first_copy * (int(graph.microbatches.max()) + 1) + graph.microbatches
        number_of = scattered(copy[ops], number[ops], int(copy.max()) + 1)
        excerpt = _excerpt(graph, ops, number, *_exchanges(graph))
        return cls(excerpt, ops, np.where(has_twin, number_of[copy], -1))


def _exchanges(graph: Graph) -> tuple[I64, I64]:
    """Returns, for each exchange of the first replica, a tensor that begins it and the op that ends it."""
    first_tensor = np.full(graph.num_ops, -1)
    first_tensor[graph.producers[::-1]] = np.arange(graph.num_tensors)[::-1]
    starts, ends = exchange_ends(graph)
    is_chosen = (graph.replicas[ends] == 0) & (first_tensor[starts] >= 0)
    return first_tensor[starts[is_chosen]], ends[is_chosen]


def _copies(graph: Graph, microbatch: I64) -> I64:
    """Returns [rows, micro-batches] the copies of each op that is repeated, a row for each replica; -1 for none."""
    ops = np.flatnonzero(microbatch >= 0)
    distinct, row = np.unique(graph.replicas[ops] * graph.num_ops + graph.first_copy[ops], return_inverse=True)
    copies = np.full((len(distinct), int(microbatch.max()) + 1), -1)
    copies[row, microbatch[ops]] = ops
    return copies


def _twin_tensors(graph: Graph, number: I64, final: I64) -> tuple[I64, I64]:
    """Returns (tensors, stand_ins): tensors of the excerpt, and those of the copies `final` [N] that they stand for.
    `number` [N] are the ops' numbers in the excerpt, -1 for others; `final` is -1 for ops without such a copy."""
    order = np.argsort(graph.producers, kind="stable")  # of tensors by producers
    counts = np.bincount(graph.producers, minlength=graph.num_ops)
    first = np.cumsum(counts) - counts
    place = np.empty(graph.num_tensors, np.int64)  # among the tensors of one op
    place[order] = np.arange(graph.num_tensors) - first[graph.producers[order]]
    tensors = np.flatnonzero(number[graph.producers] >= 0)
    other = final[graph.producers[tensors]]
    has_other = (other >= 0) & (place[tensors] < counts[other])
    return tensors[has_other], order[(first[other] + place[tensors])[has_other]]


def _excerpt(graph: Graph, ops: I64, number: I64, tensors_read: I64, readers: I64) -> Graph:
    """Returns the graph of `ops`; `number` [N] are their numbers in it, -1 for others. Besides, each of `readers` reads
    the one of `tensors_read`; both are numbered as in `graph`, and in the excerpt."""
    builder = GraphBuilder()
    builder.copy_ops(graph, ops)
    builder.copy_origins(graph, number)
    tensors = builder.copy_tensors(graph, number)
    is_inside = (tensors[tensors_read] >= 0) & (number[readers] >= 0)
    builder.add_edges(tensors[tensors_read[is_inside]], number[readers[is_inside]])
    return builder.build(graph.name)
