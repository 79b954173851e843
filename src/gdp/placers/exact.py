"""Exact placement of small graphs: branch and bound over units, on the machine model itself.

Minimises the step time under the default priority over all placements that obey groups, allowed devices and memory.
Units (groups, and each other op for itself) get their devices one after the other, in the order of their first ops. A
partial placement is bounded as by `lower_bound`, with every placed op on its device only, and given up where a device
holds too much already; a full one is simulated. Of devices whose exchange changes nothing but names one is tried; as
the machine model sends to the lower device first, exchanged placements are simulated too where that order can matter.

Sizes that take seconds: about 20 ops on 4 equal devices, more where the bound is tight."""

import threading
import time
from dataclasses import dataclass
from itertools import permutations, product
from typing import Annotated, Any, NamedTuple

import numpy as np
import numpy.typing as npt

from gdp.arrays import I64, combined, zeros
from gdp.bounds.lower_bound import (
    Edges,
    HeadScratch,
    IntervalScratch,
    best_interval,
    device_weights,
    earliest_starts,
    edges,
    num_leaves,
    sort,
)
from gdp.cluster import Cluster
from gdp.compiled import inner, kernel
from gdp.placers.settings import EXACT
from gdp.simulator.engine import COMPLETED, NEVER, run
from gdp.simulator.memory import find_peaks
from gdp.simulator.problem import Placement, Problem
from gdp.simulator.records import Arrays, Dispatch, Workspace
from gdp.units.symmetry import exchange_classes, exchangeable_before

_MAX_DELAYED = np.int64(EXACT.max_delayed)  # kernels read no records of settings


@dataclass(frozen=True, eq=False)
class Exact:
    """The best placement found; None if there is none that fits, which is certain only when `is_optimal`."""

    placement: Placement | None  # [N]
    step_time_ns: int | None
    is_optimal: bool
    num_nodes: int  # partial placements that were bounded and full ones that were simulated


def exact(
    problem: Problem,
    seed: int = 0,
    *,
    max_nodes: int | None = None,
    time_limit_s: float | None = None,
    start: Placement | None = None,
    stop: threading.Event | None = None,
) -> Exact:
    """The fastest placement of `problem` that fits, or the best found within about `max_nodes` nodes or `time_limit_s`.
    `start` is a placement to begin with; it is ignored if it is not feasible. `stop` ends the search early. `seed` has
    no effect: nothing is random."""
    search = _Search.of(problem)
    if start is not None and not problem.broken_constraints(start):
        _simulate(search, problem.check_placement(start))
    deadline = None if time_limit_s is None else time.monotonic() + time_limit_s
    is_done = False
    while not is_done:
        num_nodes = int(search.best[1])
        if (max_nodes is not None and num_nodes >= max_nodes) or (
            deadline is not None and time.monotonic() >= deadline
        ):
            break
        if stop is not None and stop.is_set():
            break
        is_done = _branch(search, min(EXACT.nodes_per_call, (max_nodes or NEVER) - num_nodes))
    step_time_ns, num_nodes = search.best.tolist()
    if step_time_ns == NEVER:
        return Exact(None, None, is_done, num_nodes)
    return Exact(search.best_placement.astype(np.int64), step_time_ns, is_done, num_nodes)


class _Scratch(NamedTuple):
    """Working memory of a node."""

    heads: Annotated[Any, "int64 [N, D]"]
    tails: Annotated[Any, "int64 [N, D]"]  # of the reversed graph, in which op v is op N - 1 - v
    reversed_times: Annotated[Any, "int64 [N, D]"]
    first_heads: Annotated[Any, "int64 [N]"]  # on the device where it is least
    first_tails: Annotated[Any, "int64 [N]"]
    by_head: Annotated[Any, "int64 [N]"]  # by falling head; the order of the node before is nearly right
    by_tail: Annotated[Any, "int64 [N]"]  # by rising tail
    work: Annotated[Any, "int64 [N]"]
    is_placed: Annotated[Any, "bool [N]"]
    renamed: Annotated[Any, "uint8 [N]"]  # the placement with devices exchanged
    is_used: Annotated[Any, "bool [D]"]
    resident: Annotated[Any, "int64 [D]"]
    at_end: Annotated[Any, "int64 [D]"]
    of_heads: HeadScratch
    of_interval: IntervalScratch


class _Search(NamedTuple):
    """The compiled search's data and state. U units, X exchanges."""

    arrays: Arrays
    dispatch: Dispatch
    workspace: Workspace
    limit_bytes: Any  # int64 [D]
    op_time_ns: Any  # int64 [N, D] -1 where an op is not allowed
    kept_bytes: Any  # int64 [N] results of each op that stay on its device to the end
    forward: Edges
    backward: Edges
    weights: Any  # int64 [D] of `device_weights`
    total_weight: int
    unit_offsets: Any  # int64 [U + 1]
    unit_ops: Any  # int64 [N]
    equal_before: Any  # int64 [D] the device before this one among those it can be exchanged with, or -1
    exchanges: Any  # uint8 [X, D] renamings of devices that leave the problem as it is; the first leaves the names too
    shares_channel: Any  # bool [D, D, D] whether routes from the first device to the other two share a channel
    best: Any  # int64 [2] step time, nodes
    best_placement: Any  # uint8 [N]
    depth: Any  # int64 [1] units placed, -1 at the end
    children: Any  # int64 [U, D] the devices to try for each unit, best first
    child_bounds: Any  # int64 [U, D]
    num_children: Any  # int64 [U] -1: not yet expanded
    next_child: Any  # int64 [U]
    placement: Any  # uint8 [N] of placed units
    times: Any  # int64 [N, D] op_time_ns, but -1 on the other devices for ops of placed units
    scratch: "_Scratch"

    @classmethod
    def of(cls, problem: Problem) -> "_Search":
        num_ops, num_devices = problem.num_ops, problem.num_devices
        memory = problem.simulator.arrays.memory
        freed_bytes = combined(np.add, memory.producers, memory.owned_bytes, num_ops)
        op_time_ns = np.where(problem.allowed, problem.op_time_ns, -1)
        op_time_ns.setflags(write=False)  # as those of a problem, for which `run` is compiled
        forward, backward = edges(problem, np.arange(num_devices), num_devices)
        between = ~np.eye(num_devices, dtype=np.bool_)
        sent_ns = forward.transfer_ns[:, between].sum(axis=0).max(initial=0)
        longest_ns = 1 + int(op_time_ns.max(axis=1).sum()) + int(sent_ns)
        weights = device_weights(op_time_ns, np.ones(num_devices, np.int64), min(2**20, 2**60 // longest_ns))
        index = problem.graph.group_index
        num_units = int(index.max()) + 1
        equal_before, exchanges = _exchanges(problem)
        scratch = zeros(_Scratch, N=num_ops, D=num_devices, M=EXACT.max_taken, S=num_leaves(num_ops))
        scratch.by_head[:] = scratch.by_tail[:] = np.arange(num_ops)
        return cls(
            arrays=problem.simulator.arrays,
            dispatch=problem.simulator.dispatch(problem.order),
            workspace=problem.simulator.new_workspace(),
            limit_bytes=problem.memory_limit_bytes,
            op_time_ns=op_time_ns,
            kept_bytes=memory.alloc_bytes - freed_bytes,
            forward=forward,
            backward=backward,
            weights=weights,
            total_weight=int(weights.sum()),
            unit_offsets=np.concatenate(([0], np.cumsum(np.bincount(index)))),
            unit_ops=np.argsort(index, kind="stable"),
            equal_before=equal_before,
            exchanges=exchanges,
            shares_channel=_shared_channels(problem.cluster),
            best=np.array([NEVER, 0]),
            best_placement=np.zeros(num_ops, np.uint8),
            depth=np.zeros(1, np.int64),
            children=np.zeros((num_units, num_devices), np.int64),
            child_bounds=np.zeros((num_units, num_devices), np.int64),
            num_children=np.full(num_units, -1),
            next_child=np.zeros(num_units, np.int64),
            placement=np.zeros(num_ops, np.uint8),
            times=op_time_ns.copy(),
            scratch=scratch,
        )


def _exchanges(problem: Problem) -> tuple[I64, npt.NDArray[np.uint8]]:
    """(the device before each among those it can be exchanged with [D], all renamings by exchanges [X, D])."""
    classes, renamings = exchange_classes(problem, EXACT.max_exchanges), []
    for orders in product(*(permutations(members) for members in classes)):
        renaming = np.zeros(problem.num_devices, np.uint8)
        for members, order in zip(classes, orders, strict=True):
            renaming[members] = order
        renamings.append(renaming)
    return exchangeable_before(classes), np.array(renamings)


def _shared_channels(cluster: Cluster) -> npt.NDArray[np.bool_]:
    """[D, D, D] whether the routes from the first device to the other two, different ones, share a channel."""
    shares = np.zeros((cluster.num_devices,) * 3, np.bool_)
    for source, row in enumerate(cluster.route_channels):
        for (target, channels), (other, others) in permutations(enumerate(row), 2):
            shares[source, target, other] = bool(set(channels) & set(others))
    return shares


@kernel
def _branch(search, num_nodes):
    """Searches on for about `num_nodes` nodes; returns True when the search is done."""
    depth, best, placement, times = search.depth, search.best, search.placement, search.times
    num_units = len(search.children)
    stop = best[1] + num_nodes
    while best[1] < stop:
        unit = depth[0]
        if unit < 0:
            return True
        if unit == num_units:
            _simulate(search, placement)
            depth[0] -= 1
            continue
        ops = search.unit_ops[search.unit_offsets[unit] : search.unit_offsets[unit + 1]]
        if search.num_children[unit] < 0:
            _expand(search, unit, ops)
        for op in ops:
            for device in range(times.shape[1]):
                times[op, device] = search.op_time_ns[op, device]
        child = search.next_child[unit]
        if child == search.num_children[unit] or search.child_bounds[unit, child] >= best[0]:
            search.num_children[unit] = -1
            depth[0] -= 1
            continue
        _put(search, ops, search.children[unit, child])
        search.next_child[unit] += 1
        depth[0] += 1
    return depth[0] < 0


@inner
def _put(search, ops, device):
    for op in ops:
        search.placement[op] = device
        search.times[op] = -1
        search.times[op, device] = search.op_time_ns[op, device]


@inner
def _expand(search, unit, ops):
    """Bounds and sorts the devices where `unit` can go."""
    num_devices = search.op_time_ns.shape[1]
    is_used = search.scratch.is_used
    is_used[:] = False
    for op in search.unit_ops[: search.unit_offsets[unit]]:
        is_used[search.placement[op]] = True
    with_unit = search.unit_ops[: search.unit_offsets[unit + 1]]
    count = 0
    for device in range(num_devices):
        before = search.equal_before[device]
        if search.op_time_ns[ops[0], device] < 0 or (before >= 0 and not is_used[before]):
            continue
        _put(search, ops, device)
        if not _can_fit(search, with_unit):
            continue
        bound = _bound(search, with_unit)
        search.best[1] += 1
        if bound >= search.best[0]:
            continue
        at = count
        while at > 0 and search.child_bounds[unit, at - 1] > bound:
            search.child_bounds[unit, at] = search.child_bounds[unit, at - 1]
            search.children[unit, at] = search.children[unit, at - 1]
            at -= 1
        search.child_bounds[unit, at], search.children[unit, at] = bound, device
        count += 1
    search.num_children[unit] = count
    search.next_child[unit] = 0


@inner
def _can_fit(search, placed):
    """Returns False if a device holds more than its limit under every completion of the partial placement. It may do so
    at the end, or while an op that takes time runs, which needs its inputs and its results."""
    placement, memory = search.placement, search.arrays.memory
    is_placed, resident, at_end = search.scratch.is_placed, search.scratch.resident, search.scratch.at_end
    is_placed[:] = False
    resident[:] = 0
    at_end[:] = 0
    for op in placed:
        is_placed[op] = True
        resident[placement[op]] += memory.resident_bytes[op]
        at_end[placement[op]] += memory.resident_bytes[op] + search.kept_bytes[op]
    for device in range(len(at_end)):
        if at_end[device] > search.limit_bytes[device]:
            return False
    for op in placed:
        device = placement[op]
        if search.op_time_ns[op, device] == 0:
            continue  # its inputs may be freed as it ends, which is when its results are allocated
        first, end = memory.input_offsets[op], memory.input_offsets[op + 1]
        needed = resident[device] + memory.alloc_bytes[op]
        for index in range(first, end):
            tensor, producer = memory.inputs[index], memory.input_producers[index]
            if not is_placed[producer]:
                continue
            if placement[producer] != device:
                needed += memory.copy_bytes[tensor]
                continue
            is_new = True  # parts of one tensor are one holding
            for earlier in memory.inputs[first:index]:
                is_new &= memory.owner[earlier] != memory.owner[tensor]
            if is_new:
                needed += memory.owned_bytes[memory.owner[tensor]]
        if needed > search.limit_bytes[device]:
            return False
    return True


@inner
def _bound(search, placed):
    """Returns a step time that no completion of the partial placement beats; see `bounds/lower_bound.py`."""
    times, stop_ns, scratch = search.times, search.best[0], search.scratch
    heads, tails, reversed_times, first_heads, first_tails, by_head, by_tail, work = scratch[:8]
    num_ops, num_devices = times.shape
    for op in range(num_ops):
        for device in range(num_devices):
            reversed_times[num_ops - 1 - op, device] = times[op, device]
    earliest_starts(times, search.forward, _MAX_DELAYED, scratch.of_heads, heads)
    earliest_starts(reversed_times, search.backward, _MAX_DELAYED, scratch.of_heads, tails)
    bound = 0
    for op in range(num_ops):
        through, head, tail = NEVER, NEVER, NEVER
        for device in range(num_devices):
            head, tail = min(head, heads[op, device]), min(tail, tails[num_ops - 1 - op, device])
            if times[op, device] >= 0:
                through_ns = heads[op, device] + times[op, device] + tails[num_ops - 1 - op, device]
                through = min(through, through_ns)
        bound = max(bound, through)
        first_heads[op], first_tails[op] = head, tail
    if bound >= stop_ns:
        return bound
    for index in range(num_ops):
        work[index] = -first_heads[by_head[index]]
    sort(work, by_head, num_ops)
    for index in range(num_ops):
        work[index] = first_tails[by_tail[index]]
    sort(work, by_tail, num_ops)
    for device in range(num_devices + 1):
        is_all, scale = device == num_devices, 1
        work[:] = 0
        if is_all:
            scale = search.total_weight
            for op in range(num_ops):
                work[op] = NEVER
                for other in range(num_devices):
                    if times[op, other] >= 0:
                        work[op] = min(work[op], times[op, other] * search.weights[other])
        else:
            for op in placed:
                if search.placement[op] == device:
                    work[op] = times[op, device]
        if scale > 0:
            value = best_interval(work, first_heads, first_tails, by_head, by_tail, scale, scratch.of_interval)[0]
            bound = max(bound, -(-value // scale))
        if bound >= stop_ns:
            return bound
    return bound


@kernel
def _simulate(search, placement):
    """Simulates a full placement and, where the order of destinations can matter, all its exchanges; keeps the best."""
    num_exchanges = len(search.exchanges) if _order_matters(search, placement) else 1
    is_used, renamed = search.scratch.is_used, search.scratch.renamed
    is_used[:] = False
    for device in placement:
        is_used[device] = True
    for exchange in search.exchanges[:num_exchanges]:
        is_new = True
        for device, before in enumerate(search.equal_before):
            if before >= 0 and not is_used[device] and not is_used[before] and exchange[device] < exchange[before]:
                is_new = False  # differs from another exchange on unused devices only
        if not is_new:
            continue
        for op in range(len(placement)):
            renamed[op] = exchange[placement[op]]
        search.best[1] += 1
        status, step_time_ns = run(
            search.arrays,
            search.op_time_ns,
            renamed,
            search.dispatch,
            search.best[0],
            search.workspace.scratch,
            search.workspace.schedule,
        )
        if status != COMPLETED or step_time_ns >= search.best[0]:
            continue
        find_peaks(search.arrays, search.op_time_ns, renamed, search.workspace.schedule, search.workspace.memory)
        fits = True
        for device in range(len(search.limit_bytes)):
            fits &= search.workspace.memory.peak_bytes[device] <= search.limit_bytes[device]
        if fits:
            search.best[0] = step_time_ns
            for op in range(len(placement)):
                search.best_placement[op] = renamed[op]


@inner
def _order_matters(search, placement):
    """Returns True if some op sends to two devices on routes that share a channel: the lower device is served first."""
    num_devices = len(search.equal_before)
    receives = search.scratch.is_used
    arrays = search.arrays
    for op in range(len(placement)):
        receives[:] = False
        first, end = arrays.tensor_offsets[op], arrays.tensor_offsets[op + 1]
        for consumer in arrays.consumers[arrays.consumer_offsets[first] : arrays.consumer_offsets[end]]:
            receives[placement[consumer]] = True
        receives[placement[op]] = False
        for device in range(num_devices):
            for other in range(device):
                if receives[device] and receives[other] and search.shares_channel[placement[op], device, other]:
                    return True
    return False
