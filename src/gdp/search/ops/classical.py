"""The classical placers' answers to one question."""

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from gdp.budget import PLACERS_LATE_S, Clock
from gdp.placers import CLASSICAL, NoTimeError
from gdp.search.candidate import Candidate
from gdp.search.ops.fewer import Few
from gdp.search.question import Question
from gdp.simulator.orders import B_LEVEL
from gdp.simulator.plan import Baseline
from gdp.simulator.problem import Placement, Problem

_STAGES = ("contiguous", "dp-stages")


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
