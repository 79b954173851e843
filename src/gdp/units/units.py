"""Units: ops that move as one, with their figures, and the pairs of units that share tensors. The groups of a problem
are units, and each other op is one by itself; placers, searches, policies and exports join them into larger ones along
heavy edges. A search restricts that to an incumbent (as V-cycles of multilevel partitioning do: Walshaw 2004; Sanders
and Schulz 2011): units join only if the incumbent has them on one device, so that it survives the projection exactly. N
ops, U units, G groups of units, D devices, P pairs of units.

Backward ops follow the forward ops that they belong to: Baechi (SoCC 2020, section 3.1) places the forward ops alone
and gives each backward op its forward op's device. Which op that is the graph does not say; module paths, phases and
what flows between ops tell it."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from gdp.arrays import F64, I64, Bool, by_first, combined, connected, narrow, unique, wide
from gdp.compiled import inner, kernel
from gdp.graph.copies import RECOMPUTED
from gdp.simulator.problem import Placement, Problem


def forward_units(problem: Problem) -> I64:
    """[N] `Graph.group_index` with ungrouped backward ops joined to other units, numbered from 0 in the order of first
    ops. A backward op joins the unit (a parameter with its update) that takes all its results, directly or through
    other such ops, unless these results are much smaller than its inputs; else the latest forward op whose result it
    uses, else the latest backward op that it follows, else a parameter that it uses, each time in its module, one
    inside or around it. Units only join if they may go to the same devices. A copy that recomputes a forward op counts
    as it."""
    graph, arrays = problem.graph, problem.simulator.arrays
    is_copy = graph.is_in_role(RECOMPUTED)
    is_backward = np.array([phase in ("backward", "update") for phase in graph.phases], np.bool_) & ~is_copy
    numbers = {path: number for number, path in enumerate(dict.fromkeys(graph.modules))}
    module = np.fromiter((numbers[path] for path in graph.modules), np.int64, problem.num_ops)
    inner = containers(graph.modules)
    parent = np.array([_enclosing(path, numbers, inner) for path in numbers], np.int64)
    parts = _Parts(is_backward, is_copy, _has_home(problem), problem.graph.group_index, module, parent)
    takers, follows = np.full((2, problem.num_ops), -1)
    _find_leaders(arrays, parts, takers, follows)
    follows[problem.microbatch > 0] = -1  # replicas go where the first one goes, unless they are free
    followers = np.flatnonzero(follows >= 0)
    allowed = narrow(problem.allowed)
    same = (allowed[followers] == allowed[follows[followers]]).all(axis=1)
    follows[followers[~same]] = -1
    unit = problem.graph.group_index[roots_of(follows)]
    _, first_op = np.unique(problem.graph.group_index, return_index=True)
    unit = unit[first_op[problem.graph.group_index]]
    return by_first(unit)


def _has_home(problem: Problem) -> Bool:
    """[N] what is in a group for more than being replicas of one op: a parameter, its update."""
    groups = problem.graph.groups
    if problem.microbatch.max() < 1:
        return groups >= 0
    return (groups >= 0) & np.isin(groups, groups[problem.microbatch < 0])


def containers(modules: Iterable[str], *, outermost: bool = False) -> set[str]:
    """The paths, the root among them, that hold numbered parts of `modules`: what runs directly in one (a sum of
    layers' results) belongs to no layer. `outermost`: only those that are not themselves inside a numbered part."""
    found = {""}
    for module in set(modules):
        parts = module.split(".")
        numbered = [position for position, part in enumerate(parts) if part.isdecimal()]
        if numbered:
            last = numbered[0] if outermost else numbered[-1]
            found.update(".".join(parts[:end]) for end in range(1, last + 1))
    return found


def _enclosing(path: str, numbers: dict[str, int], inner: set[str]) -> int:
    """The number of the nearest module around `path` that has ops and is no container, -1 if none."""
    while path:
        path = path.rpartition(".")[0]
        if path in numbers and path not in inner:
            return numbers[path]
    return -1


class _Parts(NamedTuple):
    """Phases, groups and modules of ops. M modules."""

    is_backward: Bool  # [N]
    is_copy: Bool  # [N] that wait for backward ops, but take no result of theirs
    is_grouped: Bool  # [N]
    unit: I64  # [N]
    module: I64  # [N]
    parent: I64  # [M] the nearest module around each that has ops and is no container, -1: none


@inner
def _is_inside(parent, module, outer):
    while module >= 0:
        if module == outer:
            return True
        module = parent[module]
    return False


@kernel
def _find_leaders(arrays, parts, takers, leaders):
    """Fills `leaders` [N] with the op that each op follows, and `takers` [N] with an op of the one group that takes all
    results of each ungrouped backward op; -1 stays where there is none."""
    is_backward, is_copy, is_grouped, unit, module, parent = parts
    tensor_offsets, consumer_offsets, consumers = arrays[2:5]
    copy_bytes, _, input_offsets, inputs, input_producers = arrays[11][4:9]
    num_ops = len(module)
    for op in range(num_ops - 1, -1, -1):
        if is_grouped[op] or not is_backward[op]:
            continue
        taker, is_split = -1, False
        input_bytes, output_bytes = 0, 0
        for index in range(input_offsets[op], input_offsets[op + 1]):
            input_bytes += copy_bytes[inputs[index]]
        for tensor in range(tensor_offsets[op], tensor_offsets[op + 1]):
            output_bytes += copy_bytes[tensor]
            for index in range(consumer_offsets[tensor], consumer_offsets[tensor + 1]):
                consumer = np.int64(consumers[index])
                if is_copy[consumer]:
                    continue
                other = consumer if is_grouped[consumer] else takers[consumer]
                is_split |= other < 0 or (taker >= 0 and unit[other] != unit[taker])
                taker = other
        if not is_split and 2 * output_bytes >= input_bytes:  # a sum of two gradients counts as one of them
            takers[op] = taker
    for op in range(num_ops):
        if not is_backward[op] or is_grouped[op] or input_offsets[op] == input_offsets[op + 1]:
            continue
        forward, backward, source = -1, -1, -1
        for index in range(input_offsets[op], input_offsets[op + 1]):
            producer = np.int64(input_producers[index])
            here, there = module[op], module[producer]
            if not _is_inside(parent, here, there) and not _is_inside(parent, there, here):
                continue
            if input_offsets[producer] == input_offsets[producer + 1]:
                source = producer
            elif is_backward[producer]:
                backward = max(backward, producer)
            else:
                forward = max(forward, producer)
        if takers[op] >= 0:
            leaders[op] = takers[op]
        elif forward >= 0:
            leaders[op] = forward
        elif backward >= 0:
            leaders[op] = backward
        else:
            leaders[op] = source


@dataclass(frozen=True, eq=False)
class Units:
    """The ops of a problem in units. Figures are computed when they are first asked for."""

    problem: Problem
    index: I64  # [N] unit of each op; all of 0 to U - 1 are used

    @classmethod
    def of(cls, problem: Problem, index: I64 | None = None) -> "Units":
        """The units that `index` [N] numbers; by default the groups of `problem`, and every other op for itself."""
        return cls(problem, problem.graph.group_index if index is None else index)

    @cached_property
    def offsets(self) -> I64:
        """[U + 1] the ops of unit u are `ops[offsets[u]:offsets[u + 1]]`."""
        return np.concatenate(([0], np.cumsum(np.bincount(self.index))))

    @cached_property
    def ops(self) -> I64:
        """[N] the ops by unit, in ascending order within each."""
        return np.argsort(self.index, kind="stable")

    @property
    def num_units(self) -> int:
        return len(self.offsets) - 1

    @property
    def first_op(self) -> I64:
        """[U] the lowest op of each unit."""
        return self.ops[self.offsets[:-1]]

    @cached_property
    def time_ns(self) -> I64:
        """[U, D] the unit's ops one after the other; ops that cannot run on the device count as 0."""
        sums = self.sum(np.maximum(self.problem.simulator.time_table_ns, 0))
        return np.broadcast_to(sums, (self.num_units, self.problem.num_devices))  # one column where devices are alike

    @cached_property
    def work_ns(self) -> I64:
        """[U] the sum of the ops' mean times."""
        return self.sum(self.problem.mean_op_time_ns)

    @cached_property
    def resident_bytes(self) -> I64:
        """[U] held for the whole step."""
        return self.sum(self.problem.graph.resident_bytes)

    @cached_property
    def tensor_bytes(self) -> I64:
        """[U] allocated by the unit's ops during the step."""
        return self.sum(self.problem.simulator.arrays.memory.alloc_bytes)

    @cached_property
    def allowed(self) -> Bool:
        """[U, D] whether all ops of the unit may go to the device."""
        allowed = narrow(self.problem.allowed)[self.ops]
        of_units = np.asarray(np.logical_and.reduceat(allowed, self.offsets[:-1], axis=0))
        return wide(of_units, self.problem.num_devices)

    def sum(self, of_ops: I64) -> I64:
        """Returns sums [U, ...] over the units' ops of a figure of ops [N, ...]."""
        return np.asarray(np.add.reduceat(of_ops[self.ops], self.offsets[:-1], axis=0))

    @cached_property
    def mean_time_ns(self) -> I64:
        """[U] the mean time over the devices where a unit may go."""
        allowed = narrow(self.allowed)
        time_ns = self.time_ns if allowed.shape[1] > 1 else narrow(self.time_ns)
        total = np.where(allowed, time_ns, 0).sum(axis=1)
        return np.asarray(total // np.maximum(allowed.sum(axis=1), 1), np.int64)

    def place(self, devices: npt.ArrayLike) -> Placement:
        """Returns the placement [N] of all ops from `devices` [U]."""
        return np.asarray(devices, np.int64)[self.index]

    def place_allowed(self, devices: npt.ArrayLike) -> Placement:
        """Returns the placement [N] from `devices` [U], with units moved from where they are not allowed. They go to
        their fastest device, and among equally fast ones to that with the least work."""
        chosen = np.array(devices, np.int64)
        if narrow(self.allowed).shape[1] > 1:  # a pin leaves no choice, and may be of many units
            chosen = np.where(self.allowed.sum(axis=1) == 1, self.allowed.argmax(axis=1), chosen)
        misplaced = np.flatnonzero(~self.allowed[np.arange(self.num_units), chosen])
        if len(misplaced):
            right = np.ones(self.num_units, np.bool_)
            right[misplaced] = False
            times_ns = self.time_ns[np.flatnonzero(right), chosen[right]]
            work_ns = np.bincount(chosen[right], times_ns, self.allowed.shape[1])
            for unit in misplaced.tolist():
                targets = np.flatnonzero(self.allowed[unit])
                times = self.time_ns[unit, targets]
                fastest = targets[times == times.min()]
                chosen[unit] = fastest[np.argmin(work_ns[fastest])]
                work_ns[chosen[unit]] += times.min()
        return chosen[self.index]

    def devices_of(self, placement: Placement) -> I64 | None:
        """Returns the devices [U] of the units; None where `placement` [N] splits one."""
        devices = placement[self.first_op]
        return devices if np.array_equal(devices[self.index], placement) else None

    def may_be_on(self, devices: I64) -> bool:
        """Returns whether each unit may be on its device of `devices` [U]."""
        return bool(self.allowed[np.arange(self.num_units), devices].all())

    def pairs(self, max_consumers: int | None = None) -> "Pairs":
        """Returns the pairs of units that share tensors, and pairs that link parts that share none. Tensors with more
        than `max_consumers` consumers (weights that all time steps share, say) make no pairs."""
        problem, graph = self.problem, self.problem.graph
        sources, targets = self.index[graph.producers[graph.edge_tensors]], self.index[graph.consumers]
        sizes = graph.tensor_bytes[graph.edge_tensors]
        rates = problem.cluster.bytes_per_second[~np.eye(problem.num_devices, dtype=np.bool_)]
        cost_ns = (sizes / (rates.mean() if len(rates) else np.inf) * 1e9).astype(np.int64) + 1
        apart = sources != targets
        if max_consumers is not None:
            apart &= (np.diff(graph.consumer_offsets) <= max_consumers)[graph.edge_tensors]
        low, high = np.minimum(sources, targets)[apart], np.maximum(sources, targets)[apart]
        keys, inverse = np.unique(low * self.num_units + high, return_inverse=True)
        transfer_ns = combined(np.add, inverse, cost_ns[apart], len(keys))
        return _connected(Pairs(keys // self.num_units, keys % self.num_units, transfer_ns), self.num_units)


class Pairs(NamedTuple):
    """Pairs of units that may join."""

    first: I64  # [P] lower unit
    second: I64  # [P] higher unit
    transfer_ns: I64  # [P] what cutting the pair would transfer, at the mean rate; at least 1


def _connected(pairs: Pairs, num_units: int) -> Pairs:
    """Returns the pairs, and the lightest possible ones from each connected part of the graph to the next. Counters of
    batch normalisation, say, are hundreds of parts of two ops. Were they never to join, a grouping would have to spend
    its number of groups on them and put all the rest into one."""
    part = connected(pairs.first, pairs.second, num_units)
    begins = np.sort(np.unique(part, return_index=True)[1])
    times_ns = np.concatenate((pairs.transfer_ns, np.ones(len(begins) - 1, np.int64)))
    return Pairs(np.concatenate((pairs.first, begins[:-1])), np.concatenate((pairs.second, begins[1:])), times_ns)


def group_units(
    units: Units, pairs: Pairs, placements: Sequence[Placement], num_groups: int, score: F64, slack: float
) -> Units:
    """Returns at most about `num_groups` larger units: pairs join in the order of `score` [P] (highest first) where
    each of `placements` has both on one device and the result takes at most `slack` times an equal share of the work.
    With two placements the groups are parts of both, and a search over them can combine the two (the combine operator
    of Sanders and Schulz, "Distributed evolutionary graph partitioning", 2012). When that leaves too many groups, the
    limit is doubled. Units without a common neighbour stay apart."""
    together = np.ones(len(pairs.first), np.bool_)
    for placement in placements:
        device_of_unit = placement[units.first_op]
        together &= device_of_unit[pairs.first] == device_of_unit[pairs.second]
    limit_ns = max(slack * float(units.work_ns.sum()) / num_groups, 1.0)
    order = np.argsort(-score, kind="stable")
    order = order[together[order]]
    parent, weight = np.arange(units.num_units), units.work_ns.astype(np.float64)
    _join(parent, weight, pairs.first[order], pairs.second[order], num_groups, limit_ns)
    group_of_unit = np.unique(roots_of(parent), return_inverse=True)[1]
    return Units(units.problem, group_of_unit[units.index])


class MoveArrays(NamedTuple):
    """Groups as a search moves them, with their neighbours, in the flat arrays that its kernel takes."""

    offsets: I64  # [G + 1] group g moves ops[offsets[g]:offsets[g + 1]]
    ops: I64  # [N]
    group_of_op: I64  # [N]
    allowed: Bool  # [G, D]
    neighbour_offsets: I64  # [G + 1]
    neighbours: I64  # groups that share tensors with each group


def move_arrays(groups: Units, units: Units, pairs: Pairs) -> MoveArrays:
    """Returns the arrays of `groups`, which `units` joined into; `pairs` are those of `units`."""
    num_groups, group_of_unit = groups.num_units, groups.index[units.first_op]
    low, high = group_of_unit[pairs.first], group_of_unit[pairs.second]
    apart = low != high
    keys = unique(np.concatenate((low[apart] * num_groups + high[apart], high[apart] * num_groups + low[apart])))
    neighbour_offsets = np.concatenate(([0], np.cumsum(np.bincount(keys // num_groups, minlength=num_groups))))
    allowed = np.array(groups.allowed)  # as rows, where it is one column
    return MoveArrays(groups.offsets, groups.ops, groups.index, allowed, neighbour_offsets, keys % num_groups)


def roots_of(parent: I64) -> I64:
    """Returns where the pointers `parent` [N] lead to: what points to itself, or to -1, is a root."""
    roots = np.where(parent >= 0, parent, np.arange(len(parent)))
    while not np.array_equal(further := roots[roots], roots):
        roots = further
    return roots


@kernel
def _join(parent, weight, first, second, num_groups, limit_ns):
    """Joins pairs: a union-find in which each unit's `parent` is itself at first and a lower one of its group later.
    The `weight` of a group is that of its root."""
    count = len(parent)
    heaviest = 0.0  # all together
    for unit in range(count):
        heaviest += weight[unit]
    for _ in range(8):  # doublings of the limit
        if count <= num_groups:
            break
        joined_any = False
        for pair in range(len(first)):
            a, b = first[pair], second[pair]
            while parent[a] != a:
                parent[a] = parent[parent[a]]
                a = parent[a]
            while parent[b] != b:
                parent[b] = parent[parent[b]]
                b = parent[b]
            if a == b or weight[a] + weight[b] > limit_ns:
                continue
            parent[max(a, b)] = min(a, b)
            weight[min(a, b)] += weight[max(a, b)]
            joined_any = True
            count -= 1
            if count <= num_groups:
                break
        limit_ns *= 2.0
        if not joined_any and limit_ns > heaviest * 4:
            break
