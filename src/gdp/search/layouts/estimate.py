"""Estimates: what an arrangement takes, from one replica alone and the arithmetic of its rings.

    step = one replica's passes and updates + what its rings take beyond the last backward pass

One replica is simulated with a few micro-batches, a ring with one bucket; what is left is proportional. N ops of one
micro-batch, D devices, R replicas, P places.
"""

from dataclasses import dataclass, field, replace
from functools import cached_property

import numpy as np
from scipy.sparse.csgraph import connected_components

from gdp.arrays import I64
from gdp.cluster import Cluster
from gdp.cluster.changes import only
from gdp.errors import InputError
from gdp.graph import Graph, Op, Tensor
from gdp.graph.microbatches import shared_ops
from gdp.parallel.buckets import BUCKET_BYTES, gradients_of
from gdp.parallel.layout import BLOCKS, NONE, Layout
from gdp.parallel.step import Step
from gdp.placers import CLASSICAL
from gdp.placers.contiguous import folded_chain, module_chain, stages
from gdp.search.layouts.arrangement import Arrangement, DeviceSpeeds, more_microbatches
from gdp.search.layouts.parts import Parts
from gdp.simulator.constraints import Constraints, memory_limits
from gdp.simulator.problem import Problem
from gdp.simulator.simulate import Simulation, simulate
from gdp.units.forward_units import forward_units
from gdp.units.units import Units

_QUICKER = 2  # times the slowest link: links of one host
_ENOUGH = 2  # micro-batches of a place that are simulated
_QUICK_OPS = 3_000  # in one micro-batch, for dynamic programming in about a second


@dataclass(frozen=True, slots=True)
class Estimate:
    """Expected figures of an arrangement; `places` [N] is where ops of a replica are."""

    arrangement: Arrangement
    step_time_ns: int
    missing_bytes: int  # on the device that lacks most; 0: it fits
    places: I64


@dataclass(frozen=True, eq=False)
class PartFigures:
    """Sums over the ops of one micro-batch [N] on each device [D], in ns, and over its parameters, in bytes."""

    once_ns: I64  # [D] updates
    backward_ns: I64  # [D]
    each_ns: I64  # [D] what is done for every micro-batch, the backward pass too
    gradient_bytes: int
    state_bytes: int  # of the optimizer
    parameter_bytes: int


@dataclass(eq=False)
class Estimator:
    """Estimates arrangements of one model on one machine; keeps what several have in common."""

    parts: Parts
    cluster: Cluster
    constraints: Constraints
    _figures: dict[tuple[int, str | tuple[str, ...]], PartFigures] = field(default_factory=dict)
    _rings_ns: dict[tuple[int, ...], int] = field(default_factory=dict)
    _places: dict[tuple[tuple[str, ...], tuple[int, ...]], list[I64]] = field(default_factory=dict)
    _replicas: dict[object, tuple[Simulation, I64]] = field(default_factory=dict)

    @cached_property
    def machine(self) -> DeviceSpeeds:
        """The speed and the kind of each device."""
        times = Problem.build(self.parts.exact(1), self.cluster).op_time_ns
        alone = np.where((times < 0).any(axis=0), np.inf, np.maximum(times, 0).sum(axis=0))
        columns = np.concatenate((times, self.limits_bytes[None]))
        return DeviceSpeeds(alone, np.unique(columns, axis=1, return_inverse=True)[1].reshape(-1), _hosts(self.cluster))

    @cached_property
    def limits_bytes(self) -> I64:
        """[D] the memory that constraints leave."""
        return memory_limits(self.cluster, self.constraints)

    def estimate(self, arrangement: Arrangement) -> Estimate:
        """Returns the fastest estimate over constructive places of a replica, of those that fit if any does."""
        guesses = [self._with_places(arrangement, places) for places in self._candidates(arrangement)]
        return min(guesses, key=lambda guess: (guess.missing_bytes > 0, guess.step_time_ns))

    def least(self, arrangement: Arrangement) -> Estimate:
        """Returns what a perfect pipeline would take, without rings and in any memory: arithmetic alone."""
        layout, num_places = arrangement.layout, arrangement.num_places
        figures = self.figures(layout)
        slowest_ns = 0.0
        for devices, count in zip(arrangement.devices, layout.microbatches, strict=True):
            fastest = list(devices)
            rate = (1 / np.maximum(figures.each_ns[fastest], 1)).sum()
            fill = count + (num_places - 1 if count > 1 else 0)
            once_ns = float(figures.once_ns[fastest].min()) / num_places / (layout.data if layout.zero else 1)
            slowest_ns = max(slowest_ns, fill / rate + once_ns)
        return Estimate(arrangement, int(slowest_ns), 0, np.zeros(0, np.int64))

    def _candidates(self, arrangement: Arrangement) -> list[I64]:
        """Returns places [N] of a replica's ops, the same for all numbers of micro-batches."""
        graph = self.parts.near(arrangement.layout.num_parts)
        kinds = tuple(int(self.machine.kinds[device]) for device in arrangement.devices[0])
        if len(kinds) == 1:
            return [np.zeros(graph.num_ops, np.int64)]
        key = graph.op_names, kinds
        if key not in self._places:
            self._places[key] = constructed_places(self._alone(graph, arrangement.devices[0]))
        found = self._places[key]
        if arrangement.layout.stages is None:
            return found
        found = [places for places in found if is_in_stages(graph, places, len(kinds))]
        if not found:
            raise InputError(
                f"stages={len(kinds)}: {graph.name!r} has no stages that only take from those before them; "
                "take fewer, or leave stages out"
            )
        return found

    def _with_places(self, arrangement: Arrangement, places: I64) -> Estimate:
        layout = arrangement.layout
        figures = self.figures(layout)
        spare = self._saved_bytes(figures, layout)
        slowest_ns, missing = 0, 0
        for devices, count in dict(zip(arrangement.devices, layout.microbatches, strict=True)).items():
            simulation, load_ns = self._replica(layout, devices, count, places)
            seen = _seen(layout, count, len(devices))
            slowest_ns = max(slowest_ns, simulation.step_time_ns + (count - seen) * int(load_ns.max()))
            share = spare // len(devices)
            lacks = simulation.peak_memory_bytes - share - self.limits_bytes[list(devices)]
            missing = max(missing, int(lacks.max()))
        if layout.zero:  # updates are cut over replicas
            slowest_ns -= (
                int(figures.once_ns[arrangement.devices[0][0]] * (1 - 1 / layout.data)) // arrangement.num_places
            )
        return Estimate(arrangement, slowest_ns + self._rings(arrangement, figures), max(missing, 0), places)

    def _replica(self, layout: Layout, devices: tuple[int, ...], count: int, places: I64) -> tuple[Simulation, I64]:
        """Returns a replica's step with a few micro-batches, and what one more takes on each of its devices [P]."""
        few = _seen(layout, count, len(devices))
        kinds = tuple(int(self.machine.kinds[device]) for device in devices)
        key = (layout.num_parts, layout.recompute, kinds, few, places.tobytes())
        if key not in self._replicas:
            graph = self.parts.near(layout.num_parts)
            step = Step.of(graph, Layout((few,), recompute=layout.recompute))
            problem = self._alone(step.graph, devices)
            placement = step.placement(places, [range(len(devices))])
            orders = [simulate(problem.in_order(order), placement) for order in problem.orders]
            best = min(orders, key=lambda found: (found.missing_bytes.any(), found.step_time_ns))
            own = self._alone(graph, devices).op_time_ns[np.arange(graph.num_ops), places]
            is_once = np.logical_or(*shared_ops(graph))
            load_ns = np.bincount(places, np.where(is_once, 0, own), len(devices))
            if layout.recompute != NONE:  # in proportion: the clones are where their ops are
                load_ns *= self.figures(layout).each_ns[devices[0]] / max(load_ns.sum(), 1)
            self._replicas[key] = best, np.asarray(load_ns, np.int64)
        return self._replicas[key]

    def figures(self, layout: Layout) -> PartFigures:
        """Returns sums over one micro-batch of `layout`."""
        key = layout.num_parts, layout.recompute
        if key not in self._figures:
            graph = Step.of(self.parts.rough(layout.num_parts), Layout(recompute=layout.recompute)).graph
            self._figures[key] = _figures(graph, Problem.build(graph, self.cluster).op_time_ns)
        return self._figures[key]

    def _alone(self, graph: Graph, devices: tuple[int, ...]) -> Problem:
        """Returns the problem of placing `graph` on `devices`, with the memory that constraints leave there."""
        limits = {self.cluster.devices[d].name: int(self.limits_bytes[d]) for d in devices}
        return Problem.build(graph, only(self.cluster, devices), Constraints(max_memory_bytes=limits))

    def _rings(self, arrangement: Arrangement, figures: PartFigures) -> int:
        """Returns what rings take beyond the last backward pass, in ns."""
        layout, num_places = arrangement.layout, arrangement.num_places
        if layout.data == 1:
            return 0
        slowest_ns = max(self._ring_ns(tuple(devices[p] for devices in arrangement.devices)) for p in range(num_places))
        num_buckets = figures.gradient_bytes / num_places / BUCKET_BYTES
        total_ns = num_buckets * slowest_ns
        if layout.zero == 3:  # two gathers, of half a ring each, for every micro-batch
            return int(total_ns * (max(layout.microbatches) + 0.5) * 0.5)
        last_pass_ns = min(figures.backward_ns[d] for devices in arrangement.devices for d in devices) / num_places
        return int(max(total_ns - last_pass_ns, 0) + min(num_buckets, 1) * slowest_ns)

    def _ring_ns(self, devices: tuple[int, ...]) -> int:
        """Returns what the ring of one bucket takes when nothing else runs."""
        if devices not in self._rings_ns:
            one, ring = _one_parameter(BUCKET_BYTES), Layout((1,) * len(devices))
            step = Step.of(one, ring)
            problem = Problem.build(step.graph, only(self.cluster, devices))
            placement = step.placement(np.zeros(one.num_ops, np.int64), np.arange(len(devices))[:, None])
            self._rings_ns[devices] = simulate(problem, placement).step_time_ns
        return self._rings_ns[devices]

    def _saved_bytes(self, figures: PartFigures, layout: Layout) -> int:
        """Returns what ZeRO saves on a replica."""
        whole = figures.state_bytes * (layout.zero >= 1) + figures.parameter_bytes * (layout.zero == 3)
        return whole * (layout.data - 1) // layout.data


def constructed_places(problem: Problem) -> list[I64]:
    """Returns contiguous stages [N] along several chains; the best by dynamic programming where that is quick."""
    units = Units.of(problem, forward_units(problem))
    devices = np.arange(problem.num_devices)
    chains = [
        folded_chain(problem, units),
        *(module_chain(problem, units, whole_layers=whole) for whole in (True, False)),
    ]
    found = [units.place_allowed(stages(problem, units, chain, devices)) for chain in chains]
    if problem.num_ops <= _QUICK_OPS and (best := CLASSICAL["dp-stages"](problem, 0)) is not None:
        found.insert(0, best)
    return list({places.tobytes(): places for places in found}.values())


def is_in_stages(graph: Graph, places: I64, num_stages: int) -> bool:
    """Returns whether `places` [N] are stages: all are used, and forward tensors never go to an earlier one."""
    is_forward = np.array([phase == "forward" for phase in graph.phases], np.bool_)
    sources, targets = graph.producers[graph.edge_tensors], graph.consumers
    is_passed = is_forward[sources] & is_forward[targets]
    is_used = len(np.unique(places[is_forward])) == num_stages
    return is_used and bool((places[sources] <= places[targets])[is_passed].all())


def _hosts(cluster: Cluster) -> I64 | None:
    """Returns the host [D] of each device, by links that are much quicker than the slowest; None: all are alike."""
    rates = cluster.bytes_per_second + cluster.bytes_per_second.T
    apart = rates[rates > 0]
    if not len(apart) or apart.max() < _QUICKER * apart.min():
        return None
    is_near = (rates > np.sqrt(float(apart.min()) * float(apart.max()))) | np.eye(len(rates), dtype=np.bool_)
    return np.asarray(connected_components(is_near, directed=False)[1], np.int64)


def _seen(layout: Layout, count: int, num_places: int) -> int:
    """Returns the number of micro-batches of a replica to simulate, of `count`."""
    return min(count, _ENOUGH * num_places)


def _figures(graph: Graph, times_ns: I64) -> PartFigures:
    is_source, is_update = shared_ops(graph)
    is_backward = np.array([phase == "backward" for phase in graph.phases], np.bool_) & ~is_update
    times = np.maximum(times_ns, 0)
    gradients = gradients_of(graph, is_update)
    has_update = np.isin(graph.groups, graph.groups[is_update & (graph.groups >= 0)])
    own = is_source & has_update
    is_own = graph.is_resident & own[graph.producers] & (graph.view_of < 0)
    parameter_bytes = int(graph.tensor_bytes[is_own].sum())
    return PartFigures(
        once_ns=times[is_update].sum(axis=0),
        backward_ns=times[is_backward].sum(axis=0),
        each_ns=times[~is_update & ~is_source].sum(axis=0),
        gradient_bytes=sum(gradient.num_bytes for gradient in gradients.values()),
        state_bytes=max(int(graph.resident_bytes[own].sum()) - parameter_bytes, 0),
        parameter_bytes=parameter_bytes,
    )


def _one_parameter(num_bytes: int) -> Graph:
    """Returns the step of one parameter whose passes take no time."""
    ops = [
        Op("w", "parameter", resident_bytes=num_bytes, group=0),
        Op("f", "mm", phase="forward"),
        Op("b", "mm", phase="backward"),
        Op("w.update", "update", phase="update", group=0),
    ]
    tensors = [Tensor(0, (1, 2, 3), num_bytes, resident=True), Tensor(1, (2,), 1), Tensor(2, (3,), num_bytes)]
    return Graph.build("ring", ops, tensors)


def with_less_memory(estimate: Estimate, batch_size: int) -> list[Arrangement]:
    """Returns arrangements like that of `estimate` that take less memory by one change each."""
    arrangement, layout = estimate.arrangement, estimate.arrangement.layout
    layouts = [replace(layout, recompute=BLOCKS)] if layout.recompute == NONE else []
    if layout.data > 1 and layout.zero < (3 if layout.is_even else 2):
        layouts.append(replace(layout, zero=layout.zero + 1))
    others = [replace(arrangement, layout=other) for other in layouts]
    more = more_microbatches(arrangement, batch_size) if arrangement.num_places == 1 else None
    return others if more is None else [more, *others]
