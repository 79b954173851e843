"""Screening: from all arrangements to the few whose whole steps are simulated.

    arithmetic --the most promising one--> estimate --the most promising one--> simulation

Arithmetic says what a step takes at least, so that an arrangement is estimated, and then simulated, when nothing that
is known of another promises more. What users run, a replica on each device, comes next once a step fits, if it promises
more than that, and is simulated at the end in any case, unless the step is very large and must lose; where nothing
fits, so is what takes the least memory: FSDP with all blocks recomputed, or one copy in stages if that promises more.
Where no card, and no group of cards of several hosts, holds a copy of the model, this comes first."""

from collections.abc import Callable, Container, Iterable, Sequence
from dataclasses import replace
from functools import partial

import numpy as np

from gdp.arrays import I64
from gdp.budget import Clock, has_time
from gdp.cluster.catalogue import NETWORK
from gdp.graph.interpolation import have_same_ops
from gdp.parallel.layout import AUTO, BLOCKS, NONE, Layout
from gdp.search.candidate import Arrangement, Candidate
from gdp.search.layouts.arrangement import forced, more_microbatches, replicated_ways
from gdp.search.layouts.estimate import Estimator
from gdp.search.layouts.layout_search import LayoutSearch
from gdp.search.layouts.less_memory import with_less_memory
from gdp.search.layouts.replica_steps import is_in_stages
from gdp.search.question import BatchQuestion
from gdp.simulator.constraints import memory_limits
from gdp.simulator.simulate import NEVER

Attempt = Callable[[Callable[[Arrangement], Candidate], Arrangement], Candidate | None]
"""Returns an estimate of an arrangement by a function that makes one; None where the model does not allow it."""


class EstimateQueue:
    """The arrangements that are left. Where one does not fit, others of its kind that take less memory join."""

    def __init__(
        self,
        estimator: Estimator,
        batch_size: int,
        attempt: Attempt,
        *,
        grows: bool = True,
        known: Iterable[Arrangement] = (),
    ) -> None:
        """With `grows` false none joins. Those that are `known` are left out."""
        self.estimator = estimator
        self.left: list[Candidate] = []
        self._batch_size, self._attempt, self._grows = batch_size, attempt, grows
        self._known, self._seen = set(known), set[Arrangement]()
        self._num_parts: set[int] = set()  # of the batch, that were looked at

    def add(self, ways: Iterable[Arrangement], clock: Clock | None = None) -> None:
        """Adds what arithmetic says of new arrangements, and of others that take less memory than do not fit. Once one
        is there, further parts of the batch are looked at while there is time."""
        pending = list(ways)[::-1]
        while pending:
            way = pending.pop()
            num_parts = way.layout.num_parts
            if way in self._seen or (num_parts not in self._num_parts and self.left and not has_time(clock)):
                continue
            self._num_parts.add(num_parts)
            self._seen.add(way)
            least = self._attempt(self.estimator.promise, way)
            if least is not None:
                self.left += [] if way in self._known else [least]
                pending += [] if least.fits else self._smaller(way)[::-1]

    def know(self, estimates: Sequence[Candidate], clock: Clock) -> None:
        """Adds estimates that were made before, and what takes less memory than those that do not fit; see `add`."""
        new = [each for each in estimates if each.way not in self._known]
        self.left += new
        self._seen |= {each.way for each in new}
        for each in new:
            if not each.fits:
                self.add_smaller(each.way, clock)

    def estimate(self, known: Candidate, clock: Clock | None = None) -> None:
        """Replaces what arithmetic says of an arrangement by an estimate; see `add` for the clock."""
        self.left.remove(known)
        estimate = self._attempt(self.estimator.estimate, known.way)
        if estimate is not None:
            self.left.append(estimate)
            if not estimate.fits:
                self.add_smaller(known.way, clock)

    def add_smaller(self, way: Arrangement, clock: Clock | None = None) -> None:
        """Adds others that take less memory than `way`, which does not fit; see `add` for the clock."""
        self.add(self._smaller(way), clock)

    def best(self, clock: Clock) -> Candidate | None:
        """Returns the most promising of all, estimated; None where there is none, or time is up before."""
        while self.left:
            most = min(self.left)
            if most.has_places:
                return most
            if clock.is_up or not self.estimator.has_time(most.way):
                return None
            self.estimate(most, clock)
            clock.spend(1)
        return None

    def _smaller(self, way: Arrangement) -> list[Arrangement]:
        if not self._grows:
            return []
        return with_less_memory(way, self._batch_size, has_cpu=self.estimator.has_spare_cpu(way))


USUAL_ZERO = (0, 1, 3)  # what users run on each device: DDP, ZeRO 1, FSDP
_TIGHT = 0.5  # of the memory of a group is held by a copy of the model: stages may be needed; untuned
_MOST_A_PLACE = 16  # micro-batches: the bubble is a seventeenth of the step
_DEEPER = 1.25  # times as fast, by arithmetic: an estimate of many stages takes long; untuned
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
        self._queue.add(_ways(self.search), self._clock.until(self._settings.screen_share))
        is_free = not self._has_least and not self._num_known
        staged: list[Candidate] = []
        if is_free and _share_held(self.search) > 1:
            is_on_groups = _stages_of_groups(self.search) is not None
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
        clock, ways = self._clock, _ways(self.search)
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
        if best is None or self._clock.stop.is_set() or _is_too_large(search.question):
            return []
        candidate = search.attempt(partial(search.simulate, places=best.places, is_captured=True), best.way)
        return [] if candidate is None else [candidate]

    def with_least_memory(self) -> list[Candidate]:
        """Returns candidates of FSDP with all blocks recomputed, once: with the fewest micro-batches that fit by
        estimate, and more until it fits. The first is simulated at any time, others while there is time. One copy in
        stages comes before it if that promises more."""
        way = None if self._has_least else _least_memory(self.search)
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
        way, self._has_stages = None if self._has_stages else _stages_of_groups(self.search), True
        if way is None:
            return []
        in_stages = replace(way, layout=replace(way.layout, stages=way.num_places))
        return self._with_few_blocks(in_stages) or self._with_few_blocks(way)

    def _is_gathered_sooner(self) -> bool:
        """Returns whether FSDP with all blocks recomputed promises much more than one copy in stages, which is left out
        then."""
        if self._clock.stop.is_set():
            return False
        stages = _stages_of_groups(self.search)
        ways = [_least_memory(self.search), stages and _with_all_blocks(stages)]
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
        if self._clock.is_up or (deep := _promising_depth(search, other)) is None:
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
        all_blocks, few_blocks = _with_all_blocks(way), replace(way, layout=replace(way.layout, recompute=AUTO))
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


def _ways(search: LayoutSearch) -> list[Arrangement]:
    """Returns all arrangements, or those of the layout that is asked for."""
    machine, batch_size = search.estimator.machine, search.parts.batch_size
    if (layout := search.question.layout) is not None:
        return [] if layout.is_whole else forced(machine, layout, batch_size)
    ways = replicated_ways(machine, batch_size, is_fixed=search.parts.is_fixed)
    return sorted(ways, key=lambda way: way.num_places)  # those that are quickest to look at


def _stages_of_groups(search: LayoutSearch) -> Arrangement | None:
    """Returns one copy of the model on most groups of cards of several hosts, in the most micro-batches that can be
    simulated; None on other devices."""
    cluster = search.question.cluster
    groups = {number for number, device in enumerate(cluster.devices) if device.group}
    if not groups or NETWORK not in cluster.exchanges:
        return None
    return _deepest(search, groups)


def _deepest(search: LayoutSearch, devices: Container[int] | None = None) -> Arrangement | None:
    """Returns one copy of the model on most of all devices, or of these, in the most micro-batches that can be
    simulated, up to `_MOST_A_PLACE`."""
    parts, most = search.parts, search.settings.large.most_ops
    num_ops = parts.exact(parts.batch_size if parts.is_fixed else 1).num_ops
    ways = [
        way
        for way in _ways(search)
        if way.layout.data == 1 < way.num_places
        and way.layout.num_parts <= min(most // num_ops, _MOST_A_PLACE * way.num_places)
        and (devices is None or all(device in devices for device in way.all_devices))
    ]
    return max(ways, key=lambda way: (way.num_places, way.layout.num_parts), default=None)


def _promising_depth(search: LayoutSearch, other: Arrangement | None) -> Arrangement | None:
    """Returns one copy of the model in stages on most devices with all blocks recomputed; None where arithmetic does
    not promise much more than an estimate of `other`."""
    if (way := _deepest(search)) is None:
        return None
    deep, known = _with_all_blocks(way), None if other is None else search.attempt(search.estimator.estimate, other)
    limit_ns = known.step_time_ns if known is not None and known.fits else NEVER
    least, bubble = search.attempt(search.estimator.least, deep), (way.num_places - 1) / way.layout.num_parts
    is_far = least is None or not least.fits or _DEEPER * least.step_time_ns * (1 + bubble) > limit_ns
    return None if is_far else deep


def _share_held(search: LayoutSearch) -> float:
    """Returns the share of the memory of a card, or of a group of cards of several hosts, that a copy of the model
    takes with its gradients, and with its optimizer state cut over all of them; 0 for groups of one host."""
    devices = search.question.cluster.devices
    is_group = np.array([bool(device.group) for device in devices])
    if is_group.any() and _stages_of_groups(search) is None:
        return 0.0
    is_card = np.array([not device.is_cpu for device in devices])
    is_holder = is_group if is_group.any() else is_card if is_card.any() else ~is_card
    figures, count = search.estimator.replicas.figures(Layout()), max(int(is_holder.sum()), 1)
    held_bytes = figures.resident_bytes - figures.state_bytes * (count - 1) // count + figures.gradient_bytes
    return held_bytes / max(int(search.estimator.limits_bytes[is_holder].max(initial=0)), 1)


def read_ahead_of_groups(question: BatchQuestion) -> None:
    """Reads the part of the batch that stages on groups of several hosts need, if these may be needed, and else that of
    pipelines, which take more micro-batches than there are groups; others are interpolated from it."""
    search, parts = LayoutSearch(question, Clock(None)), question.parts
    if _share_held(search) > _TIGHT and (way := _stages_of_groups(search)) is not None:
        part = search.attempt(lambda way: parts.exact(way.layout.num_parts), way)
        if part is not None and have_same_ops(parts.exact(1), part):
            return
    parts.read_ahead(2 * question.cluster.num_devices, question.settings.large)
    if _is_too_large(question):
        _read_usual(search)


def read_ahead(question: BatchQuestion) -> None:
    """Reads the parts of the batch from which others are interpolated, and the one that what users run needs: replicas
    on single devices with the fewest micro-batches that fit by estimate, or else FSDP with all blocks recomputed. Of
    large steps, that takes long to estimate: it is read where no device has the memory for one copy."""
    question.parts.read_ahead(question.cluster.num_devices, question.settings.large)
    if not _is_large(question) or _is_too_large(question):
        _read_usual(LayoutSearch(question, Clock(None)))


def _is_too_large(question: BatchQuestion) -> bool:
    """Returns whether no device has the memory for one copy of the model."""
    held_bytes = int(question.parts.exact(1).resident_bytes.sum())
    return held_bytes > int(memory_limits(question.cluster, question.constraints).max())


def _is_large(question: BatchQuestion) -> bool:
    return question.parts.exact(1).num_ops > question.settings.large.estimated_ops


def _read_usual(search: LayoutSearch) -> None:
    """Reads the part of the batch that replicas on single devices take with the fewest micro-batches that fit by
    estimate, or else that of FSDP with all blocks recomputed, and that of deep stages where these promise more."""
    is_large = _is_large(search.question)
    usual = [way for way in _ways(search) if way.num_places == 1 and way.layout.zero in USUAL_ZERO]
    num_replicas = max((way.layout.data for way in usual), default=0)
    widest = [way for way in usual if way.layout.data == num_replicas and not is_large]
    fewest = min((way.layout.num_parts for way in widest), default=0)
    widest = [way for way in widest if way.layout.num_parts == fewest]
    fitting = [way for way in (_fitting(search, way) for way in widest) if way is not None]
    least = None if fitting else _least_memory(search)
    if counts := [way.layout.num_parts for way in (*fitting, least) if way is not None]:
        search.attempt(lambda _: search.parts.exact(min(counts)), usual[0])
    if not fitting and (deep := _promising_depth(search, least)) is not None:
        search.attempt(lambda way: search.parts.exact(way.layout.num_parts), deep)


def _least_memory(search: LayoutSearch) -> Arrangement | None:
    """Returns FSDP on the most devices with all blocks recomputed, and the fewest micro-batches that fit by estimate;
    one where none does."""
    ways = [way for way in _ways(search) if way.num_places == 1 and way.layout.zero == 3]
    way = max(ways, key=lambda way: way.layout.data, default=None)
    if way is None:
        return None
    least = _with_all_blocks(way)
    return _fitting(search, least) or least


def _with_all_blocks(way: Arrangement) -> Arrangement:
    return replace(way, layout=replace(way.layout, recompute=BLOCKS))


def _fitting(search: LayoutSearch, way: Arrangement) -> Arrangement | None:
    """Returns `way` with the fewest micro-batches that fit by estimate; None: there is none. With all blocks recomputed
    those come first that fit beside what is gathered, since no other layout may take less."""
    cut: Arrangement | None = way
    fitting: Arrangement | None = None
    while cut is not None and (estimate := search.attempt(search.estimator.estimate, cut)) is not None:
        if estimate.fits and (way.layout.recompute != BLOCKS or search.estimator.fits_beside_gathers(estimate)):
            return cut
        fitting = cut if estimate.fits else fitting
        cut = more_microbatches(cut, search.parts.batch_size)
    return fitting
