"""Estimates: what an arrangement takes, from one replica alone and the arithmetic of its rings.

    step = one replica's passes and updates + what its rings take beyond the last backward pass

One replica is simulated with a few micro-batches, a ring with one bucket; what is left is proportional. N ops of one
micro-batch, D devices, R replicas, P places.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import product

import numpy as np

from gdp.arrays import I64
from gdp.budget import Clock, Effort, has_time
from gdp.cluster import Cluster
from gdp.cluster.changes import only
from gdp.errors import InputError
from gdp.graph import Graph, Op, Tensor
from gdp.graph.microbatches import shared_ops
from gdp.parallel.blocks import cheapest_blocks, longest_held_blocks
from gdp.parallel.buckets import BUCKET_BYTES, MANY_REPLICAS, bucket_bytes_over
from gdp.parallel.interpolation import have_same_ops
from gdp.parallel.layout import AUTO, NONE, Layout
from gdp.parallel.recompute import Recomputation, blocks_to_recompute
from gdp.parallel.ring_order import ring_over
from gdp.parallel.rings import Rings
from gdp.parallel.step import Step
from gdp.placers import CLASSICAL
from gdp.placers.contiguous import folded_chain, module_chain, stages
from gdp.search.batch_parts import Parts
from gdp.search.candidate import Arrangement, Candidate, Figures
from gdp.search.layouts.arrangement import DeviceSpeeds
from gdp.search.layouts.dispatch import levels_of
from gdp.search.layouts.less_memory import with_chosen_blocks
from gdp.search.layouts.part_figures import PartFigures, with_gradients_cut
from gdp.search.layouts.traffic import busiest_channel_ns
from gdp.search.settings import DEFAULTS, LargeSteps, Settings
from gdp.simulator.constraints import Constraints, memory_limits
from gdp.simulator.costs import op_time_classes
from gdp.simulator.problem import Placement, Problem
from gdp.simulator.simulate import Simulation, simulate
from gdp.units.forward_units import forward_units
from gdp.units.units import Units


@dataclass(eq=False)
class Estimator:
    """Estimates arrangements of one model on one machine; keeps what several have in common."""

    parts: Parts
    cluster: Cluster
    constraints: Constraints
    settings: Settings = DEFAULTS
    clock: Clock | None = None  # looked at where blocks are chosen
    _figures: dict[tuple[int, str | tuple[str, ...]], PartFigures] = field(default_factory=dict)
    _rings_ns: dict[tuple[tuple[tuple[int, ...], ...], tuple[int, ...] | None], int] = field(default_factory=dict)
    _places: dict[tuple[tuple[str, ...], tuple[int, ...]], list[I64]] = field(default_factory=dict)
    _steps: dict[tuple[int, int, str | tuple[str, ...], int], Step] = field(default_factory=dict)
    _recomputations: dict[str | tuple[str, ...], list[tuple[Graph, Recomputation]]] = field(default_factory=dict)
    _replicas: dict[object, tuple[Simulation, I64]] = field(default_factory=dict)
    _resolved: dict[object, Layout] = field(default_factory=dict)
    _ranked: dict[object, list[tuple[str, int]]] = field(default_factory=dict)

    @cached_property
    def machine(self) -> DeviceSpeeds:
        """The speed and the kind of each device."""
        times, device_class = op_time_classes(self.parts.exact(1), self.cluster)
        alone = np.where((times < 0).any(axis=0), np.inf, np.maximum(times, 0).sum(axis=0))[device_class]
        kinds = np.unique(np.stack((device_class, self.limits_bytes)), axis=1, return_inverse=True)[1].reshape(-1)
        return DeviceSpeeds(alone, kinds, _hosts(self.cluster, self.settings.layouts.near_link), self.settings.layouts)

    @cached_property
    def limits_bytes(self) -> I64:
        """[D] the memory that constraints leave."""
        return memory_limits(self.cluster, self.constraints)

    @cached_property
    def effort(self) -> Effort:
        """How long estimates take."""
        return Effort() if self.clock is None else self.clock.effort

    def estimate(self, arrangement: Arrangement) -> Candidate:
        """Returns the fastest estimate over constructive places of a replica, of those that fit if any does."""
        guesses = [self._with_places(arrangement, places) for places in self._candidates(arrangement)]
        return min(guesses)

    def has_time(self, arrangement: Arrangement) -> bool:
        """Returns whether there is time for an estimate."""
        layout, num_places = arrangement.layout, arrangement.num_places
        num_ops = self.parts.rough(layout.num_parts).num_ops
        num_guesses = 1 if num_places == 1 else self.settings.layouts.most_guesses
        num_ops *= num_guesses * self._seen(layout, max(layout.microbatches), num_places)
        return has_time(self.clock, self.effort.estimate.seconds(num_ops))

    def least(self, arrangement: Arrangement) -> Candidate:
        """Returns what a pipeline would take that is never empty, without rings: arithmetic alone.

        Memory is that of what is resident, spread over all places of a replica.
        """
        self.check_size(arrangement)
        layout, num_places = arrangement.layout, arrangement.num_places
        figures = self.figures(layout)
        slowest_ns, missing = 0.0, 0
        resident_bytes = figures.resident_bytes - self._saved_bytes(figures, layout)
        for replica in self._unlike(arrangement):
            fastest, count = list(arrangement.devices[replica]), layout.microbatches[replica]
            rate = (1 / np.maximum(figures.each_ns[fastest], 1)).sum()
            once_ns = float(figures.once_ns[fastest].min()) / num_places / (layout.data if layout.zero else 1)
            slowest_ns = max(slowest_ns, count / rate + once_ns)
            missing = max(missing, -(-(resident_bytes - int(self.limits_bytes[fastest].sum())) // num_places))
        return Candidate.estimated(arrangement, Figures(missing, int(slowest_ns)))

    def check_size(self, arrangement: Arrangement) -> None:
        """Raises InputError where a step on many devices has too many ops, the hops of its rings among them."""
        layout, parts, most_ops = arrangement.layout, self.parts, self.settings.large.most_ops
        if not self.cluster.is_large:
            return
        num_ops = parts.exact(parts.batch_size if parts.is_fixed else 1).num_ops * layout.num_parts
        if num_ops <= most_ops:
            num_ops += self.num_exchanging(arrangement, self.figures(Layout()).gradient_bytes)
        if num_ops > most_ops:
            raise InputError(
                f"--parallel: the step of {layout} has about {num_ops:,} ops, and up to {most_ops:,} can be simulated; "
                "take fewer replicas, on more devices each, or fewer micro-batches"
            )

    def num_exchanging(self, arrangement: Arrangement, gradient_bytes: int) -> int:
        """Returns about how many ops exchange `gradient_bytes` between replicas."""
        layout = arrangement.layout
        if layout.data == 1:
            return 0
        hosts = self.machine.hosts_of(arrangement) if layout.data > MANY_REPLICAS else None
        num_hops = Rings.of(layout.data, hosts=hosts).num_hops
        size = BUCKET_BYTES if layout.zero == 3 else bucket_bytes_over(layout.data, gradient_bytes, num_hops)
        num_rounds = layout.microbatches[0] if layout.zero == 3 else 1
        return num_hops * (gradient_bytes // size + arrangement.num_places) * num_rounds

    def _candidates(self, arrangement: Arrangement) -> list[I64]:
        """Returns places [N] of a replica's ops, the same for all numbers of micro-batches."""
        graph = self.parts.rough(arrangement.layout.num_parts)
        kinds = tuple(int(self.machine.kinds[device]) for device in arrangement.devices[0])
        if len(kinds) == 1:
            return [np.zeros(graph.num_ops, np.int64)]
        key = graph.op_names, kinds
        if key not in self._places:
            self._places[key] = constructed_places(self.alone(graph, arrangement.devices[0]), self.settings.large)
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

    def resolved(self, arrangement: Arrangement, places: I64, *, reserve_bytes: int = 0) -> Layout:
        """Returns the layout with blocks in place of auto: the fewest that leave `reserve_bytes`."""
        layout = arrangement.layout
        if AUTO not in (layout.recompute, layout.offload):
            return layout
        key = self.parts.is_captured(layout.num_parts), arrangement, places.tobytes(), reserve_bytes
        if key not in self._resolved:
            self._resolved[key] = with_chosen_blocks(
                layout,
                self._ranked_blocks(arrangement),
                places,
                lambda way: self._lacking(replace(arrangement, layout=way), places) + reserve_bytes,
                self.settings.layouts,
                self.clock,
            )
        return self._resolved[key]

    def _ranked_blocks(self, arrangement: Arrangement) -> list[tuple[str, int]]:
        """Returns the blocks that auto stands for, the cheapest first, and an op of each."""
        layout, device = arrangement.layout, arrangement.devices[0][0]
        is_captured = self.parts.is_captured(layout.num_parts)
        key = layout.num_parts, is_captured, layout.offload == AUTO, int(self.machine.kinds[device])
        if key not in self._ranked:
            graph = self.parts.rough(layout.num_parts)
            if layout.offload == AUTO:
                self._ranked[key] = longest_held_blocks(graph)
            else:
                times_ns, device_class = op_time_classes(graph, self.cluster)
                self._ranked[key] = cheapest_blocks(graph, times_ns[:, device_class[device]])
        return self._ranked[key]

    @cached_property
    def all_cpus(self) -> list[int]:
        """The devices that are CPUs."""
        return [number for number, device in enumerate(self.cluster.devices) if "cpu" in device.kind.lower()]

    def has_spare_cpu(self, arrangement: Arrangement) -> bool:
        """Returns whether a CPU holds no replica, and can hold activations."""
        return not set(self.all_cpus) <= set(arrangement.all_devices)

    def cpus(self, arrangement: Arrangement) -> tuple[int, ...] | None:
        """Returns the CPU [R] with the quickest links to each replica, for its activations; None without offload.

        InputError where there is none.
        """
        if arrangement.layout.offload == NONE:
            return None
        others = [cpu for cpu in self.all_cpus if cpu not in arrangement.all_devices]
        if not others:
            raise InputError(
                f"--parallel: offload needs a CPU that holds no replica, and {self.cluster.name!r} has none; name one, "
                "as in 4xl4-24g+cpu-16core, or leave offload out"
            )
        rates = self.cluster.bytes_per_second
        return tuple(
            max(others, key=lambda cpu: min(int(rates[device, cpu]) for device in devices))
            for devices in arrangement.devices
        )

    def _lacking(self, arrangement: Arrangement, places: I64) -> I64:
        """Returns the bytes [P] that are missing in each place, in the replica that lacks most; 0 or less: none."""
        layout, num_places = arrangement.layout, arrangement.num_places
        saved = self._saved_bytes(self.figures(replace(layout, recompute=NONE)), layout) // num_places
        lacks = [
            self._replica(arrangement, replica, places)[0].peak_memory_bytes[:num_places]
            - saved
            - self.limits_bytes[list(arrangement.devices[replica])]
            for replica in self._unlike(arrangement)
        ]
        return np.asarray(np.max(lacks, axis=0), np.int64)

    def _with_places(self, arrangement: Arrangement, places: I64) -> Candidate:
        layout, num_places = self.resolved(arrangement, places), arrangement.num_places
        cut, figures = replace(arrangement, layout=layout), self.figures(layout)
        slowest_ns, missing = 0, int(self._lacking(cut, places).max())
        for replica in self._unlike(cut):
            count = layout.microbatches[replica]
            simulation, load_ns = self._replica(cut, replica, places)
            more = count - self._seen(layout, count, num_places)
            slowest_ns = max(slowest_ns, simulation.step_time_ns + more * int(load_ns.max()))
        if layout.zero:  # updates are cut over replicas
            slowest_ns -= int(figures.once_ns[arrangement.devices[0][0]] * (1 - 1 / layout.data)) // num_places
        slowest_ns += self._rings(arrangement, figures, slowest_ns)
        graph = self.parts.rough(layout.num_parts)
        busy_ns = busiest_channel_ns(self.cluster, arrangement, graph, places)
        return Candidate.estimated(arrangement, Figures(max(missing, 0), max(slowest_ns, busy_ns)), places)

    def _unlike(self, arrangement: Arrangement) -> list[int]:
        """Returns a replica of each kind: those with as many micro-batches on devices of the same kinds are alike."""
        layout, kinds = arrangement.layout, self.machine.kinds[np.array(arrangement.devices)]
        cpus = self.cpus(arrangement)
        parts = [np.array(layout.microbatches)[:, None], kinds]
        parts += [] if cpus is None else [self.machine.kinds[list(cpus)][:, None]]
        replicas = np.unique(np.concatenate(parts, axis=1), axis=0, return_index=True)[1]
        return sorted(map(int, replicas))

    def _replica(self, arrangement: Arrangement, replica: int, places: I64) -> tuple[Simulation, I64]:
        """Returns a replica's step with a few micro-batches, and what one more takes in each of its places [P].

        In the simulation the CPU that its activations go to comes after the P places.
        """
        layout, cpus, own = arrangement.layout, self.cpus(arrangement), arrangement.devices[replica]
        few = self._seen(layout, layout.microbatches[replica], len(own))
        devices = own if cpus is None else (*own, cpus[replica])
        kinds = tuple(int(self.machine.kinds[device]) for device in devices)
        is_captured = self.parts.is_captured(layout.num_parts)
        share = _gradient_share(layout, layout.microbatches[replica])
        key = (layout.num_parts, is_captured, layout.recompute, layout.offload, kinds, few, share, places.tobytes())
        if key not in self._replicas:
            with self.effort.estimate.measured(few * self.parts.rough(layout.num_parts).num_ops, self.clock):
                step = self._step(layout, few, share)
                problem = self.alone(step.graph, devices)
                placement = step.placement(places, [range(len(own))], None if cpus is None else [len(own)])
                best = _best_alone(problem, step, placement)
                times_ns = problem.op_time_ns[np.arange(problem.num_ops), placement]
                is_once = np.logical_or(*shared_ops(step.graph))
                load_ns = np.bincount(placement, np.where(is_once, 0, times_ns), len(devices))[: len(own)] / few
            self._replicas[key] = best, np.asarray(load_ns, np.int64)
        return self._replicas[key]

    def _seen(self, layout: Layout, count: int, num_places: int) -> int:
        """Returns the number of micro-batches of a replica to simulate, of `count`."""
        enough = max(self.settings.large.searched_ops // self.parts.rough(layout.num_parts).num_ops, 1)
        return min(count, self.settings.layouts.seen_microbatches * num_places, enough)

    def _step(self, layout: Layout, count: int, share: int = 1) -> Step:
        """Returns a replica's step with `count` micro-batches; cut from captured ones only, but for offload.

        Which activations are large enough to be sent away depends on the number of samples. A replica keeps one of
        `share` chunks of each gradient.
        """
        if layout.offload != NONE:
            part = with_gradients_cut(self.parts.rough(layout.num_parts), share)
            return Step.of(part, Layout((count,), offload=layout.offload))
        made: list[Step] = []

        def graph_of(num_parts: int) -> Graph:
            key = num_parts, count, layout.recompute, share
            if key not in self._steps:
                part = with_gradients_cut(self._recomputed(num_parts, layout.recompute), share)
                alone = Layout((count,), recompute=layout.recompute)
                self._steps[key] = Step.of(self.parts.exact(num_parts), alone, part=part)
            made.append(self._steps[key])
            return made[-1].graph

        graph = self.parts.between(layout.num_parts, graph_of)
        return replace(made[0], graph=graph)

    def _recomputed(self, num_parts: int, modules: str | tuple[str, ...]) -> Graph:
        """Returns the captured step of one of `num_parts` with blocks recomputed.

        What is copied is found once for all steps with the same ops.
        """
        graph = self.parts.exact(num_parts)
        if modules == NONE:
            return graph
        for given, known in self._recomputations.setdefault(modules, []):
            if given is graph or have_same_ops(given, graph):
                return known.of_other_sizes(graph)
        found = Recomputation.of(blocks_to_recompute(graph, modules))
        self._recomputations[modules].append((graph, found))
        return found.graph

    def figures(self, layout: Layout) -> PartFigures:
        """Returns sums over one micro-batch of `layout`; with recompute=auto, of one that recomputes nothing."""
        recompute = NONE if layout.recompute == AUTO else layout.recompute
        key = layout.num_parts, recompute
        if key not in self._figures:
            graph = self._step(replace(layout, recompute=recompute, offload=NONE), 1).graph
            self._figures[key] = PartFigures.of(graph, self.cluster)
        return self._figures[key]

    def alone(self, graph: Graph, devices: Sequence[int]) -> Problem:
        """Returns the problem of placing `graph` on `devices`, with the memory that constraints leave there."""
        limits = {self.cluster.devices[d].name: int(self.limits_bytes[d]) for d in devices}
        return Problem.build(graph, only(self.cluster, devices), Constraints(max_memory_bytes=limits))

    def _rings(self, arrangement: Arrangement, figures: PartFigures, alone_ns: int) -> int:
        """Returns what rings take beyond the step `alone_ns` of a replica alone, in ns."""
        layout, num_places = arrangement.layout, arrangement.num_places
        if layout.data == 1:
            return 0
        slowest_ns = self._ring_ns(arrangement, self.ring_hosts(arrangement)[0])
        num_buckets = figures.gradient_bytes / num_places / BUCKET_BYTES
        total_ns = num_buckets * slowest_ns
        if layout.zero == 3:  # two gathers, of half a ring each, for every micro-batch
            total_ns *= (max(layout.microbatches) + 0.5) * 0.5
            return int(total_ns * min(total_ns / max(alone_ns, 1), 1))  # those that take less hide behind other blocks
        last_pass_ns = min(figures.backward_ns[d] for devices in arrangement.devices for d in devices) / num_places
        return int(max(total_ns - last_pass_ns, 0) + min(num_buckets, 1) * slowest_ns)

    def ring_hosts(self, arrangement: Arrangement) -> list[tuple[int, ...] | None]:
        """Returns the hosts [R] of replicas for rings inside hosts and over them, and None for rings over all.

        The one in which a bucket is quickest comes first; there are only rings over all where hosts are no use.
        """
        hosts = self.machine.hosts_of(arrangement) if arrangement.layout.data > 1 else None
        if hosts is None:
            return [None]
        if arrangement.layout.data > MANY_REPLICAS:  # a ring over all of R has R^2 hops
            return [hosts]
        return sorted((None, hosts), key=lambda hosts: self._ring_ns(arrangement, hosts))

    def _ring_ns(self, arrangement: Arrangement, hosts: tuple[int, ...] | None) -> int:
        """Returns what a bucket takes in the rings of all places at once, when nothing else runs."""
        devices = arrangement.devices
        if hosts is None and len(devices) > MANY_REPLICAS:
            return self._large_ring_ns(arrangement)
        if (devices, hosts) not in self._rings_ns:
            places = np.arange(arrangement.num_places)
            one, layout = _parameters(BUCKET_BYTES, len(places)), Layout((1,) * len(devices))
            ring = ring_over(self.cluster, devices)
            step = Step.of(one, layout, places=places[one.groups], ring=ring, hosts=hosts)
            placement = step.placement(one.groups, devices)
            problem = Problem.build(step.graph, self.cluster)
            self._rings_ns[devices, hosts] = simulate(problem, placement).step_time_ns
        return self._rings_ns[devices, hosts]

    def _large_ring_ns(self, arrangement: Arrangement) -> int:
        """Returns the same for one ring of many replicas, which has R^2 hops: R times the slowest one, twice."""
        grid = np.array(arrangement.devices)
        here, there = grid, np.roll(grid, -1, axis=0)
        chunk_bytes = -(-BUCKET_BYTES // len(grid))
        hop_ns = chunk_bytes * 1e9 / self.cluster.bytes_per_second[here, there] + self.cluster.latency_ns[here, there]
        return int(2 * (len(grid) - 1) * hop_ns.max())

    def _saved_bytes(self, figures: PartFigures, layout: Layout) -> int:
        """Returns what ZeRO saves on a replica."""
        whole = figures.state_bytes * (layout.zero >= 1) + figures.parameter_bytes * (layout.zero == 3)
        return whole * (layout.data - 1) // layout.data


def _best_alone(problem: Problem, step: Step, placement: Placement) -> Simulation:
    """Returns the step of a replica alone in the best of all orders of its micro-batches.

    On one device they differ in memory only, and so does the order of the program, which `best_dispatch` prefers.
    """
    is_one_device = len(np.unique(placement)) == 1
    levels = levels_of(problem, step, placement) if is_one_device else [problem.b_level_ns]
    found: list[Simulation] = []
    for order, level in product(problem.orders, levels):
        found.append(simulate(problem, placement, priority=problem.priority(order, level)))
        if is_one_device and not found[-1].missing_bytes.any():
            return found[-1]
    return min(found, key=Figures.of)


def constructed_places(problem: Problem, large: LargeSteps) -> list[I64]:
    """Returns contiguous stages [N] along several chains; the best by dynamic programming where that is quick."""
    units = Units.of(problem, forward_units(problem))
    devices = np.arange(problem.num_devices)
    chains = [
        folded_chain(problem, units),
        *(module_chain(problem, units, whole_layers=whole) for whole in (True, False)),
    ]
    found = [units.place_allowed(stages(problem, units, chain, devices)) for chain in chains]
    if problem.num_ops <= large.planned_ops and (best := CLASSICAL["dp-stages"](problem, 0)) is not None:
        found.insert(0, best)
    return list({places.tobytes(): places for places in found}.values())


def is_in_stages(graph: Graph, places: I64, num_stages: int) -> bool:
    """Returns whether `places` [N] are stages: all are used, and forward tensors never go to an earlier one."""
    is_forward = graph.is_in_phase("forward")
    sources, targets = graph.producers[graph.edge_tensors], graph.consumers
    is_passed = is_forward[sources] & is_forward[targets]
    is_used = len(np.unique(places[is_forward])) == num_stages
    return is_used and bool((places[sources] <= places[targets])[is_passed].all())


def _hosts(cluster: Cluster, near_link: float) -> I64 | None:
    """Returns the host [D] of each device, by links that are much quicker than the slowest; None: all are alike."""
    rates = cluster.bytes_per_second + cluster.bytes_per_second.T
    apart = rates[rates > 0]
    if not len(apart) or apart.max() < near_link * apart.min():
        return None
    from scipy.sparse.csgraph import connected_components  # half a second, which devices that are alike never need

    is_near = (rates > np.sqrt(float(apart.min()) * float(apart.max()))) | np.eye(len(rates), dtype=np.bool_)
    return np.asarray(connected_components(is_near, directed=False)[1], np.int64)


def _gradient_share(layout: Layout, count: int) -> int:
    """Returns the number of replicas that share gradients when the last of `count` micro-batches is done."""
    return layout.data if layout.zero == 3 or (layout.zero == 2 and count == 1) else 1


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
