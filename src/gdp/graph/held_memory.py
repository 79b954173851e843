"""Memory that a step holds from its beginning to its end, by what it is for."""

from dataclasses import dataclass

import numpy as np

from gdp.graph.graph import Graph

_PARAMETER = "parameter"


@dataclass(frozen=True, slots=True)
class HeldMemory:
    """Bytes held for the whole step, on all devices together."""

    parameter_bytes: int
    optimizer_state_bytes: int
    other_bytes: int  # buffers, and memory of ops that are no parameters

    @classmethod
    def of(cls, graph: Graph) -> "HeldMemory":
        """Divides the resident bytes of `graph`; a parameter has more than its own tensor if it has optimizer state."""
        is_parameter = np.array([kind == _PARAMETER for kind in graph.kinds], np.bool_)
        own = np.zeros(graph.num_ops, np.int64)  # bytes of the first resident tensor of each op: the parameter itself
        tensors = np.flatnonzero(graph.is_resident)[::-1]
        own[graph.producers[tensors]] = graph.tensor_bytes[tensors]
        own = np.minimum(own, graph.resident_bytes)
        parameters = int(own[is_parameter].sum())
        state = int((graph.resident_bytes - own)[is_parameter].sum())
        # a parameter without a resident tensor is one that nothing reads, or comes from another program
        unread = int(graph.resident_bytes[is_parameter & (own == 0)].sum())
        total = int(graph.resident_bytes.sum())
        return cls(parameters + unread, state - unread, total - parameters - state)
