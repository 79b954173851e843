"""Weight streaming: a host with room holds the weights that do not fit, and sends each shortly before its use.

A weight is ready at time 0, so the host would send all of them at once and fill the memory of the computing device. A
plan's order prevents it: `stream_layout.py` has the order and a picture. Several devices take turns, window by window:
while one computes, the links of the others are in use, and the memories of all hold weights that are not sent at all.
Their shares of the work follow from speed, memory and links; a linear programme (`stream_shares.py`) gives them.

Stages that fill memories, with nothing sent (`filled_stages.py`), come first: where links are slow they are best.
Layouts with several numbers of windows are tried next, each with the least that has to be streamed. A descent
then changes shares, windows and devices as long as steps get faster. The host itself computes where that pays.
(ZeRO-Inference and FlexGen stream layer by layer to equal devices.) N ops, D devices.
"""

from collections.abc import Iterator
from dataclasses import replace
from itertools import combinations, product
from math import ceil

import numpy as np

from gdp.arrays import F64, I64, Bool
from gdp.search.filled_stages import best_fills, fill_stages
from gdp.search.room import fallbacks, roomy
from gdp.search.stream_layout import StreamLayout, Turns
from gdp.search.stream_shares import Demand, StreamShares, best_shares
from gdp.simulator.problem import Problem
from gdp.simulator.simulate import NEVER, Simulation, simulate

# numbers of turns of each device, the most different ones first, all but 1 raised to the least that memory allows;
# 0: two turns, the weights used last are streamed
_ROUNDS = (2, 16, 1, 0, 48, 4, 24, 8, 96)
_NUM_HOSTS = 2  # the devices with the most memory that may be hosts
_MOST_SUBSETS = 4  # of up to so many devices all subsets are looked at
_NUM_SHARES = 4  # so many of them are simulated,
_WORTH = 1.5  # if the programme expects at most so many times the least step time
_LATE = 2.0  # stages with nothing sent are tried later if they seem to take so many times the least expected time
_CLOSE, _FEWEST = 1.3, 3  # layouts at most so many times slower than the best one, and so many, are tried further
_PASSING = (1.0, 0.5, 0.25)  # of a memory, at most, are for inputs and results of an op, or it goes elsewhere
_BUFFER = 2  # weights, one in use and one on its way, have room on a device that weights are sent to
_LARGE = 100  # tables of at least 1 / _LARGE of the missing bytes may go to the host
_STEPS = (0.3, 0.1, 0.03)  # of a device's share, that go to another device in a descent
_FACTORS = (2.0, 1.4, 1 / 1.4, 0.5)  # of the number of turns
_MOST_ROUNDS = 512
_RESTARTS = 3  # descents from random changes of the best two layouts
_GAIN = 0.998  # a pass of a descent that gains less is followed by one with smaller steps


def stream_weights(problem: Problem, rival_ns: int = NEVER) -> Iterator[Simulation]:
    """Yields candidate steps, feasible or not; the caller keeps the best and may stop at any time.

    There are none if one device holds everything. Layouts that are far slower than `rival_ns` are not refined.
    """
    starts = _starts(problem)
    fills = best_fills(list({id(layout): layout for layout, _ in starts}.values()))
    least_ns = min((shares.expected_ns for _, shares in starts), default=0.0)
    is_late = bool(fills) and fills[0].expected_ns > _LATE * least_ns
    if not is_late:
        yield from fill_stages(fills)
    descents = [_Descent(layout, shares) for layout, shares in starts]
    for rounds in _ROUNDS:
        for descent in descents:
            if (turns := descent.turns(rounds)) not in descent.tried:
                yield from descent.attempt(turns, descent.streamed)
        descents.sort(key=lambda descent: descent.best_ns)
        close_ns = _CLOSE * descents[0].best_ns if descents else NEVER
        descents = [each for rank, each in enumerate(descents) if rank < _FEWEST or each.best_ns <= close_ns]
    if is_late:
        yield from fill_stages(fills)
    for descent in descents:
        if descent.best_ns <= _WORTH * rival_ns:
            yield from descent.run()
    descents = sorted((each for each in descents if each.best_ns <= _WORTH * rival_ns), key=lambda each: each.best_ns)
    rng = np.random.default_rng(0)
    for restart in range(_RESTARTS if descents else 0):
        yield from descents[restart % min(len(descents), 2)].restart(rng)


def _starts(problem: Problem) -> list[tuple[StreamLayout, StreamShares]]:
    """Returns layouts, each with shares to begin from, the most promising ones first."""
    starts: list[tuple[StreamLayout, StreamShares]] = []
    devices, limits = problem.cluster.devices, problem.memory_limit_bytes.tolist()
    kinds = [(device.kind, limit) for device, limit in zip(devices, limits, strict=True)]
    allowed_ns = np.where(problem.allowed, problem.op_time_ns, 0)
    times = np.where(problem.allowed, allowed_ns, allowed_ns.max(axis=1, keepdims=True))
    by_speed = np.argsort(times.sum(axis=0), kind="stable").tolist()  # what is not allowed somewhere counts as slow
    by_memory = np.argsort(-problem.memory_limit_bytes, kind="stable").tolist()
    hosts = list({kinds[host]: host for host in reversed(by_memory)}.values())[::-1]
    masks = {may.tobytes(): may for most in _PASSING for may in (roomy(problem, most),)}
    nothing = np.zeros(problem.num_ops, np.bool_)
    for host, may in product(hosts[:_NUM_HOSTS] if problem.num_devices > 1 else (), masks.values()):
        main = next(device for device in by_speed if device != host)
        if not (may[:, main] & may[:, host]).any():
            continue
        alone = simulate(problem, np.where(may[:, main], main, fallbacks(problem, host, may)))
        if alone.feasible and np.array_equal(may[:, main], problem.allowed[:, main]):
            if main == by_speed[0]:
                return []
            continue
        if (layout := StreamLayout.of(alone, host, may, nothing)) is not None:
            starts += [(layout, shares) for shares in _shares(layout, main)]
        tables = _tables(alone, main, host)
        if tables.any() and (layout := StreamLayout.of(alone, host, may, tables)) is not None:
            starts += [(layout, shares) for shares in _shares(layout, main)[:1]]
    least_ns = min((shares.expected_ns for _, shares in starts), default=0.0)
    distinct = {(layout.host, shares): (layout, shares) for layout, shares in reversed(starts)}
    worth = [start for start in distinct.values() if start[1].expected_ns <= _WORTH * least_ns]
    return sorted(worth, key=lambda start: start[1].expected_ns)[: 2 * _NUM_SHARES]


def _shares(layout: StreamLayout, main: int) -> list[StreamShares]:
    """Returns shares for the most promising sets of devices, the best one first, and for the device `main` alone."""
    problem, host = layout.problem, layout.host
    cluster, demand = problem.cluster, _demand(layout, main)
    is_usual = layout.may[:, main]
    able = [device for device in range(problem.num_devices) if layout.may[is_usual, device].mean() > 0.5]
    best = best_shares(cluster, demand, host, able)
    if best is None:
        return []
    used = best.devices
    if len(used) <= _MOST_SUBSETS:
        subsets = [subset for size in range(1, len(used)) for subset in combinations(used, size)]
    else:
        subsets = [tuple(device for device in used if device != left_out) for left_out in used]
    others = [best_shares(cluster, demand, host, subset) for subset in (*subsets, (main,))]
    distinct: dict[tuple[tuple[str, int, int], ...], StreamShares] = {}
    for shares in (best, *others):
        if shares is not None:
            kinds = tuple(sorted(_kind(problem, host, device) for device in shares.devices))
            distinct.setdefault(kinds, _evened(problem, host, shares))
    kept = best_shares(cluster, demand, host, able, streams=False)
    found = sorted(distinct.values(), key=lambda shares: shares.expected_ns)[:_NUM_SHARES]
    return found if kept is None else [*found, _evened(problem, host, kept)]


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
    problem, graph = layout.problem, layout.problem.graph
    is_free = layout.may[:, main]
    every = np.arange(problem.num_ops)
    fallback_ns = problem.op_time_ns[every, layout.fallback]
    times = np.where(layout.may, problem.op_time_ns, fallback_ns[:, None])
    spent = fallback_ns[~is_free].sum()
    return Demand(
        int(graph.resident_bytes[layout.may.any(axis=1)].sum()),
        np.maximum(times, 0)[is_free].sum(axis=0) + spent,
        layout.room_bytes,
        _BUFFER * _usual_bytes(graph.resident_bytes[layout.streamable]),
    )


def _usual_bytes(size: I64) -> int:
    """Returns the size that half of all bytes are in weights of at most that size."""
    ascending = np.sort(size)
    total = np.cumsum(ascending)
    return int(ascending[np.searchsorted(total, total[-1] / 2)])


def _tables(alone: Simulation, main: int, host: int) -> Bool:
    """[N] large tables of which an op reads a few rows, with their readers: the host computes these."""
    problem, graph = alone.problem, alone.problem.graph
    readers_of: list[list[int]] = [[] for _ in range(graph.num_ops)]
    for producer, consumer in zip(graph.producers[graph.edge_tensors].tolist(), graph.consumers.tolist(), strict=True):
        readers_of[producer].append(consumer)
    is_table = np.zeros(graph.num_ops, np.bool_)
    for op in np.flatnonzero(graph.resident_bytes * _LARGE > max(int(alone.missing_bytes[main]), 1)).tolist():
        moved = [op, *readers_of[op]]
        may = problem.allowed[moved, host].all() and (graph.groups[moved] < 0).all()
        if may and len(moved) > 1 and graph.bytes_accessed[readers_of[op]].sum() < graph.resident_bytes[op]:
            is_table[moved] = True
    return is_table


class _Descent:
    """Changes the turns of a layout, one thing at a time, and keeps what makes the step faster."""

    def __init__(self, layout: StreamLayout, shares: StreamShares) -> None:
        self.layout = layout
        self.best_ns = NEVER
        self._shares = shares
        self._best: tuple[Turns, F64] | None = None
        self.tried: set[Turns] = set()
        weights = layout.problem.graph.resident_bytes[layout.streamable].sum()
        windows = [  # two of a device are in its memory
            2 * part * weights / layout.room_bytes[device]
            for device, part in zip(shares.devices, shares.parts, strict=True)
            if device != layout.host and layout.room_bytes[device] > 0
        ]
        self._fewest = ceil(max(windows, default=1.0))  # rounds

    def turns(self, rounds: int) -> Turns:
        """Returns the turns to begin from, with `rounds` of `_ROUNDS`."""
        shares = self._shares
        if rounds == 0:
            return Turns(shares.devices, shares.parts, 2, last=True)
        if rounds > 1:
            rounds = min(max(rounds, self._fewest), _MOST_ROUNDS)
        return Turns(shares.devices, shares.parts, rounds, is_gated=rounds > 1)

    @property
    def streamed(self) -> F64 | None:
        """[D] the shares streamed of the fastest step that fits."""
        return None if self._best is None else self._best[1]

    def attempt(self, turns: Turns, guess: F64 | None = None) -> Iterator[Simulation]:
        """Yields steps with these turns down to the least that has to be streamed; keeps the fastest that fits."""
        self.tried.add(turns)
        for found, streamed in self.layout.fit(turns, guess):
            yield found
            if found.step_time_ns < self.best_ns and found.feasible:
                self.best_ns, self._best = found.step_time_ns, (turns, streamed)

    def restart(self, rng: np.random.Generator) -> Iterator[Simulation]:
        """Yields steps of another descent, from turns not far from the best ones."""
        if self._best is None:
            return
        kept, self._best, self.best_ns = (self._best, self.best_ns), None, NEVER
        turns, streamed = kept[0]
        parts = np.array(turns.parts) * rng.uniform(0.7, 1.4, len(turns.parts))
        rounds = min(max(round(turns.rounds * rng.uniform(0.5, 2.0)), 1), _MOST_ROUNDS)
        begin = replace(turns, parts=tuple((parts / parts.sum()).tolist()), rounds=rounds)
        yield from self.attempt(begin, streamed)
        yield from self.run()
        if kept[1] < self.best_ns:
            self._best, self.best_ns = kept

    def run(self) -> Iterator[Simulation]:
        """Yields steps of ever finer changes until none helps."""
        for step in _STEPS:
            before = NEVER
            while self._best is not None and self.best_ns < _GAIN * before:
                before = self.best_ns
                for turns in _changed(self._best[0], step):
                    if turns not in self.tried:
                        yield from self.attempt(turns, self._best[1])


def _changed(turns: Turns, step: float) -> Iterator[Turns]:
    """Yields turns that differ in one thing: their number, a share, a device less, what is sent when."""
    for factor in _FACTORS:
        rounds = min(max(round(turns.rounds * factor), 1), _MOST_ROUNDS)
        yield replace(turns, rounds=rounds)
    count = len(turns.devices)
    pairs = [(i, j) for i in range(count) for j in range(count) if i != j]
    if count > _MOST_SUBSETS:
        pairs = [(i, (i + ahead) % count) for i in range(count) for ahead in (1, count - 1)]
    for giver, taker in pairs:
        parts = list(turns.parts)
        given = step * min(parts[giver], parts[taker])
        parts[giver] -= given
        parts[taker] += given
        yield replace(turns, parts=tuple(parts))
    yield replace(turns, is_gated=not turns.is_gated)
    yield replace(turns, keeps_first=not turns.keeps_first)
    if count > 1:
        yield replace(turns, devices=turns.devices[1:] + turns.devices[:1], parts=turns.parts[1:] + turns.parts[:1])
        for left_out in range(count):
            yield _without(turns, left_out)


def _without(turns: Turns, left_out: int) -> Turns:
    kept = [number for number in range(len(turns.devices)) if number != left_out]
    rest = sum(turns.parts[number] for number in kept)
    return replace(
        turns,
        devices=tuple(turns.devices[number] for number in kept),
        parts=tuple(turns.parts[number] / rest for number in kept),
    )
