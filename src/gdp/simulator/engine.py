"""The machine model as compiled code: one event-driven run over flat arrays. `simulate.py` is its public face.

docs/machine-model.md, sections 3 and 3a, define it (section 4, memory, is `memory.py`'s). All figures are int64.

    loop:
        each idle device starts its ready op of lowest rank (or the next op of the order to replay)
        go on to the next time at which an op ends, or becomes ready on an idle device; none: done
        each op that ends then:
            count down the missing inputs of its consumers; request transfers to other devices
            an op without missing inputs is ready when the last of them arrives
        if it is one op: its device goes on with its next ops while they end before anything happens elsewhere

What makes it fast, and why that is exact:

- A transfer's arrival is known when it is requested, so an arrival is no event: once the last input of an op is
  requested, the latest of their arrivals tells when the op is ready. Until then the op waits in a queue of its device,
  which a busy device looks at when it next chooses an op. The few ops that are ready before the one that waits last in
  the queue are in a heap.
- Completions at one time run in ascending op number, for each requests transfers. Ops that become ready commute.
- Priorities become ranks once (`longest_paths.ranks_of`), so "highest priority, ties to the smaller number" is "lowest
  set bit" of a three-level bitmap per device, whose first word with a bit is kept: one look to take, one to add.
- Each op waits for the one before it: a run is one long chain of loads, and their latency is most of its time. So the
  loads of an op are few and near to those of the op before. Edges lead from rank to rank, one word has an op's device
  and its missing inputs, op times are gathered by rank before the run, and an op that starts notes where its edges are.
- About two times in three the op that ends next is on the device where one has just ended. So a device goes on alone,
  from op to op, while its ops end before `limit`, when something else happens. The next event need not be looked for
  then, and what is known of the device stays in registers. Its transfers lower the limit where they wake a device.
- Only devices where something changed are looked at: `candidates` holds those that fell idle or got a ready op.
- Loops over devices go over the bits of a word. A loop over an array is vectorized, and a vector that is loaded just
  after one of its entries was stored waits for the store.
- Memory is not followed here: it follows from the times, and `memory.py` derives the peaks afterwards, when they are
  wanted. Indices are unsigned, so that Numba does not test for negative ones.
- A run stops as soon as its step time must reach `stop_ns`: an op started at `t` on device `d` ends the step no earlier
  than `t + tail_ns[op]` (its own time and the longest path below it, everywhere at the fastest device) and device `d`
  is busy for at least its unstarted work from `t` on."""

import numpy as np

from gdp.compiled import inlined, inner
from gdp.simulator.heaps import pop_top, push, trailing_zeros
from gdp.simulator.records import MOST_INPUTS

COMPLETED, STOPPED, DEADLOCK = 0, 1, -1
NEVER = int(np.iinfo(np.int64).max)
_EMPTY = np.uint64(2**64 - 1)  # the lowest word of a set that has no rank
_MISSING = np.uint64(MOST_INPUTS - 1)  # the bits of a word that count an op's missing inputs
_DEVICE_SHIFT = np.uint64(MOST_INPUTS.bit_length() - 1)  # those above are its device


@inlined
def _add_ready(bits0, bits1, bits2, lowest, device, rank):
    """Adds `rank` to the ready set of `device`."""
    one, six, low = np.uint64(1), np.uint64(6), np.uint64(63)
    word0 = rank >> six
    word1 = word0 >> six
    bits0[device, word0] |= one << (rank & low)
    bits1[device, word1] |= one << (word0 & low)
    bits2[device, word1 >> six] |= one << (word1 & low)
    if word0 < lowest[device]:  # a branch: what comes next need not wait for the rank
        lowest[device] = word0


@inlined
def _take_ready(bits0, bits1, bits2, lowest, device):
    """Takes the lowest rank off the ready set of `device`, which is not empty, and returns it."""
    zero, one, six, low = np.uint64(0), np.uint64(1), np.uint64(6), np.uint64(63)
    word0 = lowest[device]
    bits = bits0[device, word0]
    rank = (word0 << six) + trailing_zeros(bits)
    bits &= bits - one
    bits0[device, word0] = bits
    if bits == zero:
        word1 = word0 >> six
        word2 = word1 >> six
        above = bits1[device, word1] & ~(one << (word0 & low))
        bits1[device, word1] = above
        bits2[device, word2] &= ~(np.uint64(above == zero) << (word1 & low))
        lowest[device] = _EMPTY
        for top in range(word2, np.uint64(bits2.shape[1])):
            if bits2[device, top] != zero:
                index1 = (top << six) + trailing_zeros(bits2[device, top])
                lowest[device] = (index1 << six) + trailing_zeros(bits1[device, index1])
                break
    return rank


@inlined
def _queue(following, newest, newest_ns, soonest_ns, device, rank, ready_ns):
    """Adds `rank` to the queue of `device`, unless the newest one there is ready later; returns True if it is added."""
    if ready_ns < newest_ns[device]:
        return False
    newest_ns[device] = ready_ns
    following[newest[device]] = rank
    newest[device] = rank
    soonest_ns[device] = min(soonest_ns[device], ready_ns)
    return True


@inlined
def _choose(scratch, num_started, dispatch, device, now):
    """Returns the rank of the op that `device` starts at `now`, which is taken off its ready set; _EMPTY: none."""
    bits0, bits1, bits2, lowest = scratch.bits0, scratch.bits1, scratch.bits2, scratch.lowest
    ready_ns, following, soonest_ns = scratch.ready_ns, scratch.following, scratch.soonest_ns
    taken, newest, order_ops = scratch.taken, scratch.newest, dispatch.order_ops
    while soonest_ns[device] <= now:
        own = np.uint64(following[taken[device]])
        _add_ready(bits0, bits1, bits2, lowest, device, own)
        taken[device] = own
        soonest_ns[device] = NEVER if own == newest[device] else ready_ns[following[own]]
    if len(order_ops) > 0:
        at = dispatch.order_offsets[device] + num_started[device]
        if at == dispatch.order_offsets[device + np.uint64(1)]:
            return _EMPTY
        own = np.uint64(dispatch.rank[order_ops[at]])
        return own if scratch.waiting[own] & _MISSING == 0 and ready_ns[own] <= now else _EMPTY
    if lowest[device] == _EMPTY:
        return _EMPTY
    return _take_ready(bits0, bits1, bits2, lowest, device)


@inlined
def issue(own, host_ns, device, now, duration):
    """Returns when an op begins to compute that `device` starts at `now`: once its host has issued it."""
    issued = host_ns[device] + (own ^ (own >> 63))  # -1 - own of a negative one, for which the host waits
    begin = max(now, issued)
    host_ns[device] = issued if own >= 0 else begin + duration
    return begin


@inlined
def start_of(host_time_ns, op_time_ns, schedule, op, device):
    """Returns when an op started: its time before it ended, unless it may have waited for its host."""
    if len(host_time_ns) > 0:
        return schedule.start_ns[op]
    return schedule.finish_ns[op] - op_time_ns[op, device if op_time_ns.shape[1] > 1 else np.uint64(0)]


@inlined
def _start(arrays, scratch, schedule, dispatch, stops, device, own, now):
    """Returns when the op of rank `own` ends, which `device` starts, and if `stops` a lower bound of the step time."""
    remaining_ns, num_started = scratch.remaining_ns, schedule.num_ops
    op, duration = dispatch.op_of_rank[own], scratch.duration_ns[own]
    begin, bound = now, 0
    if len(dispatch.host_time_ns) > 0:
        column = device if dispatch.host_time_ns.shape[1] > 1 else np.uint64(0)
        begin = issue(dispatch.host_time_ns[own, column], scratch.host_ns, device, now, duration)
        schedule.start_ns[op] = now
    if stops:
        bound = begin + max(arrays.tail_ns[op], remaining_ns[device])
        remaining_ns[device] -= duration
    schedule.finish_ns[op] = begin + duration
    schedule.ops[device, num_started[device]] = op
    num_started[device] += 1
    return begin + duration, bound


@inlined
def is_sent(arrays, placement, tensor, device):
    """Returns whether a consumer of `tensor` is on `device`."""
    for index in range(arrays.consumer_offsets[tensor], arrays.consumer_offsets[tensor + np.uint64(1)]):
        if placement[arrays.consumers[index]] == device:
            return True
    return False


@inlined
def request_transfer(arrays, schedule, channel_free_ns, transfer, tensor, source, device, now):
    """Writes the times of `transfer` once all channels of its route are free, and returns its arrival."""
    route = source * np.uint64(len(arrays.latency_ns)) + device
    first_channel, end_channel = arrays.route_offsets[route], arrays.route_offsets[route + np.uint64(1)]
    start = now
    for index in range(first_channel, end_channel):
        start = max(start, channel_free_ns[arrays.route_channels[index]])
    end = start + arrays.occupancy_ns[tensor, arrays.route_rate[source, device]]
    for index in range(first_channel, end_channel):
        channel_free_ns[arrays.route_channels[index]] = end
    arrival = end + arrays.latency_ns[source, device]
    schedule.transfer_tensor[transfer] = tensor
    schedule.transfer_route[transfer] = route
    schedule.transfer_start_ns[transfer] = start
    schedule.transfer_end_ns[transfer] = end
    schedule.arrival_ns[transfer] = arrival
    return arrival


@inlined
def end_of_run(schedule, num_transfers, num_ops):
    """Notes the number of transfers and returns the status: COMPLETED if all ops have been started."""
    schedule.num_transfers[0] = num_transfers
    num_run = 0
    for device in range(len(schedule.num_ops)):
        num_run += schedule.num_ops[device]
    return COMPLETED if num_run == num_ops else DEADLOCK


@inner
def run(arrays, op_time_ns, placement, dispatch, stop_ns, scratch, schedule):
    """Returns (status, step time in ns) of `placement` uint8 [N], and fills `schedule`.

    `op_time_ns` is int64 [N, D], or [N, 1] where all devices are alike. Its -1 are never read: placements are checked
    before. The step time is exact when the status is COMPLETED, a lower bound when it is STOPPED."""
    tensor_offsets, consumer_offsets = arrays.tensor_offsets, arrays.consumer_offsets
    waiting, duration_ns, remaining_ns = scratch.waiting, scratch.duration_ns, scratch.remaining_ns
    bits0, bits1, bits2, lowest = scratch.bits0, scratch.bits1, scratch.bits2, scratch.lowest
    running, until_ns, channel_free_ns = scratch.running, scratch.until_ns, scratch.channel_free_ns
    first_edge, end_edge, ready_ns = scratch.first_edge, scratch.end_edge, scratch.ready_ns
    following, taken, newest = scratch.following, scratch.taken, scratch.newest
    newest_ns, soonest_ns = scratch.newest_ns, scratch.soonest_ns
    heap_ns, heap_item, num_started = scratch.heap_ns, scratch.heap_item, schedule.num_ops
    op_of_rank, successor_offsets, successors = dispatch.op_of_rank, dispatch.successor_offsets, dispatch.successors
    num_ops, num_devices = np.uint64(len(op_time_ns)), np.uint64(len(arrays.latency_ns))
    devices_differ = op_time_ns.shape[1] > 1
    zero, one = np.uint64(0), np.uint64(1)
    heap_size = num_transfers = now = latest = np.int64(0)  # no literals, for which helpers would be compiled twice
    stops = stop_ns < NEVER

    bits0[:] = zero
    bits1[:] = zero
    bits2[:] = zero
    lowest[:] = _EMPTY
    until_ns[:] = NEVER
    remaining_ns[:] = 0
    scratch.host_ns[:] = 0
    num_started[:] = 0
    channel_free_ns[:] = 0
    ready_ns[:] = 0
    newest_ns[:] = 0
    soonest_ns[:] = NEVER
    for device in range(num_devices):
        taken[device] = newest[device] = num_ops + device
    for at in range(num_ops):
        op = op_of_rank[at]
        device = np.uint64(placement[op])
        duration_ns[at] = op_time_ns[op, device if devices_differ else zero]
        waiting[at] = np.uint64(arrays.num_inputs[op]) | device << _DEVICE_SHIFT
    if stops:
        for at in range(num_ops):
            remaining_ns[waiting[at] >> _DEVICE_SHIFT] += duration_ns[at]
        for device in range(num_devices):
            if remaining_ns[device] >= stop_ns:
                return STOPPED, remaining_ns[device]
    for op in arrays.sources:
        _add_ready(bits0, bits1, bits2, lowest, np.uint64(placement[op]), np.uint64(dispatch.rank[op]))

    idle = ~zero >> (np.uint64(64) - num_devices)
    awaited = zero  # devices with an entry in `until_ns`
    candidates = idle  # devices that may be able to start an op
    while True:
        # idle devices in ascending order each start one op (section 3, rule 4)
        while candidates != zero:
            device = trailing_zeros(candidates)
            candidates &= candidates - one
            own = _choose(scratch, num_started, dispatch, device, now)
            if own == _EMPTY:
                until_ns[device] = soonest_ns[device]
                awaited &= ~(np.uint64(soonest_ns[device] == NEVER) << device)
                continue
            until, bound = _start(arrays, scratch, schedule, dispatch, stops, device, own, now)
            if bound >= stop_ns:
                return STOPPED, bound
            running[device], until_ns[device] = own, until
            first_edge[device], end_edge[device] = successor_offsets[own], successor_offsets[own + one]
            idle ^= one << device
            awaited |= one << device

        # the next completion, or op that becomes ready on an idle device; after an op of zero time it is at `now` again
        upcoming, limit, soonest_device = NEVER, NEVER, zero  # the limit is when another event comes
        rest = awaited
        while rest != zero:
            device = trailing_zeros(rest)
            rest &= rest - one
            until = until_ns[device]
            limit = min(limit, max(until, upcoming))
            soonest_device = device if until < upcoming else soonest_device
            upcoming = min(upcoming, until)
        candidates = one << soonest_device
        if limit == upcoming:
            candidates = zero
            for device in range(num_devices):
                candidates |= np.uint64(until_ns[device] == upcoming) << device
        soonest = heap_ns[0] if heap_size > 0 else NEVER
        candidates = candidates if upcoming <= soonest else zero
        upcoming = min(upcoming, soonest)
        if upcoming == NEVER:
            break
        now = upcoming
        limit = min(limit, soonest)
        ended = candidates & ~idle
        idle |= ended

        # completions at `now`, ascending op number, each with its transfer requests
        while ended != zero:
            source = trailing_zeros(ended)
            others = ended & (ended - one)
            while others != zero:
                device = trailing_zeros(others)
                others &= others - one
                if op_of_rank[running[device]] < op_of_rank[running[source]]:
                    source = device
            bit = one << source
            ended ^= bit
            until_ns[source] = NEVER
            own = np.uint64(running[source])
            first, last = np.uint64(first_edge[source]), np.uint64(end_edge[source])
            while True:
                last_one = source << _DEVICE_SHIFT | one  # the word of an op on `source` that misses one input
                destinations = zero
                for index in range(first, last):
                    successor = np.uint64(successors[index])
                    left = waiting[successor]
                    device = np.uint64(left >> _DEVICE_SHIFT)
                    waiting[successor] = left - np.uint64(device == source)
                    destinations |= one << device
                    if left == last_one:
                        ready = ready_ns[successor]
                        if ready <= now:
                            _add_ready(bits0, bits1, bits2, lowest, source, successor)
                        elif not _queue(following, newest, newest_ns, soonest_ns, source, successor, ready):
                            heap_size = push(heap_ns, heap_item, heap_size, ready, np.int64(successor))
                            limit = min(limit, ready)
                destinations &= ~bit
                while destinations != zero:
                    op = op_of_rank[own]
                    first_tensor, end_tensor = tensor_offsets[op], tensor_offsets[op + one]
                    device = trailing_zeros(destinations)
                    destinations &= destinations - one
                    last_one = device << _DEVICE_SHIFT | one
                    for tensor in range(first_tensor, end_tensor):
                        if end_tensor - first_tensor > one and not is_sent(arrays, placement, tensor, device):
                            continue
                        arrival = request_transfer(
                            arrays, schedule, channel_free_ns, num_transfers, tensor, source, device, now
                        )
                        num_transfers += 1
                        latest = max(latest, arrival)
                        begin = first + consumer_offsets[tensor] - consumer_offsets[first_tensor]
                        for index in range(begin, begin + consumer_offsets[tensor + one] - consumer_offsets[tensor]):
                            successor = np.uint64(successors[index])
                            left = waiting[successor]
                            is_there = np.uint64(left >> _DEVICE_SHIFT) == device
                            waiting[successor] = left - np.uint64(is_there)
                            ready = max(ready_ns[successor], arrival if is_there else 0)
                            ready_ns[successor] = ready
                            if left == last_one:
                                if not _queue(following, newest, newest_ns, soonest_ns, device, successor, ready):
                                    heap_size = push(heap_ns, heap_item, heap_size, ready, np.int64(successor))
                                    limit = min(limit, ready)
                                elif idle >> device & one != zero:
                                    until_ns[device] = min(until_ns[device], ready)
                                    limit = min(limit, ready)
                                    awaited |= one << device
                                    candidates |= np.uint64(ready == now) << device

                # the device starts its next op here, and ends it here if nothing else comes before
                if now >= limit or candidates != bit:
                    break
                own = _choose(scratch, num_started, dispatch, source, now)
                if own == _EMPTY:
                    break
                until, bound = _start(arrays, scratch, schedule, dispatch, stops, source, own, now)
                if bound >= stop_ns:
                    return STOPPED, bound
                first, last = np.uint64(successor_offsets[own]), np.uint64(successor_offsets[own + one])
                if until >= limit:
                    running[source], until_ns[source] = own, until
                    first_edge[source], end_edge[source] = first, last
                    candidates = zero
                    idle ^= bit
                    break
                now = until

        # ops from the heap that become ready at `now`
        while heap_size > 0 and heap_ns[0] == now:
            successor = np.uint64(heap_item[0])
            heap_size = pop_top(heap_ns, heap_item, heap_size)
            device = np.uint64(waiting[successor] >> _DEVICE_SHIFT)
            _add_ready(bits0, bits1, bits2, lowest, device, successor)
            candidates |= (idle >> device & one) << device

    return end_of_run(schedule, num_transfers, num_ops), max(latest, now)
