"""The order of replicas in a ring: the one with the fastest slowest hop, since all hops of a ring take turns together.

The slowest hop decides first (a bottleneck travelling salesman), the sum of all hops second. R replicas.
"""

from collections.abc import Sequence
from itertools import permutations

import numpy as np
import numpy.typing as npt

from gdp.arrays import F64, I64
from gdp.cluster import Cluster
from gdp.parallel.buckets import BUCKET_BYTES

_MOST_EXACT = 8  # replicas: 7! = 5,040 orders
_MOST_ORDERED = 64  # replicas: of more, which are numbered host by host, an order takes minutes to improve


def ring_over(cluster: Cluster, devices: Sequence[Sequence[int]] | I64) -> tuple[int, ...] | None:
    """Returns the order [R] of replicas on `devices` [R, P] in rings; None where the order of their numbers is as good.

    A hop takes a chunk of a bucket over the slowest of P routes. Many replicas stay in the order of their numbers.
    """
    grid = np.array(devices, np.int64)
    count = len(grid)
    if count <= 2 or count > _MOST_ORDERED:
        return None
    rates = np.where(cluster.bytes_per_second > 0, cluster.bytes_per_second, np.inf)
    hop_ns = cluster.latency_ns + BUCKET_BYTES / count * 1e9 / rates
    slowest_ns = np.stack([hop_ns[np.ix_(place, place)] for place in grid.T]).max(axis=0)
    order = ring_order(slowest_ns)
    return tuple(order.tolist()) if _cost(slowest_ns, order) < _cost(slowest_ns, np.arange(count)) else None


def ring_order(seconds: npt.ArrayLike) -> I64:
    """Returns the order [R] of replicas, beginning with 0.

    `seconds` [R, R] is the time of a hop from one replica to another; both directions may differ. Up to 8 replicas all
    orders are compared. Beyond, each replica is followed by the nearest one that is left, from every start; in the
    best of these orders parts are turned round and replicas moved as long as that helps.
    """
    hops = np.array(seconds, np.float64)
    count = len(hops)
    if count <= 2:
        return np.arange(count)
    if count <= _MOST_EXACT:
        orders = np.array([(0, *rest) for rest in permutations(range(1, count))])
        times = hops[orders, np.roll(orders, -1, axis=1)]
        return np.asarray(orders[np.lexsort((times.sum(axis=1), times.max(axis=1)))[0]], np.int64)
    nearest = min((_nearest(hops, start) for start in range(count)), key=lambda order: _cost(hops, order))
    best = _improved(hops, nearest)
    return np.roll(best, -int(np.flatnonzero(best == 0)[0]))


def _cost(hops: F64, order: I64) -> tuple[float, float]:
    """Returns the slowest hop of a ring and the sum of all."""
    times = hops[order, np.roll(order, -1)]
    return float(times.max()), float(times.sum())


def _nearest(hops: F64, start: int) -> I64:
    """Returns the order in which each replica is followed by the nearest one that is left."""
    order, left = [start], set(range(len(hops))) - {start}
    while left:
        following = min(left, key=lambda replica: (hops[order[-1], replica], replica))
        order.append(following)
        left.remove(following)
    return np.array(order, np.int64)


def _improved(hops: F64, order: I64) -> I64:
    """Returns `order` after all changes that help: parts turned round (2-opt), single replicas moved (or-opt)."""
    count, cost = len(order), _cost(hops, order)
    helped = True
    while helped:
        helped = False
        for first in range(count - 1):
            for last in range(first + 1, count):
                inner = order[first : last + 1]
                for changed in (inner[::-1], np.roll(inner, 1), np.roll(inner, -1)):
                    trial = np.concatenate((order[:first], changed, order[last + 1 :]))
                    trial_cost = _cost(hops, trial)
                    if trial_cost < cost:
                        order, cost, helped = trial, trial_cost, True
                        break
    return order
