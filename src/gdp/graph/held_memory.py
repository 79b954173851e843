"""Memory that a step holds from its beginning to its end, by what it is for."""

import re
from dataclasses import dataclass

import numpy as np

from gdp.arrays import I64, Bool
from gdp.graph.graph import Graph

_CACHE = re.compile(r"(?:^|[._])(?:key|value|latent|state)_cache(?:_\d+)?$")  # as a capture names them


def is_cache(graph: Graph) -> Bool:
    """Returns [N] the buffers that keep keys, values and states of sequences from one token to the next."""
    names = zip(graph.op_names, graph.kinds, strict=True)
    return np.array([kind == "buffer" and _CACHE.search(name) is not None for name, kind in names], np.bool_)


@dataclass(frozen=True, slots=True)
class HeldMemory:
    """Bytes held for the whole step, on all devices together."""

    parameter_bytes: int
    optimizer_state_bytes: int
    other_bytes: int  # buffers, and memory of ops that are no parameters

    @classmethod
    def of(cls, graph: Graph) -> "HeldMemory":
        """Divides the resident bytes of `graph`."""
        return cls(*(int(held.sum()) for held in cls.by_op(graph)))

    @staticmethod
    def by_op(graph: Graph) -> tuple[I64, I64, I64]:
        """Returns the bytes [N] of parameters, of optimizer state and of others that each op holds. A parameter has
        more than its own tensor if it has optimizer state."""
        is_parameter = graph.is_of_kind("parameter")
        own = np.zeros(graph.num_ops, np.int64)  # bytes of the first resident tensor of each op: the parameter itself
        tensors = np.flatnonzero(graph.is_resident)[::-1]
        own[graph.producers[tensors]] = graph.tensor_bytes[tensors]
        own = np.minimum(own, graph.resident_bytes)
        # a parameter without a resident tensor is one that nothing reads, or comes from another program
        own = np.where(own == 0, graph.resident_bytes, own)
        parameters = np.where(is_parameter, own, 0)
        state = np.where(is_parameter, graph.resident_bytes - own, 0)
        return parameters, state, graph.resident_bytes - parameters - state
