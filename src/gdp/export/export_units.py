"""Export units: the smallest parts that a target can place, and the same problem with units in place of ops. A target
(a tool that a plan is exported for) is coarser than a plan: it knows modules, layers or stages, not ops. N ops, U
units, D devices."""

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from gdp.arrays import I64, Bool
from gdp.errors import InputError
from gdp.simulator.problem import Problem
from gdp.units.units import Units


@dataclass(frozen=True, eq=False)
class ExportUnits(Units):
    """The units of a target in a graph: each op is in one unit, and so is each group. Their problem allows the devices
    of the target alone."""

    members: tuple[tuple[str, ...], ...]  # [U] paths of modules, names of layers or ops
    is_chain: bool = False  # in the order of execution; a device takes one contiguous run of them, a stage

    @classmethod
    def build(
        cls,
        problem: Problem,
        labels: npt.ArrayLike,
        names: Sequence[str],
        *,
        joined: Sequence[int] = (),
        devices: Bool | None = None,
    ) -> "ExportUnits":
        """Builds units from `labels` [N], numbers into `names`; a unit's number is that of its first op in order.
        Labels of one group become one unit, and so do the labels of one tree of `joined` [len(names)], a forest that
        `join` makes. `devices` [D] are the devices that the target has."""
        parent = list(joined) or list(range(len(names)))
        label_of = np.asarray(labels, np.int64)
        for ops in grouped_ops(problem):
            for op in ops[1:]:
                join(parent, int(label_of[ops[0]]), int(label_of[op]))
        roots = np.array([find(parent, label) for label in range(len(names))], np.int64)
        used, first, inverse = np.unique(roots[label_of], return_index=True, return_inverse=True)
        by_first_op = np.argsort(first)
        members = [[names[label] for label in np.flatnonzero(roots == root).tolist()] for root in used[by_first_op]]
        return cls._restricted(problem, np.argsort(by_first_op)[inverse], members, devices)

    @classmethod
    def chain(
        cls, problem: Problem, positions: I64, names: Sequence[str], *, devices: Bool | None = None
    ) -> "ExportUnits":
        """Builds a chain from the `positions` [N] of ops along it, numbers into `names`. All positions between the
        members of a group become one unit. Positions without ops are left out."""
        is_cut = np.ones(len(names), np.bool_)  # before each position
        for ops in grouped_ops(problem):
            is_cut[positions[ops].min() + 1 : positions[ops].max() + 1] = False
        unit_at = np.cumsum(is_cut) - 1
        used, index = np.unique(unit_at[positions], return_inverse=True)
        members = [[names[position] for position in np.flatnonzero(unit_at == unit).tolist()] for unit in used]
        return cls._restricted(problem, index, members, devices, is_chain=True)

    @classmethod
    def _restricted(
        cls,
        problem: Problem,
        index: I64,
        members: Sequence[Sequence[str]],
        devices: Bool | None,
        *,
        is_chain: bool = False,
    ) -> "ExportUnits":
        """Leaves the target's `devices` [D]; InputError if none may run one of the units."""
        restricted = problem if devices is None else problem.with_allowed(problem.allowed & devices)
        units = cls(restricted, index.astype(np.int64), tuple(map(tuple, members)), is_chain)
        if not units.allowed.any(axis=1).all():
            unit = int(np.argmin(units.allowed.any(axis=1)))
            runnable = (problem.op_time_ns[units.index == unit] >= 0).all(axis=0)
            if devices is not None:
                runnable &= devices
            remedy = "relax --pin or --forbid" if runnable.any() else "add a device that can"
            raise InputError(
                f"{members[unit][0]!r}: no device of {problem.cluster.name!r} may run all of it for this target, which "
                f"cannot split it; {remedy}"
            )
        return units

    def coarse(self, problem: Problem) -> Problem:
        """Returns `problem` with each unit as a group: same ops, same numbers, fewer placements."""
        graph = replace(problem.graph, groups=self.index.copy())
        return replace(problem, graph=graph, allowed=problem.allowed & self.allowed[self.index])


def grouped_ops(problem: Problem) -> Iterator[list[int]]:
    """Yields the ops of each group, groups in the order of their first ops."""
    ops: dict[int, list[int]] = defaultdict(list)
    for op in np.flatnonzero(problem.graph.groups >= 0).tolist():
        ops[int(problem.graph.groups[op])].append(op)
    yield from ops.values()


def find(parent: list[int], number: int) -> int:
    """Returns the root of `number` in a forest of joined numbers."""
    while parent[number] != number:
        parent[number] = parent[parent[number]]
        number = parent[number]
    return number


def join(parent: list[int], first: int, second: int) -> None:
    """Gives two numbers one root, the lower of theirs."""
    first, second = find(parent, first), find(parent, second)
    parent[max(first, second)] = min(first, second)
