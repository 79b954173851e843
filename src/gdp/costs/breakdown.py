"""The time of a step on one device: its kernels by class, and the ops that take longest, equal ones together."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from gdp.arrays import F64, I64, Bool, scattered
from gdp.cluster import Cluster, Device
from gdp.costs.hosts import host_times
from gdp.costs.kernels import CLASSES, Kernels
from gdp.costs.op_times import op_times, step_kernels, times_given
from gdp.costs.overlap import exposed
from gdp.costs.rates import collective_times, is_collective, kernel_times, launch_times, memory_times
from gdp.graph import Graph

LIMITS = ("arithmetic", "memory", "launch", "latency", "link")
"""What may bound a kernel: multiplying, memory, or its start and end; an exchange: the time of its steps, or bytes."""
GIVEN = "given"  # the class, limit and rule of ops whose time the graph gives


@dataclass(frozen=True, slots=True)
class CostRow:
    """Kernels of one class, or of ops that are equal."""

    name: str  # the class, or the kind of the ops with their shapes
    count: int  # of kernels, or of ops
    time_ns: float  # of all of them
    flops: int
    bytes: int  # that the kernels move
    limit: str  # of LIMITS, where most of the time is
    rule: str = ""  # of `gdp.costs.table`, of ops


@dataclass(frozen=True, eq=False)
class Breakdown:
    """The kernels of a graph on a device that tells what it achieves; K kernels of R unlike ops."""

    graph: Graph
    device: Device

    @cached_property
    def kernels(self) -> Kernels:
        """The kernels as the device runs them."""
        return step_kernels(self.graph, self.device.runtime)

    @cached_property
    def num_ops(self) -> I64:
        """[R] the ops that are alike, but for those whose time is given."""
        return self._sums_of(np.ones(self.graph.num_ops)).astype(np.int64)

    @cached_property
    def _given(self) -> tuple[I64, Bool]:
        return times_given(self.graph, self.device)

    @cached_property
    def _exposed_ns(self) -> F64:
        """[N] what is left of each op's time beside exchanges that others hide; none of those that cannot run."""
        given_ns, is_given = self._given
        summed = self.kernels.summed(kernel_times(self.kernels, self.device))
        known_ns = np.where(is_given, np.maximum(given_ns, 0), summed)
        return np.where(is_given, known_ns, exposed(self.graph, known_ns))

    def _sums_of(self, values: F64) -> F64:
        """Returns the sums [R] of `values` [N] over ops that are alike, and are priced by kernels."""
        return np.asarray(
            np.bincount(self.kernels.ops, values * ~self._given[1], len(self.kernels.offsets) - 1), np.float64
        )

    @cached_property
    def _row(self) -> I64:
        return np.repeat(np.arange(len(self.num_ops)), np.diff(self.kernels.offsets))

    @cached_property
    def _times_ns(self) -> F64:
        times_ns = kernel_times(self.kernels, self.device)
        left, whole = map(self._sums_of, (self._exposed_ns, self.kernels.summed(times_ns)))
        return times_ns * (left / np.where(whole > 0, whole, 1))[self._row]

    @cached_property
    def _limit(self) -> I64:
        launch_ns = launch_times(self.kernels, self.device)
        is_in_memory = memory_times(self.kernels, self.device) * 2 >= self._times_ns - launch_ns
        limit = np.where(launch_ns * 2 > self._times_ns, 2, np.where(is_in_memory, 1, 0))
        begin_ns = collective_times(self.kernels, self.device)[0]
        return np.where(is_collective(self.kernels), np.where(begin_ns * 2 > self._times_ns, 3, 4), limit)

    @property
    def time_ns(self) -> float:
        """The time of all kernels, one after the other."""
        return float(self._exposed_ns.sum())

    @property
    def host_ns(self) -> float:
        """The time that the host takes to issue them."""
        alone = Cluster.build(self.device.name, [self.device], {})
        return float(host_times(self.graph, alone, op_times(self.graph, alone)).sum())

    def by_class(self) -> list[CostRow]:
        """Returns a row for each class of kernels, the longest first."""
        rows = self._rows(self.kernels.kinds, [(name, "") for name in CLASSES], self.num_ops[self._row])
        return _longest([*rows, *self._given_rows([GIVEN] * self.graph.num_ops)])

    def by_op(self, most: int) -> list[CostRow]:
        """Returns a row for each of the `most` sets of equal ops that take longest."""
        first = np.zeros(len(self.num_ops), np.int64)
        first[self.kernels.ops[::-1]] = np.arange(self.graph.num_ops)[::-1]
        rule = scattered(self._row, self.kernels.rule_codes, len(self.num_ops))
        names = [
            (self.graph.shapes[op] or self.graph.kinds[op], self.kernels.rules[code] if code >= 0 else "")
            for op, code in zip(first.tolist(), rule.tolist(), strict=True)
        ]
        rows = self._rows(self._row, names, self.num_ops[self._row], self.num_ops)
        texts = [shapes or kind for shapes, kind in zip(self.graph.shapes, self.graph.kinds, strict=True)]
        return _longest([*rows, *self._given_rows(texts)])[:most]

    def _given_rows(self, names: Sequence[str]) -> list[CostRow]:
        """Returns a row for each name of ops [N] whose time is given."""
        ops_of: dict[str, list[int]] = {}
        for op in np.flatnonzero(self._given[1] & (self._exposed_ns > 0)).tolist():
            ops_of.setdefault(names[op], []).append(op)
        time_ns, flops, moved = self._exposed_ns, self.graph.flops, self.graph.bytes_accessed
        return [
            CostRow(
                name, len(ops), float(time_ns[ops].sum()), int(flops[ops].sum()), int(moved[ops].sum()), GIVEN, GIVEN
            )
            for name, ops in ops_of.items()
        ]

    def _rows(
        self, group: I64, names: Sequence[tuple[str, str]], weight: I64, counts: I64 | None = None
    ) -> list[CostRow]:
        """Returns the rows of groups [K] of kernels, each of which is there `weight` [K] times."""
        num_groups = len(names)
        times_ns = np.bincount(group, self._times_ns * weight, num_groups)
        parts_ns = [self._times_ns * weight * (self._limit == number) for number in range(len(LIMITS))]
        limits = np.stack([np.bincount(group, part_ns, num_groups) for part_ns in parts_ns])
        amounts, runs = (self.kernels.flops, self.kernels.bytes), self._times_ns > 0  # others are of other devices
        flops, moved = (np.bincount(group, amount * weight * runs, num_groups) for amount in amounts)
        counts = np.bincount(group, weight, num_groups).astype(np.int64) if counts is None else counts
        order = [number for number in np.argsort(-times_ns, kind="stable").tolist() if times_ns[number] > 0]
        return [
            CostRow(
                names[number][0],
                int(counts[number]),
                float(times_ns[number]),
                int(flops[number]),
                int(moved[number]),
                LIMITS[int(np.argmax(limits[:, number]))],
                names[number][1],
            )
            for number in order
        ]


def _longest(rows: Sequence[CostRow]) -> list[CostRow]:
    """Returns the rows, those that take longest first."""
    return sorted(rows, key=lambda row: -row.time_ns)
