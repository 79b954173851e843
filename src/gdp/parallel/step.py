"""START HERE: from the graph of one micro-batch and a layout to the graph of the step.

one micro-batch --recompute or offload, repeat--> micro-batches --ends of exchanges--> a replica --copy, hops--> step
with zero=3:    --recompute, ends of exchanges--> --repeat--> a replica --copy, hops--> step

Batches in flight are a forward pass for one batch after the other, on replicas of the model, so many at a time.

    batch 0   entry --> ... --> done --.
    batch 1   entry --> ... --> done --|--.
    batch 2                  entry <---'  |  --> ... --> done      2 in flight: one enters where one is done
    batch 3                     entry <---'  --> ... --> done

All batches of a replica share its parameters; each place in flight has a cache of its own. An op `batch.done` waits
for all results of a batch. The first batches fill the replica; its speed is that of the later ones, so that each place
in flight takes `ROUNDS` batches in turn. N ops of one batch, M ops of the stream, R replicas."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from gdp.arrays import I64, Bool, unique
from gdp.costs.collectives import ExchangeTimes
from gdp.errors import InputError
from gdp.graph import Graph
from gdp.graph.accumulation import Accumulation, accumulated
from gdp.graph.builder import GraphBuilder, with_controls
from gdp.graph.copies import BATCH_END, HOST_COPY, MODEL, RECOMPUTED, numbers_in
from gdp.graph.held_memory import is_cache
from gdp.graph.microbatches import MAX_MICROBATCHES, shared_ops
from gdp.parallel.layout import Layout
from gdp.parallel.offload import Offload
from gdp.parallel.recompute import recomputed
from gdp.parallel.replica_step import ReplicaStep
from gdp.parallel.replicas import joined, replicated
from gdp.parallel.rings import Rings

ROUNDS = 4  # of batches that enter one after the other: two fill the replicas, two are measured
DONE = "batch.done"
MAX_BATCHES = MAX_MICROBATCHES // ROUNDS
_MOST_OPS = 2_000_000  # of a stream: what takes a few GB and a minute


@dataclass(frozen=True, eq=False)
class CutGraph:
    """A graph that is cut as `layout` says, and where its ops come from. N ops of one micro-batch or batch, M ops of
    the whole, R replicas, P places of a replica."""

    graph: Graph
    layout: Layout
    origin: I64  # [M] the op of the micro-batch that each is a copy of, or is to share a device with

    @property
    def is_on_host(self) -> Bool:
        """[M] the ops that hold activations on a CPU."""
        return self.graph.is_in_role(HOST_COPY)

    @property
    def replica(self) -> I64:
        """[M] the replica of each op."""
        return self.graph.replicas

    def placement(self, places: npt.ArrayLike, devices: npt.ArrayLike, cpus: npt.ArrayLike | None = None) -> I64:
        """Returns the placement [M] of replicas that are placed alike. `places` [N] is the place of each op of a
        micro-batch, 0 to P - 1, `devices` [R, P] the device that is each place of each replica, and `cpus` [R] where
        activations of each replica wait, in a step with offload. A batch in flight ends where its last op is."""
        placement = np.asarray(np.asarray(devices)[self.replica, np.asarray(places)[self.origin]], np.int64)
        return placement if cpus is None else np.where(self.is_on_host, np.asarray(cpus)[self.replica], placement)


@dataclass(frozen=True, eq=False)
class Step(CutGraph):
    """The graph of a training step in micro-batches and replicas."""

    places: I64 | None = None  # [N] that buckets do not cross; None: a replica has one
    ring: tuple[int, ...] | None = None  # [R] the order of replicas in rings; None: by number
    hosts: tuple[int, ...] | None = None  # [R] for rings inside hosts and rings over them; None: rings over all
    times: ExchangeTimes | None = None  # of exchanges at once; None: in hops

    @classmethod
    def of(
        cls,
        graph: Graph,
        layout: Layout,
        *,
        places: I64 | None = None,
        ring: Sequence[int] | None = None,
        hosts: Sequence[int] | None = None,
        times: ExchangeTimes | None = None,
        bucket_bytes: int | None = None,
        part: Graph | None = None,
    ) -> "Step":
        """Returns the step of `layout`, from the step `graph` of one micro-batch. `places` [N] are equal for ops of a
        replica that are sure to share a device, by default for all; `ring` [R] is the order of replicas in rings, and
        `hosts` [R] where they are, for rings inside hosts and rings over hosts; `times`, where replicas are alike, make
        each exchange one transfer to each replica. `part` is `graph` with blocks recomputed and activations sent away,
        where it is known. InputError where the layout does not suit the graph."""
        if layout.data > 1 and graph.replicas.any():
            raise InputError(f"graph {graph.name!r}: has replicas already; leave out data={layout.data}")
        times = times if layout.is_even else None
        rings = Rings.of(layout.data, ring, hosts, times)
        if part is None:
            part = Offload.of(recomputed(graph, layout.recompute, places=places), layout.offload).graph
        of_part = None if places is None else places[_origins(graph, part)]
        if layout.zero == 3:
            whole = _fully_sharded(part, layout, of_part, rings)
        else:
            steps = {count: accumulated(part, count) for count in set(layout.microbatches)}
            replicas = [steps[count] for count in layout.microbatches]
            own = None if of_part is None else of_part[_origins(part, replicas[0])]
            whole = replicated(replicas, zero=layout.zero, places=own, rings=rings, bucket_bytes=bucket_bytes)
        order, where = (None if numbers is None else tuple(numbers) for numbers in (ring, hosts))
        origin = _origins(graph, whole)
        if layout.stages is not None and places is not None:
            whole = with_waits(whole, places[origin])
        return cls(whole, layout, origin, places, order, where, times)

    def document(self) -> dict[str, Any]:
        """Returns what it takes to cut the model so again, for a plan file."""
        places = None if self.places is None else self.places.tolist()
        rings = {"places": places, "ring": _listed(self.ring), "hosts": _listed(self.hosts)}
        exchanges = {} if self.times is None else {"exchanges": self.times.document()}
        return self.layout.document() | rings | exchanges

    @classmethod
    def of_document(
        cls, read_part: Callable[[int], Graph], document: Mapping[str, Any], *, in_hops: bool = False
    ) -> "Step":
        """Returns the step that `document` describes; `read_part(K)` returns that of 1/K of the batch. InputError where
        it describes none of this model."""
        layout = Layout.of_document(document)
        graph = read_part(layout.num_parts)
        places = _numbers(document, "places", graph.num_ops)
        ring, hosts = (_numbers(document, key, layout.data) for key in ("ring", "hosts"))
        known = document.get("exchanges")
        times = None if known is None else replace(ExchangeTimes.of_document(known, layout.data), in_hops=in_hops)
        where = None if places is None else np.array(places)
        return cls.of(graph, layout, places=where, ring=ring, hosts=hosts, times=times)


def with_waits(graph: Graph, places: I64) -> Graph:
    """Returns the step with hosts that wait at exchanges of stages: when a pass has received, and when it is sent on.
    Megatron-LM calls torch.cuda.synchronize() after each batch_isend_irecv (`batch_p2p_sync`, on by default), since
    waiting for the requests was no wait before PyTorch 1.13 (github.com/pytorch/pytorch/pull/82450): its hosts do not
    run ahead from one pass to the next. Where no op takes time on a host, nothing changes. `places` [M] are the
    stages."""
    tensors, targets = graph.edge_tensors, graph.consumers
    sources, is_forward, is_backward = graph.producers[tensors], *map(graph.is_in_phase, ("forward", "backward"))
    is_pass = (is_forward | is_backward) & graph.is_in_role(MODEL, RECOMPUTED)
    is_sent = (places[sources] != places[targets]) & (graph.replicas[sources] == graph.replicas[targets])
    is_sent &= is_pass[sources] & is_pass[targets] & ~graph.is_resident[graph.base[tensors]]
    is_sent &= is_backward[sources] == is_backward[targets]  # else a copy, recomputed when its gradient has come
    one_pass = np.stack((places, graph.microbatches, graph.replicas, is_backward))
    received, sent = unique(targets[is_sent]), unique(sources[is_sent & (graph.tensor_bytes[tensors] > 0)])
    waits = graph.host_waits.copy()
    for ops in (received, sent[::-1]):
        waits[ops[np.unique(one_pass[:, ops], axis=1, return_index=True)[1]]] = True
    return replace(graph, host_waits=waits)


def _listed(numbers: tuple[int, ...] | None) -> list[int] | None:
    return None if numbers is None else list(numbers)


def _numbers(document: Mapping[str, Any], key: str, count: int) -> list[int] | None:
    """Returns a list of `count` numbers at least 0, None where there is none; InputError for anything else."""
    numbers: list[int] | None = document.get(key)
    if numbers is None:
        return None
    is_list = type(numbers) is list and len(numbers) == count
    if not (is_list and all(type(n) is int and 0 <= n < 2**31 for n in numbers)):
        raise InputError(f"layout: {key} is not a list of {count} numbers; the plan is of another model, place it anew")
    return numbers


def _fully_sharded(graph: Graph, layout: Layout, places: I64 | None, rings: Rings) -> Graph:
    sharded = ReplicaStep.sharded(graph, layout.data, places, at_once=rings.times is not None)
    replica, releases = sharded.repeated(layout.microbatches[0])
    return joined([replica] * layout.data, sharded.collectives, rings, releases)


def _origins(graph: Graph, step: Graph) -> I64:
    """Returns the ops [M] of `graph` that those of `step` are copies of, or made for."""
    return np.arange(graph.num_ops) if step is graph else numbers_in(graph, step, step.root)


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
