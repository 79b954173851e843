"""Topological orders of ops that are not numbered in one."""

import heapq
from collections.abc import Callable, Collection, Sequence


def topological_order(
    makers: Sequence[Collection[int]], is_late: Callable[[int], bool] = lambda number: False
) -> list[int]:
    """Returns the numbers 0 to N - 1 in an order in which each comes behind its `makers` [N], distinct numbers.

    Of those that may come next, the least one does; ones that are `is_late` wait for all others. Numbers on a cycle,
    and behind one, are left out.
    """
    followers: list[list[int]] = [[] for _ in makers]
    for number, sources in enumerate(makers):
        for source in sources:
            followers[source].append(number)
    missing = list(map(len, makers))
    ready = [(is_late(number), number) for number, count in enumerate(missing) if not count]
    heapq.heapify(ready)
    order: list[int] = []
    while ready:
        order.append(heapq.heappop(ready)[1])
        for number in followers[order[-1]]:
            missing[number] -= 1
            if not missing[number]:
                heapq.heappush(ready, (is_late(number), number))
    return order
