"""Calibration: measures this machine's devices, and the routes between them, as a cluster.

Every kind of work runs on all devices at once, then on each alone:

    cpu0   mm mm mm mm mm mm     mm mm mm mm mm mm
    cpu1   mm mm mm mm mm mm                          mm mm mm mm mm mm

The cluster has the figures of all at once, since that is how a placed step runs: cores share memory, caches and the
clock's margin. What a device does alone is told beside it. All figures are medians, since other processes disturb some.

Launch overhead and latency come from chains of tiny ops, captured and run by `ThreadExecutor` as a plan is:

    launch    cpu0   add add add add add         how long an add takes, from start to finish
    latency   cpu0   add     add     add         by how much a hand-over lengthens the chain;
              cpu1       add     add             the mean of both directions

Copies from and to CUDA devices are those of the lanes. Two routes whose copies slow each other down share a channel.
"""

import os
import statistics
import threading
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import combinations, permutations
from pathlib import Path
from types import MappingProxyType

import numpy as np
import torch
from torch import Tensor, nn

from gdp.capture import Program, capture
from gdp.cluster import Cluster
from gdp.devices import Device, Route
from gdp.errors import InputError
from gdp.execute.lanes import Lane, lane_of
from gdp.execute.local_devices import LocalDevice
from gdp.execute.targets import Target
from gdp.execute.threads import StepRecord, ThreadExecutor

BY_REFERENCE_BYTES_PER_SECOND = 10**15
"""Of a route on which nothing is copied. A rate has to be finite (docs/machine-model.md, section 2); at this one 1 MB
occupies its route for 1 ns, the least there is, and 10 GB for 10 us, which is less than the latency."""

MIB = 2**20
_COPY_BYTES = (1024, MIB, 16 * MIB, 64 * MIB)
_SLOWED_DOWN = 1.5  # copies that take turns need twice as long, copies that do not need little more than alone
_DTYPES = {dtype: getattr(torch, dtype) for dtype in ("float32", "float64", "float16", "bfloat16")}

Log = Callable[[str], None]
Pair = tuple[int, int]
Once = Callable[[], int]
"""Does some work once and returns how many ns that took."""
Job = tuple[Lane, Callable[[], Once]]
"""Where to work, and what makes the work ready on the thread that is to do it."""


@dataclass(frozen=True, slots=True)
class Calibration:
    """What was measured.

    `alone` has for each device the factors by which its figures change when no other is at work: `float32` and
    `memory_bandwidth` of 1.5 are rates of 1.5 times the cluster's, `launch` of 0.9 is a time of 0.9 times its.
    Of a single device they say how well figures repeat.
    """

    cluster: Cluster
    alone: Mapping[str, Mapping[str, float]]
    notes: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class _Effort:
    seconds: float  # for a kind of work
    num_steps: int  # of a chain
    num_ops: int  # of a chain
    matrix_sizes: Mapping[str, Sequence[int]]  # by type of device
    convolution_batches: Mapping[str, Sequence[int]]
    streamed_bytes: int  # at most


_FULL = _Effort(
    seconds=0.5,
    num_steps=25,
    num_ops=200,
    matrix_sizes={"cpu": (256, 512, 1024), "cuda": (2048, 4096, 8192)},
    convolution_batches={"cpu": (8,), "cuda": (256,)},
    streamed_bytes=1024 * MIB,
)
_QUICK = _Effort(
    seconds=0.05,
    num_steps=5,
    num_ops=100,
    matrix_sizes={"cpu": (512,), "cuda": (4096,)},
    convolution_batches={"cpu": (), "cuda": ()},
    streamed_bytes=192 * MIB,
)


@dataclass(frozen=True, slots=True)
class _Work:
    """A kind of work: so many FLOPs or bytes, and what makes it a function of tensors of that type on that device."""

    amount: int
    make: Callable[[torch.device, torch.dtype], Callable[[], Tensor]]


@dataclass(frozen=True, slots=True)
class _Figure:
    """With all devices at work, and alone."""

    busy: float
    alone: float

    @property
    def factor(self) -> float:
        return self.alone / self.busy


def measure(devices: Sequence[LocalDevice], *, quick: bool = False, on_progress: Log | None = None) -> Cluster:
    """The cluster of `calibrate`."""
    return calibrate(devices, quick=quick, on_progress=on_progress).cluster


def calibrate(devices: Sequence[LocalDevice], *, quick: bool = False, on_progress: Log | None = None) -> Calibration:
    """Measure these devices of this machine; `quick` is rougher. `on_progress` hears what comes next.

    The cluster is called `local`; its devices have the names, kinds and memory of `devices`. InputError names a device
    that cannot do float32 arithmetic, or lacks the memory.
    """
    effort, log, load_notes = _QUICK if quick else _FULL, on_progress or _ignore, _load_notes()
    targets = [device.target for device in devices]
    num_threads = torch.get_num_threads()
    try:
        rates, float32 = _arithmetic(targets, effort, log)
        bandwidths = _bandwidths(devices, effort, log)
        launches_ns, launch_notes = _launches(targets, effort, log)
        routes, route_notes = _routes(targets, effort, log)
    finally:
        torch.set_num_threads(num_threads)  # lanes set it for all threads that begin later
    measured = [
        Device(
            device.name, device.kind, device.memory_bytes, MappingProxyType(flops), _whole(bandwidth.busy),
            _whole(launch_ns.busy),
        )
        for device, flops, bandwidth, launch_ns in zip(devices, rates, bandwidths, launches_ns, strict=True)
    ]  # fmt: skip
    alone = {
        device.name: {"float32": rate.factor, "memory_bandwidth": bandwidth.factor, "launch": launch_ns.factor}
        for device, rate, bandwidth, launch_ns in zip(devices, float32, bandwidths, launches_ns, strict=True)
    }
    return Calibration(Cluster.build("local", measured, routes), alone, (*launch_notes, *route_notes, *load_notes))


# Work on all devices at once


def _together(jobs: Sequence[Job], seconds: float) -> list[float | None]:
    """The median ns of each job, all of them repeated for that time; None: no kernel for that dtype, or no memory."""
    ready = threading.Barrier(len(jobs))

    def repeat(job: Job) -> float | None:
        lane, prepare = job
        try:
            with lane.active(), torch.no_grad():
                once = _ready(prepare)
                ready.wait()
                times_ns: list[int] = []
                end = time.perf_counter() + seconds
                while once and (len(times_ns) < 3 or time.perf_counter() < end):
                    times_ns.append(once())
                return statistics.median(times_ns) if times_ns else None
        except BaseException:
            ready.abort()  # or the others would wait for ever
            raise

    with ThreadPoolExecutor(len(jobs)) as pool:
        futures = [pool.submit(repeat, job) for job in jobs]
    errors = [error for future in futures if (error := future.exception())]
    if errors:
        raise min(errors, key=lambda error: isinstance(error, threading.BrokenBarrierError))  # the cause first
    return [future.result() for future in futures]


def _ready(prepare: Callable[[], Once]) -> Once | None:
    """The work, done once: memory is mapped, kernels are chosen."""
    try:
        once = prepare()
        once()
    except (RuntimeError, MemoryError):
        return None
    return once


def _alone(job: Job, seconds: float, what: str) -> float:
    """As `_together`; InputError says what cannot be done."""
    (time_ns,) = _together([job], seconds)
    if time_ns is None:
        raise _unable(job[0].target, what)
    return time_ns


def _unable(target: Target, what: str) -> InputError:
    return InputError(f"device {target.name!r}: {what} cannot be done there; leave it out with --devices")


def _job(target: Target, work: _Work, dtype: torch.dtype) -> Job:
    """The work, in its device's time."""
    lane = lane_of(target, _copy_memory)

    def prepare() -> Once:
        run = work.make(target.device, dtype)

        def once() -> int:
            moments = [lane.now()]
            run()
            moments.append(lane.now())
            start_ns, finish_ns = lane.times_ns(moments)
            return finish_ns - start_ns

        return once

    return lane, prepare


# Arithmetic and memory


def _arithmetic(targets: Sequence[Target], effort: _Effort, log: Log) -> tuple[list[dict[str, int]], list[_Figure]]:
    """[D] FLOP/s by dtype with all devices busy, and float32's alone too."""
    best = {}
    for name, dtype in _DTYPES.items():
        log(f"{name} on all devices at once")
        best[name] = _best_rates(targets, dtype, effort)
    float32 = []
    for target, found in zip(targets, best["float32"], strict=True):
        if found is None:
            raise _unable(target, "float32 arithmetic")
        log(f"float32 on {target.name} alone")
        rate, work = found
        alone_ns = _alone(_job(target, work, torch.float32), effort.seconds, "float32 arithmetic")
        float32.append(_Figure(rate, _per_second(work, alone_ns)))
    rates = [
        {name: _whole(found[0]) for name, row in best.items() if (found := row[number]) is not None}
        for number in range(len(targets))
    ]
    return rates, float32


def _best_rates(targets: Sequence[Target], dtype: torch.dtype, effort: _Effort) -> list[tuple[float, _Work] | None]:
    """[D] the highest FLOP/s, all devices busy with the same kind of work, and the work that reaches it."""
    works = [_works(target, effort) for target in targets]
    times_ns = [
        _together([_job(target, work, dtype) for target, work in zip(targets, chosen, strict=True)], effort.seconds)
        for chosen in zip(*works, strict=True)
    ]
    return [
        max(
            ((_per_second(work, time_ns), work) for work, time_ns in zip(mine, column, strict=True) if time_ns),
            key=lambda found: found[0],
            default=None,
        )
        for mine, column in zip(works, zip(*times_ns, strict=True), strict=True)
    ]


def _works(target: Target, effort: _Effort) -> list[_Work]:
    kind = target.device.type
    return [*map(_matrix_product, effort.matrix_sizes[kind]), *map(_convolution, effort.convolution_batches[kind])]


def _matrix_product(size: int) -> _Work:
    def make(device: torch.device, dtype: torch.dtype) -> Callable[[], Tensor]:
        a, b, out = (torch.rand(size, size, device=device).to(dtype) for _ in range(3))
        return lambda: torch.mm(a, b, out=out)

    return _Work(2 * size**3, make)


def _convolution(batch_size: int) -> _Work:
    """A 3x3 convolution of ResNet's conv2_x (K. He et al., "Deep residual learning", CVPR 2016, table 1)."""
    channels, side = 64, 56

    def make(device: torch.device, dtype: torch.dtype) -> Callable[[], Tensor]:
        images = torch.rand(batch_size, channels, side, side, device=device).to(dtype)
        weights = torch.rand(channels, channels, 3, 3, device=device).to(dtype)
        return lambda: torch.conv2d(images, weights, padding=1)

    return _Work(2 * 9 * batch_size * (channels * side) ** 2, make)


def _bandwidths(devices: Sequence[LocalDevice], effort: _Effort, log: Log) -> list[_Figure]:
    """[D] bytes per second of adding vectors too large for the caches, counted as in a graph: two read, one written."""
    jobs, works = [], []
    for device in devices:
        streamed_bytes = min(effort.streamed_bytes, max(2 * _cache_bytes(), 64 * MIB), device.memory_bytes // 8)
        works.append(_addition(streamed_bytes // 12))
        jobs.append(_job(device.target, works[-1], torch.float32))
    log("memory bandwidth on all devices at once")
    figures = []
    for job, work, busy_ns in zip(jobs, works, _together(jobs, effort.seconds), strict=True):
        target, what = job[0].target, f"an addition in {work.amount} bytes"
        if busy_ns is None:
            raise _unable(target, what)
        log(f"memory bandwidth on {target.name} alone")
        alone_ns = _alone(job, effort.seconds, what)
        figures.append(_Figure(_per_second(work, busy_ns), _per_second(work, alone_ns)))
    return figures


def _addition(num_elements: int) -> _Work:
    def make(device: torch.device, dtype: torch.dtype) -> Callable[[], Tensor]:
        a, b, out = (torch.ones(num_elements, device=device, dtype=dtype) for _ in range(3))
        return lambda: torch.add(a, b, out=out)

    return _Work(3 * 4 * num_elements, make)


def _cache_bytes() -> int:
    """The processor's largest cache; 0 where the system does not tell."""
    texts = [file.read_text().strip() for file in Path("/sys/devices/system/cpu/cpu0/cache").glob("index*/size")]
    return max((1024 * int(text[:-1]) for text in texts if text[:-1].isdecimal() and text.endswith("K")), default=0)


# Launch overhead and latency


class _Chains(nn.Module):
    """From each input a chain of additions."""

    def __init__(self, num_ops: int) -> None:
        super().__init__()
        self.num_ops = num_ops

    def forward(self, *inputs: Tensor) -> list[Tensor]:
        outputs = []
        for x in inputs:
            for _ in range(self.num_ops):
                x = torch.add(x, x)
            outputs.append(x)
        return outputs


def _chains(num_chains: int, num_ops: int) -> Program:
    """Its ops are the inputs, then those of the first chain, then those of the second, and so on."""
    inputs = [torch.zeros(1) for _ in range(num_chains)]
    return capture(_Chains(num_ops), inputs, name="chains", training=False).program


def _steps(program: Program, order: Sequence[Sequence[int]], targets: Sequence[Target], num: int) -> list[StepRecord]:
    """Timed steps, after one that does not count."""
    inputs = {source.tensor: program.memory_for(source.tensor).zero_() for source in program.sources.values()}
    with ThreadExecutor(program, order, targets) as executor:
        return [executor.step(inputs, is_timed=True) for _ in range(num + 1)][1:]


def _op_ns(records: Sequence[StepRecord], number: int) -> float:
    """The median ns of an op of device `number`, but for the first, which is a source."""
    return statistics.median(
        finish - start
        for device in (record.devices[number] for record in records)
        for start, finish in zip(device.start_ns[1:], device.finish_ns[1:], strict=True)
    )


def _chain_ns(records: Sequence[StepRecord]) -> float:
    """The median ns from the end of the first device's source to that of the last op on any device."""
    return statistics.median(
        max(device.finish_ns[-1] for device in record.devices) - record.devices[0].finish_ns[0] for record in records
    )


def _launches(targets: Sequence[Target], effort: _Effort, log: Log) -> tuple[list[_Figure], list[str]]:
    """[D] ns of a tiny op; and what becomes of their pace when all devices are at it."""
    log("launch overhead on all devices at once")
    num_devices, num_ops = len(targets), effort.num_ops
    chains = [range(number * num_ops, (number + 1) * num_ops) for number in range(num_devices)]
    order = [[number, *(num_devices + op for op in chain)] for number, chain in enumerate(chains)]
    busy = _steps(_chains(num_devices, num_ops), order, targets, effort.num_steps)
    figures, paces_ns = [], []
    program = _chains(1, num_ops)
    for number, target in enumerate(targets):
        log(f"launch overhead on {target.name} alone")
        alone = _steps(program, [range(num_ops + 1)], [target], effort.num_steps)
        figures.append(_Figure(_op_ns(busy, number), _op_ns(alone, 0)))
        paces_ns.append(_chain_ns(alone) / num_ops)
    note = (
        f"tiny ops on all devices at once: one in {_chain_ns(busy) / num_ops / 1000:.1f} us on each, alone in "
        f"{max(paces_ns) / 1000:.1f} us, since the worker threads of one process take turns in Python"
    )
    return figures, [note] if num_devices > 1 else []


def _hop_ns(program: Program, pair: Sequence[Target], num_steps: int) -> float:
    """By how many ns a hand-over lengthens a chain whose ops alternate between two devices."""
    num_ops = program.graph.num_ops
    here, there = (_chain_ns(_steps(program, [range(num_ops)], [target], num_steps)) for target in pair)
    both = _chain_ns(_steps(program, [range(0, num_ops, 2), range(1, num_ops, 2)], pair, num_steps))
    return (both - (here + there) / 2) / (num_ops - 1)


# Routes


def _routes(targets: Sequence[Target], effort: _Effort, log: Log) -> tuple[dict[Pair, Route], list[str]]:
    """The route of each ordered pair."""
    latencies_ns: dict[Pair, int] = {}
    program = _chains(1, effort.num_ops)
    for a, b in combinations(range(len(targets)), 2):
        log(f"latency between {targets[a].name} and {targets[b].name}")
        hop_ns = _hop_ns(program, (targets[a], targets[b]), effort.num_steps)
        latencies_ns[a, b] = latencies_ns[b, a] = max(round(hop_ns), 0)
    pairs = list(permutations(range(len(targets)), 2))
    # as CpuLane.pack does it
    by_reference = [pair for pair in pairs if all(targets[end].device.type == "cpu" for end in pair)]
    copied = [pair for pair in pairs if pair not in by_reference]
    routes = {pair: Route(latencies_ns[pair], BY_REFERENCE_BYTES_PER_SECOND, ()) for pair in by_reference}
    rates = {}
    for a, b in copied:
        log(f"copies from {targets[a].name} to {targets[b].name}")
        rates[a, b] = _copy_rate(targets[a], targets[b], effort)
    channels = _channels([target.name for target in targets], copied, _rivals(targets, copied, effort, log))
    routes |= {pair: Route(latencies_ns[pair], rates[pair], channels[pair]) for pair in copied}
    if not by_reference:
        return routes, []
    return routes, [_by_reference_note([targets[end] for end in by_reference[0]], effort.num_steps)]


def _by_reference_note(pair: Sequence[Target], num_steps: int) -> str:
    """How long the second of the pair waits on for a tensor, small or large, when the first has made it.

    first    make the other -> make it -> ...      so it has waited equally long for both: threads wake up
    second   (waits)                   -> read it  the later the longer they have slept
    """
    small_bytes, large_bytes = _COPY_BYTES[0], _COPY_BYTES[-1]
    inputs = [torch.zeros(num_bytes // 4) for num_bytes in (small_bytes, large_bytes)]
    program = capture(_Chains(1), inputs, name="two sizes", training=False).program
    small_us, large_us = (
        statistics.median(record.devices[1].start_ns[0] - record.devices[0].finish_ns[1] for record in records) / 1000
        for it, other in ((0, 1), (1, 0))
        for records in [_steps(program, [[other, it, 2 + other], [2 + it]], pair, num_steps)]
    )
    return (
        f"{pair[0].name} hands {pair[1].name} 1 KiB in {small_us:.0f} us and 64 MiB in {large_us:.0f} us: "
        "within one memory tensors are handed over by reference, however large"
    )


def _copy_rate(source: Target, target: Target, effort: _Effort) -> int:
    """Bytes per second: the slope of a line through the times of several sizes, least squares of relative errors."""
    times_ns = np.array([_alone(_copy(source, target, size), effort.seconds, "copies") for size in _COPY_BYTES])
    design = np.stack([np.ones(len(_COPY_BYTES)), np.array(_COPY_BYTES)], axis=1) / times_ns[:, None]
    slope = np.linalg.lstsq(design, np.ones(len(_COPY_BYTES)))[0][1]  # ns per byte
    return _whole(1e9 / max(slope, 1e9 / BY_REFERENCE_BYTES_PER_SECOND))


def _copy(source: Target, target: Target, num_bytes: int) -> Job:
    """A copy from lane to lane until it can be read; both lanes are its own, so that no stream orders two copies."""
    sender, receiver = lane_of(source, _copy_memory), lane_of(target, _copy_memory)

    def prepare() -> Once:
        content = _copy_memory(num_bytes, source.device)

        def once() -> int:
            start_ns = time.perf_counter_ns()
            receiver.unpack(sender.pack(num_bytes, content, target.device))
            receiver.times_ns([receiver.now()])  # a GPU has it when its stream gets here
            return time.perf_counter_ns() - start_ns

        return once

    return sender, prepare


def _copy_memory(num_bytes: int, device: torch.device) -> Tensor:
    """A lane asks for memory by the number of a tensor; the copies here are numbered by their size."""
    return torch.empty(num_bytes, dtype=torch.uint8, device=device)


def _rivals(targets: Sequence[Target], routes: Sequence[Pair], effort: _Effort, log: Log) -> set[frozenset[Pair]]:
    """The pairs of routes whose copies, both at once, take much longer than alone."""
    if routes:
        log("contention")
    seconds = effort.seconds / 10  # there are many pairs
    jobs = {(a, b): _copy(targets[a], targets[b], _COPY_BYTES[-1]) for a, b in routes}
    alone_ns = {route: _alone(job, seconds, "copies") for route, job in jobs.items()}
    rivals = set()
    for pair in combinations(routes, 2):
        times_ns = _together([jobs[route] for route in pair], seconds)
        if all((time_ns or 0) > _SLOWED_DOWN * alone_ns[route] for route, time_ns in zip(pair, times_ns, strict=True)):
            rivals.add(frozenset(pair))
    return rivals


def _channels(
    names: Sequence[str], routes: Sequence[Pair], rivals: Collection[frozenset[Pair]]
) -> dict[Pair, tuple[str, ...]]:
    """The channels of each route: for any two rivals one that they share, with all that are rivals of all in it."""
    groups: list[list[Pair]] = []
    for rival in sorted(map(sorted, rivals)):
        if not any(set(rival) <= set(group) for group in groups):
            group = list(rival)
            for route in routes:
                if all(frozenset((route, member)) in rivals for member in group):  # false for a member itself
                    group.append(route)
            groups.append(group)
    groups += [[route] for route in routes if not any(route in group for group in groups)]
    channels: dict[Pair, tuple[str, ...]] = dict.fromkeys(routes, ())
    taken: set[str] = set()
    for group in groups:
        sources, ends = ({names[route[side]] for route in group} for side in (0, 1))
        if len(group) == 1:
            name = f"{min(sources)}->{min(ends)}"
        else:
            name = f"{min(sources)}.out" if len(sources) == 1 else f"{min(ends)}.in" if len(ends) == 1 else "shared"
        name = name if name not in taken else f"{name}.{len(taken)}"
        taken.add(name)
        for route in group:
            channels[route] += (name,)
    return channels


def _load_notes() -> list[str]:
    load = os.getloadavg()[0] if hasattr(os, "getloadavg") else 0.0
    if load <= 0.5:
        return []
    return [f"other processes are at work (load average {load:.1f}); measure again when they rest"]


def _per_second(work: _Work, time_ns: float) -> float:
    return work.amount * 1e9 / time_ns


def _whole(figure: float) -> int:
    """At least 1."""
    return max(round(figure), 1)


def _ignore(_text: str) -> None:
    pass
