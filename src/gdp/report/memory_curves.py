"""What each device holds over a simulated step, and what is alive at the peak: docs/machine-model.md, section 4.

The peaks of `gdp.memory` say how much; these say when, and of what. T tensors, D devices. Sizes in bytes.
"""

from dataclasses import dataclass
from functools import cached_property

import numpy as np

from gdp.graph import I64, Bool
from gdp.simulate import NEVER, Simulation


@dataclass(frozen=True, eq=False)
class Allocations:
    """Tensors and copies of them, one row each: where they are and from when to when."""

    devices: I64
    tensors: I64
    is_copy: Bool
    sizes_bytes: I64
    from_ns: I64
    until_ns: I64  # NEVER: to the end of the step

    @classmethod
    def of(cls, simulation: Simulation) -> "Allocations":
        """Those of a simulated step; resident bytes are none."""
        graph, placement = simulation.problem.graph, simulation.placement
        num_devices = simulation.problem.num_devices
        owners = np.where(graph.view_of >= 0, graph.view_of, np.arange(graph.num_tensors))
        freed_ns = simulation.op_finish_ns[graph.producers].copy()
        consumed_ns, tensors = simulation.op_finish_ns[graph.consumers], graph.edge_tensors
        here = placement[graph.producers[tensors]] == placement[graph.consumers]
        np.maximum.at(freed_ns, owners[tensors[here]], consumed_ns[here])
        np.maximum.at(freed_ns, owners[simulation.transfer_tensors], simulation.transfer_end_ns)
        freed_ns[owners[graph.is_kept]] = NEVER
        owned = np.flatnonzero((graph.view_of < 0) & ~graph.is_resident)
        copies_ns = np.zeros(graph.num_tensors * num_devices, np.int64)
        np.maximum.at(copies_ns, tensors * num_devices + placement[graph.consumers], consumed_ns)
        sent, to = simulation.transfer_tensors, simulation.transfer_destinations
        return cls(
            devices=np.concatenate((placement[graph.producers[owned]], to)),
            tensors=np.concatenate((owned, sent)),
            is_copy=np.repeat([False, True], [len(owned), len(sent)]),
            sizes_bytes=np.concatenate((graph.tensor_bytes[owned], graph.tensor_bytes[sent])),
            from_ns=np.concatenate((simulation.op_start_ns[graph.producers[owned]], simulation.transfer_start_ns)),
            until_ns=np.concatenate((freed_ns[owned], copies_ns[sent * num_devices + to])),
        )


@dataclass(frozen=True, eq=False)
class MemoryCurve:
    """What one device holds: `used_bytes[i]` from `times_ns[i]` until the next time."""

    device: int
    resident_bytes: int
    times_ns: I64  # ascending, from 0
    used_bytes: I64

    @cached_property
    def peak_bytes(self) -> int:
        return int(self.used_bytes.max())

    @cached_property
    def peak_ns(self) -> int:
        """When the peak is reached first."""
        return int(self.times_ns[np.argmax(self.used_bytes)])

    def thinned(self, num_points: int) -> tuple[I64, I64]:
        """(times in ns, bytes) with about `num_points` points: of each stretch of the step its lowest and highest."""
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
    """[D] the curve of each device; their peaks are those of the simulation."""
    problem = simulation.problem
    resident = np.zeros(problem.num_devices, np.int64)
    np.add.at(resident, simulation.placement, problem.graph.resident_bytes)
    lasting = allocations.until_ns > allocations.from_ns  # what is freed at the moment of its allocation never counts
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
    """The rows of `allocations` that `device` holds then, largest first."""
    alive = (allocations.devices == device) & (allocations.from_ns <= time_ns) & (time_ns < allocations.until_ns)
    rows = np.flatnonzero(alive)
    return rows[np.argsort(-allocations.sizes_bytes[rows], kind="stable")]
