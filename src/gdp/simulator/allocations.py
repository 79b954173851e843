"""Allocations: from when until when each tensor of a simulated step, and each copy of one, is in memory.
docs/machine-model.md, section 4, is the definition; `memory.py` has the peaks alone. T tensors, D devices."""

from dataclasses import dataclass

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
        copied = tensors[~here] * num_devices + placement[graph.consumers[~here]]
        copies, of_edge = np.unique(copied, return_inverse=True)
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
