"""Rings: exchanges between replicas, in chunks that go round.

Buckets are gradients of a replica, joined in the order in which backward makes them, as PyTorch's DDP does. A bucket
is cut into R chunks, and chunk k starts at position k of the ring. The sum of 3 replicas, chunk 0:

    position 0   ready ----.                    .---> copy ----.
    position 1             '---> add ----.      |              '---> copy
    position 2                           '---> add (the sum)

The other chunks do the same from positions 1 and 2 at the same time. A reduce-scatter ends with the sums, an all-gather
is the copies alone. Sums are made in the memory of the gradients: a hop takes memory where it arrives and nowhere else.
P. Patarasuk and X. Yuan, "Bandwidth optimal all-reduce algorithms for clusters of workstations", JPDC 2009.

Over hosts, rings inside each host sum and cut a bucket first; replicas of one rank in their hosts then form rings of
their own for the chunks; and chunks go round inside each host again. As many bytes move, few of them between hosts.

Alike cards on alike links, of which it is known what NCCL takes, exchange a bucket at once: each replica sends the next
one a tensor, or a large one in pieces, as long under way as the exchange is (gdp.costs.collectives).

Replicas are in the order with the fastest slowest hop, since all hops of a ring take turns together (a bottleneck
travelling salesman); the sum of all hops decides second."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import permutations
from typing import Any

import numpy as np
import numpy.typing as npt

from gdp.arrays import F64, I64, Bool, unique
from gdp.cluster import Cluster
from gdp.costs.collectives import ALL_GATHER, REDUCE_SCATTER, ExchangeTimes, exchange_times
from gdp.errors import InputError
from gdp.graph import Graph
from gdp.graph.accumulation import ELEMENT_BYTES
from gdp.graph.builder import GraphBuilder
from gdp.graph.copies import (
    EXCHANGE_END,
    EXCHANGE_START,
    HOST_RING_COPY,
    HOST_RING_END,
    HOST_RING_SUM,
    RING_COPY,
    RING_SUM,
    label_end,
)
from gdp.parallel.layout import Layout

READY, DONE = "ready", "done"  # in kinds
BUCKET_BYTES = 25 * 2**20  # `bucket_cap_mb` of torch.nn.parallel.DistributedDataParallel
FIRST_BUCKET_BYTES = 2**20  # torch.distributed._DEFAULT_FIRST_BUCKET_BYTES: its sum begins soon


MANY_REPLICAS = 64  # of more, buckets are larger: each takes hops in proportion to replicas times hosts
_MOST_HOPS = 250_000  # of all buckets then


def bucket_bytes_over(num_replicas: int, gradient_bytes: int, num_hops: int) -> int:
    """Returns the least size of buckets of `gradient_bytes` in all, which take `num_hops` each."""
    if num_replicas <= MANY_REPLICAS:
        return BUCKET_BYTES
    return max(BUCKET_BYTES, -(-gradient_bytes // max(_MOST_HOPS // num_hops, 1)))


@dataclass(frozen=True, slots=True)
class Gradient:
    """The gradient of a parameter, summed over the micro-batches of a replica."""

    tensor: int
    producer: int  # the op whose end makes the gradient complete
    updates: tuple[int, ...]  # the ops that wait for it
    num_bytes: int
    dtype: str


@dataclass(frozen=True, slots=True)
class Bucket:
    """Gradients that go round a ring together."""

    names: tuple[str, ...]  # of the first update that reads each gradient: the same in all replicas
    num_bytes: int
    dtype: str

    def updates(self, gradients: Mapping[str, Gradient]) -> list[int]:
        """Returns the ops that wait for the bucket, each once; `gradients` are those of a replica."""
        return list(dict.fromkeys(op for name in self.names for op in gradients[name].updates))


def gradients_of(graph: Graph, is_update: Bool) -> dict[str, Gradient]:
    """Returns the gradients by the name of the first update that reads each, in the order of their producers.
    `is_update` [N] are the updates and what follows them."""
    by_update = is_update[graph.consumers] & ~is_update[graph.producers[graph.edge_tensors]]
    is_source = ~np.isin(np.arange(graph.num_ops), graph.consumers)
    made = by_update & ~is_source[graph.producers[graph.edge_tensors]] & (graph.tensor_bytes[graph.edge_tensors] > 0)
    tensors = unique(graph.edge_tensors[made])
    tensors = tensors[np.argsort(graph.producers[tensors], kind="stable")]
    gradients: dict[str, Gradient] = {}
    for tensor in tensors.tolist():
        producer = int(graph.producers[tensor])
        updates = tuple(op for op in graph.consumers_of(tensor).tolist() if is_update[op])
        size = int(graph.tensor_bytes[tensor])
        name = graph.op_names[updates[0]]
        while name in gradients:  # an update that reads several
            name += "'"
        dtype = "float32" if graph.dtypes[producer] == "tf32" else graph.dtypes[producer]
        gradients[name] = Gradient(tensor, producer, updates, size, dtype)
    return gradients


def buckets_of(
    gradients: dict[str, Gradient], places: Sequence[int], bucket_bytes: int, first_bytes: int | None = None
) -> list[Bucket]:
    """Returns the buckets: one is full with `bucket_bytes`, the first of a place and type with `first_bytes`. `places`
    [ops] are equal for ops that are sure to share a device: no bucket crosses them, nor types of numbers."""
    buckets: list[Bucket] = []
    least = dict[tuple[int, str], int]()
    open_buckets: dict[tuple[int, str], tuple[list[str], int]] = {}
    for name, gradient in gradients.items():
        key = places[gradient.updates[0]], gradient.dtype
        names, size = open_buckets.pop(key, ([], 0))
        names.append(name)
        size += gradient.num_bytes
        if size >= least.setdefault(key, first_bytes or bucket_bytes):
            least[key] = bucket_bytes
            buckets.append(Bucket(tuple(names), size, gradient.dtype))
        else:
            open_buckets[key] = names, size
    return buckets + [Bucket(tuple(names), size, dtype) for (_, dtype), (names, size) in open_buckets.items()]


@dataclass(frozen=True, slots=True)
class Collective:
    """An exchange of R replicas: from an op `LABEL.ready` to an op `LABEL.done` of each."""

    exchange: str  # all_reduce, reduce_scatter or all_gather
    number: int  # among those of its kind
    num_bytes: int  # of the bucket, whole
    dtype: str
    phase: str

    @property
    def label(self) -> str:
        """The beginning of the names of its ops: `all_reduce.3`."""
        return f"{self.exchange}.{self.number}"

    def add_ends(self, builder: GraphBuilder, group: int, copied_bytes: tuple[int, int]) -> tuple[int, int]:
        """Adds the first and the last op of one replica, which copy so many bytes, to `builder`; returns their numbers.
        A copy reads and writes each byte."""
        first, last = (
            builder.add_ops(
                [f"{self.label}.{end}"],
                f"{self.exchange}.{end}",
                dtypes=self.dtype,
                phases=self.phase,
                roles=role,
                groups=group,
                bytes_accessed=2 * copied,
            )
            for end, role, copied in zip((READY, DONE), (EXCHANGE_START, EXCHANGE_END), copied_bytes, strict=True)
        )
        builder.set_origins(last, first)
        return int(first[0]), int(last[0])


@dataclass(frozen=True, slots=True)
class Rings:
    """The rings of R replicas: one over all, or rings inside hosts and rings over hosts."""

    levels: tuple[I64, ...]  # [rings, replicas in order] each; inner rings come first
    times: ExchangeTimes | None = None  # of exchanges at once, over one ring; None: in hops

    @property
    def num_hops(self) -> int:
        """The hops of a sum over all replicas: to an op that adds or copies, or, at once, to its end (less pieces)."""
        if self.times is not None:
            return self.levels[0].size
        return sum(2 * members.size * (members.shape[1] - 1) for members in self.levels)

    @classmethod
    def of(
        cls,
        num_replicas: int,
        order: Sequence[int] | None = None,
        hosts: Sequence[int] | None = None,
        times: ExchangeTimes | None = None,
    ) -> "Rings":
        """Returns one ring in the `order` [R] of replicas, by default as numbered; with `hosts` [R], rings over hosts.
        InputError where the hosts do not have as many replicas each."""
        ring = np.arange(num_replicas) if order is None else np.array(order, np.int64)
        if not np.array_equal(np.sort(ring), np.arange(num_replicas)):
            raise InputError(f"ring {ring.tolist()}: the replicas 0 to {num_replicas - 1} are expected, each once")
        if hosts is None:
            return cls((ring[None, :],), times)
        host_of = np.array(hosts, np.int64)[ring]
        sizes = Counter(host_of.tolist())
        if len(set(sizes.values())) != 1:
            raise InputError(
                f"rings over hosts: the hosts have {', '.join(map(str, sizes.values()))} replicas; as many on each are "
                "expected, or one ring over all"
            )
        inside = np.stack([ring[host_of == host] for host in sizes])
        return cls((inside, np.ascontiguousarray(inside.T)))


@dataclass(frozen=True, slots=True)
class Exchange:
    """An exchange under construction, of one micro-batch. `ready` and `done` [R] are the first and last ops of
    replicas, `groups` [R] those of these ops."""

    builder: GraphBuilder
    collective: Collective
    microbatch: int
    origin: int  # the start of the first micro-batch and replica
    ready: I64
    done: I64
    groups: I64
    waits: list[tuple[I64, I64]] = field(default_factory=list)  # ops and the ops that wait for them

    def add(self, step: str, receivers: I64, chunks: I64 | None = None, *, in_host: bool, **costs: int) -> I64:
        """Adds an op at each of `receivers` [G, n]; returns their numbers [G, n]."""
        replicas, within = receivers.reshape(-1), "host." if in_host and chunks is not None else ""
        middle = [""] * len(replicas) if chunks is None else [f".{chunk}" for chunk in chunks.reshape(-1).tolist()]
        names = [
            f"{self.collective.label}.{within}{step}{chunk}{label_end(self.microbatch, replica)}"
            for chunk, replica in zip(middle, replicas.tolist(), strict=True)
        ]
        own = {"dtypes": self.collective.dtype, "phases": self.collective.phase, "groups": self.groups[replicas]}
        columns = own | {"microbatches": self.microbatch, "replicas": replicas, "roles": _ROLES[step, in_host]}
        added = self.builder.add_ops(names, f"{self.collective.exchange}.{step}", **columns, **costs)
        self.builder.set_origins(added, np.full(len(added), self.origin))
        return added.reshape(receivers.shape)

    def hop(self, sources: I64, targets: I64, chunk_bytes: int) -> None:
        """Sends a chunk from each of `sources` [G, n] to each of `targets` [G, n]."""
        tensors = self.builder.add_tensors(sources.reshape(-1), chunk_bytes, is_resident=True)
        self.builder.add_edges(tensors, targets.reshape(-1))

    def wait(self, sources: I64, targets: I64) -> None:
        """Makes `targets` wait for `sources`."""
        self.waits.append((sources.reshape(-1), targets.reshape(-1)))

    def reduce(self, members: I64, start: I64, chunk_bytes: int, in_host: bool) -> I64:
        """Sums chunks along rings `members` [G, n]; returns the op [R] after which each replica has the sum of one."""
        count = members.shape[1]
        chunks = np.broadcast_to(np.arange(count), members.shape)
        flops = -(-chunk_bytes // ELEMENT_BYTES.get(self.collective.dtype, 4))
        last, receivers = start[members], members
        for _ in range(1, count):
            receivers = np.roll(receivers, -1, axis=1)
            sums = self.add("add", receivers, chunks, in_host=in_host, flops=flops, bytes_accessed=3 * chunk_bytes)
            self.hop(last, sums, chunk_bytes)
            self.wait(start[receivers], sums)
            last = sums
        final = np.empty_like(start)
        final[receivers] = last
        return final

    def gather(self, members: I64, start: I64, chunk_bytes: int, in_host: bool) -> list[tuple[I64, I64]]:
        """Sends the chunk that each replica has after `start` [R] along rings `members` [G, n]. Returns ops after which
        chunks are there, and the replicas where they are: for every replica all of its chunks."""
        count = members.shape[1]
        chunks = np.broadcast_to((np.arange(count) + 1) % count, members.shape)  # as `reduce` leaves them
        last, receivers = start[members], members
        arrived = [(last, receivers)]
        for _ in range(1, count):
            receivers = np.roll(receivers, -1, axis=1)
            copies = self.add("copy", receivers, chunks, in_host=in_host)
            self.hop(last, copies, chunk_bytes)
            last = copies
            arrived.append((last, receivers))
        return arrived

    def build(self, rings: Rings) -> None:
        """Adds what is between the first and the last ops."""
        if rings.times is None or rings.times.in_hops:
            self._in_hops(rings)
        else:
            self._at_once(rings.levels[0][0], rings.times)

    def _at_once(self, ring: I64, times: ExchangeTimes) -> None:
        """Sends one tensor to each replica, which is in memory there until the end. While parameters for a block are
        gathered, the tensor and another one are the memory that is to hold them. What is more than that, or more than a
        piece of another exchange, is sent before in pieces, each to an op that frees it, but not to many replicas."""
        collective, ready, done, builder = self.collective, self.ready[ring], self.done[ring], self.builder
        sizes = times.received_bytes(collective.exchange, collective.num_bytes)
        senders = np.array([sender for sender, _, _ in times.legs])
        begins = np.where(sizes > 0, ready[senders], done[senders])
        is_for_block = collective.exchange == ALL_GATHER and collective.phase != "update"
        most = collective.num_bytes if is_for_block else _PIECE_BYTES
        held = np.minimum(sizes, most) if len(ring) <= _MOST_ORDERED else sizes
        passing = np.flatnonzero(sizes > held)
        num_pieces = -(-int((sizes - held).max()) // _PIECE_BYTES)
        for piece in range(num_pieces):
            part = [(sizes - held)[passing] * end // num_pieces for end in (piece, piece + 1)]
            copies = self.add("piece", ring[passing], np.full(len(passing), piece), in_host=False)
            builder.add_edges(builder.add_tensors(begins[passing], part[1] - part[0], is_resident=True), copies)
            builder.control(copies, done[passing])
        builder.add_edges(builder.add_tensors(begins, held, is_resident=True), done)
        rest = np.maximum(collective.num_bytes - held, 0) if is_for_block else np.zeros_like(held)
        builder.add_edges(builder.add_tensors(ready, rest), done)

    def _in_hops(self, rings: Rings) -> None:
        levels, sizes = rings.levels, [self.collective.num_bytes]
        for members in levels:
            sizes.append(-(-sizes[-1] // members.shape[1]))  # the chunks of a level are cut at the next
        in_host = [len(levels) == 2, False][: len(levels)]
        start = self.ready
        if self.collective.exchange != ALL_GATHER:
            for members, size, is_inner in zip(levels, sizes[1:], in_host, strict=True):
                start = self.reduce(members, start, size, is_inner)
        if self.collective.exchange == REDUCE_SCATTER:
            self.wait(start, self.done)
        else:
            for level in reversed(range(len(levels))):
                arrived = self.gather(levels[level], start, sizes[level + 1], in_host[level])
                start = self.add("joined", np.arange(len(self.ready)), in_host=True) if level else self.done
                for ops, replicas in arrived:
                    self.wait(ops, start[replicas])
        sources, targets = (np.concatenate(ops) for ops in zip(*self.waits, strict=True))
        self.builder.control(sources, targets)


_ROLES = {("add", False): RING_SUM, ("copy", False): RING_COPY, ("add", True): HOST_RING_SUM}
_ROLES |= {("piece", False): RING_COPY}
_ROLES |= {("copy", True): HOST_RING_COPY, ("joined", True): HOST_RING_END}


_PIECE_BYTES = 2**28  # untuned: an exchange at once has ten of the largest usual buckets or one piece in memory
_MOST_EXACT = 8  # replicas: 7! = 5,040 orders
_MOST_ORDERED = 64  # replicas: of more, which are numbered host by host, an order takes minutes to improve


def rings_over(
    cluster: Cluster, devices: Sequence[Sequence[int]] | I64, layout: Layout, hosts: Sequence[int] | None = None
) -> Mapping[str, Any]:
    """Returns how replicas on `devices` [R, P] exchange, as `Step.of` takes it: at once where links tell their times.
    Else they exchange over rings, with `hosts` [R] inside hosts and over them."""
    known = exchange_times(cluster, devices) if layout.is_even else None
    if known is None:
        return {"ring": ring_over(cluster, devices), "hosts": hosts}
    order, times = known
    return {"ring": None if list(order) == list(range(len(order))) else order, "times": times}


def ring_over(cluster: Cluster, devices: Sequence[Sequence[int]] | I64) -> tuple[int, ...] | None:
    """Returns the order [R] of replicas on `devices` [R, P] in rings; None where the order of their numbers is as good.
    A hop takes a chunk of a bucket over the slowest of P routes. Many replicas stay in the order of their numbers."""
    grid = np.array(devices, np.int64)
    count = len(grid)
    if count <= 2 or count > _MOST_ORDERED:
        return None
    rates = np.where(cluster.bytes_per_second > 0, cluster.bytes_per_second, np.inf)
    hop_ns = cluster.latency_ns + BUCKET_BYTES / count * 1e9 / rates
    slowest_ns = np.stack([hop_ns[np.ix_(place, place)] for place in grid.T]).max(axis=0)
    order = ring_order(slowest_ns)
    return tuple(order.tolist()) if _cost(slowest_ns, order) < _cost(slowest_ns, np.arange(count)) else None


def ring_order(seconds: npt.ArrayLike) -> I64:
    """Returns the order [R] of replicas, beginning with 0. `seconds` [R, R] is the time of a hop from one replica to
    another; both directions may differ. Up to 8 replicas all orders are compared. Beyond, each replica is followed by
    the nearest one that is left, from every start; in the best of these orders parts are turned round and replicas
    moved as long as that helps."""
    hops = np.array(seconds, np.float64)
    count = len(hops)
    if count <= 2:
        return np.arange(count)
    if count <= _MOST_EXACT:
        orders = np.array([(0, *rest) for rest in permutations(range(1, count))])
        times = hops[orders, np.roll(orders, -1, axis=1)]
        return np.asarray(orders[np.lexsort((times.sum(axis=1), times.max(axis=1)))[0]], np.int64)
    nearest = min((_nearest(hops, start) for start in range(count)), key=lambda order: _cost(hops, order))
    best = _improved(hops, nearest)
    return np.roll(best, -int(np.flatnonzero(best == 0)[0]))


def _cost(hops: F64, order: I64) -> tuple[float, float]:
    """Returns the slowest hop of a ring and the sum of all."""
    times = hops[order, np.roll(order, -1)]
    return float(times.max()), float(times.sum())


def _nearest(hops: F64, start: int) -> I64:
    """Returns the order in which each replica is followed by the nearest one that is left."""
    order, left = [start], set(range(len(hops))) - {start}
    while left:
        following = min(left, key=lambda replica: (hops[order[-1], replica], replica))
        order.append(following)
        left.remove(following)
    return np.array(order, np.int64)


def _improved(hops: F64, order: I64) -> I64:
    """Returns `order` after all changes that help: parts turned round (2-opt), single replicas moved (or-opt)."""
    count, cost = len(order), _cost(hops, order)
    helped = True
    while helped:
        helped = False
        for first in range(count - 1):
            for last in range(first + 1, count):
                inner = order[first : last + 1]
                for changed in (inner[::-1], np.roll(inner, 1), np.roll(inner, -1)):
                    trial = np.concatenate((order[:first], changed, order[last + 1 :]))
                    trial_cost = _cost(hops, trial)
                    if trial_cost < cost:
                        order, cost, helped = trial, trial_cost, True
                        break
    return order
