"""Traces the memory of each device over a simulated step: docs/machine-model.md, section 4.

`gdp.simulator.memory` has the peaks; here are the times and the tensors too. T tensors, D devices. Sizes in bytes.
"""

from dataclasses import dataclass
from functools import cached_property

import numpy as np

from gdp.arrays import I64, Bool
from gdp.simulator.simulate import NEVER, Simulation


@dataclass(frozen=True, eq=False)
class Allocations:
    """Holds tensors and their copies, one row each: on which device, from when, until when."""

    devices: I64
    tensors: I64
    is_copy: Bool
    sizes_bytes: I64
    from_ns: I64
    until_ns: I64  # NEVER: to the end of the step

    @classmethod
    def of(cls, simulation: Simulation) -> "Allocations":
        """Returns the allocations of a simulated step, without resident bytes."""
        graph, placement = simulation.problem.graph, simulation.placement
        num_devices = simulation.problem.num_devices
        freed_ns = simulation.op_finish_ns[graph.producers].copy()
        consumed_ns, tensors = simulation.op_finish_ns[graph.consumers], graph.edge_tensors
        here = placement[graph.producers[tensors]] == placement[graph.consumers]
        np.maximum.at(freed_ns, graph.base[tensors[here]], consumed_ns[here])
        np.maximum.at(freed_ns, graph.base[simulation.transfer_tensors], simulation.transfer_end_ns)
        freed_ns[graph.base[graph.is_kept]] = NEVER
        owned = np.flatnonzero((graph.view_of < 0) & ~graph.is_resident)
        copies, of_edge = np.unique(
            tensors[~here] * num_devices + placement[graph.consumers[~here]], return_inverse=True
        )
        copies_ns = np.zeros(len(copies), np.int64)
        np.maximum.at(copies_ns, of_edge, consumed_ns[~here])
        sent, to = simulation.transfer_tensors, simulation.transfer_destinations
        return cls(
            devices=np.concatenate((placement[graph.producers[owned]], to)),
            tensors=np.concatenate((owned, sent)),
            is_copy=np.repeat([False, True], [len(owned), len(sent)]),
            sizes_bytes=np.concatenate((graph.tensor_bytes[owned], graph.tensor_bytes[sent])),
            from_ns=np.concatenate((simulation.op_start_ns[graph.producers[owned]], simulation.transfer_start_ns)),
            until_ns=np.concatenate((freed_ns[owned], copies_ns[np.searchsorted(copies, sent * num_devices + to)])),
        )


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
