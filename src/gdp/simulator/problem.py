"""Problem: a graph on a cluster with its costs and constraints, ready to be simulated. docs/machine-model.md, sections
3 and 4, is the definition. N ops, T tensors, D devices."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Unpack

import numpy as np
import numpy.typing as npt

from gdp import notebook
from gdp.arrays import I64, Bool, narrow, pick, rows_of, wide
from gdp.cluster import Cluster
from gdp.cluster.changes import only
from gdp.costs.hosts import host_times
from gdp.costs.op_times import op_times, ranks_of
from gdp.errors import InputError
from gdp.graph import Graph, GraphSource
from gdp.graph.microbatches import microbatch_of
from gdp.simulator.constraints import ConstraintKeywords, Constraints, allowed_devices, memory_limits
from gdp.simulator.orders import B_LEVEL, BY_CALL, order_priority, orders_for
from gdp.simulator.simulator import Simulator

Placement = npt.NDArray[np.int64]
Devices = npt.NDArray[np.uint8 | np.uint16]  # a placement as kernels take it

_LARGEST = 2**62  # what all sizes, or all times, of a problem may sum to: half of int64


@dataclass(frozen=True, eq=False)
class Problem:
    """The question to a placer. Make one with `Problem.build`; arrays are read-only.

    `allowed` says where an op may go: where it can run, as pins and forbidden kinds ask, and where all ops of its group
    may go. `order` is what ready ops are started by, by default: the b-level, or an order of micro-batches."""

    graph: Graph
    cluster: Cluster
    op_time_ns: I64  # [N, D] -1 = cannot run there
    host_time_ns: I64  # [N, D] what the device's host takes for the op
    allowed: Bool  # [N, D]
    memory_limit_bytes: I64  # [D] at most the device's memory
    microbatch: I64  # [N] of each op; -1: shared by all, or the graph has none
    order: str = B_LEVEL
    other_simulator: Simulator | None = None  # of a problem that may have the same graph, cluster and times

    def __post_init__(self) -> None:
        for array in (self.op_time_ns, self.host_time_ns, self.allowed, self.memory_limit_bytes, self.microbatch):
            array.setflags(write=False)

    @classmethod
    def build(
        cls,
        graph: GraphSource,
        cluster: Cluster | str,
        constraints: Constraints | None = None,
        *,
        op_time_ns: I64 | None = None,
        host_time_ns: I64 | None = None,
        **keywords: Unpack[ConstraintKeywords],
    ) -> "Problem":
        """Returns the problem of placing `graph` on `cluster`; a `Capture` and the text of DEVICES are taken as well.

        `op_time_ns` and `host_time_ns` [N, D] replace the cost model. The constraints are one value, or keywords:
        `pins` are (regular expression, device name), and ops whose module path or name it matches anywhere go to that
        device. `forbid` are (regular expression, name or kind of device), and ops whose kind it matches anywhere do not
        go there. `max_memory_bytes` lowers the memory of devices by name; `reserve` keeps a fraction of every device's
        memory free. `pin` and `max_memory`, as on the command line, are other names; `Constraints` has all notations.
        Raises InputError where no device is left for an op or a group, and where pins ask for more resident bytes than
        their device has."""
        graph, cluster = Graph.of(graph), Cluster.of(cluster)
        times = op_times(graph, cluster) if op_time_ns is None else np.array(op_time_ns, np.int64, order="C")
        _check_table("op_time_ns", times, graph, cluster, -1)
        hosts = host_times(graph, cluster, times) if host_time_ns is None else np.array(host_time_ns, np.int64)
        _check_table("host_time_ns", hosts, graph, cluster, 0)
        _check_sums(graph, cluster, times, hosts)
        runnable = wide(narrow(times) >= 0, cluster.num_devices)
        if not narrow(runnable).any(axis=1).all():
            op = int(np.argmin(narrow(runnable).any(axis=1)))
            num_ranks = int(ranks_of(graph)[op])
            size = f"{num_ranks} " if num_ranks > 0 else ""
            remedy = f"it takes a group of {size}equal cards" if num_ranks else "give it a time on one or add a device"
            raise InputError(f"op {op} {graph.op_names[op]!r}: no device of {cluster.name!r} can run it; {remedy}")
        constraints = Constraints.of(constraints, keywords)
        limits_bytes = memory_limits(cluster, constraints)
        allowed = allowed_devices(graph, cluster, runnable, constraints, limits_bytes)
        return cls(graph, cluster, times, hosts, allowed, limits_bytes, microbatch_of(graph))

    def in_order(self, order: str) -> "Problem":
        """The same problem with another `order`."""
        return replace(self, order=order, other_simulator=self.simulator)

    def with_allowed(self, allowed: Bool) -> "Problem":
        """The same problem with other devices `allowed` [N, D]."""
        return replace(self, allowed=allowed, other_simulator=self.simulator)

    def excerpt(self, graph: Graph, ops: I64) -> "Problem":
        """The same problem of `graph`, whose ops are these `ops` [M]."""
        return replace(
            self,
            graph=graph,
            op_time_ns=rows_of(self.op_time_ns, ops),
            host_time_ns=rows_of(self.host_time_ns, ops),
            allowed=rows_of(self.allowed, ops),
            microbatch=self.microbatch[ops],
        )

    def on_devices(self, numbers: Sequence[int]) -> "Problem":
        """The same problem on the devices with these `numbers` alone."""
        return replace(
            self,
            cluster=only(self.cluster, numbers),
            op_time_ns=pick(self.op_time_ns, numbers),
            host_time_ns=pick(self.host_time_ns, numbers),
            allowed=pick(self.allowed, numbers),
            memory_limit_bytes=self.memory_limit_bytes[list(numbers)],
        )

    def __repr__(self) -> str:
        """Returns `Problem('gnmt-2' on '2xl4-24g': 8,000 ops, 2 devices)`."""
        parts = f"{notebook.count(self.num_ops, 'op')}, {notebook.count(self.num_devices, 'device')}"
        return f"Problem({self.graph.name!r} on {self.cluster.name!r}: {parts})"

    @cached_property
    def simulator(self) -> Simulator:
        """The arrays, ranks and workspaces of this problem's simulations."""
        values = self.graph, self.cluster, self.op_time_ns, self.microbatch, self.host_time_ns
        other = self.other_simulator
        return other if other is not None and other.is_of(*values) else Simulator(*values)

    @property
    def num_ops(self) -> int:
        return self.graph.num_ops

    @property
    def num_devices(self) -> int:
        return self.cluster.num_devices

    @property
    def mean_op_time_ns(self) -> I64:
        """[N] mean over the devices that can run the op, rounded down."""
        return self.simulator.mean_op_time_ns

    @property
    def b_level_ns(self) -> I64:
        """[N] the default priority."""
        return self.simulator.b_level_ns

    @property
    def program_level(self) -> I64:
        """[N] the priority in the order of the program."""
        return self.simulator.order_traits.program_level

    @property
    def orders(self) -> tuple[str, ...]:
        """The orders that are worth trying: the b-level alone without micro-batches, replicas and an order by calls."""
        orders = orders_for(self.graph, self.microbatch)
        return (BY_CALL, *orders) if self.order == BY_CALL else orders

    def priority(self, order: str, level_ns: I64) -> I64:
        """[N] the priority of ops in that order, `level_ns` [N] in place of the b-level."""
        return order_priority(order, self.simulator.order_traits, level_ns)

    def check_placement(self, placement: npt.ArrayLike) -> Devices:
        """`placement` as the engine takes it; InputError if an op is on no device or on one that cannot run it."""
        values = np.asarray(placement)
        if values.shape != (self.num_ops,) or values.dtype.kind not in "iu":
            raise InputError(
                f"placement has shape {values.shape} and type {values.dtype}; "
                f"{self.num_ops} device numbers are expected"
            )
        if values.min() < 0 or values.max() >= self.num_devices:
            op = int(np.argmax((values < 0) | (values >= self.num_devices)))
            raise InputError(f"placement: op {op} is on device {values[op]}; devices are 0 to {self.num_devices - 1}")
        if (
            not self.simulator.runs_everywhere
            and (cannot := self.op_time_ns[np.arange(self.num_ops), values] < 0).any()
        ):
            op = int(np.argmax(cannot))
            device = self.cluster.devices[int(values[op])].name
            raise InputError(
                f"placement: op {op} {self.graph.op_names[op]!r} cannot run on {device}; place it elsewhere"
            )
        return values.astype(self.simulator.placement_type)

    def broken_constraints(self, placement: Placement) -> list[str]:
        """Returns the constraints that `placement` breaks besides memory: groups that are split, misplaced ops."""
        reasons = []
        unit, groups = self.graph.group_index, self.graph.groups
        first = np.empty(int(unit.max()) + 1, np.int64)  # the device of each unit's first op
        first[unit[::-1]] = placement[::-1]
        split = np.flatnonzero(first[unit] != placement)
        if len(split):
            op = int(split[0])
            both = int(first[unit[op]]), int(placement[op])
            names = " and ".join(self.cluster.devices[device].name for device in both)
            reasons.append(f"group {groups[op]} is split over {names}")
        misplaced = np.flatnonzero(~self.allowed[np.arange(self.num_ops), placement])
        if len(misplaced) and not reasons:
            op = int(misplaced[0])
            device_name = self.cluster.devices[int(placement[op])].name
            count = f"({len(misplaced)} such ops)"
            reasons.append(f"op {op} {self.graph.op_names[op]!r} is not allowed on {device_name} {count}")
        return reasons


def _check_table(name: str, times: I64, graph: Graph, cluster: Cluster, least: int) -> None:
    """InputError for times of another shape, or below the `least`."""
    if times.shape != (graph.num_ops, cluster.num_devices):
        shape = f"({graph.num_ops}, {cluster.num_devices})"
        raise InputError(f"{name} has shape {times.shape}; {shape}, ops x devices, is expected")
    if (narrow(times) < least).any():
        raise InputError(f"{name} holds {times.min()}; at least {least}{' (cannot run there)' * -least} is expected")


def _check_sums(graph: Graph, cluster: Cluster, op_time_ns: I64, host_time_ns: I64) -> None:
    """InputError where sums of sizes or times could pass int64: no figure may wrap around."""
    sizes = graph.tensor_bytes
    total_bytes = _exact_sum(graph.resident_bytes) + _exact_sum(sizes)
    if total_bytes > _LARGEST:
        raise InputError(
            f"graph {graph.name!r}: resident_bytes and tensors' bytes sum to {total_bytes}; check the sizes"
        )
    apart = ~np.eye(cluster.num_devices, dtype=np.bool_)
    if cluster.num_devices > 1:
        slowest, latest_ns = int(cluster.bytes_per_second[apart].min()), int(cluster.latency_ns[apart].max())
        used = sizes[np.diff(graph.consumer_offsets) > 0]
        transfers_ns = (_exact_sum(used) * 10**9 // slowest + len(used) * (latest_ns + 1)) * (cluster.num_devices - 1)
    else:
        transfers_ns = 0
    total_ns = sum(_exact_sum(narrow(times).max(axis=1)) for times in (op_time_ns, host_time_ns)) + transfers_ns
    if total_ns > _LARGEST:
        raise InputError(
            f"graph {graph.name!r} on {cluster.name!r}: op times and transfers sum to {total_ns} ns; "
            "check flops, sizes, times and rates"
        )


def _exact_sum(values: I64) -> int:
    """Returns the sum of `values`, which may pass int64: high and low halves are added up apart."""
    return (int((values >> 32).sum()) << 32) + int((values & 0xFFFFFFFF).sum())
