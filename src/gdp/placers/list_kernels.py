"""List scheduling as compiled code: two orders in which ops choose their devices, over the estimates of `schedule`.

- `earliest_first`: of all ready ops and devices, the pair that can start first (ETF: J.-J. Hwang et al., SIAM Journal
  on Computing 18, 1989), with the waiting for favourite children of SCT (C. Hanen, A. Munier, 1995).
- `in_order`: ops in a given order, each into the first gap of a device that is long enough (HEFT's insertion).

"""

from typing import Any, NamedTuple

import numpy as np

from gdp.arrays import I64
from gdp.compiled import inner, kernel
from gdp.placers.schedule import (
    EVERYWHERE,
    PartialSchedule,
    fits,
    may_go,
    place,
    ready_times,
    roomiest,
    sending_ns,
    settle_rest,
)
from gdp.simulator.heaps import pop_top, push
from gdp.simulator.problem import Problem

NEVER = np.iinfo(np.int64).max
NUM_STATE = 3  # of what the kernels below go on from


_WAITING, _READY = (
    0,
    1,
)  # the two heaps of a device: ops whose inputs come later than it is free, and the others by rank


class Queues(NamedTuple):
    """The ops that wait in `earliest_first`. N ops, D devices."""

    rank: Any  # uint32 [N]
    op_of_rank: Any  # uint32 [N]
    favourite: Any  # int64 [N] the child that a device waits for when it can start there first, -1: none
    keys: Any  # int64 [2, D, N] of both heaps of each device: when inputs are there, or 0
    items: Any  # int64 [2, D, N] ranks
    sizes: Any  # int64 [2, D]
    missing: Any  # int64 [N] inputs that are not placed yet
    is_ready: Any  # bool [N]
    is_placed: Any  # bool [N]
    options: Any  # int64 [N] devices in whose heaps an op still is
    last: Any  # int64 [D] the op placed last, -1: none
    fresh: Any  # int64 [N] ops that became ready
    is_uniform: Any  # bool [N] takes equally long everywhere: where it starts first, it ends first
    offers: Any  # int64 [D] what each device would start first, -1: nothing
    offer_ns: Any  # int64 [D] and when at the earliest: checked when chosen
    is_stale: Any  # bool [D] whether that may come sooner by now

    @classmethod
    def of(cls, problem: Problem, favourite: I64, schedule: PartialSchedule) -> "Queues":
        """At the beginning."""
        num_ops, num_devices = schedule.op_time_ns.shape
        graph = problem.graph
        is_counted = ~schedule.floating[graph.producers[graph.edge_tensors]]
        return cls(
            *problem.simulator.ranks(problem.order),
            favourite,
            keys=np.empty((2, num_devices, num_ops), np.int64),
            items=np.empty((2, num_devices, num_ops), np.int64),
            sizes=np.zeros((2, num_devices), np.int64),
            missing=np.bincount(graph.consumers[is_counted], minlength=num_ops),
            is_ready=np.zeros(num_ops, np.bool_),
            is_placed=schedule.floating.copy(),
            options=np.zeros(num_ops, np.int64),
            last=np.full(num_devices, -1, np.int64),
            fresh=np.empty(num_ops, np.int64),
            is_uniform=(schedule.op_time_ns == schedule.op_time_ns[:, :1]).all(axis=1),
            offers=np.full(num_devices, -1, np.int64),
            offer_ns=np.full(num_devices, NEVER),
            is_stale=np.ones(num_devices, np.bool_),
        )


class Gaps(NamedTuple):
    """Gaps between the ops of each device, ascending. G gaps at most."""

    starts: Any  # int64 [D, G]
    ends: Any  # int64 [D, G]
    counts: Any  # int64 [D]

    @classmethod
    def of(cls, schedule: PartialSchedule) -> "Gaps":
        """At the beginning: none."""
        num_ops, num_devices = schedule.op_time_ns.shape
        shape = num_devices, num_ops + 1
        return cls(np.empty(shape, np.int64), np.empty(shape, np.int64), np.zeros(num_devices, np.int64))


@kernel
def earliest_first(arrays, schedule, queues, state, size):
    """Places `size` further ops, each time the (ready op, device) that can start first, ties by rank; the op then goes
    to the device where it ends first. Returns True once all are placed.

    `state` [NUM_STATE] is 0 at the beginning; between calls it has the numbers of ops left and of fresh ones.
    """
    rank, _, _, keys, items, sizes, missing, is_ready, is_placed, options, last, fresh, is_uniform = queues[:13]
    offers, offer_ns, is_stale = queues[13:]
    op_time_ns, unit, _, _, _, _, unit_device, finish_ns, free_ns = schedule[:9]
    ready_ns, _, foresight = schedule[14:]
    tensor_offsets, consumer_offsets, consumers = arrays[2:5]
    num_ops, num_devices = op_time_ns.shape
    has_begun, num_left, num_fresh = state[0], state[1], state[2]
    if not has_begun:
        for op in range(num_ops):
            if not is_placed[op]:
                num_left += 1
                if missing[op] == 0:
                    fresh[num_fresh] = op
                    num_fresh += 1
    end = max(num_left - size, 0)
    while num_left > end:
        for position in range(num_fresh):
            op = fresh[position]
            is_ready[op] = True
            ready_times(arrays, schedule, op, EVERYWHERE)
            for device in range(num_devices):
                if may_go(schedule, op, device):
                    options[op] += 1
                    waiting_ns, waiting = keys[_WAITING, device], items[_WAITING, device]
                    size = push(waiting_ns, waiting, sizes[_WAITING, device], ready_ns[device], np.int64(rank[op]))
                    sizes[_WAITING, device] = size
                    is_stale[device] |= ready_ns[device] <= offer_ns[device]
        num_fresh = 0

        at = -1
        while True:
            forced = False
            for device in range(num_devices):
                if is_stale[device] or (offers[device] >= 0 and is_placed[offers[device]]):
                    is_stale[device] = False
                    offers[device], offer_ns[device], forced = _candidate(arrays, schedule, queues, device)
                    if forced:
                        at = device
                        break
            if forced:
                break
            best = -1
            for device in range(num_devices):
                if offers[device] >= 0 and (
                    best < 0
                    or offer_ns[device] < offer_ns[best]
                    or (offer_ns[device] == offer_ns[best] and rank[offers[device]] < rank[offers[best]])
                ):
                    best = device
            if best == at:
                break
            at = best
            is_stale[at] = True
        chosen = offers[at]
        is_stale[at] = True
        if forced:
            at = roomiest(schedule, chosen)
        elif (foresight or not is_uniform[chosen]) and unit_device[unit[chosen]] < 0:
            ready_times(arrays, schedule, chosen, EVERYWHERE)
            first, end_ns = at, NEVER
            for turn in range(-1, num_devices):  # the device where it starts first, then the others
                device = first if turn < 0 else turn
                if turn >= 0 and (
                    device == first
                    or not may_go(schedule, chosen, device)
                    or not fits(arrays, schedule, chosen, device)
                ):
                    continue
                start_ns = offer_ns[first] if turn < 0 else max(free_ns[device], ready_ns[device])
                other_ns = start_ns + op_time_ns[chosen, device]
                if foresight:
                    other_ns += sending_ns(arrays, schedule, chosen, device)
                if other_ns < end_ns:
                    end_ns, at = other_ns, device
        is_stale[at] = True
        arrival = place(arrays, schedule, chosen, at)
        finish_ns[chosen] = free_ns[at] = max(arrival, free_ns[at]) + op_time_ns[chosen, at]
        last[at] = chosen
        is_placed[chosen] = True
        num_left -= 1
        for index in range(consumer_offsets[tensor_offsets[chosen]], consumer_offsets[tensor_offsets[chosen + 1]]):
            consumer = consumers[index]
            missing[consumer] -= 1
            if missing[consumer] == 0:
                fresh[num_fresh] = consumer
                num_fresh += 1
    state[0], state[1], state[2] = 1, num_left, num_fresh
    if num_left == 0:
        settle_rest(schedule)
    return num_left == 0


@inner
def _candidate(arrays, schedule, queues, device):
    """Returns (op, start, forced): the op that `device` would start first, -1 if none; forced: it fits on no device."""
    _, op_of_rank, favourite, keys, items, sizes, _, is_ready, is_placed, options, last = queues[:11]
    unit, unit_device, all_free_ns, ready_ns = schedule[1], schedule[6], schedule[8], schedule[14]
    free_ns = all_free_ns[device]
    waiting_ns, waiting, ready = keys[_WAITING, device], items[_WAITING, device], items[_READY, device]
    num_waiting, num_ready = sizes[_WAITING, device], sizes[_READY, device]
    op, start_ns = -1, NEVER
    while True:
        while num_waiting > 0 and waiting_ns[0] <= free_ns:
            num_ready = push(keys[_READY, device], ready, num_ready, np.int64(0), waiting[0])
            num_waiting = pop_top(waiting_ns, waiting, num_waiting)
        is_here = num_ready > 0
        if not is_here and num_waiting == 0:
            break
        item = ready[0] if is_here else waiting[0]
        top = np.int64(op_of_rank[item])
        is_gone = is_placed[top] or not may_go(schedule, top, device)
        if not is_gone and unit_device[unit[top]] < 0 and not fits(arrays, schedule, top, device):
            is_gone = True
            options[top] -= 1
            if options[top] == 0:
                sizes[_WAITING, device], sizes[_READY, device] = num_waiting, num_ready
                return top, free_ns, True
        later_ns = NEVER
        if not is_gone:
            later_ns = ready_times(arrays, schedule, top, device)  # channels may be busier by now
            if later_ns <= (free_ns if is_here else waiting_ns[0]):
                op, start_ns = top, max(later_ns, free_ns)
                break
        if is_here:
            num_ready = pop_top(keys[_READY, device], ready, num_ready)
        else:
            num_waiting = pop_top(waiting_ns, waiting, num_waiting)
        if not is_gone:
            num_waiting = push(waiting_ns, waiting, num_waiting, later_ns, item)
    sizes[_WAITING, device], sizes[_READY, device] = num_waiting, num_ready

    child = favourite[last[device]] if last[device] >= 0 else -1
    if child >= 0 and is_ready[child] and not is_placed[child] and may_go(schedule, child, device):
        ready_times(arrays, schedule, child, EVERYWHERE)
        child_ns = max(free_ns, ready_ns[device])
        for other in range(len(all_free_ns)):
            if may_go(schedule, child, other) and max(all_free_ns[other], ready_ns[other]) < child_ns:
                return op, start_ns, False
        is_urgent = op >= 0 and start_ns == free_ns < child_ns
        if is_urgent:  # ready everywhere, so that running it here now makes nobody wait for a transfer
            ready_times(arrays, schedule, op, EVERYWHERE)
            for other in range(len(all_free_ns)):
                is_urgent &= ready_ns[other] <= free_ns or not may_go(schedule, op, other)
        if not is_urgent and fits(arrays, schedule, child, device):
            return child, child_ns, False
    return op, start_ns, False


@kernel
def in_order(arrays, schedule, op_of_rank, gaps, state, size):
    """Places `size` further ops in the order of `op_of_rank` (topological), each where it ends first, in the first gap
    long enough. Returns True once all are placed.

    `state` [NUM_STATE] is 0 at the beginning; between calls it has the number of ops that were placed.
    """
    op_time_ns, unit, _, _, _, floating, unit_device, finish_ns, free_ns = schedule[:9]
    ready_ns, _, foresight = schedule[14:]
    starts, ends, counts = gaps
    num_ops, num_devices = op_time_ns.shape
    shortest = NEVER  # gaps below that are of no use
    for op in range(num_ops):
        for device in range(num_devices):
            if 0 < op_time_ns[op, device] < shortest:
                shortest = op_time_ns[op, device]
    end = min(state[0] + size, num_ops)
    for rank in range(state[0], end):
        op = np.int64(op_of_rank[rank])
        if floating[op]:
            continue
        best, best_ns = -1, NEVER
        ready_times(arrays, schedule, op, EVERYWHERE)
        for device in range(num_devices):
            if may_go(schedule, op, device):
                is_settled = unit_device[unit[op]] >= 0
                if is_settled or fits(arrays, schedule, op, device):
                    time_ns = op_time_ns[op, device]
                    gap = _find_gap(starts[device], ends[device], counts[device], ready_ns[device], time_ns)
                    begin = free_ns[device] if gap < 0 else starts[device, gap]
                    end_ns = max(begin, ready_ns[device]) + time_ns
                    if foresight:
                        end_ns += sending_ns(arrays, schedule, op, device)
                    if end_ns < best_ns:
                        best, best_ns = device, end_ns
        if best < 0:
            best = roomiest(schedule, op)
        arrival_ns = place(arrays, schedule, op, best)
        time_ns = op_time_ns[op, best]
        gap = _find_gap(starts[best], ends[best], counts[best], arrival_ns, time_ns)
        begin = max(free_ns[best] if gap < 0 else starts[best, gap], arrival_ns)
        finish_ns[op] = begin + time_ns
        if gap >= 0:
            counts[best] = _fill_gap(
                starts[best], ends[best], counts[best], gap, begin, begin + time_ns, np.int64(shortest)
            )
        elif time_ns > 0:
            if begin - free_ns[best] >= shortest:
                starts[best, counts[best]], ends[best, counts[best]] = free_ns[best], begin
                counts[best] += 1
            free_ns[best] = begin + time_ns
    state[0] = end
    if end == num_ops:
        settle_rest(schedule)
    return end == num_ops


@inner
def _find_gap(starts, ends, count, ready_ns, time_ns):
    """Returns the first gap in which `time_ns` fit after `ready_ns`, -1 if none does."""
    low, high = 0, count
    while low < high:  # the first gap that ends late enough
        middle = (low + high) // 2
        if ends[middle] < ready_ns + time_ns:
            low = middle + 1
        else:
            high = middle
    for gap in range(low, count):
        if max(starts[gap], ready_ns) + time_ns <= ends[gap]:
            return gap
    return -1


@inner
def _fill_gap(starts, ends, count, gap, begin, end, shortest):
    """Takes `begin` to `end` out of a gap and returns the new number of gaps."""
    left, right = begin - starts[gap] >= shortest, ends[gap] - end >= shortest
    if begin == end:
        return count
    if left and right:
        for index in range(count, gap + 1, -1):
            starts[index], ends[index] = starts[index - 1], ends[index - 1]
        starts[gap + 1], ends[gap + 1] = end, ends[gap]
        ends[gap] = begin
        return count + 1
    if left:
        ends[gap] = begin
    elif right:
        starts[gap] = end
    else:
        for index in range(gap, count - 1):
            starts[index], ends[index] = starts[index + 1], ends[index + 1]
        return count - 1
    return count
