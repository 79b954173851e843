"""Simulated annealing over the devices of groups (Kirkpatrick et al. 1983), compiled: the local search's inner loop.

The random threshold of a move is drawn before it is simulated, so that the simulation stops when the move is lost.
N ops, G groups, D devices.
"""

import numpy as np
from numba import njit

from gdp import engine
from gdp.compiled import INNER
from gdp.memory import find_peaks

_TO_NEIGHBOUR, _SWAP = 0.3, 0.2  # shares of the moves to a neighbour's device and of swaps; the rest go anywhere
CURRENT_NS, BEST_NS, CURRENT_EXCESS, BEST_EXCESS, NUM_SIMULATIONS = range(5)  # entries of `state`


@njit(cache=True, nogil=True)
def mean_step_time(
    arrays, op_times_ns, placement, rank, op_of_rank, stop_ns, floor_ns, scratch, schedule, order
):  # fmt: skip
    """Mean step time over the tables `op_times_ns` [K, N, D], rounded down; NEVER once it must reach `stop_ns`.

    `floor_ns` is a lower bound under every table: what the runs still to come take at least. The last run's schedule
    stays in `schedule`.
    """
    num_tables = len(op_times_ns)
    left_ns = stop_ns * num_tables if stop_ns < engine.NEVER // num_tables else engine.NEVER
    total_ns = 0
    for table in range(num_tables):
        stop = left_ns - total_ns - (num_tables - 1 - table) * floor_ns
        status, step_time_ns = engine.run(
            arrays, op_times_ns[table], placement, rank, op_of_rank, stop, scratch, schedule, order
        )
        if status != engine.COMPLETED:
            return engine.NEVER
        total_ns += step_time_ns
    return total_ns // num_tables


@njit(cache=True, nogil=True)
def excess_bytes(arrays, op_time_ns, placement, schedule, memory, limit_bytes):
    """Bytes over the limits [D], summed over devices, of the completed run in `schedule`; 0 when it fits."""
    find_peaks(arrays, op_time_ns, placement, schedule, memory)
    excess = 0
    for device in range(len(limit_bytes)):
        excess += max(0, memory.peak_bytes[device] - limit_bytes[device])
    return excess


@njit(**INNER)
def critical_path(arrays, op_time_ns, placement, schedule, previous, arrival_ns, path):
    """The ops of a critical path of the completed run in `schedule`, last first, in `path` [N]; their number.

    What an op waited for last is one step back: the producer of the input that came last, or the op before it on its
    device. `previous` int32 [N] and `arrival_ns` int64 [T, D] are working memory.
    """
    num_devices = arrival_ns.shape[1]
    finish_ns = schedule.finish_ns
    op = 0
    for device in range(num_devices):
        before = np.int32(-1)
        for index in range(schedule.num_ops[device]):
            started = schedule.ops[device, index]
            previous[started] = before
            before = np.int32(started)
            if finish_ns[started] > finish_ns[op]:
                op = np.int64(started)
    for index in range(schedule.num_transfers[0]):
        device = schedule.transfer_route[index] % num_devices
        arrival_ns[schedule.transfer_tensor[index], device] = schedule.arrival_ns[index]
    length = 0
    while True:
        path[length] = op
        length += 1
        device = placement[op]
        start_ns = finish_ns[op] - op_time_ns[op, device if op_time_ns.shape[1] > 1 else 0]
        cause = np.int64(previous[op])
        if start_ns == 0:
            return length
        if cause < 0 or finish_ns[cause] < start_ns:
            memory = arrays.memory
            for index in range(memory.input_offsets[op], memory.input_offsets[op + 1]):
                producer = memory.input_producers[index]
                if placement[producer] == device:
                    there_ns = finish_ns[producer]
                else:
                    there_ns = arrival_ns[memory.inputs[index], device]
                if there_ns == start_ns:
                    cause = np.int64(producer)
                    break
        if cause < 0:
            return length
        op = cause


@njit(cache=True, nogil=True)
def anneal(
    arrays, nominal_ns, op_times_ns, floor_ns, rank, op_of_rank, scratch, schedule, by_rank, memory,
    limit_bytes, memory_binds,
    offsets, members, allowed, neighbour_offsets, neighbours, group_of_op, previous, arrival_ns, path,
    placement, best, state, rng, num_moves, temperature, guided,
):  # fmt: skip
    """Try `num_moves` moves from `placement` (changed in place); note the best in `best` and the figures in `state`.

    A move puts a group on another device (drawn evenly, or a neighbour's), or swaps two groups; a share `guided` of
    the moves takes a group with an op on the critical path. A step time of up to `-temperature * log(u)` (relative, u
    uniform) above the current one is accepted. While the current placement does not fit in memory, the bytes that it
    is over stand for the step time. Step times are means over `op_times_ns` [K, N, D]; memory and the critical path are
    those under `nominal_ns` [1, N, D].
    """
    num_groups = len(offsets) - 1
    num_devices = allowed.shape[1]
    length = 0
    if guided > 0.0:
        mean_step_time(arrays, nominal_ns, placement, rank, op_of_rank, engine.NEVER, 0, scratch, schedule, by_rank)
        length = critical_path(arrays, nominal_ns[0], placement, schedule, previous, arrival_ns, path)
    for _ in range(num_moves):
        if length > 0 and rng.random() < guided:
            group = group_of_op[path[rng.integers(0, length)]]
        else:
            group = rng.integers(0, num_groups)
        old = placement[members[offsets[group]]]
        other = -1
        draw = rng.random()
        if draw < _TO_NEIGHBOUR and neighbour_offsets[group] < neighbour_offsets[group + 1]:
            neighbour = neighbours[rng.integers(neighbour_offsets[group], neighbour_offsets[group + 1])]
            new = placement[members[offsets[neighbour]]]
        elif draw < 1.0 - _SWAP:
            new = np.uint8(rng.integers(0, num_devices))
        else:
            other = rng.integers(0, num_groups)
            new = placement[members[offsets[other]]]
            if not allowed[other, old]:
                continue
        if new == old or not allowed[group, new]:
            continue
        for index in range(offsets[group], offsets[group + 1]):
            placement[members[index]] = new
        if other >= 0:
            for index in range(offsets[other], offsets[other + 1]):
                placement[members[index]] = old

        state[NUM_SIMULATIONS] += 1
        threshold = 1.0 - temperature * np.log(1.0 - rng.random())
        is_over = state[CURRENT_EXCESS] > 0
        stop_ns = engine.NEVER if is_over else np.int64(state[CURRENT_NS] * threshold) + 1
        step_time_ns = mean_step_time(
            arrays, nominal_ns, placement, rank, op_of_rank, stop_ns, floor_ns, scratch, schedule, by_rank
        )
        accepted = step_time_ns < stop_ns
        if accepted and len(op_times_ns) > 1:  # noise makes steps longer: what is too slow without it is not tried with
            step_time_ns = mean_step_time(
                arrays, op_times_ns, placement, rank, op_of_rank, stop_ns, floor_ns, scratch, schedule, by_rank
            )
            accepted = step_time_ns < stop_ns
        excess = 0
        if accepted and (is_over or memory_binds):
            if len(op_times_ns) > 1:
                mean_step_time(
                    arrays, nominal_ns, placement, rank, op_of_rank, engine.NEVER, 0, scratch, schedule, by_rank
                )
            excess = excess_bytes(arrays, nominal_ns[0], placement, schedule, memory, limit_bytes)
            accepted = excess <= state[CURRENT_EXCESS] * threshold
        if accepted:
            state[CURRENT_NS] = step_time_ns
            state[CURRENT_EXCESS] = excess
            if excess < state[BEST_EXCESS] or (excess == state[BEST_EXCESS] and step_time_ns < state[BEST_NS]):
                state[BEST_NS] = step_time_ns
                state[BEST_EXCESS] = excess
                best[:] = placement
        else:
            for index in range(offsets[group], offsets[group + 1]):
                placement[members[index]] = old
            if other >= 0:
                for index in range(offsets[other], offsets[other + 1]):
                    placement[members[index]] = new
