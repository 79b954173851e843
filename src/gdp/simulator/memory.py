"""Peak memory of a schedule, compiled: docs/machine-model.md, section 4. All figures are int64.

What a device holds is a sum over tensors and copies, each there from one instant to another, so it follows from a
schedule alone. `find_peaks` first finds for each of them what frees it: the op or the transfer that ends last among
those that need it. Then it cuts the step into slices of time and adds up what each device allocates and frees in each:

- What is in use between two slices needs no order of events within them, and the most of that is a lower bound.
- What is in use before a slice and all that is allocated in it are an upper bound within the slice. Only the few slices
  whose upper bound passes the lower bound are gone through event by event.

There the peak is sampled when time moves on, so that all that happens at an instant counts together: frees come before
allocations, and what is freed at the moment of its allocation never counts.

Loops over all tensors, ops or transfers have no branches that depend on the placement: a wrong guess costs as much as a
dozen additions. Loads that a condition selects from are done before it, or else Numba makes it a branch."""

import numpy as np

from gdp.compiled import inlined, inner
from gdp.simulator.engine import start_of
from gdp.simulator.heaps import pop_top, push

NEVER = np.iinfo(np.int64).max


@inner
def find_peaks(arrays, op_time_ns, placement, schedule, memory):
    """Writes the peaks under `placement` [N] to `memory.peak_bytes`. `schedule` is that of a completed run."""
    _find_last_readers(arrays.memory.readers, placement, schedule.finish_ns, memory)
    _find_last_transfers(arrays, schedule, memory)
    memory.peak_bytes[:] = 0
    for op in arrays.memory.residents:
        memory.peak_bytes[placement[op]] += arrays.memory.resident_bytes[op]
    shift = _fill_slices(arrays, op_time_ns, placement, schedule, memory)
    _bound_peaks(memory)
    _collect_events(arrays, placement, schedule, memory, shift)
    for device in range(len(memory.peak_bytes)):
        _sweep(arrays, op_time_ns, schedule, memory, np.uint64(device), shift)


@inner
def _find_last_readers(readers, placement, finish_ns, memory):
    """Finds the bytes that each op frees when it ends, if no transfer ended later."""
    static_bytes, lengths, offsets, producers, owned_bytes, copy_bytes, ops, _, _ = readers
    freed_ns, freed_by, frees_bytes, copied, last_ns = memory[:5]
    for op in range(len(static_bytes)):
        frees_bytes[op] = static_bytes[op]
    begin = np.uint64(0)
    for group in range(len(lengths)):
        length = np.uint64(lengths[group])
        first, group_begin = np.uint64(offsets[group]), begin
        num_copied = np.uint64(0)
        for number in range(first, np.uint64(offsets[group + 1])):
            last = producers[number]
            source, latest = placement[last], finish_ns[last]
            is_copied = False
            for index in range(begin, begin + length):
                op = ops[index]
                end = finish_ns[op]
                is_here = placement[op] == source
                is_later = is_here & (end >= latest)
                last = op if is_later else last
                latest = end if is_later else latest
                is_copied |= not is_here
            freed_ns[number] = latest
            freed_by[number] = last
            frees_bytes[last] += owned_bytes[number]
            copied[num_copied] = number
            num_copied += np.uint64(is_copied)
            begin += length
        for at in range(num_copied):
            number = np.uint64(copied[at])
            source, size = placement[producers[number]], copy_bytes[number]
            list_begin = group_begin + (number - first) * length
            for index in range(list_begin, list_begin + length):
                last_ns[placement[ops[index]]] = -1
            for index in range(list_begin, list_begin + length):
                device = placement[ops[index]]
                last_ns[device] = max(last_ns[device], finish_ns[ops[index]])
            last_ns[source] = -1
            for index in range(list_begin, list_begin + length):
                op = ops[index]
                device = placement[op]
                is_last = finish_ns[op] == last_ns[device]
                frees_bytes[op] += size if is_last else 0
                last_ns[device] = -1 if is_last else last_ns[device]  # of two that end at once, one frees


@inner
def _find_last_transfers(arrays, schedule, memory):
    """Finds the bytes that each transfer frees on its source when it ends, which then no op frees; adds the bytes of a
    copy that has one reader to those that the reader frees."""
    owner, owned_bytes, copy_bytes = arrays[11][2:5]
    transfer_tensor, transfer_end_ns, num_transfers = schedule[3], schedule[6], schedule[8]
    freed_ns, freed_by, frees_bytes = memory[:3]
    list_of, lone_reader = arrays[11][10][7:]
    num_ops = np.uint64(len(arrays[0]))
    no_list = np.uint64(len(freed_ns) - 1)
    for transfer in range(np.uint64(num_transfers[0])):
        tensor = transfer_tensor[transfer]
        frees_bytes[lone_reader[tensor]] += copy_bytes[tensor]
        base = owner[tensor]
        number, size = list_of[base], owned_bytes[base]
        freed_ns[no_list] = -1  # what has no list is sent once at most
        freed_by[no_list] = len(frees_bytes) - 1
        end, before, by = transfer_end_ns[transfer], freed_ns[number], freed_by[number]
        is_later = end > before
        moved = size if is_later else 0
        frees_bytes[by] -= moved
        frees_bytes[num_ops + transfer] = moved
        freed_by[number] = np.uint32(num_ops + transfer) if is_later else by
        freed_ns[number] = max(before, end)


@inner
def _fill_slices(arrays, op_time_ns, placement, schedule, memory):
    """Adds up what is allocated and freed in each slice; returns the logarithm of the length of a slice in ns."""
    alloc_bytes, copy_bytes, producers = arrays[11][1], arrays[11][4], arrays[11][5]
    finish_ns, transfer_tensor, transfer_route, transfer_start_ns = schedule[0], schedule[3], schedule[4], schedule[5]
    transfer_end_ns, num_transfers = schedule[6], schedule[8]
    frees_bytes, allocated_bytes, used_bytes = memory[2], memory[5], memory[6]
    num_ops, num_devices = np.uint64(len(finish_ns)), np.uint64(len(memory[11]))
    num_slices = np.uint64(len(allocated_bytes)) // num_devices
    zero = np.uint64(0)

    allocated_bytes[:] = 0
    used_bytes[:] = 0
    step_time_ns = 0
    for op in range(num_ops):
        step_time_ns = max(step_time_ns, finish_ns[op])
    shift = zero
    while np.uint64(step_time_ns) >> shift >= num_slices:
        shift += np.uint64(1)
    for op in range(num_ops):
        device, finish = np.uint64(placement[op]), finish_ns[op]
        start = start_of(arrays[12], op_time_ns, schedule, op, device)
        allocated_bytes[device * num_slices + (np.uint64(start) >> shift)] += alloc_bytes[op]
        used_bytes[device * num_slices + (np.uint64(finish) >> shift)] += frees_bytes[op]
    for transfer in range(np.uint64(num_transfers[0])):
        tensor = transfer_tensor[transfer]
        source = np.uint64(placement[producers[tensor]])
        device = np.uint64(transfer_route[transfer]) - source * num_devices
        start, end = np.uint64(transfer_start_ns[transfer]), np.uint64(transfer_end_ns[transfer])
        allocated_bytes[device * num_slices + (start >> shift)] += copy_bytes[tensor]
        used_bytes[source * num_slices + (end >> shift)] += frees_bytes[num_ops + transfer]
    return shift


@inner
def _bound_peaks(memory):
    """Raises `peak_bytes`, at first the resident bytes, to the most in use between slices, and `used_bytes` becomes
    what is in use before each slice. Slices with a higher upper bound have no event yet, others -1."""
    allocated_bytes, used_bytes, last_event, peak_bytes = memory[5], memory[6], memory[7], memory[11]
    num_slices = len(allocated_bytes) // len(peak_bytes)
    for device in range(len(peak_bytes)):
        usage_bytes = highest_bytes = peak_bytes[device]
        for number in range(np.uint64(device * num_slices), np.uint64((device + 1) * num_slices)):
            freed_bytes = used_bytes[number]
            used_bytes[number] = usage_bytes
            usage_bytes += allocated_bytes[number] - freed_bytes
            highest_bytes = max(highest_bytes, usage_bytes)
        for number in range(np.uint64(device * num_slices), np.uint64((device + 1) * num_slices)):
            last_event[number] = -np.int32(used_bytes[number] + allocated_bytes[number] <= highest_bytes)
        peak_bytes[device] = highest_bytes


@inner
def _collect_events(arrays, placement, schedule, memory, shift):
    """Chains the starts and ends of transfers in each slice that matters."""
    producers = arrays[11][5]
    transfer_tensor, transfer_route, transfer_start_ns, transfer_end_ns = schedule[3:7]
    last_event, event_before = memory[7], memory[8]
    num_devices = np.uint64(len(memory[11]))
    num_slices = np.uint64(len(last_event)) // num_devices
    for transfer in range(np.uint64(schedule[8][0])):
        source = np.uint64(placement[producers[transfer_tensor[transfer]]])
        device = np.uint64(transfer_route[transfer]) - source * num_devices
        event = np.uint64(2) * transfer
        number = device * num_slices + (np.uint64(transfer_start_ns[transfer]) >> shift)
        if last_event[number] >= 0:
            event_before[event] = last_event[number]
            last_event[number] = event + np.uint64(1)
        event += np.uint64(1)
        number = source * num_slices + (np.uint64(transfer_end_ns[transfer]) >> shift)
        if last_event[number] >= 0:
            event_before[event] = last_event[number]
            last_event[number] = event + np.uint64(1)


@inlined
def _first_op_from(finish_ns, ops, begin, end, time_ns):
    """Returns where, of `ops` from `begin` to `end` in order of time, the first is that ends at `time_ns` or later."""
    while begin < end:
        middle = (begin + end) >> 1
        if finish_ns[ops[middle]] < time_ns:
            begin = middle + 1
        else:
            end = middle
    return begin


@inner
def _sweep(arrays, op_time_ns, schedule, memory, device, shift):
    """Goes through the slices of `device` that matter and raises its peak to the most in use within them."""
    alloc_bytes, copy_bytes = arrays[11][1], arrays[11][4]
    finish_ns, all_ops, num_ops, transfer_tensor, _, transfer_start_ns, transfer_end_ns, _, _, begins, _ = schedule
    _, _, frees_bytes, _, _, allocated_bytes, used_bytes, last_event, event_before = memory[:9]
    heap_ns, heap_item, peak_bytes = memory[9:]
    num_devices = np.uint64(len(peak_bytes))
    num_slices = np.uint64(len(allocated_bytes)) // num_devices
    ops = all_ops[min(device, np.uint64(len(all_ops)) - np.uint64(1))]  # on many devices all are in one row
    end_index = begins[device] + num_ops[device]
    for slice_number in range(num_slices):
        number = device * num_slices + slice_number
        if last_event[number] < 0 or used_bytes[number] + allocated_bytes[number] <= peak_bytes[device]:
            continue
        begin_ns = np.int64(slice_number << shift)
        end_ns = np.int64(slice_number + np.uint64(1) << shift)
        size = np.int64(0)
        event = last_event[number]
        while event > 0:
            transfer = np.uint64(event - 1) >> np.uint64(1)
            time_ns = transfer_start_ns[transfer] if event & 1 else transfer_end_ns[transfer]
            size = push(heap_ns, heap_item, size, time_ns, np.int64(event - 1))
            event = event_before[event - 1]

        index = _first_op_from(finish_ns, ops, begins[device], end_index, begin_ns)
        usage_bytes, highest_bytes = used_bytes[number], peak_bytes[device]
        now = begin_ns
        freed_ns, freed_bytes = NEVER, 0  # when the op before ends, and what that frees
        while True:
            start_ns = NEVER
            if index < end_index:
                op = ops[index]
                start_ns = start_of(arrays[12], op_time_ns, schedule, op, device)
                start_ns = start_ns if start_ns < end_ns else NEVER
            while True:
                # transfers' events until the op starts, and the end of the op before where it comes
                upcoming = min(heap_ns[0] if size > 0 else NEVER, freed_ns)
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
                else:
                    usage_bytes -= frees_bytes[np.uint64(len(finish_ns)) + transfer]
                size = pop_top(heap_ns, heap_item, size)
            if start_ns == NEVER:
                break
            if start_ns > now:
                highest_bytes = max(highest_bytes, usage_bytes)
                now = start_ns
            usage_bytes += alloc_bytes[op] if start_ns >= begin_ns else 0  # else it counts before the slice
            freed_ns = finish_ns[op] if finish_ns[op] < end_ns else NEVER
            freed_bytes = frees_bytes[op]
            index += 1
        peak_bytes[device] = max(highest_bytes, usage_bytes)
