"""Batches in flight: a forward pass for one batch after the other, on replicas of the model, so many at a time.

    batch 0   entry --> ... --> done --.
    batch 1   entry --> ... --> done --|--.
    batch 2                  entry <---'  |  --> ... --> done      2 in flight: one enters where one is done
    batch 3                     entry <---'  --> ... --> done

All batches of a replica share its parameters; each place in flight has a cache of its own. An op `batch.done` waits
for all results of a batch. The first batches fill the replica; its speed
is that of the later ones, so that each place in flight takes `ROUNDS` batches in turn.
N ops of one batch, M ops of the stream, R replicas."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from gdp.arrays import I64, Bool
from gdp.errors import InputError
from gdp.graph import Graph
from gdp.graph.accumulation import Accumulation
from gdp.graph.builder import GraphBuilder, with_controls
from gdp.graph.copies import BATCH_END, numbers_in
from gdp.graph.held_memory import is_cache
from gdp.graph.microbatches import MAX_MICROBATCHES, shared_ops
from gdp.parallel.layout import Layout
from gdp.parallel.replicas import joined
from gdp.parallel.rings import Rings
from gdp.parallel.step import CutGraph

ROUNDS = 4  # of batches that enter one after the other: two fill the replicas, two are measured
DONE = "batch.done"
MAX_BATCHES = MAX_MICROBATCHES // ROUNDS
_MOST_OPS = 2_000_000  # of a stream: what takes a few GB and a minute


@dataclass(frozen=True, eq=False)
class BatchStream(CutGraph):
    """The graph of a stream of batches; micro-batches of its layout are the batches in flight of each replica."""

    batch: Graph  # of one of them

    @classmethod
    def of(cls, graph: Graph, layout: Layout) -> "BatchStream":
        """Returns the stream of `layout`, from the forward pass `graph` of one batch. InputError for a training step,
        and for more batches than can be simulated."""
        check_batches(graph, layout.num_parts)
        ended = _with_end(graph)
        streams = {count: _stream(ended, count) for count in set(layout.microbatches)}
        replicas = [streams[count] for count in layout.microbatches]
        whole = replicas[0] if layout.data == 1 else joined(replicas, (), Rings.of(layout.data))
        return cls(whole, layout, numbers_in(graph, whole, whole.root), graph)

    @property
    def num_batches(self) -> int:
        """The batches in flight, over all replicas."""
        return self.layout.num_parts

    def document(self) -> dict[str, Any]:
        """Returns what it takes to make the stream again, for a plan file."""
        return {"batches": self.num_batches} | self.layout.document()

    @classmethod
    def of_document(cls, graph: Graph, document: Mapping[str, Any]) -> "BatchStream":
        """Returns the stream that `document` describes, of the forward pass `graph`; InputError for anything else."""
        return cls.of(graph, layout_in_flight(document))


def batch_ends(graph: Graph, layout: Layout) -> list[I64]:
    """Returns the ops that end the batches of each replica, `ROUNDS` times as many as are in flight there. InputError
    where `graph` is no stream of this layout."""
    ends = np.flatnonzero(graph.is_in_role(BATCH_END))
    by_replica = [ends[graph.replicas[ends] == replica] for replica in range(layout.data)]
    by_replica = [own[np.argsort(graph.microbatches[own])] for own in by_replica]
    if [len(own) for own in by_replica] != [ROUNDS * count for count in layout.microbatches]:
        raise InputError(f"layout: graph {graph.name!r} has not the batches in flight of {layout}; place it anew")
    return by_replica


def in_flight(document: Mapping[str, Any] | None) -> bool:
    """Returns whether the layout of a plan is one of batches in flight."""
    return document is not None and "batches" in document


def layout_in_flight(document: Mapping[str, Any]) -> Layout:
    """Returns the layout that `BatchStream.document` wrote; InputError for anything else."""
    layout = Layout.of_document({key: value for key, value in document.items() if key != "batches"})
    if document["batches"] != layout.num_parts:
        raise InputError(f"layout: batches is {document['batches']!r}; its replicas have {layout.num_parts}")
    return layout


def check_batches(graph: Graph, num_batches: int) -> None:
    """Raises InputError where `graph` is no forward pass of which so many batches can be in flight."""
    if not 1 <= num_batches <= MAX_BATCHES:
        raise InputError(f"--batches is {num_batches}; 1 to {MAX_BATCHES} in flight are expected")
    if not {"backward", "update"}.isdisjoint(graph.phases):
        raise InputError(
            f"--batches: {graph.name!r} is a training step; add --inference, or capture a file with it, to serve it"
        )
    if graph.microbatches.any() or graph.replicas.any():
        raise InputError(f"--batches: {graph.name!r} has copies of ops already; give the graph of one batch")
    if (count := graph.num_ops * num_batches * ROUNDS) > _MOST_OPS:
        most = max(_MOST_OPS // (graph.num_ops * ROUNDS), 1)
        raise InputError(f"--batches: {num_batches} in flight of {graph.name!r} are {count:,} ops; take up to {most}")


def with_caches(graph: Graph, count: int) -> Graph:
    """Returns the graph with the memory of `count` caches of keys, values and states in place of each."""
    if count == 1 or not (is_own := is_cache(graph)).any():
        return graph
    return replace(graph, resident_bytes=graph.resident_bytes * np.where(is_own, count, 1))


def _with_end(graph: Graph) -> Graph:
    """Returns the graph with one more op, the last, that waits for all results; these leave when they are made."""
    name = DONE
    while name in graph.op_numbers:
        name = f"{name}_"
    is_source = shared_ops(graph)[0]
    is_result = ~is_source
    is_result[graph.producers[graph.edge_tensors]] = False
    builder = GraphBuilder.of(replace(graph, is_kept=graph.is_kept & is_source[graph.producers]))
    end = builder.add_ops([name], DONE, phases="forward", roles=BATCH_END)
    builder.set_origins(end, end - 1)
    results = np.flatnonzero(is_result)
    builder.control(results, np.full(len(results), end[0]))
    return builder.build(graph.name)


def _stream(ended: Graph, count: int) -> Graph:
    """Returns the batches of one replica, `count` in flight."""
    many = Accumulation.of(with_caches(ended, count), count * ROUNDS)
    entries = many.number[:, _entries(ended)]  # by batch
    done = np.repeat(many.number[:, -1], entries.shape[1]).reshape(entries.shape)
    return with_controls(many.graph, done[:-count].ravel(), entries[count:].ravel())


def _entries(graph: Graph) -> Bool:
    """[N] ops that wait for no other op of their batch."""
    is_source = shared_ops(graph)[0]
    is_entry = ~is_source
    waits = ~is_source[graph.producers[graph.edge_tensors]]
    is_entry[graph.consumers[waits]] = False
    return is_entry
