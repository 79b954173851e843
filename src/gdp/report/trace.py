"""Writes a simulated step as a trace in Chrome's Trace Event Format, for Perfetto and chrome://tracing.

    process 1, devices     a thread each: ops as complete events ("X"), memory as a counter ("C")
    process 2, channels    a thread each: transfers
    arrows ("s", "t", "f") from the op that makes a tensor over its transfer to the op that reads it first

Times are microseconds, as the format has it, with the nanoseconds after the point.
Source: "Trace Event Format", the document that Chromium's tracing refers to.
"""

import heapq
import re
from collections.abc import Iterator
from typing import Any

import numpy as np

from gdp.report.copies import Copies
from gdp.report.memory_curves import memory_curves
from gdp.report.page_data import transfer_lanes
from gdp.report.tables import writable
from gdp.report.waits import AFTER_TRANSFER, AT_ONCE, DEVICE_BUSY, Waits
from gdp.simulator.allocations import Allocations
from gdp.simulator.simulate import Simulation

_DEVICES, _CHANNELS = 1, 2
_WHY = {AT_ONCE: "starts with the step", AFTER_TRANSFER: "a transfer", DEVICE_BUSY: "the device"}


def trace_document(simulation: Simulation) -> dict[str, Any]:
    """Returns the trace of a step."""
    graph, cluster = simulation.problem.graph, simulation.problem.cluster
    events = [*_names(simulation), *_ops(simulation), *_transfers(simulation), *_memory(simulation)]
    return {
        "traceEvents": events,
        "displayTimeUnit": "ns",
        "otherData": {
            "graph": writable(graph.name),
            "cluster": writable(cluster.name),
            "step_time_ns": simulation.step_time_ns,
        },
    }


def _names(simulation: Simulation) -> Iterator[dict[str, Any]]:
    for process, title in ((_DEVICES, "devices"), (_CHANNELS, "channels")):
        yield _named("process_name", process, 0, name=title)
        yield _named("process_sort_index", process, 0, sort_index=process)
    for number, device in enumerate(simulation.problem.cluster.devices):
        yield _named("thread_name", _DEVICES, number + 1, name=_shown(f"{device.name} ({device.kind})"))
        yield _named("thread_sort_index", _DEVICES, number + 1, sort_index=number)


def _event(kind: str, name: str, place: tuple[int, int], time_us: float, **more: object) -> dict[str, Any]:
    """Returns an event of a `place`: a process and a thread."""
    return {"ph": kind, "name": name, "pid": place[0], "tid": place[1], "ts": time_us, **more}


def _named(event: str, process: int, thread: int, **args: object) -> dict[str, Any]:
    return _event("M", event, (process, thread), 0, args=args)


def _slice(name: str, category: str, place: tuple[int, int], times_ns: tuple[int, int], args: object) -> dict[str, Any]:
    start, end = times_ns
    return _event("X", name, place, start / 1000, cat=category, dur=(end - start) / 1000, args=args)


def _ops(simulation: Simulation) -> Iterator[dict[str, Any]]:
    graph = simulation.problem.graph
    waits = Waits.of(simulation)
    starts, ends = simulation.op_start_ns.tolist(), simulation.op_finish_ns.tolist()
    copies = Copies(simulation)
    names, base, _ = copies.names()
    microbatches = simulation.problem.microbatch.tolist() if copies.has_copies else []
    replicas = copies.replica.tolist() if copies.num_replicas > 1 else []
    ready, after, devices = waits.ready_ns.tolist(), waits.after.tolist(), simulation.placement.tolist()
    for op, number in enumerate(base.tolist()):
        args = {
            "kind": _shown(graph.kinds[op]),
            "module": _shown(graph.modules[op]),
            "op": op,
            "flops": int(graph.flops[op]),
            "ready_ns": ready[op],
            "waited_for": _WHY.get(after[op], "an input"),
            **({"micro-batch": microbatches[op]} if microbatches and microbatches[op] >= 0 else {}),
            **({"replica": replicas[op]} if replicas else {}),
        }
        place, times_ns = (_DEVICES, devices[op] + 1), (starts[op], ends[op])
        yield _slice(_shown(names[number]), graph.phases[op] or "op", place, times_ns, args)


def _transfers(simulation: Simulation) -> Iterator[dict[str, Any]]:
    """Yields slices on every channel that a transfer occupies, and one chain of arrows for each transfer."""
    graph, devices = simulation.problem.graph, simulation.problem.cluster.devices
    starts, ends = simulation.transfer_start_ns.tolist(), simulation.transfer_end_ns.tolist()
    producers = graph.producers[simulation.transfer_tensors].tolist()
    drawn: dict[int, int] = {}  # the thread of each transfer's first slice
    thread = 0
    for lane in transfer_lanes(simulation):
        # without a channel, transfers overlap: one thread for each that is under way at the same time
        free: list[tuple[int, int]] = []
        threads: list[int] = []
        for transfer in lane.transfers.tolist():
            if free and free[0][0] <= starts[transfer]:
                _, slot = heapq.heappop(free)
            else:
                thread += 1
                slot = thread
                threads.append(slot)
            heapq.heappush(free, (ends[transfer], slot))
            drawn.setdefault(transfer, slot)
            source, target = simulation.placement[producers[transfer]], simulation.transfer_destinations[transfer]
            args = {
                "bytes": int(graph.tensor_bytes[simulation.transfer_tensors[transfer]]),
                "from": _shown(devices[source].name),
                "to": _shown(devices[target].name),
                "arrival_ns": int(simulation.transfer_arrival_ns[transfer]),
            }
            name, times_ns = _shown(graph.op_names[producers[transfer]]), (starts[transfer], ends[transfer])
            yield _slice(name, "transfer", (_CHANNELS, slot), times_ns, args)
        for number, slot in enumerate(threads):
            name = lane.name if len(threads) == 1 else f"{lane.name} {number + 1}"
            yield _named("thread_name", _CHANNELS, slot, name=_shown(name))
            yield _named("thread_sort_index", _CHANNELS, slot, sort_index=slot)
    yield from _arrows(simulation, drawn)


def _arrows(simulation: Simulation, drawn: dict[int, int]) -> Iterator[dict[str, Any]]:
    """Yields arrows between middles: the op that makes a tensor, its transfer, the first op that reads it."""
    graph, placement = simulation.problem.graph, simulation.placement
    op_middle = (simulation.op_start_ns + simulation.op_finish_ns) / 2000
    sent_middle = (simulation.transfer_start_ns + simulation.transfer_end_ns) / 2000
    for transfer, slot in drawn.items():
        tensor, target = int(simulation.transfer_tensors[transfer]), int(simulation.transfer_destinations[transfer])
        consumers = graph.consumers_of(tensor)
        there = consumers[placement[consumers] == target]
        reader = int(there[np.argmin(simulation.op_start_ns[there])])
        producer = int(graph.producers[tensor])
        of_it = {"id": transfer, "cat": "transfer"}
        yield _event("s", "tensor", (_DEVICES, int(placement[producer]) + 1), float(op_middle[producer]), **of_it)
        yield _event("t", "tensor", (_CHANNELS, slot), float(sent_middle[transfer]), **of_it)
        yield _event("f", "tensor", (_DEVICES, target + 1), float(op_middle[reader]), **of_it, bp="e")


def _memory(simulation: Simulation) -> Iterator[dict[str, Any]]:
    """Yields the counter of each device."""
    for curve in memory_curves(simulation, Allocations.of(simulation)):
        name = _shown(f"memory of {simulation.problem.cluster.devices[curve.device].name}")
        for time_ns, used in zip(curve.times_ns.tolist(), curve.used_bytes.tolist(), strict=True):
            yield _event("C", name, (_DEVICES, 0), time_ns / 1000, args={"bytes": used})


def _shown(name: str) -> str:
    """Returns `name` without control characters: a string with one makes Perfetto show all its escapes."""
    return re.sub(r"[\x00-\x1f]", " ", writable(name))
