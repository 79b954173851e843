"""Copies: what the ops of a step that was cut are for, and which op of the same graph each one belongs to.

    op        origin   micro-batch   replica   role
    f         -1       0             0                      an op of the model: its first copy
    f@1       f        1             0                      a copy has the role of its origin, here none
    f!        f        0             0         recomputed   made for its origin, and itself the first of its copies
    f!@1#2    f!       1             2         recomputed   a copy of that

The origin of a copy is the first of all copies, which is of the first micro-batch and replica that have one. N ops."""

from collections import Counter
from collections.abc import Iterable, Sequence
from itertools import repeat
from types import MappingProxyType
from typing import TYPE_CHECKING

import numpy as np

from gdp.arrays import I64, Bool, mask

if TYPE_CHECKING:
    from gdp.graph.graph import Graph

MODEL, RECOMPUTED, ACCUMULATE, HOST_COPY, BATCH_END = "", "recomputed", "accumulate", "host copy", "batch end"
EXCHANGE_START, EXCHANGE_END = "exchange start", "exchange end"
RING_SUM, RING_COPY, HOST_RING_SUM, HOST_RING_COPY = "ring sum", "ring copy", "host ring sum", "host ring copy"
HOST_RING_END = "host ring end"
ROLES = MappingProxyType(
    {
        MODEL: "An op of the model, or its copy for another micro-batch or replica.",
        RECOMPUTED: "Computes again what its origin computed, for the backward pass.",
        ACCUMULATE: "Adds the gradient of one more micro-batch; its origin is the update that reads the sum.",
        HOST_COPY: "Holds a tensor on a CPU: an activation of its origin, or what the model itself sends there.",
        BATCH_END: "Waits for all results of a batch in flight; its origin is the last op of the batch.",
        EXCHANGE_START: "Begins an exchange of a replica with others; its origin is an op that reads or has the data.",
        EXCHANGE_END: "Ends an exchange of a replica; its origin is the start.",
        RING_SUM: "Adds a chunk that came over a ring of replicas; its origin is the start of the exchange.",
        RING_COPY: "Takes a chunk that came over a ring of replicas; its origin is the start of the exchange.",
        HOST_RING_SUM: "Adds a chunk that came over a ring inside a host; its origin is the start of the exchange.",
        HOST_RING_COPY: "Takes a chunk that came over a ring inside a host; its origin is the start of the exchange.",
        HOST_RING_END: "Joins chunks before they go round inside a host; its origin is the start of the exchange.",
    }
)  # the roles of ops, each with what it does
HOPS = (RING_SUM, RING_COPY, HOST_RING_SUM, HOST_RING_COPY)
EXCHANGE = (EXCHANGE_START, EXCHANGE_END, HOST_RING_END, *HOPS)
"""The roles of ops that move data between replicas; not all replicas have the same hops."""
LONGEST_CHAIN = 4  # origins from an op to the op of the model: a hop, the end, the start of an exchange, an update

_CODES = {role: code for code, role in enumerate(ROLES)}


def role_codes(roles: Sequence[str]) -> I64:
    """Returns the place [N] of each role in ROLES, and beyond them for texts that are none."""
    return np.fromiter(map(_CODES.get, roles, repeat(len(_CODES))), np.int64, len(roles))


def have_role(codes: I64, roles: Iterable[str]) -> Bool:
    """Returns [N] the ops with one of `roles`; `codes` are the results of `role_codes`."""
    return mask([_CODES[role] for role in roles], len(_CODES) + 1)[codes]


def first_copies(origins: I64, codes: I64) -> I64:
    """Returns the first [N] of the copies that each op is one of; `codes` are the results of `role_codes`."""
    numbers = np.arange(len(origins))
    is_copy = (origins >= 0) & (codes[origins] == codes)
    return np.where(is_copy, origins, numbers)


def roots(origins: I64) -> I64:
    """Returns the op of the model [N] that each op belongs to: the end of its chain of origins."""
    root = np.where(origins >= 0, origins, np.arange(len(origins)))
    for _ in range(LONGEST_CHAIN - 1):
        root = root[root]
    return root


def label_end(microbatch: int, replica: int) -> str:
    """Returns what the name of a copy ends with, for people: `@1#2`."""
    return (f"@{microbatch}" if microbatch else "") + (f"#{replica}" if replica else "")


def numbers_in(part: "Graph", step: "Graph", ops: I64) -> I64:
    """Returns the op of `part` that each of `ops` of `step` is; -1 where `part` has none of its name. A step that was
    made of `part` keeps the names of the first copies."""
    distinct, which = np.unique(ops, return_inverse=True)
    names = step.op_names
    return np.array([part.op_numbers.get(names[op], -1) for op in distinct.tolist()], np.int64)[which]


def exchange_of(graph: "Graph") -> I64:
    """Returns the first copy of the start of the exchange [N] that each op is of; -1 for other ops."""
    first = graph.first_copy
    is_start = graph.is_in_role(EXCHANGE_START)
    found = np.where(is_start, first, graph.origins[first])
    return np.where(graph.is_collective, found, -1)


def exchange_numbers(graph: "Graph") -> dict[int, tuple[str, int]]:
    """Returns the kind of each exchange (`all_reduce`, say) and its number among those, by its first start."""
    counts = Counter[str]()
    found = {}
    for start in np.flatnonzero(graph.is_in_role(EXCHANGE_START)).tolist():
        if graph.first_copy[start] == start:
            kind = graph.kinds[start].partition(".")[0]
            found[start] = kind, counts[kind]
            counts[kind] += 1
    return found


def exchange_ends(graph: "Graph") -> tuple[I64, I64]:
    """Returns the start and the end [X] of each exchange of each replica and micro-batch, by exchanges."""
    exchange = exchange_of(graph)
    starts, ends = (np.flatnonzero(graph.is_in_role(role)) for role in (EXCHANGE_START, EXCHANGE_END))
    starts, ends = (x[np.lexsort((graph.microbatches[x], graph.replicas[x], exchange[x]))] for x in (starts, ends))
    return starts, ends


def turn_in_exchange(graph: "Graph") -> I64:
    """Returns the place [N] of each hop among those of its exchange, replica, micro-batch and role; 0 of other ops."""
    hops = np.flatnonzero(graph.is_in_role(*HOPS))
    columns = [values[hops] for values in (graph.role_code, graph.microbatches, graph.replicas, exchange_of(graph))]
    order = np.lexsort(columns)
    is_first = np.ones(len(hops), np.bool_)
    is_first[1:] = np.any([column[order[1:]] != column[order[:-1]] for column in columns], axis=0)
    places = np.arange(len(hops))
    turn = np.zeros(graph.num_ops, np.int64)
    turn[hops[order]] = places - np.maximum.accumulate(np.where(is_first, places, 0))
    return turn
