"""Routes between the devices of this machine: latency, bandwidth, and the channels that they share."""

import time
from collections.abc import Callable, Collection, Mapping, Sequence
from itertools import combinations, permutations

import torch
from torch import Tensor

from gdp.cluster import Route
from gdp.cluster.catalogue import BY_REFERENCE_BYTES_PER_SECOND
from gdp.execute.backends import Target, backend_of
from gdp.execute.calibrate.work import (
    MIB,
    Extent,
    Job,
    Log,
    Once,
    Pair,
    Work,
    cache_bytes,
    chain_program,
    copy_memory,
    hop_ns,
    job_of,
    line_through,
    time_alone,
    together,
    whole,
)
from gdp.execute.forked.forked_executor import may_fork

COPY_BYTES = (1024, MIB, 16 * MIB, 64 * MIB)
_HOP_BYTES = (1024, 64 * 1024, MIB, 8 * MIB)
_HOPPED_BYTES = 64 * MIB  # of a chain, where that is more than the caches have: in a step, other tensors are in them
_LEAST_NS = 500.0  # of a hand-over; what takes less has not reached another core
_SLOWED_DOWN = 1.5  # copies that take turns need twice as long, copies that do not need little more than alone


def routes_between(targets: Sequence[Target], effort: Extent, log: Log) -> tuple[dict[Pair, Route], list[str]]:
    """Measures the route of each ordered pair of targets; returns notes, too."""
    latencies_ns: dict[Pair, int] = {}
    program = chain_program(1, effort.num_ops)
    for a, b in combinations(range(len(targets)), 2):
        log(f"latency between {targets[a].name} and {targets[b].name}")
        time_ns = hop_ns(program, (targets[a], targets[b]), effort.num_steps)
        latencies_ns[a, b] = latencies_ns[b, a] = max(round(time_ns), 0)
    pairs = list(permutations(range(len(targets)), 2))
    between_cpus = [pair for pair in pairs if all(targets[end].device.type == "cpu" for end in pair)]
    copied = [pair for pair in pairs if pair not in between_cpus]
    shared_rate, notes = _between_cpus(targets, between_cpus, effort, log)
    routes = {pair: Route(latencies_ns[pair], shared_rate, ()) for pair in between_cpus}
    rates = {}
    for a, b in copied:
        log(f"copies from {targets[a].name} to {targets[b].name}")
        rates[a, b] = _copy_rate(targets[a], targets[b], effort)
    channels = _channels([target.name for target in targets], copied, _rivals(targets, copied, effort, log))
    routes |= {pair: Route(latencies_ns[pair], rates[pair], channels[pair]) for pair in copied}
    return routes, notes


def _between_cpus(targets: Sequence[Target], pairs: Sequence[Pair], effort: Extent, log: Log) -> tuple[int, list[str]]:
    """Measures bytes per second that a CPU hands to another, if they are processes; threads hand over a reference. The
    other reads from the first one's cache, and its memory is new to the caches of both: so chains whose ops alternate
    between the two tell more than copies of one core."""
    if not pairs:
        return BY_REFERENCE_BYTES_PER_SECOND, []
    first, second = pair = [targets[end] for end in pairs[0]]
    if not may_fork(targets):
        note = f"{first.name} hands tensors to {second.name} by reference, however large, within one memory"
        return BY_REFERENCE_BYTES_PER_SECOND, [note]
    log(f"tensors that {first.name} hands {second.name}")
    hops = _rate({num_bytes: max(_hop_ns(pair, num_bytes, effort), _LEAST_NS) for num_bytes in _HOP_BYTES})
    copies = _rate({size: time_alone(_copy_here(first, size), effort.seconds, "copies") for size in COPY_BYTES})
    rate = min(hops, copies)  # beside other programs hand-overs differ by more than their bytes
    return rate, [f"{first.name} hands tensors to {second.name} in memory that both share, at {rate / 1e9:.1f} GB/s"]


def _hop_ns(pair: Sequence[Target], num_bytes: int, effort: Extent) -> float:
    """Measures the time of a hand-over of tensors that together do not stay in the caches."""
    num_ops = min(max(_HOPPED_BYTES, 2 * cache_bytes()) // num_bytes, effort.num_ops)
    return hop_ns(chain_program(1, max(num_ops, 8), num_bytes), pair, effort.num_steps)


def _copy_rate(source: Target, target: Target, effort: Extent) -> int:
    """Measures bytes per second by a line through the times of several sizes."""
    return _rate({size: time_alone(_copy(source, target, size), effort.seconds, "copies") for size in COPY_BYTES})


def _rate(times_ns: Mapping[int, float]) -> int:
    """Returns bytes per second of copies, from their times by size."""
    _, ns_per_byte = line_through(times_ns)
    return whole(1e9 / max(ns_per_byte, 1e9 / BY_REFERENCE_BYTES_PER_SECOND))


def _copy_here(target: Target, num_bytes: int) -> Job:
    """Makes the job of a copy in a CPU's memory."""

    def make(device: torch.device, _dtype: torch.dtype) -> Callable[[], Tensor]:
        content, memory = (copy_memory(num_bytes, device).zero_() for _ in range(2))
        return lambda: memory.copy_(content)

    return job_of(target, Work(num_bytes, make), torch.uint8)


def _copy(source: Target, target: Target, num_bytes: int) -> Job:
    """Makes the job of a copy until it can be read; both backends are its own, so that no stream orders two copies."""
    sender, receiver = backend_of(source, copy_memory), backend_of(target, copy_memory)

    def prepare() -> Once:
        content = copy_memory(num_bytes, source.device)

        def once() -> int:
            start_ns = time.perf_counter_ns()
            receiver.unpack(sender.pack(num_bytes, content, target.device))
            receiver.times_ns([receiver.now()])  # a GPU has it when its stream gets here
            return time.perf_counter_ns() - start_ns

        return once

    return sender, prepare


def _rivals(targets: Sequence[Target], routes: Sequence[Pair], effort: Extent, log: Log) -> set[frozenset[Pair]]:
    """Finds the pairs of routes whose copies, both at once, take much longer than alone."""
    if routes:
        log("contention")
    seconds = effort.seconds / 10  # there are many pairs
    jobs = {(a, b): _copy(targets[a], targets[b], COPY_BYTES[-1]) for a, b in routes}
    alone_ns = {route: time_alone(job, seconds, "copies") for route, job in jobs.items()}
    rivals = set()
    for pair in combinations(routes, 2):
        times_ns = together([jobs[route] for route in pair], seconds)
        if all((time_ns or 0) > _SLOWED_DOWN * alone_ns[route] for route, time_ns in zip(pair, times_ns, strict=True)):
            rivals.add(frozenset(pair))
    return rivals


def _channels(
    names: Sequence[str], routes: Sequence[Pair], rivals: Collection[frozenset[Pair]]
) -> dict[Pair, tuple[str, ...]]:
    """Names the channels of each route, so that any two rivals share one: that of their common end, or their own."""
    channels: dict[Pair, dict[str, None]] = {route: {} for route in routes}
    for pair in sorted(map(sorted, rivals)):
        (source, end), (other_source, other_end) = pair
        name = " | ".join("->".join(names[device] for device in route) for route in pair)
        if source == other_source:
            name = f"{names[source]}.out"
        elif end == other_end:
            name = f"{names[end]}.in"
        for route in pair:
            channels[route][name] = None
    return {route: tuple(own) or (f"{names[route[0]]}->{names[route[1]]}",) for route, own in channels.items()}
