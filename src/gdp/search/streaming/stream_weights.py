"""Weight streaming: a host with room holds the weights that do not fit, and sends each shortly before its use.

A weight is ready at time 0, so the host would send all of them at once and fill the memory of the computing device. A
plan's order prevents it: `stream_layout.py` has the order and a picture. Several devices take turns, window by window:
while one computes, the links of the others are in use, and the memories of all hold weights that are not sent at all.
Their shares of the work follow from speed, memory and links; a linear programme (`stream_starts.py`) gives them.

Stages that fill memories, with nothing sent (`filled_stages.py`), come first: where links are slow they are best.
Layouts with several numbers of windows are tried next, each with the least that has to be streamed: the most promising
ones, so that few simulations are enough for a good step, then all. A descent changes shares, windows and devices as
long as steps get faster. The host itself computes where that pays.
(ZeRO-Inference and FlexGen stream layer by layer to equal devices.) N ops, D devices."""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from math import ceil

import numpy as np

from gdp.arrays import F64, I64
from gdp.search.settings import DEFAULTS, StreamingSettings
from gdp.search.streaming.filled_stages import best_fills, fill_stages
from gdp.search.streaming.stream_layout import Turns
from gdp.search.streaming.stream_starts import StreamStart, stream_starts
from gdp.simulator.problem import Problem
from gdp.simulator.simulate import NEVER, Simulation


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
