"""Simulator: the machine model prepared for one graph on one cluster, which all runs of it share. It owns the flat
arrays that the compiled engine takes, the ranks that ready ops start by, and spare workspaces. `simulate.py` has the
functions that callers use. N ops, T tensors, D devices.

A tensor's memory is freed on its producer's device after the last reader there, and its copies on other devices after
the last readers there: one list of readers tells both. A tensor with views has a list for its own memory, which readers
of the views are in, too, and each of them a list for its copies alone. Lists come by length, so that loops over one
turn equally often from list to list. Most are not there at all: what nobody reads, its producer frees; a lone reader
frees as much on the producer's device as on another, or nothing there, and then a copy if the tensor is sent."""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import cached_property
from math import inf

import numpy as np
import numpy.typing as npt

from gdp.arrays import I64, combined, mask, narrow, position_in, scattered, unique
from gdp.cluster import Cluster
from gdp.costs.op_times import transfer_occupancy_ns
from gdp.graph import Graph
from gdp.simulator.longest_paths import longest_paths, ranks_of
from gdp.simulator.orders import OrderTraits, order_priority
from gdp.simulator.records import MOST_INPUTS, Arrays, Dispatch, MemoryArrays, Readers, Workspace

Ranks = tuple[npt.NDArray[np.uint32], npt.NDArray[np.uint32]]  # (rank of each op [N], op of each rank [N])


def readers_of(
    num_ops: int, producers: I64, consumers: I64, counts: I64, owner: I64, owned_bytes: I64, copy_bytes: I64
) -> Readers:
    """Returns the lists. Tensors [T] have `counts` consumers [E] in turn; `owner` [T] is the base of a view."""
    num_tensors = len(owner)
    numbers = np.arange(num_tensors)
    in_family = owner != numbers  # a view, or a tensor with views
    in_family[owner[in_family]] = True
    bases = numbers[in_family & (owner == numbers)]
    edge_tensors = np.repeat(numbers, counts)
    family_edges = np.flatnonzero(in_family[edge_tensors])
    family_edges = family_edges[np.argsort(owner[edge_tensors[family_edges]], kind="stable")]

    edges = np.concatenate((np.arange(len(consumers)), family_edges))
    lengths = np.concatenate((counts, np.bincount(owner[edge_tensors[family_edges]], minlength=num_tensors)[bases]))
    makers = np.concatenate((producers, producers[bases]))
    owners = np.concatenate((np.where(in_family, num_tensors, numbers), bases))  # num_tensors: of copies alone
    owned = np.concatenate((np.where(in_family, 0, owned_bytes), owned_bytes[bases]))
    copied = np.concatenate((copy_bytes, np.zeros(len(bases), np.int64)))
    begins = np.cumsum(lengths) - lengths

    unread = lengths == 0
    frees_bytes = combined(np.add, makers[unread], owned[unread], num_ops)
    alike = (lengths == 1) & (owned == copied)
    np.add.at(frees_bytes, consumers[edges[begins[alike]]], owned[alike])
    is_lone = (lengths == 1) & (owned == 0) & (copied > 0)  # never the memory of a tensor with views
    lone_reader = np.full(num_tensors, num_ops + len(consumers))
    lone_reader[np.flatnonzero(is_lone)] = consumers[edges[begins[is_lone]]]

    kept = np.flatnonzero(~unread & ~alike & ~is_lone & ((owned > 0) | (copied > 0)))
    kept = kept[np.argsort(lengths[kept], kind="stable")]
    sizes, num_lists = np.unique(lengths[kept], return_counts=True)
    starts = np.cumsum(lengths[kept]) - lengths[kept]
    list_of = scattered(owners[kept], np.arange(len(kept)), num_tensors + 1, len(kept))
    within = np.arange(lengths[kept].sum()) - np.repeat(starts, lengths[kept])
    return Readers(
        frees_bytes=frees_bytes,
        lengths=sizes.astype(np.uint32),
        offsets=np.concatenate(([0], np.cumsum(num_lists))).astype(np.uint32),
        producers=makers[kept].astype(np.uint32),
        owned_bytes=owned[kept],
        copy_bytes=copied[kept],
        ops=consumers[edges[np.repeat(begins[kept], lengths[kept]) + within]].astype(np.uint32),
        list_of=list_of[:-1].astype(np.uint32),
        lone_reader=lone_reader.astype(np.uint32),
    )


class Simulator:
    """Everything that runs of a graph with the same op times on one cluster share; `Problem.simulator` is one. Problems
    that differ in their order, constraints or limits share theirs. Arrays are made when they are first needed. Threads
    may share a simulator: each borrows a workspace of its own."""

    def __init__(self, graph: Graph, cluster: Cluster, op_time_ns: I64, microbatch: I64, host_time_ns: I64) -> None:
        self.graph, self.cluster = graph, cluster
        self.op_time_ns, self.microbatch = op_time_ns, microbatch  # [N, D], [N]
        self.host_time_ns = host_time_ns  # [N, D]
        self.is_for_many = cluster.is_large  # runs are those of `many_devices.py`
        self.num_timed, self.fastest_s = 0, inf  # simulations in full, and the seconds of the fastest one
        self._ranks: dict[str, Ranks] = {}
        self._dispatches: dict[str, Dispatch] = {}
        self._spare_workspaces: list[Workspace] = []

    @property
    def placement_type(self) -> type[np.uint8 | np.uint16]:
        """The type of a placement as kernels take it."""
        return np.uint16 if self.is_for_many else np.uint8

    def is_of(self, *values: Graph | Cluster | I64) -> bool:
        """Returns whether these are the very values that it simulates."""
        own = self.graph, self.cluster, self.op_time_ns, self.microbatch, self.host_time_ns
        return all(one is other for one, other in zip(own, values, strict=True))

    @cached_property
    def mean_op_time_ns(self) -> I64:
        """[N] mean over the devices that can run the op, rounded down: the m of docs/machine-model.md, section 3."""
        times_ns = narrow(self.op_time_ns)
        runnable = times_ns >= 0
        count = np.maximum(runnable.sum(axis=1, keepdims=True), 1)
        times_ns = np.where(runnable, times_ns, 0)
        whole, rest = np.divmod(times_ns, count)  # the sum of times may exceed int64
        return np.asarray(whole.sum(axis=1) + rest.sum(axis=1) // count[:, 0], np.int64)

    @cached_property
    def fastest_ns(self) -> I64:
        """[N] the op's time on its fastest device."""
        times_ns = narrow(self.op_time_ns)
        return np.asarray(np.where(times_ns >= 0, times_ns, np.iinfo(np.int64).max).min(axis=1))

    @cached_property
    def b_level_ns(self) -> I64:
        """[N] the default priority: mean time over the devices that can run it, plus the longest such path below it."""
        return longest_paths(self.graph, self.mean_op_time_ns)

    @cached_property
    def runs_everywhere(self) -> bool:
        """True if all ops can run on all devices."""
        return bool((narrow(self.op_time_ns) >= 0).all())

    @cached_property
    def time_table_ns(self) -> I64:
        """[N, D] `op_time_ns` as the engine takes it: one column [N, 1] where all devices are alike."""
        table = _one_column(narrow(self.op_time_ns))
        table.setflags(write=False)  # as `op_time_ns` is: Numba would compile everything anew for a writable one
        return table

    @cached_property
    def tensor_numbers(self) -> I64:
        """[T] the graph's number of each tensor of `arrays`, which sorts tensors by producer."""
        return np.argsort(self.graph.producers, kind="stable")

    @cached_property
    def arrays(self) -> Arrays:
        """The flat arrays of the compiled engine."""
        host_time_ns = np.zeros((0, 1), np.int64)
        if self.has_hosts:
            times_ns = _one_column(narrow(self.host_time_ns))
            host_time_ns = np.where(self.graph.host_waits[:, None], -1 - times_ns, times_ns)
        tail_ns = longest_paths(self.graph, self.fastest_ns)
        return _flatten(self.graph, self.cluster, self.tensor_numbers, tail_ns, host_time_ns)

    @cached_property
    def has_hosts(self) -> bool:
        """Returns whether an op takes time on a host; without one, nothing waits for hosts."""
        return bool(narrow(self.host_time_ns).any())

    @cached_property
    def order_traits(self) -> OrderTraits:
        """The phases and uses of ops, which orders go by."""
        return OrderTraits(self.graph, self.microbatch)

    def ranks(self, order: str) -> Ranks:
        """Returns the ranks of ops in `order`, one of `gdp.simulator.orders`, by b-level."""
        if order not in self._ranks:
            self._ranks[order] = ranks_of(order_priority(order, self.order_traits, self.b_level_ns))
        return self._ranks[order]

    def dispatch(self, order: str, priority: npt.ArrayLike | None = None) -> Dispatch:
        """Returns the dispatch by `priority` [N], by default by that of `order`."""
        if priority is not None:
            return self._dispatch_by(ranks_of(priority))
        if order not in self._dispatches:
            self._dispatches[order] = self._dispatch_by(self.ranks(order))
        return self._dispatches[order]

    def _dispatch_by(self, ranks: Ranks) -> Dispatch:
        """Returns the dispatch by `ranks`: those of ops, and the ops of ranks."""
        nothing = np.zeros(0, np.uint32), np.zeros(0, np.uint32)
        successors = nothing if self.is_for_many else _successors(self.arrays, *ranks)
        no_order = np.zeros(self.cluster.num_devices + 1, np.int64), np.zeros(0, np.uint32)
        by_rank = self.arrays.host_time_ns[ranks[1]] if self.has_hosts else self.arrays.host_time_ns
        return Dispatch(*ranks, *successors, *no_order, by_rank)

    def time(self, seconds: float) -> None:
        """Notes what a simulation in full took."""
        self.num_timed, self.fastest_s = self.num_timed + 1, min(self.fastest_s, seconds)

    def new_workspace(self) -> Workspace:
        """Returns a workspace to keep; making one takes as long as a simulation."""
        return Workspace.of(self.arrays, is_for_many=self.is_for_many)

    @contextmanager
    def workspace(self) -> Iterator[Workspace]:
        """Lends a workspace until the end of the block."""
        try:
            workspace = self._spare_workspaces.pop()
        except IndexError:
            workspace = self.new_workspace()
        yield workspace
        self._spare_workspaces.append(workspace)


def _one_column(table: I64) -> I64:
    """Returns the first column [N, 1] of a table [N, D] whose columns are equal, else the table."""
    return np.ascontiguousarray(table[:, :1]) if (table == table[:, :1]).all() else table


def _flatten(graph: Graph, cluster: Cluster, numbers: I64, tail_ns: I64, host_time_ns: I64) -> Arrays:
    """`numbers` [T] sorts the graph's tensors by producer."""
    num_ops, num_tensors, num_devices = graph.num_ops, graph.num_tensors, cluster.num_devices
    position = position_in(numbers, num_tensors)
    producers = graph.producers[numbers]
    counts = np.diff(graph.consumer_offsets)[numbers]
    edge_order = np.argsort(position[graph.edge_tensors], kind="stable")
    consumers = graph.consumers[edge_order]
    edge_tensors = np.repeat(np.arange(num_tensors), counts)
    view_of = graph.view_of[numbers]
    owner = np.where(view_of >= 0, position[np.maximum(view_of, 0)], np.arange(num_tensors)) if num_tensors else view_of
    sizes = graph.tensor_bytes[numbers]
    owned = np.where(graph.is_resident[numbers] | (view_of >= 0), 0, sizes)
    pinned = mask(owner[graph.is_kept[numbers]], num_tensors)
    alloc = combined(np.add, producers, owned, num_ops)

    rates = unique(cluster.bytes_per_second[~np.eye(num_devices, dtype=np.bool_)])
    occupancy = np.zeros((num_tensors, max(len(rates), 1)), np.int64)
    for column, rate in enumerate(rates.tolist()):
        occupancy[:, column] = transfer_occupancy_ns(sizes, rate)
    route_rate = np.minimum(np.searchsorted(rates, cluster.bytes_per_second), max(len(rates) - 1, 0))
    num_inputs = np.bincount(consumers, minlength=num_ops)
    assert num_inputs.max(initial=0) < MOST_INPUTS, "the engine counts them in the low bits of a word"
    inputs = edge_tensors[np.argsort(consumers, kind="stable")]
    memory = MemoryArrays(
        resident_bytes=graph.resident_bytes,
        alloc_bytes=alloc,
        owner=owner.astype(np.uint32),
        owned_bytes=np.where(pinned, 0, owned),
        copy_bytes=sizes,
        producers=producers.astype(np.uint32),
        input_offsets=_offsets(num_inputs),
        inputs=inputs.astype(np.uint32),
        input_producers=producers[inputs].astype(np.uint32),
        residents=np.flatnonzero(graph.resident_bytes).astype(np.uint32),
        readers=readers_of(num_ops, producers, consumers, counts, owner, np.where(pinned, 0, owned), sizes),
    )
    return Arrays(
        num_inputs=num_inputs.astype(np.int32),
        sources=np.flatnonzero(num_inputs == 0).astype(np.uint32),
        tensor_offsets=_offsets(np.bincount(producers, minlength=num_ops)),
        consumer_offsets=_offsets(counts),
        consumers=consumers.astype(np.uint32),
        occupancy_ns=occupancy,
        route_rate=route_rate.astype(np.uint32),
        latency_ns=np.ascontiguousarray(cluster.latency_ns),
        route_offsets=_offsets(cluster.num_channels.reshape(-1)),
        route_channels=cluster.channels_in_turn.astype(np.uint32),
        tail_ns=tail_ns,
        memory=memory,
        host_time_ns=host_time_ns,
    )


def _successors(
    arrays: Arrays, rank: npt.NDArray[np.uint32], op_of_rank: npt.NDArray[np.uint32]
) -> tuple[npt.NDArray[np.uint32], npt.NDArray[np.uint32]]:
    """Returns (offsets [N + 1], ranks [E]) of the consumers of all that the op of each rank makes."""
    begins = arrays.consumer_offsets[arrays.tensor_offsets]  # of each op's consumers
    counts = np.diff(begins)[op_of_rank]
    offsets = _offsets(counts)
    edges = np.arange(len(arrays.consumers), dtype=np.uint32) + np.repeat(begins[op_of_rank] - offsets[:-1], counts)
    return offsets, rank[arrays.consumers[edges]]


def _offsets(counts: npt.ArrayLike) -> npt.NDArray[np.uint32]:
    return np.concatenate(([0], np.cumsum(counts))).astype(np.uint32)
