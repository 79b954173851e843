"""From a plan to what a target can express: each unit on one device, within memory, and what the step takes then."""

from dataclasses import dataclass
from functools import cached_property

import numpy as np
import numpy.typing as npt

from gdp.export.stages import StageSearch, allowed_stages, balanced_stages, nearest_stages
from gdp.export.target import Target
from gdp.export.units import Units
from gdp.graph import I64
from gdp.placers.base import Start, UnitArrays
from gdp.placers.memory_repair import fit_memory
from gdp.plan import Plan
from gdp.problem import Placement, Problem
from gdp.simulate import Simulation, replay, simulate

_STAGE_SIMULATIONS, _STAGE_WORK = 2000, 20_000_000  # of the search among stages near a plan; ops simulated in all
_REPAIR_BUDGET = "2000sims"  # of the search for units that fit, where repair finds none


@dataclass(frozen=True, eq=False)
class Snapped:
    """A plan as a target runs it."""

    target: Target
    problem: Problem
    units: Units
    devices: I64  # [U]
    simulation: Simulation  # of the units on their devices; of the same ops in another order where some are offloaded
    plan_step_time_ns: int

    @property
    def step_time_ns(self) -> int:
        return self.simulation.step_time_ns

    @property
    def loss(self) -> float:
        """By how much the step is slower than the plan's: 0.066 = 6.6 %; below 0 where it is faster."""
        return self.step_time_ns / max(self.plan_step_time_ns, 1) - 1

    @property
    def content(self) -> str:
        """Of the target's file."""
        return self.target.write(self.problem, self.units, self.devices)

    @property
    def is_offloaded(self) -> bool:
        """Whether weights stay on a CPU while their modules compute on a GPU."""
        return self.simulation.problem is not self.problem and self.simulation.problem.graph is not self.problem.graph

    @cached_property
    def program_order_ns(self) -> int | None:
        """The step time if each device starts its ops in the order of the program, as tools do that launch ops one
        after the other; None with micro-batches, whose order is the tool's own."""
        problem, placement = self.simulation.problem, self.simulation.placement
        if problem.microbatch.max() > 0:
            return None
        order = [np.flatnonzero(placement == device) for device in range(problem.num_devices)]
        return simulate(problem, placement, order=order).step_time_ns


def snap(problem: Problem, plan: Plan, target: Target, *, may_offload: bool = True) -> Snapped:
    """`plan`, of the problem's graph and cluster, as `target` runs it; it may not fit (`simulation.missing_bytes`).

    A unit goes where most of its time was, a chain is cut where most of the time stays; then repair and search change
    what does not fit, and stages where that is faster; what still does not fit is offloaded, if the target can and may.
    InputError where the target cannot run the graph.
    """
    plan.check_belongs(problem.graph, problem.cluster)
    units = target.read_units(problem)
    devices = units.devices_of(plan.placement)
    if devices is not None and can_run(units, devices):
        simulation = replay(problem, plan)
        if not simulation.missing_bytes.any():
            return Snapped(target, problem, units, devices, simulation, plan.step_time_ns)
    devices = _near(problem, units, plan)
    simulation = simulated(problem, units.place(devices), plan)
    if may_offload and simulation.missing_bytes.any() and target.offload is not None:
        found = target.offload(problem, units, devices)
        devices, simulation = found or (devices, simulation)
    return Snapped(target, problem, units, devices, simulation, plan.step_time_ns)


def simulated(problem: Problem, placement: Placement, plan: Plan | None = None) -> Simulation:
    """The step of `placement`: of the plan's own one in its order, else the best of the orders that gdp knows and that
    of the plan's starts, by bytes over the limits, then time."""
    if plan is not None and np.array_equal(placement, plan.placement):
        return replay(problem, plan)
    found = [simulate(problem.in_order(order), placement) for order in problem.orders]
    if plan is not None:
        found.append(simulate(problem, placement, priority=Start.of(replay(problem, plan)).priority))
    return min(found, key=key_of)


def order_of(problem: Problem, placement: Placement) -> str:
    """The order of micro-batches in which `placement` does best; without any the b-level."""
    return min(problem.orders, key=lambda name: key_of(simulate(problem.in_order(name), placement)))


def key_of(simulation: Simulation) -> tuple[int, int]:
    """(bytes over the limits, step time): the less the better."""
    return int(simulation.missing_bytes.sum()), simulation.step_time_ns


def can_run(units: Units, devices: I64) -> bool:
    """Whether the target can run units on these devices [U]: allowed ones and, in a chain, one stage a device."""
    if not units.allowed[np.arange(units.num_units), devices].all():
        return False
    num_runs = 1 + int((np.diff(devices) != 0).sum())
    return not units.is_chain or num_runs == len(set(devices.tolist()))


def _near(problem: Problem, units: Units, plan: Plan) -> I64:
    weight = _weights(problem, units, plan.placement)
    weight[~units.allowed] = -1.0
    if units.is_chain:
        search = StageSearch(problem.in_order(order_of(problem, plan.placement)), units)
        starts = [nearest_stages(weight), *balanced_stages(problem, units)]
        if not any(map(search.is_allowed, starts)):
            starts = allowed_stages(weight, units.allowed)
        return search.run(starts, min(_STAGE_SIMULATIONS, _STAGE_WORK // problem.num_ops))
    coarse = units.coarse(problem)
    placement = UnitArrays.of(problem, units.index).place(weight.argmax(axis=1))
    simulation = simulated(problem, placement, plan)
    if simulation.missing_bytes.any():
        placement = fit_memory(coarse, placement)
        if simulated(problem, placement).missing_bytes.any():
            placement = _search(coarse, placement)
    devices = units.devices_of(placement)
    assert devices is not None, "units are groups there"
    return devices


def _search(coarse: Problem, placement: Placement) -> Placement:
    from gdp.budget import Budget, Clock
    from gdp.coarsen import reduce
    from gdp.placers.portfolio import find

    found = find(reduce(coarse), "auto", Clock(Budget.parse(_REPAIR_BUDGET)), starts=[Start(placement)])
    return placement if found.best is None else found.best.placement


def _weights(problem: Problem, units: Units, placement: Placement) -> npt.NDArray[np.float64]:
    """[U, D] what of each unit is on each device: time, among equals bytes held, then ops."""
    weight = np.zeros((units.num_units, problem.num_devices))
    held = problem.graph.resident_bytes + problem.arrays.memory.alloc_bytes
    value = problem.mean_op_time_ns + 1e-6 * held / max(float(held.max()), 1.0) + 1e-9
    np.add.at(weight, (units.index, placement), value)
    return weight
