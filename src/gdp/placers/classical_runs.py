"""The classical placers' answers to one problem."""

import time
from collections.abc import Sequence
from dataclasses import dataclass, field

from gdp.budget import Clock
from gdp.placers import CLASSICAL
from gdp.placers.fewer_microbatches import Few
from gdp.placers.island import Incumbent
from gdp.placers.local_search import OnProgress
from gdp.placers.noise import Candidate, Noise
from gdp.plan import Baseline
from gdp.problem import Problem


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
            placement = CLASSICAL[name](self.problem if self.few is None else self.few.problem, self.seed)
            if placement is not None and self.few is not None:
                placement = self.few.expand(placement)
            seconds = time.perf_counter() - began
            if placement is None or self.problem.broken_constraints(placement):
                self.baselines[name] = Baseline("failed", None, seconds)
                continue
            found = Candidate.of(self.problem, placement, self.noise)
            status = "ok" if found.simulation.feasible else "infeasible"
            self.baselines[name] = Baseline(status, found.simulation.step_time_ns, seconds)
            self.candidates.append(found)
            if self.on_progress and self.best is not None:
                excess_bytes, step_time_ns = self.best.key
                incumbent = Incumbent(self.best.simulation.placement, step_time_ns, excess_bytes)
                self.on_progress(incumbent, len(self.candidates))
