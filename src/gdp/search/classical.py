"""The classical placers' answers to one question."""

import time
from collections.abc import Sequence
from dataclasses import dataclass, field

from gdp.budget import Clock
from gdp.placers import CLASSICAL
from gdp.search.candidate import Candidate
from gdp.search.fewer_microbatches import Few
from gdp.search.question import Question
from gdp.simulator.orders import B_LEVEL
from gdp.simulator.plan import Baseline
from gdp.simulator.problem import Problem

QUICKLY_S = 0.5  # a placer that takes no longer may run after the time
_STAGES = ("contiguous", "dp-stages")


@dataclass(eq=False)
class ClassicalRuns:
    """Runs classical placers one after the other, and keeps what they find."""

    question: Question
    few: Few | None = None  # what placers see of a problem with many micro-batches, if not all of it
    candidates: list[Candidate] = field(default_factory=list)
    baselines: dict[str, Baseline] = field(default_factory=dict)  # of every placer asked, by name

    @property
    def best(self) -> Candidate | None:
        """The best placement found."""
        return min(self.candidates, default=None)

    def run(self, names: Sequence[str], clock: Clock, *, all_of_them: bool = True) -> None:
        """Runs the placers `names`; all of them, or as many as begin before a clock that counts time is up.

        Of all, those are left out that there is no time for, by the slowest one before them, once an answer fits; where
        placers take milliseconds there is always time.
        """
        slowest_s = 0.0
        for name in names:
            if clock.stop.is_set():
                return
            is_late = clock.seconds_left == 0.0
            fits = self.best is not None and self.best.fits
            is_long = all_of_them and fits and slowest_s > QUICKLY_S and not clock.has(slowest_s)
            if is_long or (is_late and not all_of_them):
                self.baselines[name] = Baseline("skipped", None, 0.0)
                continue
            began = time.perf_counter()
            found = self._best_of(name, num_orders=1 if is_late else None)
            seconds = time.perf_counter() - began
            slowest_s = max(slowest_s, seconds)
            if found is None:
                self.baselines[name] = Baseline("failed", None, seconds)
                continue
            status = "ok" if found.replay.feasible else "infeasible"
            self.baselines[name] = Baseline(status, found.replay.step_time_ns, seconds)
            self.candidates.append(found)
            clock.spend(1)
            self.question.tell(found)

    def _best_of(self, name: str, num_orders: int | None) -> Candidate | None:
        """Returns the placer's best answer over the first `num_orders` orders of micro-batches to judge placements in.

        Where placers see a few micro-batches only, contiguous stages are cut for all of them, too.
        """
        question, problem, place = self.question, self.question.problem, CLASSICAL[name]
        seen = problem if self.few is None else self.few.problem
        placements = [place(judged, question.seed) for judged in _in_orders(seen)[:num_orders]]
        if self.few is not None:
            placements = [None if found is None else self.few.expand(found) for found in placements]
            if name in _STAGES:
                placements.append(place(problem, question.seed))
        return min(
            (
                question.try_orders(placement)
                for placement in placements
                if placement is not None and not problem.broken_constraints(placement)
            ),
            default=None,
        )


def _in_orders(problem: Problem) -> list[Problem]:
    """Returns `problem` in each order of micro-batches; without any, as it is."""
    orders = [order for order in problem.orders if order != B_LEVEL]
    return [problem.in_order(order) for order in orders] or [problem]
