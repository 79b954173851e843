"""Contiguous stages of a chain of units: the nearest to a plan, and the fastest that a search finds. U units in the
order of execution, D devices; stages are devices [U], each device in at most one run."""

from itertools import pairwise

import numpy as np

from gdp.arrays import F64, I64, Bool
from gdp.errors import InputError
from gdp.export.export_target import ExportUnits, stage_starts
from gdp.placers.base import device_subsets
from gdp.placers.contiguous import Chain, stages
from gdp.placers.dp_stages import least_bottleneck
from gdp.placers.memory_repair import excess_bytes
from gdp.simulator.problem import Problem
from gdp.simulator.simulate import evaluate_many

_ALIVE = (0.0, 0.5, 1.0)  # of the bytes that stages allocate, held at once: estimates for stages within memory
_MANY, _KEPT = 10, 1000  # devices up to which all sets are tried; sets that are kept, of more devices
_BATCH = 64  # moves simulated at once


def nearest_stages(weight: F64, order: I64 | None = None) -> I64:
    """[U] The stages that agree most with `weight` [U, D], the share of each unit on each device. Dynamic programming
    over (unit, device). Devices come in the given order, or in that of the mean position of their shares."""
    num_units = len(weight)
    if order is None:
        order = _order_by_position(weight)
    gain = weight[:, order]
    best, came_from = gain[0], np.zeros(gain.shape, np.int64)
    for unit in range(1, num_units):
        came_from[unit] = _first_maxima(best)
        best = best[came_from[unit]] + gain[unit]
    devices = np.empty(num_units, np.int64)
    stage = int(np.argmax(best))
    for unit in range(num_units - 1, -1, -1):
        devices[unit] = order[stage]
        stage = int(came_from[unit, stage])
    return devices


def _first_maxima(values: F64) -> I64:
    """Returns the first position of the maximum of each prefix of `values`."""
    is_higher = np.concatenate([[True], values[1:] > np.maximum.accumulate(values)[:-1]])
    return np.maximum.accumulate(np.where(is_higher, np.arange(len(values)), 0))


def _order_by_position(weight: F64) -> I64:
    num_units, num_devices = weight.shape
    totals = weight.sum(axis=0)
    place = (weight * np.arange(num_units)[:, None]).sum(axis=0) / np.maximum(totals, 1e-300)
    return np.lexsort((np.arange(num_devices), np.where(totals > 0, place, np.inf)))


def allowed_stages(weight: F64, allowed: Bool) -> list[I64]:
    """Returns stages [U] near to `weight` [U, D] on `allowed` devices [U, D] only, in a list of one, or an empty list.
    Each device goes as far as it may, since the rest after a longer stage needs no more devices than the rest after a
    shorter one. On more than _MANY devices the search is incomplete."""
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


def balanced_stages(units: ExportUnits) -> list[I64]:
    """Returns stages of equal time and of least bottleneck, on 1 to D devices."""
    problem, chain = units.problem, Chain(np.arange(units.num_units))
    candidates = []
    for devices in device_subsets(problem, smallest=1):
        for ordered in (devices, devices[::-1]):
            candidates.append(stages(problem, units, chain, ordered))
            candidates += [least_bottleneck(problem, units, chain, ordered, alive) for alive in _ALIVE]
    return candidates


class StageSearch:
    """Searches boundaries and devices of stages: takes the best of a batch of moves until no move helps."""

    def __init__(self, problem: Problem, units: ExportUnits) -> None:
        self.problem, self.units = problem, units
        self.known: dict[bytes, tuple[int, int]] = {}
        self.num_simulations = 0

    def run(self, starts: list[I64], max_simulations: int, *, num_starts: int = 3) -> I64:
        """[U] Returns the best stages found from so many of the best starts; InputError if no start is allowed."""
        allowed = [start for start in starts if self.units.may_be_on(start)]
        if not allowed:
            raise InputError(
                f"graph {self.problem.graph.name!r}: no contiguous stages go where ops may; relax --pin or --forbid"
            )
        return self._sorted([self._descended(start, max_simulations) for start in self._sorted(allowed)[:num_starts]])[
            0
        ]

    def _descended(self, devices: I64, max_simulations: int) -> I64:
        reach = max(self.units.num_units // 4, 1)
        while reach and self.num_simulations < max_simulations:
            moves = [move for move in self._moves(devices, reach) if self.units.may_be_on(move)][:_BATCH]
            best = self._sorted([devices, *moves])[0]
            if best is devices:
                reach //= 2
            devices = best
        return devices

    def key(self, devices: I64) -> tuple[int, int]:
        """Returns (bytes over the limits, step time in ns)."""
        self._sorted([devices])
        return self.known[devices.tobytes()]

    def _sorted(self, batch: list[I64]) -> list[I64]:
        """Simulates the batch and returns it, the best first."""
        new = {devices.tobytes(): devices for devices in batch if devices.tobytes() not in self.known}
        if new:
            placements = np.stack([self.units.place(devices) for devices in new.values()])
            times, peaks = evaluate_many(self.problem, placements)
            excess = excess_bytes(self.problem, peaks)
            self.known.update(zip(new, zip(excess.tolist(), times.tolist(), strict=True), strict=True))
            self.num_simulations += len(new)
        return sorted(batch, key=lambda devices: self.known[devices.tobytes()])

    def _moves(self, devices: I64, reach: int) -> list[I64]:
        """Lists moves: boundaries by `reach`, stages exchanged, merged, halved, or moved to a free device."""
        starts = [*stage_starts(devices), len(devices)]
        used = devices[starts[:-1]].tolist()
        free = [device for device in range(self.problem.num_devices) if device not in used]
        moves: list[I64] = []

        def add(cuts: list[int], names: list[int]) -> None:
            if all(low < high for low, high in pairwise(cuts)):
                moves.append(np.repeat(np.array(names, np.int64), np.diff(cuts)))

        for number in range(1, len(used)):
            before, after = starts[:number], starts[number + 1 :]
            for shift in (-reach, reach):
                add([*before, starts[number] + shift, *after], used)
            add([*before, *after], [*used[:number], *used[number + 1 :]])
            add([*before, *after], [*used[: number - 1], *used[number:]])
        for first in range(len(used)):
            before, after = starts[: first + 1], starts[first + 1 :]
            for second in range(first + 1, len(used)):
                names = list(used)
                names[first], names[second] = names[second], names[first]
                add(starts, names)
            for device in free:
                add(starts, [*used[:first], device, *used[first + 1 :]])
            for device in free[:2]:
                add([*before, (before[-1] + after[0]) // 2, *after], [*used[: first + 1], device, *used[first + 1 :]])
        return moves
