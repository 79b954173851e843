"""Problem: a graph on a cluster, its costs and constraints, ready to be simulated; Plan: an answer; `gdp-plan` files.

docs/machine-model.md, sections 3, 4 and 6, is the definition. N ops, T tensors, D devices.
"""

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from gdp import engine, files
from gdp.cluster import Cluster
from gdp.cost import op_times, transfer_occupancy_ns
from gdp.errors import InputError
from gdp.graph import Graph
from gdp.levels import longest_paths

I64 = npt.NDArray[np.int64]
Bool = npt.NDArray[np.bool_]
Placement = npt.NDArray[np.int64]

FORMAT, VERSION = "gdp-plan", 1


@dataclass(frozen=True, eq=False)
class Problem:
    """What a placer is given. Make one with `Problem.build`; arrays are read-only.

    `allowed` says where an op may go: where it can run, as pins ask, and where all ops of its group may go.
    """

    graph: Graph
    cluster: Cluster
    op_time_ns: I64  # [N, D] -1 = cannot run there
    allowed: Bool  # [N, D]
    memory_limit_bytes: I64  # [D] at most the device's memory

    def __post_init__(self) -> None:
        for array in (self.op_time_ns, self.allowed, self.memory_limit_bytes):
            array.setflags(write=False)

    @classmethod
    def build(
        cls,
        graph: Graph,
        cluster: Cluster,
        *,
        op_time_ns: I64 | None = None,
        pins: Sequence[tuple[str, str]] = (),
        max_memory_bytes: Mapping[str, int] | None = None,
        reserve: float = 0.0,
    ) -> "Problem":
        """The problem of placing `graph` on `cluster`.

        `op_time_ns` [N, D] replaces the cost model. `pins` are (regular expression, device name): ops whose module
        path or name it matches anywhere go to that device. `max_memory_bytes` lowers the memory of devices by name;
        `reserve` keeps a fraction of every device's memory free. Raises InputError where no device is left for an op or
        a group.
        """
        times = op_times(graph, cluster) if op_time_ns is None else np.ascontiguousarray(op_time_ns, np.int64)
        if times.shape != (graph.num_ops, cluster.num_devices):
            raise InputError(
                f"op_time_ns has shape {times.shape}; "
                f"({graph.num_ops}, {cluster.num_devices}), ops x devices, is expected"
            )
        runnable = times >= 0
        if not runnable.any(axis=1).all():
            op = int(np.argmin(runnable.any(axis=1)))
            raise InputError(
                f"op {op} {graph.op_names[op]!r}: no device of {cluster.name!r} can run it; "
                "give it a time on one or add a device"
            )
        allowed = runnable & _pinned(graph, cluster, pins)
        _intersect_groups(graph, allowed)
        if not allowed.any(axis=1).all():
            op = int(np.argmin(allowed.any(axis=1)))
            where = f"op {op} {graph.op_names[op]!r}"
            if graph.groups[op] >= 0:
                raise InputError(
                    f"{where}: no device can hold its whole group {graph.groups[op]}; "
                    "split the group, relax pins or add a device"
                )
            raise InputError(f"{where}: its pins leave no device that can run it; relax --pin")
        return cls(graph, cluster, times, allowed, _memory_limits(cluster, max_memory_bytes or {}, reserve))

    @property
    def num_ops(self) -> int:
        return self.graph.num_ops

    @property
    def num_devices(self) -> int:
        return self.cluster.num_devices

    @cached_property
    def b_level_ns(self) -> I64:
        """[N] the default priority: mean time over the devices that can run it, plus the longest such path below it."""
        runnable = self.op_time_ns >= 0
        mean_ns = np.where(runnable, self.op_time_ns, 0).sum(axis=1) // np.maximum(runnable.sum(axis=1), 1)
        return longest_paths(self.graph, mean_ns)

    @cached_property
    def fastest_ns(self) -> I64:
        """[N] the op's time on its fastest device."""
        return np.asarray(np.where(self.op_time_ns >= 0, self.op_time_ns, np.iinfo(np.int64).max).min(axis=1))

    @cached_property
    def time_table_ns(self) -> I64:
        """[N, D] `op_time_ns` as the engine takes it: one column [N, 1] where all devices are alike."""
        times = self.op_time_ns
        return np.ascontiguousarray(times[:, :1]) if (times == times[:, :1]).all() else times

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
    def arrays(self) -> engine.Arrays:
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
        if ((values < 0) | (values >= self.num_devices)).any():
            op = int(np.argmax((values < 0) | (values >= self.num_devices)))
            raise InputError(f"placement: op {op} is on device {values[op]}; devices are 0 to {self.num_devices - 1}")
        cannot = self.op_time_ns[np.arange(self.num_ops), values] < 0
        if cannot.any():
            op = int(np.argmax(cannot))
            device = self.cluster.devices[int(values[op])].name
            raise InputError(
                f"placement: op {op} {self.graph.op_names[op]!r} cannot run on {device}; place it elsewhere"
            )
        return values.astype(np.uint8)

    def broken_constraints(self, placement: Placement) -> list[str]:
        """What `placement` breaks besides memory: groups that are split, ops where they are not allowed."""
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


@dataclass(frozen=True, slots=True)
class Baseline:
    """How another placer did on the same problem."""

    status: str  # "ok", "infeasible" (does not fit) or "failed" (found no placement)
    step_time_ns: int | None
    seconds: float


@dataclass(frozen=True, eq=False)
class Search:
    """How a plan was found; not part of a `gdp-plan` file."""

    seconds: float
    simulations: int
    baselines: Mapping[str, Baseline]
    busy_fraction: npt.NDArray[np.float64]  # [D] share of the step in which the device computes
    missing_bytes: I64  # [D] by how much the peak passes the memory limit: all 0 when the plan is feasible
    interrupted: bool = False
    expected_step_time_ns: int | None = None  # mean over perturbed op times, with `robust`


@dataclass(frozen=True, eq=False)
class Plan:
    """A placement and the order of ops on each device, with the figures that a replay gives; a `gdp-plan` file.

    `search` says how it was found when it comes from `gdp.place`; it is None when it was read from a file.
    """

    graph: str  # fingerprint
    cluster: str  # fingerprint
    devices: tuple[str, ...]
    placement: Placement  # [N] device of each op
    order: tuple[I64, ...]  # [D] the ops of each device in the order of their starts
    step_time_ns: int
    peak_memory_bytes: I64  # [D]
    lower_bound_ns: int
    placer: str
    seed: int
    gdp_version: str
    search: Search | None = None

    @property
    def status(self) -> str:
        """ "ok", or "infeasible" when the best placement found does not fit in memory."""
        return "infeasible" if self.search is not None and self.search.missing_bytes.any() else "ok"

    @property
    def gap(self) -> float:
        """How far the step time can at most be from the optimum: 0.1 = at most 10 % above the lower bound."""
        return self.step_time_ns / self.lower_bound_ns - 1.0 if self.lower_bound_ns else 0.0

    def to_document(self) -> dict[str, Any]:
        """The `gdp-plan` document."""
        return {
            "format": FORMAT,
            "version": VERSION,
            "graph": self.graph,
            "cluster": self.cluster,
            "devices": list(self.devices),
            "placement": self.placement.tolist(),
            "order": [ops.tolist() for ops in self.order],
            "step_time_ns": self.step_time_ns,
            "peak_memory_bytes": self.peak_memory_bytes.tolist(),
            "lower_bound_ns": self.lower_bound_ns,
            "placer": self.placer,
            "seed": self.seed,
            "gdp_version": self.gdp_version,
        }

    def save(self, path: str | Path) -> None:
        """Write a `gdp-plan` file, atomically; gzip if `path` ends in `.gz`."""
        files.write_json(path, self.to_document())

    @classmethod
    def load(cls, path: str | Path) -> "Plan":
        """Read a `gdp-plan` file. InputError names the file, the place and the remedy."""
        document = files.read_json(path)
        try:
            return cls.from_document(document)
        except InputError as error:
            raise InputError(f"{path}: {error}") from None

    @classmethod
    def from_document(cls, document: object) -> "Plan":
        """The plan of a `gdp-plan` document; strict."""
        content = files.require_header(document, FORMAT, VERSION)
        files.require_keys(content, "plan", _PLAN_FIELDS, set(_PLAN_FIELDS))
        num_ops, num_devices = len(content["placement"]), len(content["devices"])
        for op, device in enumerate(content["placement"]):
            if not 0 <= device < num_devices:
                raise InputError(f"placement: op {op} is on device {device}; devices are 0 to {num_devices - 1}")
        for name in ("order", "peak_memory_bytes"):
            if len(content[name]) != num_devices:
                raise InputError(f"{name} has {len(content[name])} entries; one per device, {num_devices}, is expected")
        seen = [False] * num_ops
        for device, ops in enumerate(content["order"]):
            for op in ops:
                if not 0 <= op < num_ops:
                    raise InputError(f"order of device {device}: {op} is no op; ops are 0 to {num_ops - 1}")
                if content["placement"][op] != device:
                    raise InputError(
                        f"order of device {device}: op {op} is placed on device {content['placement'][op]}"
                    )
                if seen[op]:
                    raise InputError(f"order of device {device}: op {op} is listed twice; list it once")
                seen[op] = True
        if not all(seen):
            raise InputError(f"order: op {seen.index(False)} is missing; list every op once")
        return cls(
            graph=content["graph"],
            cluster=content["cluster"],
            devices=tuple(content["devices"]),
            placement=np.array(content["placement"], np.int64),
            order=tuple(np.array(ops, np.int64) for ops in content["order"]),
            step_time_ns=content["step_time_ns"],
            peak_memory_bytes=np.array(content["peak_memory_bytes"], np.int64),
            lower_bound_ns=content["lower_bound_ns"],
            placer=content["placer"],
            seed=content["seed"],
            gdp_version=content["gdp_version"],
        )

    def check_belongs(self, graph: Graph, cluster: Cluster) -> None:
        """InputError unless this is a plan of `graph` on `cluster`."""
        if self.graph != graph.fingerprint:
            raise InputError(
                f"the plan is of graph {self.graph[:12]}, not of {graph.name!r} ({graph.fingerprint[:12]}); "
                "place this graph anew"
            )
        if self.cluster != cluster.fingerprint:
            raise InputError(
                f"the plan is for cluster {self.cluster[:12]}, not for {cluster.name!r} ({cluster.fingerprint[:12]}); "
                "place for this cluster anew"
            )


def _is_names(value: object) -> bool:
    """a list of strings"""
    return type(value) is list and all(type(item) is str for item in value)


def _is_orders(value: object) -> bool:
    """a list of lists of integers"""
    return type(value) is list and all(files.is_number_list(item) for item in value)


def _is_sizes(value: object) -> bool:
    """a list of integers from 0 to 2^63 - 1"""
    return type(value) is list and all(files.is_size(item) for item in value)


_PLAN_FIELDS = {
    "format": files.is_string,
    "version": files.is_size,
    "graph": files.is_string,
    "cluster": files.is_string,
    "devices": _is_names,
    "placement": _is_sizes,
    "order": _is_orders,
    "step_time_ns": files.is_size,
    "peak_memory_bytes": _is_sizes,
    "lower_bound_ns": files.is_size,
    "placer": files.is_string,
    "seed": files.is_size,
    "gdp_version": files.is_string,
}


def _pinned(graph: Graph, cluster: Cluster, pins: Iterable[tuple[str, str]]) -> Bool:
    """[N, D] where pins let an op go. InputError for a pin that matches nothing, names no device or contradicts one."""
    allowed = np.ones((graph.num_ops, cluster.num_devices), np.bool_)
    names = [device.name for device in cluster.devices]
    pinned_by: dict[int, tuple[str, str]] = {}
    for pattern, device in pins:
        if device not in names:
            raise InputError(
                f"pin {pattern}={device}: no device {device!r} in {cluster.name!r}; devices: {', '.join(names)}"
            )
        try:
            matches = re.compile(pattern).search
        except re.error as error:
            raise InputError(f"pin {pattern}={device}: not a regular expression ({error}); mend it") from None
        ops = [op for op in range(graph.num_ops) if matches(graph.modules[op]) or matches(graph.op_names[op])]
        if not ops:
            raise InputError(f"pin {pattern}={device}: matches no module path and no op name; see the graph's names")
        for op in ops:
            earlier = pinned_by.setdefault(op, (pattern, device))
            if earlier[1] != device:
                raise InputError(
                    f"pin {pattern}={device}: op {graph.op_names[op]!r} is pinned to {earlier[1]} by {earlier[0]!r}; "
                    "drop one"
                )
        allowed[ops] = False
        allowed[ops, names.index(device)] = True
    return allowed


def _intersect_groups(graph: Graph, allowed: Bool) -> None:
    """Let every op of a group go only where all of them may."""
    grouped = np.flatnonzero(graph.groups >= 0)
    if not len(grouped):
        return
    _, index = np.unique(graph.groups[grouped], return_inverse=True)
    common = np.ones((int(index.max()) + 1, allowed.shape[1]), np.bool_)
    np.logical_and.at(common, index, allowed[grouped])
    allowed[grouped] = common[index]


def _memory_limits(cluster: Cluster, max_memory_bytes: Mapping[str, int], reserve: float) -> I64:
    names = [device.name for device in cluster.devices]
    for name, limit in max_memory_bytes.items():
        if name not in names:
            raise InputError(f"max-memory {name}: no such device in {cluster.name!r}; devices: {', '.join(names)}")
        if limit < 0:
            raise InputError(f"max-memory {name}: is {limit} bytes; at least 0 is expected")
    if not 0 <= reserve < 1:
        raise InputError(f"reserve is {reserve}; a fraction of at least 0 and below 1 is expected, such as 0.1 or 10%")
    limits = [
        min(device.memory_bytes, max_memory_bytes.get(device.name, device.memory_bytes)) for device in cluster.devices
    ]
    return np.array(
        [limit - int(device.memory_bytes * reserve) for limit, device in zip(limits, cluster.devices, strict=True)]
    )


def _flatten(problem: Problem) -> engine.Arrays:
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
    memory = engine.MemoryArrays(
        resident_bytes=graph.resident_bytes,
        alloc_bytes=alloc,
        owner=owner.astype(np.uint32),
        owned_bytes=owned,
        first_uses=np.where(pinned, engine.PINNED, 0).astype(np.int32),
        copy_bytes=sizes,
        producers=producers.astype(np.uint32),
        input_offsets=_offsets(num_inputs),
        inputs=inputs.astype(np.uint32),
        input_producers=producers[inputs].astype(np.uint32),
    )
    return engine.Arrays(
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
