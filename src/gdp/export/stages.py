"""Contiguous stages of a chain of units: those nearest to a plan, and the fastest that a search finds.

U units in the order of execution, D devices; stages are devices [U], each device in at most one run.
"""

import itertools

import numpy as np
import numpy.typing as npt

from gdp.errors import InputError
from gdp.export.units import Units
from gdp.graph import I64, Bool
from gdp.placers.base import UnitArrays, device_subsets
from gdp.placers.contiguous import Chain, stages
from gdp.placers.dp_stages import least_bottleneck
from gdp.placers.memory_repair import excess_bytes
from gdp.problem import Problem
from gdp.simulate import evaluate_many

F64 = npt.NDArray[np.float64]

_ALIVE = (0.0, 0.5, 1.0)  # of what stages allocate, held at once: estimates for stages within memory
_MANY, _KEPT = 10, 1000  # devices of which all sets are looked at; sets that are, of more
_BATCH = 64  # moves simulated at once


def nearest_stages(weight: F64, order: I64 | None = None) -> I64:
    """[U] the stages that agree most with `weight` [U, D], what each unit has on each device: dynamic programming over
    (unit, device), devices in the given order, or that of the mean position of what they have."""
    num_units = len(weight)
    if order is None:
        order = _order_by_position(weight)
    num_devices = len(order)
    best = np.full((num_units, num_devices), -np.inf)
    came_from = np.zeros((num_units, num_devices), np.int64)
    gain = weight[:, order]
    best[0] = gain[0]
    for unit in range(1, num_units):
        top = 0
        for stage in range(num_devices):
            if best[unit - 1, stage] > best[unit - 1, top]:
                top = stage
            came_from[unit, stage] = top
            best[unit, stage] = best[unit - 1, top] + gain[unit, stage]
    found = np.empty(num_units, np.int64)
    stage = int(np.argmax(best[-1]))
    for unit in range(num_units - 1, -1, -1):
        found[unit] = order[stage]
        stage = int(came_from[unit, stage])
    return found


def _order_by_position(weight: F64) -> I64:
    num_units, num_devices = weight.shape
    totals = weight.sum(axis=0)
    place = (weight * np.arange(num_units)[:, None]).sum(axis=0) / np.maximum(totals, 1e-300)
    return np.lexsort((np.arange(num_devices), np.where(totals > 0, place, np.inf)))


def allowed_stages(weight: F64, allowed: Bool) -> list[I64]:
    """Stages near to `weight` [U, D] that go only where units are `allowed` [U, D]: one [U], or none if there are none.
    On more than _MANY devices some may be missed.

    Each device goes as far as it may: what comes after a longer stage needs no more than what comes after a shorter.
    """
    num_units, num_devices = allowed.shape
    beyond = np.full((num_units + 1, num_devices), num_units)  # the first unit from each on that is not allowed
    for unit in reversed(range(num_units)):
        beyond[unit] = np.where(allowed[unit], beyond[unit + 1], unit)
    devices = range(num_devices)
    reached: dict[frozenset[int], tuple[int, tuple[int, ...]]] = {frozenset(): (0, ())}
    for _ in devices:
        longer: dict[frozenset[int], tuple[int, tuple[int, ...]]] = {}
        for used, (unit, order) in reached.items():
            if unit == num_units:
                return [nearest_stages(np.where(allowed, weight, -np.inf), np.array(order))]
            for device in devices:
                end = int(beyond[unit, device])
                if device not in used and end > longer.get(used | {device}, (unit, ()))[0]:
                    longer[used | {device}] = end, (*order, device)
        reached = longer if num_devices <= _MANY else dict(sorted(longer.items(), key=lambda item: -item[1][0])[:_KEPT])
    complete = [order for unit, order in reached.values() if unit == num_units]
    return [nearest_stages(np.where(allowed, weight, -np.inf), np.array(order)) for order in complete[:1]]


def balanced_stages(problem: Problem, units: Units) -> list[I64]:
    """Stages of equal time and of least bottleneck, on 1 to D devices."""
    problem = problem.with_allowed(problem.allowed & units.allowed[units.index])
    figures, chain = UnitArrays.of(problem, units.index), Chain(np.arange(units.num_units))
    found = []
    for devices in device_subsets(problem, smallest=1):
        for ordered in (devices, devices[::-1]):
            found.append(stages(problem, figures, chain, ordered))
            found += [least_bottleneck(problem, figures, chain, ordered, alive) for alive in _ALIVE]
    return found


class StageSearch:
    """Local search over boundaries and devices of stages: the best of a batch of moves, until none helps."""

    def __init__(self, problem: Problem, units: Units) -> None:
        self.problem, self.units = problem, units
        self.known: dict[bytes, tuple[int, int]] = {}
        self.num_simulations = 0

    def run(self, starts: list[I64], max_simulations: int) -> I64:
        """[U] the best found. InputError if no start is allowed."""
        allowed = [start for start in starts if self.is_allowed(start)]
        if not allowed:
            raise InputError(
                f"graph {self.problem.graph.name!r}: no contiguous stages go where ops may; relax --pin or --forbid"
            )
        ranked = sorted(range(len(allowed)), key=self._keys(allowed).__getitem__)
        best = [allowed[number] for number in ranked[:3]]
        for start in range(len(best)):
            reach = max(self.units.num_units // 4, 1)
            while reach and self.num_simulations < max_simulations:
                moves = [move for move in self._moves(best[start], reach) if self.is_allowed(move)][:_BATCH]
                keys = self._keys([best[start], *moves])
                number = min(range(len(keys)), key=keys.__getitem__)
                if number == 0:
                    reach //= 2
                else:
                    best[start] = moves[number - 1]
        keys = self._keys(best)
        return best[min(range(len(keys)), key=keys.__getitem__)]

    def key(self, devices: I64) -> tuple[int, int]:
        """(bytes over the limits, step time in ns)."""
        return self._keys([devices])[0]

    def _keys(self, batch: list[I64]) -> list[tuple[int, int]]:
        new = {devices.tobytes(): devices for devices in batch if devices.tobytes() not in self.known}
        if new:
            placements = np.stack([self.units.place(devices) for devices in new.values()])
            times, peaks = evaluate_many(self.problem, placements)
            excess = excess_bytes(self.problem, peaks)
            self.known.update(zip(new, zip(excess.tolist(), times.tolist(), strict=True), strict=True))
            self.num_simulations += len(new)
        return [self.known[devices.tobytes()] for devices in batch]

    def is_allowed(self, devices: I64) -> bool:
        """Whether units [U] may go there."""
        return bool(self.units.allowed[np.arange(self.units.num_units), devices].all())

    def _moves(self, devices: I64, reach: int) -> list[I64]:
        """Boundaries by `reach`, two stages exchanged, a stage to a free device, a stage merged, a stage halved."""
        starts = [0, *(np.flatnonzero(np.diff(devices)) + 1).tolist(), len(devices)]
        used = devices[starts[:-1]].tolist()
        free = [device for device in range(self.problem.num_devices) if device not in used]
        moves: list[I64] = []

        def add(cuts: list[int], names: list[int]) -> None:
            if all(low < high for low, high in itertools.pairwise(cuts)):
                moves.append(np.repeat(np.array(names, np.int64), np.diff(cuts)))

        for number in range(1, len(used)):
            for shift in (-reach, reach):
                add([*starts[:number], starts[number] + shift, *starts[number + 1 :]], used)
            add([*starts[:number], *starts[number + 1 :]], [*used[:number], *used[number + 1 :]])
            add([*starts[:number], *starts[number + 1 :]], [*used[: number - 1], *used[number:]])
        for first in range(len(used)):
            for second in range(first + 1, len(used)):
                names = list(used)
                names[first], names[second] = names[second], names[first]
                add(starts, names)
            for device in free:
                add(starts, [*used[:first], device, *used[first + 1 :]])
            for device in free[:2]:
                middle = (starts[first] + starts[first + 1]) // 2
                add(
                    [*starts[: first + 1], middle, *starts[first + 1 :]],
                    [*used[: first + 1], device, *used[first + 1 :]],
                )
        return moves
