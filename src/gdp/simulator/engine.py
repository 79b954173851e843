"""The machine model as compiled code: one event-driven run over flat arrays. `simulate.py` is its public face.

docs/machine-model.md, section 3, is the definition (section 4, memory, is `memory.py`'s). All figures are int64.

    loop:
        each idle device starts its ready op of lowest rank (or the next op of the order to replay)
        go on to the next time at which an op ends or a tensor arrives; none: done
        each op that ends then: count down the missing inputs of its consumers, request transfers to other devices
        each transfer that arrives then: count down the missing inputs of the consumers there
        an op without missing inputs is ready

What makes it fast, and why that is exact:

- Only events that can matter are ordered. Arrivals at one time commute (they only make ops ready), so any heap by time
  serves them; completions at one time do not (each requests transfers): they run in ascending op number.
- Priorities become ranks once (`longest_paths.ranks_of`), so "highest priority, ties to the smaller number" is "lowest
  set bit" of a three-level bitmap per device: constant time to add and to take.
- Only devices where something changed are looked at: `candidates` holds those that fell idle or got a ready op.
- What goes one way or the other as if by chance (is this consumer ready now? was it the last of its word?) is
  computed rather than branched on: a mispredicted branch costs more than the arithmetic.
- Memory is not followed here: it follows from the times, and `memory.py` derives the peaks afterwards, when they are
  wanted. Indices are unsigned, so that Numba does not test for negative ones.
- A run stops as soon as its step time must reach `stop_ns`: an op started at `t` on device `d` ends the step no earlier
  than `t + tail_ns[op]` (its own time and the longest path below it, everywhere at the fastest device) and device `d`
  is busy for at least its unstarted work from `t` on.
"""

import numpy as np

from gdp.compiled import inlined, inner
from gdp.simulator.heaps import pop_top, push, replace_top, trailing_zeros

COMPLETED, STOPPED, DEADLOCK = 0, 1, -1
NEVER = int(np.iinfo(np.int64).max)


@inlined
def _add_ready(bits0, bits1, bits2, device, rank, is_ready):
    """Adds `rank` to the ready set of `device` if `is_ready` is 1, and nothing if it is 0."""
    six, low = np.uint64(6), np.uint64(63)
    word0 = rank >> six
    word1 = word0 >> six
    bits0[device, word0] |= is_ready << (rank & low)
    bits1[device, word1] |= is_ready << (word0 & low)
    bits2[device, word1 >> six] |= is_ready << (word1 & low)


@inlined
def _take_ready(bits0, bits1, bits2, device):
    """Takes the lowest rank off the ready set of `device` and returns it; NEVER if there is none."""
    zero, one, six = np.uint64(0), np.uint64(1), np.uint64(6)
    for top in range(np.uint64(bits2.shape[1])):
        word2 = bits2[device, top]
        if word2 != zero:
            index1 = (top << six) + trailing_zeros(word2)
            word1 = bits1[device, index1]
            index0 = (index1 << six) + trailing_zeros(word1)
            word0 = bits0[device, index0]
            rank = (index0 << six) + trailing_zeros(word0)
            word0 &= word0 - one
            bits0[device, index0] = word0
            word1 &= word1 - np.uint64(word0 == zero)
            bits1[device, index1] = word1
            bits2[device, top] = word2 & (word2 - np.uint64(word1 == zero))
            return rank
    return np.uint64(NEVER)


@inner
def run(arrays, op_time_ns, placement, dispatch, stop_ns, scratch, schedule):
    """Returns (status, step time in ns) of `placement` uint8 [N], and fills `schedule`.

    `op_time_ns` is int64 [N, D], or [N, 1] where all devices are alike: a large graph's table then stays in the cache.
    Its -1 are never read: placements are checked before.

    The step time is exact when the status is COMPLETED, a lower bound when it is STOPPED.
    """
    num_inputs, sources, tensor_offsets, consumer_offsets, consumers, occupancy_ns = arrays[:6]
    route_rate, latency_ns, route_offsets, route_channels, tail_ns = arrays[6:11]
    missing, bits0, bits1, bits2, running, until_ns, remaining_ns, channel_free_ns = scratch[:8]
    last, num_waiting, heap_ns, heap_item = scratch[8:]
    finish_ns, started, num_started, transfer_tensor, transfer_route, transfer_start_ns = schedule[:6]
    transfer_end_ns, arrival_ns, first, following, total = schedule[6:11]
    rank, op_of_rank, order_offsets, order_ops = dispatch
    producers = arrays[11][5]
    num_ops, num_devices = len(op_time_ns), np.uint64(len(latency_ns))
    devices_differ = op_time_ns.shape[1] > 1
    replays = len(order_ops) > 0
    zero, one = np.uint64(0), np.uint64(1)
    heap_size = np.int64(0)
    num_transfers = 0
    latest = 0

    bits0[:] = zero
    bits1[:] = zero
    bits2[:] = zero
    until_ns[:] = NEVER
    remaining_ns[:] = 0
    num_started[:] = 0
    first[:] = -1
    channel_free_ns[:] = 0
    num_waiting[:] = 0
    for op in range(num_ops):
        missing[op] = num_inputs[op]
    if stop_ns < NEVER:
        for op in range(num_ops):
            remaining_ns[placement[op]] += op_time_ns[op, placement[op] if devices_differ else 0]
        for device in range(num_devices):
            if remaining_ns[device] >= stop_ns:
                return STOPPED, remaining_ns[device]
    for op in sources:
        _add_ready(bits0, bits1, bits2, np.uint64(placement[op]), np.uint64(rank[op]), one)

    now = 0
    idle = ~zero >> (np.uint64(64) - num_devices)
    candidates = idle  # devices that may be able to start an op
    while True:
        # idle devices in ascending order each start one op (section 3, rule 4)
        started_zero = False
        candidates &= idle
        while candidates != zero:
            device = trailing_zeros(candidates)
            candidates &= candidates - one
            if replays:
                at = order_offsets[device] + num_started[device]
                if at == order_offsets[device + one] or missing[order_ops[at]] != 0:
                    continue
                op = order_ops[at]
            else:
                ready_rank = _take_ready(bits0, bits1, bits2, device)
                if ready_rank == np.uint64(NEVER):
                    continue
                op = op_of_rank[ready_rank]
            duration = op_time_ns[op, device if devices_differ else zero]
            if now + tail_ns[op] >= stop_ns or now + remaining_ns[device] >= stop_ns:
                return STOPPED, max(now + tail_ns[op], now + remaining_ns[device])
            remaining_ns[device] -= duration
            running[device] = op
            until_ns[device] = now + duration
            idle ^= one << device
            started_zero |= duration == 0
            finish_ns[op] = now + duration
            started[device, num_started[device]] = op
            num_started[device] += 1

        if not started_zero:
            upcoming = heap_ns[0] if heap_size > 0 else NEVER
            for device in range(num_devices):
                upcoming = min(upcoming, until_ns[device])
            if upcoming == NEVER:
                break
            now = upcoming
            latest = now

        # completions at `now`, ascending op number, each with its transfer requests
        ended = zero
        for device in range(num_devices):
            ended |= np.uint64(until_ns[device] == now) << device
        idle |= ended
        candidates |= ended
        while ended != zero:
            source = trailing_zeros(ended)
            others = ended & (ended - one)
            while others != zero:
                device = trailing_zeros(others)
                others &= others - one
                if running[device] < running[source]:
                    source = device
            ended ^= one << source
            until_ns[source] = NEVER
            op = running[source]
            first_tensor = tensor_offsets[op]
            end_tensor = tensor_offsets[op + one]
            destinations = zero
            for index in range(consumer_offsets[first_tensor], consumer_offsets[end_tensor]):
                consumer = consumers[index]
                device = np.uint64(placement[consumer])
                if device == source:
                    left = missing[consumer] - 1
                    missing[consumer] = left
                    _add_ready(bits0, bits1, bits2, source, np.uint64(rank[consumer]), np.uint64(left == 0))
                else:
                    destinations |= one << device
            while destinations != zero:
                device = trailing_zeros(destinations)
                destinations &= destinations - one
                route = source * num_devices + device
                first_channel = route_offsets[route]
                end_channel = route_offsets[route + one]
                for tensor in range(first_tensor, end_tensor):
                    if end_tensor - first_tensor > one:
                        is_wanted = False
                        for index in range(consumer_offsets[tensor], consumer_offsets[tensor + one]):
                            if placement[consumers[index]] == device:
                                is_wanted = True
                                break
                        if not is_wanted:
                            continue
                    start = now
                    for index in range(first_channel, end_channel):
                        start = max(start, channel_free_ns[route_channels[index]])
                    end = start + occupancy_ns[tensor, route_rate[source, device]]
                    for index in range(first_channel, end_channel):
                        channel_free_ns[route_channels[index]] = end
                    arrival = end + latency_ns[source, device]
                    transfer = num_transfers
                    num_transfers += 1
                    transfer_tensor[transfer] = tensor
                    transfer_route[transfer] = route
                    transfer_start_ns[transfer] = start
                    transfer_end_ns[transfer] = end
                    arrival_ns[transfer] = arrival
                    following[transfer] = -1
                    if first[route] < 0:
                        first[route] = transfer
                    else:
                        following[last[route]] = transfer
                    last[route] = transfer
                    if num_waiting[route] == 0:
                        heap_size = push(heap_ns, heap_item, heap_size, arrival, np.int64(transfer))
                    num_waiting[route] += first_channel < end_channel

        # arrivals at `now`
        while heap_size > 0 and heap_ns[0] == now:
            transfer = heap_item[0]
            tensor = transfer_tensor[transfer]
            route = transfer_route[transfer]
            num_waiting[route] -= route_offsets[route] < route_offsets[route + one]
            if num_waiting[route] > 0:
                after = following[transfer]
                replace_top(heap_ns, heap_item, heap_size, arrival_ns[after], np.int64(after))
            else:
                heap_size = pop_top(heap_ns, heap_item, heap_size)
            device = route - placement[producers[tensor]] * num_devices
            became_ready = zero
            for index in range(consumer_offsets[tensor], consumer_offsets[tensor + one]):
                consumer = consumers[index]
                if placement[consumer] == device:
                    left = missing[consumer] - 1
                    missing[consumer] = left
                    is_ready = np.uint64(left == 0)
                    became_ready |= is_ready
                    _add_ready(bits0, bits1, bits2, device, np.uint64(rank[consumer]), is_ready)
            candidates |= became_ready << device

    total[0] = num_transfers
    num_run = 0
    for device in range(num_devices):
        num_run += num_started[device]
    if num_run < num_ops:
        return DEADLOCK, latest
    return COMPLETED, latest
