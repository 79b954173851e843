"""Calls: a model may run its layers several times in a step, as a recurrent net does at each time step.

    layers.0   call 0    call 1    call 2      the n-th `aten.mm` of a module belongs to the n-th call, if each has one
    layers.1   call 0    call 1    call 2

N ops.
"""

import numpy as np

from gdp.arrays import I64, Bool
from gdp.graph.fingerprint import numbered
from gdp.graph.graph import Graph

NO_CALL = -1  # of what all calls share, and of what no call tells
_CALLED_SHARE = 0.5  # of the ops of the forward pass: what is called several times must have at least
_FEWEST = 4  # ops of a kind in a module whose calls are not all alike
_SWEEPS = 4  # ops between an op without a call of its own and one that has one


def calls_of(graph: Graph) -> I64 | None:
    """Returns the call [N] that each op belongs to, from 0, or `NO_CALL`; None where layers are called once.

    A backward op belongs to the latest call whose results it uses, or else to that of the op that it follows.
    """
    is_late = graph.is_in_phase("backward") | graph.is_in_phase("update")
    sources, targets = graph.producers[graph.edge_tensors], graph.consumers
    has_input = np.zeros(graph.num_ops, np.bool_)
    has_input[targets] = True
    ops = np.flatnonzero(has_input & ~is_late)
    if not any(graph.modules) or not len(ops):
        return None
    call = np.full(graph.num_ops, NO_CALL)
    call[ops] = _in_turn(numbered(graph.modules)[1][ops], numbered(graph.kinds)[1][ops])
    if (call[ops] != NO_CALL).mean() < _CALLED_SHARE:
        return None
    is_forward = np.zeros(graph.num_ops, np.bool_)
    is_forward[ops] = True
    for _ in range(_SWEEPS):
        _take_over(call, sources, targets, is_forward[sources] & is_forward[targets])
    is_backward = graph.is_in_phase("backward")
    _take_over(call, sources, targets, is_forward[sources] & is_backward[targets])
    for _ in range(_SWEEPS):
        _take_over(call, sources, targets, is_backward[sources] & is_backward[targets])
    return call


def _in_turn(modules: I64, kinds: I64) -> I64:
    """Returns the call of each op, of ops in turn; `NO_CALL` in modules that are called once.

    Most modules tell how often the model calls its layers. Others are called more often, or not at the first step; and
    of what the model does between its layers, kinds of ops that come as often, or a multiple of that, belong to calls.
    """
    keys, index, counts = np.unique(modules * (kinds.max() + 1) + kinds, return_inverse=True, return_counts=True)
    first = np.flatnonzero(np.diff(keys // (kinds.max() + 1), prepend=-1))  # key of each module
    common, fewest = np.gcd.reduceat(counts, first), np.minimum.reduceat(counts, first)
    of_module = np.where((common == 1) & (fewest >= _FEWEST), fewest, common)
    calls_of_key = np.repeat(of_module, np.diff(np.append(first, len(keys))))
    if not (calls_of_key > 1).any():
        return np.full(len(index), NO_CALL)
    most = int(np.bincount(calls_of_key * (calls_of_key > 1), counts)[1:].argmax()) + 1
    is_called = (calls_of_key > 1) | (counts % most == 0)
    order = np.argsort(index, kind="stable")
    rank = np.empty(len(index), np.int64)
    rank[order] = np.arange(len(index)) - np.repeat(np.cumsum(counts) - counts, counts)
    return np.where(is_called[index], rank * most // counts[index], NO_CALL)


def _take_over(call: I64, sources: I64, targets: I64, may: Bool) -> None:
    """Gives ops without a call the latest of what they use, over the edges that `may` [E]."""
    chosen = may & (call[targets] == NO_CALL) & (call[sources] != NO_CALL)
    np.maximum.at(call, targets[chosen], call[sources[chosen]])
