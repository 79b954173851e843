"""A bound on the step time of any layout of a batch: replicas, micro-batches, ZeRO, recomputation, any placement, and
ops cut over groups of cards.

However a batch is cut, its flops are computed and each op reads and writes at least what it does for the whole batch.
Shared out over devices, without launches, transfers or one op waiting for another, the work takes at least

    T >= sum over ops of min over devices of y[d] * time[op, d]        for any weights y >= 0 that sum to 1

where time[op, d] is the larger of flops and bytes at the device's rates: pieces of an op sum to at least that. Devices
of a class, which are alike, have equal weights.

The same holds of ops that are cut over the ranks of groups: pieces of a product have its flops, and all ranks together
read its weights at least once. Ranks repeat ops or run pieces of them, but for a few whose place others take: copies
are views where a rank has one head, and the loss is summed over parts of a vocabulary. They are not counted where cards
form groups. N ops, C classes."""

import math
from collections.abc import Mapping
from dataclasses import replace
from types import MappingProxyType

import numpy as np

from gdp.arrays import I64
from gdp.cluster import Cluster, Device
from gdp.cluster.achieved import CACHE_SHARE, NUMBERS
from gdp.costs.op_times import op_time_classes
from gdp.costs.table import class_of
from gdp.graph import Graph
from gdp.graph.microbatches import shared_ops

_ROUNDS = 60  # of the ascent over weights
_OTHERWISE = ("transpose", "gather", "element_gather", "softmax")  # classes of ops that ranks may run otherwise


def layout_bound(steps: Mapping[int, Graph], cluster: Cluster) -> int:
    """Returns a time in ns that no layout on `cluster` can beat. `steps[K]` is the step of 1/K of the batch. The work
    of the whole batch is K times its forward and backward work, and one update. The bound is the smallest over all K,
    since small parts may run other kernels. Measured times say nothing about parts of ops: with any, it is 0."""
    if any(any(graph.times_ns) for graph in steps.values()):
        return 0
    has_groups, bounds = bool(cluster.group_sizes()), []
    for num_parts, graph in steps.items():
        work_ns, counts = _work_ns(graph, num_parts, cluster)
        if has_groups:
            work_ns[[class_of(kind) in _OTHERWISE for kind in graph.kinds]] = 0
        bounds.append(_shared_out(work_ns, counts))
    return min(bounds)


def _work_ns(graph: Graph, num_parts: int, cluster: Cluster) -> tuple[I64, I64]:
    """Returns the work of all parts [N, C], without launches, and the number of devices [C] in each class."""
    times, device_class = op_time_classes(graph, replace(cluster, devices=tuple(map(_whole, cluster.devices))))
    counts = np.bincount(device_class)
    work_ns = np.maximum(times - 1, 0)  # rounded up once: less than 1 ns
    _, is_update = shared_ops(graph)
    return np.asarray(np.where(is_update[:, None], work_ns, work_ns * num_parts), np.int64), counts


def _whole(device: Device) -> Device:
    """Returns the device without what a part of an op may take less of: launches, work that is cut into tiles, reads of
    what is not in the cache, and steps of exchanges."""
    shares = {name: value for name, value in device.achieved.items() if name not in NUMBERS}
    if device.achieved.get("cache_bytes") and device.achieved.get("cache_share", CACHE_SHARE):
        shares["cache_bytes"] = 1e15  # all of them
    link = device.link and replace(device.link, latency_ns=0)
    return replace(device, launch_ns=0, issue_ns=0, achieved=MappingProxyType(shares), link=link)


def _shared_out(work_ns: I64, counts: I64) -> int:
    """Returns the least load of the most loaded device, from below, over all ways to share `work_ns` [N, C] out.
    `counts` [C] are the numbers of devices, over which the work of a class is spread evenly."""
    rates = 1.0 / np.maximum(work_ns.sum(axis=0), 1)
    weights = rates / (rates * counts).sum()
    best = 0.0
    for turn in range(_ROUNDS if len(counts) > 1 else 1):
        best = max(best, float((work_ns * weights).min(axis=1).sum()))
        chosen = np.argmin(work_ns * weights, axis=1)
        loads = np.bincount(chosen, work_ns[np.arange(len(work_ns)), chosen], len(counts)) / counts
        step = 0.5 / (turn + 1)
        weights = weights * np.exp(step * (loads / max(loads.max(), 1.0) - 1.0))
        weights /= (weights * counts).sum()
    return math.floor(best * (1 - 1e-9))
