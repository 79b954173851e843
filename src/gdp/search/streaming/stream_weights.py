"""Weight streaming: a host with room holds the weights that do not fit, and sends each shortly before its use.

A weight is ready at time 0, so the host would send all of them at once and fill the memory of the computing device. A
plan's order prevents it: `stream_layout.py` has the order and a picture. Several devices take turns, window by window:
while one computes, the links of the others are in use, and the memories of all hold weights that are not sent at all.
Their shares of the work follow from speed, memory and links; a linear programme (`stream_starts.py`) gives them.

Stages that fill memories, with nothing sent, come first, where links are slow and a step is one chain of ops:

    gpu1 full | gpu0 full | cpu: what is left | gpu2 full

Such a step takes the sum of its stages' times: nothing runs at once, so balanced stages (`placers/contiguous.py`) gain
nothing. Each device holds as much as fits, all but the slowest one of a sequence, which takes what is left. Sums of
times along the chain rank all sequences of all sets of devices; only the best of them are simulated, and their cuts
moved until memories are full.

Layouts with several numbers of windows are tried next, each with the least that has to be streamed: the most promising
ones, so that few simulations are enough for a good step, then all. A descent changes shares, windows and devices as
long as steps get faster. The host itself computes where that pays.
(ZeRO-Inference and FlexGen stream layer by layer to equal devices.) N ops, D devices, C cuts: a cut
follows a weight, where least is transferred."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import islice, pairwise, permutations, product
from math import ceil

import numpy as np

from gdp.arrays import F64, I64, combined, running_sums
from gdp.search.settings import DEFAULTS, StreamingSettings
from gdp.search.streaming.stream_layout import StreamLayout, Turns
from gdp.search.streaming.stream_starts import StreamStart, stream_starts
from gdp.simulator.problem import Placement, Problem
from gdp.simulator.simulate import NEVER, Simulation, simulate


@dataclass(frozen=True, eq=False)
class _Chain:
    """Sums along the order of ops, at each cut."""

    positions: I64  # [C] of the last op before the cut, -1 for the first
    held_bytes: I64  # [C] resident before the cut
    spent_ns: I64  # [D, C] of all ops before the cut, on one device
    moved_bytes: I64  # [C] over the cut

    @classmethod
    def of(cls, layout: StreamLayout) -> "_Chain":
        graph, num_ops = layout.problem.graph, layout.problem.num_ops
        is_free = layout.may.any(axis=1)
        held = np.cumsum(combined(np.add, layout.homes + 1, np.where(is_free, graph.resident_bytes, 0), num_ops + 1))
        times = combined(np.add, layout.homes + 1, layout.time_ns, num_ops + 1)
        moved = _crossing(layout)
        starts = np.flatnonzero(np.diff(held, prepend=-1))
        ends = np.append(starts[1:], num_ops + 1)
        cuts = np.array([first + int(np.argmin(moved[first:last])) for first, last in zip(starts, ends, strict=True)])
        cuts[0], cuts[-1] = 0, num_ops
        return cls(cuts - 1, held[cuts], np.cumsum(times, axis=0)[cuts].T, moved[cuts])

    def ends(self, sequence: tuple[int, ...], rest: int, room_bytes: F64) -> list[int]:
        """Returns the cut at which each stage of `sequence` ends; `rest` is the number of the one between full ones."""
        last = len(self.positions) - 1
        ends = [last] * len(sequence)
        begin = 0
        for number in range(rest):
            most = self.held_bytes[begin] + room_bytes[sequence[number]]
            begin = ends[number] = max(int(np.searchsorted(self.held_bytes, most, side="right")) - 1, begin)
        end = last
        for number in range(len(sequence) - 1, rest, -1):
            least = self.held_bytes[end] - room_bytes[sequence[number]]
            end = max(min(int(np.searchsorted(self.held_bytes, least)), end), begin)
            ends[number - 1] = end
        return ends


@dataclass(frozen=True, eq=False)
class Fill:
    """A sequence of devices whose memories stages fill; the stage number `rest` takes what is left."""

    layout: StreamLayout
    chain: _Chain
    expected_ns: float
    sequence: tuple[int, ...]
    rest: int


def best_fills(layouts: Sequence[StreamLayout], settings: StreamingSettings) -> list[Fill]:
    """Returns the most promising sequences of devices, the best one first; none where nothing fits."""
    fills = []
    for layout in layouts:
        chain = _Chain.of(layout)
        fills += [Fill(layout, chain, *sequence) for sequence in _sequences(layout, chain)]
    fills.sort(key=lambda fill: fill.expected_ns)
    return [
        fill
        for fill in fills[: settings.num_sequences]
        if fill.expected_ns <= settings.far_sequence * fills[0].expected_ns
    ]


def fill_stages(fills: Sequence[Fill]) -> Iterator[Simulation]:
    """Yields steps of `fills`, and of the first one with a device that computes beside the stage of what is left."""
    for fill in fills:
        yield from _filled(fill)
    for fill in fills[:1]:
        others = fill.sequence[: fill.rest] + fill.sequence[fill.rest + 1 :]
        slow_first = sorted(others, key=lambda device: -int(fill.chain.spent_ns[device, -1]))
        for device, share in product(
            slow_first[: fill.layout.settings.num_helpers], fill.layout.settings.helper_shares
        ):
            yield from _filled(fill, device, share)


def _sequences(layout: StreamLayout, chain: _Chain) -> list[tuple[float, tuple[int, ...], int]]:
    """Returns the expected time of sequences of devices that hold everything, and which stage takes what is left."""
    cluster, room_bytes = layout.problem.cluster, layout.room_bytes
    total_ns = chain.spent_ns[:, -1]
    has_room = layout.may.any(axis=0) & (room_bytes > 0)
    able = [device for device in np.argsort(total_ns, kind="stable").tolist() if has_room[device]]
    alike = {device: (cluster.devices[device].kind, int(room_bytes[device])) for device in able}
    found: list[tuple[float, tuple[int, ...], int]] = []
    seen: set[tuple[object, ...]] = set()
    every = (each for size in range(1, len(able) + 1) for each in permutations(able, size))
    for sequence in islice(every, layout.settings.most_sequences):
        rates = tuple(cluster.route(*pair).bytes_per_second for pair in pairwise(sequence))
        if (key := (rates, *(alike[device] for device in sequence))) in seen:
            continue
        seen.add(key)
        rest = max(range(len(sequence)), key=lambda number: int(total_ns[sequence[number]]))
        ends = chain.ends(sequence, rest, room_bytes.astype(np.float64))
        begin, spent = 0, 0.0
        for number, (device, end) in enumerate(zip(sequence, ends, strict=True)):
            if chain.held_bytes[end] - chain.held_bytes[begin] > room_bytes[device]:
                break
            spent += float(chain.spent_ns[device, end] - chain.spent_ns[device, begin])
            if number and end > begin:
                route = cluster.route(sequence[number - 1], device)
                spent += route.latency_ns + float(chain.moved_bytes[begin]) * 1e9 / route.bytes_per_second
            begin = end
        else:
            found.append((spent, sequence, rest))
    return found


def _filled(fill: Fill, helper: int = -1, share: float = 0.0) -> Iterator[Simulation]:
    """Yields steps of one sequence, with room corrected by what its devices lack or have left. A `share` of the room of
    `helper` is for ops of the stage that takes what is left, which run beside others of it."""
    layout, chain, sequence, rest = fill.layout, fill.chain, fill.sequence, fill.rest
    problem = layout.problem
    limits = problem.memory_limit_bytes
    room = layout.room_bytes.astype(np.float64)
    low, high = np.zeros(len(room)), np.full(len(room), np.inf)
    tried: set[bytes] = set()
    for _ in range(layout.settings.most_moves):
        kept = room.copy()
        kept[helper] *= 1 - share
        ends = chain.ends(sequence, rest, kept)
        wanted = np.array(sequence)[np.searchsorted(chain.positions[ends[:-1]], layout.homes)]
        if share:
            wanted = _with_help(layout, wanted, sequence[rest], helper, share * room[helper])
        placement = layout.placed(wanted)
        if placement.tobytes() in tried:
            return
        tried.add(placement.tobytes())
        order = [layout.order[placement[layout.order] == device] for device in range(problem.num_devices)]
        found = simulate(problem, placement, order=order)
        yield found
        left = limits - found.peak_memory_bytes
        low = np.where(left >= 0, np.maximum(low, room), low)
        high = np.where(left < 0, np.minimum(high, room), high)
        aimed = room + left
        room = np.where((aimed > low) & (aimed < high), aimed, np.where(left < 0, (low + high) / 2, room))


def _with_help(layout: StreamLayout, wanted: Placement, busy: int, helper: int, room_bytes: float) -> Placement:
    """Returns `wanted` [N] with ops of `busy` on `helper` that end there while `busy` runs others in the meantime. Such
    as one of two products of the same input, whose results are then multiplied."""
    problem, graph, cluster = layout.problem, layout.problem.graph, layout.problem.cluster
    sources, targets, position = graph.producers[graph.edge_tensors], graph.consumers, layout.position
    is_made = ~layout.is_source[sources]
    begin = combined(np.maximum, targets[is_made], position[sources[is_made]], graph.num_ops, -1)
    end = combined(np.minimum, sources, position[targets], graph.num_ops, graph.num_ops)
    held = combined(np.add, layout.homes, graph.resident_bytes, graph.num_ops)
    rate = min(cluster.route(busy, helper).bytes_per_second, cluster.route(helper, busy).bytes_per_second)
    latency_ns = cluster.route(busy, helper).latency_ns + cluster.route(helper, busy).latency_ns
    moved = problem.simulator.arrays.memory.alloc_bytes.copy()
    np.add.at(moved, targets[is_made], graph.tensor_bytes[graph.edge_tensors][is_made])
    needed_ns = problem.op_time_ns[:, helper] + latency_ns + moved * 1e9 / rate
    busy_ns = np.where((wanted == busy) & ~layout.is_source, problem.op_time_ns[:, busy], 0)[layout.order]
    can = (wanted == busy) & layout.may[:, helper] & layout.may[:, busy] & ~layout.is_source
    helped = np.zeros(graph.num_ops, np.bool_)
    for op in layout.order[can[layout.order] & (held[position[layout.order]] > 0)].tolist():
        here = position[op]
        if held[here] > room_bytes or layout.homes[op] != here:
            continue
        meanwhile_ns = busy_ns[begin[op] + 1 : end[op]].sum() - busy_ns[here]
        if needed_ns[op] <= meanwhile_ns:
            helped[here] = True
            busy_ns[here] = 0
            room_bytes -= held[here]
    return np.where(helped[layout.homes] & (wanted == busy), helper, wanted)


def _crossing(layout: StreamLayout) -> I64:
    """Returns [N + 1] the bytes of results that are used behind a cut before each position."""
    graph = layout.problem.graph
    first = layout.homes[graph.producers]
    last = first.copy()
    np.maximum.at(last, graph.edge_tensors, layout.homes[graph.consumers])
    size = np.where(graph.is_resident, 0, graph.tensor_bytes)
    return running_sums(first + 1, last + 1, size, graph.num_ops + 1)


def stream_weights(
    problem: Problem, rival_ns: int = NEVER, settings: StreamingSettings = DEFAULTS.streaming
) -> Iterator[Simulation]:
    """Yields candidate steps, feasible or not; the caller keeps the best and may stop at any time. There are none if
    one device holds everything. A few layouts are tried with few numbers of turns, and the best is refined; then all
    layouts, with all numbers of turns; then the faster half is refined again and again, from random changes at last.
    Layouts that are far slower than `rival_ns` are not refined."""
    starts = stream_starts(problem, settings)
    fills = best_fills([start.layout for start in starts], settings)
    least_ns = min((start.shares.expected_ns for start in starts), default=0.0)
    is_late = bool(fills) and fills[0].expected_ns > settings.late_fill * least_ns
    if not is_late:
        yield from fill_stages(fills)
    known: dict[bytes, I64] = {}
    descents = [_Descent(start, known) for start in starts]
    for group, num_refined in ((descents[: settings.num_first], 1), (descents, settings.fewest)):
        for rounds in settings.rounds[: settings.num_early]:
            for descent in group:
                yield from descent.begin(rounds, settings.rough_gain)
        for descent in _promising(group, settings)[:num_refined]:
            if descent.best_ns <= settings.far_layout * rival_ns:
                yield from descent.run(settings.steps[:1])
    descents = _promising(descents, settings)
    for rounds in settings.rounds[settings.num_early :]:
        for descent in descents:
            yield from descent.begin(rounds, settings.exact_gain)
        descents = _promising(descents, settings)
    if is_late:
        yield from fill_stages(fills)
    most_ns = settings.far_layout * rival_ns
    descents = [descent for descent in _promising(descents, settings) if descent.best_ns <= most_ns]
    for descent in descents:
        yield from descent.run()
    descents.sort(key=lambda descent: descent.best_ns)
    rng = np.random.default_rng(0)
    for restart in range(settings.num_restarts if descents else 0):
        yield from descents[restart % min(len(descents), settings.num_restarted)].restart(rng)


def _promising(descents: "list[_Descent]", settings: StreamingSettings) -> "list[_Descent]":
    """Returns the faster half of `descents`, and those of which nothing fits so far that may become as fast."""
    descents = sorted(descents, key=lambda descent: descent.best_ns)
    most = max(len(descents) // 2, settings.fewest)
    best_ns = descents[0].best_ns if descents else NEVER
    return [each for rank, each in enumerate(descents) if rank < most or (not each.fits and each.expected_ns < best_ns)]


class _Descent:
    """Changes the turns of a layout, one thing at a time, and keeps what makes the step faster."""

    def __init__(self, start: StreamStart, known: dict[bytes, I64]) -> None:
        """`known` has the memory [D] of steps that were simulated."""
        layout, shares = start.layout, start.shares
        self.layout, self.settings = layout, layout.settings
        self.best_ns = NEVER
        self.expected_ns = shares.expected_ns
        self._shares, self._known = shares, known
        self._best: tuple[Turns, F64] | None = None
        self._tried: set[Turns] = set()
        weights = layout.problem.graph.resident_bytes[layout.streamable].sum()
        windows = [  # two of a device are in its memory
            2 * part * weights / layout.room_bytes[device]
            for device, part in zip(shares.devices, shares.parts, strict=True)
            if device != layout.host and layout.room_bytes[device] > 0
        ]
        self._fewest = ceil(max(windows, default=1.0))  # rounds

    @property
    def fits(self) -> bool:
        """True once a step fits."""
        return self._best is not None

    def begin(self, rounds: int, least_gain: float) -> Iterator[Simulation]:
        """Yields steps with the shares of the start and `rounds` of the settings, unless they were tried."""
        devices, parts = self._shares.devices, self._shares.parts
        turns = Turns(devices, parts, 2, last=True)
        if rounds:
            least = min(max(rounds, self._fewest), self.settings.most_rounds) if rounds > 1 else 1
            turns = Turns(devices, parts, least, is_gated=rounds > 1)
        if turns not in self._tried:
            yield from self._attempt(turns, None if self._best is None else self._best[1], least_gain)

    def _attempt(self, turns: Turns, guess: F64 | None, least_gain: float) -> Iterator[Simulation]:
        """Yields steps with these turns down to the least that has to be streamed; keeps the fastest that fits. Ends
        early where fewer weights streamed can hardly make the fastest step, or gain less than `least_gain` of it."""
        self._tried.add(turns)
        for number, (found, streamed) in enumerate(self.layout.fit(turns, self._known, guess), 1):
            yield found
            before_ns = self.best_ns
            if found.feasible and found.step_time_ns < before_ns:
                self.best_ns, self._best = found.step_time_ns, (turns, streamed)
            elif found.step_time_ns > (self.settings.far_step if found.feasible else 1.0) * before_ns:
                return
            is_settled = found.feasible or least_gain > self.settings.exact_gain
            is_enough = number >= self.settings.fewest_simulations and is_settled
            if is_enough and self.best_ns > (1 - least_gain) * before_ns:
                return

    def restart(self, rng: np.random.Generator) -> Iterator[Simulation]:
        """Yields steps of another descent, from turns not far from the best ones."""
        if self._best is None:
            return
        kept, self._best, self.best_ns = (self._best, self.best_ns), None, NEVER
        turns, streamed = kept[0]
        parts = np.array(turns.parts) * rng.uniform(0.7, 1.4, len(turns.parts))
        rounds = min(max(round(turns.rounds * rng.uniform(0.5, 2.0)), 1), self.settings.most_rounds)
        begin = replace(turns, parts=tuple((parts / parts.sum()).tolist()), rounds=rounds)
        yield from self._attempt(begin, streamed, self.settings.exact_gain)
        yield from self.run()
        if kept[1] < self.best_ns:
            self._best, self.best_ns = kept

    def run(self, steps: Sequence[float] | None = None) -> Iterator[Simulation]:
        """Yields steps of ever finer changes until none helps."""
        for step in steps or self.settings.steps:
            is_better = True
            while is_better and self._best is not None:
                before_ns, is_better = self.best_ns, False
                best, streamed = self._best
                for turns in _changed(best, step, self.settings):
                    if turns not in self._tried:
                        yield from self._attempt(turns, streamed, self.settings.exact_gain)
                    if self.best_ns < self.settings.kept_gain * before_ns:
                        is_better = True
                        break


def _changed(turns: Turns, step: float, settings: StreamingSettings) -> Iterator[Turns]:
    """Yields turns that differ in one thing: their number, a share, one device fewer, what is sent when."""
    for factor in settings.factors:
        rounds = min(max(round(turns.rounds * factor), 1), settings.most_rounds)
        yield replace(turns, rounds=rounds)
    count = len(turns.devices)
    for left_out in range(count if count > 1 else 0):
        yield _without(turns, left_out)
    pairs = [(i, j) for i in range(count) for j in range(count) if i != j]
    if count > settings.most_pairs:
        pairs = [(i, (i + ahead) % count) for i in range(count) for ahead in (1, count - 1)]
    for giver, taker in pairs:
        parts = list(turns.parts)
        given = step * min(parts[giver], parts[taker])
        parts[giver] -= given
        parts[taker] += given
        yield replace(turns, parts=tuple(parts))
    yield replace(turns, is_gated=not turns.is_gated)
    yield replace(turns, keeps_first=not turns.keeps_first)
    for first in range(1, count):
        devices, shares = turns.devices[first:] + turns.devices[:first], turns.parts[first:] + turns.parts[:first]
        yield replace(turns, devices=devices, parts=shares)


def _without(turns: Turns, left_out: int) -> Turns:
    kept = [number for number in range(len(turns.devices)) if number != left_out]
    rest = sum(turns.parts[number] for number in kept)
    devices, parts = tuple(turns.devices[x] for x in kept), tuple(turns.parts[x] / rest for x in kept)
    return replace(turns, devices=devices, parts=parts)
