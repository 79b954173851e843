"""The classical placers' answers to one problem."""

import time
from collections.abc import Sequence
from dataclasses import dataclass, field

from gdp.budget import Clock
from gdp.placers import CLASSICAL
from gdp.placers.local_search import Incumbent, OnProgress
from gdp.placers.noise import Noise, key_of
from gdp.plan import Baseline
from gdp.problem import Problem
from gdp.simulate import Simulation, simulate


@dataclass(eq=False)
class ClassicalRuns:
    """Runs classical placers on `problem` one after the other, and keeps what they find."""

    problem: Problem
    clock: Clock
    seed: int
    noise: Noise | None = None
    on_progress: OnProgress | None = None
    candidates: list[tuple[tuple[int, int], Simulation]] = field(default_factory=list)  # with what each is compared by
    baselines: dict[str, Baseline] = field(default_factory=dict)

    @property
    def best(self) -> Simulation | None:
        """The best placement found."""
        return min(self.candidates, key=lambda candidate: candidate[0])[1] if self.candidates else None

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
            placement = CLASSICAL[name](self.problem, self.seed)
            seconds = time.perf_counter() - began
            if placement is None or self.problem.broken_constraints(placement):
                self.baselines[name] = Baseline("failed", None, seconds)
                continue
            simulation = simulate(self.problem, placement)
            status = "ok" if simulation.feasible else "infeasible"
            self.baselines[name] = Baseline(status, simulation.step_time_ns, seconds)
            self.candidates.append((key_of(simulation, self.noise), simulation))
            if self.on_progress:
                key, best = min(self.candidates, key=lambda candidate: candidate[0])
                self.on_progress(Incumbent(best.placement, key[1], key[0]), len(self.candidates))
