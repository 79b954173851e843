"""The machine model in plain Python: docs/machine-model.md, sections 3 to 4, transcribed rule by rule.

The oracle that faster code is compared with, so it shares nothing with it and prefers the literal to the quick:
readiness is looked up anew whenever a device is idle, and memory is computed afterwards, from the finished schedule.
`graph` and `cluster` are only read, into plain lists; any objects with those attributes will do.
"""

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from gdp.cluster import Cluster
    from gdp.graph import Graph


class DeadlockError(Exception):
    """Replay: devices wait for each other; some op can never start."""


class TensorData(NamedTuple):
    producer: int
    consumers: list[int]
    bytes: int
    resident: bool
    keep: bool
    view_of: int


class Transfer(NamedTuple):
    """One sending of a tensor to a device; equal to the tuple of its fields."""

    tensor: int
    destination: int
    start_ns: int
    occupancy_end_ns: int
    arrival_ns: int


@dataclass(frozen=True)
class Inputs:
    """All that a simulation reads, in plain lists."""

    resident_bytes: list[int]  # [N]
    tensors: list[TensorData]  # [T]
    inputs: list[list[int]]  # [N] the tensors that each op consumes
    outputs: list[list[int]]  # [N] the tensors that each op produces
    latency_ns: list[list[int]]  # [D][D]
    bytes_per_second: list[list[int]]  # [D][D]
    route_channels: list[list[list[int]]]  # [D][D] the channels of each route
    op_time_ns: list[list[int]]  # [N][D]
    host_time_ns: list[list[int]]  # [N][D]
    host_waits: list[bool]  # [N]
    placement: list[int]  # [N]

    @property
    def num_ops(self) -> int:
        return len(self.resident_bytes)

    @property
    def num_devices(self) -> int:
        return len(self.latency_ns)

    def time_ns(self, op: int) -> int:
        return self.op_time_ns[op][self.placement[op]]


@dataclass(frozen=True)
class Schedule:
    """A finished step: times in ns, transfers in the order in which they were requested."""

    op_start_ns: list[int]  # [N]
    op_begin_ns: list[int]  # [N] when it begins to compute: from its start on it holds its device
    host_issue_ns: list[list[int]]  # [2][N] when its host begins to issue it, and when it has
    op_finish_ns: list[int]  # [N]
    transfers: list[Transfer]
    order: list[list[int]]  # [D] the ops of each device in the order in which it started them
    step_time_ns: int
    peak_memory_bytes: list[int]  # [D]


def read_inputs(
    graph: "Graph", cluster: "Cluster", op_time_ns: Any, placement: Iterable[int], host_time_ns: Any = None
) -> Inputs:
    """`graph`, `cluster`, `op_time_ns` [N, D], `placement` [N] and `host_time_ns` [N, D] (default: 0) as plain lists.

    Raises ValueError if an op is placed where it cannot run: such a placement has no step time.
    """
    tensors = [
        TensorData(
            int(graph.producers[number]), _ints(graph.consumers_of(number)), int(graph.tensor_bytes[number]),
            bool(graph.is_resident[number]), bool(graph.is_kept[number]), int(graph.view_of[number]),
        )
        for number in range(graph.num_tensors)
    ]  # fmt: skip
    no_hosts = [[0] * len(row) for row in op_time_ns]
    inputs = Inputs(
        resident_bytes=_ints(graph.resident_bytes),
        tensors=tensors,
        inputs=[[k for k, tensor in enumerate(tensors) if op in tensor.consumers] for op in range(graph.num_ops)],
        outputs=[[k for k, tensor in enumerate(tensors) if op == tensor.producer] for op in range(graph.num_ops)],
        latency_ns=[_ints(row) for row in cluster.latency_ns],
        bytes_per_second=[_ints(row) for row in cluster.bytes_per_second],
        route_channels=[[_ints(channels) for channels in row] for row in cluster.route_channels],
        op_time_ns=[_ints(row) for row in op_time_ns],
        host_time_ns=[_ints(row) for row in (no_hosts if host_time_ns is None else host_time_ns)],
        host_waits=[bool(waits) for waits in graph.host_waits],
        placement=_ints(placement),
    )
    for op in range(inputs.num_ops):
        if inputs.time_ns(op) < 0:
            raise ValueError(f"op {op} cannot run on device {inputs.placement[op]}: the placement has no step time")
    return inputs


def b_levels(graph: "Graph", op_time_ns: Any) -> list[int]:
    """[N] b(v) = m(v) + max(b(w) for w consuming v, else 0), m(v) the mean time where v can run, rounded down."""
    levels = [0] * graph.num_ops
    for op in reversed(range(graph.num_ops)):
        times = [time for time in _ints(op_time_ns[op]) if time >= 0]
        mean = sum(times) // len(times) if times else 0
        produced = [k for k in range(graph.num_tensors) if graph.producers[k] == op]
        levels[op] = mean + max((levels[w] for k in produced for w in _ints(graph.consumers_of(k))), default=0)
    return levels


def run(
    graph: "Graph",
    cluster: "Cluster",
    op_time_ns: Any,
    placement: Iterable[int],
    priority: Iterable[int] | None = None,
    host_time_ns: Any = None,
) -> Schedule:
    """The step under `placement` [N], ops dispatched by `priority` [N] (default: `b_levels`)."""
    inputs = read_inputs(graph, cluster, op_time_ns, placement, host_time_ns)
    priorities = b_levels(graph, op_time_ns) if priority is None else _ints(priority)

    def choose(ready: list[int], device: int, num_started: int) -> int | None:
        return min(ready, key=lambda op: (-priorities[op], op), default=None)

    return _execute(inputs, choose)


def replay(
    graph: "Graph",
    cluster: "Cluster",
    op_time_ns: Any,
    placement: Iterable[int],
    order: Iterable[Iterable[int]],
    host_time_ns: Any = None,
) -> Schedule:
    """The step in which each device starts its ops in the order `order` [D] lists them.

    Raises DeadlockError if that order never ends, ValueError if it does not list each device's ops exactly once.
    """
    inputs = read_inputs(graph, cluster, op_time_ns, placement, host_time_ns)
    orders = [_ints(ops) for ops in order]
    placed = [[op for op in range(inputs.num_ops) if inputs.placement[op] == d] for d in range(inputs.num_devices)]
    if [sorted(ops) for ops in orders] != placed:
        raise ValueError(f"order {orders} does not list the ops of each device once; they are {placed}")

    def choose(ready: list[int], device: int, num_started: int) -> int | None:
        following = orders[device][num_started : num_started + 1]
        return following[0] if following and following[0] in ready else None

    return _execute(inputs, choose)


def _execute(inputs: Inputs, choose: Callable[[list[int], int, int], int | None]) -> Schedule:
    """Section 3. `choose(ready ops, device, number of ops it has started)` is the op that an idle device starts."""
    start: dict[int, int] = {}
    begin: dict[int, int] = {}
    host_clock = [0] * inputs.num_devices
    issue: dict[int, tuple[int, int]] = {}
    finish: dict[int, int] = {}
    order: list[list[int]] = [[] for _ in range(inputs.num_devices)]
    running: dict[int, int] = {}  # device -> op
    there: set[tuple[int, int]] = set()  # (tensor, device)
    transfers: list[Transfer] = []
    in_flight: list[Transfer] = []
    channel_free: dict[int, int] = {}

    def is_ready(op: int) -> bool:  # rule 1
        return all((tensor, inputs.placement[op]) in there for tensor in inputs.inputs[op])

    def start_one(device: int) -> int | None:  # rule 2
        waiting = [op for op in range(inputs.num_ops) if inputs.placement[op] == device and op not in start]
        op = choose([op for op in waiting if is_ready(op)], device, len(order[device]))
        if op is not None:
            issue[op] = host_clock[device], host_clock[device] + inputs.host_time_ns[op][device]  # section 3a
            host_clock[device] = issue[op][1]
            start[op], begin[op] = now, max(now, host_clock[device])
            finish[op] = begin[op] + inputs.time_ns(op)
            if inputs.host_waits[op]:
                host_clock[device] = max(host_clock[device], finish[op])
            order[device].append(op)
            running[device] = op
        return op

    def complete(op: int) -> None:  # rule 3
        source = inputs.placement[op]
        del running[source]
        there.update((tensor, source) for tensor in inputs.outputs[op])
        requests = {
            (inputs.placement[consumer], tensor)
            for tensor in inputs.outputs[op]
            for consumer in inputs.tensors[tensor].consumers
            if inputs.placement[consumer] != source
        }
        for destination, tensor in sorted(requests):
            request(tensor, source, destination)

    def request(tensor: int, source: int, destination: int) -> None:  # rule 3
        channels = inputs.route_channels[source][destination]
        occupancy = -(-inputs.tensors[tensor].bytes * 10**9 // inputs.bytes_per_second[source][destination])
        starts = max([now, *(channel_free.get(channel, 0) for channel in channels)])
        ends = starts + occupancy
        channel_free.update((channel, ends) for channel in channels)
        transfer = Transfer(tensor, destination, starts, ends, ends + inputs.latency_ns[source][destination])
        transfers.append(transfer)
        in_flight.append(transfer)

    now = 0
    while True:  # rule 4
        while any(finish[op] == now for op in running.values()) or any(t.arrival_ns == now for t in in_flight):
            for op in sorted(op for op in running.values() if finish[op] == now):
                complete(op)
            for transfer in sorted(t for t in in_flight if t.arrival_ns == now):
                in_flight.remove(transfer)
                there.add((transfer.tensor, transfer.destination))
        started = [start_one(device) for device in range(inputs.num_devices) if device not in running]
        if any(op is not None and finish[op] == now for op in started):
            continue
        upcoming = [finish[op] for op in running.values()] + [transfer.arrival_ns for transfer in in_flight]
        if not upcoming:
            break
        now = min(upcoming)

    if len(start) < inputs.num_ops:
        stuck = [op for op in range(inputs.num_ops) if op not in start]
        raise DeadlockError(f"ops {stuck} never start: each device waits for an op that comes later")
    starts, finishes = [start[op] for op in range(inputs.num_ops)], [finish[op] for op in range(inputs.num_ops)]
    return Schedule(
        op_start_ns=starts,
        op_begin_ns=[begin[op] for op in range(inputs.num_ops)],
        host_issue_ns=[[issue[op][end] for op in range(inputs.num_ops)] for end in range(2)],
        op_finish_ns=finishes,
        transfers=transfers,
        order=order,
        step_time_ns=max([*finishes, *(transfer.arrival_ns for transfer in transfers)]),  # rule 5
        peak_memory_bytes=_peak_memory(inputs, starts, finishes, transfers),
    )


class Holding(NamedTuple):
    """Memory held on a device over [allocated_ns, freed_ns): empty if both are equal."""

    device: int
    allocated_ns: int
    freed_ns: float  # math.inf: never
    bytes: int


def holdings(inputs: Inputs, start: list[int], finish: list[int], transfers: list[Transfer]) -> list[Holding]:
    """Section 4, from a finished schedule: all tensors and copies; `resident_bytes` are not among them."""
    held = []
    for number, tensor in enumerate(inputs.tensors):
        if tensor.resident or tensor.view_of != -1:
            continue
        device = inputs.placement[tensor.producer]
        parts = [number] + [k for k, other in enumerate(inputs.tensors) if other.view_of == number]
        consumers = [op for k in parts for op in inputs.tensors[k].consumers if inputs.placement[op] == device]
        ends = [transfer.occupancy_end_ns for transfer in transfers if transfer.tensor in parts]
        freed = max([finish[tensor.producer], *(finish[op] for op in consumers), *ends])
        is_kept = any(inputs.tensors[k].keep for k in parts)
        held.append(Holding(device, start[tensor.producer], math.inf if is_kept else freed, tensor.bytes))
    for transfer in transfers:
        tensor = inputs.tensors[transfer.tensor]
        consumers = [op for op in tensor.consumers if inputs.placement[op] == transfer.destination]
        freed = max(finish[op] for op in consumers)
        held.append(Holding(transfer.destination, transfer.start_ns, freed, tensor.bytes))
    return held


def _peak_memory(inputs: Inputs, start: list[int], finish: list[int], transfers: list[Transfer]) -> list[int]:
    """[D] the most bytes held at any instant; holdings grow only at the instants of an allocation."""
    held = holdings(inputs, start, finish, transfers)
    peaks = []
    for device in range(inputs.num_devices):
        here = [holding for holding in held if holding.device == device]
        totals = [
            sum(other.bytes for other in here if other.allocated_ns <= instant < other.freed_ns)
            for instant in {holding.allocated_ns for holding in here}
        ]
        resident = sum(b for op, b in enumerate(inputs.resident_bytes) if inputs.placement[op] == device)
        peaks.append(resident + max(totals, default=0))
    return peaks


def _ints(values: Any) -> list[int]:
    return [int(value) for value in values]
