"""Modules whose weights stay on the CPU while they compute on a GPU, as accelerate runs them.

Its hooks fetch a module's weights when the module begins and drop them when it ends, so nothing overlaps: the fewer
bytes are offloaded the better. U units, D devices.
"""

from collections.abc import Callable, Iterator
from functools import partial

import numpy as np

from gdp.arrays import I64
from gdp.export.accelerate_maps import DeviceMap, fetching_late, placement_of
from gdp.export.devices import is_cpu
from gdp.export.modules import first_input
from gdp.export.units import ExportUnits
from gdp.simulator.problem import Problem
from gdp.simulator.simulate import Simulation, simulate

_MAX_STEPS = 9  # of a bisection

Offloaded = tuple[I64, Simulation]
"""The devices [U] of units, and the step as accelerate runs it."""


def offload(
    problem: Problem, units: ExportUnits, devices: I64, to_map: Callable[[Problem, ExportUnits, I64], DeviceMap]
) -> Offloaded | None:
    """Moves units from their GPUs ([U] `devices`) to the CPU until the step fits, and returns the fastest such step.

    If nothing else fits, all units are on the CPU, which then computes. None without a CPU beside GPUs, in training,
    and if even that does not fit.

    The unit that takes the step's inputs is on a GPU, on which offloaded modules compute: its own, or any other if the
    step does not fit so.
    """
    cpus = is_cpu(problem)
    if cpus.all() or not cpus.any() or "update" in problem.graph.phases:
        return None
    host = int(np.argmax(cpus))
    resident_bytes = np.zeros(units.num_units, np.int64)
    np.add.at(resident_bytes, units.index, problem.graph.resident_bytes)
    first = units.index[first_input(problem.graph)]
    candidates = np.flatnonzero((resident_bytes > 0) & (np.arange(units.num_units) != first))
    by_size = candidates[np.argsort(resident_bytes[candidates], kind="stable")]
    orders = candidates[::-1], by_size[::-1], by_size  # the last units first, as accelerate does; largest; smallest

    def run(moved: I64) -> Offloaded | None:
        placement = placement_of(problem, to_map(problem, units, moved))
        if placement is None:
            return None
        fetched, where = fetching_late(problem, placement) or (problem, placement)
        program = [np.flatnonzero(where == device) for device in range(problem.num_devices)]  # as hooks run it
        simulation = simulate(fetched, where, order=program)
        return (moved, simulation) if simulation.feasible else None

    def run_with(main: int, offloaded: I64) -> Offloaded | None:
        moved = devices.copy()
        moved[first] = main
        moved[offloaded] = host
        return run(moved)

    for main in dict.fromkeys([int(devices[first]), *np.flatnonzero(~cpus).tolist()]):
        steps = [step for order in orders for step in _fewest(order, partial(run_with, main))]
        if steps:
            return min(steps, key=lambda step: step[1].step_time_ns)
    return run(np.full(units.num_units, host))


def _fewest(order: I64, run: Callable[[I64], Offloaded | None]) -> Iterator[Offloaded]:
    """Finds by bisection how many of `order` are enough, and yields all steps that fit."""
    low, high, count = 0, len(order), len(order)
    for _ in range(_MAX_STEPS):
        step = run(order[:count])
        if step is not None:
            yield step
            high = count
        elif count == len(order):
            return
        else:
            low = count
        if high - low <= 1:
            return
        count = (low + high) // 2
