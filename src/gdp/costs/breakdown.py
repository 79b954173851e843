"""The time of a step on one device: its kernels by class, and the ops that take longest, equal ones together."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from gdp.arrays import F64, I64
from gdp.cluster import Device
from gdp.cluster.device import CUDA_GRAPHS
from gdp.costs.kernels import CLASSES, Kernels
from gdp.costs.op_times import step_kernels
from gdp.costs.overlap import exposed
from gdp.costs.rates import collective_times, gap_ns, is_collective, kernel_times, memory_times
from gdp.graph import Graph

LIMITS = ("arithmetic", "memory", "launch", "latency", "link")
"""What may bound a kernel: multiplying, memory, or its start and end; an exchange: the time of its steps, or bytes."""


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
        """[R] the ops that are alike."""
        return np.bincount(self.kernels.ops, minlength=len(self.kernels.offsets) - 1)

    @cached_property
    def _row(self) -> I64:
        return np.repeat(np.arange(len(self.num_ops)), np.diff(self.kernels.offsets))

    @cached_property
    def _times_ns(self) -> F64:
        times_ns = kernel_times(self.kernels, self.device)
        of_ops = self.kernels.summed(times_ns)
        left, whole = (np.bincount(self.kernels.ops, each) for each in (exposed(self.graph, of_ops), of_ops))
        return times_ns * (left / np.where(whole > 0, whole, 1))[self._row]

    @cached_property
    def _limit(self) -> I64:
        launch_ns = gap_ns(self.device) * self.kernels.launches
        is_in_memory = memory_times(self.kernels, self.device) * 2 >= self._times_ns - launch_ns
        limit = np.where(launch_ns * 2 > self._times_ns, 2, np.where(is_in_memory, 1, 0))
        begin_ns = collective_times(self.kernels, self.device)[0]
        return np.where(is_collective(self.kernels), np.where(begin_ns * 2 > self._times_ns, 3, 4), limit)

    @property
    def time_ns(self) -> float:
        """The time of all kernels, one after the other."""
        return float(self._times_ns @ self.num_ops[self._row])

    @property
    def host_ns(self) -> float:
        """The time that the host takes to issue them."""
        issue_ns = 0 if self.device.runtime == CUDA_GRAPHS else self.device.issue_ns
        return float(self.kernels.launches @ self.num_ops[self._row]) * issue_ns + float(self.graph.host_ns.sum())

    def by_class(self) -> list[CostRow]:
        """Returns a row for each class of kernels, the longest first."""
        return self._rows(self.kernels.kinds, [(name, "") for name in CLASSES], self.num_ops[self._row])

    def by_op(self, most: int) -> list[CostRow]:
        """Returns a row for each of the `most` sets of equal ops that take longest."""
        first = np.zeros(len(self.num_ops), np.int64)
        first[self.kernels.ops[::-1]] = np.arange(self.graph.num_ops)[::-1]
        rule = np.full(len(self.num_ops), -1)
        rule[self._row] = self.kernels.rule_codes
        names = [
            (self.graph.shapes[op] or self.graph.kinds[op], self.kernels.rules[code] if code >= 0 else "")
            for op, code in zip(first.tolist(), rule.tolist(), strict=True)
        ]
        rows = self._rows(self._row, names, self.num_ops[self._row], self.num_ops)
        return rows[:most]

    def _rows(
        self, group: I64, names: Sequence[tuple[str, str]], weight: I64, counts: I64 | None = None
    ) -> list[CostRow]:
        """Returns the rows of groups [K] of kernels, each of which is there `weight` [K] times."""
        num_groups = len(names)
        times_ns = np.bincount(group, self._times_ns * weight, num_groups)
        parts_ns = [self._times_ns * weight * (self._limit == number) for number in range(len(LIMITS))]
        limits = np.stack([np.bincount(group, part_ns, num_groups) for part_ns in parts_ns])
        amounts = self.kernels.flops, self.kernels.bytes
        flops, moved = (np.bincount(group, amount * weight, num_groups) for amount in amounts)
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
