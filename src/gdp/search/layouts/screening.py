"""Screening: from all arrangements to the few whose whole steps are simulated.

    arithmetic --the most promising one--> estimate --the most promising one--> simulation

Arithmetic says what a step takes at least, so that an arrangement is estimated, and then simulated, when nothing that
is known of another promises more. What users run, a replica on each device, is simulated in any case.
"""

from collections.abc import Iterable

from gdp.parallel.layout import NONE, Layout
from gdp.search.layouts.arrangement import Arrangement, forced, replicated_ways
from gdp.search.layouts.estimate import Estimate
from gdp.search.layouts.less_memory import with_less_memory
from gdp.search.layouts.trial import Choosing, Trial
from gdp.simulator.simulate import NEVER

SCREEN_SHARE = 0.35  # of the budget: later no further arrangement is simulated
MOST_SIMULATED = 16  # arrangements, of those that fit
FAR = 1.1  # times the best: what is slower than that at least is not simulated
USUAL_ZERO = (0, 1, 3)  # what users run on each device: DDP, ZeRO 1, FSDP
HOPELESS = 1.5  # times the best step: what users run is not simulated where it takes longer at least


class Screening:
    """The arrangements that are left, and trials of others."""

    def __init__(self, search: Choosing) -> None:
        self.search = search
        self.trials: list[Trial] = []
        self._queue: list[Estimate] = []
        self._seen: set[Arrangement] = set()
        self._add(_ways(search))

    @property
    def estimates(self) -> list[Estimate]:
        """Estimates of the arrangements that were not simulated, the most promising first."""
        return sorted(self._queue, key=_promise)

    def run(self) -> None:
        """Simulates what is promising, until the screening's share of the budget is spent, and what users run."""
        while self._queue and not self._is_over(next_one := min(self._queue, key=_promise)):
            self._advance(next_one)
        if self.search.layout is None:
            for zero in USUAL_ZERO:
                self._simulate_usual(zero)

    def _is_over(self, next_one: Estimate) -> bool:
        clock, num_trials = self.search.clock, len(self.trials)
        fitting_ns = self._fitting_ns
        if fitting_ns is None:
            return num_trials > 0 and (clock.stop.is_set() or (num_trials >= MOST_SIMULATED and not _can_fit(next_one)))
        is_far = not _can_fit(next_one) or next_one.step_time_ns > FAR * fitting_ns
        return is_far or num_trials >= MOST_SIMULATED or clock.share_spent > SCREEN_SHARE or clock.stop.is_set()

    @property
    def _fitting_ns(self) -> int | None:
        """The step time of the best trial that fits; None: there is none."""
        return min((trial.step_time_ns for trial in self.trials if trial.fits), default=None)

    def _advance(self, known: Estimate) -> None:
        """Takes an arrangement one step on: from arithmetic to an estimate, from an estimate to a simulation.

        One that does not fit makes room for others of its kind that take less memory.
        """
        search, way = self.search, known.arrangement
        self._queue.remove(known)
        if len(known.places):
            trial = search.attempt(lambda way: search.simulate(way, known.places), way)
            self.trials += [] if trial is None else [trial]
            return
        estimate = search.attempt(search.estimator.estimate, way)
        if estimate is None:
            return
        self._queue.append(estimate)
        if estimate.missing_bytes and search.layout is None:
            has_cpu = search.estimator.has_spare_cpu(way)
            self._add(with_less_memory(way, search.parts.batch_size, has_cpu=has_cpu))

    def _add(self, ways: Iterable[Arrangement]) -> None:
        """Adds what arithmetic says of new arrangements that the model allows."""
        for way in ways:
            if way not in self._seen:
                self._seen.add(way)
                least = self.search.attempt(self.search.estimator.least, way)
                self._queue += [] if least is None else [least]

    def _simulate_usual(self, zero: int) -> None:
        """Simulates the replicas on single devices, with the fewest micro-batches that fit, unless they are slow."""

        def is_usual(layout: Layout) -> bool:
            return layout.zero == zero and layout.is_even and layout.recompute == layout.offload == NONE

        while not any(len(trial.devices[0]) == 1 and is_usual(trial.layout) for trial in self.trials if trial.fits):
            alone = [each for each in self._queue if each.arrangement.num_places == 1]
            usual = [each for each in alone if is_usual(each.arrangement.layout)]
            widest = max((each.arrangement.layout.data for each in usual), default=0)
            best = min((each for each in usual if each.arrangement.layout.data == widest), key=_promise, default=None)
            limit_ns = HOPELESS * (self._fitting_ns or NEVER)
            if best is None or not _can_fit(best) or best.step_time_ns > limit_ns or self.search.clock.stop.is_set():
                return
            self._advance(best)


def _ways(search: Choosing) -> list[Arrangement]:
    """Returns all arrangements, or those of the layout that is asked for."""
    machine, batch_size = search.estimator.machine, search.parts.batch_size
    if search.layout is not None:
        return [] if search.layout.is_whole else forced(machine, search.layout, batch_size)
    return replicated_ways(machine, batch_size, is_fixed=search.parts.is_fixed)


def _can_fit(estimate: Estimate) -> bool:
    return not estimate.missing_bytes


def _promise(estimate: Estimate) -> tuple[int, int]:
    """Returns figures to compare estimates by: the quickest that fits, else the one that lacks least."""
    return estimate.missing_bytes, estimate.step_time_ns
