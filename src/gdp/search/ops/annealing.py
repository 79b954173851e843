"""Simulated annealing over the devices of groups (Kirkpatrick et al. 1983), compiled: the local search's inner loop.

    for each move:
        group = one with an op on the critical path, or any
        put it on another device, or swap it with another group
        threshold = 1 + temperature * a random number, exponentially distributed
        simulate, only until the step time reaches the current one times the threshold
        where memory can be short: find the bytes over the limits, too
        accept what is below the threshold; else move the group back

The threshold of a move is drawn before it is simulated, so that the simulation stops when the move is lost.
N ops, T tensors, G groups, D devices, K tables of op times."""

from typing import Any, NamedTuple

import numpy as np
from numba.np.random.random_methods import buffered_bounded_lemire_uint32

from gdp.compiled import inner, kernel
from gdp.simulator.engine import COMPLETED, NEVER, start_of
from gdp.simulator.memory import find_peaks
from gdp.simulator.problem import Problem
from gdp.simulator.simulate import mean_step_time

_MOST_ARRIVALS = 2**26
CURRENT_NS, BEST_NS, CURRENT_EXCESS, BEST_EXCESS, NUM_SIMULATIONS = range(5)  # entries of `State.figures`


class Objective(NamedTuple):
    """The figures that placements are compared by: mean step time over tables, and bytes over the limits."""

    nominal_ns: Any  # int64 [1, N, D] memory and the critical path are those under these op times
    op_times_ns: Any  # int64 [K, N, D]
    floor_ns: int  # a lower bound of the step time under every table
    limit_bytes: Any  # int64 [D]
    memory_binds: bool  # whether a placement can pass a limit


class MoveConfig(NamedTuple):
    """Tunables of a few moves."""

    num_moves: int
    temperature: float  # relative to the step time
    guided: float  # share of the moves that take a group with an op on the critical path
    to_neighbour: float  # share of the moves to a neighbour's device
    swapped: float  # and of swaps; the rest go anywhere


class State(NamedTuple):
    """The search's state, changed in place."""

    placement: Any  # uint8 or uint16 [N]
    best: Any  # like it
    figures: Any  # int64 [5]
    path: Any  # int64 [N] working memory, as all that follows
    previous: Any  # int32 [N]
    arrival_ns: Any  # int64 [T, D]

    @classmethod
    def empty(cls, problem: Problem) -> "State":
        """Returns a state for `problem`; `placement`, `best` and `figures` are to be filled."""
        num_ops, placement_type = problem.num_ops, problem.simulator.placement_type
        return cls(
            placement=np.zeros(num_ops, placement_type),
            best=np.zeros(num_ops, placement_type),
            figures=np.zeros(5, np.int64),
            path=np.zeros(num_ops, np.int64),
            previous=np.zeros(num_ops, np.int32),
            arrival_ns=np.zeros((problem.graph.num_tensors, problem.num_devices), np.int64),
        )


def is_too_wide(problem: Problem) -> bool:
    """Returns whether tensors times devices, of which a search keeps arrivals, take more than half a GB."""
    return problem.graph.num_tensors * problem.num_devices > _MOST_ARRIVALS


@inner
def _critical_path(arrays, op_time_ns, schedule, state):
    """Fills `state.path` with the ops of a critical path of the completed run in `schedule`, last first; returns their
    number. A step back is what an op waited for: the producer of its last input, or the op before it on its device."""
    placement, _, _, path, previous, arrival_ns = state
    num_devices = arrival_ns.shape[1]
    finish_ns = schedule.finish_ns
    op = 0
    for device in range(num_devices):
        before = np.int32(-1)
        row, begin = min(device, len(schedule.ops) - 1), schedule.begins[device]
        for index in range(begin, begin + schedule.num_ops[device]):
            started = schedule.ops[row, index]
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
        start_ns = start_of(arrays.host_time_ns, op_time_ns, schedule, op, np.uint64(device))
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


@inner
def _draw_below(rng, count):
    """Draws a number from 0 to `count` - 1 as `rng.integers(count)` draws it, which would make an array for it."""
    if count == 1:
        return np.int64(0)
    return np.int64(buffered_bounded_lemire_uint32(rng.bit_generator, np.uint32(count - 1)))


@kernel
def anneal(arrays, objective, dispatch, workspace, grouping, state, rng, config):
    """Makes moves, and leaves the best placement met in `state`. A move puts a group on another device (drawn evenly,
    or a neighbour's), or swaps two groups; a share `guided` of the moves takes a group with an op on the critical path.
    A step time of up to `-temperature * log(u)` (relative, u uniform) above the current one is accepted. While the
    current placement does not fit in memory, the bytes that it is over stand for the step time."""
    nominal_ns, op_times_ns, floor_ns, limit_bytes, memory_binds = objective
    offsets, members, group_of_op, allowed, neighbour_offsets, neighbours = grouping
    placement, best, figures, path, _, _ = state
    schedule, memory = workspace[1], workspace[2]
    num_moves, temperature, guided, to_neighbour, swapped = config
    num_groups = len(offsets) - 1
    num_devices = allowed.shape[1]
    length = 0
    if guided > 0.0:
        mean_step_time(arrays, nominal_ns, placement, dispatch, np.int64(NEVER), floor_ns, workspace)
        length = _critical_path(arrays, nominal_ns[0], schedule, state)
    for _ in range(num_moves):
        if length > 0 and rng.random() < guided:
            group = group_of_op[path[_draw_below(rng, length)]]
        else:
            group = _draw_below(rng, num_groups)
        old = placement[members[offsets[group]]]
        other = -1
        draw = rng.random()
        if draw < to_neighbour and neighbour_offsets[group] < neighbour_offsets[group + 1]:
            first, end = neighbour_offsets[group], neighbour_offsets[group + 1]
            neighbour = neighbours[first + _draw_below(rng, end - first)]
            new = placement[members[offsets[neighbour]]]
        elif draw < 1.0 - swapped:
            new = np.uint16(_draw_below(rng, num_devices))
        else:
            other = _draw_below(rng, num_groups)
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

        figures[NUM_SIMULATIONS] += 1
        threshold = 1.0 - temperature * np.log(1.0 - rng.random())
        is_over = figures[CURRENT_EXCESS] > 0
        stop_ns = NEVER if is_over else np.int64(figures[CURRENT_NS] * threshold) + 1
        status, step_time_ns = mean_step_time(arrays, nominal_ns, placement, dispatch, stop_ns, floor_ns, workspace)
        accepted = status == COMPLETED and step_time_ns < stop_ns
        excess = 0
        if accepted and (is_over or memory_binds):
            find_peaks(arrays, nominal_ns[0], placement, schedule, memory)
            for device in range(len(limit_bytes)):
                excess += max(0, memory.peak_bytes[device] - limit_bytes[device])
            accepted = excess <= figures[CURRENT_EXCESS] * threshold
        if accepted and len(op_times_ns) > 1:  # noise makes steps longer: what is too slow without it is rejected above
            status, step_time_ns = mean_step_time(
                arrays, op_times_ns, placement, dispatch, stop_ns, floor_ns, workspace
            )
            accepted = status == COMPLETED and step_time_ns < stop_ns
        if accepted:
            figures[CURRENT_NS] = step_time_ns
            figures[CURRENT_EXCESS] = excess
            if excess < figures[BEST_EXCESS] or (excess == figures[BEST_EXCESS] and step_time_ns < figures[BEST_NS]):
                figures[BEST_NS] = step_time_ns
                figures[BEST_EXCESS] = excess
                for op in range(len(placement)):
                    best[op] = placement[op]
        else:
            for index in range(offsets[group], offsets[group + 1]):
                placement[members[index]] = old
            if other >= 0:
                for index in range(offsets[other], offsets[other + 1]):
                    placement[members[index]] = new
