"""Collects the data of a page: a small JSON document, and packed columns of ops, transfers and memory. Times in ns,
sizes in bytes. Names are as in the graph; the page treats them as text."""

import base64
import gzip
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import numpy.typing as npt
import orjson

from gdp.arrays import I64
from gdp.graph.fingerprint import numbered
from gdp.graph.layers import LayerPaths
from gdp.models.serving import ServedStep
from gdp.parallel.step import in_flight, layout_in_flight
from gdp.planning.advice import Advice
from gdp.planning.layout_answer import LayoutAnswer
from gdp.report import sentences
from gdp.report.advice_answer import advice_document, advice_sentences
from gdp.report.batches_answer import of_throughput, serving_sentence
from gdp.report.copies import Copies, exchanges_document
from gdp.report.layouts import layout_document
from gdp.report.limits import Limits, Waits
from gdp.report.memory_curves import MemoryCurve, MemoryParts, alive_at, memory_curves
from gdp.report.tables import short, writable
from gdp.search.place import Progress
from gdp.simulator.plan import Baseline, Plan
from gdp.simulator.simulate import NEVER, Allocations, Simulation
from gdp.simulator.throughput import Throughput

_POINTS = 4000  # of each memory curve: more than a screen has columns
_MOST_FULL = 64  # devices with so many points
_MOST_IN_BYTE = 256  # devices
_LISTED = 40  # tensors that are named at a peak


@dataclass(frozen=True, eq=False)
class PageData:
    """Holds everything that a page shows; None or empty: not known."""

    plan: Plan
    simulation: Simulation
    progress: Sequence[Progress] = ()
    advice: Advice | None = None
    run: Mapping[str, Any] | None = None  # the output of `gdp run --json`
    layouts: LayoutAnswer | None = None  # that were looked at, the plan's first
    amounts: Mapping[str, int] = field(default_factory=dict)  # the samples and tokens of a step
    served: ServedStep | None = None

    @property
    def baselines(self) -> Mapping[str, Baseline]:
        """Returns the baselines of the search."""
        return {} if self.plan.search is None else self.plan.search.baselines


@dataclass(frozen=True, eq=False)
class Lane:
    """Holds a row of the timeline: transfers over one channel, or between two devices without a channel."""

    name: str
    transfers: I64  # by start


def summary(data: PageData) -> dict[str, Any]:
    """Returns the JSON document of a page."""
    plan, simulation = data.plan, data.simulation
    problem = simulation.problem
    allocations = Allocations.of(simulation)
    curves = memory_curves(simulation, allocations)
    parts = MemoryParts.of(simulation, allocations)
    copies = Copies(simulation)
    replicas = copies.device_replicas().tolist()
    counts = np.bincount(simulation.placement, minlength=problem.num_devices).tolist()
    search = plan.search
    devices = [
        {
            "name": writable(device.name),
            "kind": writable(device.kind),
            "busy": float(simulation.busy_fraction[number]),
            "host_wait": float(simulation.host_wait_fraction[number]),
            "ops": counts[number],
            "limit": int(problem.memory_limit_bytes[number]),
            "replica": replicas[number],
            "parts": parts.at(number, curves[number].peak_ns),
            **_peak(simulation, allocations, curves[number]),
        }
        for number, device in enumerate(problem.cluster.devices)
    ]
    seconds = None if search is None else search.seconds
    placers = [
        {"name": writable(plan.placer), "status": "ok", "ns": plan.step_time_ns, "seconds": seconds, "plan": True},
        *(
            {"name": writable(name), "status": each.status, "ns": each.step_time_ns, "seconds": each.seconds}
            for name, each in data.baselines.items()
        ),
    ]
    num_microbatches, step_range = sentences.num_microbatches(simulation), simulation.step_range
    stream = plan.layout if in_flight(plan.layout) else None
    figures = None if stream is None else Throughput.of(simulation, layout_in_flight(stream))
    headline = sentences.headline(plan, data.baselines, num_microbatches, step_range)
    headline = headline if figures is None else of_throughput(figures)
    told = (
        *([] if data.served is None else [serving_sentence(data.served, simulation, plan.layout)]),
        *(() if stream else sentences.of_speed(simulation, data.amounts if data.served is None else {})),
        str(_shortened(Limits.of(simulation))),
        *sentences.of_groups(problem),
        *sentences.of_held_memory(problem.graph),
        sentences.of_full_devices(simulation, short),
        sentences.of_updates(simulation, short),
        sentences.of_empty_devices(simulation, short, searched=sentences.is_searched(plan)),
        *([] if search is None else sentences.of_search(search, simulation)),
    )
    return {
        "graph": writable(problem.graph.name),
        "cluster": writable(problem.cluster.name),
        "ops": problem.num_ops,
        "tensors": problem.graph.num_tensors,
        "transfers": len(simulation.transfer_tensors),
        "placer": writable(plan.placer),
        "seed": plan.seed,
        "version": writable(plan.gdp_version),
        "headline": headline,
        "reasons": [writable(short(reason)) for reason in simulation.reasons],
        "bound": sentences.of_bound(plan.step_time_ns, plan.lower_bound_ns, num_microbatches, copies.num_replicas),
        "layout": layout_document(plan, data.layouts, problem.graph),
        "replicas": copies.num_replicas,
        "alike": copies.are_alike(),
        "exchanges": exchanges_document(simulation),
        "sentences": [writable(sentence) for sentence in told if sentence],
        "against": [
            (ratio, writable(text)) for ratio, text in sentences.against(plan, data.baselines, num_microbatches)
        ],
        "throughput": figures and figures.document(),
        "step_ns": simulation.step_time_ns,
        "step_range_ns": step_range and step_range.of(simulation.step_time_ns),
        "bound_ns": plan.lower_bound_ns,
        "seconds": seconds,
        "simulations": None if search is None else search.simulations,
        "devices": devices,
        "placers": placers,
        "progress": [[item.seconds, item.step_time_ns, item.feasible] for item in data.progress],
        "advice": None
        if data.advice is None
        else advice_document(data.advice) | {"sentences": [*advice_sentences(data.advice, simulation)]},
        "run": data.run,
    }


def columns(data: PageData) -> str:
    """Returns the packed columns of a page."""
    simulation = data.simulation
    graph, placement = simulation.problem.graph, simulation.placement
    waits = Waits.of(simulation)
    allocations = Allocations.of(simulation)
    lanes = transfer_lanes(simulation)
    kinds, kind_of = _numbered(graph.kinds)
    modules, module_of = _numbered(graph.modules)
    copies = Copies(simulation)
    phases, phase_of = _numbered(copies.phases())
    names, name_of, name_microbatch = copies.names()
    made_bytes = np.zeros(graph.num_ops, np.int64)
    owned = graph.view_of < 0
    np.add.at(made_bytes, graph.producers[owned], graph.tensor_bytes[owned])
    num_points = _POINTS * _MOST_FULL // max(simulation.problem.num_devices, _MOST_FULL)
    curves = [curve.thinned(num_points) for curve in memory_curves(simulation, allocations)]
    producers = graph.producers[simulation.transfer_tensors]
    path = [-1 - step.number if step.is_transfer else step.number for step in waits.path]
    layers = LayerPaths.of(graph)
    microbatch = simulation.problem.microbatch
    device_type = "u1" if simulation.problem.num_devices <= _MOST_IN_BYTE else "i4"
    has_microbatches = sentences.num_microbatches(simulation) > 1
    hosted = slice(None if simulation.problem.simulator.has_hosts else 0)  # all ops, or none
    header = {
        "names": names,
        "kinds": kinds,
        "modules": modules,
        "phases": phases,
        "lanes": [writable(lane.name) for lane in lanes],
        "layers": [writable(name) for name in layers.names],
        "layerLists": [writable(name) for name in layers.lists],
        "layerOf": [layers.of_module[module] for module in dict.fromkeys(graph.modules)],
    }
    return pack(
        header,
        {
            "name": ("i4", name_of),
            "nameMicrobatch": ("i4", name_microbatch if name_microbatch.any() else []),
            "replica": ("i4", copies.replica if copies.num_replicas > 1 else []),
            "kind": ("i4", kind_of),
            "module": ("i4", module_of),
            "phase": ("u1", phase_of),
            "microbatch": ("i4", microbatch if has_microbatches else []),
            "device": (device_type, placement),
            "start": ("f8", simulation.op_begin_ns),
            "finish": ("f8", simulation.op_finish_ns),
            "taken": ("f8", simulation.op_start_ns[hosted]),  # by its device, which then waits for the host
            "issueStart": ("f8", simulation.host_issue_ns[0, hosted]),
            "issueEnd": ("f8", simulation.host_issue_ns[1, hosted]),
            "ready": ("f8", waits.ready_ns),
            "after": ("u1", waits.after),
            "lastInput": ("i4", np.append(graph.producers, -1)[waits.last_input]),
            "lastTransfer": ("i4", waits.last_transfer),
            "flops": ("f8", graph.flops),
            "made": ("f8", made_bytes),
            "resident": ("f8", graph.resident_bytes),
            "order": ("i4", np.concatenate(simulation.order)),
            "orderOffsets": ("i4", _offsets([len(ops) for ops in simulation.order])),
            "sentBy": ("i4", producers),
            "from": (device_type, placement[producers]),
            "to": (device_type, simulation.transfer_destinations),
            "sentBytes": ("f8", graph.tensor_bytes[simulation.transfer_tensors]),
            "sentStart": ("f8", simulation.transfer_start_ns),
            "sentEnd": ("f8", simulation.transfer_end_ns),
            "arrival": ("f8", simulation.transfer_arrival_ns),
            "sentAfter": ("i4", waits.transfer_before),
            "laneTransfers": ("i4", np.concatenate([lane.transfers for lane in lanes] or [np.zeros(0, np.int64)])),
            "laneOffsets": ("i4", _offsets([len(lane.transfers) for lane in lanes])),
            "edgeFrom": ("i4", graph.producers[graph.edge_tensors]),
            "edgeTo": ("i4", graph.consumers),
            "edgeBytes": ("f8", graph.tensor_bytes[graph.edge_tensors]),
            "path": ("i4", path),
            "pathAfter": ("u1", [step.after for step in waits.path]),
            "memoryTimes": ("f8", np.concatenate([times for times, _ in curves])),
            "memoryBytes": ("f8", np.concatenate([used for _, used in curves])),
            "memoryOffsets": ("i4", _offsets([len(times) for times, _ in curves])),
        },
    )


def transfer_lanes(simulation: Simulation) -> list[Lane]:
    """Returns the channels in use, in the cluster's order, then the routes without a channel."""
    cluster = simulation.problem.cluster
    sources = simulation.placement[simulation.problem.graph.producers[simulation.transfer_tensors]]
    by_channel: list[list[int]] = [[] for _ in cluster.channels]
    without: dict[str, list[int]] = {}
    by_start = np.argsort(simulation.transfer_start_ns, kind="stable")
    for transfer in by_start.tolist():
        source, target = int(sources[transfer]), int(simulation.transfer_destinations[transfer])
        for channel in cluster.route_channels[source][target]:
            by_channel[channel].append(transfer)
        if not cluster.route_channels[source][target]:
            name = f"{cluster.devices[source].name}->{cluster.devices[target].name} (unshared)"
            without.setdefault(name, []).append(transfer)
    named = [*zip(cluster.channels, by_channel, strict=True), *sorted(without.items())]
    return [Lane(name, np.array(transfers, np.int64)) for name, transfers in named if transfers]


def _peak(simulation: Simulation, allocations: Allocations, curve: MemoryCurve) -> dict[str, Any]:
    """Returns the memory of a device at its peak, with the largest tensors."""
    graph = simulation.problem.graph
    rows = alive_at(allocations, curve.device, curve.peak_ns)
    alive = [
        {
            "op": int(graph.producers[allocations.tensors[row]]),
            "bytes": int(allocations.sizes_bytes[row]),
            "copy": bool(allocations.is_copy[row]),
            "from": int(allocations.from_ns[row]),
            "until": None if allocations.until_ns[row] == NEVER else int(allocations.until_ns[row]),
        }
        for row in rows[:_LISTED].tolist()
    ]
    more = max(len(rows) - _LISTED, 0)
    return {"peak": curve.peak_bytes, "peak_at": curve.peak_ns, "alive": alive, "alive_more": more}


def _shortened(limits: Limits) -> Limits:
    first, last = map(short, limits.path_ends)
    device, channel, host = map(short, (limits.device, limits.channel, limits.host))
    return replace(limits, device=device, channel=channel, host=host, path_ends=(first, last))


def _numbered(names: Sequence[str]) -> tuple[list[str], npt.NDArray[np.int64]]:
    distinct, numbers = numbered(names)
    return list(map(writable, distinct)), numbers


def _offsets(counts: Sequence[int]) -> npt.NDArray[np.int64]:
    return np.concatenate(([0], np.cumsum(counts, dtype=np.int64)))


_MAGIC = b"GDP1"
_LARGE_BYTES = 2**25  # more is packed less tightly, three times as fast
_TYPES = {"f8": "<f8", "i4": "<i4", "u1": "u1"}


def pack(header: Mapping[str, Any], columns: Mapping[str, tuple[str, npt.ArrayLike]]) -> str:
    """Returns the text of `header` and of columns by name: (type "f8", "i4" or "u1", values)."""
    body = bytearray()
    places: dict[str, tuple[str, int, int]] = {}
    for name, (kind, values) in columns.items():
        array = np.ascontiguousarray(values).astype(_TYPES[kind])
        places[name] = (kind, len(body), array.size)
        body += array.tobytes()
        body += bytes(-len(body) % 8)
    head = orjson.dumps({**header, "columns": places})
    start = _MAGIC + struct.pack("<I", len(head)) + head
    level = 6 if len(body) < _LARGE_BYTES else 1
    packed = gzip.compress(start + bytes(-len(start) % 8) + bytes(body), compresslevel=level, mtime=0)
    return base64.b64encode(packed).decode()
