"""Traces the memory of each device over a simulated step (docs/machine-model.md, section 4), and divides it by use.
`gdp.simulator.memory` has the peaks; here are the times and the tensors too. N ops, T tensors, D devices. In bytes."""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from types import MappingProxyType

import numpy as np

from gdp.arrays import I64, unique
from gdp.graph import Graph
from gdp.graph.copies import ACCUMULATE, EXCHANGE_START, RECOMPUTED
from gdp.graph.held_memory import HeldMemory, is_cache
from gdp.simulator.simulate import NEVER, Allocations, Simulation


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
        kept = unique(np.concatenate((first, last, lowest, highest)))
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


PARTS = (
    *("parameters", "cache", "optimizer state", "gradients", "gathered parameters"),
    *("activations", "recomputed activations", "chunks of exchanges", "other"),
)
PARAMETERS, CACHE, STATE, GRADIENTS, GATHERED = PARTS[:5]
KEPT, AGAIN, CHUNKS, OTHER = PARTS[5:]


@dataclass(frozen=True, eq=False)
class MemoryParts:
    """The uses of memory in a simulated step."""

    held: Mapping[str, I64]  # [D] bytes held for the whole step, by use
    use: I64  # [T] the use of each tensor, by its number in PARTS
    copy_use: I64  # [T] the use of its copies on other devices
    allocations: Allocations

    @classmethod
    def of(cls, simulation: Simulation, allocations: Allocations) -> "MemoryParts":
        """Finds the uses by the kinds and phases of the ops that make and read each tensor."""
        graph, placement = simulation.problem.graph, simulation.placement
        parameters, state, other = HeldMemory.by_op(graph)
        cache = other * is_cache(graph)
        count = simulation.problem.num_devices
        uses = (PARAMETERS, parameters), (CACHE, cache), (STATE, state), (OTHER, other - cache)
        held = {name: np.bincount(placement, own, count).astype(np.int64) for name, own in uses}
        use = _uses(graph)
        is_hop = graph.is_collective[graph.producers]
        return cls(MappingProxyType(held), use, np.where(is_hop, PARTS.index(CHUNKS), use), allocations)

    def at(self, device: int, time_ns: int) -> dict[str, int]:
        """Returns the bytes that `device` holds at `time_ns`, by use; they add up to all that it holds."""
        rows = alive_at(self.allocations, device, time_ns)
        tensors = self.allocations.tensors[rows]
        uses = np.where(self.allocations.is_copy[rows], self.copy_use[tensors], self.use[tensors])
        sums = np.zeros(len(PARTS), np.int64)
        np.add.at(sums, uses, self.allocations.sizes_bytes[rows])
        for name, held in self.held.items():
            sums[PARTS.index(name)] += held[device]
        return dict(zip(PARTS, sums.tolist(), strict=True))


def _uses(graph: Graph) -> I64:
    """Returns [T] the use of each tensor on the device that makes it, views as what they are part of."""
    phases = np.array(graph.phases)
    kinds = np.array([kind.partition(".")[0] for kind in graph.kinds])
    is_late = phases == "update"
    is_sum = graph.is_in_role(ACCUMULATE)
    is_first = graph.is_in_role(EXCHANGE_START) & (kinds != "all_gather")
    is_gradient = np.zeros(graph.num_tensors, np.bool_)
    sums = (is_late | is_sum | is_first)[graph.consumers]
    is_gradient[graph.base[graph.edge_tensors[sums]]] = True
    made_by = graph.producers
    is_gradient &= (phases == "backward")[made_by]
    chosen = [
        (kinds == "all_gather")[made_by] & ~is_late[made_by],
        is_gradient | ((kinds == "reduce_scatter") | is_sum)[made_by],
        graph.is_in_role(RECOMPUTED)[made_by],
        (phases == "forward")[made_by],
    ]
    numbers = [PARTS.index(name) for name in (GATHERED, GRADIENTS, AGAIN, KEPT)]
    use: I64 = np.select(chosen, numbers, PARTS.index(OTHER)).astype(np.int64)
    return use[graph.base]
