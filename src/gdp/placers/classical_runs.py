"""The classical placers' answers to one problem."""

import time
from collections.abc import Sequence
from dataclasses import dataclass, field

from gdp.budget import Clock
from gdp.pipelines import B_LEVEL
from gdp.placers import CLASSICAL
from gdp.placers.fewer_microbatches import Few
from gdp.placers.island import Incumbent
from gdp.placers.local_search import OnProgress
from gdp.placers.noise import Candidate, Noise
from gdp.plan import Baseline
from gdp.problem import Problem

STAGES = ("contiguous", "dp-stages")


@dataclass(eq=False)
class ClassicalRuns:
    """Runs classical placers on `problem` one after the other, and keeps what they find."""

    problem: Problem
    clock: Clock
    seed: int
    noise: Noise | None = None
    on_progress: OnProgress | None = None
    few: Few | None = None  # what placers see of a problem with many micro-batches, if not all of it
    candidates: list[Candidate] = field(default_factory=list)
    baselines: dict[str, Baseline] = field(default_factory=dict)

    @property
    def best(self) -> Candidate | None:
        """The best placement found."""
        return min(self.candidates, key=lambda candidate: candidate.key, default=None)

    def run(self, names: Sequence[str], until: float = 1.0) -> None:
        """Run the placers `names`; none is begun once a share `until` of the clock's seconds is over."""
        total = self.clock.budget.seconds
        for name in names:
            if self.clock.stop.is_set():
                return
            if total is not None and until < 1.0 and self.clock.seconds > until * total:
                self.baselines[name] = Baseline("skipped", None, 0.0)
                continue
            began = time.perf_counter()
            found = self._best_of(name)
            seconds = time.perf_counter() - began
            if found is None:
                self.baselines[name] = Baseline("failed", None, seconds)
                continue
            status = "ok" if found.simulation.feasible else "infeasible"
            self.baselines[name] = Baseline(status, found.simulation.step_time_ns, seconds)
            self.candidates.append(found)
            if self.on_progress and self.best is not None:
                excess_bytes, step_time_ns = self.best.key
                incumbent = Incumbent(self.best.simulation.placement, step_time_ns, excess_bytes)
                self.on_progress(incumbent, len(self.candidates))

    def _best_of(self, name: str) -> Candidate | None:
        """The placer's best answer over the orders of micro-batches that it may judge placements in, a single one when
        time is up; where placers see a few micro-batches only, contiguous stages are cut for all of them, too."""
        seen = self.problem if self.few is None else self.few.problem
        total = self.clock.budget.seconds
        judged = _in_orders(seen)[: 1 if total is not None and self.clock.seconds > total else None]
        placements = [CLASSICAL[name](problem, self.seed) for problem in judged]
        if self.few is not None:
            placements = [None if found is None else self.few.expand(found) for found in placements]
            if name in STAGES:
                placements.append(CLASSICAL[name](self.problem, self.seed))
        found = [
            Candidate.of(self.problem, placement, self.noise)
            for placement in placements
            if placement is not None and not self.problem.broken_constraints(placement)
        ]
        return min(found, key=lambda candidate: candidate.key, default=None)


def _in_orders(problem: Problem) -> list[Problem]:
    """`problem` in each order of micro-batches; without any, as it is."""
    orders = [order for order in problem.orders if order != B_LEVEL]
    return [problem.in_order(order) for order in orders] or [problem]
