"""Modules whose weights stay on the CPU while they compute on a GPU, as accelerate runs them.

Its hooks fetch a module's weights when the module begins and drop them when it ends, so nothing overlaps: the fewer
bytes are offloaded the better. U units, D devices.
"""

from collections.abc import Callable, Iterator
from functools import partial

import numpy as np

from gdp.accelerate_maps import DeviceMap, fetching_late, is_cpu, placement_of
from gdp.export.units import Units
from gdp.graph import I64
from gdp.problem import Problem
from gdp.simulate import Simulation, simulate

_STEPS = 9  # halvings of what is offloaded


def can_offload(problem: Problem) -> bool:
    """Whether there are weights that stay as they are, and a CPU beside GPUs."""
    cpus = is_cpu(problem)
    return any(cpus) and not all(cpus) and "update" not in problem.graph.phases


def offload(
    problem: Problem, units: Units, devices: I64, to_map: Callable[[Problem, Units, I64], DeviceMap]
) -> tuple[I64, Simulation] | None:
    """Units on GPUs ([U] `devices`) with so many of them on the CPU that the step fits, and the step as accelerate runs
    it; the fastest found. All on the CPU, which then computes, if nothing else fits. None without a CPU beside GPUs, in
    training, and if even that does not fit.

    The unit that takes the step's inputs is on a GPU, the one on which offloaded modules compute: where it is, or any
    other if the step does not fit so.
    """
    if not can_offload(problem):
        return None
    cpus = np.array(is_cpu(problem))
    host = int(np.argmax(cpus))
    held = np.zeros(units.num_units, np.int64)
    np.add.at(held, units.index, problem.graph.resident_bytes)
    first = units.index[next((op for op, kind in enumerate(problem.graph.kinds) if kind == "input"), 0)]
    candidates = np.flatnonzero((held > 0) & (np.arange(units.num_units) != first))

    def run(moved: I64) -> tuple[I64, Simulation] | None:
        placement = placement_of(problem, to_map(problem, units, moved))
        if placement is None:
            return None
        fetched, where = fetching_late(problem, placement) or (problem, placement)
        program = [np.flatnonzero(where == device) for device in range(problem.num_devices)]  # as hooks run it
        return moved, simulate(fetched, where, order=program)

    def run_with(main: int, chosen: I64) -> tuple[I64, Simulation] | None:
        moved = devices.copy()
        moved[first] = main
        moved[chosen] = host
        return run(moved)

    others = [gpu for gpu in np.flatnonzero(~cpus).tolist() if gpu != devices[first]]
    for main in (int(devices[first]), *others):
        found = [
            answer
            for order in _orders(candidates, held)
            for answer in _fewest(order, partial(run_with, main))
            if answer is not None and answer[1].feasible
        ]
        if found:
            return min(found, key=lambda answer: answer[1].step_time_ns)
    everything = run(np.full(units.num_units, host))
    return everything if everything is not None and everything[1].feasible else None


def _orders(candidates: I64, held: I64) -> Iterator[I64]:
    """In which units go: the last ones first, as accelerate does; the largest; the smallest."""
    yield candidates[::-1]
    by_size = candidates[np.argsort(held[candidates], kind="stable")]
    yield by_size[::-1]
    yield by_size


def _fewest(order: I64, run: Callable[[I64], tuple[I64, Simulation] | None]) -> Iterator[tuple[I64, Simulation] | None]:
    """What is run to find, by bisection, how many of `order` are enough."""
    low, high = 0, len(order)
    for step in range(_STEPS):
        count = high if step == 0 else (low + high) // 2
        answer = run(order[:count])
        yield answer
        fits = answer is not None and answer[1].feasible
        if step == 0 and not fits:
            return
        low, high = (low, count) if fits else (count, high)
        if high - low <= 1:
            return
