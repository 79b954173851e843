"""Export units: the smallest parts that a target can place, and the same problem with units in place of ops.

A target (a tool that a plan is exported for) is coarser than a plan: it knows modules, layers or stages, not ops.
N ops, U units, D devices.
"""

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from gdp.arrays import I64, Bool
from gdp.errors import InputError
from gdp.simulator.problem import Placement, Problem


@dataclass(frozen=True, eq=False)
class ExportUnits:
    """The units of a target in a graph: each op is in one unit, and so is each group."""

    members: tuple[tuple[str, ...], ...]  # [U] paths of modules, names of layers or ops
    index: I64  # [N] unit of each op, all of 0 to U - 1 used
    allowed: Bool  # [U, D]
    is_chain: bool = False  # in the order of execution; a device takes one contiguous run of them, a stage

    @property
    def num_units(self) -> int:
        return len(self.members)

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
        `join` makes. `devices` [D] are the devices that the target has.
        """
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
        """Builds a chain from the `positions` [N] of ops along it, numbers into `names`.

        All positions between the members of a group become one unit. Positions without ops are left out.
        """
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
        """Adds the devices that may run each unit; InputError if none may run one of them."""
        target_has = np.ones(problem.num_devices, np.bool_) if devices is None else devices
        allowed, runnable = np.tile(target_has, (2, len(members), 1))
        np.logical_and.at(allowed, index, problem.allowed)
        np.logical_and.at(runnable, index, problem.op_time_ns >= 0)
        if not allowed.any(axis=1).all():
            unit = int(np.argmin(allowed.any(axis=1)))
            remedy = "relax --pin or --forbid" if runnable[unit].any() else "add a device that can"
            raise InputError(
                f"{members[unit][0]!r}: no device of {problem.cluster.name!r} may run all of it for this target, which "
                f"cannot split it; {remedy}"
            )
        return cls(tuple(map(tuple, members)), index.astype(np.int64), allowed, is_chain)

    def place(self, devices: npt.ArrayLike) -> Placement:
        """[N] Returns the placement of all ops from `devices` [U]."""
        return np.asarray(devices, np.int64)[self.index]

    def devices_of(self, placement: Placement) -> I64 | None:
        """[U] Inverts `place`; None where a unit is split."""
        devices = np.empty(self.num_units, np.int64)
        devices[self.index] = placement
        return devices if np.array_equal(devices[self.index], placement) else None

    def may_be_on(self, devices: I64) -> bool:
        """Returns whether each unit may be on its device of `devices` [U]."""
        return bool(self.allowed[np.arange(self.num_units), devices].all())

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
