"""List scheduling as compiled code: two orders in which ops choose their devices, over the estimates of `schedule`.

- `earliest_first`: of all ready ops and devices, the pair that can start first (ETF: J.-J. Hwang et al., SIAM Journal
  on Computing 18, 1989), with the waiting for favourite children of SCT (C. Hanen, A. Munier, 1995).
- `in_order`: ops in a given order, each into the first gap of a device that is long enough (HEFT's insertion).

With `contention`, estimates keep channels busy; with `foresight`, an op ends on a device when its results have reached
those consumers whose devices are settled.
"""

import numpy as np
from numba import njit

from gdp.compiled import INNER
from gdp.placers.schedule import fits, may_go, place, ready_times, roomiest, sending_ns, settle_rest

NEVER = np.iinfo(np.int64).max


@njit(**INNER)
def _push(keys, items, size, key, item):
    at = size
    while at > 0:
        parent = (at - 1) // 2
        if keys[parent] < key or (keys[parent] == key and items[parent] <= item):
            break
        keys[at], items[at] = keys[parent], items[parent]
        at = parent
    keys[at], items[at] = key, item


@njit(**INNER)
def _drop_top(keys, items, size):
    """Remove the least of `size` entries."""
    size -= 1
    key, item = keys[size], items[size]
    at = 0
    while True:
        child = 2 * at + 1
        if child >= size:
            break
        right = child + 1
        if right < size and (keys[right] < keys[child] or (keys[right] == keys[child] and items[right] < items[child])):
            child = right
        if key < keys[child] or (key == keys[child] and item <= items[child]):
            break
        keys[at], items[at] = keys[child], items[child]
        at = child
    keys[at], items[at] = key, item


_WAITING, _READY = (
    0,
    1,
)  # the two heaps of a device: ops whose inputs come later than it is free, and the others by rank


@njit(cache=True, nogil=True)
def earliest_first(arrays, schedule, rank, op_of_rank, favourite, contention, foresight):
    """Place all ops, each time the (ready op, device) that can start first, ties by rank; the op then goes to the
    device where it ends first.

    `favourite` [N]: the child that a device waits for when it can start there first, -1: none.
    """
    num_ops, num_devices = schedule.op_time_ns.shape
    keys = np.empty((2, num_devices, num_ops), np.int64)
    items = np.empty((2, num_devices, num_ops), np.int64)
    sizes = np.zeros((2, num_devices), np.int64)
    missing = arrays.num_inputs.astype(np.int64)
    is_ready = np.zeros(num_ops, np.bool_)
    is_placed = schedule.floating.copy()
    options = np.zeros(num_ops, np.int64)  # devices in whose heaps an op still is
    last = np.full(num_devices, -1, np.int64)
    fresh = np.empty(num_ops, np.int64)  # ops that became ready
    num_fresh = 0
    num_left = 0
    is_uniform = np.ones(num_ops, np.bool_)  # takes equally long everywhere: where it starts first, it ends first
    for op in range(num_ops):
        for device in range(num_devices):
            is_uniform[op] &= schedule.op_time_ns[op, device] == schedule.op_time_ns[op, 0]
        if schedule.floating[op]:
            for tensor in range(arrays.tensor_offsets[op], arrays.tensor_offsets[op + 1]):
                for index in range(arrays.consumer_offsets[tensor], arrays.consumer_offsets[tensor + 1]):
                    missing[arrays.consumers[index]] -= 1
        else:
            num_left += 1
    for op in range(num_ops):
        if missing[op] == 0 and not schedule.floating[op]:
            fresh[num_fresh] = op
            num_fresh += 1

    # what each device would start first, and when at the earliest: checked when chosen, renewed when it may come sooner
    offers = np.full(num_devices, -1, np.int64)
    offer_ns = np.full(num_devices, NEVER)
    is_stale = np.ones(num_devices, np.bool_)
    ready_ns = np.empty(num_devices, np.int64)
    while num_left > 0:
        for position in range(num_fresh):
            op = fresh[position]
            is_ready[op] = True
            ready_times(arrays, schedule, op, -1, contention, ready_ns)
            for device in range(num_devices):
                if may_go(schedule, op, device):
                    options[op] += 1
                    _push(
                        keys[_WAITING, device],
                        items[_WAITING, device],
                        sizes[_WAITING, device],
                        ready_ns[device],
                        rank[op],
                    )
                    sizes[_WAITING, device] += 1
                    is_stale[device] |= ready_ns[device] <= offer_ns[device]
        num_fresh = 0

        at = -1
        while True:
            forced = False
            for device in range(num_devices):
                if is_stale[device] or (offers[device] >= 0 and is_placed[offers[device]]):
                    is_stale[device] = False
                    offers[device], offer_ns[device], forced = _candidate(
                        arrays, schedule, op_of_rank, favourite, contention, keys, items, sizes, is_ready, is_placed,
                        options, last, device, ready_ns,
                    )  # fmt: skip
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
        elif (foresight or not is_uniform[chosen]) and schedule.unit_device[schedule.unit[chosen]] < 0:
            end_ns = offer_ns[at] + schedule.op_time_ns[chosen, at]
            if foresight:
                end_ns += sending_ns(arrays, schedule, chosen, at)
            ready_times(arrays, schedule, chosen, -1, contention, ready_ns)
            for device in range(num_devices):
                if device != at and may_go(schedule, chosen, device) and fits(arrays, schedule, chosen, device):
                    start_ns = max(schedule.free_ns[device], ready_ns[device])
                    other_ns = start_ns + schedule.op_time_ns[chosen, device]
                    if foresight:
                        other_ns += sending_ns(arrays, schedule, chosen, device)
                    if other_ns < end_ns:
                        end_ns, at = other_ns, device
        is_stale[at] = True
        arrival = place(arrays, schedule, chosen, at, contention)
        schedule.finish_ns[chosen] = max(arrival, schedule.free_ns[at]) + schedule.op_time_ns[chosen, at]
        schedule.free_ns[at] = schedule.finish_ns[chosen]
        last[at] = chosen
        is_placed[chosen] = True
        num_left -= 1
        for tensor in range(arrays.tensor_offsets[chosen], arrays.tensor_offsets[chosen + 1]):
            for index in range(arrays.consumer_offsets[tensor], arrays.consumer_offsets[tensor + 1]):
                consumer = arrays.consumers[index]
                missing[consumer] -= 1
                if missing[consumer] == 0:
                    fresh[num_fresh] = consumer
                    num_fresh += 1
    settle_rest(schedule)


@njit(**INNER)
def _candidate(
    arrays, schedule, op_of_rank, favourite, contention, keys, items, sizes, is_ready, is_placed, options, last, device,
    ready_ns,
):  # fmt: skip
    """(op, start, forced) of what `device` would start first, -1 if nothing; forced: the op fits on no device."""
    free_ns = schedule.free_ns[device]
    waiting_ns, waiting, ready = keys[_WAITING, device], items[_WAITING, device], items[_READY, device]
    num_waiting, num_ready = sizes[_WAITING, device], sizes[_READY, device]
    op, start_ns = -1, NEVER
    while True:
        while num_waiting > 0 and waiting_ns[0] <= free_ns:
            _push(keys[_READY, device], ready, num_ready, 0, waiting[0])
            num_ready += 1
            _drop_top(waiting_ns, waiting, num_waiting)
            num_waiting -= 1
        is_here = num_ready > 0
        if not is_here and num_waiting == 0:
            break
        item = ready[0] if is_here else waiting[0]
        top = op_of_rank[item]
        is_gone = is_placed[top] or not may_go(schedule, top, device)
        if not is_gone and schedule.unit_device[schedule.unit[top]] < 0 and not fits(arrays, schedule, top, device):
            is_gone = True
            options[top] -= 1
            if options[top] == 0:
                sizes[_WAITING, device], sizes[_READY, device] = num_waiting, num_ready
                return top, free_ns, True
        later_ns = NEVER
        if not is_gone:
            later_ns = ready_times(arrays, schedule, top, device, contention, ready_ns)  # channels may be busier by now
            if later_ns <= (free_ns if is_here else waiting_ns[0]):
                op, start_ns = top, max(later_ns, free_ns)
                break
        if is_here:
            _drop_top(keys[_READY, device], ready, num_ready)
            num_ready -= 1
        else:
            _drop_top(waiting_ns, waiting, num_waiting)
            num_waiting -= 1
        if not is_gone:
            _push(waiting_ns, waiting, num_waiting, later_ns, item)
            num_waiting += 1
    sizes[_WAITING, device], sizes[_READY, device] = num_waiting, num_ready

    child = favourite[last[device]] if last[device] >= 0 else -1
    if child >= 0 and is_ready[child] and not is_placed[child] and may_go(schedule, child, device):
        ready_times(arrays, schedule, child, -1, contention, ready_ns)
        child_ns = max(free_ns, ready_ns[device])
        for other in range(len(schedule.free_ns)):
            if may_go(schedule, child, other) and max(schedule.free_ns[other], ready_ns[other]) < child_ns:
                return op, start_ns, False
        is_urgent = op >= 0 and start_ns == free_ns < child_ns
        if is_urgent:  # ready everywhere, so that running it here now makes nobody wait for a transfer
            ready_times(arrays, schedule, op, -1, contention, ready_ns)
            for other in range(len(schedule.free_ns)):
                is_urgent &= ready_ns[other] <= free_ns or not may_go(schedule, op, other)
        if not is_urgent and fits(arrays, schedule, child, device):
            return child, child_ns, False
    return op, start_ns, False


@njit(cache=True, nogil=True)
def in_order(arrays, schedule, op_of_rank, contention, foresight):
    """Place ops in the order of `op_of_rank` (topological), each where it ends first, in the first gap long enough."""
    num_ops, num_devices = schedule.op_time_ns.shape
    starts = np.empty((num_devices, num_ops + 1), np.int64)  # gaps between ops, ascending
    ends = np.empty((num_devices, num_ops + 1), np.int64)
    counts = np.zeros(num_devices, np.int64)
    ready_ns = np.empty(num_devices, np.int64)
    shortest = NEVER  # gaps below that are of no use
    for op in range(num_ops):
        for device in range(num_devices):
            if 0 < schedule.op_time_ns[op, device] < shortest:
                shortest = schedule.op_time_ns[op, device]
    for op in op_of_rank:
        if schedule.floating[op]:
            continue
        best, best_ns = -1, NEVER
        ready_times(arrays, schedule, op, -1, contention, ready_ns)
        for device in range(num_devices):
            if may_go(schedule, op, device):
                is_settled = schedule.unit_device[schedule.unit[op]] >= 0
                if is_settled or fits(arrays, schedule, op, device):
                    time_ns = schedule.op_time_ns[op, device]
                    gap = _find_gap(starts[device], ends[device], counts[device], ready_ns[device], time_ns)
                    begin = schedule.free_ns[device] if gap < 0 else starts[device, gap]
                    end_ns = max(begin, ready_ns[device]) + time_ns
                    if foresight:
                        end_ns += sending_ns(arrays, schedule, op, device)
                    if end_ns < best_ns:
                        best, best_ns = device, end_ns
        if best < 0:
            best = roomiest(schedule, op)
        arrival_ns = place(arrays, schedule, op, best, contention)
        time_ns = schedule.op_time_ns[op, best]
        gap = _find_gap(starts[best], ends[best], counts[best], arrival_ns, time_ns)
        begin = max(schedule.free_ns[best] if gap < 0 else starts[best, gap], arrival_ns)
        schedule.finish_ns[op] = begin + time_ns
        if gap >= 0:
            counts[best] = _fill_gap(starts[best], ends[best], counts[best], gap, begin, begin + time_ns, shortest)
        elif time_ns > 0:
            if begin - schedule.free_ns[best] >= shortest:
                starts[best, counts[best]], ends[best, counts[best]] = schedule.free_ns[best], begin
                counts[best] += 1
            schedule.free_ns[best] = begin + time_ns
    settle_rest(schedule)


@njit(**INNER)
def _find_gap(starts, ends, count, ready_ns, time_ns):
    """The first gap in which `time_ns` fit after `ready_ns`, -1 if none does."""
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


@njit(**INNER)
def _fill_gap(starts, ends, count, gap, begin, end, shortest):
    """Take `begin` to `end` out of a gap; the new number of gaps."""
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
