"""Grouping: units join along heavy edges into fewer, larger things to move in a search.

The partition is restricted to an incumbent (as in the V-cycles of multilevel partitioning, Walshaw 2004; Sanders and
Schulz 2011): units join only if the incumbent has them on one device, so that it survives the projection exactly.
U units, G groups, P pairs of units that may join.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from gdp.arrays import F64, I64, Bool
from gdp.compiled import kernel
from gdp.simulator.problem import Placement
from gdp.units.units import Pairs, Units


def group_units(
    units: Units, pairs: Pairs, placements: Sequence[Placement], num_groups: int, score: F64, slack: float
) -> Units:
    """Returns at most about `num_groups` larger units: pairs join in the order of `score` [P] (highest first) where
    each of `placements` has both on one device and the result takes at most `slack` times an equal share of the work.

    With two placements the groups are parts of both, and a search over them can combine the two (the combine operator
    of Sanders and Schulz, "Distributed evolutionary graph partitioning", 2012).

    When that leaves too many groups, the limit is doubled. Units without a common neighbour stay apart.
    """
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
    keys = np.unique(np.concatenate((low[apart] * num_groups + high[apart], high[apart] * num_groups + low[apart])))
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
