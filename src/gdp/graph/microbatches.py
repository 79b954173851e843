"""Numbers of micro-batches and replicas: which op of a step is of which.

A step may accumulate gradients over M micro-batches (`gdp.graph.accumulation`). The copy of op `x` for micro-batch m is
called `x@m`, the one for micro-batch 0 `x`; these names show whether a graph from a file has micro-batches. The graph
determines the samples of a micro-batch: models are captured with an even part of their batch.
"""

import numpy as np

from gdp.arrays import I64, Bool
from gdp.errors import InputError
from gdp.graph.copy_names import split_name
from gdp.graph.graph import Graph

MAX_MICROBATCHES = 1024  # far beyond any use; a number with more digits is a typing error
SHARED = -1
"""The micro-batch number of ops that all micro-batches share: parameters, buffers, updates."""

ACCUMULATE = ".accumulate"  # sums begin with the second micro-batch
_SOURCE_KINDS = ("parameter", "buffer", "constant")
RECOMPUTED = "!"
"""What the name of a copy ends with that computes an op's results once more, for the backward pass."""


def check_count(num_microbatches: int, where: str) -> None:
    """Raises InputError for a number of micro-batches out of range."""
    if not 1 <= num_microbatches <= MAX_MICROBATCHES:
        raise InputError(f"{where} is {num_microbatches}; an integer from 1 to {MAX_MICROBATCHES} is expected")


def microbatch_of(graph: Graph) -> I64:
    """[ops] the micro-batch of each op, SHARED for ops that all share; all SHARED in a graph without micro-batches.

    Names count only if, in each replica of the model, every op has a copy of its kind and phase for each micro-batch.
    """
    none = np.full(graph.num_ops, SHARED)
    names, replica = graph.copy_names, replica_of(graph)
    microbatch = np.where(names.replica == replica, names.microbatch, 0)
    if not microbatch.any():
        return none
    num_bases = len(names.bases)
    key = replica * num_bases + names.base  # of copies of an op in one replica of the model
    is_later = microbatch > 0
    num_keys = (int(replica.max()) + 1) * num_bases
    copies = np.bincount(key[is_later], minlength=num_keys)
    last = np.zeros(int(replica.max()) + 1, np.int64)
    np.maximum.at(last, replica, microbatch)
    is_repeated = np.asarray(copies > 0, np.bool_)
    is_sum = np.tile(np.array([ACCUMULATE in base for base in names.bases], np.bool_), len(last))
    has_first = np.zeros(num_keys, np.bool_)
    has_first[key[~is_later]] = True
    is_odd = np.logical_or(copies != np.repeat(last, num_bases), ~(has_first | is_sum))
    if np.logical_and(is_odd, is_repeated).any() or not _are_alike(graph, key, is_repeated):
        return none
    # a replica with one micro-batch, beside others with several, has the first one of what they repeat
    of_any = np.asarray(is_repeated.reshape(len(last), num_bases).any(axis=0), np.bool_)
    is_part = np.where(last[replica] > 0, is_repeated[key], of_any[names.base])
    return np.where(is_part, microbatch, SHARED)


def _are_alike(graph: Graph, key: I64, is_chosen: Bool) -> bool:
    """Tells if ops of one `key` [N] have one kind and phase, for the keys that are chosen."""
    sort = graph.sorts
    ops = np.flatnonzero(is_chosen[key])
    some = np.zeros(len(is_chosen), np.int64)
    some[key[ops]] = sort[ops]
    return bool((some[key[ops]] == sort[ops]).all())


def base_name(name: str) -> str:
    """Returns the name of the op that `name` is a copy of, for a micro-batch, a replica or to recompute it."""
    return split_name(name)[0].removesuffix(RECOMPUTED)


def replica_of(graph: Graph) -> I64:
    """[ops] the replica of the model that each op is of; all 0 in a graph without replicas.

    Names count only if each replica has a copy, of its kind and phase, of every op of the first one, collectives and
    sums of gradients apart.
    """
    names = graph.copy_names
    replica = names.replica
    if not replica.any():
        return replica
    is_sum = np.array([ACCUMULATE in base for base in names.bases])
    is_collective = graph.is_collective
    counts = ~(is_sum[names.base] | is_collective)
    code = graph.sorts * len(names.bases) + names.base
    copies = [np.unique(code[counts & (replica == own)]) for own in range(int(replica.max()) + 1)]
    is_alike = all(np.array_equal(own, copies[0]) for own in copies)
    return replica if is_alike else np.zeros_like(replica)


def count_microbatches(graph: Graph) -> int:
    """Returns the number of micro-batches in the step `graph`: 1 if it has none."""
    return max(int(microbatch_of(graph).max()) + 1, 1)


def shared_ops(graph: Graph) -> tuple[Bool, Bool]:
    """Returns ([N] parameters and buffers, [N] updates and their successors)."""
    has_inputs = np.zeros(graph.num_ops, np.bool_)
    has_inputs[graph.consumers] = True
    is_kind = np.array([kind in _SOURCE_KINDS for kind in graph.kinds], np.bool_)
    is_idle = (graph.flops == 0) & (graph.bytes_accessed == 0) & np.array([not times for times in graph.times_ns])
    is_source = ~has_inputs & (is_kind | ((graph.resident_bytes > 0) & is_idle))
    is_update = graph.is_in_phase("update")
    sources = graph.producers[graph.edge_tensors]
    while True:
        more = is_update.copy()
        more[graph.consumers[is_update[sources]]] = True
        if (more == is_update).all():
            return is_source & ~is_update, is_update
        is_update = more
