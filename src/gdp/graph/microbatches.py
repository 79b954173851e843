"""Micro-batches of a step that accumulates gradients over M of them: which ops there are once, and which M times. The
graph determines the samples of a micro-batch: models are captured with an even part of their batch."""

import numpy as np

from gdp.arrays import I64, Bool, mask
from gdp.errors import InputError
from gdp.graph.graph import Graph

MAX_MICROBATCHES = 1024  # far beyond any use; a number with more digits is a typing error
SHARED = -1  # the micro-batch number of what all micro-batches share: parameters, buffers, updates, sums over ranks

_SOURCE_KINDS = ("parameter", "buffer", "constant")


def check_count(num_microbatches: int, where: str) -> None:
    """Raises InputError for a number of micro-batches out of range."""
    if not 1 <= num_microbatches <= MAX_MICROBATCHES:
        raise InputError(f"{where} is {num_microbatches}; an integer from 1 to {MAX_MICROBATCHES} is expected")


def microbatch_of(graph: Graph) -> I64:
    """[ops] the micro-batch of each op, SHARED for ops that all share; all SHARED in a graph without micro-batches.
    Where one replica has several, the others have the first one of each op that these repeat."""
    is_repeated = mask(graph.first_copy[graph.microbatches > 0], graph.num_ops)
    return np.where(is_repeated[graph.first_copy], graph.microbatches, SHARED)


def count_microbatches(graph: Graph) -> int:
    """Returns the number of micro-batches in the step `graph`: 1 if it has none."""
    return int(graph.microbatches.max()) + 1


def shared_ops(graph: Graph) -> tuple[Bool, Bool]:
    """Returns ([N] parameters and buffers, [N] updates and their successors)."""
    has_inputs = mask(graph.consumers, graph.num_ops)
    is_idle = (graph.flops == 0) & (graph.bytes_accessed == 0) & np.array([not times for times in graph.times_ns])
    is_source = ~has_inputs & (graph.is_of_kind(*_SOURCE_KINDS) | ((graph.resident_bytes > 0) & is_idle))
    is_update = reached(graph.is_in_phase("update"), graph.producers[graph.edge_tensors], graph.consumers)
    return is_source & ~is_update, is_update


def reached(chosen: Bool, sources: I64, targets: I64) -> Bool:
    """Returns [N] the `chosen` ops and those that edges lead to from them."""
    while True:
        more = chosen.copy()
        more[targets[chosen[sources]]] = True
        if (more == chosen).all():
            return chosen
        chosen = more
