"""Units: what a target places as one, and the same problem with units in place of ops.

A target (a tool that a plan is exported for) is coarser than a plan: it knows modules, layers or stages, not ops.
N ops, U units, D devices.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from gdp import accelerate_maps
from gdp.errors import InputError
from gdp.graph import I64, Bool
from gdp.problem import Placement, Problem


@dataclass(frozen=True, eq=False)
class Units:
    """The units of a target in a graph: every op is in one, and groups are in one."""

    members: tuple[tuple[str, ...], ...]  # [U] what each is made of: paths of modules, names of layers or ops
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
    ) -> "Units":
        """Units from `labels` [N], numbers into `names`, those of a group as one, numbered by their first op.

        `joined` [len(names)] is a forest of labels that are one (`join`); `devices` [D] are those that the target has.
        """
        parent = list(joined) or list(range(len(names)))
        given = np.asarray(labels, np.int64)
        by_group: dict[int, int] = {}
        for op in np.flatnonzero(problem.graph.groups >= 0).tolist():
            join(parent, by_group.setdefault(int(problem.graph.groups[op]), int(given[op])), int(given[op]))
        root_of = np.array([find(parent, label) for label in range(len(names))], np.int64)
        used, first, inverse = np.unique(root_of[given], return_index=True, return_inverse=True)
        position = np.empty(len(first), np.int64)
        position[np.argsort(first, kind="stable")] = np.arange(len(first))
        members: list[list[str]] = [[] for _ in first]
        number = dict(zip(used.tolist(), position.tolist(), strict=True))
        for label, root in enumerate(root_of.tolist()):
            if root in number:
                members[number[root]].append(names[label])
        index = position[inverse]
        return cls(tuple(map(tuple, members)), index, _allowed(problem, index, members, devices))

    @classmethod
    def chain(cls, problem: Problem, positions: I64, names: Sequence[str], *, devices: Bool | None = None) -> "Units":
        """A chain from `positions` [N] along it, numbers into `names`: what lies between the members of a group joins
        them; positions without ops fall away."""
        num_places = len(names)
        bound = np.ones(num_places + 1, np.bool_)  # a cut before each position
        bound[-1] = False
        groups = problem.graph.groups
        grouped = np.flatnonzero(groups >= 0)
        if len(grouped):
            _, number = np.unique(groups[grouped], return_inverse=True)
            low = np.full(number.max() + 1, num_places, np.int64)
            high = np.zeros(number.max() + 1, np.int64)
            np.minimum.at(low, number, positions[grouped])
            np.maximum.at(high, number, positions[grouped])
            for start, end in zip(low.tolist(), high.tolist(), strict=True):
                bound[start + 1 : end + 1] = False
        unit = np.cumsum(bound)[positions] - 1
        used, index = np.unique(unit, return_inverse=True)
        place = np.cumsum(bound)[:-1] - 1
        members = [[names[at] for at in np.flatnonzero(place == number).tolist()] for number in used.tolist()]
        allowed = _allowed(problem, index, members, devices)
        return cls(tuple(map(tuple, members)), index.astype(np.int64), allowed, is_chain=True)

    def place(self, devices: npt.ArrayLike) -> Placement:
        """[N] from `devices` [U]."""
        return np.asarray(devices, np.int64)[self.index]

    def devices_of(self, placement: Placement) -> I64 | None:
        """[U] the inverse of `place`; None where a unit is split."""
        devices = np.empty(self.num_units, np.int64)
        devices[self.index] = placement
        return devices if np.array_equal(devices[self.index], placement) else None

    def coarse(self, problem: Problem) -> Problem:
        """`problem` with each unit as a group: same ops, same numbers, fewer placements."""
        graph = replace(problem.graph, groups=self.index.copy())
        return replace(problem, graph=graph, allowed=problem.allowed & self.allowed[self.index])


def find(parent: list[int], number: int) -> int:
    """The root of `number` in a forest of joined numbers."""
    while parent[number] != number:
        parent[number] = parent[parent[number]]
        number = parent[number]
    return number


def join(parent: list[int], first: int, second: int) -> None:
    """Give two numbers one root, the lower of theirs."""
    first, second = find(parent, first), find(parent, second)
    parent[max(first, second)] = min(first, second)


def is_cpu(problem: Problem) -> Bool:
    """[D] which devices are CPUs, by kind and name."""
    return np.array(accelerate_maps.is_cpu(problem), np.bool_)


def _allowed(problem: Problem, index: I64, members: Sequence[Sequence[str]], devices: Bool | None) -> Bool:
    allowed = np.ones((len(members), problem.num_devices), np.bool_)
    np.logical_and.at(allowed, index, problem.allowed)
    runnable = np.ones_like(allowed)
    np.logical_and.at(runnable, index, problem.op_time_ns >= 0)
    if devices is not None:
        allowed &= devices
        runnable &= devices
    if not allowed.any(axis=1).all():
        unit = int(np.argmin(allowed.any(axis=1)))
        remedy = "relax --pin or --forbid" if runnable[unit].any() else "add a device that can"
        raise InputError(
            f"{members[unit][0]!r}: no device of {problem.cluster.name!r} may run all of it for this target, which "
            f"cannot split it; {remedy}"
        )
    return allowed
