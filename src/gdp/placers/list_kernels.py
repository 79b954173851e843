"""List scheduling as compiled code: two orders in which ops choose their devices, over the estimates of `schedule`.

- `earliest_first`: of all ready ops and devices, the pair that can start first (ETF: J.-J. Hwang et al., SIAM Journal
  on Computing 18, 1989), with the waiting for favourite children of SCT (C. Hanen, A. Munier, 1995).
- `in_order`: ops in a given order, each into the first gap of a device that is long enough (HEFT's insertion)."""

from typing import Annotated, Any, NamedTuple

import numpy as np

from gdp.arrays import I64, zeros
from gdp.compiled import inlined, inner, kernel
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
NUM_STATE = 3  # numbers that a call of the kernels below hands to the next one


class Ready(NamedTuple):
    """Two heaps for each device: ops whose inputs arrive after it is free, and the others, by rank."""

    waiting_ns: Annotated[Any, "int64 [D, N]"]  # arrival of the last input
    waiting: Annotated[Any, "int64 [D, N]"]  # ranks
    num_waiting: Annotated[Any, "int64 [D]"]
    no_ns: Annotated[Any, "int64 [D, N]"]  # zeros: the other heap has no times
    here: Annotated[Any, "int64 [D, N]"]  # ranks
    num_here: Annotated[Any, "int64 [D]"]


class Offers(NamedTuple):
    """The op that each device would start first."""

    op: Annotated[Any, "int64 [D]"]  # -1: none
    start_ns: Annotated[Any, "int64 [D]"]  # earliest start: checked when the op is chosen
    is_stale: Annotated[Any, "bool [D]"]  # whether another op may start sooner by now


class Queues(NamedTuple):
    """The ops that wait in `earliest_first`. N ops, D devices."""

    rank: Annotated[Any, "uint32 [N]"]
    op_of_rank: Annotated[Any, "uint32 [N]"]
    favourite: Annotated[Any, "int64 [N]"]  # the child that a device waits for when it can start there first, -1: none
    is_uniform: Annotated[Any, "bool [N]"]  # takes equally long everywhere: where it starts first, it ends first
    missing: Annotated[Any, "int64 [N]"]  # inputs that are not placed yet
    is_ready: Annotated[Any, "bool [N]"]
    is_placed: Annotated[Any, "bool [N]"]
    options: Annotated[Any, "int64 [N]"]  # devices in whose heaps an op still is
    last: Annotated[Any, "int64 [D]"]  # the op placed last, -1: none
    fresh: Annotated[Any, "int64 [N]"]  # ops that became ready
    ready: Ready
    offers: Offers

    @classmethod
    def of(cls, problem: Problem, favourite: I64, schedule: PartialSchedule) -> "Queues":
        """Returns the queues before any op is placed."""
        num_ops, num_devices = schedule.op_time_ns.shape
        graph = problem.graph
        is_counted = ~schedule.floating[graph.producers[graph.edge_tensors]]
        queues = zeros(cls, N=num_ops, D=num_devices)
        queues.last[:] = queues.offers.op[:] = -1
        queues.offers.start_ns[:], queues.offers.is_stale[:] = NEVER, True
        rank, op_of_rank = problem.simulator.ranks(problem.order)
        return queues._replace(
            rank=rank,
            op_of_rank=op_of_rank,
            favourite=favourite,
            is_uniform=(schedule.op_time_ns == schedule.op_time_ns[:, :1]).all(axis=1),
            missing=np.bincount(graph.consumers[is_counted], minlength=num_ops),
            is_placed=schedule.floating.copy(),
        )


class Gaps(NamedTuple):
    """Gaps between the ops of each device, ascending."""

    starts: Annotated[Any, "int64 [D, N + 1]"]
    ends: Annotated[Any, "int64 [D, N + 1]"]
    counts: Annotated[Any, "int64 [D]"]


@kernel
def earliest_first(arrays, schedule, queues, state, count):
    """Places `count` further ops, each time the (ready op, device) that can start first, ties by rank; the op then goes
    to the device where it ends first. Returns True once all are placed.

        while ops are left:
            each op that became ready goes into the waiting heap of each device that may run it
            loop:
                each device whose offer is stale makes a new one (`_offer`)
                the earliest offer, ties by rank, is chosen if it was made in this loop; else it is made anew
            unless times are alike, the op goes to the device where it ends first; one that fits nowhere goes to the
                device with most room
            consumers that miss no other input become ready

    `state` [NUM_STATE] is 0 at the beginning; between calls it has the numbers of ops left and of fresh ones."""
    rank, fresh, missing, is_placed = queues.rank, queues.fresh, queues.missing, queues.is_placed
    offers, is_stale, free_ns = queues.offers, queues.offers.is_stale, schedule.free_ns
    num_ops, num_devices = schedule.op_time_ns.shape
    has_begun, num_left, num_fresh = state[0], state[1], state[2]
    if not has_begun:
        for op in range(num_ops):
            if not is_placed[op]:
                num_left += 1
                if missing[op] == 0:
                    fresh[num_fresh] = op
                    num_fresh += 1
    end = max(num_left - count, 0)
    while num_left > end:
        for position in range(num_fresh):
            _add_ready_op(arrays, schedule, queues, fresh[position])
        num_fresh = 0

        at, is_forced = -1, False
        while not is_forced:
            for device in range(num_devices):
                if is_stale[device] or (offers.op[device] >= 0 and is_placed[offers.op[device]]):
                    is_stale[device] = False
                    offers.op[device], offers.start_ns[device], is_forced = _offer(arrays, schedule, queues, device)
                    if is_forced:
                        at = device
                        break
            best = _earliest(offers, rank)
            if is_forced or best == at:
                break
            at = best
            is_stale[at] = True
        chosen = offers.op[at]
        is_stale[at] = True
        if is_forced:
            at = roomiest(schedule, schedule.unit[chosen])
        elif schedule.unit_device[schedule.unit[chosen]] < 0 and (schedule.foresight or not queues.is_uniform[chosen]):
            at = _first_to_end(arrays, schedule, chosen, at, offers.start_ns[at])
        is_stale[at] = True
        arrival_ns = place(arrays, schedule, chosen, at)
        end_ns = max(arrival_ns, free_ns[at]) + schedule.op_time_ns[chosen, at]
        schedule.finish_ns[chosen] = free_ns[at] = end_ns
        queues.last[at] = chosen
        is_placed[chosen] = True
        num_left -= 1
        first, last = arrays.tensor_offsets[chosen], arrays.tensor_offsets[chosen + 1]
        for index in range(arrays.consumer_offsets[first], arrays.consumer_offsets[last]):
            consumer = arrays.consumers[index]
            missing[consumer] -= 1
            if missing[consumer] == 0:
                fresh[num_fresh] = consumer
                num_fresh += 1
    state[0], state[1], state[2] = 1, num_left, num_fresh
    if num_left == 0:
        settle_rest(schedule)
    return num_left == 0


@inner
def _add_ready_op(arrays, schedule, queues, op):
    """Adds `op`, whose inputs are all placed, to the waiting heap of each device that may run it."""
    ready, offers, ready_ns = queues.ready, queues.offers, schedule.ready_ns
    queues.is_ready[op] = True
    ready_times(arrays, schedule, op, EVERYWHERE)
    for device in range(len(ready_ns)):
        if may_go(schedule, op, device):
            queues.options[op] += 1
            ready.num_waiting[device] = push(
                ready.waiting_ns[device],
                ready.waiting[device],
                ready.num_waiting[device],
                ready_ns[device],
                np.int64(queues.rank[op]),
            )
            offers.is_stale[device] |= ready_ns[device] <= offers.start_ns[device]


@inlined
def _earliest(offers, rank):
    """Returns the device of the earliest offer, of equal ones that of the op of lowest rank; -1: no offers."""
    best = -1
    for device in range(len(offers.op)):
        if offers.op[device] >= 0 and (
            best < 0
            or offers.start_ns[device] < offers.start_ns[best]
            or (offers.start_ns[device] == offers.start_ns[best] and rank[offers.op[device]] < rank[offers.op[best]])
        ):
            best = device
    return best


@inner
def _first_to_end(arrays, schedule, op, first, first_ns):
    """Returns the device where `op` ends first; it starts first on `first`, at `first_ns`."""
    ready_times(arrays, schedule, op, EVERYWHERE)
    at, end_ns = first, NEVER
    for turn in range(-1, len(schedule.free_ns)):  # the device where it starts first, then the others
        device = first if turn < 0 else turn
        if turn >= 0 and (
            device == first or not may_go(schedule, op, device) or not fits(arrays, schedule, op, device)
        ):
            continue
        start_ns = first_ns if turn < 0 else max(schedule.free_ns[device], schedule.ready_ns[device])
        other_ns = start_ns + schedule.op_time_ns[op, device]
        if schedule.foresight:
            other_ns += sending_ns(arrays, schedule, op, device)
        if other_ns < end_ns:
            end_ns, at = other_ns, device
    return at


@inner
def _offer(arrays, schedule, queues, device):
    """Returns (op, start, forced): the op that `device` would start first, -1 if none; forced: it fits on no device."""
    ready, is_placed, unit_device = queues.ready, queues.is_placed, schedule.unit_device
    free_ns = schedule.free_ns[device]
    waiting_ns, waiting, here = ready.waiting_ns[device], ready.waiting[device], ready.here[device]
    num_waiting, num_here = ready.num_waiting[device], ready.num_here[device]
    op, start_ns = -1, NEVER
    while True:
        while num_waiting > 0 and waiting_ns[0] <= free_ns:
            num_here = push(ready.no_ns[device], here, num_here, np.int64(0), waiting[0])
            num_waiting = pop_top(waiting_ns, waiting, num_waiting)
        is_here = num_here > 0
        if not is_here and num_waiting == 0:
            break
        item = here[0] if is_here else waiting[0]
        top = np.int64(queues.op_of_rank[item])
        is_gone = is_placed[top] or not may_go(schedule, top, device)
        if not is_gone and unit_device[schedule.unit[top]] < 0 and not fits(arrays, schedule, top, device):
            is_gone = True
            queues.options[top] -= 1
            if queues.options[top] == 0:
                ready.num_waiting[device], ready.num_here[device] = num_waiting, num_here
                return top, free_ns, True
        later_ns = NEVER
        if not is_gone:
            later_ns = ready_times(arrays, schedule, top, device)  # channels may be busier by now
            if later_ns <= (free_ns if is_here else waiting_ns[0]):
                op, start_ns = top, max(later_ns, free_ns)
                break
        if is_here:
            num_here = pop_top(ready.no_ns[device], here, num_here)
        else:
            num_waiting = pop_top(waiting_ns, waiting, num_waiting)
        if not is_gone:
            num_waiting = push(waiting_ns, waiting, num_waiting, later_ns, item)
    ready.num_waiting[device], ready.num_here[device] = num_waiting, num_here
    child, child_ns = _awaited_child(arrays, schedule, queues, device, op, start_ns)
    return (child, child_ns, False) if child >= 0 else (op, start_ns, False)


@inner
def _awaited_child(arrays, schedule, queues, device, op, start_ns):
    """Returns (the favourite child of the last op of `device`, its start) if the device waits for it, else (-1, 0). It
    waits if the child can start nowhere sooner and fits, unless `op`, which could start at `start_ns`, is urgent."""
    all_free_ns, ready_ns = schedule.free_ns, schedule.ready_ns
    child = queues.favourite[queues.last[device]] if queues.last[device] >= 0 else np.int64(-1)
    if child < 0 or not queues.is_ready[child] or queues.is_placed[child] or not may_go(schedule, child, device):
        return np.int64(-1), np.int64(0)
    free_ns = all_free_ns[device]
    ready_times(arrays, schedule, child, EVERYWHERE)
    child_ns = max(free_ns, ready_ns[device])
    for other in range(len(all_free_ns)):
        if may_go(schedule, child, other) and max(all_free_ns[other], ready_ns[other]) < child_ns:
            return np.int64(-1), np.int64(0)
    is_urgent = op >= 0 and start_ns == free_ns < child_ns
    if is_urgent:  # ready everywhere, so that running it here now makes nobody wait for a transfer
        ready_times(arrays, schedule, op, EVERYWHERE)
        for other in range(len(all_free_ns)):
            is_urgent &= ready_ns[other] <= free_ns or not may_go(schedule, op, other)
    if is_urgent or not fits(arrays, schedule, child, device):
        return np.int64(-1), np.int64(0)
    return child, child_ns


@kernel
def in_order(arrays, schedule, op_of_rank, gaps, state, count):
    """Places `count` further ops in the order of `op_of_rank` (topological), each where it ends first, in the first gap
    long enough. Returns True once all are placed. `state` [NUM_STATE], 0 at first, has the number of ops placed."""
    op_time_ns, unit, floating = schedule.op_time_ns, schedule.unit, schedule.floating
    unit_device, finish_ns, free_ns = schedule.unit_device, schedule.finish_ns, schedule.free_ns
    starts, ends, counts = gaps
    num_ops, num_devices = op_time_ns.shape
    shortest = NEVER  # gaps below that are of no use
    for op in range(num_ops):
        for device in range(num_devices):
            if 0 < op_time_ns[op, device] < shortest:
                shortest = op_time_ns[op, device]
    end = min(state[0] + count, num_ops)
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
                    gap = _find_gap(starts[device], ends[device], counts[device], schedule.ready_ns[device], time_ns)
                    begin = free_ns[device] if gap < 0 else starts[device, gap]
                    end_ns = max(begin, schedule.ready_ns[device]) + time_ns
                    if schedule.foresight:
                        end_ns += sending_ns(arrays, schedule, op, device)
                    if end_ns < best_ns:
                        best, best_ns = device, end_ns
        if best < 0:
            best = roomiest(schedule, unit[op])
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
