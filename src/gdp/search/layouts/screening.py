"""Screening: from all arrangements to the few whose whole steps are simulated.

    arithmetic --the most promising one--> estimate --the most promising one--> simulation

Arithmetic says what a step takes at least, so that an arrangement is estimated, and then simulated, when nothing that
is known of another promises more. What users run, a replica on each device, comes next once a step fits, if it promises
more than that, and is simulated at the end in any case, unless the step is very large and must lose; where nothing
fits, so is what takes the least memory: FSDP with all blocks recomputed, or one copy in stages if that promises more.
Where no card, and no group of cards of several hosts, holds a copy of the model, this comes first."""

from collections.abc import Sequence
from dataclasses import replace
from functools import partial

import numpy as np

from gdp.arrays import I64
from gdp.parallel.layout import AUTO, BLOCKS, NONE, Layout
from gdp.search.candidate import Arrangement, Candidate
from gdp.search.layouts.arrangement import more_microbatches
from gdp.search.layouts.estimate_queue import EstimateQueue
from gdp.search.layouts.known_ways import (
    USUAL_ZERO,
    all_ways,
    is_too_large,
    least_memory,
    promising_depth,
    share_held,
    stages_of_groups,
    with_all_blocks,
)
from gdp.search.layouts.layout_search import LayoutSearch
from gdp.search.layouts.replica_steps import is_in_stages
from gdp.simulator.simulate import NEVER

_SOONER = 1.25  # times as fast: what estimates of gathers on slow links may leave out
_MOST_BLOCKS = 0.4  # recomputed by need: stages are so unlike that strict 1F1B waits; docs/notes/search.md
_PROMISING = 0.95  # of the best step: an estimate that a simulation comes for before a search; untuned
_SLOW = 1.5  # times the best step: what users run and takes longer is left


class Screening:
    """The arrangements that are left, and candidates of those that were simulated."""

    def __init__(
        self,
        search: LayoutSearch,
        simulated: Sequence[Candidate] = (),
        known: Sequence[Candidate] = (),
        estimates: Sequence[Candidate] = (),
    ) -> None:
        """`simulated` are there already, `known` and `estimates` from an earlier screening; shares of the budget are
        those of what is left of it now."""
        self.search, self.simulated, self._settings = search, [*simulated, *known], search.settings.layouts
        self._clock = search.clock.part()
        is_asked = search.question.layout is not None  # a layout is asked for
        self._has_least = is_asked  # what takes the least memory was simulated, or is not asked for
        self._is_tight = False  # it alone is known to fit
        self._has_stages = False  # they were simulated, or promise too little
        self._queue = EstimateQueue(
            search.estimator,
            search.parts.batch_size,
            search.attempt,
            grows=not is_asked,
            known=(each.way for each in known),
        )
        self._num_known = len(known)
        self._queue.know(estimates, self._clock)
        self._put_aside: list[Candidate] = []  # there is no time to look at them

    @property
    def estimates(self) -> list[Candidate]:
        """Estimates of the arrangements that were not simulated, the most promising first."""
        return sorted([*self._queue.left, *self._put_aside])

    def run(self) -> None:
        """Simulates what is promising, until the screening's share of the budget is spent, and what users run."""
        self._queue.add(all_ways(self.search), self._clock.until(self._settings.screen_share))
        is_free = not self._has_least and not self._num_known
        staged: list[Candidate] = []
        if is_free and share_held(self.search) > 1:
            is_on_groups = stages_of_groups(self.search) is not None
            staged = self.with_least_memory() if not is_on_groups or self._is_gathered_sooner() else self._in_stages()
        self.simulated += [each for each in staged if each.fits]
        is_usual_known = False
        while self._queue.left and not self._is_over(next_one := self._next()):
            may_fit = next_one.fits and next_one.has_places and not self.simulated
            is_tight = self._fitting_ns is None and not may_fit
            if is_tight and not self._has_least and self._clock.share_spent > self._settings.screen_share:
                self.simulated += self.with_least_memory()
            else:
                self._advance(next_one)
            if not is_usual_known and self._fitting_ns is not None:
                is_usual_known = True
                self._simulate_all_usual(1.0, is_captured=True)
        if self.search.question.cluster.is_large and all(candidate.is_whole for candidate in self.simulated):
            self._simulate_most_promising()
        self._simulate_all_usual(_SLOW)
        self.simulated += [each for each in staged if not each.fits]

    def first_that_fits(self) -> Candidate | None:
        """Returns the first layout found that fits, which ends the screening; None where there is none."""
        clock, ways = self._clock, all_ways(self.search)
        tight = [] if self.search.question.layout else [*dict.fromkeys(map(self._tightest, ways))]
        for some in (tight, ways):
            self._queue.add(some, clock)
            while self._fitting_ns is None and self._queue.left and not clock.is_up:
                if self._is_over(next_one := self._next()):
                    break
                self._advance(next_one, is_needed=False)
        return min((each for each in self.simulated if each.fits), default=None)

    def _tightest(self, way: Arrangement) -> Arrangement:
        """Returns `way` with all that saves memory: what fits in any layout without a host, fits likely in this."""
        layout = way.layout
        counts, zero = self.search.parts.counts(layout.data), 3 if layout.data > 1 and layout.is_even else 0
        if way.num_places == 1 and counts:  # stages hold several micro-batches
            layout = replace(layout, microbatches=(counts[-1],) * layout.data)
        return replace(way, layout=replace(layout, zero=zero, recompute=BLOCKS, offload=NONE))

    def _next(self) -> Candidate:
        """Returns the arrangement to look at next: the most promising one. After `screen_share` of the budget one whose
        estimate fits; after `late_share`, one with an estimate. Where there is no time to capture further parts of the
        batch, arrangements that need them come last."""
        share = self._clock.share_spent
        left = self._readable(self._queue.left) or self._queue.left
        # pipelines take long to estimate, and a plan should be there soon
        if not self.simulated and share > 0.1:
            left = [each for each in left if each.way.num_places == 1 and each.fits] or left
        estimated = [each for each in left if each.has_places and (each.fits or share > self._settings.late_share)]
        return min(estimated if estimated and share > self._settings.screen_share else left)

    def _readable(self, estimates: Sequence[Candidate]) -> list[Candidate]:
        """Returns those of `estimates` whose part of the batch is read, or can be in the time left."""
        readable = self.search.parts.readable({each.way.layout.num_parts for each in estimates})
        return [each for each in estimates if each.way.layout.num_parts in readable]

    def _is_over(self, next_one: Candidate) -> bool:
        clock, num_simulated = self._clock, len(self.simulated) - self._num_known
        fitting_ns = self._fitting_ns
        if fitting_ns is None:
            is_late = clock.stop.is_set() or clock.share_spent > self._settings.late_share
            has_enough = num_simulated >= self._settings.most_simulated
            return num_simulated > 0 and (is_late or (has_enough and not next_one.fits))
        is_far = not next_one.fits or next_one.step_time_ns > self._settings.far_estimate * fitting_ns
        promises = next_one.has_places and next_one.step_time_ns < _PROMISING * fitting_ns
        is_early = self._is_tight or promises  # of what is known already
        is_late = clock.share_spent > (self._settings.late_share if is_early else self._settings.screen_share)
        return is_far or num_simulated >= self._settings.most_simulated or is_late or clock.stop.is_set()

    @property
    def _fitting_ns(self) -> int | None:
        """The step time of the best candidate that fits; None: there is none."""
        return min((candidate.step_time_ns for candidate in self.simulated if candidate.fits), default=None)

    def _advance(self, known: Candidate, *, is_needed: bool = True, is_captured: bool = False) -> None:
        """Takes an arrangement one step on: from arithmetic to an estimate, from an estimate to a simulation, of the
        step as captured if it shall be so. Without time it is put aside, unless a first candidate `is_needed`."""
        search, way = self.search, known.way
        is_needed = is_needed and not self.simulated
        if not is_needed and not (search.has_time(way) if known.has_places else search.estimator.has_time(way)):
            self._queue.left.remove(known)
            self._put_aside.append(known)
        elif known.has_places:
            self._queue.left.remove(known)
            candidate = search.attempt(lambda way: search.simulate(way, known.places, is_captured=is_captured), way)
            self.simulated += [] if candidate is None else [candidate]
            self._is_tight &= candidate is None or not candidate.fits
            if candidate is not None and not candidate.fits:
                self._queue.add_smaller(way, self._clock)
        else:
            self._queue.estimate(known, self._clock)

    def _simulate_most_promising(self) -> None:
        """Simulates the best estimate, if it promises more than op placement: all time may have gone into estimates."""
        estimated = [each for each in self._queue.left if each.has_places and each.fits]
        best = min(self._readable(estimated), default=None)
        if best is not None and best.step_time_ns < (self._fitting_ns or NEVER) and not self._clock.stop.is_set():
            self._advance(best)

    def _simulate_all_usual(self, slow: float, *, is_captured: bool = False) -> None:
        """Simulates what users run, unless it is estimated at `slow` times the best step."""
        for zero in USUAL_ZERO if self.search.question.layout is None else ():
            self._simulate_usual(zero, slow, is_captured)

    def _simulate_usual(self, zero: int, slow: float, is_captured: bool) -> None:
        """Simulates the replicas on single devices, with the fewest micro-batches that fit, unless they are slow."""
        clock = self._clock

        def is_usual(layout: Layout) -> bool:
            return layout.zero == zero and layout.is_even and layout.recompute == layout.offload == NONE

        while True:
            alone = [each for each in self._queue.left if each.way.num_places == 1 and is_usual(each.way.layout)]
            fitting = [each for each in self.simulated if each.fits and len(each.devices[0]) == 1]
            known = [each.layout.microbatches for each in fitting if is_usual(each.layout)]
            widest = max([*map(len, known), *(each.way.layout.data for each in alone)], default=0)
            usual = [each for each in alone if each.way.layout.data == widest and each.fits]
            best = min(usual, key=lambda each: each.way.layout.microbatches, default=None)
            if best is None or any(counts <= best.way.layout.microbatches for counts in known if len(counts) == widest):
                return
            limit_ns = slow * (self._fitting_ns or NEVER)
            # DDP is looked at at any time
            is_late = clock.stop.is_set() or (clock.share_spent > self._settings.late_share and zero > 0)
            if best.step_time_ns > limit_ns or is_late or self._loses(best):
                return
            self._advance(best, is_captured=is_captured and bool(self._readable([best])))

    def of_read_parts(self) -> list[Candidate]:
        """Returns the candidate that promises most by an estimate, of those whose part of the batch was read; none
        where none of them fits by it, and where deep stages come first."""
        search = self.search
        read = [each for each in self.estimates if each.has_places and search.parts.is_captured(each.layout.num_parts)]
        best = min((each for each in read if each.fits), default=None)
        if best is None or self._clock.stop.is_set() or is_too_large(search.question):
            return []
        candidate = search.attempt(partial(search.simulate, places=best.places, is_captured=True), best.way)
        return [] if candidate is None else [candidate]

    def with_least_memory(self) -> list[Candidate]:
        """Returns candidates of FSDP with all blocks recomputed, once: with the fewest micro-batches that fit by
        estimate, and more until it fits. The first is simulated at any time, others while there is time. One copy in
        stages comes before it if that promises more."""
        way = None if self._has_least else least_memory(self.search)
        candidates = [] if self._has_least else self._in_stages() or self._in_deep_stages(way)  # none is asked for
        self._has_least = True
        if any(each.fits for each in candidates) and self._clock.share_spent > self._settings.late_share:
            return candidates
        while way is not None and not self._is_tight and not self._clock.stop.is_set():
            candidate = self.search.attempt(self._simulated_together, way)
            if candidate is None:
                break
            candidates.append(candidate)
            self._is_tight = candidate.fits
            is_late = self._clock.share_spent > self._settings.late_share or not self.search.has_time(way)
            way = None if is_late else more_microbatches(way, self.search.parts.batch_size)
        return candidates

    def _in_stages(self) -> list[Candidate]:
        """Simulates, once, one copy of the model in stages on groups of cards of several hosts, which is what
        Megatron-LM's users run where a copy needs several hosts: with the fewest blocks recomputed that memory allows,
        or else all. Where the model has no such stages, its ops go anywhere."""
        way, self._has_stages = None if self._has_stages else stages_of_groups(self.search), True
        if way is None:
            return []
        in_stages = replace(way, layout=replace(way.layout, stages=way.num_places))
        return self._with_few_blocks(in_stages) or self._with_few_blocks(way)

    def _is_gathered_sooner(self) -> bool:
        """Returns whether FSDP with all blocks recomputed promises much more than one copy in stages, which is left out
        then."""
        if self._clock.stop.is_set():
            return False
        stages = stages_of_groups(self.search)
        ways = [least_memory(self.search), stages and with_all_blocks(stages)]
        gathered, staged = (None if way is None else self.search.attempt(self._estimate, way) for way in ways)
        if gathered is None or not gathered.fits:
            return False
        self._has_stages = staged is None or not staged.fits or _SOONER * gathered.step_time_ns < staged.step_time_ns
        return self._has_stages

    def _estimate(self, way: Arrangement) -> Candidate:
        return self.search.estimator.estimate(way)

    def _in_deep_stages(self, other: Arrangement | None) -> list[Candidate]:
        """Simulates one copy of the model in stages on most devices if its estimate with all blocks recomputed beats
        that of `other`; it is estimated only where arithmetic promises much more."""
        search = self.search
        if self._clock.is_up or (deep := promising_depth(search, other)) is None:
            return []
        way = replace(deep, layout=replace(deep.layout, recompute=NONE))
        estimate, known = search.attempt(self._estimate, deep), other and search.attempt(self._estimate, other)
        if estimate is None or not estimate.fits or (known and known.fits and known < estimate):
            return []
        if is_in_stages(search.parts.rough(deep.layout.num_parts), estimate.places, way.num_places):
            way, deep = (replace(each, layout=replace(each.layout, stages=way.num_places)) for each in (way, deep))
        if search.estimator.stages_hold_activations(way):
            return self._with_few_blocks(way)
        return self._simulated_at(deep, estimate.places, 0)

    def _with_few_blocks(self, way: Arrangement) -> list[Candidate]:
        """Returns simulations of `way` with more and more blocks recomputed until it fits, and of all if an estimate
        promises more; of all at once where memory holds the activations of few blocks only. None where an estimate
        says that all are too few, or where it has no places for ops."""
        search, stop, found = self.search, self._clock.stop, list[Candidate]()
        all_blocks, few_blocks = with_all_blocks(way), replace(way, layout=replace(way.layout, recompute=AUTO))
        estimate = None if stop.is_set() else search.attempt(search.estimator.estimate, all_blocks)
        if estimate is None or not estimate.fits:
            return []
        # with time for more, a simulation of few blocks is made again with more of them until it fits
        turns = [few_blocks, all_blocks] if search.has_time(few_blocks) else [few_blocks, few_blocks, all_blocks]
        self._read_part(few_blocks)  # blocks are chosen by the part that is simulated
        share = search.attempt(partial(search.estimator.share_of_blocks, places=estimate.places), few_blocks)
        if share is None or share > _MOST_BLOCKS:
            turns = [all_blocks]
        for turn in turns:
            limit_ns = estimate.step_time_ns if turn == all_blocks and search.has_time(turn) else NEVER
            fits = any(each.fits and each.step_time_ns <= limit_ns for each in found)
            if not (fits or stop.is_set() or any(each.named_layout.recompute == BLOCKS for each in found)):
                found += self._simulated_at(turn, estimate.places, sum(each.missing_bytes for each in found))
        return found

    def _simulated_at(self, way: Arrangement, places: I64, reserve_bytes: int) -> list[Candidate]:
        """Returns the step of `way` with the ops of a replica in `places`, as captured if there is time to read it."""
        is_read = self._read_part(way)
        simulate = partial(self.search.simulate, places=places, is_captured=is_read, reserve_bytes=reserve_bytes)
        candidate = self.search.attempt(simulate, way)
        return [] if candidate is None else [candidate]

    def _read_part(self, way: Arrangement) -> bool:
        """Reads the part of the batch of `way` if there is time; returns whether it is there."""
        parts, num_parts = self.search.parts, way.layout.num_parts
        is_readable = num_parts in parts.readable({num_parts})
        return is_readable and self.search.attempt(lambda way: parts.exact(num_parts), way) is not None

    def _simulated_together(self, way: Arrangement) -> Candidate:
        """Returns the step of `way` with all ops of a replica in one place."""
        num_ops = self.search.parts.exact(way.layout.num_parts).num_ops
        return self.search.simulate(way, np.zeros(num_ops, np.int64), is_captured=True)

    def _loses(self, known: Candidate) -> bool:
        """Returns whether a large step of replicas on one device each computes for longer than the best one takes."""
        way = known.way
        if self.search.num_ops(way) < self.search.settings.large.winning_ops or self._fitting_ns is None:
            return False
        return self.search.estimator.least(way).step_time_ns >= self._fitting_ns
