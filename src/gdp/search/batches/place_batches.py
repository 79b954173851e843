"""Batches in flight: the layout that serves them fastest, as replicas, as a pipeline, or as replicas of pipelines.

    4 devices, 8 batches in flight     data=4   [0] [1] [2] [3]    2 in flight on each
                                       data=2   [0 1] [2 3]        4 in flight on each pair
                                       data=1   [0 1 2 3]          8 in flight

What users run is looked at first: one device, a replica on each, and stages with as many layers each. Then come groups
of devices whose speeds may add up to more than the best so far, and a search for better places of one replica. The
answer is the fastest of all that fits."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

import numpy as np

from gdp.arrays import F64, I64, unique
from gdp.bounds.layout_bound import layout_bound
from gdp.bounds.lower_bound import lower_bound
from gdp.budget import Clock
from gdp.cluster import Cluster
from gdp.errors import InputError
from gdp.graph import Graph
from gdp.parallel.layout import Layout
from gdp.parallel.step import ROUNDS, BatchStream, check_batches, with_caches
from gdp.search.candidate import Arrangement, BatchCut, Candidate, Figures
from gdp.search.layouts.arrangement import MOST_PLACES, DeviceSpeeds, forced, shared_out
from gdp.search.layouts.estimate import Estimator, staged_places
from gdp.search.ops.auto import auto
from gdp.search.ops.local_search import LocalSearch
from gdp.search.question import BatchQuestion, Solution, plan_of, search_record
from gdp.search.rivals.rivals import equal_stages
from gdp.search.settings import Settings
from gdp.simulator.levels import communication_levels
from gdp.simulator.longest_paths import longest_paths
from gdp.simulator.orders import GPIPE
from gdp.simulator.problem import Problem
from gdp.simulator.simulate import Simulation, simulate
from gdp.simulator.throughput import Throughput

ONE_DEVICE, REPLICAS, EQUAL_STAGES = "one device", "replicas", "equal stages"
USUAL = ONE_DEVICE, EQUAL_STAGES, REPLICAS  # as users serve


@dataclass(eq=False)
class _BatchSearch:
    """Holds the question, and what was found so far."""

    graph: Graph  # of one batch
    question: BatchQuestion
    clock: Clock
    found: list[Candidate] = field(default_factory=list)
    _streams: dict[Layout, tuple[BatchStream, Problem]] = field(default_factory=dict)  # the last one

    @cached_property
    def machine(self) -> DeviceSpeeds:
        return self._estimator.machine

    @property
    def settings(self) -> Settings:
        return self.question.settings

    @cached_property
    def _estimator(self) -> Estimator:
        asked = self.question
        return Estimator(asked.parts, asked.cluster, asked.constraints, asked.settings)

    def grouped(self, num_caches: int = 1) -> Graph:
        """Returns the graph of one batch in the groups of the question, with so many caches."""
        groups = self.question.groups
        return with_caches(self.graph if groups is None else replace(self.graph, groups=groups), num_caches)

    def alone(self, graph: Graph, devices: Sequence[int]) -> Problem:
        """Returns the problem of placing `graph` on `devices`, with the memory that constraints leave there."""
        return self._estimator.replicas.alone(graph, devices)

    def simulate(self, arrangement: Arrangement, places: I64, name: str = "") -> Candidate | None:
        """Simulates the batches with these places [N] of a replica's ops; None where constraints forbid them."""
        if arrangement.layout not in self._streams:
            stream, asked = BatchStream.of(self.graph, arrangement.layout), self.question
            problem = Problem.build(stream.graph, asked.cluster, asked.constraints)
            self._streams = {arrangement.layout: (stream, problem)}
        stream, problem = self._streams[arrangement.layout]
        placement = stream.placement(places, arrangement.devices)
        if problem.broken_constraints(placement):
            return None
        levels = [problem.b_level_ns]
        levels += [communication_levels(problem, placement)] if arrangement.num_places > 1 else []
        candidates = []
        for level in levels:
            simulation = simulate(problem, placement, priority=problem.priority(GPIPE, level))
            candidate = replace(Candidate.of(simulation, GPIPE), cut=BatchCut(arrangement, stream, places), name=name)
            candidates.append(replace(candidate, figures=_figures(simulation, arrangement)))
            self.clock.spend(1)
        best = min(candidates)
        self.found.append(best)
        self.question.tell(best)
        return best


def _figures(simulation: Simulation, arrangement: Arrangement) -> Figures:
    """Returns the time per batch; equally fast layouts are compared by latency and by the devices in use."""
    served = Throughput.of(simulation, arrangement.layout)
    ties = served.latency_ns, len(arrangement.all_devices)
    return Figures(int(served.missing_bytes.sum()), served.time_per_batch_ns, ties)


def throughput_of(candidate: Candidate) -> Throughput:
    """Returns the figures of batches in flight in steady state."""
    return Throughput.of(candidate.replay, candidate.layout)


def alone(candidate: Candidate) -> Simulation:
    """Returns the step of one batch in the first replica, with no other in flight."""
    assert isinstance(candidate.step, BatchStream)
    problem = Problem.build(candidate.step.batch, candidate.problem.cluster)
    placement = np.array(candidate.devices[0])[candidate.places]
    levels = problem.b_level_ns, communication_levels(problem, placement)
    return min((simulate(problem, placement, priority=level) for level in levels), key=Figures.of)


def is_pipeline(candidate: Candidate) -> bool:
    """Returns whether results only go on from device to device of a replica."""
    assert isinstance(candidate.step, BatchStream)
    graph, places = candidate.step.batch, candidate.places
    return bool((places[graph.producers[graph.edge_tensors]] <= places[graph.consumers]).all())


def place_batches(question: BatchQuestion, clock: Clock) -> Solution:
    """Returns the layout that takes least time per batch with this number of batches of a forward pass in flight. The
    answer is never slower than one device, a replica on each device, or a pipeline of equal stages, and fits if any of
    the layouts does. InputError for a training step, and where constraints allow no layout."""
    graph = question.parts.exact(1)
    check_batches(graph, question.num_batches)
    search = _BatchSearch(graph, question, clock)
    _simulate_usual(search)
    _screen(search)
    if not search.found:  # pins keep the ops of a replica apart
        _place_as_constrained(search)
    if not search.found:
        raise InputError(
            f"--batches: constraints let no layout of {graph.name!r} be placed; leave out pins and --forbid"
        )
    for arrangement in _worth_a_search(search):
        _search_places(search, arrangement, clock.part(1 / question.settings.batches.num_searched))
    return _answer(search)


def _simulate_usual(search: _BatchSearch) -> None:
    """Simulates what users run: one device, a replica on each device, and stages with as many layers each."""
    usable, none = search.machine.usable, np.zeros(search.graph.num_ops, np.int64)
    search.simulate(_dealt(search, ((usable[0],),)), none, ONE_DEVICE)
    _simulate_equal_stages(search)  # in the stream of the one device
    most = min(len(usable), search.question.num_batches)
    if most > 1:
        search.simulate(_dealt(search, tuple((device,) for device in sorted(usable[:most]))), none, REPLICAS)


def _simulate_equal_stages(search: _BatchSearch) -> None:
    """Simulates stages on as many devices as the layers allow."""
    usable = search.machine.usable
    for count in range(min(len(usable), MOST_PLACES), 1, -1):
        devices = sorted(usable[:count])
        if (places := equal_stages(search.alone(search.grouped(), devices), count)) is not None:
            search.simulate(_dealt(search, (tuple(devices),)), places, EQUAL_STAGES)
            return


def _screen(search: _BatchSearch) -> None:
    """Simulates the groups of devices that may be faster than the best so far, the most promising ones first."""
    usable = search.machine.usable
    most = min(search.question.num_batches, len(usable))
    layouts = (Layout((1,) * data) for data in range(1, most + 1))
    groups = {way.devices: None for layout in layouts for way in forced(search.machine, layout, 1)}
    for devices in sorted(groups, key=lambda each: (_promised_ns(search, each), len(each[0]))):
        best = min(search.found, default=None)
        fits = best is not None and best.fits
        if best is not None and fits and _promised_ns(search, devices) >= best.step_time_ns:
            return
        if search.clock.stop.is_set() or (fits and search.clock.share_spent > search.settings.batches.screen_share):
            return
        arrangement = _dealt(search, devices)
        search.simulate(arrangement, _best_places(search, arrangement))


def _place_as_constrained(search: _BatchSearch) -> None:
    """Simulates one copy of the model on all devices, its ops where they are allowed and one batch is fast."""
    problem = Problem.build(search.grouped(), search.question.cluster, search.question.constraints)
    question = search.question.about(problem)
    best = auto(question, search.clock.part(0.5)).best
    if best is not None:
        everywhere = tuple(range(search.question.cluster.num_devices))
        search.simulate(Arrangement(Layout((search.question.num_batches,)), (everywhere,)), best.replay.placement)


def _best_places(search: _BatchSearch, arrangement: Arrangement) -> I64:
    """Returns the best of constructed places [N], by what one replica does alone."""
    group, layout = arrangement.devices[0], Layout(arrangement.layout.microbatches[:1])
    if len(group) == 1:
        return np.zeros(search.graph.num_ops, np.int64)
    stream = BatchStream.of(search.graph, layout)
    problem = search.alone(stream.graph, group)
    priority = problem.priority(GPIPE, problem.b_level_ns)

    def figures(places: I64) -> Figures:
        simulation = simulate(problem, stream.placement(places, [range(len(group))]), priority=priority)
        search.clock.spend(1)
        served = Throughput.of(simulation, layout)
        return Figures(int(served.missing_bytes.sum()), served.time_per_batch_ns)

    one = search.alone(search.grouped(layout.num_parts), group)
    return min(staged_places(one, search.settings.large), key=figures)


def _dealt(search: _BatchSearch, devices: tuple[tuple[int, ...], ...]) -> Arrangement:
    """Deals the batches in flight out to groups of devices, one each and the others in proportion to speed."""
    counts = shared_out(_times_ns(search, devices), search.question.num_batches, least=1)
    return Arrangement(Layout(tuple(counts)), devices)


def _times_ns(search: _BatchSearch, devices: tuple[tuple[int, ...], ...]) -> F64:
    """[R] the time of a batch on each group if its work were shared out evenly."""
    return np.array([1 / (1 / search.machine.time_ns[list(group)]).sum() for group in devices])


def _promised_ns(search: _BatchSearch, devices: tuple[tuple[int, ...], ...]) -> float:
    """Returns the time per batch if no device ever waited."""
    return float(1 / (1 / _times_ns(search, devices)).sum())


def _worth_a_search(search: _BatchSearch) -> list[Arrangement]:
    """Returns the best arrangements of several devices a replica, if they are near the best of all."""
    best = min(search.found)
    limit_ns = search.settings.batches.gain_of_places * best.step_time_ns
    near = [
        each.way
        for each in sorted(search.found)
        if each.way.num_places > 1 and (not best.fits or (each.fits and each.step_time_ns < limit_ns))
    ]
    return list(dict.fromkeys(near))[: search.settings.batches.num_searched]


def _search_places(search: _BatchSearch, arrangement: Arrangement, clock: Clock) -> None:
    """Looks for better places of one replica: those that are best for one batch, then for the batches in flight."""
    group, count = arrangement.devices[0], arrangement.layout.microbatches[0]
    if count < len(group):  # too few for a pipeline: ops of one batch have to run side by side
        solution = auto(search.question.about(search.alone(search.grouped(count), group)), clock.part(0.5))
        if solution.best is not None and _is_in_order(search, solution.best.replay.placement):
            search.simulate(arrangement, solution.best.replay.placement)
    if clock.is_up or search.graph.num_ops * count * ROUNDS > search.settings.large.searched_ops:
        return
    start = min(each for each in search.found if each.way == arrangement)
    stream = BatchStream.of(search.grouped(), Layout((count,)))
    problem = search.alone(stream.graph, group).in_order(GPIPE)
    question = search.question.about(problem)
    reduction = question.reduction
    local = LocalSearch.of(question, clock)
    placement = stream.placement(start.places, [range(len(group))])
    local.start([Candidate(reduction.restrict(placement), order=GPIPE)])
    local.run()
    found = question.replay(local.best).placement
    places = np.empty(search.graph.num_ops + 1, np.int64)
    places[stream.origin[::-1]] = found[::-1]
    if not np.array_equal(places[:-1], start.places) and _is_in_order(search, places[:-1]):
        search.simulate(arrangement, places[:-1])


def _is_in_order(search: _BatchSearch, places: I64) -> bool:
    """Returns whether each place has one run of the groups of the question, in the order of the ops."""
    if search.question.groups is None:
        return True
    of_groups = places[np.unique(search.question.groups, return_index=True)[1]]
    return bool(np.count_nonzero(np.diff(of_groups)) < len(unique(of_groups)))


def _answer(search: _BatchSearch) -> Solution:
    ranked, clock, asked = sorted(search.found), search.clock, search.question
    best, baselines = ranked[0], {each.name: each.baseline for each in ranked if each.name}
    record = search_record(best.replay, clock, GPIPE, {})  # its step is all batches, theirs is one
    plan = plan_of(best.replay, lower_bound(best.problem), "auto", asked.seed, record)
    plan = replace(plan, layout=best.step.document())
    distinct = {each.way: each for each in reversed(ranked)}
    looked_at = tuple(each for each in ranked if each.name or each is distinct[each.way])
    bound_ns = throughput_bound(search.graph, asked.cluster, asked.num_batches)
    return Solution(best, baselines, looked_at=looked_at, bound_ns=bound_ns, plan=plan)


def throughput_bound(graph: Graph, cluster: Cluster, num_batches: int) -> int:
    """Returns the ns that no layout takes less than for a batch of the forward pass `graph`. Devices can at best share
    the work out evenly, and each place in flight is taken for the longest chain of ops."""
    times = Problem.build(graph, cluster).op_time_ns
    fastest = np.where(times < 0, np.iinfo(np.int64).max, times).min(axis=1)
    chain_ns = int(longest_paths(graph, fastest).max(initial=0))
    return max(layout_bound({1: graph}, cluster), -(-chain_ns // num_batches))
