"""Tasks: the problems that a policy is trained on, drawn from graphs and clusters. A task is a function of (seed,
update, index) alone, so a resumed run does not change it. Sources, pairs of a graph and a cluster, take turns in a
random order, a new one for each round. Some tasks are the source as it is; the others vary devices, links, memory and
batch size, on which a policy must not rely. N ops, D devices."""

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from itertools import permutations
from typing import Any

import numpy as np

from gdp.arrays import I64, Bool, mask
from gdp.bounds.lower_bound import lower_bound
from gdp.cluster import WORD_DEVICES, Cluster, Route
from gdp.cluster.catalogue import KINDS, DeviceKind
from gdp.errors import InputError
from gdp.graph import Graph
from gdp.policy.settings import DRAWN
from gdp.simulator.problem import Problem
from gdp.simulator.simulate import evaluate
from gdp.units.reduction import reduce

_MAX_CACHED_OPS = 1_000_000  # of reduced problems that are kept; about 1 kB an op
_NUM_DRAWS = 8  # of clusters, until all ops can run on one
_ORDER = 1  # spawn key: the order of sources is drawn apart


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskConfig:
    """Variation of tasks from their sources."""

    random_share: float = 0.0  # of tasks that are varied; the others are the source as it is
    min_devices: int = 2  # one leaves nothing to choose
    max_devices: int = 16
    batch_factors: tuple[float, ...] = (0.25, 0.5, 1.0, 2.0, 4.0)
    tight_share: float = 0.5  # of varied tasks whose memory is set to `room`
    room: tuple[float, float] = (1.5, 4.0)  # all devices' memory, in units of the step's need on one device

    def __post_init__(self) -> None:
        for name in ("random_share", "tight_share"):
            if not 0 <= getattr(self, name) <= 1:
                raise InputError(f"{name} is {getattr(self, name)}; a share from 0 to 1 is expected")
        if not 1 <= self.min_devices <= self.max_devices <= WORD_DEVICES:
            raise InputError(
                f"min_devices is {self.min_devices} and max_devices {self.max_devices}; "
                f"1 to {WORD_DEVICES} in this order are expected"
            )
        if not self.batch_factors or min(self.batch_factors) <= 0:
            raise InputError(f"batch_factors is {self.batch_factors}; numbers above 0 are expected")
        if not 1 <= self.room[0] <= self.room[1]:
            raise InputError(f"room is {self.room}; two numbers of at least 1, the lower one first, are expected")


@dataclass(frozen=True, eq=False)
class TaskSource:
    """A graph on a cluster, from which tasks are made."""

    graph: Graph
    cluster: Cluster

    def check_memory(self) -> None:
        """Raises InputError for parameters that alone exceed the cluster's memory."""
        held_bytes = sum(self.graph.resident_bytes.tolist())
        memory = sum(device.memory_bytes for device in self.cluster.devices)
        if held_bytes > memory:
            raise InputError(
                f"graph {self.graph.name!r} holds {held_bytes} bytes for the whole step, cluster "
                f"{self.cluster.name!r} has {memory}; train on more or larger devices"
            )


@dataclass(frozen=True, eq=False)
class TrainingTask:
    """A problem to place, reduced (`gdp.units.reduction`)."""

    problem: Problem
    source: int  # number of the source

    @cached_property
    def reference_ns(self) -> int:
        """The reference of rewards: a lower bound on the step time."""
        return lower_bound(self.problem)


class Tasks:
    """The tasks of `sources`. Raises InputError for parameters that alone exceed a cluster's memory."""

    def __init__(self, sources: Sequence[TaskSource], config: TaskConfig, seed: int) -> None:
        if not sources:
            raise InputError("there are no graphs to train on; name at least one")
        if config.random_share < 1:
            for source in sources:
                source.check_memory()
        self.sources, self.config, self.seed = tuple(sources), config, seed
        self.num_sources = len(self.sources)
        self._recent: OrderedDict[int, TrainingTask] = OrderedDict()

    def to_document(self) -> dict[str, Any]:
        """Returns seed, configuration and sources, on which tasks depend, for a manifest."""
        pairs = [{"graph": x.graph.fingerprint, "cluster": x.cluster.fingerprint} for x in self.sources]
        return {"seed": self.seed, "config": asdict(self.config), "sources": pairs}

    def inputs(self) -> dict[str, Any]:
        """Returns the names of graphs and clusters, for a manifest."""
        graphs = {source.graph.fingerprint: source.graph for source in self.sources}
        clusters = {source.cluster.fingerprint: source.cluster for source in self.sources}
        listed = [{"name": x.name, "num_ops": x.num_ops, "fingerprint": print_} for print_, x in graphs.items()]
        machines = [{"name": x.name, "fingerprint": print_} for print_, x in clusters.items()]
        return {"graphs": listed, "clusters": machines}

    def draw(self, update: int, index: int, num_tasks: int) -> tuple[TrainingTask, np.random.Generator]:
        """Returns (task number `index` of the `num_tasks` of `update`, a generator for further draws)."""
        for_task, for_policy = map(np.random.default_rng, np.random.SeedSequence([self.seed, update, index]).spawn(2))
        number = self._source_number(update * num_tasks + index)
        if for_task.random() < self.config.random_share:
            return self.vary(number, for_task), for_policy
        return self.unvaried(number), for_policy

    def unvaried(self, number: int) -> TrainingTask:
        """Returns the task of source `number` as it is."""
        if number not in self._recent:
            self._recent[number] = self.own(number)
            over = sum(task.problem.num_ops for task in self._recent.values()) - _MAX_CACHED_OPS
            while len(self._recent) > 1 and over > 0:
                over -= self._recent.popitem(last=False)[1].problem.num_ops
        self._recent.move_to_end(number)
        return self._recent[number]

    def graph(self, number: int) -> Graph:
        """Returns the graph of source `number`."""
        return self.sources[number].graph

    def own(self, number: int) -> TrainingTask:
        """Makes the task of source `number` as it is."""
        source = self.sources[number]
        return TrainingTask(reduce(Problem.build(source.graph, source.cluster)).problem, number)

    def _source_number(self, position: int) -> int:
        turn, position = divmod(position, self.num_sources)
        order = np.random.SeedSequence([self.seed, turn], spawn_key=(_ORDER,))
        return int(np.random.default_rng(order).permutation(self.num_sources)[position])

    def vary(self, number: int, rng: np.random.Generator) -> TrainingTask:
        """Draws a task from source `number`; it as it is where its ops run on none of the clusters drawn."""
        graph, factor = self.graph(number), float(rng.choice(self.config.batch_factors))
        for _ in range(_NUM_DRAWS):
            cluster = draw_cluster(rng, self.config.min_devices, self.config.max_devices)
            try:
                problem = reduce(Problem.build(self.step(graph, factor, cluster, rng), cluster)).problem
            except InputError:  # an op with measured times that cannot run on any of these
                continue
            return TrainingTask(self._set_memory(problem, rng), number)
        return self.unvaried(number)

    def step(self, graph: Graph, factor: float, cluster: Cluster, rng: np.random.Generator) -> Graph:
        """Returns the step of a batch `factor` times as large."""
        return scale_batch(graph, factor)

    def _set_memory(self, problem: Problem, rng: np.random.Generator) -> Problem:
        """Returns `problem` with all devices' memory scaled alike: to a drawn room, or up to a placement's need."""
        least_room = self.config.room[0]
        memory = problem.memory_limit_bytes.astype(np.float64)
        needed_bytes, largest_bytes = memory_needs(problem)
        is_tight, room = rng.random() < self.config.tight_share, np.exp(rng.uniform(*np.log(self.config.room)))
        factor = room * needed_bytes / memory.sum() if is_tight else 1.0
        factor = max(factor, least_room * needed_bytes / memory.sum(), least_room * largest_bytes / memory.max())
        limits = np.ceil(memory * factor).astype(np.int64)
        pairs = zip(problem.cluster.devices, limits.tolist(), strict=True)
        devices = tuple(replace(device, memory_bytes=limit) for device, limit in pairs)
        return replace(problem, cluster=replace(problem.cluster, devices=devices), memory_limit_bytes=limits)


def memory_needs(problem: Problem) -> tuple[int, int]:
    """Returns (peak bytes with as many ops as possible on one device, bytes of the largest group of ops)."""
    together = np.flatnonzero(problem.allowed.all(axis=0))
    placement = np.full(problem.num_ops, together[0]) if len(together) else problem.allowed.argmax(axis=1)
    _, peaks = evaluate(problem, placement)
    held_bytes = problem.graph.resident_bytes + problem.simulator.arrays.memory.alloc_bytes
    return int(peaks.sum()), int(np.bincount(problem.graph.group_index, held_bytes).max())


def scale_batch(graph: Graph, factor: float) -> Graph:
    """Returns `graph` as if its batch were `factor` times as large. Tensors grow with the batch, except resident ones,
    outputs of updates, and gradients: in the backward pass, tensors of the size of a parameter. Work and measured times
    of an op grow if it reads or makes a growing tensor; weights that it reads besides are neglected."""
    if factor == 1:
        return graph
    is_backward, is_update = (np.array([phase == name for phase in graph.phases]) for name in ("backward", "update"))
    is_parameter = graph.is_resident[graph.base]
    is_gradient = is_backward[graph.producers] & np.isin(graph.tensor_bytes, graph.tensor_bytes[is_parameter])
    tensor_grows = (graph.tensor_bytes > 0) & ~is_parameter & ~is_gradient & ~is_update[graph.producers]
    op_grows = mask(graph.producers[tensor_grows], graph.num_ops)
    op_grows[graph.consumers[tensor_grows[graph.edge_tensors]]] = True
    op_grows &= ~is_update
    return replace(
        graph,
        flops=_scaled(graph.flops, op_grows, factor),
        bytes_accessed=_scaled(graph.bytes_accessed, op_grows, factor),
        tensor_bytes=_scaled(graph.tensor_bytes, tensor_grows, factor),
        times_ns=tuple(
            {where: round(time_ns * factor) if time_ns > 0 else time_ns for where, time_ns in times.items()}
            if times and grows
            else times
            for times, grows in zip(graph.times_ns, op_grows.tolist(), strict=True)
        ),
    )


def _scaled(amounts: I64, grows: Bool, factor: float) -> I64:
    """Returns `amounts` times `factor` where they grow; positive ones stay positive."""
    scaled = np.maximum(np.rint(amounts * factor), 1).astype(np.int64)
    return np.where(grows & (amounts > 0), scaled, amounts)


def draw_cluster(rng: np.random.Generator, min_devices: int, max_devices: int) -> Cluster:
    """Draws a cluster of `min_devices` to `max_devices` devices, small ones as often as large ones (log-uniform).
    Kinds, links and their inequality are drawn from ranges a little wider than those of `gdp.cluster.catalogue`. Half
    of all clusters are of one kind; two in five have several hosts. Within a host devices share nothing but their own
    ports, nothing at all, or one bus."""
    num_devices = min(int(_log_uniform(rng, (min_devices, max_devices + 1))), max_devices)
    names = rng.choice(sorted(KINDS), size=min(int(rng.geometric(0.5)), DRAWN.most_kinds), replace=False).tolist()
    kinds = {name: _vary(KINDS[name], rng) for name in names}
    kind_of = sorted(rng.choice(names, size=num_devices).tolist(), key=names.index)
    devices = [kinds[name].device(f"dev{number}", name) for number, name in enumerate(kind_of)]
    num_hosts = min(int(rng.integers(2, DRAWN.most_hosts + 1)), num_devices) if rng.random() < DRAWN.hosts_share else 1
    host_of = np.arange(num_devices) * num_hosts // num_devices
    return Cluster.build(f"random-{num_devices}", devices, _routes(rng, host_of.tolist()))


def _vary(kind: DeviceKind, rng: np.random.Generator) -> DeviceKind:
    compute, bandwidth = _log_uniform(rng, DRAWN.speed), _log_uniform(rng, DRAWN.speed)
    rates = {dtype: round(rate * compute) for dtype, rate in kind.flops_per_second.items()}
    memory_bytes_per_second = round(kind.memory_bytes_per_second * bandwidth)
    return replace(kind, flops_per_second=rates, memory_bytes_per_second=memory_bytes_per_second)


def _routes(rng: np.random.Generator, host_of: list[int]) -> dict[tuple[int, int], Route]:
    """Draws the route of every ordered pair: within a host by its wiring, between hosts also over network cards."""
    wiring = DRAWN.wiring[int(rng.integers(len(DRAWN.wiring)))]
    local_rate, local_ns = _log_uniform(rng, DRAWN.link_bytes_per_second), _log_uniform(rng, DRAWN.link_latency_ns)
    rates, latencies_ns = DRAWN.network_bytes_per_second, DRAWN.network_latency_ns
    network_rate, network_ns = _log_uniform(rng, rates), _log_uniform(rng, latencies_ns)
    routes = {}
    for source, target in permutations(range(len(host_of)), 2):
        a, b = host_of[source], host_of[target]
        rate, latency_ns = local_rate, local_ns
        if a != b:
            rate, latency_ns = min(local_rate, network_rate), local_ns + network_ns
            channels = [f"host{a}.net.out", f"host{b}.net.in"]
        elif wiring == "pair":
            channels = [f"dev{source}->dev{target}"]
        else:
            channels = []
        if wiring == "port":
            channels += [f"dev{source}.out", f"dev{target}.in"]
        elif wiring == "bus":
            channels += sorted({f"host{a}.bus", f"host{b}.bus"})
        routes[source, target] = Route(round(latency_ns), round(rate), tuple(channels))
    return routes


def _log_uniform(rng: np.random.Generator, bounds: tuple[float, float]) -> float:
    return float(np.exp(rng.uniform(np.log(bounds[0]), np.log(bounds[1]))))
