"""Batches in flight: the layout that serves them fastest, as replicas, as a pipeline, or as replicas of pipelines.

    4 devices, 8 batches in flight     data=4   [0] [1] [2] [3]    2 in flight on each
                                       data=2   [0 1] [2 3]        4 in flight on each pair
                                       data=1   [0 1 2 3]          8 in flight

What users run is looked at first: one device, a replica on each, and stages with as many layers each. Then come groups
of devices whose speeds may add up to more than the best so far, and a search for better places of one replica. The
answer is the fastest of all that fits.
"""

import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from types import MappingProxyType

import numpy as np

from gdp.arrays import F64, I64
from gdp.bounds.layout_bound import layout_bound
from gdp.bounds.lower_bound import lower_bound
from gdp.budget import Budget, Clock
from gdp.cluster import Cluster
from gdp.errors import InputError
from gdp.graph import Graph, GraphSource
from gdp.parallel.batches import ROUNDS, BatchStream, check_batches
from gdp.parallel.layout import Layout
from gdp.search.candidate import Candidate
from gdp.search.layouts.arrangement import Arrangement, DeviceSpeeds, forced
from gdp.search.layouts.batch_parts import Parts
from gdp.search.layouts.dispatch import as_candidate
from gdp.search.layouts.estimate import Estimator, constructed_places
from gdp.search.ops.auto import auto
from gdp.search.ops.local_search import LocalSearch
from gdp.search.place import plan_of
from gdp.search.question import Question
from gdp.search.rivals.equal_stages import equal_stages
from gdp.search.settings import DEFAULTS, Settings
from gdp.simulator.constraints import Constraints
from gdp.simulator.levels import communication_levels
from gdp.simulator.longest_paths import longest_paths
from gdp.simulator.orders import GPIPE
from gdp.simulator.plan import Plan, Search
from gdp.simulator.problem import Problem
from gdp.simulator.simulate import simulate
from gdp.simulator.throughput import Throughput

ONE_DEVICE, REPLICAS, EQUAL_STAGES = "one device", "replicas", "equal stages"


@dataclass(frozen=True, eq=False)
class ServedLayout:
    """An arrangement with its throughput; the lesser of two is the better one."""

    arrangement: Arrangement  # the micro-batches of its layout are the batches in flight
    places: I64  # [N] of a replica's ops
    stream: BatchStream
    candidate: Candidate
    throughput: Throughput

    @property
    def missing_bytes(self) -> int:
        """The bytes that the device lacks which lacks most; 0: it fits."""
        return int(self.throughput.missing_bytes.max())

    @property
    def is_pipeline(self) -> bool:
        """True if results only go on from device to device of a replica."""
        graph = self.stream.batch
        sources, targets = graph.producers[graph.edge_tensors], graph.consumers
        return bool((self.places[sources] <= self.places[targets]).all())

    def __lt__(self, other: "ServedLayout") -> bool:
        return self._key < other._key

    @property
    def _key(self) -> tuple[int, int, int, int]:
        """Figures to compare by: fit first, then be fast; equally fast ones by latency and by the devices in use."""
        figures = self.throughput
        return self.missing_bytes, figures.time_per_batch_ns, figures.latency_ns, len(self.arrangement.all_devices)


@dataclass(frozen=True, eq=False)
class BatchChoice:
    """The answer: a plan of a stream of batches, and what else was looked at."""

    plan: Plan
    best: ServedLayout
    layouts: tuple[ServedLayout, ...]  # all that were simulated, the best first
    baselines: Mapping[str, ServedLayout]  # what users run, by name; they are among the layouts
    bound_ns: int  # no layout takes less for a batch


@dataclass(eq=False)
class _PlacingBatches:
    """Holds the question, and what was found so far."""

    graph: Graph
    cluster: Cluster
    constraints: Constraints
    num_batches: int
    clock: Clock
    seed: int
    num_threads: int | None
    tell: Callable[[ServedLayout], None]
    settings: Settings
    found: list[ServedLayout] = field(default_factory=list)
    _streams: dict[Layout, tuple[BatchStream, Problem]] = field(default_factory=dict)  # the last one

    @cached_property
    def machine(self) -> DeviceSpeeds:
        return self._estimator.machine

    @cached_property
    def _estimator(self) -> Estimator:
        return Estimator(
            Parts(lambda num_parts: self.graph, 1, self.graph), self.cluster, self.constraints, self.settings
        )

    def alone(self, graph: Graph, devices: Sequence[int]) -> Problem:
        """Returns the problem of placing `graph` on `devices`, with the memory that constraints leave there."""
        return self._estimator.alone(graph, devices)

    def simulate(self, arrangement: Arrangement, places: I64) -> ServedLayout | None:
        """Simulates the batches with these places [N] of a replica's ops; None where constraints forbid them."""
        if arrangement.layout not in self._streams:
            stream = BatchStream.of(self.graph, arrangement.layout)
            self._streams = {arrangement.layout: (stream, Problem.build(stream.graph, self.cluster, self.constraints))}
        stream, problem = self._streams[arrangement.layout]
        placement = stream.placement(places, arrangement.devices)
        if problem.broken_constraints(placement):
            return None
        levels = [problem.b_level_ns]
        levels += [communication_levels(problem, placement)] if arrangement.num_places > 1 else []
        served = []
        for level in levels:
            simulation = simulate(problem, placement, priority=problem.priority(GPIPE, level))
            figures = Throughput.of(simulation, arrangement.layout)
            served.append(ServedLayout(arrangement, places, stream, as_candidate(simulation, GPIPE), figures))
            self.clock.spend(1)
        best = min(served)
        self.found.append(best)
        self.tell(best)
        return best


def place_batches(
    graph: GraphSource,
    cluster: Cluster | str,
    num_batches: int,
    constraints: Constraints | None = None,
    *,
    budget: Budget | str | float = "30s",
    seed: int = 0,
    num_threads: int | None = None,
    on_progress: Callable[[ServedLayout], None] | None = None,
    stop: threading.Event | None = None,
) -> BatchChoice:
    """Returns the layout that takes least time per batch with `num_batches` of the forward pass `graph` in flight.

    The answer is never slower than one device, a replica on each device, or a pipeline of equal stages, and fits if
    any of the layouts does. InputError for a training step, and where constraints allow no layout.
    """
    graph, cluster = Graph.of(graph), Cluster.of(cluster)
    check_batches(graph, num_batches)
    clock = Clock(Budget.of(budget), stop=stop)
    tell = on_progress or (lambda served: None)
    search = _PlacingBatches(
        graph, cluster, constraints or Constraints(), num_batches, clock, seed, num_threads, tell, DEFAULTS
    )
    ways = {name: served for name, served in _as_users_run_it(search) if served is not None}
    _screen(search)
    if not search.found:  # pins keep the ops of a replica apart
        _place_as_constrained(search)
    if not search.found:
        raise InputError(
            f"--batches: constraints let no layout of {graph.name!r} be placed; leave out pins and --forbid"
        )
    for arrangement in _worth_a_search(search):
        _search_places(search, arrangement, clock.part(1 / search.settings.batches.num_searched))
    return _answer(search, ways)


def _as_users_run_it(search: _PlacingBatches) -> Iterator[tuple[str, ServedLayout | None]]:
    """Yields one device, a replica on each device, and stages with as many layers each, on most devices."""
    usable, none = search.machine.usable, np.zeros(search.graph.num_ops, np.int64)
    yield ONE_DEVICE, search.simulate(_dealt(search, ((usable[0],),)), none)
    yield EQUAL_STAGES, _equal_stages(search)  # in the stream of the one device
    most = min(len(usable), search.num_batches)
    if most > 1:
        yield REPLICAS, search.simulate(_dealt(search, tuple((device,) for device in sorted(usable[:most]))), none)


def _equal_stages(search: _PlacingBatches) -> ServedLayout | None:
    usable = search.machine.usable
    for count in range(min(len(usable), search.settings.layouts.most_places), 1, -1):
        devices = sorted(usable[:count])
        if (places := equal_stages(search.alone(search.graph, devices), count)) is not None:
            return search.simulate(_dealt(search, (tuple(devices),)), places)
    return None


def _screen(search: _PlacingBatches) -> None:
    """Simulates the groups of devices that may be faster than the best so far, the most promising ones first."""
    usable = search.machine.usable
    groups = {
        way.devices: None
        for data in range(1, min(search.num_batches, len(usable)) + 1)
        for way in forced(search.machine, Layout((1,) * data), 1)
    }
    for devices in sorted(groups, key=lambda each: (_promised_ns(search, each), len(each[0]))):
        best = min(search.found, default=None)
        fits = best is not None and not best.missing_bytes
        if best is not None and fits and _promised_ns(search, devices) >= best.throughput.time_per_batch_ns:
            return
        if search.clock.stop.is_set() or (fits and search.clock.share_spent > search.settings.batches.screen_share):
            return
        arrangement = _dealt(search, devices)
        search.simulate(arrangement, _best_places(search, arrangement))


def _place_as_constrained(search: _PlacingBatches) -> None:
    """Simulates one copy of the model on all devices, its ops where they are allowed and one batch is fast."""
    problem = Problem.build(search.graph, search.cluster, search.constraints)
    question = Question.about(problem, seed=search.seed, num_threads=search.num_threads, settings=search.settings)
    best = auto(question, search.clock.part(0.5)).best
    if best is not None:
        everywhere = tuple(range(search.cluster.num_devices))
        search.simulate(Arrangement(Layout((search.num_batches,)), (everywhere,)), best.replay.placement)


def _best_places(search: _PlacingBatches, arrangement: Arrangement) -> I64:
    """Returns the best of constructed places [N], by what one replica does alone."""
    group, layout = arrangement.devices[0], Layout(arrangement.layout.microbatches[:1])
    if len(group) == 1:
        return np.zeros(search.graph.num_ops, np.int64)
    stream = BatchStream.of(search.graph, layout)
    problem = search.alone(stream.graph, group)
    priority = problem.priority(GPIPE, problem.b_level_ns)

    def figures(places: I64) -> tuple[int, int]:
        simulation = simulate(problem, stream.placement(places, [range(len(group))]), priority=priority)
        search.clock.spend(1)
        served = Throughput.of(simulation, layout)
        return int(served.missing_bytes.max()), served.time_per_batch_ns

    return min(constructed_places(search.alone(search.graph, group), search.settings.large), key=figures)


def _dealt(search: _PlacingBatches, devices: tuple[tuple[int, ...], ...]) -> Arrangement:
    """Deals the batches in flight out to groups of devices, one each and the others in proportion to speed."""
    times_ns = _times_ns(search, devices)
    counts = [1] * len(devices)
    for _ in range(search.num_batches - len(devices)):
        counts[int(np.argmin((np.array(counts) + 1) * times_ns))] += 1
    return Arrangement(Layout(tuple(counts)), devices)


def _times_ns(search: _PlacingBatches, devices: tuple[tuple[int, ...], ...]) -> F64:
    """[R] the time of a batch on each group if its work were shared out evenly."""
    return np.array([1 / (1 / search.machine.time_ns[list(group)]).sum() for group in devices])


def _promised_ns(search: _PlacingBatches, devices: tuple[tuple[int, ...], ...]) -> float:
    """Returns the time per batch if no device ever waited."""
    return float(1 / (1 / _times_ns(search, devices)).sum())


def _worth_a_search(search: _PlacingBatches) -> list[Arrangement]:
    """Returns the best arrangements of several devices a replica, if they are near the best of all."""
    best = min(search.found)
    limit_ns = search.settings.batches.gain_of_places * best.throughput.time_per_batch_ns
    near = [
        served.arrangement
        for served in sorted(search.found)
        if served.arrangement.num_places > 1
        and (best.missing_bytes or (not served.missing_bytes and served.throughput.time_per_batch_ns < limit_ns))
    ]
    return list(dict.fromkeys(near))[: search.settings.batches.num_searched]


def _search_places(search: _PlacingBatches, arrangement: Arrangement, clock: Clock) -> None:
    """Looks for better places of one replica: those that are best for one batch, then for the batches in flight."""
    group, count = arrangement.devices[0], arrangement.layout.microbatches[0]
    if count < len(group):  # too few for a pipeline: ops of one batch have to run side by side
        question = Question.about(
            search.alone(search.graph, group),
            seed=search.seed,
            num_threads=search.num_threads,
            settings=search.settings,
        )
        solution = auto(question, clock.part(0.5))
        if solution.best is not None:
            search.simulate(arrangement, solution.best.replay.placement)
    if clock.is_up or search.graph.num_ops * count * ROUNDS > search.settings.large.searched_ops:
        return
    start = min(served for served in search.found if served.arrangement == arrangement)
    stream = BatchStream.of(search.graph, Layout((count,)))
    problem = search.alone(stream.graph, group).in_order(GPIPE)
    question = Question.about(problem, seed=search.seed, num_threads=search.num_threads, settings=search.settings)
    reduction = question.reduction
    local = LocalSearch(
        reduction.problem,
        clock,
        seed=search.seed,
        num_threads=search.num_threads,
        settings=search.settings.local_search,
    )
    placement = stream.placement(start.places, [range(len(group))])
    local.start([Candidate(reduction.restrict(placement), order=GPIPE)])
    local.run()
    found = question.replay(local.best).placement
    places = np.empty(search.graph.num_ops + 1, np.int64)
    places[stream.origin[::-1]] = found[::-1]
    if not np.array_equal(places[:-1], start.places):
        search.simulate(arrangement, places[:-1])


def _answer(search: _PlacingBatches, baselines: Mapping[str, ServedLayout]) -> BatchChoice:
    ranked = sorted(search.found)
    best, clock = ranked[0], search.clock
    simulation = best.candidate.replay
    record = Search(
        seconds=clock.seconds,
        simulations=clock.simulations,
        baselines={},
        busy_fraction=simulation.busy_fraction,
        missing_bytes=simulation.missing_bytes,
        interrupted=clock.stop.is_set(),
        order=GPIPE,
    )
    plan = plan_of(simulation, lower_bound(simulation.problem), "auto", search.seed, record)
    plan = replace(plan, layout=best.stream.document())
    distinct = {served.arrangement: served for served in reversed(ranked)}
    shown = sorted({*map(id, distinct.values()), *map(id, baselines.values())})
    layouts = [served for served in ranked if id(served) in shown]
    bound_ns = throughput_bound(search.graph, search.cluster, search.num_batches)
    return BatchChoice(plan, best, tuple(layouts), MappingProxyType(dict(baselines)), bound_ns)


def throughput_bound(graph: Graph, cluster: Cluster, num_batches: int) -> int:
    """Returns the ns that no layout takes less than for a batch of the forward pass `graph`.

    Devices can at best share the work out evenly, and each place in flight is taken for the longest chain of ops.
    """
    times = Problem.build(graph, cluster).op_time_ns
    fastest = np.where(times < 0, np.iinfo(np.int64).max, times).min(axis=1)
    chain_ns = int(longest_paths(graph, fastest).max(initial=0))
    return max(layout_bound({1: graph}, cluster), -(-chain_ns // num_batches))
