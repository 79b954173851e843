"""The run of the machine model on more than 64 devices, compiled; it equals that of `engine.py` in every figure.

There sets of devices are bits of one integer, and all devices are looked at whenever time moves on. Here

- running ops are in a heap by their ends (ties by op number, the order in which they complete);
- ops whose last input is on its way are in a heap by its arrival;
- ready ops are in a heap of ranks for each device, in one array: a device's part begins where its ops do;
- a list has the devices where something changed, in any order: starting an op touches its own device alone.

No array grows with ops times devices. docs/machine-model.md, sections 3 and 3a, define it; the loop is that of
`engine.py`, which says why each step is exact."""

import numpy as np

from gdp.compiled import inlined, inner
from gdp.simulator.engine import NEVER, STOPPED, end_of_run, is_sent, issue, request_transfer
from gdp.simulator.heaps import pop_top, push, trailing_zeros


@inlined
def _add_ready(ready, begins, num_ready, device, rank):
    """Adds `rank` to the heap of `device`, in which ranks stand for times and for items."""
    own = ready[begins[device] :]
    num_ready[device] = push(own, own, num_ready[device], rank, rank)


@inlined
def _note(changed, is_changed, num_changed, device):
    """Adds `device` to the list of those where something changed, once; returns the length of the list."""
    changed[num_changed] = device
    is_new = is_changed[device] == 0
    is_changed[device] = 1
    return num_changed + is_new


@inner
def run_on_many(arrays, op_time_ns, placement, dispatch, stop_ns, scratch, schedule):
    """Returns (status, step time in ns) of `placement` uint16 [N], and fills `schedule`, as `engine.run` does."""
    tensor_offsets, consumer_offsets, consumers = arrays.tensor_offsets, arrays.consumer_offsets, arrays.consumers
    missing, ready_ns, tail_ns = scratch.missing, scratch.ready_ns, arrays.tail_ns
    ready, num_ready, is_idle, destinations = scratch.ready, scratch.num_ready, scratch.is_idle, scratch.destinations
    changed, is_changed, remaining_ns = scratch.changed, scratch.is_changed, scratch.remaining_ns
    end_ns, end_item, heap_ns, heap_item = scratch.end_ns, scratch.end_item, scratch.heap_ns, scratch.heap_item
    num_started, begins = schedule.num_ops, schedule.begins
    rank, order_offsets, order_ops = dispatch.rank, dispatch.order_offsets, dispatch.order_ops
    num_ops, num_devices = len(op_time_ns), np.uint64(len(arrays.latency_ns))
    devices_differ = op_time_ns.shape[1] > 1
    replays = len(order_ops) > 0
    zero, one, six, low = np.uint64(0), np.uint64(1), np.uint64(6), np.uint64(63)
    heap_size = num_running = num_changed = num_transfers = now = latest = np.int64(0)

    for device in range(num_devices):
        num_started[device] = num_ready[device] = remaining_ns[device] = 0
        is_idle[device] = 1
        is_changed[device] = 0
    scratch.channel_free_ns[:] = 0
    scratch.host_ns[:] = 0
    destinations[:] = zero
    ready_ns[:] = 0
    for op in range(num_ops):
        missing[op] = arrays.num_inputs[op]
        num_ready[placement[op]] += 1
    begin = np.int64(0)
    for device in range(num_devices):
        begins[device] = begin
        begin += num_ready[device]
        num_ready[device] = 0
    if stop_ns < NEVER:
        for op in range(num_ops):
            remaining_ns[placement[op]] += op_time_ns[op, placement[op] if devices_differ else 0]
        for device in range(num_devices):
            if remaining_ns[device] >= stop_ns:
                return STOPPED, remaining_ns[device]
    for op in arrays.sources:
        device = np.uint64(placement[op])
        _add_ready(ready, begins, num_ready, device, rank[op])
        num_changed = _note(changed, is_changed, num_changed, device)

    while True:
        # idle devices each start one op (section 3, rule 4)
        started_zero = False
        for index in range(num_changed):
            device = np.uint64(changed[index])
            is_changed[device] = 0
            if is_idle[device] == 0:
                continue
            if replays:
                at = order_offsets[device] + num_started[device]
                if at == order_offsets[device + one]:
                    continue
                op = order_ops[at]
                if missing[op] != 0 or ready_ns[op] > now:
                    continue
            else:
                if num_ready[device] == 0:
                    continue
                own = ready[begins[device] :]
                op = dispatch.op_of_rank[own[0]]
                num_ready[device] = pop_top(own, own, num_ready[device])
            duration = op_time_ns[op, device if devices_differ else zero]
            begin = now
            if len(arrays.host_time_ns) > 0:
                column = device if arrays.host_time_ns.shape[1] > 1 else zero
                begin = issue(arrays.host_time_ns[op, column], scratch.host_ns, device, now, duration)
                schedule.start_ns[op] = now
            bound = begin + max(tail_ns[op], remaining_ns[device])
            if bound >= stop_ns:
                return STOPPED, bound
            remaining_ns[device] -= duration
            is_idle[device] = 0
            started_zero |= begin + duration == now
            num_running = push(end_ns, end_item, num_running, begin + duration, np.int64(op))
            schedule.finish_ns[op] = begin + duration
            schedule.ops[0, begins[device] + num_started[device]] = op
            num_started[device] += 1
        num_changed = np.int64(0)

        if not started_zero:
            upcoming = heap_ns[0] if heap_size > 0 else NEVER
            upcoming = min(upcoming, end_ns[0] if num_running > 0 else NEVER)
            if upcoming == NEVER:
                break
            now = upcoming

        # completions at `now`, ascending op number, each with its transfer requests
        while num_running > 0 and end_ns[0] == now:
            op = np.uint64(end_item[0])
            num_running = pop_top(end_ns, end_item, num_running)
            source = np.uint64(placement[op])
            is_idle[source] = 1
            num_changed = _note(changed, is_changed, num_changed, source)
            first_tensor = tensor_offsets[op]
            end_tensor = tensor_offsets[op + one]
            sends = False
            for index in range(consumer_offsets[first_tensor], consumer_offsets[end_tensor]):
                consumer = consumers[index]
                device = np.uint64(placement[consumer])
                if device == source:
                    missing[consumer] -= 1
                    if missing[consumer] == 0 and ready_ns[consumer] > now:
                        heap_size = push(heap_ns, heap_item, heap_size, ready_ns[consumer], np.int64(consumer))
                    elif missing[consumer] == 0 and not replays:
                        _add_ready(ready, begins, num_ready, source, rank[consumer])
                else:
                    destinations[device >> six] |= one << (device & low)
                    sends = True
            for word in range(len(destinations) if sends else 0):
                while destinations[word] != zero:
                    device = (np.uint64(word) << six) + trailing_zeros(destinations[word])
                    destinations[word] &= destinations[word] - one
                    for tensor in range(first_tensor, end_tensor):
                        if end_tensor - first_tensor > one and not is_sent(arrays, placement, tensor, device):
                            continue
                        arrival = request_transfer(
                            arrays, schedule, scratch.channel_free_ns, num_transfers, tensor, source, device, now
                        )
                        num_transfers += 1
                        latest = max(latest, arrival)
                        for index in range(consumer_offsets[tensor], consumer_offsets[tensor + one]):
                            consumer = consumers[index]
                            if placement[consumer] == device:
                                missing[consumer] -= 1
                                ready_ns[consumer] = max(ready_ns[consumer], arrival)
                                if missing[consumer] == 0:
                                    arrival_ns = ready_ns[consumer]
                                    heap_size = push(heap_ns, heap_item, heap_size, arrival_ns, np.int64(consumer))

        # ops that become ready at `now`
        while heap_size > 0 and heap_ns[0] == now:
            op = np.uint64(heap_item[0])
            heap_size = pop_top(heap_ns, heap_item, heap_size)
            device = np.uint64(placement[op])
            if not replays:
                _add_ready(ready, begins, num_ready, device, rank[op])
            num_changed = _note(changed, is_changed, num_changed, device)

    return end_of_run(schedule, num_transfers, num_ops), max(latest, now)
