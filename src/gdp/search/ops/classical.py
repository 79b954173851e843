"""The classical placers' answers to one question. They come before searches
in less than the whole step: in a few of many micro-batches, or without the device that does least. All copies of an op
share a device, so a placement of a few micro-batches determines that of all. A simulation of 4 of 16 micro-batches
takes a quarter of the time, and its result is a start for all of them. On large graphs classical placers see the few
alone, too. A slow or badly connected device can do more harm than good, and with fewer devices there are fewer
placements to look at. N ops, U units, D devices."""

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np

from gdp.arrays import unique
from gdp.budget import PLACERS_LATE_S, Clock
from gdp.graph.excerpts import Excerpt
from gdp.placers import CLASSICAL, NoTimeError
from gdp.search.candidate import Candidate
from gdp.search.ops.local_search import LocalSearch
from gdp.search.question import Question
from gdp.simulator.orders import B_LEVEL
from gdp.simulator.plan import Baseline
from gdp.simulator.problem import Placement, Problem
from gdp.units.units import Units

_STAGES = ("contiguous", "dp-stages")


@dataclass(frozen=True, eq=False)
class Few:
    """A problem's first few micro-batches, and the way back."""

    problem: Problem
    excerpt: Excerpt

    @classmethod
    def of(cls, problem: Problem, count: int) -> "Few | None":
        """Returns the first `count` micro-batches; None unless there are at least twice as many."""
        if problem.microbatch.max() + 1 < 2 * count:
            return None
        excerpt = Excerpt.of_microbatches(problem.graph, problem.microbatch, count)
        return cls(problem.excerpt(excerpt.graph, excerpt.ops), excerpt)

    @classmethod
    def of_large(cls, question: Question) -> "Few | None":
        """Returns the first few micro-batches of a large problem, else None."""
        return cls.of(question.problem, question.settings.ops.few_microbatches) if question.is_large else None

    def restrict(self, placement: Placement) -> Placement:
        """Returns a placement of all micro-batches as one of the few."""
        return placement[self.excerpt.ops]

    def expand(self, placement: Placement) -> Placement:
        """Returns a placement of the few micro-batches as one of all."""
        return placement[self.excerpt.twin]


def best_of_few(few: Few, search: LocalSearch, starts: Sequence[Candidate], share: float) -> list[Candidate]:
    """Returns the best placements of all micro-batches that a search of the few finds from `starts`, to be measured. It
    takes a `share` of the budget of `search`, which need not have been started."""
    part = search.part(few.problem, search.clock.until(share))
    part.start([Candidate(few.restrict(start.placement)) for start in starts])
    part.run()
    return [Candidate(few.expand(elite.placement)) for elite in part.elites]


def search_without(search: LocalSearch, share: float, until: float) -> None:
    """Searches without the device that does least, from the best placement with its ops moved elsewhere. This repeats
    as long as it is faster; `search` adopts what is found. Each turn takes a `share` of the whole budget, none begins
    after a share `until` of it."""
    clock = search.clock
    while clock.share_spent < until and not search.is_over and search.best.fits and clock.has(search.prepared_s):
        best = search.best
        problem = _without_least_useful(search.problem, best)
        if problem is None:
            return
        part_of_time = clock.until(min(clock.share_spent + share, until))
        part = search.part(problem, part_of_time, bound_ns=search.bound_ns)
        part.start([Candidate(placement) for placement in _moves(problem, best.placement)])
        part.run()
        search.adopt(part.best)
        if not part.best < best:
            return


def _without_least_useful(problem: Problem, best: Candidate) -> Problem | None:
    """Returns `problem` without the device of `best` that computes least; None if no step without it can be faster."""
    times_ns = problem.op_time_ns[np.arange(problem.num_ops), best.placement]
    work_ns = np.bincount(best.placement, times_ns, problem.num_devices)
    used = unique(best.placement)
    for device in used[np.argsort(work_ns[used], kind="stable")].tolist():
        others = np.setdiff1d(used, device)
        allowed = np.zeros_like(problem.allowed)
        allowed[:, others] = problem.allowed[:, others]
        if not len(others) or not allowed.any(axis=1).all():
            continue
        fastest_ns = np.where(allowed, problem.op_time_ns, np.iinfo(np.int64).max).min(axis=1)
        held = int(problem.graph.resident_bytes.sum())
        if fastest_ns.sum() / len(others) < best.step_time_ns and held <= problem.memory_limit_bytes[others].sum():
            return problem.with_allowed(allowed)
        return None  # the others do more and would be missed more
    return None


def _moves(problem: Problem, placement: Placement) -> list[Placement]:
    """Returns variants of `placement`: ops that must move go to their fastest devices, or all to one device in turn."""
    units = Units.of(problem)
    devices = placement[units.first_op]
    is_moved = ~units.allowed[np.arange(units.num_units), devices]
    there = np.flatnonzero(problem.allowed.any(axis=0))
    moved = (np.where(is_moved, device, devices) for device in there.tolist())
    return [units.place_allowed(wanted) for wanted in (devices, *moved)]


@dataclass(eq=False)
class ClassicalRuns:
    """Runs classical placers one after the other, and keeps what they find."""

    question: Question
    few: Few | None = None  # what placers see of a problem with many micro-batches, if not all of it
    is_hurried: bool = False  # micro-batches are in the problem's own order only
    candidates: list[Candidate] = field(default_factory=list)
    baselines: dict[str, Baseline] = field(default_factory=dict)  # of every placer asked, by name

    @property
    def best(self) -> Candidate | None:
        """The best placement found."""
        return min(self.candidates, default=None)

    def run(self, names: Sequence[str], clock: Clock, *, all_of_them: bool = True) -> None:
        """Runs the placers `names`; all of them, or as many as begin before a clock that counts time is up. Of all,
        those are left out that there is no time for, once an answer fits; there is always time for placers that take
        milliseconds. A placer ends after half of the time left, with the best that it has."""
        least = clock.at_least(PLACERS_LATE_S)
        for name in names:
            if clock.stop.is_set() and (self.candidates or self.question.is_large):
                return
            is_late = clock.seconds_left == 0.0
            fits = self.best is not None and self.best.fits
            is_long = fits and not self.question.has_time(least, 6)  # simulations that take as long as a placer
            if is_long if all_of_them else is_late:
                self.baselines[name] = Baseline("skipped", None, 0.0)
                continue
            began = time.perf_counter()
            try:
                found = self._best_of(name, least.part(0.5).at_least(min(PLACERS_LATE_S, least.seconds_left or 0.0)))
                reason = "skipped" if clock.stop.is_set() else "failed"
            except NoTimeError:
                found, reason = None, "skipped"
            seconds = time.perf_counter() - began
            if found is None:
                self.baselines[name] = Baseline(reason, None, seconds)
                continue
            status = "ok" if found.replay.feasible else "infeasible"
            self.baselines[name] = Baseline(status, found.replay.step_time_ns, seconds)
            self.candidates.append(found)
            clock.spend(1)
            self.question.tell(found)

    def _best_of(self, name: str, clock: Clock) -> Candidate | None:
        """Returns the placer's best answer over the orders of micro-batches to judge placements in. Where placers see a
        few micro-batches only, contiguous stages are cut for all of them, too. Once the clock is up, the answer is the
        best of those that were looked at."""
        best, slowest_s = None, 0.0
        orders = (self.question.problem.order,) if self.is_hurried else None
        for placement in self._placements(name, clock):
            if clock.stop.is_set() and (best is not None or self.candidates):
                break
            if placement is None or self.question.problem.broken_constraints(placement):
                continue
            began = time.perf_counter()
            candidate = self.question.try_orders(placement, orders, clock)
            best = candidate if best is None else min(best, candidate)
            slowest_s = max(slowest_s, time.perf_counter() - began)
            if not clock.has(slowest_s):
                break
        return best

    def _placements(self, name: str, clock: Clock) -> Iterator[Placement | None]:
        problem, seed, place = self.question.problem, self.question.seed, CLASSICAL[name]
        seen = problem if self.few is None else self.few.problem
        for judged in [seen] if self.is_hurried else _in_orders(seen):
            placement = place(judged, seed, clock)
            yield placement if placement is None or self.few is None else self.few.expand(placement)
        if self.few is not None and name in _STAGES:
            yield place(problem, seed, clock)


def on_one_device(question: Question) -> list[Candidate]:
    """Returns the step on the device that takes the least time for all ops; none where constraints forbid it."""
    runs = ClassicalRuns(question)
    runs.run(("single",), Clock.of("1sims"))
    return runs.candidates


def _in_orders(problem: Problem) -> list[Problem]:
    """Returns `problem` in each order of micro-batches; without any, as it is."""
    orders = [order for order in problem.orders if order != B_LEVEL]
    return [problem.in_order(order) for order in orders] or [problem]
