"""Grouping: fewer, larger things to move in a search. Units (what must move as one) join along heavy edges.

The partition is restricted to an incumbent (as in the V-cycles of multilevel partitioning, Walshaw 2004; Sanders and
Schulz 2011): units join only if the incumbent has them on one device, so that it survives the projection exactly.
U units, G groups, P pairs of units that share tensors.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from gdp.arrays import F64, I64, Bool
from gdp.compiled import kernel
from gdp.simulator.problem import Placement, Problem


@dataclass(frozen=True, eq=False)
class Units:
    """The units of a problem, and the pairs of them that share tensors (or link parts that share none)."""

    index: I64  # [N] unit of each op
    time_ns: I64  # [U] mean time of a unit's ops
    allowed: Bool  # [U, D]
    first: I64  # [P] lower unit of each pair
    second: I64  # [P] higher unit
    transfer_ns: I64  # [P] what cutting the pair would transfer, at the mean rate; at least 1

    @property
    def num_units(self) -> int:
        return len(self.time_ns)

    @classmethod
    def of(cls, problem: Problem, index: I64 | None = None, max_consumers: int | None = None) -> "Units":
        """The units that `index` [N] numbers; by default the groups of `problem`, and every other op for itself.

        Tensors with more than `max_consumers` consumers (weights that all time steps share, say) make no pairs.
        """
        graph = problem.graph
        index = problem.group_index if index is None else index
        num_units = int(index.max()) + 1
        time_ns = np.zeros(num_units, np.int64)
        np.add.at(time_ns, index, problem.mean_op_time_ns)
        allowed = np.ones((num_units, problem.num_devices), np.bool_)
        np.logical_and.at(allowed, index, problem.allowed)

        sources, targets = index[graph.producers[graph.edge_tensors]], index[graph.consumers]
        sizes = graph.tensor_bytes[graph.edge_tensors]
        rates = problem.cluster.bytes_per_second[~np.eye(problem.num_devices, dtype=np.bool_)]
        cost_ns = (sizes / (rates.mean() if len(rates) else np.inf) * 1e9).astype(np.int64) + 1
        apart = sources != targets
        if max_consumers is not None:
            apart &= (np.diff(graph.consumer_offsets) <= max_consumers)[graph.edge_tensors]
        low, high = np.minimum(sources, targets)[apart], np.maximum(sources, targets)[apart]
        keys, inverse = np.unique(low * num_units + high, return_inverse=True)
        transfer_ns = np.zeros(len(keys), np.int64)
        np.add.at(transfer_ns, inverse, cost_ns[apart])
        first, second = keys // num_units, keys % num_units
        return cls(index, time_ns, allowed, *_connected(first, second, transfer_ns, num_units))


def _connected(first: I64, second: I64, transfer_ns: I64, num_units: int) -> tuple[I64, I64, I64]:
    """The pairs, and the lightest possible ones from each connected part of the graph to the next.

    Counters of batch normalisation, say, are hundreds of parts of two ops. Were they never to join, a grouping would
    have to spend its number of groups on them and put all the rest into one.
    """
    from scipy.sparse import coo_array  # half a second, which most commands never need
    from scipy.sparse.csgraph import connected_components

    pairs = coo_array((np.ones(len(first)), (first, second)), shape=(num_units, num_units))
    _, part = connected_components(pairs, directed=False)
    begins = np.sort(np.unique(part, return_index=True)[1])
    ones = np.ones(len(begins) - 1, np.int64)
    return (
        np.concatenate((first, begins[:-1])),
        np.concatenate((second, begins[1:])),
        np.concatenate((transfer_ns, ones)),
    )


class Grouping(NamedTuple):
    """Groups of ops that a search moves as one."""

    offsets: I64  # [G + 1] group g moves members[offsets[g]:offsets[g + 1]]
    members: I64  # [N]
    group_of_op: I64  # [N]
    allowed: Bool  # [G, D]
    neighbour_offsets: I64  # [G + 1]
    neighbours: I64  # groups that share tensors with each group

    @property
    def num_groups(self) -> int:
        return len(self.offsets) - 1


def group_units(units: Units, placements: Sequence[Placement], num_groups: int, score: F64, slack: float) -> Grouping:
    """At most about `num_groups` groups: pairs join in the order of `score` [P] (highest first) where each of
    `placements` has both on one device and the result takes at most `slack` times an equal share of the work.

    With two placements the groups are parts of both, and a search over them can combine the two (the combine operator
    of Sanders and Schulz, "Distributed evolutionary graph partitioning", 2012).

    When that leaves too many groups, the limit is doubled. Units without a common neighbour stay apart.
    """
    together = np.ones(len(units.first), np.bool_)
    for placement in placements:
        device_of_unit = np.zeros(units.num_units, np.int64)
        device_of_unit[units.index] = placement
        together &= device_of_unit[units.first] == device_of_unit[units.second]
    limit_ns = max(slack * float(units.time_ns.sum()) / num_groups, 1.0)
    order = np.argsort(-score, kind="stable")
    order = order[together[order]]
    parent, weight = np.arange(units.num_units), units.time_ns.astype(np.float64)
    _join(parent, weight, units.first[order], units.second[order], num_groups, limit_ns)
    return _grouping(units, np.unique(roots_of(parent), return_inverse=True)[1])


def roots_of(parent: I64) -> I64:
    """Returns where the pointers `parent` [N] lead to: what points to itself, or to -1, is a root."""
    roots = np.where(parent >= 0, parent, np.arange(len(parent)))
    while not np.array_equal(further := roots[roots], roots):
        roots = further
    return roots


@kernel
def _join(parent, weight, first, second, num_groups, limit_ns):
    """Joins pairs: a union-find in which each unit's `parent` is itself at first and a lower one of its group later.

    The `weight` of a group is that of its root.
    """
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


def _grouping(units: Units, group_of_unit: I64) -> Grouping:
    num_groups = int(group_of_unit.max()) + 1
    group_of_op = group_of_unit[units.index]
    allowed = np.ones((num_groups, units.allowed.shape[1]), np.bool_)
    np.logical_and.at(allowed, group_of_unit, units.allowed)
    low, high = group_of_unit[units.first], group_of_unit[units.second]
    apart = low != high
    keys = np.unique(np.concatenate((low[apart] * num_groups + high[apart], high[apart] * num_groups + low[apart])))
    return Grouping(
        offsets=_offsets(np.bincount(group_of_op, minlength=num_groups)),
        group_of_op=group_of_op,
        members=np.argsort(group_of_op, kind="stable"),
        allowed=allowed,
        neighbour_offsets=_offsets(np.bincount(keys // num_groups, minlength=num_groups)),
        neighbours=keys % num_groups,
    )


def _offsets(counts: I64) -> I64:
    return np.concatenate(([0], np.cumsum(counts)))
