"""Problem: a graph on a cluster with its costs and constraints, ready to be simulated.

docs/machine-model.md, sections 3 and 4, is the definition. N ops, T tensors, D devices.
"""

from dataclasses import dataclass, replace
from functools import cached_property
from typing import Unpack

import numpy as np
import numpy.typing as npt

from gdp import notebook
from gdp.arrays import I64, Bool
from gdp.cluster import Cluster
from gdp.errors import InputError
from gdp.graph import Graph, GraphSource
from gdp.graph.microbatches import microbatch_of
from gdp.simulator.constraints import ConstraintKeywords, Constraints, allowed_devices, memory_limits
from gdp.simulator.costs import op_times, transfer_occupancy_ns
from gdp.simulator.longest_paths import longest_paths, ranks_of
from gdp.simulator.orders import B_LEVEL, order_priority, orders_for
from gdp.simulator.records import Arrays, MemoryArrays, Workspace

Placement = npt.NDArray[np.int64]

_DERIVED = (  # from graph, cluster and op times alone
    "arrays",
    "b_level_ns",
    "fastest_ns",
    "group_index",
    "mean_op_time_ns",
    "runs_everywhere",
    "spare_workspaces",
    "tensor_numbers",
    "time_table_ns",
)

_LARGEST = 2**62  # what all sizes, or all times, of a problem may sum to: half of int64


@dataclass(frozen=True, eq=False)
class Problem:
    """The question to a placer. Make one with `Problem.build`; arrays are read-only.

    `allowed` says where an op may go: where it can run, as pins and forbidden kinds ask, and where all ops of its group
    may go. `order` is what ready ops are started by unless a caller says otherwise: the b-level, or an order of
    micro-batches.
    """

    graph: Graph
    cluster: Cluster
    op_time_ns: I64  # [N, D] -1 = cannot run there
    allowed: Bool  # [N, D]
    memory_limit_bytes: I64  # [D] at most the device's memory
    microbatch: I64  # [N] of each op; -1: shared by all, or the graph has none
    order: str = B_LEVEL

    def __post_init__(self) -> None:
        for array in (self.op_time_ns, self.allowed, self.memory_limit_bytes, self.microbatch):
            array.setflags(write=False)

    @classmethod
    def build(
        cls,
        graph: GraphSource,
        cluster: Cluster | str,
        constraints: Constraints | None = None,
        *,
        op_time_ns: I64 | None = None,
        **keywords: Unpack[ConstraintKeywords],
    ) -> "Problem":
        """Returns the problem of placing `graph` on `cluster`; a `Capture` and the text of DEVICES are taken as well.

        `op_time_ns` [N, D] replaces the cost model. The constraints are one value, or keywords: `pins` are (regular
        expression, device name), and ops whose module path or name it matches anywhere go to that device. `forbid` are
        (regular expression, name or kind of device), and ops whose kind it matches anywhere do not go there.
        `max_memory_bytes` lowers the memory of devices by name; `reserve` keeps a fraction of every device's memory
        free. `pin` and `max_memory`, as on the command line, are other names; `Constraints` has all notations. Raises
        InputError where no device is left for an op or a group, and where pins ask for more resident bytes than their
        device has.
        """
        graph, cluster = Graph.of(graph), Cluster.of(cluster)
        times = op_times(graph, cluster) if op_time_ns is None else np.array(op_time_ns, np.int64, order="C")
        if times.shape != (graph.num_ops, cluster.num_devices):
            raise InputError(
                f"op_time_ns has shape {times.shape}; "
                f"({graph.num_ops}, {cluster.num_devices}), ops x devices, is expected"
            )
        if (times < -1).any():
            raise InputError(f"op_time_ns holds {times.min()}; at least -1 (cannot run there) is expected")
        _check_sums(graph, cluster, times)
        runnable = times >= 0
        if not runnable.any(axis=1).all():
            op = int(np.argmin(runnable.any(axis=1)))
            raise InputError(
                f"op {op} {graph.op_names[op]!r}: no device of {cluster.name!r} can run it; "
                "give it a time on one or add a device"
            )
        constraints = Constraints.of(constraints, keywords)
        limits_bytes = memory_limits(cluster, constraints)
        allowed = allowed_devices(graph, cluster, runnable, constraints, limits_bytes)
        return cls(graph, cluster, times, allowed, limits_bytes, microbatch_of(graph))

    def in_order(self, order: str) -> "Problem":
        """The same problem with another `order`."""
        return self._sharing(replace(self, order=order))

    def with_allowed(self, allowed: Bool) -> "Problem":
        """The same problem with other devices `allowed` [N, D]."""
        return self._sharing(replace(self, allowed=allowed))

    def _sharing(self, other: "Problem") -> "Problem":
        """`other` with what was derived from this problem and holds for both."""
        other.__dict__.update({name: value for name, value in self.__dict__.items() if name in _DERIVED})
        return other

    def __repr__(self) -> str:
        """Returns `Problem('gnmt-2' on '2xl4-24g': 8,000 ops, 2 devices)`."""
        parts = f"{notebook.count(self.num_ops, 'op')}, {notebook.count(self.num_devices, 'device')}"
        return f"Problem({self.graph.name!r} on {self.cluster.name!r}: {parts})"

    @property
    def num_ops(self) -> int:
        return self.graph.num_ops

    @property
    def num_devices(self) -> int:
        return self.cluster.num_devices

    @cached_property
    def b_level_ns(self) -> I64:
        """[N] the default priority: mean time over the devices that can run it, plus the longest such path below it."""
        return longest_paths(self.graph, self.mean_op_time_ns)

    @cached_property
    def mean_op_time_ns(self) -> I64:
        """[N] mean over the devices that can run the op, rounded down: the m of docs/machine-model.md, section 3."""
        runnable = self.op_time_ns >= 0
        total = np.where(runnable, self.op_time_ns, 0).sum(axis=1)
        return np.asarray(total // np.maximum(runnable.sum(axis=1), 1), np.int64)

    @property
    def orders(self) -> tuple[str, ...]:
        """The orders that are worth trying: the b-level alone without micro-batches."""
        return orders_for(self.graph, self.microbatch)

    def priority(self, order: str, level_ns: I64) -> I64:
        """[N] the priority of ops in that order, `level_ns` [N] in place of the b-level."""
        return order_priority(order, self.graph, self.microbatch, level_ns)

    @cached_property
    def ranks(self) -> tuple[npt.NDArray[np.uint32], npt.NDArray[np.uint32]]:
        """(rank of each op [N], op of each rank [N]) in the problem's order."""
        return ranks_of(self.priority(self.order, self.b_level_ns))

    @cached_property
    def runs_everywhere(self) -> bool:
        """True if all ops can run on all devices."""
        return bool((self.op_time_ns >= 0).all())

    @cached_property
    def spare_workspaces(self) -> list[Workspace]:
        """Workspaces that are not in use: making one takes as long as a simulation."""
        return []

    def borrow_workspace(self) -> Workspace:
        """A spare workspace, or a new one; append it to `spare_workspaces` when what it holds has been copied."""
        try:
            return self.spare_workspaces.pop()
        except IndexError:
            return Workspace.of(self.arrays)

    @cached_property
    def fastest_ns(self) -> I64:
        """[N] the op's time on its fastest device."""
        return np.asarray(np.where(self.op_time_ns >= 0, self.op_time_ns, np.iinfo(np.int64).max).min(axis=1))

    @cached_property
    def time_table_ns(self) -> I64:
        """[N, D] `op_time_ns` as the engine takes it: one column [N, 1] where all devices are alike."""
        times = self.op_time_ns
        table = np.ascontiguousarray(times[:, :1]) if (times == times[:, :1]).all() else times
        table.setflags(write=False)  # as `op_time_ns` is: Numba would compile everything anew for a writable one
        return table

    @cached_property
    def group_index(self) -> I64:
        """[N] units that move as one, numbered from 0 in the order of first ops: groups, and other ops each alone."""
        ids = np.where(self.graph.groups >= 0, self.graph.groups, -1 - np.arange(self.num_ops))
        _, first, inverse = np.unique(ids, return_index=True, return_inverse=True)
        position = np.empty(len(first), np.int64)
        position[np.argsort(first, kind="stable")] = np.arange(len(first))
        return position[inverse]

    @cached_property
    def tensor_numbers(self) -> I64:
        """[T] the graph's number of each tensor of `arrays`, which sorts tensors by producer."""
        return np.argsort(self.graph.producers, kind="stable")

    @cached_property
    def arrays(self) -> Arrays:
        """The flat arrays of the compiled simulator."""
        return _flatten(self)

    def check_placement(self, placement: npt.ArrayLike) -> npt.NDArray[np.uint8]:
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
        if not self.runs_everywhere and (cannot := self.op_time_ns[np.arange(self.num_ops), values] < 0).any():
            op = int(np.argmax(cannot))
            device = self.cluster.devices[int(values[op])].name
            raise InputError(
                f"placement: op {op} {self.graph.op_names[op]!r} cannot run on {device}; place it elsewhere"
            )
        return values.astype(np.uint8)

    def broken_constraints(self, placement: Placement) -> list[str]:
        """Returns the constraints that `placement` breaks besides memory: groups that are split, misplaced ops."""
        reasons = []
        groups = self.graph.groups
        grouped = np.flatnonzero(groups >= 0)
        device_of_group: dict[int, int] = {}
        for op in grouped.tolist():
            device = device_of_group.setdefault(int(groups[op]), int(placement[op]))
            if device != placement[op]:
                names = f"{self.cluster.devices[device].name} and {self.cluster.devices[int(placement[op])].name}"
                reasons.append(f"group {groups[op]} is split over {names}")
                break
        misplaced = np.flatnonzero(~self.allowed[np.arange(self.num_ops), placement])
        if len(misplaced) and not reasons:
            op = int(misplaced[0])
            device_name = self.cluster.devices[int(placement[op])].name
            reasons.append(
                f"op {op} {self.graph.op_names[op]!r} is not allowed on {device_name} ({len(misplaced)} such ops)"
            )
        return reasons


def _check_sums(graph: Graph, cluster: Cluster, op_time_ns: I64) -> None:
    """InputError where sums of sizes or times could pass int64: no figure may wrap around."""
    sizes = graph.tensor_bytes.tolist()
    total_bytes = sum(graph.resident_bytes.tolist()) + sum(sizes)
    if total_bytes > _LARGEST:
        raise InputError(
            f"graph {graph.name!r}: resident_bytes and tensors' bytes sum to {total_bytes}; check the sizes"
        )
    apart = ~np.eye(cluster.num_devices, dtype=np.bool_)
    if cluster.num_devices > 1:
        slowest, latest_ns = int(cluster.bytes_per_second[apart].min()), int(cluster.latency_ns[apart].max())
        used = [size for size, count in zip(sizes, np.diff(graph.consumer_offsets).tolist(), strict=True) if count]
        transfers_ns = (sum(used) * 10**9 // slowest + len(used) * (latest_ns + 1)) * (cluster.num_devices - 1)
    else:
        transfers_ns = 0
    total_ns = sum(op_time_ns.max(axis=1).tolist()) + transfers_ns
    if total_ns > _LARGEST:
        raise InputError(
            f"graph {graph.name!r} on {cluster.name!r}: op times and transfers sum to {total_ns} ns; "
            "check flops, sizes, times and rates"
        )


def _flatten(problem: Problem) -> Arrays:
    graph, cluster = problem.graph, problem.cluster
    num_ops, num_tensors, num_devices = graph.num_ops, graph.num_tensors, cluster.num_devices
    numbers = problem.tensor_numbers
    position = np.empty(num_tensors, np.int64)
    position[numbers] = np.arange(num_tensors)
    producers = graph.producers[numbers]
    counts = np.diff(graph.consumer_offsets)[numbers]
    edge_order = np.argsort(position[graph.edge_tensors], kind="stable")
    consumers = graph.consumers[edge_order]
    edge_tensors = np.repeat(np.arange(num_tensors), counts)
    view_of = graph.view_of[numbers]
    owner = np.where(view_of >= 0, position[np.maximum(view_of, 0)], np.arange(num_tensors)) if num_tensors else view_of
    sizes = graph.tensor_bytes[numbers]
    owned = np.where(graph.is_resident[numbers] | (view_of >= 0), 0, sizes)
    pinned = np.zeros(num_tensors, np.bool_)
    np.logical_or.at(pinned, owner, graph.is_kept[numbers])
    alloc = np.zeros(num_ops, np.int64)
    np.add.at(alloc, producers, owned)

    rates = np.unique(cluster.bytes_per_second[~np.eye(num_devices, dtype=np.bool_)])
    occupancy = np.zeros((num_tensors, max(len(rates), 1)), np.int64)
    for column, rate in enumerate(rates.tolist()):
        occupancy[:, column] = transfer_occupancy_ns(sizes, rate)
    route_rate = np.minimum(np.searchsorted(rates, cluster.bytes_per_second), max(len(rates) - 1, 0))
    routes = [channels for row in cluster.route_channels for channels in row]
    num_inputs = np.bincount(consumers, minlength=num_ops)
    inputs = edge_tensors[np.argsort(consumers, kind="stable")]
    memory = MemoryArrays(
        resident_bytes=graph.resident_bytes,
        alloc_bytes=alloc,
        owner=owner.astype(np.uint32),
        owned_bytes=np.where(pinned, 0, owned),
        copy_bytes=sizes,
        producers=producers.astype(np.uint32),
        input_offsets=_offsets(num_inputs),
        inputs=inputs.astype(np.uint32),
        input_producers=producers[inputs].astype(np.uint32),
    )
    return Arrays(
        num_inputs=num_inputs.astype(np.int32),
        sources=np.flatnonzero(num_inputs == 0).astype(np.uint32),
        tensor_offsets=_offsets(np.bincount(producers, minlength=num_ops)),
        consumer_offsets=_offsets(counts),
        consumers=consumers.astype(np.uint32),
        occupancy_ns=occupancy,
        route_rate=route_rate.astype(np.uint32),
        latency_ns=np.ascontiguousarray(cluster.latency_ns),
        route_offsets=_offsets([len(route) for route in routes]),
        route_channels=np.array([channel for route in routes for channel in route], np.uint32),
        tail_ns=longest_paths(graph, problem.fastest_ns),
        memory=memory,
    )


def _offsets(counts: npt.ArrayLike) -> npt.NDArray[np.uint32]:
    return np.concatenate(([0], np.cumsum(counts))).astype(np.uint32)
