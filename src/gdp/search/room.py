"""Room: which ops have room on which device, and how much memory a step needs beside its weights.

Cards of one machine may differ tenfold in memory: a large table, or the ops of a large result, then go elsewhere.
N ops, D devices.
"""

import numpy as np

from gdp.arrays import I64, Bool
from gdp.simulator.problem import Placement, Problem


def roomy(problem: Problem, most: float = 1.0) -> Bool:
    """Returns [N, D] the allowed devices whose memory holds an op's inputs and results at once.

    Inputs and results that are no weights take at most a share `most` of the memory, to leave room for weights. A
    parameter goes where its first consumer may go, and a group where all of it may; what has no room anywhere may go
    wherever it is allowed.
    """
    graph = problem.graph
    sources, targets = graph.producers[graph.edge_tensors], graph.consumers
    size, is_weight = graph.tensor_bytes[graph.edge_tensors], graph.is_resident[graph.edge_tensors]
    passing = problem.simulator.arrays.memory.alloc_bytes.copy()
    np.add.at(passing, targets, np.where(is_weight, 0, size))
    weights = graph.resident_bytes.copy()
    np.add.at(weights, targets, np.where(is_weight, size, 0))
    limits = problem.memory_limit_bytes
    has_room = ((passing + weights)[:, None] <= limits) & (passing[:, None] <= most * limits)
    may = problem.allowed & has_room
    is_source = np.ones(graph.num_ops, np.bool_)
    is_source[targets] = False
    first = np.full(graph.num_ops, graph.num_ops)
    np.minimum.at(first, sources, targets)
    held = np.flatnonzero(is_source & (first < graph.num_ops) & (graph.resident_bytes > 0))
    may[held] &= may[first[held]]
    whole = np.ones((int(graph.group_index.max()) + 1, problem.num_devices), np.bool_)
    np.logical_and.at(whole, graph.group_index, may)
    may = whole[graph.group_index]
    return np.where(may.any(axis=1, keepdims=True), may, problem.allowed)


def fallbacks(problem: Problem, host: int, may: Bool) -> Placement:
    """Returns [N] where an op goes that has no room where it is wanted, of the devices that may run anything.

    Such ops that follow each other go to one device, that with the least sum of op times and of transfers among them;
    where an op has no room there, its fastest device has it. What is not allowed everywhere goes to `host`, if it may.
    """
    from scipy.sparse import coo_array  # half a second, which most commands never need
    from scipy.sparse.csgraph import connected_components

    graph, rates = problem.graph, problem.cluster.bytes_per_second
    is_anywhere, every = problem.allowed.all(axis=1), np.arange(graph.num_ops)
    fastest = np.argmin(np.where(may, problem.op_time_ns, np.iinfo(np.int64).max), axis=1)
    fastest = np.where(is_anywhere, fastest, np.argmax(problem.allowed, axis=1))
    used = np.flatnonzero(may.any(axis=0))
    is_displaced = np.asarray(is_anywhere & ~may[:, used].all(axis=1), np.bool_)
    sources, targets = graph.producers[graph.edge_tensors], graph.consumers
    is_inner = is_displaced[sources] & is_displaced[targets]
    sources, targets = sources[is_inner], targets[is_inner]
    size = graph.tensor_bytes[graph.edge_tensors][is_inner].astype(np.float64)
    edges = coo_array((np.ones(len(sources), np.bool_), (sources, targets)), shape=(graph.num_ops, graph.num_ops))
    count, chain = connected_components(edges, directed=False)
    choices = np.where(may & is_displaced[:, None], np.arange(problem.num_devices), fastest[:, None])  # [N, D]
    spent_ns = np.empty((len(used), count))
    for number, placement in enumerate(choices.T[used]):
        here, there = placement[sources], placement[targets]
        moved_ns = np.where(here != there, size * 1e9 / np.maximum(rates[here, there], 1), 0.0)
        spent_ns[number] = np.bincount(chain, problem.op_time_ns[every, placement], count)
        spent_ns[number] += np.bincount(chain[sources], moved_ns, count)
    best = choices[every, used[np.argmin(spent_ns, axis=0)[chain]]]
    best = np.where(~is_anywhere & problem.allowed[:, host], host, best)
    _, first = np.unique(graph.group_index, return_index=True)
    return np.asarray(best[first[graph.group_index]], np.int64)  # a group stays together


def working_bytes(problem: Problem, position: I64, may: Bool) -> I64:
    """Returns [D] the most that results take at once on a device that runs all that it may, by `position` [N]."""
    graph = problem.graph
    last = position[graph.producers]
    np.maximum.at(last, graph.edge_tensors, position[graph.consumers])
    is_view = graph.view_of >= 0
    np.maximum.at(last, graph.view_of[is_view], last[is_view])
    last[graph.is_kept] = graph.num_ops - 1
    size = np.where(is_view | graph.is_resident, 0, graph.tensor_bytes)
    most = np.zeros(problem.num_devices, np.int64)
    for device in range(problem.num_devices):
        is_there = may[graph.producers, device]
        np.logical_or.at(is_there, graph.edge_tensors, may[graph.consumers, device])
        change = np.zeros(graph.num_ops + 1, np.int64)
        np.add.at(change, position[graph.producers[is_there]], size[is_there])
        np.add.at(change, last[is_there] + 1, -size[is_there])
        live = np.cumsum(change)[position]
        most[device] = live[may[:, device]].max(initial=0)
    return most
