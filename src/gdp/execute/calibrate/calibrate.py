"""Calibration: measures this machine's devices, and the routes between them, as a cluster.

Every kind of work runs on all devices at once, since a placed step runs so: cores share memory, caches and the clock's
margin. All figures are medians, since other processes disturb some.

Launch overhead and latency come from chains of tiny ops, captured and run as a plan is:

    launch    cpu0   add add add add add         time of an add, from start to finish
    latency   cpu0   add     add     add         time by which a hand-over lengthens the chain,
              cpu1       add     add             the mean of both directions

Between processes on cores, chains of larger tensors give the bandwidth: each is copied into shared memory, and the next
op reads what another core has just written.

Classes of kernels reach other shares of these rates. A step of a model with layers of all classes is run on all
processor cores at once. An op takes its kernels' time at the figures of the device, divided by the share of their
class: the median over ops and sizes, in the caches and out of them, each counted by its modelled time: other programs
do not change that. Ops of one class tell its share first, then those of several what they have besides.

Copies from and to CUDA devices are those of the backends. Two routes whose copies slow each other down share a channel.

Over processes and hosts each rank measures its own device, then tensors go from rank to rank.

    every rank   its device's figures, all at the same time
    each pair    a   add     add     add         for each size the time by which a hand-over lengthens a chain of
                 b       add     add             tensors, the mean of both directions

A line through the times of the sizes gives a route's latency and bandwidth."""

import os
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional

from gdp.arrays import I64
from gdp.cluster import Cluster, Device, Route
from gdp.cluster.achieved import OF_FLOPS, figures_of_kind, scaled, share
from gdp.cluster.catalogue import KINDS
from gdp.cluster.detect import Detected
from gdp.cluster.groups import AS_FAST
from gdp.costs.cores import launches_on_core
from gdp.costs.kernels import CLASSES, kernels_of
from gdp.costs.rates import times_on_core
from gdp.costs.table import rule_of
from gdp.execute.backends import Target, target_of
from gdp.execute.calibrate.measured_routes import routes_between
from gdp.execute.calibrate.work import (
    FULL,
    MIB,
    QUICK,
    Extent,
    Log,
    Work,
    cache_bytes,
    job_of,
    launches,
    per_second,
    together,
    unable,
    whole,
)
from gdp.execute.equality import full_precision
from gdp.execute.measurement import PlacedProgram, measure_programs
from gdp.graph import Graph
from gdp.models.pytorch import capture

_DTYPES = {dtype: getattr(torch, dtype) for dtype in ("float32", "float64", "float16", "bfloat16")}
_HAS_TF32 = (8, 0)  # compute capability; half as fast as products of halves on every such card
_OF_PRODUCTS = "bfloat16", "float16", "float32"  # whose rate tells a card's share: the first that it has
_WORDS, _NUM_LOGITS, _STEPS = 10_000, 1_000, 5
_LEAST = 0.1  # of an op's time, that kernels of a class have which others leave less
# Classes that tell of others
_LIKE = {"tf32_transpose": "copy", **dict.fromkeys(("weight_transpose", "conflicting_read"), "transposed_copy")}
_NO_LAUNCHES = 3  # ops that take as many launches or fewer tell nothing of rates


class Probe(nn.Module):
    """Layers of all classes of kernels, one after the other."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.first = nn.Conv2d(3, width, 4, 4)
        self.dense, self.small = nn.Conv2d(width, width, 3, padding=1), nn.Conv2d(width, width, 1)
        self.grouped = nn.Conv2d(width, width, 3, padding=1, groups=4)
        self.depthwise = nn.ModuleList(nn.Conv2d(width, width, k, padding=k // 2, groups=width) for k in (3, 5, 7))
        self.norms = nn.ModuleList([nn.BatchNorm2d(width), nn.LayerNorm(width)])
        self.words, self.wide = nn.Embedding(_WORDS, width), nn.Linear(width, 3 * width)
        self.head = nn.Linear(2 * width, _NUM_LOGITS)

    def forward(self, images: Tensor, words: Tensor) -> Tensor:
        x = self.grouped(functional.gelu(self.dense(self.first(images))))
        for layer in self.depthwise:
            x = x + functional.relu(self.norms[0](self.small(layer(x))))
        rows = functional.max_pool2d(x, 3, 1, 1).flatten(2).transpose(1, 2).contiguous()
        y = functional.dropout(self.norms[1](rows + self.words(words)), 0.1)
        q, k, v = self.wide(y).unflatten(2, (3, 4, -1)).permute(2, 0, 3, 1, 4)
        y = functional.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)
        place = words % y.shape[1]
        index = place.unsqueeze(2).expand_as(y)
        y = y + torch.zeros_like(y).scatter_add(1, index, y.gather(1, index))
        y = torch.cat([y, y.index_select(1, place[0])], 2)
        y = y.softmax(2) * y.sigmoid()
        loss = functional.cross_entropy(self.head(y).flatten(0, 1), place.flatten())
        return loss + y.sum(1).square().mean()


def as_card(measured: Device) -> Device:
    """Returns a GPU with the cost model of its kind, whose products and passes reach what was measured; a CPU as it is.
    A card without a data sheet here reaches what was measured of any card."""
    if measured.is_cpu:
        return measured
    figures = figures_of_kind(measured.kind)
    card = replace(measured, issue_ns=figures.issue_ns, achieved=figures.achieved)
    if (built_in := KINDS.get(measured.kind)) is not None:
        card = built_in.device(measured.name, measured.kind, measured.memory_bytes)
    dtype = next(name for name in _OF_PRODUCTS if name in measured.flops_per_second and name in card.flops_per_second)
    product = measured.flops_per_second[dtype] / card.flops_per_second[dtype]
    bandwidth = measured.memory_bytes_per_second / card.memory_bytes_per_second
    shares = share(card.achieved, "product"), share(card.achieved, "pointwise")
    return replace(card, achieved=scaled(card.achieved, product / shares[0], bandwidth / shares[1]))


def with_exchange(measured: Route, known: Route | None) -> Route:
    """Returns the known route where it tells what exchanges take, else the measured one. Copies of one process are not
    NCCL's, but where they are much slower, the link is narrower than was known, and has their rate."""
    if known is None or not known.exchange:
        return measured
    rate = measured.bytes_per_second
    return replace(known, bytes_per_second=rate) if rate < AS_FAST * known.bytes_per_second else known


def as_alike(devices: Sequence[Device]) -> list[Device]:
    """[D] Returns the devices, GPUs of a kind with the medians of what was measured of them: those that are told alike
    can be a group or replicas of each other, and measurements differ."""
    kinds: dict[str, list[Device]] = defaultdict(list)
    for device in devices:
        kinds[device.kind].append(device)
    return [device if device.is_cpu else _median(device, kinds[device.kind]) for device in devices]


def _median(device: Device, alike: Sequence[Device]) -> Device:
    """Returns the device with the medians of what all `alike` tell."""
    dtypes = [dtype for dtype in device.flops_per_second if all(dtype in other.flops_per_second for other in alike)]
    flops = {dtype: round(float(np.median([each.flops_per_second[dtype] for each in alike]))) for dtype in dtypes}
    shares = {name: float(np.median([each.achieved[name] for each in alike])) for name in device.achieved}
    return replace(
        device,
        flops_per_second=MappingProxyType(flops),
        memory_bytes_per_second=round(float(np.median([each.memory_bytes_per_second for each in alike]))),
        launch_ns=round(float(np.median([each.launch_ns for each in alike]))),
        achieved=MappingProxyType(shares),
    )


def with_achieved(devices: Sequence[Device], targets: Sequence[Target], effort: Extent, log: Log) -> list[Device]:
    """[D] Returns the devices, those that are processor cores with the shares of classes of kernels measured. Alike
    cores tell them together: what other programs take of one of them is no property of it."""
    cores = [number for number, target in enumerate(targets) if target.device.type == "cpu"]
    timed: dict[str, list[_TimedOp]] = defaultdict(list)  # by kind of core
    for samples, width, side in effort.probes if cores else ():
        log(f"classes of kernels on all cores at once, {samples} images of {side} x {side} with {width} channels")
        model, words = Probe(width), torch.randint(_WORDS, (samples, (side // 4) ** 2))
        inputs = (torch.randn(samples, 3, side, side), words)
        program = capture(model, inputs, name="classes").program
        step = PlacedProgram(program, program.bind(model, inputs, {}), [np.arange(program.graph.num_ops)])

        def measured(number: int, step: PlacedProgram = step) -> I64:
            measurement = measure_programs({"": step}, [targets[number]], steps=_STEPS)[""]
            return measurement.op_medians_ns()[0]

        with ThreadPoolExecutor(len(cores)) as pool:
            times_ns = dict(zip(cores, pool.map(measured, cores), strict=True))
        for number in cores:
            timed[devices[number].kind] += _timed_ops(program.graph, devices[number], times_ns[number])
    shares = {kind: MappingProxyType(_shares(ops)) for kind, ops in timed.items()}
    return [
        replace(device, achieved=shares[device.kind]) if number in cores else device
        for number, device in enumerate(devices)
    ]


class _TimedOp(NamedTuple):
    """An op of a probe."""

    parts_ns: dict[str, float]  # by class of its kernels: what they would take at the figures of the device
    time_ns: float  # without launches


def _timed_ops(graph: Graph, device: Device, times_ns: I64) -> list[_TimedOp]:
    """Returns the ops that take more than launches; `times_ns` [N] is what they took."""
    kernels, timed = kernels_of(graph, rule_of), []
    (work_ns, bytes_ns), ends = times_on_core(kernels, device), kernels.offsets
    launched_ns = kernels.summed(launches_on_core(kernels)) * device.launch_ns
    for op in np.flatnonzero(times_ns > _NO_LAUNCHES * launched_ns).tolist():
        parts_ns: dict[str, float] = defaultdict(float)
        for kernel in range(ends[kernels.ops[op]], ends[kernels.ops[op] + 1]):
            name = CLASSES[kernels.kinds[kernel]]
            parts_ns[name] += work_ns[kernel]
            parts_ns[_LIKE.get(name, "pointwise" if name in OF_FLOPS else name)] += bytes_ns[kernel]
        if sum(parts_ns.values()) > 0:
            parts_ns = {name: part_ns for name, part_ns in parts_ns.items() if part_ns > 0}
            timed.append(_TimedOp(parts_ns, max(float(times_ns[op] - launched_ns[op]), 1.0)))
    return timed


def _shares(ops: Sequence[_TimedOp]) -> dict[str, float]:
    """Returns the share of each class, by what known ones leave of the times of ops that have the fewest others."""
    known: dict[str, float] = {}
    while unknown := [left for op in ops if (left := op.parts_ns.keys() - known.keys())]:
        fewest, ratios = min(map(len, unknown)), defaultdict[str, list[tuple[float, float]]](list)
        for parts_ns, time_ns in ops:
            left = parts_ns.keys() - known.keys()
            if len(left) == fewest:
                others_ns = sum(parts_ns[name] / known[name] for name in parts_ns.keys() - left)
                own_ns = sum(parts_ns[name] for name in left)
                for name in left:
                    ratios[name].append((own_ns / max(time_ns - others_ns, _LEAST * time_ns), own_ns))
        known |= {name: _share(values) for name, values in ratios.items()}
    return known


def _share(ratios: Sequence[tuple[float, float]]) -> float:
    """Returns the median of ratios, each counted by the modelled ns of its op, within what a device may tell."""
    values, weights = map(np.array, zip(*sorted(ratios), strict=True))
    median = values[np.searchsorted(np.cumsum(weights), weights.sum() / 2)]
    return round(min(max(float(median), 1e-4), 100.0), 4)


@dataclass(frozen=True, slots=True)
class Calibration:
    """A measured cluster."""

    cluster: Cluster
    notes: tuple[str, ...]


def calibrate(
    devices: Sequence[Detected],
    *,
    known_routes: Mapping[tuple[str, str], Route] = MappingProxyType({}),
    quick: bool = False,
    on_progress: Log | None = None,
) -> Calibration:
    """Measures these devices of this machine; `quick` is rougher. `on_progress` gets a line before each measurement.
    The cluster is called `local`; its devices have the names, kinds and memory of `devices`. Of `known_routes` between
    them, those that tell what exchanges take are kept, see `with_exchange`. InputError names a device that cannot do
    float32 arithmetic, or lacks the memory."""
    effort, log, load_notes = QUICK if quick else FULL, on_progress or (lambda _text: None), _load_notes()
    targets = [target_of(device) for device in devices]
    num_threads = torch.get_num_threads()
    try:
        with full_precision():  # or convolutions in TF32 would count as float32
            rates = _arithmetic(targets, effort, log)
        bandwidths = _bandwidths(devices, effort, log)
        launches_ns = launches(targets, effort, log)
        routes, route_notes = routes_between(targets, effort, log)
    finally:
        torch.set_num_threads(num_threads)  # backends set it for all threads that begin later
    rows = zip(devices, rates, bandwidths, launches_ns, strict=True)
    measured = [Device(x.name, x.kind, x.memory_bytes, flops, whole(rate), whole(ns)) for x, flops, rate, ns in rows]
    measured = with_achieved(as_alike([as_card(device) for device in measured]), targets, effort, log)
    routes = {
        pair: with_exchange(route, known_routes.get((devices[pair[0]].name, devices[pair[1]].name)))
        for pair, route in routes.items()
    }
    return Calibration(Cluster.build("local", measured, routes), (*route_notes, *load_notes))


def _arithmetic(targets: Sequence[Target], effort: Extent, log: Log) -> list[Mapping[str, int]]:
    """[D] Measures FLOP/s by dtype with all devices busy."""
    best = {}
    for name, dtype in _DTYPES.items():
        log(f"{name} on all devices at once")
        best[name] = _best_rates(targets, dtype, effort)
    for target, rate in zip(targets, best["float32"], strict=True):
        if rate is None:
            raise unable(target, "float32 arithmetic")
    of_device = [{name: whole(rate) for name, row in best.items() if (rate := row[n])} for n in range(len(targets))]
    for target, rates in zip(targets, of_device, strict=True):
        if target.device.type == "cuda" and torch.cuda.get_device_capability(target.device) >= _HAS_TF32:
            rates |= {"tf32": rates["bfloat16"] // 2} if "bfloat16" in rates else {}
    return [MappingProxyType(rates) for rates in of_device]


def _best_rates(targets: Sequence[Target], dtype: torch.dtype, effort: Extent) -> list[float | None]:
    """[D] Measures the highest FLOP/s, all devices busy with the same kind of work."""
    works = [_works(target, effort) for target in targets]
    times_ns = [
        together([job_of(target, work, dtype) for target, work in zip(targets, chosen, strict=True)], effort.seconds)
        for chosen in zip(*works, strict=True)
    ]
    rows = [zip(mine, column, strict=True) for mine, column in zip(works, zip(*times_ns, strict=True), strict=True)]
    return [max((per_second(work, time_ns) for work, time_ns in row if time_ns), default=None) for row in rows]


def _works(target: Target, effort: Extent) -> list[Work]:
    kind = target.device.type
    return [*map(_matrix_product, effort.matrix_sizes[kind]), *map(_convolution, effort.convolution_batches[kind])]


def _matrix_product(size: int) -> Work:
    def make(device: torch.device, dtype: torch.dtype) -> Callable[[], Tensor]:
        a, b, out = (torch.rand(size, size, device=device).to(dtype) for _ in range(3))
        return lambda: torch.mm(a, b, out=out)

    return Work(2 * size**3, make)


def _convolution(batch_size: int) -> Work:
    """Makes a 3x3 convolution of ResNet's conv2_x (K. He et al., "Deep residual learning", CVPR 2016, table 1)."""
    channels, side = 64, 56

    def make(device: torch.device, dtype: torch.dtype) -> Callable[[], Tensor]:
        images = torch.rand(batch_size, channels, side, side, device=device).to(dtype)
        weights = torch.rand(channels, channels, 3, 3, device=device).to(dtype)
        return lambda: torch.conv2d(images, weights, padding=1)

    return Work(2 * 9 * batch_size * (channels * side) ** 2, make)


def _bandwidths(devices: Sequence[Detected], effort: Extent, log: Log) -> list[float]:
    """[D] Measures bytes per second of adding vectors too large for the caches, counted as two read and one written."""
    jobs, works = [], []
    for device, target in zip(devices, map(target_of, devices), strict=True):
        streamed_bytes = min(effort.streamed_bytes, device.memory_bytes // 8)
        if target.device.type == "cpu":  # GPUs do not tell their caches, and add fast
            streamed_bytes = min(streamed_bytes, max(2 * cache_bytes(), 64 * MIB))
        works.append(_addition(streamed_bytes // 12))
        jobs.append(job_of(target, works[-1], torch.float32))
    log("memory bandwidth on all devices at once")
    rates = []
    for job, work, time_ns in zip(jobs, works, together(jobs, effort.seconds), strict=True):
        if time_ns is None:
            raise unable(job[0].target, f"an addition in {work.amount} bytes")
        rates.append(per_second(work, time_ns))
    return rates


def _addition(num_elements: int) -> Work:
    def make(device: torch.device, dtype: torch.dtype) -> Callable[[], Tensor]:
        a, b, out = (torch.ones(num_elements, device=device, dtype=dtype) for _ in range(3))
        return lambda: torch.add(a, b, out=out)

    return Work(3 * 4 * num_elements, make)


def _load_notes() -> list[str]:
    load = os.getloadavg()[0] if hasattr(os, "getloadavg") else 0.0
    if load <= 0.5:
        return []
    return [f"other processes are at work (load average {load:.1f}); measure again when they rest"]
