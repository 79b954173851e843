"""A schedule in the making, for list scheduling: estimates of when ops can start and of what fits, compiled.

A tensor travels once to each device, when its first consumer there is placed; with `contention`, channels are busy
meanwhile. A tensor's memory is given back when its last consumer is placed. A unit's device is that of its first op to
be placed. A *floating* op, a source that takes no time (a parameter, an input), goes where its first consumer goes.
"""

from typing import Any, NamedTuple

import numpy as np
from numba import njit

from gdp.compiled import INNER


class Schedule(NamedTuple):
    """A schedule in the making. N ops, T tensors (numbered as in `engine.Arrays`), U units, D devices, C channels."""

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


@njit(**INNER)
def home_of(schedule, unit, device):
    """Where a unit is, or would be if an op on `device` were its first consumer."""
    if schedule.unit_device[unit] >= 0:
        return schedule.unit_device[unit]
    if schedule.allowed[unit, device]:
        return device
    best = -1
    for other in range(len(schedule.free_ns)):
        if schedule.allowed[unit, other] and (best < 0 or room_bytes(schedule, other) > room_bytes(schedule, best)):
            best = other
    return best


@njit(**INNER)
def room_bytes(schedule, device):
    return schedule.limit_bytes[device] - schedule.used_bytes[device]


@njit(**INNER)
def ready_times(arrays, schedule, op, only, contention, ready_ns):
    """When all inputs of `op` can be on each device, into `ready_ns` [D]; or on one only; the time of that or of the
    last."""
    occupancy_ns, route_rate, latency_ns = arrays.occupancy_ns, arrays.route_rate, arrays.latency_ns
    route_offsets, route_channels = arrays.route_offsets, arrays.route_channels
    input_offsets, inputs, input_producers = (
        arrays.memory.input_offsets,
        arrays.memory.inputs,
        arrays.memory.input_producers,
    )
    unit, allowed, unit_device, finish_ns = schedule.unit, schedule.allowed, schedule.unit_device, schedule.finish_ns
    channel_free_ns, copy_ns = schedule.channel_free_ns, schedule.copy_ns
    num_devices = len(ready_ns)
    first, end = (0, num_devices) if only < 0 else (only, only + 1)
    ready_ns[first:end] = 0
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


@njit(**INNER)
def fits(arrays, schedule, op, device):
    """Whether `op`, what it brings with it and copies of its inputs fit on `device`."""
    memory = arrays.memory
    alloc_bytes, input_offsets, inputs, input_producers = (
        memory.alloc_bytes, memory.input_offsets, memory.inputs, memory.input_producers,
    )  # fmt: skip
    unit, unit_device, resident_bytes = schedule.unit, schedule.unit_device, schedule.resident_bytes
    room = room_bytes(schedule, device) - alloc_bytes[op]
    if unit_device[unit[op]] < 0:
        room -= resident_bytes[unit[op]]
    last = np.int64(-1)
    for index in range(input_offsets[op], input_offsets[op + 1]):
        tensor, producer = inputs[index], np.int64(input_producers[index])
        owner = unit[producer]
        if unit_device[owner] < 0 and schedule.allowed[owner, device]:
            if producer != last and owner != unit[op]:
                room -= resident_bytes[owner] + alloc_bytes[producer]
            last = producer
        elif unit_device[owner] != device and schedule.copy_ns[tensor, device] < 0:
            room -= memory.copy_bytes[tensor]
    return room >= 0


@njit(**INNER)
def settle(schedule, unit, device):
    """Put a unit that is nowhere yet on `device`."""
    if schedule.unit_device[unit] < 0:
        schedule.unit_device[unit] = device
        schedule.used_bytes[device] += schedule.resident_bytes[unit]


@njit(**INNER)
def place(arrays, schedule, op, device, contention):
    """Put `op` on `device` and bring its inputs there; when they are all there."""
    memory = arrays.memory
    num_devices = len(schedule.free_ns)
    settle(schedule, schedule.unit[op], device)
    latest = 0
    for index in range(memory.input_offsets[op], memory.input_offsets[op + 1]):
        tensor, producer = memory.inputs[index], memory.input_producers[index]
        unit = schedule.unit[producer]
        if schedule.unit_device[unit] < 0:
            settle(schedule, unit, home_of(schedule, unit, device))
        source = schedule.unit_device[unit]
        if source == device:
            latest = max(latest, schedule.finish_ns[producer])
        else:
            if schedule.copy_ns[tensor, device] < 0:
                end_ns = schedule.finish_ns[producer]
                route = source * num_devices + device
                first, end = (arrays.route_offsets[route], arrays.route_offsets[route + 1]) if contention else (0, 0)
                for place in range(first, end):
                    end_ns = max(end_ns, schedule.channel_free_ns[arrays.route_channels[place]])
                end_ns += arrays.occupancy_ns[tensor, arrays.route_rate[source, device]]
                for place in range(first, end):
                    schedule.channel_free_ns[arrays.route_channels[place]] = end_ns
                schedule.copy_ns[tensor, device] = end_ns + arrays.latency_ns[source, device]
                schedule.used_bytes[device] += memory.copy_bytes[tensor]
            latest = max(latest, schedule.copy_ns[tensor, device])
    schedule.used_bytes[device] += memory.alloc_bytes[op]
    for index in range(memory.input_offsets[op], memory.input_offsets[op + 1]):
        tensor = memory.inputs[index]
        schedule.uses[tensor] -= 1
        if schedule.uses[tensor] == 0:
            for other in range(num_devices):
                if schedule.copy_ns[tensor, other] >= 0:
                    schedule.used_bytes[other] -= memory.copy_bytes[tensor]
        owner = memory.owner[tensor]
        schedule.owner_uses[owner] -= 1
        if schedule.owner_uses[owner] == 0:
            home = schedule.unit_device[schedule.unit[memory.producers[owner]]]
            schedule.used_bytes[home] -= memory.owned_bytes[owner]
    for tensor in range(arrays.tensor_offsets[op], arrays.tensor_offsets[op + 1]):
        if schedule.owner_uses[tensor] == 0:
            schedule.used_bytes[device] -= memory.owned_bytes[tensor]
    return latest


@njit(**INNER)
def sending_ns(arrays, schedule, op, device):
    """How long the results of `op` take from `device` to those consumers that already have a device."""
    total = 0
    for tensor in range(arrays.tensor_offsets[op], arrays.tensor_offsets[op + 1]):
        longest = 0
        for index in range(arrays.consumer_offsets[tensor], arrays.consumer_offsets[tensor + 1]):
            home = schedule.unit_device[schedule.unit[arrays.consumers[index]]]
            if home >= 0 and home != device:
                occupancy_ns = arrays.occupancy_ns[tensor, arrays.route_rate[device, home]]
                longest = max(longest, occupancy_ns + arrays.latency_ns[device, home])
        total += longest
    return total


@njit(**INNER)
def may_go(schedule, op, device):
    unit = schedule.unit[op]
    if schedule.unit_device[unit] >= 0:
        return schedule.unit_device[unit] == device
    return schedule.allowed[unit, device]


@njit(**INNER)
def roomiest(schedule, op):
    """Where an op goes that fits nowhere."""
    best = -1
    for device in range(len(schedule.free_ns)):
        if may_go(schedule, op, device) and (best < 0 or room_bytes(schedule, device) > room_bytes(schedule, best)):
            best = device
    return best


@njit(**INNER)
def settle_rest(schedule):
    """Floating units that nothing consumes."""
    for op in range(len(schedule.unit)):
        if schedule.unit_device[schedule.unit[op]] < 0:
            settle(schedule, schedule.unit[op], roomiest(schedule, op))
