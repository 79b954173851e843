"""Traces the memory of each device over a simulated step: docs/machine-model.md, section 4.

`gdp.simulator.memory` has the peaks; here are the times and the tensors too. T tensors, D devices. Sizes in bytes.
"""

from dataclasses import dataclass
from functools import cached_property

import numpy as np

from gdp.arrays import I64
from gdp.simulator.allocations import Allocations
from gdp.simulator.simulate import NEVER, Simulation


@dataclass(frozen=True, eq=False)
class MemoryCurve:
    """Holds the memory of one device: `used_bytes[i]` from `times_ns[i]` until the next time."""

    device: int
    resident_bytes: int
    times_ns: I64  # ascending, from 0
    used_bytes: I64

    @cached_property
    def peak_bytes(self) -> int:
        return int(self.used_bytes.max())

    @cached_property
    def peak_ns(self) -> int:
        """Returns the first time at the peak."""
        return int(self.times_ns[np.argmax(self.used_bytes)])

    def thinned(self, num_points: int) -> tuple[I64, I64]:
        """Returns (times in ns, bytes) of about `num_points` points: the extremes of each stretch of the step."""
        if len(self.times_ns) <= num_points:
            return self.times_ns, self.used_bytes
        width_ns = max(int(self.times_ns[-1]) // (num_points // 4), 1)
        stretch = self.times_ns // width_ns
        first = np.flatnonzero(np.diff(stretch, prepend=-1))
        last = np.append(first[1:], len(stretch)) - 1
        order = np.lexsort((self.used_bytes, stretch))
        lowest, highest = order[first], order[last]
        kept = np.unique(np.concatenate((first, last, lowest, highest)))
        return self.times_ns[kept], self.used_bytes[kept]


def memory_curves(simulation: Simulation, allocations: Allocations) -> list[MemoryCurve]:
    """Returns the curve of each device [D]; the peaks are those of the simulation."""
    problem = simulation.problem
    resident = np.zeros(problem.num_devices, np.int64)
    np.add.at(resident, simulation.placement, problem.graph.resident_bytes)
    lasting = allocations.until_ns > allocations.from_ns  # an allocation freed at once never counts
    curves = []
    for device in range(problem.num_devices):
        rows = np.flatnonzero(lasting & (allocations.devices == device))
        freed = rows[allocations.until_ns[rows] < NEVER]
        times_ns = np.concatenate(([0], allocations.from_ns[rows], allocations.until_ns[freed]))
        changes = np.concatenate(
            ([resident[device]], allocations.sizes_bytes[rows], -allocations.sizes_bytes[freed])
        ).astype(np.int64)
        instants, which = np.unique(times_ns, return_inverse=True)
        change = np.zeros(len(instants), np.int64)
        np.add.at(change, which, changes)
        curves.append(MemoryCurve(device, int(resident[device]), instants, np.cumsum(change)))
    return curves


def alive_at(allocations: Allocations, device: int, time_ns: int) -> I64:
    """Returns the rows of `allocations` that `device` holds at `time_ns`, largest first."""
    alive = (allocations.devices == device) & (allocations.from_ns <= time_ns) & (time_ns < allocations.until_ns)
    rows = np.flatnonzero(alive)
    return rows[np.argsort(-allocations.sizes_bytes[rows], kind="stable")]
