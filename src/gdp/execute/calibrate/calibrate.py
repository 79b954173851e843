"""Calibration: measures this machine's devices, and the routes between them, as a cluster.

Every kind of work runs on all devices at once, since a placed step runs so: cores share memory, caches and the clock's
margin. All figures are medians, since other processes disturb some.

Launch overhead and latency come from chains of tiny ops, captured and run as a plan is:

    launch    cpu0   add add add add add         time of an add, from start to finish
    latency   cpu0   add     add     add         time by which a hand-over lengthens the chain,
              cpu1       add     add             the mean of both directions

Between processes on cores, chains of larger tensors give the bandwidth: each is copied into shared memory, and the next
op reads what another core has just written.

Classes of kernels reach other shares of these rates: `classes.py` measures those of processor cores.

Copies from and to CUDA devices are those of the backends. Two routes whose copies slow each other down share a channel.
"""

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

import torch
from torch import Tensor

from gdp.cluster import Cluster, Device
from gdp.cluster.detect import Detected
from gdp.execute.calibrate.classes import with_achieved
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
from gdp.execute.targets import Target, target_of

_DTYPES = {dtype: getattr(torch, dtype) for dtype in ("float32", "float64", "float16", "bfloat16")}


@dataclass(frozen=True, slots=True)
class Calibration:
    """A measured cluster."""

    cluster: Cluster
    notes: tuple[str, ...]


def calibrate(devices: Sequence[Detected], *, quick: bool = False, on_progress: Log | None = None) -> Calibration:
    """Measures these devices of this machine; `quick` is rougher. `on_progress` gets a line before each measurement.
    The cluster is called `local`; its devices have the names, kinds and memory of `devices`. InputError names a device
    that cannot do float32 arithmetic, or lacks the memory."""
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
    measured = with_achieved(measured, targets, effort, log)
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
    return [
        MappingProxyType({name: whole(rate) for name, row in best.items() if (rate := row[number])})
        for number in range(len(targets))
    ]


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
