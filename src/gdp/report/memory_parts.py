"""Divides the memory of a device by use: parameters, optimizer state, gradients, activations.

N ops, T tensors, D devices.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

import numpy as np

from gdp.arrays import I64
from gdp.graph import Graph
from gdp.graph.copies import ACCUMULATE, EXCHANGE_START, RECOMPUTED
from gdp.graph.held_memory import HeldMemory
from gdp.report.memory_curves import alive_at
from gdp.simulator.allocations import Allocations
from gdp.simulator.simulate import Simulation

PARAMETERS, STATE, GRADIENTS, GATHERED, KEPT, AGAIN, CHUNKS, OTHER = (
    "parameters",
    "optimizer state",
    "gradients",
    "gathered parameters",
    "activations",
    "recomputed activations",
    "chunks of exchanges",
    "other",
)
PARTS = (PARAMETERS, STATE, GRADIENTS, GATHERED, KEPT, AGAIN, CHUNKS, OTHER)


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
        count = simulation.problem.num_devices
        held = {
            name: np.bincount(placement, own, count).astype(np.int64)
            for name, own in ((PARAMETERS, parameters), (STATE, state), (OTHER, other))
        }
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
