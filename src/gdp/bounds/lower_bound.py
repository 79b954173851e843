"""Lower bounds on the step time: what no placement with a step time can beat, whatever its order, memory or groups.

docs/machine-model.md, section 5, says what valid means. N ops, E pairs of an op and one that consumes from it, D
devices, C classes of devices that take equal times for every op.

**Heads and tails.** An op v has a head on each class of devices, before which it cannot start there, and a tail, which
the step takes at least after its end. Heads know of transfers. Let v run on device d, and take ops before v one by one,
u1, u2, ... Either all run on d, one after the other, or there is a first one that does not, whose tensors are sent:

    head(v, d) >= min over k of max(end of u1 .. uk, all on d; arrival from u[k+1], not on d, + path from there to v)

This is the cluster bound of C. H. Papadimitriou, M. Yannakakis, "Towards an architecture-independent analysis of
parallel algorithms", SIAM Journal on Computing 19(2), 1990, and H. Jung, L. Kirousis, P. Spirakis, "Lower bounds and
efficient algorithms for multiprocessor scheduling of directed acyclic graphs with communication delays", Information
and Computation 105(1), 1993; here no op runs twice, devices are unequal and each tensor has its own transfer time. The
op taken next is the one whose absence delays v most. Tails are heads of the reversed graph. The step takes at least
head + time + tail of any op on the class where that is least.

**Intervals.** For any a and b, the ops with head >= a and tail >= b run between a and T - b, T being the step time:

    T >= a + b + work of the ops with head >= a and tail >= b, shared out as well as it can be over the devices

(E. B. Fernandez, B. Bussell, "Bounds on the number of processors and time for multiprocessor optimal schedules", IEEE
Transactions on Computers C-22(8), 1973). On unequal devices, work is bounded by linear-programming duality: for any
weights y >= 0 of the devices that sum to 1, the sum over ops of min over devices of y[d] * time[v, d] is at most the
load of the most loaded device. Weights are found in floating point and rounded to integers: the bound itself is exact.
"""

from dataclasses import dataclass
from typing import Annotated, NamedTuple
from weakref import WeakKeyDictionary

import numpy as np

from gdp.arrays import F64, I64, Bool, narrow, zeros
from gdp.cluster import Cluster
from gdp.compiled import inlined, inner, kernel
from gdp.costs.op_times import transfer_occupancy_ns
from gdp.simulator.problem import Problem

_NEVER = 2**61  # an op that cannot run there, a transfer without a route; sums of two such times still fit in int64


@dataclass(frozen=True, slots=True, kw_only=True)
class BoundSettings:
    """The effort that a bound is worth."""

    max_taken: int = 64  # ops taken before each op; measured: 256 raise no bound of a workload by more than 0.1 %
    taken_budget: int = 2**21  # ops taken in all; measured: 46k ops on 8 unequal devices take 0.7 s
    delayed_budget: int = 2**16  # calls of `_delayed` in all; untuned
    weight_scale: int = 2**20  # sum of integer weights unless times are long: rounding costs under 1e-5 of the bound
    weight_rounds: int = 60  # cutting planes; measured: 200 add 0.006 % for 20k ops with random times on 8 devices
    interval_rounds: int = 3  # alternations between the best interval and the best weights for its ops; untuned


SETTINGS = BoundSettings()


class Edges(NamedTuple):
    """The predecessors of each op v are predecessors[offsets[v]:offsets[v + 1]]."""

    offsets: I64  # [N + 1]
    predecessors: I64  # [E]
    transfer_ns: I64  # [E, C, C] from the predecessor's end on one class until all that v consumes is on another device


class HeadScratch(NamedTuple):
    """Working memory of `earliest_starts`. M ops are taken before each op at most."""

    listed: Annotated[I64, "int64 [N]"]  # turn (of an op and a class) in which an op was last a candidate
    gone: Annotated[I64, "int64 [N]"]  # turn in which it was last taken
    reach: Annotated[I64, "int64 [N]"]  # earliest start of v if the candidate runs on another device than v
    below: Annotated[I64, "int64 [N]"]  # path on v's device from the candidate's successors to v
    candidates: Annotated[I64, "int64 [N]"]
    taken: Annotated[I64, "int64 [M]"]  # in the order of taking
    by_head: Annotated[I64, "int64 [M]"]  # by falling head
    values: Annotated[I64, "int64 [M + 1]"]  # earliest start of v if taken[k] is the first to run elsewhere
    is_exact: Annotated[Bool, "bool [M + 1]"]
    ops: Annotated[I64, "int64 [M]"]  # ops taken before one of them, sorted
    starts: Annotated[I64, "int64 [M]"]  # and when they can start


class IntervalScratch(NamedTuple):
    """Working memory of `best_interval`: a tree over S >= N leaves."""

    highest: Annotated[I64, "int64 [S + S]"]  # of the leaves below a node, without what is added to nodes above it
    added: Annotated[I64, "int64 [S + S]"]
    place: Annotated[I64, "int64 [N]"]  # the leaf of each op


def num_leaves(num_ops: int) -> int:
    """Returns the S of `IntervalScratch`: a power of two."""
    return 1 << (num_ops - 1).bit_length()


_known_ns: "WeakKeyDictionary[Problem, int]" = WeakKeyDictionary()  # a layout's problem is asked about several times


def lower_bound(problem: Problem) -> int:
    """A step time in ns that no placement beats, in any order of its ops and whether or not it fits in memory."""
    if problem not in _known_ns:
        _known_ns[problem] = _lower_bound(problem)
    return _known_ns[problem]


def quick_bound(problem: Problem) -> int:
    """A lower bound that takes milliseconds: `lower_bound` where that was found before, else the longest path without
    transfers and the work shared out evenly."""
    if problem in _known_ns:
        return _known_ns[problem]
    times = problem.simulator.time_table_ns
    least_ns = np.where(times >= 0, times, _NEVER).min(axis=1)
    work_ns = -(-int(least_ns.sum()) // problem.num_devices)
    return max(int(problem.simulator.arrays.tail_ns.max()), work_ns, _host_bound(problem))


def _lower_bound(problem: Problem) -> int:
    times, device_class, multiplicity = _classes(problem.op_time_ns)
    heads, tails = _heads_and_tails(problem, times, device_class, len(multiplicity))
    through_ns = np.where(times >= 0, heads + np.maximum(times, 0) + tails, np.iinfo(np.int64).max).min(axis=1)
    interval_ns = _interval_bound(times, multiplicity, heads.min(axis=1), tails.min(axis=1))
    return max(int(through_ns.max()), interval_ns, _host_bound(problem))


def _host_bound(problem: Problem) -> int:
    """Returns the work of hosts shared out evenly: an op ends after its host has issued all before it on its device."""
    runs, host_ns = narrow(problem.op_time_ns) >= 0, narrow(problem.host_time_ns)
    return -(-int(np.where(runs, host_ns, _NEVER).min(axis=1).sum()) // problem.num_devices)


def _classes(op_time_ns: I64) -> tuple[I64, I64, I64]:
    """(times [N, C] of each class, class of each device [D], number of its devices [C])."""
    if narrow(op_time_ns).shape[1] < op_time_ns.shape[1]:
        device_class = np.zeros(op_time_ns.shape[1], np.int64)
        return np.array(narrow(op_time_ns)), device_class, np.bincount(device_class)
    columns = [column.tobytes() for column in op_time_ns.T]
    first = sorted(columns.index(column) for column in set(columns))
    device_class = np.array([first.index(columns.index(column)) for column in columns])
    return np.ascontiguousarray(op_time_ns[:, first]), device_class, np.bincount(device_class)


def _heads_and_tails(problem: Problem, times: I64, device_class: I64, num_classes: int) -> tuple[I64, I64]:
    """([N, C] heads, [N, C] tails) of each op on each class; _NEVER where it cannot run."""
    max_taken = min(SETTINGS.max_taken, 1 + SETTINGS.taken_budget // times.size)
    max_delayed = 1 + SETTINGS.delayed_budget // times.size
    forward, backward = edges(problem, device_class, num_classes)
    heads, tails = np.empty_like(times), np.empty_like(times)
    scratch = zeros(HeadScratch, N=len(times), M=max_taken)
    earliest_starts(times, forward, max_delayed, scratch, heads)
    earliest_starts(times[::-1].copy(), backward, max_delayed, scratch, tails)
    return heads, tails[::-1]


def edges(problem: Problem, device_class: I64, num_classes: int) -> tuple[Edges, Edges]:
    """The edges of the graph, and those of the reversed graph, where op v is op N - 1 - v."""
    num_ops = problem.num_ops
    sources, targets, transfer = _transfers(problem, device_class, num_classes)
    by_target, by_source = np.argsort(targets, kind="stable"), np.argsort(-sources, kind="stable")
    last = num_ops - 1
    return (
        Edges(_offsets(targets, num_ops), sources[by_target], transfer[by_target]),
        Edges(
            _offsets(last - sources, num_ops),
            last - targets[by_source],
            np.ascontiguousarray(transfer[by_source].transpose(0, 2, 1)),
        ),
    )


def _offsets(ops: I64, num_ops: int) -> I64:
    return np.concatenate(([0], np.cumsum(np.bincount(ops, minlength=num_ops))))


def _transfers(problem: Problem, device_class: I64, num_classes: int) -> tuple[I64, I64, I64]:
    """(source op [E], target op [E], ns [E, C, C] from the source's end until all that the target consumes is there).
    Times are those of the fastest route from a device of one class to another device of the other. Tensors on one route
    follow each other if the route has a channel."""
    graph, cluster = problem.graph, problem.cluster
    pairs, edge = np.unique(graph.producers[graph.edge_tensors] * graph.num_ops + graph.consumers, return_inverse=True)
    transfer = np.full((len(pairs), num_classes, num_classes), _NEVER)
    columns: dict[tuple[int, bool], I64] = {}  # by rate and whether tensors follow each other
    for rate, is_queue, latency_ns, source_class, target_class in _distinct_routes(cluster, device_class):
        if (rate, is_queue) not in columns:
            occupancy = np.zeros(len(pairs), np.int64)
            merge = np.add if is_queue else np.maximum
            merge.at(occupancy, edge, transfer_occupancy_ns(graph.tensor_bytes, rate)[graph.edge_tensors])
            columns[rate, is_queue] = occupancy
        between = transfer[:, source_class, target_class]
        np.minimum(between, columns[rate, is_queue] + latency_ns, out=between)
    return pairs // graph.num_ops, pairs % graph.num_ops, transfer


def _distinct_routes(cluster: Cluster, device_class: I64) -> list[tuple[int, bool, int, int, int]]:
    """Returns each (rate, whether it has a channel, latency, class of its start and of its end) of routes, sorted."""
    sources, targets = np.nonzero(~np.eye(cluster.num_devices, dtype=np.bool_))
    figures = (
        cluster.bytes_per_second[sources, targets],
        cluster.num_channels[sources, targets] > 0,
        cluster.latency_ns[sources, targets],
        device_class[sources],
        device_class[targets],
    )
    code = np.zeros(len(sources), np.int64)  # of each route: equal for those that are alike
    for figure in figures:
        values, number = np.unique(figure, return_inverse=True)
        code = np.unique(code * max(len(values), 1) + number, return_inverse=True)[1]
    first = np.unique(code, return_index=True)[1]
    return sorted(zip(*(figure[first].tolist() for figure in figures), strict=True))


@kernel
def earliest_starts(times, edges, max_delayed, scratch, heads):
    """Fills `heads` [N, C].

    for each op v and each class of devices on which it can run:
        candidates = predecessors of v
        loop:
            take the candidate that delays v most if it runs elsewhere; v starts no earlier than the earlier of
                - that candidate's results from elsewhere, after what was taken before has run here (`_delayed`)
                - everything taken so far, one after the other on v's device
            its predecessors are candidates too
            end when what was taken takes longer than the best start known"""
    num_ops, num_classes = times.shape
    offsets, predecessors, transfer = edges
    listed, gone, reach, below = scratch.listed, scratch.gone, scratch.reach, scratch.below
    candidates, taken, values, is_exact = scratch.candidates, scratch.taken, scratch.values, scratch.is_exact
    max_taken = len(taken)
    for op in range(num_ops):
        listed[op] = gone[op] = 0
        for here in range(num_classes):
            heads[op, here] = _NEVER
    turn = 0
    for v in range(num_ops):
        for here in range(num_classes):
            if times[v, here] < 0:
                continue
            turn += 1
            num_candidates = num_taken = path = serial = np.int64(0)  # no literals: helpers are compiled once
            num_left, head = max_delayed, np.int64(_NEVER)
            op, path_below = v, 0
            while True:
                for edge in range(offsets[op], offsets[op + 1]):
                    before = predecessors[edge]
                    if gone[before] == turn:
                        continue
                    arrival = _arrival(heads, times, transfer, edge, before, here)
                    if op == v and times[before, here] >= 0:
                        path = max(path, min(heads[before, here] + times[before, here], arrival))
                    elif op == v:
                        path = max(path, arrival)
                    if listed[before] != turn:
                        listed[before] = turn
                        reach[before], below[before] = 0, 0
                        candidates[num_candidates] = before
                        num_candidates += 1
                    reach[before] = max(reach[before], min(arrival + path_below, _NEVER))
                    below[before] = max(below[before], path_below)
                if num_candidates == 0 or num_taken == max_taken:
                    values[num_taken], is_exact[num_taken] = serial, True
                    head, limit = min(head, serial), np.int64(_NEVER)
                else:
                    op = _take_worst(candidates, num_candidates, reach)
                    num_candidates -= 1
                    taken[num_taken] = op
                    values[num_taken], is_exact[num_taken] = max(serial, reach[op]), False
                    head, limit = min(head, values[num_taken]), serial if times[op, here] >= 0 else _NEVER
                if limit >= head:
                    head, num_left = _refine(times, edges, heads, scratch, here, num_taken, limit, num_left)
                    if limit >= head:
                        break
                gone[op] = turn
                num_taken += 1
                serial = _serial_ns(times, heads, scratch.by_head, op, here, num_taken)
                path_below = below[op] + times[op, here]
            heads[v, here] = max(path, head)


@inlined
def _take_worst(candidates, num_candidates, reach):
    """Takes the candidate of the largest `reach` off the list and returns it."""
    worst = 0
    for index in range(1, num_candidates):
        if reach[candidates[index]] > reach[candidates[worst]]:
            worst = index
    op = candidates[worst]
    candidates[worst] = candidates[num_candidates - 1]
    return op


@inlined
def _refine(times, edges, heads, scratch, here, num_taken, limit, num_left):
    """Makes the least of `values` exact until it passes `limit`, at most `num_left` times; returns (it, times left)."""
    values, is_exact = scratch.values, scratch.is_exact
    while True:
        best = 0
        for index in range(1, num_taken + 1):
            if values[index] < values[best]:
                best = index
        if is_exact[best] or values[best] > limit:
            break
        is_exact[best] = True
        num_left -= 1
        if num_left < 0:
            break
        delayed = _delayed(times, edges, heads, scratch, np.int64(best), here)
        values[best] = max(values[best], delayed)
    return values[best], num_left


@inlined
def _serial_ns(times, heads, by_head, op, here, num_taken):
    """Adds `op`, the last of `num_taken`, to those `by_head`; returns when all have run on one device."""
    at = num_taken - 1
    while at > 0 and heads[by_head[at - 1], here] < heads[op, here]:
        by_head[at] = by_head[at - 1]
        at -= 1
    by_head[at] = op
    total, serial = 0, 0
    for index in range(num_taken):
        total += times[by_head[index], here]
        serial = max(serial, heads[by_head[index], here] + total)
    return serial


@inlined
def _arrival(heads, times, transfer, edge, before, here):
    """Returns the arrival on class `here` of what `edge` carries if `before` runs on another device; _NEVER if none."""
    arrival = _NEVER
    for there in range(times.shape[1]):
        if times[before, there] >= 0 and transfer[edge, there, here] < _NEVER:
            arrival = min(arrival, heads[before, there] + times[before, there] + transfer[edge, there, here])
    return arrival


@inner
def _delayed(times, edges, heads, scratch, num_taken, here):
    """Returns the end of the first `num_taken` ops on one device of class `here` if the next one runs on another."""
    offsets, predecessors, transfer = edges
    taken, ops, starts = scratch.taken, scratch.ops, scratch.starts
    away = taken[num_taken]
    for index in range(num_taken):
        ops[index] = taken[index]
    sort(ops, ops, num_taken)
    for index in range(num_taken):
        op = ops[index]
        starts[index] = heads[op, here]
        for edge in range(offsets[op], offsets[op + 1]):
            before = predecessors[edge]
            if before == away:
                starts[index] = max(starts[index], _arrival(heads, times, transfer, edge, before, here))
                continue
            low, high = 0, index
            while low < high:
                middle = (low + high) // 2
                if ops[middle] < before:
                    low = middle + 1
                else:
                    high = middle
            if low < index and ops[low] == before:
                starts[index] = max(starts[index], starts[low] + times[before, here])
    sort(starts, ops, num_taken)
    finish = 0
    for index in range(num_taken):
        finish = max(finish, starts[index]) + times[ops[index], here]
    return finish


@inner
def sort(keys, items, count):
    """Sorts the first `count` of `keys`, and `items` by them (insertion sort: there are few)."""
    for end in range(1, count):
        key, item = keys[end], items[end]
        at = end
        while at > 0 and keys[at - 1] > key:
            keys[at], items[at] = keys[at - 1], items[at - 1]
            at -= 1
        keys[at], items[at] = key, item


def _interval_bound(times: I64, multiplicity: I64, heads: I64, tails: I64) -> int:
    """The best bound a + b + work over intervals and weights of devices."""
    fastest_ns = np.where(times >= 0, times, np.iinfo(np.int64).max).min(axis=1)
    longest_ns = int(heads.max()) + int(tails.max()) + int(fastest_ns.sum()) + 1
    scale = min(SETTINGS.weight_scale, 2**61 // longest_ns)  # weighted sums stay below 2^61
    by_head, by_tail = np.argsort(-heads, kind="stable"), np.argsort(tails, kind="stable")
    members = np.arange(len(times))
    scratch = zeros(IntervalScratch, N=len(times), S=num_leaves(len(times)))
    best = 0
    for _ in range(1 if len(multiplicity) == 1 else SETTINGS.interval_rounds):
        weights = device_weights(times[members], multiplicity, scale)
        total = int(weights @ multiplicity)
        if not 0 < total <= scale:
            break
        work = np.where(times >= 0, times * weights, np.iinfo(np.int64).max).min(axis=1)
        value, head, tail = best_interval(work, heads, tails, by_head, by_tail, total, scratch)
        bound = -(-int(value) // total)
        if bound <= best:
            break
        best = bound
        members = np.flatnonzero((heads >= head) & (tails >= tail))
    return best


def device_weights(times: I64, multiplicity: I64, scale: int) -> I64:
    """[C] integer weights, at most `scale` in all over the devices, that nearly maximise the work of `times`. J. E.
    Kelley, "The cutting-plane method for solving convex programs", SIAM Journal 8(4), 1960: each round adds the linear
    function that is exact at the last weights, and takes the weights that maximise the least of these functions."""
    num_classes = len(multiplicity)
    if num_classes == 1:
        return np.ones(1, np.int64)
    from scipy.optimize import linprog  # half a second, which devices that are alike never need

    unit = max(float(times.max(axis=1).sum()), 1.0)
    weights = np.full(num_classes, 1 / multiplicity.sum())
    best, best_value, cuts = weights, -1.0, []
    for _ in range(SETTINGS.weight_rounds):
        cuts.append(_loads(times, weights) / unit)
        value = float(cuts[-1] @ weights)
        if value > best_value:
            best, best_value = weights, value
        solution = linprog(
            np.append(np.zeros(num_classes), -1.0),
            A_ub=np.column_stack((-np.array(cuts), np.ones(len(cuts)))),
            b_ub=np.zeros(len(cuts)),
            A_eq=np.append(multiplicity, 0.0)[None],
            b_eq=[1.0],
        )
        if solution.x is None or solution.x[-1] <= best_value * (1 + 1e-6):
            break
        weights = np.maximum(solution.x[:-1], 0.0)
    return np.asarray(best * scale, np.int64)


def _loads(times: I64, weights: F64) -> F64:
    """[C] the work of each class when every op goes where its weighted time is least."""
    chosen = np.where(times >= 0, times * weights, np.inf).argmin(axis=1)
    return np.asarray(np.bincount(chosen, times[np.arange(len(times)), chosen], len(weights)), np.float64)


@kernel
def best_interval(work, heads, tails, by_head, by_tail, scale, scratch):
    """Returns (the largest scale * (a + b) + work of the ops with head >= a and tail >= b, a, b), over all a and b. Ops
    enter by falling head; a tree over the ops by tail holds, for each b, the value without a: an op adds its work to
    every b up to its own tail. O(N log N)."""
    inactive = np.int64(1) << 62
    num_ops = len(work)
    highest, added, place = scratch
    size = len(added) // 2
    for node in range(2 * size):
        highest[node], added[node] = -inactive, 0
    for at in range(num_ops):
        place[by_tail[at]] = at
        highest[size + at] = scale * tails[by_tail[at]] - inactive
    for node in range(size - 1, 0, -1):
        highest[node] = max(highest[2 * node], highest[2 * node + 1])
    best, best_head, best_op = 0, 0, by_tail[0]
    for at in range(num_ops):
        op = by_head[at]
        if work[op] > 0:
            node = size + place[op]
            highest[node] += work[op] + inactive
            while node > 1:
                if node & 1:
                    highest[node - 1] += work[op]
                    added[node - 1] += work[op]
                node >>= 1
                highest[node] = max(highest[2 * node], highest[2 * node + 1]) + added[node]
        if (at + 1 == num_ops or heads[by_head[at + 1]] < heads[op]) and scale * heads[op] + highest[1] > best:
            best, best_head = scale * heads[op] + highest[1], heads[op]
            node = 1
            while node < size:
                node = 2 * node + (highest[2 * node + 1] > highest[2 * node])
            best_op = by_tail[node - size]
    return best, best_head, tails[best_op]
