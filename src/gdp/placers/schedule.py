"""A schedule in the making, for list scheduling: estimates of when ops can start and of what fits, compiled. A tensor
travels once to each device, when its first consumer there is placed; with `contention`, channels are busy meanwhile. A
tensor's memory is given back when its last consumer is placed. A unit's device is that of its first op to be placed. A
*floating* op, a source that takes no time (a parameter, an input), goes where its first consumer goes."""

from typing import Any, NamedTuple

import numpy as np

from gdp.compiled import inner

EVERYWHERE = np.int64(-1)  # in place of a device; not an int, for which Numba would compile functions anew


class PartialSchedule(NamedTuple):
    """A schedule in the making. N ops, T tensors (numbered as in `records.Arrays`), U units, D devices, C channels."""

    op_time_ns: Any  # int64 [N, D]
    unit: Any  # int64 [N]
    allowed: Any  # bool [U, D]
    resident_bytes: Any  # int64 [U]
    limit_bytes: Any  # int64 [D]
    floating: Any  # bool [N]
    unit_device: Any  # int64 [U] -1: not yet placed
    finish_ns: Any  # int64 [N]
    free_ns: Any  # int64 [D]
    channel_free_ns: Any  # int64 [C]
    copy_ns: Any  # int64 [T, D] arrival of a copy, -1: none
    uses: Any  # int64 [T] consumers not yet placed
    owner_uses: Any  # int64 [T] the same of owners and their views together
    used_bytes: Any  # int64 [D]
    ready_ns: Any  # int64 [D] working memory: when an op's inputs can be on each device
    contention: bool  # whether transfers keep channels busy
    foresight: bool  # whether an op ends when its results have reached the consumers whose devices are settled


@inner
def home_of(schedule, unit, device):
    """Returns the device of a unit, or the one it would get if an op on `device` were its first consumer."""
    if schedule.unit_device[unit] >= 0:
        return schedule.unit_device[unit]
    if schedule.allowed[unit, device]:
        return device
    return roomiest(schedule, unit)


@inner
def room_bytes(schedule, device):
    return schedule.limit_bytes[device] - schedule.used_bytes[device]


@inner
def ready_times(arrays, schedule, op, only):
    """Fills `ready_ns` with when all inputs of `op` can be on each device, or on `only` one; returns the last."""
    occupancy_ns, route_rate, latency_ns, route_offsets, route_channels = arrays[5:10]
    input_offsets, inputs, input_producers = arrays[11][6:9]
    _, unit, allowed, _, _, _, unit_device, finish_ns, _, channel_free_ns, copy_ns = schedule[:11]
    ready_ns, contention, _ = schedule[14:]
    num_devices = len(ready_ns)
    first, end = (0, num_devices) if only < 0 else (only, only + 1)
    for device in range(first, end):
        ready_ns[device] = 0
    for index in range(input_offsets[op], input_offsets[op + 1]):
        tensor, producer = inputs[index], input_producers[index]
        done_ns = finish_ns[producer]
        home = unit_device[unit[producer]]
        for device in range(first, end):
            if home == device or (home < 0 and allowed[unit[producer], device]):
                arrival = done_ns
            elif copy_ns[tensor, device] >= 0:
                arrival = copy_ns[tensor, device]
            else:
                source = home if home >= 0 else home_of(schedule, unit[producer], device)
                arrival = done_ns
                if contention:
                    route = source * num_devices + device
                    for place in range(route_offsets[route], route_offsets[route + 1]):
                        arrival = max(arrival, channel_free_ns[route_channels[place]])
                arrival += occupancy_ns[tensor, route_rate[source, device]] + latency_ns[source, device]
            ready_ns[device] = max(ready_ns[device], arrival)
    return ready_ns[end - 1]


@inner
def fits(arrays, schedule, op, device):
    """Returns True if `op`, what it brings with it and copies of its inputs fit on `device`."""
    _, alloc_bytes, _, _, copy_bytes, _, input_offsets, inputs, input_producers = arrays[11][:9]
    _, unit, allowed, resident_bytes, _, _, unit_device, _, _, _, copy_ns = schedule[:11]
    room = room_bytes(schedule, device) - alloc_bytes[op]
    if unit_device[unit[op]] < 0:
        room -= resident_bytes[unit[op]]
    last = np.int64(-1)
    for index in range(input_offsets[op], input_offsets[op + 1]):
        tensor, producer = inputs[index], np.int64(input_producers[index])
        owner = unit[producer]
        if unit_device[owner] < 0 and allowed[owner, device]:
            if producer != last and owner != unit[op]:
                room -= resident_bytes[owner] + alloc_bytes[producer]
            last = producer
        elif unit_device[owner] != device and copy_ns[tensor, device] < 0:
            room -= copy_bytes[tensor]
    return room >= 0


@inner
def settle(schedule, unit, device):
    """Puts a unit that is nowhere yet on `device`."""
    if schedule.unit_device[unit] < 0:
        schedule.unit_device[unit] = device
        schedule.used_bytes[device] += schedule.resident_bytes[unit]


@inner
def place(arrays, schedule, op, device):
    """Puts `op` on `device` and brings its inputs there; returns when they are all there."""
    tensor_offsets, _, _, occupancy_ns, route_rate, latency_ns, route_offsets, route_channels = arrays[2:10]
    memory = arrays[11]
    _, alloc_bytes, owner_of, owned_bytes, copy_bytes, producers, input_offsets, inputs, input_producers = memory[:9]
    _, unit_of_op, _, _, _, _, unit_device, finish_ns, _, channel_free_ns = schedule[:10]
    copy_ns, uses, owner_uses, used_bytes, _, contention, _ = schedule[10:]
    num_devices = len(used_bytes)
    settle(schedule, unit_of_op[op], device)
    latest = 0
    for index in range(input_offsets[op], input_offsets[op + 1]):
        tensor, producer = inputs[index], input_producers[index]
        unit = unit_of_op[producer]
        if unit_device[unit] < 0:
            settle(schedule, unit, home_of(schedule, unit, device))
        source = unit_device[unit]
        if source == device:
            latest = max(latest, finish_ns[producer])
        else:
            if copy_ns[tensor, device] < 0:
                end_ns = finish_ns[producer]
                route = source * num_devices + device
                first, end = route_offsets[route], route_offsets[route + 1]
                if not contention:
                    end = first
                for place in range(first, end):
                    end_ns = max(end_ns, channel_free_ns[route_channels[place]])
                end_ns += occupancy_ns[tensor, route_rate[source, device]]
                for place in range(first, end):
                    channel_free_ns[route_channels[place]] = end_ns
                copy_ns[tensor, device] = end_ns + latency_ns[source, device]
                used_bytes[device] += copy_bytes[tensor]
            latest = max(latest, copy_ns[tensor, device])
    used_bytes[device] += alloc_bytes[op]
    for index in range(input_offsets[op], input_offsets[op + 1]):
        tensor = inputs[index]
        uses[tensor] -= 1
        if uses[tensor] == 0:
            for other in range(num_devices):
                if copy_ns[tensor, other] >= 0:
                    used_bytes[other] -= copy_bytes[tensor]
        owner = owner_of[tensor]
        owner_uses[owner] -= 1
        if owner_uses[owner] == 0:
            home = unit_device[unit_of_op[producers[owner]]]
            used_bytes[home] -= owned_bytes[owner]
    for tensor in range(tensor_offsets[op], tensor_offsets[op + 1]):
        if owner_uses[tensor] == 0:
            used_bytes[device] -= owned_bytes[tensor]
    return latest


@inner
def sending_ns(arrays, schedule, op, device):
    """Returns the time that results of `op` take from `device` to its consumers with a device."""
    tensor_offsets, consumer_offsets, consumers, occupancy_by_rate_ns, route_rate, latency_ns = arrays[2:8]
    unit, unit_device = schedule[1], schedule[6]
    total = 0
    for tensor in range(tensor_offsets[op], tensor_offsets[op + 1]):
        longest = 0
        for index in range(consumer_offsets[tensor], consumer_offsets[tensor + 1]):
            home = unit_device[unit[consumers[index]]]
            if home >= 0 and home != device:
                occupancy_ns = occupancy_by_rate_ns[tensor, route_rate[device, home]]
                longest = max(longest, occupancy_ns + latency_ns[device, home])
        total += longest
    return total


@inner
def may_go(schedule, op, device):
    unit = schedule.unit[op]
    if schedule.unit_device[unit] >= 0:
        return schedule.unit_device[unit] == device
    return schedule.allowed[unit, device]


@inner
def roomiest(schedule, unit):
    """Returns the device with most room, for a unit that is nowhere yet."""
    best = np.int64(-1)
    for device in range(len(schedule.free_ns)):
        if schedule.allowed[unit, device] and (best < 0 or room_bytes(schedule, device) > room_bytes(schedule, best)):
            best = device
    return best


@inner
def settle_rest(schedule):
    """Places floating units that nothing consumes."""
    for op in range(len(schedule.unit)):
        if schedule.unit_device[schedule.unit[op]] < 0:
            settle(schedule, schedule.unit[op], roomiest(schedule, schedule.unit[op]))
