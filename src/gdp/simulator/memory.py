"""Peak memory of a schedule, compiled: docs/machine-model.md, section 4. All figures are int64.

What a device holds is a sum over tensors and copies, each there from one instant to another, so it follows from a
schedule alone. `find_peaks` first finds for each of them what frees it: the op or the transfer that ends last among
those that need it. Then it goes through the time of each device: its ops are in order, and so are the transfers of a
route; a small heap merges them. The peak is sampled when time moves on, so that all that happens at an instant counts
together: frees come before allocations, and what is freed at the moment of its allocation never counts.
"""

import numpy as np

from gdp.compiled import inlined, inner
from gdp.simulator.heaps import pop_top, push, replace_top

NEVER = np.iinfo(np.int64).max


@inner
def find_peaks(arrays, op_time_ns, placement, schedule, memory):
    """Writes the peaks under `placement` [N] to `memory.peak_bytes`. `schedule` is that of a completed run."""
    _find_frees(arrays, placement, schedule, memory)
    memory.peak_bytes[:] = 0
    for op in arrays.memory.residents:
        memory.peak_bytes[placement[op]] += arrays.memory.resident_bytes[op]
    for device in range(len(memory.peak_bytes)):
        _sweep(arrays, op_time_ns, schedule, memory, np.uint64(device))


@inner
def _find_frees(arrays, placement, schedule, memory):
    """Finds the bytes that each op and each transfer frees when it ends."""
    consumer_offsets, consumers = arrays[3], arrays[4]
    _, _, owner, owned_bytes, copy_bytes, producers = arrays[11][:6]
    finish_ns, transfer_tensor, transfer_end_ns, num_transfers = schedule[0], schedule[3], schedule[6], schedule[10]
    freed_ns, freed_by, op_frees_bytes, transfer_frees_bytes, last_there, last_tensor = memory[:6]

    op_frees_bytes[:] = 0
    last_tensor[:] = -1
    for tensor in range(len(owner)):
        freed_by[tensor] = producers[tensor]
        freed_ns[tensor] = finish_ns[producers[tensor]]
    for tensor in range(len(owner)):
        source = np.uint64(placement[producers[tensor]])
        base = owner[tensor]
        last, last_ns = freed_by[base], freed_ns[base]
        is_elsewhere = False
        for index in range(consumer_offsets[tensor], consumer_offsets[tensor + 1]):
            consumer = consumers[index]
            device = np.uint64(placement[consumer])
            if device == source:
                if finish_ns[consumer] >= last_ns:
                    last, last_ns = np.int32(consumer), finish_ns[consumer]
            else:
                if last_tensor[device] != tensor or finish_ns[consumer] > finish_ns[last_there[device]]:
                    last_there[device] = consumer
                last_tensor[device] = tensor
                is_elsewhere = True
        freed_by[base], freed_ns[base] = last, last_ns
        for index in range(consumer_offsets[tensor], consumer_offsets[tensor + 1] if is_elsewhere else 0):
            consumer = consumers[index]
            device = np.uint64(placement[consumer])
            if device != source and last_there[device] == consumer:
                op_frees_bytes[consumer] += copy_bytes[tensor]
    for transfer in range(num_transfers[0]):
        transfer_frees_bytes[transfer] = 0
        base = owner[transfer_tensor[transfer]]
        if transfer_end_ns[transfer] > freed_ns[base]:
            freed_by[base], freed_ns[base] = -1 - transfer, transfer_end_ns[transfer]
    for tensor in range(len(owner)):
        by = freed_by[tensor]
        if by >= 0:
            op_frees_bytes[by] += owned_bytes[tensor]
        else:
            transfer_frees_bytes[-1 - by] += owned_bytes[tensor]


@inlined
def _next_that_frees(transfer, following, transfer_frees_bytes):
    """`transfer`, or the first one after it on its route that frees something; -1 if none does."""
    while transfer >= 0 and transfer_frees_bytes[transfer] == 0:
        transfer = following[transfer]
    return transfer


@inner
def _sweep(arrays, op_time_ns, schedule, memory, device):
    """Goes through the time of `device`. Its entry of `peak_bytes` holds the resident bytes before, the peak after."""
    channel_offsets = arrays[8]
    alloc_bytes, copy_bytes = arrays[11][1], arrays[11][4]
    (
        finish_ns,
        ops,
        num_ops,
        transfer_tensor,
        transfer_route,
        transfer_start_ns,
        transfer_end_ns,
        _,
        first,
        following,
        _,
        begins,
        first_in,
        next_in,
        first_out,
        next_out,
    ) = schedule
    _, _, op_frees_bytes, transfer_frees_bytes, _, _, heap_ns, heap_item, peak_bytes = memory
    num_devices = np.uint64(len(peak_bytes))
    column = device if op_time_ns.shape[1] > 1 else np.uint64(0)
    one = np.uint64(1)
    is_chained = len(first_in) > 0  # on many devices routes in use are chained, else all are looked at
    row, begin = min(device, np.uint64(len(ops)) - one), begins[device]

    size = np.int64(0)
    other = np.uint64(0)
    chained = first_in[device] if is_chained else np.int32(0)
    while (chained >= 0) if is_chained else (other < num_devices):
        transfer = chained if is_chained else first[other * num_devices + device]
        if transfer >= 0:
            size = push(heap_ns, heap_item, size, transfer_start_ns[transfer], np.int64(transfer) * 2)
        chained = next_in[transfer] if is_chained else chained
        other += one
    other = np.uint64(0)
    chained = first_out[device] if is_chained else np.int32(0)
    while (chained >= 0) if is_chained else (other < num_devices):
        route = np.uint64(transfer_route[chained]) if is_chained else device * num_devices + other
        transfer = _next_that_frees(first[route], following, transfer_frees_bytes)
        while transfer >= 0:
            size = push(heap_ns, heap_item, size, transfer_end_ns[transfer], np.int64(transfer) * 2 + 1)
            if channel_offsets[route] < channel_offsets[route + one]:
                break
            transfer = _next_that_frees(following[transfer], following, transfer_frees_bytes)
        chained = next_out[chained] if is_chained else chained
        other += one

    usage_bytes = peak_bytes[device]
    highest_bytes = usage_bytes
    now = 0
    freed_ns, freed_bytes = NEVER, 0  # when the op before ends, and what that frees
    for index in range(num_ops[device] + 1):
        is_op = index < num_ops[device]
        start_ns = NEVER
        if is_op:
            op = ops[row, begin + index]
            start_ns = finish_ns[op] - op_time_ns[op, column]
        while True:
            # transfers' events until the op starts, and the end of the op before where it comes
            event_ns = heap_ns[0] if size > 0 else NEVER
            upcoming = min(event_ns, freed_ns)
            if upcoming > start_ns or upcoming == NEVER:
                break
            if upcoming > now:
                highest_bytes = max(highest_bytes, usage_bytes)
                now = upcoming
            if freed_ns == upcoming:
                usage_bytes -= freed_bytes
                freed_ns = NEVER
                continue
            transfer = np.uint64(heap_item[0] >> 1)
            if heap_item[0] & 1 == 0:
                usage_bytes += copy_bytes[transfer_tensor[transfer]]
                after, after_ns = following[transfer], transfer_start_ns[following[transfer]]
                item = np.int64(after) * 2
            else:
                usage_bytes -= transfer_frees_bytes[transfer]
                after = -1
                route = np.uint64(transfer_route[transfer])
                if channel_offsets[route] < channel_offsets[route + one]:
                    after = _next_that_frees(following[transfer], following, transfer_frees_bytes)
                item = np.int64(after) * 2 + 1
                after_ns = transfer_end_ns[after]
            if after >= 0:
                replace_top(heap_ns, heap_item, size, after_ns, item)
            else:
                size = pop_top(heap_ns, heap_item, size)
        if is_op:
            if start_ns > now:
                highest_bytes = max(highest_bytes, usage_bytes)
                now = start_ns
            usage_bytes += alloc_bytes[op]
            freed_ns, freed_bytes = finish_ns[op], op_frees_bytes[op]
    peak_bytes[device] = max(highest_bytes, usage_bytes)
