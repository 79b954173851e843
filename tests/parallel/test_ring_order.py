"""The order of replicas in a ring."""

from itertools import permutations

import numpy as np
import pytest

from gdp.parallel.rings import ring_order


def slowest(seconds: np.ndarray, order: np.ndarray) -> float:
    """Returns the slowest hop of a ring."""
    return float(seconds[order, np.roll(order, -1)].max())


def test_the_ring_avoids_the_slow_link() -> None:
    """Four replicas of which 0 and 1, and 2 and 3, are far apart: neither pair follows each other."""
    seconds = np.ones((4, 4))
    for pair in ((0, 1), (1, 0), (2, 3), (3, 2)):
        seconds[pair] = 9
    assert ring_order(seconds).tolist() in ([0, 2, 1, 3], [0, 3, 1, 2])


def test_directions_may_differ() -> None:
    """One way round is fast, the other one slow."""
    seconds = np.full((5, 5), 10.0)
    way = [0, 3, 1, 4, 2]
    for source, target in zip(way, [*way[1:], 0], strict=True):
        seconds[source, target] = 1
    assert ring_order(seconds).tolist() == way


@pytest.mark.parametrize("count", [3, 6, 8])
def test_no_order_has_a_faster_slowest_hop(count: int) -> None:
    """No order of up to 8 replicas has a faster slowest hop."""
    seconds = np.random.default_rng(count).random((count, count))
    least = min(slowest(seconds, np.array(order)) for order in permutations(range(count)))
    assert slowest(seconds, ring_order(seconds)) == least


def test_hosts_stay_together_among_many() -> None:
    """Sixteen replicas, numbered alternately on two hosts: the ring goes from host to host twice, the least it can."""
    host = np.arange(16) % 2
    seconds = np.where(host[:, None] == host, 1.0, 10.0)
    order = ring_order(seconds)
    assert sorted(order.tolist()) == list(range(16))
    assert (host[order] != host[np.roll(order, -1)]).sum() == 2
