"""Starts for weight streaming: which devices compute, which one holds the weights that are sent, and who does how much.
A linear programme (`best_shares`) ranks sets of devices by the time that it expects. An op that has no room where it is
wanted goes to any device, or, as if there were no others, to one of the set or its host: both are tried."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import product
from math import inf
from typing import TypeVar

import numpy as np

from gdp.arrays import F64, I64, Bool
from gdp.cluster import Cluster
from gdp.search.settings import StreamingSettings
from gdp.search.streaming.stream_layout import StreamLayout, fallbacks, roomy
from gdp.simulator.problem import Problem
from gdp.simulator.simulate import Simulation, simulate

_NOTHING = 1e-3  # shares below this are left out


@dataclass(frozen=True, eq=False)
class Demand:
    """The figures of a step that the programme needs."""

    weight_bytes: int  # of all weights that may be on any device
    work_ns: I64  # [D] of all parts on one device
    room_bytes: I64  # [D] for weights, beside what else is in memory
    buffer_bytes: int = 0  # of it on each device that weights are sent to


@dataclass(frozen=True, slots=True)
class StreamShares:
    """The devices that compute, their shares of the parts, which sum to 1, and the time that the programme expects."""

    devices: tuple[int, ...]
    parts: tuple[float, ...]
    expected_ns: float
    streams: bool = True


def best_shares(
    cluster: Cluster, demand: Demand, host: int, devices: Sequence[int], *, streams: bool = True
) -> StreamShares | None:
    """Returns the best shares of `devices`, the host among them if it may compute; None if nothing fits.

    A step is taken for a chain of equal parts, each with its part of the weights. A device keeps the weights of some of
    its parts, and gets those of the others from the host during the step. T is the step time, w the bytes of all
    weights:

        minimise T    kept + streamed parts = 1 in all                 every part is computed somewhere
                      sum of parts x time of all work there <= T       one after the other
                      w x streamed parts / rate <= T                   for each channel out of the host
                      w x kept parts <= memory                         for each device; the host keeps what it sends

    It leaves out latencies, buffers and what runs at once. Without `streams` weights are kept where they are used."""
    from scipy.optimize import linprog  # half a second, which steps that stream nothing never need

    count, weight = len(devices), max(demand.weight_bytes, 1)
    work = demand.work_ns[list(devices)] / 1e9
    taken = [demand.buffer_bytes if streams and device != host else 0 for device in range(len(demand.room_bytes))]
    may_receive = streams & (demand.room_bytes >= taken)
    room = np.maximum(np.where(may_receive, demand.room_bytes - taken, demand.room_bytes), 0) / weight
    channels: dict[str, F64] = {}  # [count] seconds of each for all weights, by the device that they go to
    for number, device in enumerate(devices):
        if device != host:
            route = cluster.route(host, device)
            for channel in route.channels or (f"to {device}",):
                channels.setdefault(channel, np.zeros(count))[number] = weight / route.bytes_per_second
    seconds = np.array(list(channels.values())).reshape(-1, count)
    is_device = np.array([device != host for device in devices])
    kept = np.eye(count)[is_device]
    rows = (  # of kept parts, streamed parts, and T
        np.concatenate((work, work, [-1.0]))[None],
        np.hstack((np.zeros_like(seconds), seconds, np.full((len(seconds), 1), -1.0))),
        np.hstack((kept, np.zeros_like(kept), np.zeros((len(kept), 1)))),
        np.concatenate((~is_device, is_device, [0.0]))[None],
    )
    limits = np.concatenate((np.zeros(1 + len(seconds)), room[list(devices)][is_device], room[[host]]))
    most = [None if device != host and may_receive[device] else 0.0 for device in devices]
    bounds = [(0.0, None)] * count + [(0.0, share) for share in most] + [(0.0, None)]
    to_least, is_share = np.repeat([0.0, 1.0], [2 * count, 1]), np.repeat([1.0, 0.0], [2 * count, 1])[None]
    answer = linprog(to_least, A_ub=np.vstack(rows), b_ub=limits, A_eq=is_share, b_eq=[1.0], bounds=bounds)
    if answer.status != 0:
        return None
    parts = answer.x[:count] + answer.x[count : 2 * count]
    used = [number for number in range(count) if parts[number] > _NOTHING]
    total = sum(float(parts[number]) for number in used)
    chosen, shares = tuple(int(devices[x]) for x in used), tuple(float(parts[x]) / total for x in used)
    return StreamShares(chosen, shares, float(answer.fun) * 1e9, streams)


@dataclass(frozen=True, eq=False)
class Part:
    """Devices of a machine that compute, a host, and [N, D] where ops have room."""

    shares: StreamShares
    host: int
    may: Bool

    @classmethod
    def by_itself(cls, problem: Problem, shares: StreamShares, host: int, may: Bool) -> "Part":
        """Leaves the other devices out, unless some op may be nowhere else."""
        own = may & np.isin(np.arange(problem.num_devices), (*shares.devices, host))
        return cls(shares, host, own if own.any(axis=1).all() else may)


@dataclass(frozen=True, eq=False)
class StreamStart:
    """A layout, and shares to begin from."""

    shares: StreamShares
    layout: StreamLayout

    @property
    def key(self) -> tuple[object, ...]:
        """Is equal for starts of which all layouts are equal."""
        layout, shares = self.layout, self.shares
        masks = [layout.placed(np.full(len(layout.order), device)) for device in (*shares.devices, layout.host)]
        masks += [layout.order, layout.streamable, np.isfinite(layout.gate_cost_ns)]
        parts = tuple(round(part, layout.settings.digits) for part in shares.parts)
        return layout.host, shares.devices, parts, shares.streams, *(mask.tobytes() for mask in masks)


_Ranked = TypeVar("_Ranked", Part, StreamStart)


def stream_starts(problem: Problem, settings: StreamingSettings) -> list[StreamStart]:
    """Returns the most promising starts, the best one first; none if one device holds everything."""
    devices, limits = problem.cluster.devices, problem.memory_limit_bytes.tolist()
    kinds = [(device.kind, limit) for device, limit in zip(devices, limits, strict=True)]
    allowed_ns = np.where(problem.allowed, problem.op_time_ns, 0)
    times = np.where(problem.allowed, allowed_ns, allowed_ns.max(axis=1, keepdims=True))
    by_speed = np.argsort(times.sum(axis=0), kind="stable").tolist()  # what is not allowed somewhere counts as slow
    by_memory = np.argsort(-problem.memory_limit_bytes, kind="stable").tolist()
    hosts = list({kinds[host]: host for host in reversed(by_memory)}.values())[::-1]
    masks = {may.tobytes(): may for most in settings.passing for may in (roomy(problem, most),)}
    parts: dict[tuple[object, ...], Part] = {}
    for host, may in product(hosts[: settings.num_hosts] if problem.num_devices > 1 else (), masks.values()):
        main = next(device for device in by_speed if device != host)
        if not (may[:, main] & may[:, host]).any():
            continue
        alone = _alone(problem, main, host, may)
        if alone.feasible and np.array_equal(may[:, main], problem.allowed[:, main]):
            if main == by_speed[0]:
                return []
            continue
        for layout in _layouts(alone, main, host, may, settings)[:1]:
            for shares in _shares(layout, main):
                for part in (Part(shares, host, may), Part.by_itself(problem, shares, host, may)):
                    parts.setdefault((host, shares.devices, shares.streams, part.may.tobytes()), part)
    promising = _most_promising(list(parts.values()), settings)
    starts = {start.key: start for part in reversed(promising) for start in _starts(problem, part, by_speed, settings)}
    return _most_promising(list(reversed(starts.values())), settings)


def _starts(problem: Problem, part: Part, by_speed: Sequence[int], settings: StreamingSettings) -> list[StreamStart]:
    """Returns the starts of a part of the machine."""
    host, may, used = part.host, part.may, part.shares.devices
    main = next((device for device in by_speed if device in used and device != host), host)
    starts = []
    for layout in _layouts(_alone(problem, main, host, may), main, host, may, settings):
        demand = _demand(layout, main)
        shares = best_shares(problem.cluster, demand, host, used, streams=part.shares.streams)
        if shares is not None:
            starts.append(StreamStart(_evened(problem, host, shares), layout))
    return starts


def _most_promising(ranked: Sequence[_Ranked], settings: StreamingSettings) -> list[_Ranked]:
    """Returns the first few by expected time, without those that are far slower."""
    ranked = sorted(ranked, key=lambda each: each.shares.expected_ns)
    return [
        each
        for each in ranked[: settings.num_starts]
        if each.shares.expected_ns <= settings.far_start * ranked[0].shares.expected_ns
    ]


def _alone(problem: Problem, main: int, host: int, may: Bool) -> Simulation:
    """Returns the step with all on `main` where it may be."""
    return simulate(problem, np.where(may[:, main], main, fallbacks(problem, host, may)))


def _layouts(alone: Simulation, main: int, host: int, may: Bool, settings: StreamingSettings) -> list[StreamLayout]:
    """Returns the layouts from a step on one device, without and with large tables that stay on the host."""
    tables = _tables(alone, main, host, settings.table_share)
    fixed = [np.zeros_like(tables), tables] if tables.any() else [tables]
    return [layout for each in fixed if (layout := StreamLayout.of(alone, host, may, each, settings)) is not None]


def _shares(layout: StreamLayout, main: int) -> list[StreamShares]:
    """Returns shares for the most promising sets of devices, the best one first, and for the device `main` alone. After
    the best set come the best without one of its devices, and so on: it never expects more of a part of a set."""
    problem, host = layout.problem, layout.host
    cluster, demand = problem.cluster, _demand(layout, main)
    is_usual = layout.may[:, main]
    able = tuple(device for device in range(problem.num_devices) if layout.may[is_usual, device].mean() > 0.5)
    alone, kept = (best_shares(cluster, demand, host, (main,)), best_shares(cluster, demand, host, able, streams=False))
    known = {able: best_shares(cluster, demand, host, able)}
    waiting = [able]
    found: dict[tuple[object, ...], StreamShares] = {}
    while waiting and len(found) < layout.settings.num_sets:
        waiting.sort(key=lambda devices: shares.expected_ns if (shares := known[devices]) else inf)
        devices = waiting.pop(0)
        shares = known[devices]
        kinds = () if shares is None else tuple(sorted(_kind(problem, host, device) for device in shares.devices))
        if shares is None or kinds in found:
            continue
        found[kinds] = _evened(problem, host, shares)
        for left_out in {_kind(problem, host, device): device for device in shares.devices}.values():
            rest = tuple(device for device in devices if device != left_out)
            if rest and rest not in known:
                known[rest] = best_shares(cluster, demand, host, rest)
                waiting.append(rest)
    others = [_evened(problem, host, shares) for shares in (alone, kept) if shares is not None]
    return [*found.values(), *others] if found else []


def _kind(problem: Problem, host: int, device: int) -> tuple[str, int, int]:
    """Returns what devices that are alike have in common: their kind, memory and link."""
    cluster = problem.cluster
    rate = 0 if device == host else cluster.route(host, device).bytes_per_second
    return cluster.devices[device].kind, int(problem.memory_limit_bytes[device]), rate


def _evened(problem: Problem, host: int, shares: StreamShares) -> StreamShares:
    """Returns the shares with devices that are alike taking equal ones: a programme's answer is at a corner."""
    alike: dict[object, list[int]] = {}
    for number, device in enumerate(shares.devices):
        alike.setdefault(_kind(problem, host, device), []).append(number)
    parts = np.array(shares.parts)
    for numbers in alike.values():
        parts[numbers] = parts[numbers].mean()
    return replace(shares, parts=tuple(parts.tolist()))


def _demand(layout: StreamLayout, main: int) -> Demand:
    """Returns what the linear programme needs to know of a step."""
    graph = layout.problem.graph
    is_free = layout.may[:, main]
    return Demand(
        int(graph.resident_bytes[layout.may.any(axis=1)].sum()),
        layout.time_ns[is_free].sum(axis=0) + layout.time_ns[~is_free, main].sum(),
        layout.room_bytes,
        layout.settings.buffered_weights * _usual_bytes(graph.resident_bytes[layout.streamable]),
    )


def _usual_bytes(size: I64) -> int:
    """Returns the size that half of all bytes are in weights of at most that size."""
    ascending = np.sort(size)
    total = np.cumsum(ascending)
    return int(ascending[np.searchsorted(total, total[-1] / 2)])


def _tables(alone: Simulation, main: int, host: int, table_share: float) -> Bool:
    """[N] large tables of which an op reads a few rows, with their readers: the host computes these."""
    problem, graph = alone.problem, alone.problem.graph
    sources = graph.producers[graph.edge_tensors]
    is_table = np.zeros(graph.num_ops, np.bool_)
    for op in np.flatnonzero(graph.resident_bytes > table_share * max(int(alone.missing_bytes[main]), 1)).tolist():
        readers = graph.consumers[sources == op]
        moved = [op, *readers]
        may = problem.allowed[moved, host].all() and (graph.groups[moved] < 0).all()
        if may and len(moved) > 1 and graph.bytes_accessed[readers].sum() < graph.resident_bytes[op]:
            is_table[moved] = True
    return is_table
