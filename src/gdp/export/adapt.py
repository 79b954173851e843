"""`adapt`: turns a plan into one that a target can express, with each unit on one device, within memory."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import permutations

import numpy as np

from gdp.arrays import F64, I64, unique
from gdp.budget import Budget, Clock
from gdp.errors import InputError
from gdp.export.export_target import ExportTarget, ExportUnits, is_cpu, stage_starts
from gdp.export.stage_search import StageSearch, allowed_stages, balanced_stages, nearest_stages
from gdp.graph import Graph
from gdp.graph.copies import BATCH_END
from gdp.placers.memory_repair import fit_memory
from gdp.search.candidate import Candidate, Figures
from gdp.search.question import Question
from gdp.search.solvers import solve
from gdp.simulator.plan import Plan
from gdp.simulator.problem import Placement, Problem
from gdp.simulator.simulate import Simulation, simulate
from gdp.units.units import Units

_STAGE_SIMULATIONS, _STAGE_WORK = 2000, 20_000_000  # of the search among stages near a plan; ops simulated in all
_GIB = 2**30
_AS_FAST = 1.001  # of a step time: what the moved ends of stages may cost in transfers
_REPAIR_BUDGET = "2000sims"  # of the search for units that fit, where repair finds none


@dataclass(frozen=True, eq=False)
class AdaptedPlan:
    """A plan as a target runs it."""

    target: ExportTarget
    graph: Graph  # of the plan
    problem: Problem  # with the memory that the target holds beside the graph
    units: ExportUnits
    devices: I64  # [U]
    simulation: Simulation  # of the units on their devices; of the same ops in another order where some are offloaded
    plan_step_time_ns: int
    near: Simulation | None = None  # of units near to the plan, where one device alone is faster and is written

    @property
    def step_time_ns(self) -> int:
        return self.simulation.step_time_ns

    @property
    def loss(self) -> float:
        """Relative increase of the plan's step time: 0.066 = 6.6 %; below 0 where the step is faster."""
        return self.step_time_ns / max(self.plan_step_time_ns, 1) - 1

    @property
    def content(self) -> str:
        """Content of the target's file."""
        return self.target.write(self.problem, self.units, self.devices)

    @property
    def notes(self) -> list[str]:
        """Returns sentences on assumptions about the target, and on costs that the figures lack."""
        notes = self.target.notes(self.problem, self.units, self.devices)
        if self.near is not None:
            name, num_batches = self.problem.cluster.devices[int(self.devices[0])].name, self._num_batches
            near_ms, of = self.near.step_time_ns / 1e6 / (num_batches or 1), "batch" if num_batches else "step"
            does = "does not fit" if self.near.missing_bytes.any() else f"takes {near_ms:.4g} ms a {of}"
            notes.append(f"All of the model is on {name}: what {self.target.name} makes of the plan {does}.")
        if self.is_offloaded and (unused := self._unused_memory()):
            notes.append(unused)
        return notes

    @property
    def _num_batches(self) -> int:
        """The batches that a stream of them has; 0 for one step."""
        return int(self.problem.graph.is_in_role(BATCH_END).sum())

    def _unused_memory(self) -> str:
        """Returns a sentence on GPUs that use less than half of their memory while weights stay on a CPU, or ""."""
        cpus, limits, peaks = is_cpu(self.problem), self.problem.memory_limit_bytes, self.simulation.peak_memory_bytes
        gpus = [
            number for number in np.flatnonzero(~cpus & (limits > 0)).tolist() if 2 * peaks[number] < limits[number]
        ]
        if not gpus:
            return ""
        names = [device.name for device in self.problem.cluster.devices]
        used = ", ".join(f"{names[gpu]} uses {peaks[gpu] / _GIB:.1f} of {limits[gpu] / _GIB:.1f} GiB" for gpu in gpus)
        return (
            f"Memory is left unused: {used}, while {peaks[cpus].sum() / _GIB:.1f} GiB stay on the CPU. An export "
            f"keeps to the plan's devices; place with --for {self.target.name}, or pin layers there (--pin), to use it."
        )

    @property
    def is_offloaded(self) -> bool:
        """Returns whether weights stay on a CPU while their modules compute on a GPU."""
        return self.simulation.problem is not self.problem and self.simulation.problem.graph is not self.problem.graph

    @cached_property
    def program_order_ns(self) -> int | None:
        """Step time if each device starts its ops in the order of the program, as tools do that launch ops in sequence.
        None with micro-batches, whose order is the tool's own."""
        problem, placement = self.simulation.problem, self.simulation.placement
        if problem.microbatch.max() > 0:
            return None
        order = [np.flatnonzero(placement == device) for device in range(problem.num_devices)]
        return simulate(problem, placement, order=order).step_time_ns


def adapt(problem: Problem, plan: Plan, target: ExportTarget, *, may_offload: bool = True) -> AdaptedPlan:
    """Returns `plan`, of the problem's graph and cluster, as `target` runs it; it may not fit in memory. Each unit goes
    to the device that has most of its time, and a chain is cut where most of the time stays. Repair and search then
    change units that do not fit, and stages where that is faster. If the step still does not fit, units are offloaded,
    if the target can and may. InputError where the target cannot run the graph."""
    plan.check_belongs(problem.graph, problem.cluster)
    units = target.read_units(problem)
    return adapt_within(target.with_room(problem), plan, target, units, graph=problem.graph, may_offload=may_offload)


def adapt_within(
    problem: Problem, plan: Plan, target: ExportTarget, units: ExportUnits, *, graph: Graph, may_offload: bool = True
) -> AdaptedPlan:
    """Returns `adapt` of a plan of `graph`: `problem` has its ops, and the target's own memory beside them."""
    devices = units.devices_of(plan.placement)
    is_expressible = devices is not None and can_run(units, devices)
    simulation = simulated(problem, plan.placement, plan) if is_expressible else None
    if devices is None or simulation is None or simulation.missing_bytes.any():
        devices = _near(problem, units, plan)
        simulation = simulated(problem, units.place(devices), plan)
        if may_offload and simulation.missing_bytes.any() and target.offload is not None:
            devices, simulation = target.offload(problem, units, devices) or (devices, simulation)
    devices, simulation = arranged(problem, target, units, devices, simulation, plan)
    near, (alone, device) = simulation, (None, -1) if graph.replicas.any() else _alone(problem, units)
    if alone is None or Figures.of(near) <= Figures.of(alone):
        return AdaptedPlan(target, graph, problem, units, devices, near, plan.step_time_ns)
    devices = np.full(units.num_units, device)
    return AdaptedPlan(target, graph, problem, units, devices, alone, plan.step_time_ns, near)


def _alone(problem: Problem, units: ExportUnits) -> tuple[Simulation | None, int]:
    """Returns the fastest step on one device that fits, and the device; (None, -1) where none fits."""
    kinds = _kinds(problem)
    allowed = np.asarray(units.allowed.all(axis=0))
    first = {kind: device for device, kind in reversed(list(enumerate(kinds))) if allowed[device]}
    steps = [(simulated(problem, np.full(problem.num_ops, device)), device) for device in sorted(first.values())]
    fitting = [(step, device) for step, device in steps if not step.missing_bytes.any()]
    return min(fitting, key=lambda item: item[0].step_time_ns, default=(None, -1))


def arranged(
    problem: Problem,
    target: ExportTarget,
    units: ExportUnits,
    devices: I64,
    simulation: Simulation,
    plan: Plan | None = None,
) -> tuple[I64, Simulation]:
    """Returns the devices [U] that the target's `arrange` makes of these, if they fit as well, and their step. Devices
    of one kind then hold as much of its layers, where that takes as long."""
    if target.arrange is not None:
        better = target.arrange(problem, units, devices)
        if not np.array_equal(better, devices) and can_run(units, better):
            other = simulated(problem, units.place(better), plan)
            if other.missing_bytes.sum() <= simulation.missing_bytes.sum():
                devices, simulation = better, other
    even = _evened(problem, units, devices, target.layers(units))
    if not np.array_equal(even, devices) and can_run(units, even):
        other = simulated(problem, units.place(even), plan)
        if other.missing_bytes.sum() <= simulation.missing_bytes.sum() and (
            other.step_time_ns <= _AS_FAST * simulation.step_time_ns
        ):
            return even, other
    return devices, simulation


def _evened(problem: Problem, units: ExportUnits, devices: I64, layers: Sequence[int]) -> I64:
    """[U] Hands `layers`, of which each device has one run, from the fuller to the emptier device of its kind."""
    here = devices[list(layers)]
    order = [int(here[start]) for start in stage_starts(here)] if len(here) else []
    if len(set(order)) < len(order) or len(order) < 2:
        return devices
    sizes = np.bincount(units.index, problem.graph.resident_bytes, units.num_units)
    held, size, kinds = np.bincount(devices, sizes, problem.num_devices), sizes[list(layers)].mean(), _kinds(problem)
    counts = {device: int((here == device).sum()) for device in order}
    pairs = [pair for pair in permutations(order, 2) if kinds[pair[0]] == kinds[pair[1]]]
    while pairs:
        full, free = max(pairs, key=lambda pair: held[pair[0]] - held[pair[1]])
        if held[full] - held[free] <= max(size, 0) or counts[full] == 1:
            break
        for device, change in ((full, -1), (free, 1)):
            counts[device] += change
            held[device] += change * size
    even = devices.copy()
    even[list(layers)] = np.repeat(order, list(counts.values()))
    return even


def _kinds(problem: Problem) -> list[tuple[str, int]]:
    """[D] Returns the kind of each device, with its memory limit."""
    kinds = [device.kind for device in problem.cluster.devices]
    return list(zip(kinds, problem.memory_limit_bytes.tolist(), strict=True))


def simulated(problem: Problem, placement: Placement, plan: Plan | None = None) -> Simulation:
    """Returns the step of `placement`: the plan's own one in its order, any other in the best order known. The orders
    are those of `Problem.orders`, and that in which the plan starts its ops."""
    if plan is not None and np.array_equal(placement, plan.placement):
        return simulate(problem, placement, order=plan.order)
    simulations = [simulate(problem.in_order(order), placement) for order in problem.orders]
    if plan is not None:
        started = simulate(problem, plan.placement, order=plan.order)
        simulations.append(simulate(problem, placement, priority=Candidate.start(started).priority))
    return min(simulations, key=Figures.of)


def in_same_places(target: ExportTarget, problem: Problem, placement: Placement, other: Problem) -> Simulation:
    """Returns the step of `other`, such as the prefill of a decoder, its units where `placement` [N] has those.
    InputError where they are not those of `problem`."""
    units, others = target.read_units(problem), target.read_units(other)
    devices = units.devices_of(placement)
    if devices is None or units.members != others.members:
        raise InputError(f"graph {other.graph.name!r}: has other {target.level} than {problem.graph.name!r}")
    return simulated(other, others.place(devices))


def order_of(problem: Problem, placement: Placement) -> str:
    """Returns the order of micro-batches in which `placement` does best; without any the b-level."""
    return min(problem.orders, key=lambda name: Figures.of(simulate(problem.in_order(name), placement)))


def can_run(units: ExportUnits, devices: I64) -> bool:
    """Returns whether units may be on these devices [U], with one stage a device in a chain."""
    if not units.may_be_on(devices):
        return False
    return not units.is_chain or len(stage_starts(devices)) == len(unique(devices))


def _near(problem: Problem, units: ExportUnits, plan: Plan) -> I64:
    weight = _weights(problem, units, plan.placement)
    weight[~units.allowed] = -1.0
    if units.is_chain:
        search = StageSearch(problem.in_order(order_of(problem, plan.placement)), units)
        starts = [nearest_stages(weight), *balanced_stages(units)]
        if not any(map(units.may_be_on, starts)):
            starts = allowed_stages(weight, units.allowed)
        return search.run(starts, min(_STAGE_SIMULATIONS, _STAGE_WORK // problem.num_ops))
    coarse = units.coarse(problem)
    placement = Units.of(problem, units.index).place_allowed(weight.argmax(axis=1))
    if simulated(problem, placement, plan).missing_bytes.any():
        placement = fit_memory(coarse, placement)
        if simulated(problem, placement).missing_bytes.any():
            placement = _search(coarse, placement)
    devices = units.devices_of(placement)
    assert devices is not None, "units are groups there"
    return devices


def _search(coarse: Problem, placement: Placement) -> Placement:
    question = Question.about(coarse, starts=[Candidate(placement)])
    best = solve("auto", question, Clock(Budget.parse(_REPAIR_BUDGET))).best
    return placement if best is None else best.placement


def _weights(problem: Problem, units: ExportUnits, placement: Placement) -> F64:
    """[U, D] Returns how much of each unit is on each device: time, among equals bytes held, then ops."""
    weight = np.zeros((units.num_units, problem.num_devices))
    held_bytes = problem.graph.resident_bytes + problem.simulator.arrays.memory.alloc_bytes
    value = problem.mean_op_time_ns + 1e-6 * held_bytes / max(float(held_bytes.max()), 1.0) + 1e-9
    np.add.at(weight, (units.index, placement), value)
    return weight
