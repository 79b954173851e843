"""Estimates: what an arrangement takes, from one replica alone and the arithmetic of its rings.

    step = one replica's passes and updates + what its rings take beyond the last backward pass

One replica is simulated with a few micro-batches, a ring with one bucket; what is left is proportional. N ops of one
micro-batch, D devices, R replicas, P places."""

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import cached_property, partial

import numpy as np

from gdp.arrays import F64, I64, connected
from gdp.budget import Clock, Effort, has_time
from gdp.cluster import Cluster
from gdp.costs.hosts import loads_ns
from gdp.costs.op_times import op_time_classes
from gdp.errors import InputError
from gdp.graph.copies import HOST_COPY
from gdp.parallel.blocks import cheapest_blocks, longest_held_blocks, recomputed_ns
from gdp.parallel.layout import AUTO, NONE, Layout
from gdp.placers import CLASSICAL
from gdp.placers.contiguous import folded_chain, module_chain, stages
from gdp.search.batch_parts import Parts
from gdp.search.candidate import Arrangement, Candidate, Figures
from gdp.search.layouts.arrangement import DeviceSpeeds
from gdp.search.layouts.less_memory import with_chosen_blocks
from gdp.search.layouts.replica_steps import (
    Memo,
    PartFigures,
    ReplicaSteps,
    RingTimes,
    busiest_channel_ns,
    is_in_stages,
)
from gdp.search.settings import DEFAULTS, LargeSteps, Settings
from gdp.simulator.constraints import Constraints, memory_limits
from gdp.simulator.problem import Problem
from gdp.simulator.simulate import Simulation
from gdp.units.units import Units, forward_units


@dataclass(eq=False)
class Estimator:
    """Estimates arrangements of one model on one machine; keeps what several have in common."""

    parts: Parts
    cluster: Cluster
    constraints: Constraints
    settings: Settings = DEFAULTS
    clock: Clock | None = None  # looked at where blocks are chosen
    _memo: Memo = field(default_factory=Memo)

    @cached_property
    def machine(self) -> DeviceSpeeds:
        """The speed and the kind of each device."""
        graph = self.parts.exact(1)
        times, device_class = op_time_classes(graph, self.cluster)
        (load_ns,) = loads_ns(graph, self.cluster, np.ones(graph.num_ops, np.bool_))
        alone = np.where(np.asarray(times.min(axis=0) < 0, np.bool_)[device_class], np.inf, load_ns)
        kinds = np.unique(np.stack((device_class, self.limits_bytes)), axis=1, return_inverse=True)[1].reshape(-1)
        return DeviceSpeeds(alone, kinds, _hosts(self.cluster), self.settings.layouts)

    @cached_property
    def limits_bytes(self) -> I64:
        """[D] the memory that constraints leave."""
        return memory_limits(self.cluster, self.constraints)

    @cached_property
    def effort(self) -> Effort:
        """The time that estimates take."""
        return Effort() if self.clock is None else self.clock.effort

    @cached_property
    def replicas(self) -> ReplicaSteps:
        """The steps of one replica alone."""
        own = self.machine, self.limits_bytes, self.settings, self.effort, self.clock
        return ReplicaSteps(self.parts, self.cluster, *own)

    @cached_property
    def rings(self) -> RingTimes:
        """The times of rings."""
        return RingTimes(self.cluster, self.machine)

    def estimate(self, arrangement: Arrangement) -> Candidate:
        """Returns the fastest estimate over constructive places of a replica, of those that fit if any does. Blocks are
        chosen, which takes long and makes a step slower, where places promise more without."""
        layout = arrangement.layout
        recompute, offload = (NONE if lever == AUTO else lever for lever in (layout.recompute, layout.offload))
        as_it_is = replace(arrangement, layout=replace(layout, recompute=recompute, offload=offload))
        found = [self._with_places(as_it_is, places) for places in self._candidates(arrangement)]
        if as_it_is == arrangement:
            return min(found)
        best: Candidate | None = None
        for known in sorted(found, key=lambda each: each.step_time_ns):
            if best is None or not best.fits or known.step_time_ns < best.step_time_ns:
                estimate = self._with_places(arrangement, known.places)
                best = estimate if best is None else min(best, estimate)
        assert best is not None, "there are places"
        return best

    def fits_beside_gathers(self, estimate: Candidate) -> bool:
        """Returns whether an estimate fits with what ZeRO 3 gathers at once on top, be it there at the peak or not."""
        cut = replace(estimate.way, layout=self.resolved(estimate.way, estimate.places))
        lacks = self._lacking(cut, estimate.places) + self.replicas.gathered_bytes(cut.layout)
        return not (lacks > 0).any()

    def has_time(self, arrangement: Arrangement) -> bool:
        """Returns whether there is time for an estimate."""
        layout, num_places = arrangement.layout, arrangement.num_places
        num_ops = self.parts.rough(layout.num_parts).num_ops
        num_guesses = 1 if num_places == 1 else 4  # at the places of a replica's ops, at most
        num_ops *= num_guesses * self.replicas.num_seen(layout, max(layout.microbatches), num_places)
        return has_time(self.clock, self.effort.estimate.seconds(num_ops))

    def least(self, arrangement: Arrangement) -> Candidate:
        """Returns what a pipeline would take that is never empty, without rings: arithmetic alone. Memory is that of
        what is resident, and of one micro-batch's activations, spread over all places of a replica."""
        return self._by_arithmetic(arrangement, lambda rates, count: float(rates.sum()))

    def promise(self, arrangement: Arrangement) -> Candidate:
        """Returns `least`, and of a large step, whose estimates take seconds, more: what a chain of ops takes, in which
        places wait for the first micro-batch and the last one, and what its rings take beyond."""
        if self.parts.exact(1).num_ops <= self.settings.large.estimated_ops:
            return self.least(arrangement)
        alone = self._by_arithmetic(arrangement, _rate_of_chain)
        beyond_ns = self.rings.beyond_ns(arrangement, self.replicas.figures(arrangement.layout), alone.step_time_ns)
        return Candidate.estimated(arrangement, Figures(alone.missing_bytes, alone.step_time_ns + beyond_ns))

    def _by_arithmetic(self, arrangement: Arrangement, rate_of: Callable[[F64, int], float]) -> Candidate:
        """Returns what a replica takes alone that does as many micro-batches a ns as `rate_of` says, from the rates [P]
        of its places and the number of micro-batches."""
        self.check_size(arrangement)
        layout, num_places = arrangement.layout, arrangement.num_places
        figures = self.replicas.figures(layout)
        slowest_ns, missing = 0.0, 0
        held_bytes = figures.resident_bytes - self._saved_bytes(figures, layout)
        held_bytes += figures.kept_bytes if layout.offload == NONE and layout.recompute != AUTO else 0
        for replica in self._unlike(arrangement):
            fastest, count = list(arrangement.devices[replica]), layout.microbatches[replica]
            rate = rate_of(1 / np.maximum(figures.each_ns[fastest], 1), count)
            once_ns = float(figures.once_ns[fastest].min()) / num_places / (layout.data if layout.zero else 1)
            slowest_ns = max(slowest_ns, count / rate + once_ns)
            missing = max(missing, -(-(held_bytes - int(self.limits_bytes[fastest].sum())) // num_places))
        return Candidate.estimated(arrangement, Figures(missing, int(slowest_ns)))

    def check_size(self, arrangement: Arrangement) -> None:
        """Raises InputError where a step on many devices has too many ops, the hops of its rings among them."""
        layout, parts, most_ops = arrangement.layout, self.parts, self.settings.large.most_ops
        if not self.cluster.is_large:
            return
        num_ops = parts.exact(parts.batch_size if parts.is_fixed else 1).num_ops * layout.num_parts
        if num_ops <= most_ops:
            num_ops += self.rings.num_exchanging(arrangement, self.replicas.figures(Layout()).gradient_bytes)
        if num_ops > most_ops:
            raise InputError(
                f"--parallel: the step of {layout} has about {num_ops:,} ops, and up to {most_ops:,} can be simulated; "
                "take fewer replicas, on more devices each, or fewer micro-batches"
            )

    def _candidates(self, arrangement: Arrangement) -> list[I64]:
        """Returns places [N] of a replica's ops, the same for all numbers of micro-batches."""
        graph = self.parts.rough(arrangement.layout.num_parts)
        kinds = tuple(int(self.machine.kinds[device]) for device in arrangement.devices[0])
        if len(kinds) == 1:
            return [np.zeros(graph.num_ops, np.int64)]
        alone, large = self.replicas.alone, self.settings.large
        devices = arrangement.devices[0]
        found = self._memo(("places", graph.op_names, kinds), lambda: staged_places(alone(graph, devices), large))
        if arrangement.layout.stages is None:
            return found
        found = [places for places in found if is_in_stages(graph, places, len(kinds))]
        if not found:
            raise InputError(
                f"stages={len(kinds)}: {graph.name!r} has no stages that only take from those before them; "
                "take fewer, or leave stages out"
            )
        return found

    def resolved(self, arrangement: Arrangement, places: I64, *, reserve_bytes: int = 0) -> Layout:
        """Returns the layout with blocks in place of auto: the fewest that leave `reserve_bytes`."""
        layout = arrangement.layout
        if AUTO not in (layout.recompute, layout.offload):
            return layout
        is_captured = self.parts.is_captured(layout.num_parts)
        return self._memo(
            ("resolved", is_captured, arrangement, places.tobytes(), reserve_bytes),
            lambda: with_chosen_blocks(
                layout,
                self._ranked_blocks(arrangement),
                places,
                lambda way: self._lacking(replace(arrangement, layout=way), places) + reserve_bytes,
                self.clock,
                None if layout.offload == AUTO else partial(self._again_ns, arrangement),
            ),
        )

    def stages_hold_activations(self, arrangement: Arrangement) -> bool:
        """Returns whether, by arithmetic, equal stages hold the activations of as many micro-batches as there are
        stages: those of one micro-batch in all, on the first one, beside its part of the model."""
        figures = self.replicas.figures(replace(arrangement.layout, recompute=NONE))
        held_bytes = (figures.resident_bytes + figures.gradient_bytes) // arrangement.num_places + figures.kept_bytes
        return held_bytes <= int(self.limits_bytes[list(arrangement.devices[0])].min())

    def share_of_blocks(self, arrangement: Arrangement, places: I64) -> float:
        """Returns the share of blocks that `auto` recomputes; 1 for the selective kind, too."""
        paths = self.resolved(arrangement, places).recompute
        if isinstance(paths, str):
            return float(paths != NONE)
        return len(paths) / len(self._ranked_blocks(arrangement))

    def _again_ns(self, arrangement: Arrangement, layout: Layout) -> int:
        """Returns the time that recomputed ops of a micro-batch take on the first device."""
        graph = self.parts.rough(layout.num_parts)
        times_ns, device_class = op_time_classes(graph, self.cluster)
        return recomputed_ns(graph, layout.recompute, times_ns[:, device_class[arrangement.devices[0][0]]])

    def _ranked_blocks(self, arrangement: Arrangement) -> list[tuple[str, int]]:
        """Returns the blocks that auto stands for, the cheapest first, and an op of each."""
        layout, device = arrangement.layout, arrangement.devices[0][0]

        def make() -> list[tuple[str, int]]:
            graph = self.parts.rough(layout.num_parts)
            if layout.offload == AUTO:
                return longest_held_blocks(graph)
            times_ns, device_class = op_time_classes(graph, self.cluster)
            return cheapest_blocks(graph, times_ns[:, device_class[device]])

        is_captured, kind = self.parts.is_captured(layout.num_parts), int(self.machine.kinds[device])
        return self._memo(("ranked", layout.num_parts, is_captured, layout.offload == AUTO, kind), make)

    @cached_property
    def all_cpus(self) -> list[int]:
        """The devices that are CPUs."""
        return [number for number, device in enumerate(self.cluster.devices) if device.is_cpu]

    def cpus(self, arrangement: Arrangement) -> tuple[int, ...] | None:
        """Returns the CPU [R] nearest to each replica for activations; None: they stay. InputError without one."""
        is_asked = arrangement.layout.offload != NONE
        if not is_asked and not self.parts.rough(arrangement.layout.num_parts).is_in_role(HOST_COPY).any():
            return None
        others = [cpu for cpu in self.all_cpus if cpu not in arrangement.all_devices]
        if not is_asked:  # the model's own code sends them there, or keeps them where there is no CPU
            others = others or self.all_cpus
            if not others:
                return None
        if not others:
            raise InputError(
                f"--parallel: offload needs a CPU that holds no replica, and {self.cluster.name!r} has none; name one, "
                "as in 4xl4-24g+cpu-16core, or leave offload out"
            )
        rates = self.cluster.bytes_per_second
        groups = arrangement.devices
        return tuple(max(others, key=lambda cpu: min(int(rates[x, cpu]) for x in devices)) for devices in groups)

    def _lacking(self, arrangement: Arrangement, places: I64) -> I64:
        """Returns the bytes [P] that are missing in each place, in the replica that lacks most; 0 or less: none."""
        layout, num_places = arrangement.layout, arrangement.num_places
        saved = self._saved_bytes(self.replicas.figures(replace(layout, recompute=NONE)), layout) // num_places
        lacks = [
            self._simulated(arrangement, replica, places)[0].peak_memory_bytes[:num_places]
            - saved
            - self.limits_bytes[list(arrangement.devices[replica])]
            for replica in self._unlike(arrangement)
        ]
        return np.asarray(np.max(lacks, axis=0), np.int64)

    def _with_places(self, arrangement: Arrangement, places: I64) -> Candidate:
        layout, num_places = self.resolved(arrangement, places), arrangement.num_places
        cut, figures = replace(arrangement, layout=layout), self.replicas.figures(layout)
        slowest_ns, missing = 0, int(self._lacking(cut, places).max())
        for replica in self._unlike(cut):
            count = layout.microbatches[replica]
            simulation, load_ns = self._simulated(cut, replica, places)
            more = count - self.replicas.num_seen(layout, count, num_places)
            slowest_ns = max(slowest_ns, simulation.step_time_ns + more * int(load_ns.max()))
        if layout.zero:  # updates are cut over replicas
            slowest_ns -= int(figures.once_ns[arrangement.devices[0][0]] * (1 - 1 / layout.data)) // num_places
        slowest_ns += self.rings.beyond_ns(arrangement, figures, slowest_ns)
        graph = self.parts.rough(layout.num_parts)
        busy_ns = busiest_channel_ns(self.cluster, arrangement, graph, places)
        return Candidate.estimated(arrangement, Figures(max(missing, 0), max(slowest_ns, busy_ns)), places)

    def _simulated(self, arrangement: Arrangement, replica: int, places: I64) -> tuple[Simulation, I64]:
        cpus = self.cpus(arrangement)
        cpu = None if cpus is None or cpus[replica] in arrangement.devices[replica] else cpus[replica]
        return self.replicas.simulate(arrangement, replica, places, cpu)

    def _unlike(self, arrangement: Arrangement) -> list[int]:
        """Returns a replica of each kind: those with as many micro-batches on devices of the same kinds are alike."""
        layout, kinds = arrangement.layout, self.machine.kinds[np.array(arrangement.devices)]
        cpus = self.cpus(arrangement)
        parts = [np.array(layout.microbatches)[:, None], kinds]
        parts += [] if cpus is None else [self.machine.kinds[list(cpus)][:, None]]
        replicas = np.unique(np.concatenate(parts, axis=1), axis=0, return_index=True)[1]
        return sorted(map(int, replicas))

    def _saved_bytes(self, figures: PartFigures, layout: Layout) -> int:
        """Returns what ZeRO saves on a replica."""
        whole = figures.state_bytes * (layout.zero >= 1) + figures.parameter_bytes * (layout.zero == 3)
        return whole * (layout.data - 1) // layout.data


def _rate_of_chain(rates: F64, count: int) -> float:
    """Returns the rate of stages at `rates` [P], which pass on `count` micro-batches one by one and share the work so
    that all are done at once: each waits for a micro-batch of the stages before it."""
    return float(np.sort(rates)[::-1] @ (1 - 1 / count) ** np.arange(len(rates)))


def staged_places(problem: Problem, large: LargeSteps) -> list[I64]:
    """Returns contiguous stages [N] along several chains; the best by dynamic programming where that is quick."""
    units = Units.of(problem, forward_units(problem))
    devices = np.arange(problem.num_devices)
    modules = (module_chain(problem, units, whole_layers=whole) for whole in (True, False))
    chains = [folded_chain(problem, units), *modules]
    found = [units.place_allowed(stages(problem, units, chain, devices)) for chain in chains]
    if problem.num_ops <= large.planned_ops and (best := CLASSICAL["dp-stages"](problem, 0)) is not None:
        found.insert(0, best)
    return list({places.tobytes(): places for places in found}.values())


def _hosts(cluster: Cluster) -> I64 | None:
    """Returns the host [D] of each device, by links that are much quicker than the slowest; None: all are alike."""
    rates = cluster.bytes_per_second + cluster.bytes_per_second.T
    apart = rates[rates > 0]
    if not len(apart) or apart.max() < 1.25 * apart.min():  # links of one host are quicker
        return None
    first, second = np.nonzero(rates > np.sqrt(float(apart.min()) * float(apart.max())))
    return connected(first, second, len(rates))
