"""The machine model as compiled code: one event-driven run over flat arrays. `simulate.py` is its public face.

docs/machine-model.md, sections 3 and 4, is the definition; section numbers below are its. All figures are int64.

What makes it fast, and why that is exact:

- Only events that can matter are ordered. Arrivals at one time commute (they only make ops ready), so a heap keyed by
  time alone serves them; completions at one time do not (each requests transfers), so they run in ascending op number.
- Priorities become ranks once (`simulate.ranks_of`), so "highest priority, ties to the smaller number" is "lowest set
  bit" of a three-level bitmap per device: constant time to add and to take.
- Only devices where something changed are looked at: `candidates` holds those that fell idle or got a ready op.
- Memory is a running sum per device. The peak is sampled when time moves on, so that everything freed at an instant is
  freed before what is allocated then is counted, as section 4 asks.
- Optional parts (memory, recording, replay) are `None` when not wanted: Numba drops their code. Indices are unsigned,
  so that Numba does not test for negative ones; records are unpacked once, as each use of a field costs a reference
  count.
- A run stops as soon as its step time must reach `stop_ns`: an op started at `t` on device `d` ends the step no earlier
  than `t + tail_ns[op]` (its own time and the longest path below it, everywhere at the fastest device) and device `d`
  is busy for at least its unstarted work from `t` on.
"""

from typing import Any, NamedTuple

import numpy as np
from numba import njit, types
from numba.core import cgutils
from numba.extending import intrinsic

from gdp.compiled import INNER

COMPLETED, STOPPED, DEADLOCK, OUT_OF_MEMORY = 0, 1, 2, 3
NEVER = np.iinfo(np.int64).max

_TRANSFER_START, _TRANSFER_END = 0, 1
PINNED = 1 << 30  # a number of uses that is never used up


class Arrays(NamedTuple):
    """What placements have in common. N ops, T tensors (sorted by producer), E consumers, D devices, C channels."""

    num_inputs: Any  # int32 [N]
    sources: Any  # uint32 [num_sources] ops without inputs
    tensor_offsets: Any  # uint32 [N + 1] tensors of op v are tensor_offsets[v]:tensor_offsets[v + 1]
    consumer_offsets: Any  # uint32 [T + 1]
    consumers: Any  # uint32 [E]
    occupancy_ns: Any  # int64 [T, num_rates]
    route_rate: Any  # uint32 [D, D] column of occupancy_ns
    latency_ns: Any  # int64 [D, D]
    route_offsets: Any  # uint32 [D * D + 1]
    route_channels: Any  # uint32 [sum of channels over routes]
    tail_ns: Any  # int64 [N] shortest possible time from an op's start to the step's end
    memory: "MemoryArrays"


class MemoryArrays(NamedTuple):
    """What section 4 needs besides."""

    resident_bytes: Any  # int64 [N]
    alloc_bytes: Any  # int64 [N] allocated on its device when the op starts
    owner: Any  # uint32 [T] the tensor that owns the memory: itself, or the base of a view
    owned_bytes: Any  # int64 [T] given back when the owner is freed; 0 for views and resident tensors
    first_uses: Any  # int32 [T] PINNED where the owner or one of its views is `keep`, else 0
    copy_bytes: Any  # int64 [T] bytes of a copy on another device
    producers: Any  # uint32 [T]
    input_offsets: Any  # uint32 [N + 1]
    inputs: Any  # uint32 [E] the tensors that an op consumes
    input_producers: Any  # uint32 [E] and their producers


class Transfers(NamedTuple):
    """Transfers under way, in queues. R = D * D routes; queue r < R is route r's.

    Transfers of one route start, end and arrive in the order of their requests, so only the first of each route is in
    the heap. A route without channels has no such order: its transfer number i is alone in queue R + i.
    """

    copy: Any  # int64 [E] tensor * D + destination
    start_ns: Any  # int64 [E]
    end_ns: Any  # int64 [E] end of occupancy
    arrival_ns: Any  # int64 [E]
    following: Any  # int32 [E] next transfer of the queue or -1
    last: Any  # int32 [R] last transfer of each route's queue
    num_waiting: Any  # int32 [R] transfers of each route that have not arrived
    heap_ns: Any  # int64 [R + E] arrival of the first transfer of each queue
    heap_item: Any  # int64 [R + E] that transfer


class Scratch(NamedTuple):
    """Working memory of one run at a time; one per thread."""

    missing: Any  # int32 [N] inputs not yet on the op's device
    bits0: Any  # uint64 [D, W0] ready ops by rank
    bits1: Any  # uint64 [D, W1] which words of bits0 are not 0
    bits2: Any  # uint64 [D, W2] which words of bits1 are not 0
    running: Any  # uint32 [D]
    until_ns: Any  # int64 [D] end of the running op, NEVER when idle
    remaining_ns: Any  # int64 [D] work not yet started
    next_in_order: Any  # int64 [D] position in the order that is replayed
    channel_free_ns: Any  # int64 [C]
    transfers: Transfers


class Memory(NamedTuple):
    """Working memory for section 4; passing `limit_bytes` ends a run (NEVER: no limit)."""

    limit_bytes: Any  # int64 [D]
    usage_bytes: Any  # int64 [D]
    peak_bytes: Any  # int64 [D]
    uses: Any  # int32 [T] what still holds an owner on its producer's device
    copy_uses: Any  # int32 [T, D] consumers that still hold a copy; apart from `uses`, since most tensors have none
    num_unstarted: Any  # int32 [R] transfers of each route whose memory is still to be taken
    heap_ns: Any  # int64 [R + 2E] next start of each queue, and ends of the transfers that have started
    heap_item: Any  # int64 [R + 2E] transfer * 2 + which


class Record(NamedTuple):
    """Where a recorded run writes."""

    start_ns: Any  # int64 [N]
    finish_ns: Any  # int64 [N]
    started: Any  # int32 [N] ops in the order of their starts
    transfers: Any  # int64 [E, 5] tensor, destination, start, end of occupancy, arrival
    counts: Any  # int64 [2] ops started, transfers


class Order(NamedTuple):
    """A plan's order to replay; without `ops`, ops start by rank. (One kind of compiled run serves both.)"""

    offsets: Any  # int64 [D + 1]
    ops: Any  # uint32 [N]


@intrinsic
def _trailing_zeros(typing_context, word):  # type: ignore[no-untyped-def]
    def codegen(context, builder, signature, args):  # type: ignore[no-untyped-def]
        return builder.cttz(args[0], cgutils.false_bit)

    return types.uint64(types.uint64), codegen


@njit(cache=True, inline="always")
def _add_ready(bits0, bits1, bits2, device, rank):
    one = np.uint64(1)
    position = np.uint64(rank)
    word0 = position >> np.uint64(6)
    old = bits0[device, word0]
    bits0[device, word0] = old | (one << (position & np.uint64(63)))
    if old == np.uint64(0):
        word1 = word0 >> np.uint64(6)
        bits1[device, word1] |= one << (word0 & np.uint64(63))
        bits2[device, word1 >> np.uint64(6)] |= one << (word1 & np.uint64(63))


@njit(cache=True, inline="always")
def _take_ready(bits0, bits1, bits2, device):
    """The lowest rank that is ready on `device`, taken off its set; NEVER if none."""
    one = np.uint64(1)
    zero = np.uint64(0)
    six = np.uint64(6)
    for top in range(np.uint64(bits2.shape[1])):
        word2 = bits2[device, top]
        if word2 != zero:
            index1 = (top << six) + _trailing_zeros(word2)
            word1 = bits1[device, index1]
            index0 = (index1 << six) + _trailing_zeros(word1)
            word0 = bits0[device, index0]
            rank = (index0 << six) + _trailing_zeros(word0)
            word0 &= word0 - one
            bits0[device, index0] = word0
            if word0 == zero:
                word1 &= word1 - one
                bits1[device, index1] = word1
                if word1 == zero:
                    bits2[device, top] = word2 & (word2 - one)
            return rank
    return np.uint64(NEVER)


@njit(cache=True, inline="always")
def _push(heap_ns, heap_item, size, time_ns, item):
    at = size
    while at > 0:
        parent = (at - 1) >> 1
        if heap_ns[parent] <= time_ns:
            break
        heap_ns[at] = heap_ns[parent]
        heap_item[at] = heap_item[parent]
        at = parent
    heap_ns[at] = time_ns
    heap_item[at] = item
    return size + 1


@njit(cache=True, inline="always")
def _replace_top(heap_ns, heap_item, size, time_ns, item):
    at = 0
    while True:
        child = 2 * at + 1
        if child >= size:
            break
        if child + 1 < size and heap_ns[child + 1] < heap_ns[child]:
            child += 1
        if heap_ns[child] >= time_ns:
            break
        heap_ns[at] = heap_ns[child]
        heap_item[at] = heap_item[child]
        at = child
    heap_ns[at] = time_ns
    heap_item[at] = item


@njit(cache=True, inline="always")
def _apply_transfer_events(
    now, placement, owner, owned_bytes, copy_bytes, producers, uses, usage_bytes,
    copy, start_ns, end_ns, following, num_unstarted, heap_ns, heap_item, size,
):  # fmt: skip
    """Apply every start and end of a transfer at `now`; the new size of the heap."""
    num_devices = len(usage_bytes)
    while size > 0 and heap_ns[0] == now:
        transfer = heap_item[0] >> 1
        tensor = copy[transfer] // num_devices
        if heap_item[0] & 1 == _TRANSFER_START:
            device = copy[transfer] - tensor * num_devices
            usage_bytes[device] += copy_bytes[tensor]
            _replace_top(heap_ns, heap_item, size, end_ns[transfer], transfer * 2 + _TRANSFER_END)
            route = np.int64(placement[producers[tensor]]) * num_devices + device
            num_unstarted[route] -= 1
            after = following[transfer]
            if num_unstarted[route] > 0 and after >= 0:
                size = _push(heap_ns, heap_item, size, start_ns[after], np.int64(after) * 2 + _TRANSFER_START)
        else:
            size -= 1
            _replace_top(heap_ns, heap_item, size, heap_ns[size], heap_item[size])
            base = owner[tensor]
            uses[base] -= 1
            if uses[base] == 0:
                usage_bytes[placement[producers[tensor]]] -= owned_bytes[base]
    return size


@njit(**INNER)
def run(arrays, op_time_ns, placement, rank, op_of_rank, stop_ns, scratch, memory, record, order):
    """(status, step_time_ns) of `placement` uint8 [N]; `memory`, `record`, `order` may each be None.

    `op_time_ns` is int64 [N, D], or [N, 1] where all devices are alike: a large graph's table then stays in the cache.
    Its -1 are never read: placements are checked before.

    The step time is exact when the status is COMPLETED, a lower bound when it is STOPPED or OUT_OF_MEMORY.
    """
    # by position, as attributes of records in records take seconds to compile; `tests/test_engine.py` guards the order
    num_inputs, sources, tensor_offsets, consumer_offsets, consumers, occupancy_ns = arrays[:6]
    route_rate, latency_ns, route_offsets, route_channels, tail_ns, memory_arrays = arrays[6:]
    missing, bits0, bits1, bits2, running, until_ns, remaining_ns, next_in_order = scratch[:8]
    channel_free_ns = scratch[8]
    copy, transfer_start_ns, transfer_end_ns, arrival_ns, following, last, num_waiting, heap_ns, heap_item = scratch[9]
    resident_bytes, alloc_bytes, owner, owned_bytes, first_uses, copy_bytes = memory_arrays[:6]
    producers, input_offsets, inputs, input_producers = memory_arrays[6:]
    num_ops, num_devices = len(op_time_ns), len(latency_ns)
    devices_differ = op_time_ns.shape[1] > 1
    zero, one = np.uint64(0), np.uint64(1)
    heap_size = 0
    memory_size = 0
    num_started = 0
    num_transfers = 0
    latest = 0

    bits0[:] = zero
    bits1[:] = zero
    bits2[:] = zero
    until_ns[:] = NEVER
    remaining_ns[:] = 0
    next_in_order[:] = 0
    channel_free_ns[:] = 0
    num_waiting[:] = 0
    for op in range(num_ops):
        missing[op] = num_inputs[op]
        remaining_ns[placement[op]] += op_time_ns[op, placement[op] if devices_differ else 0]
    replays = False
    if order is not None:
        replays = len(order.ops) > 0
    if not replays:
        for op in sources:
            _add_ready(bits0, bits1, bits2, placement[op], rank[op])
    for device in range(num_devices):
        if remaining_ns[device] >= stop_ns:
            return STOPPED, remaining_ns[device]
    if memory is not None:
        limit_bytes, usage_bytes, peak_bytes, uses, copy_uses, num_unstarted, memory_heap_ns, memory_heap_item = memory
        usage_bytes[:] = 0
        peak_bytes[:] = 0
        num_unstarted[:] = 0
        for op in range(num_ops):
            usage_bytes[placement[op]] += resident_bytes[op]

    now = 0
    grown = ~zero >> np.uint64(64 - num_devices)  # devices whose memory may have grown since it was last sampled
    candidates = grown  # devices that may be able to start an op
    while True:
        # idle devices in ascending order each start one op (section 3, rule 4)
        started_zero = False
        while candidates != zero:
            device = _trailing_zeros(candidates)
            candidates &= candidates - one
            if until_ns[device] != NEVER:
                continue
            if order is not None and replays:
                at = order.offsets[device] + next_in_order[device]
                if at == order.offsets[device + one] or missing[order.ops[at]] != 0:
                    continue
                op = order.ops[at]
                next_in_order[device] += 1
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
            if duration == 0:
                started_zero = True
            if memory is not None:
                usage_bytes[device] += alloc_bytes[op]
                grown |= one << device
            if record is not None:
                record.start_ns[op] = now
                record.finish_ns[op] = now + duration
                record.started[num_started] = op
            num_started += 1

        if not started_zero:
            upcoming = heap_ns[0] if heap_size > 0 else NEVER
            for device in range(num_devices):
                upcoming = min(upcoming, until_ns[device])
            if memory is not None:
                # memory moves at transfers' starts and ends too, which need be no event of rule 4
                while True:
                    while grown != zero:
                        device = _trailing_zeros(grown)
                        grown &= grown - one
                        if usage_bytes[device] > peak_bytes[device]:
                            peak_bytes[device] = usage_bytes[device]
                            if peak_bytes[device] > limit_bytes[device]:
                                return OUT_OF_MEMORY, now
                    if memory_size == 0 or memory_heap_ns[0] > upcoming:
                        break
                    instant = memory_heap_ns[0]
                    memory_size = _apply_transfer_events(
                        instant, placement, owner, owned_bytes, copy_bytes, producers, uses, usage_bytes,
                        copy, transfer_start_ns, transfer_end_ns, following, num_unstarted,
                        memory_heap_ns, memory_heap_item, memory_size,
                    )  # fmt: skip
                    grown = ~zero >> np.uint64(64 - num_devices)
                    if instant == upcoming:
                        break  # the peak at that instant is known when its completions and starts are done
            if upcoming == NEVER:
                break
            now = upcoming
            latest = now

        # completions at `now`, ascending op number, each with its transfer requests
        while True:
            op = np.uint32(num_ops)
            for device in range(num_devices):
                if until_ns[device] == now and running[device] < op:
                    op = running[device]
            if op == num_ops:
                break
            source = placement[op]
            until_ns[source] = NEVER
            candidates |= one << np.uint64(source)
            if memory is not None:
                for index in range(input_offsets[op], input_offsets[op + one]):
                    tensor = inputs[index]
                    if placement[input_producers[index]] == source:
                        tensor = owner[tensor]
                        left = uses[tensor] - 1
                        uses[tensor] = left
                        if left == 0:
                            usage_bytes[source] -= owned_bytes[tensor]
                    else:
                        left = copy_uses[tensor, source] - 1
                        copy_uses[tensor, source] = left
                        if left == 0:
                            usage_bytes[source] -= copy_bytes[tensor]
            first_tensor = tensor_offsets[op]
            end_tensor = tensor_offsets[op + one]
            if memory is not None:
                for tensor in range(first_tensor, end_tensor):
                    uses[tensor] = first_uses[tensor]
            destinations = zero
            for tensor in range(first_tensor, end_tensor):
                num_here = 0
                for index in range(consumer_offsets[tensor], consumer_offsets[tensor + one]):
                    consumer = consumers[index]
                    device = placement[consumer]
                    if device == source:
                        num_here += 1
                        left = missing[consumer] - 1
                        missing[consumer] = left
                        if left == 0 and not replays:
                            _add_ready(bits0, bits1, bits2, device, rank[consumer])
                    else:
                        destinations |= one << np.uint64(device)
                if memory is not None:
                    uses[owner[tensor]] += num_here
            while destinations != zero:
                device = _trailing_zeros(destinations)
                destinations &= destinations - one
                route = np.uint64(source) * np.uint64(num_devices) + device
                for tensor in range(first_tensor, end_tensor):
                    num_there = 0
                    for index in range(consumer_offsets[tensor], consumer_offsets[tensor + one]):
                        if placement[consumers[index]] == device:
                            num_there += 1
                            if memory is None:
                                break
                    if num_there == 0:
                        continue
                    start = now
                    for index in range(route_offsets[route], route_offsets[route + one]):
                        start = max(start, channel_free_ns[route_channels[index]])
                    end = start + occupancy_ns[tensor, route_rate[source, device]]
                    for index in range(route_offsets[route], route_offsets[route + one]):
                        channel_free_ns[route_channels[index]] = end
                    transfer = num_transfers
                    num_transfers += 1
                    copy[transfer] = np.int64(tensor) * num_devices + np.int64(device)
                    transfer_start_ns[transfer] = start
                    transfer_end_ns[transfer] = end
                    arrival_ns[transfer] = end + latency_ns[source, device]
                    following[transfer] = -1
                    is_ordered = route_offsets[route] < route_offsets[route + one]
                    if is_ordered and num_waiting[route] > 0:
                        following[last[route]] = transfer
                    else:
                        heap_size = _push(heap_ns, heap_item, heap_size, arrival_ns[transfer], transfer)
                    if is_ordered:
                        num_waiting[route] += 1
                        last[route] = transfer
                    if memory is not None:
                        copy_uses[tensor, device] = num_there
                        if end > now:
                            uses[owner[tensor]] += 1
                        if start == now:
                            usage_bytes[device] += copy_bytes[tensor]
                            grown |= one << device
                            if end > now:
                                memory_size = _push(
                                    memory_heap_ns, memory_heap_item, memory_size, end, transfer * 2 + _TRANSFER_END
                                )
                        else:
                            num_unstarted[route] += 1
                            if num_unstarted[route] == 1:
                                memory_size = _push(
                                    memory_heap_ns, memory_heap_item, memory_size, start, transfer * 2 + _TRANSFER_START
                                )
            if memory is not None:
                for tensor in range(first_tensor, end_tensor):
                    if uses[tensor] == 0:
                        usage_bytes[source] -= owned_bytes[tensor]  # 0 for views: their uses are their owner's

        # arrivals at `now`
        while heap_size > 0 and heap_ns[0] == now:
            transfer = heap_item[0]
            tensor = np.uint64(copy[transfer] // num_devices)
            device = np.uint64(copy[transfer] % num_devices)
            after = following[transfer]
            if after >= 0:
                _replace_top(heap_ns, heap_item, heap_size, arrival_ns[after], np.int64(after))
            else:
                heap_size -= 1
                _replace_top(heap_ns, heap_item, heap_size, heap_ns[heap_size], heap_item[heap_size])
            route = np.uint64(placement[producers[tensor]]) * np.uint64(num_devices) + device
            if route_offsets[route] < route_offsets[route + one]:
                num_waiting[route] -= 1
            candidates |= one << device
            for index in range(consumer_offsets[tensor], consumer_offsets[tensor + one]):
                consumer = consumers[index]
                if placement[consumer] == device:
                    left = missing[consumer] - 1
                    missing[consumer] = left
                    if left == 0 and not replays:
                        _add_ready(bits0, bits1, bits2, device, rank[consumer])

    if record is not None:
        for transfer in range(num_transfers):
            record.transfers[transfer, 0] = copy[transfer] // num_devices
            record.transfers[transfer, 1] = copy[transfer] % num_devices
            record.transfers[transfer, 2] = transfer_start_ns[transfer]
            record.transfers[transfer, 3] = transfer_end_ns[transfer]
            record.transfers[transfer, 4] = arrival_ns[transfer]
        record.counts[0] = num_started
        record.counts[1] = num_transfers
    if num_started < num_ops:
        return DEADLOCK, latest
    return COMPLETED, latest
