"""Links: what rings take beyond a replica alone, and how long all replicas together keep the links that they share.

A replica that is simulated alone has every link to itself. Two pipelines over the network of a host share it:

    host 0   gpu0 --\\          /-- gpu2   host 1
             gpu1 ---- network ---- gpu3

D devices, R replicas, P places."""

from dataclasses import dataclass, field

import numpy as np

from gdp.arrays import I64
from gdp.cluster import Cluster
from gdp.costs.collectives import exchange_times
from gdp.graph import Graph, Op, Tensor
from gdp.parallel.buckets import BUCKET_BYTES, MANY_REPLICAS, bucket_bytes_over
from gdp.parallel.layout import Layout
from gdp.parallel.rings import Rings, rings_over
from gdp.parallel.step import Step
from gdp.search.candidate import Arrangement
from gdp.search.layouts.arrangement import DeviceSpeeds
from gdp.search.layouts.replica_steps import Memo, PartFigures
from gdp.simulator.problem import Problem
from gdp.simulator.simulate import simulate


@dataclass(eq=False)
class RingTimes:
    """The time of the rings of an arrangement: one bucket is simulated, what is left is proportional."""

    cluster: Cluster
    machine: DeviceSpeeds
    _memo: Memo = field(default_factory=Memo)

    def beyond_ns(self, arrangement: Arrangement, figures: PartFigures, alone_ns: int) -> int:
        """Returns what rings take beyond the step `alone_ns` of a replica alone, in ns."""
        layout, num_places = arrangement.layout, arrangement.num_places
        if layout.data == 1:
            return 0
        slowest_ns = self._bucket_ns(arrangement, self.hosts(arrangement)[0])
        num_buckets = figures.gradient_bytes / num_places / BUCKET_BYTES
        total_ns = num_buckets * slowest_ns
        if layout.zero == 3:  # two gathers, of half a ring each, for every micro-batch
            total_ns *= (max(layout.microbatches) + 0.5) * 0.5
            return int(total_ns * min(total_ns / max(alone_ns, 1), 1))  # those that take less hide behind other blocks
        last_pass_ns = min(figures.backward_ns[d] for devices in arrangement.devices for d in devices) / num_places
        return int(max(total_ns - last_pass_ns, 0) + min(num_buckets, 1) * slowest_ns)

    def hosts(self, arrangement: Arrangement) -> list[tuple[int, ...] | None]:
        """Returns the hosts [R] of replicas for rings inside hosts and over them, and None for rings over all. The one
        in which a bucket is quickest comes first; there are only rings over all where hosts are no use."""
        hosts = self.machine.hosts_of(arrangement) if arrangement.layout.data > 1 else None
        if hosts is None or self.is_at_once(arrangement):
            return [None]
        if arrangement.layout.data > MANY_REPLICAS:  # a ring over all of R has R^2 hops
            return [hosts]
        return sorted((None, hosts), key=lambda hosts: self._bucket_ns(arrangement, hosts))

    def is_at_once(self, arrangement: Arrangement) -> bool:
        """Returns whether replicas exchange in one transfer each, not in hops."""
        layout, devices = arrangement.layout, arrangement.devices
        return bool(self._memo(("rings", devices), lambda: exchange_times(self.cluster, devices))) and layout.is_even

    def num_exchanging(self, arrangement: Arrangement, gradient_bytes: int) -> int:
        """Returns about how many ops exchange `gradient_bytes` between replicas."""
        layout = arrangement.layout
        if layout.data == 1:
            return 0
        hosts = self.machine.hosts_of(arrangement) if layout.data > MANY_REPLICAS else None
        num_hops = layout.data if self.is_at_once(arrangement) else Rings.of(layout.data, hosts=hosts).num_hops
        size = BUCKET_BYTES if layout.zero == 3 else bucket_bytes_over(layout.data, gradient_bytes, num_hops)
        num_rounds = layout.microbatches[0] if layout.zero == 3 else 1
        return num_hops * (gradient_bytes // size + arrangement.num_places) * num_rounds

    def _bucket_ns(self, arrangement: Arrangement, hosts: tuple[int, ...] | None) -> int:
        """Returns what a bucket takes in the rings of all places at once, when nothing else runs."""
        devices = arrangement.devices
        if hosts is None and len(devices) > MANY_REPLICAS and not self.is_at_once(arrangement):
            return self._large_bucket_ns(arrangement)

        def make() -> int:
            places = np.arange(arrangement.num_places)
            one, layout = _parameters(BUCKET_BYTES, len(places)), Layout((1,) * len(devices))
            rings = rings_over(self.cluster, devices, layout, hosts)
            step = Step.of(one, layout, places=places[one.groups], **rings)
            problem = Problem.build(step.graph, self.cluster)
            return simulate(problem, step.placement(one.groups, devices)).step_time_ns

        return self._memo(("bucket", devices, hosts), make)

    def _large_bucket_ns(self, arrangement: Arrangement) -> int:
        """Returns the same for one ring of many replicas, which has R^2 hops: R times the slowest one, twice."""
        grid = np.array(arrangement.devices)
        here, there = grid, np.roll(grid, -1, axis=0)
        chunk_bytes = -(-BUCKET_BYTES // len(grid))
        hop_ns = chunk_bytes * 1e9 / self.cluster.bytes_per_second[here, there] + self.cluster.latency_ns[here, there]
        return int(2 * (len(grid) - 1) * hop_ns.max())


def busiest_channel_ns(cluster: Cluster, arrangement: Arrangement, graph: Graph, places: I64) -> int:
    """Returns the time for which the passes of all micro-batches keep the busiest channel, in ns. `graph` is the step
    of one micro-batch, and `places` [N] are those of its ops in a replica."""
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


def _parameters(num_bytes: int, count: int) -> Graph:
    """Returns the step of `count` parameters whose passes take no time."""
    ops: list[Op] = []
    tensors: list[Tensor] = []
    for number in range(count):
        first = len(ops)
        ops += [
            Op(f"w{number}", "parameter", resident_bytes=num_bytes, group=number),
            Op(f"f{number}", "mm", phase="forward", group=number),
            Op(f"b{number}", "mm", phase="backward", group=number),
            Op(f"w{number}.update", "update", phase="update", group=number),
        ]
        tensors.append(Tensor(first, (first + 1, first + 2, first + 3), num_bytes, resident=True))
        tensors += [Tensor(first + 1, (first + 2,), 1), Tensor(first + 2, (first + 3,), num_bytes)]
    return Graph.build("rings", ops, tensors)
