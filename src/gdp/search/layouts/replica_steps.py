"""One replica: its step with a few micro-batches, simulated alone, and sums over its ops. N ops of one micro-batch, D
devices, P places of a replica.

Such a replica has every link to itself. Two pipelines over the network of a host share it, so links are counted beside
it: what rings take beyond a replica alone, and how long all replicas together keep the links that they share.

    host 0   gpu0 --\\          /-- gpu2   host 1
             gpu1 ---- network ---- gpu3"""

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field, replace
from itertools import product
from typing import Any, TypeVar

import numpy as np

from gdp.arrays import I64, Bool, unique
from gdp.budget import Clock, Effort
from gdp.cluster import Cluster
from gdp.cluster.changes import only
from gdp.costs.collectives import exchange_times
from gdp.costs.hosts import loads_ns
from gdp.graph import Graph, Op, Tensor
from gdp.graph.accumulation import once_ops
from gdp.graph.copies import HOST_COPY
from gdp.graph.interpolation import have_same_ops
from gdp.graph.microbatches import shared_ops
from gdp.parallel.held_state import HeldState
from gdp.parallel.layout import AUTO, NONE, Layout
from gdp.parallel.recompute import Recomputation, blocks_to_recompute
from gdp.parallel.replica_step import most_gathered_bytes
from gdp.parallel.rings import BUCKET_BYTES, MANY_REPLICAS, Rings, bucket_bytes_over, gradients_of, rings_over
from gdp.parallel.step import Step, with_waits
from gdp.search.batch_parts import Parts
from gdp.search.candidate import Arrangement, Figures
from gdp.search.layouts.arrangement import DeviceSpeeds
from gdp.search.layouts.dispatch import levels_of, simulate_1f1b, stages_of
from gdp.search.settings import Settings
from gdp.simulator.constraints import Constraints
from gdp.simulator.problem import Placement, Problem
from gdp.simulator.simulate import Simulation, simulate

_T = TypeVar("_T")


class Memo:
    """Keeps what was made, by a key that begins with its kind."""

    def __init__(self) -> None:
        self._made: dict[Hashable, Any] = {}

    def __call__(self, key: Hashable, make: Callable[[], _T]) -> _T:
        """Returns what `make` made when this key was first asked for."""
        if key not in self._made:
            self._made[key] = make()
        answer: _T = self._made[key]
        return answer


@dataclass(frozen=True, eq=False)
class PartFigures:
    """Sums over the ops of one micro-batch [N] on each device [D] or its host, in ns, and over parameters, in bytes."""

    once_ns: I64  # [D] updates
    backward_ns: I64  # [D]
    each_ns: I64  # [D] what is done for every micro-batch, the backward pass too, but for sums over a group's ranks
    gradient_bytes: int
    state_bytes: int  # of the optimizer
    parameter_bytes: int
    frozen_bytes: int  # of those that no update changes
    resident_bytes: int  # of these two, and of buffers
    kept_bytes: int  # activations, which the backward pass reads

    @classmethod
    def of(cls, graph: Graph, cluster: Cluster) -> "PartFigures":
        """Returns the sums of the step `graph`."""
        held = HeldState.of(graph)
        is_update = held.is_late
        is_each = ~np.logical_or(*once_ops(graph))
        is_backward = graph.is_in_phase("backward") & ~is_update
        once_ns, backward_ns, each_ns = loads_ns(graph, cluster, is_update, is_backward, is_each)
        gradients = gradients_of(graph, is_update)
        parameter_bytes = int(held.own_bytes.sum())
        is_trained = np.isin(graph.groups, graph.groups[is_update & (graph.groups >= 0)])
        return cls(
            once_ns=once_ns,
            backward_ns=backward_ns,
            each_ns=each_ns,
            gradient_bytes=sum(gradient.num_bytes for gradient in gradients.values()),
            state_bytes=int(graph.resident_bytes[held.is_parameter | held.is_state].sum()) - parameter_bytes,
            parameter_bytes=parameter_bytes,
            frozen_bytes=int(held.own_bytes[~is_trained].sum()),
            resident_bytes=int(graph.resident_bytes.sum()),
            kept_bytes=_kept_bytes(graph, is_backward),
        )


def _kept_bytes(graph: Graph, is_backward: Bool) -> int:
    """Returns the bytes of forward results on cards that ops of the backward pass [N] read."""
    is_forward = graph.is_in_phase("forward") & ~graph.is_in_role(HOST_COPY)
    is_read = is_forward[graph.producers[graph.edge_tensors]] & is_backward[graph.consumers]
    tensors = unique(graph.base[graph.edge_tensors[is_read]])
    return int(graph.tensor_bytes[tensors[~graph.is_resident[tensors]]].sum())


def with_gradients_cut(graph: Graph, count: int) -> Graph:
    """Returns the step with gradients of a `count`-th of their bytes: one replica's chunks, when the rest is sent."""
    if count == 1:
        return graph
    gradients = [gradient.tensor for gradient in gradients_of(graph, shared_ops(graph)[1]).values()]
    sizes = graph.tensor_bytes.copy()
    sizes[gradients] = -(-sizes[gradients] // count)
    return replace(graph, tensor_bytes=sizes)


@dataclass(eq=False)
class ReplicaSteps:
    """Cuts and simulates the step of one replica alone, and keeps what several arrangements have in common."""

    parts: Parts
    cluster: Cluster
    machine: DeviceSpeeds
    limits_bytes: I64  # [D] the memory that constraints leave
    settings: Settings
    effort: Effort
    clock: Clock | None = None
    _memo: Memo = field(default_factory=Memo)
    _recomputations: dict[str | tuple[str, ...], list[tuple[Graph, Recomputation]]] = field(default_factory=dict)

    def simulate(
        self, arrangement: Arrangement, replica: int, places: I64, cpu: int | None = None
    ) -> tuple[Simulation, I64]:
        """Returns a replica's step with a few micro-batches, and what one more takes in each of its places [P]. In the
        simulation the `cpu` that its activations go to comes after the P places."""
        layout, own = arrangement.layout, arrangement.devices[replica]
        few = self.num_seen(layout, layout.microbatches[replica], len(own))
        devices = own if cpu is None else (*own, cpu)
        kinds = tuple(int(self.machine.kinds[device]) for device in devices)
        is_cut = layout.zero == 3 or (layout.zero == 2 and layout.microbatches[replica] == 1)
        share = layout.data if is_cut else 1  # replicas that share gradients when the last micro-batch is done

        def make() -> tuple[Simulation, I64]:
            with self.effort.estimate.measured(few * self.parts.rough(layout.num_parts).num_ops, self.clock):
                step = self._step(layout, few, share)
                graph = step.graph if layout.stages is None else with_waits(step.graph, places[step.origin])
                problem = self.alone(graph, devices)
                placement = step.placement(places, [range(len(own))], None if cpu is None else [len(own)])
                in_stages = is_in_stages(self.parts.rough(layout.num_parts), places, len(own))
                best = _best_alone(problem, step, placement, in_stages=in_stages)
                is_once = np.logical_or(*once_ops(step.graph))
                loads_ns = [
                    np.bincount(
                        placement, np.where(is_once, 0, times[np.arange(len(placement)), placement]), len(devices)
                    )
                    for times in (problem.op_time_ns, problem.host_time_ns)
                ]
            return best, np.asarray(np.max(loads_ns, axis=0)[: len(own)] / few, np.int64)

        is_captured = self.parts.is_captured(layout.num_parts)
        cut = layout.num_parts, is_captured, layout.recompute, layout.offload, layout.stages
        return self._memo(("replica", *cut, kinds, few, share, places.tobytes()), make)

    def num_seen(self, layout: Layout, count: int, num_places: int) -> int:
        """Returns the number of micro-batches of a replica to simulate, of `count`."""
        enough = max(self.settings.large.searched_ops // self.parts.rough(layout.num_parts).num_ops, 1)
        return min(count, self.settings.layouts.seen_microbatches * num_places, enough)

    def figures(self, layout: Layout) -> PartFigures:
        """Returns sums over one micro-batch of `layout`; with recompute=auto, of one that recomputes nothing."""
        recompute = NONE if layout.recompute == AUTO else layout.recompute

        def make() -> PartFigures:
            graph = self._step(replace(layout, recompute=recompute, offload=NONE), 1).graph
            return PartFigures.of(graph, self.cluster)

        return self._memo(("figures", layout.num_parts, recompute), make)

    def gathered_bytes(self, layout: Layout) -> int:
        """Returns what a replica holds of other replicas' parameters and gradients at once, at most."""
        if layout.zero < 3:
            return 0
        most = self._memo(("gathered",), lambda: most_gathered_bytes(self.parts.exact(1)))
        return most * (layout.data - 1) // layout.data

    def alone(self, graph: Graph, devices: Sequence[int]) -> Problem:
        """Returns the problem of placing `graph` on `devices`, with the memory that constraints leave there."""
        limits = {self.cluster.devices[d].name: int(self.limits_bytes[d]) for d in devices}
        return Problem.build(graph, only(self.cluster, devices), Constraints(max_memory_bytes=limits))

    def _step(self, layout: Layout, count: int, share: int = 1) -> Step:
        """Returns a replica's step with `count` micro-batches; cut from captured ones only, but for offload. Which
        activations are large enough to be sent away depends on the number of samples. A replica keeps one of `share`
        chunks of each gradient."""
        if layout.offload != NONE:
            part = with_gradients_cut(self.parts.rough(layout.num_parts), share)
            return Step.of(part, Layout((count,), offload=layout.offload))
        made: list[Step] = []

        def graph_of(num_parts: int) -> Graph:
            def make() -> Step:
                part = with_gradients_cut(self._recomputed(num_parts, layout.recompute), share)
                alone = Layout((count,), recompute=layout.recompute)
                return Step.of(self.parts.exact(num_parts), alone, part=part)

            made.append(self._memo(("step", num_parts, count, layout.recompute, share), make))
            return made[-1].graph

        graph = self.parts.between(layout.num_parts, graph_of)
        return replace(made[0], graph=graph)

    def _recomputed(self, num_parts: int, modules: str | tuple[str, ...]) -> Graph:
        """Returns the captured step of one of `num_parts` with blocks recomputed. What is copied is found once for all
        steps with the same ops."""
        graph = self.parts.exact(num_parts)
        if modules == NONE:
            return graph
        for given, known in self._recomputations.setdefault(modules, []):
            if given is graph or have_same_ops(given, graph):
                return known.of_other_sizes(graph)
        found = Recomputation.of(blocks_to_recompute(graph, modules))
        self._recomputations[modules].append((graph, found))
        return found.graph


def is_in_stages(graph: Graph, places: I64, num_stages: int) -> bool:
    """Returns whether `places` [N] are stages: all are used, and forward tensors never go to an earlier one."""
    is_forward = graph.is_in_phase("forward")
    sources, targets = graph.producers[graph.edge_tensors], graph.consumers
    is_passed = is_forward[sources] & is_forward[targets]
    is_used = len(unique(places[is_forward])) == num_stages
    return is_used and bool((places[sources] <= places[targets])[is_passed].all())


def _best_alone(problem: Problem, step: Step, placement: Placement, *, in_stages: bool) -> Simulation:
    """Returns the step of a replica alone in the best of all orders of its micro-batches. With `in_stages`, a step that
    lacks memory is tried in the published 1F1B too, which is slow for other placements. On one device orders differ in
    memory only, and so does that of the program, which `best_dispatch` prefers."""
    is_one_device = len(unique(placement)) == 1
    levels = levels_of(problem, step, placement) if is_one_device else [problem.b_level_ns]
    found: list[Simulation] = []
    for order, level in product(problem.orders, levels):
        found.append(simulate(problem, placement, priority=problem.priority(order, level)))
        if is_one_device and not found[-1].missing_bytes.any():
            return found[-1]
    best = min(found, key=Figures.of)
    if not in_stages or is_one_device or not best.missing_bytes.any():
        return best
    published = simulate_1f1b(problem, placement, stages_of(step, placement), step.replica, [problem.b_level_ns])
    return min(best, published, key=Figures.of)


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
            num_passes = max(layout.microbatches)
            gathered = num_passes * (1 + figures.frozen_bytes / max(figures.gradient_bytes, 1))
            total_ns *= (gathered + 0.5) * 0.5
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
            rings = rings_over(self.cluster, devices, arrangement.layout, hosts)
            step = Step.of(one, layout, places=places[one.groups], **rings)
            problem = Problem.build(step.graph, self.cluster)
            return simulate(problem, step.placement(one.groups, devices)).step_time_ns

        return self._memo(("bucket", devices, hosts, arrangement.layout.is_even), make)

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
    tensors, targets = np.divmod(unique(tensors * num_places + targets), num_places)  # once to each place
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
