"""START HERE: which layout, and which placement of it. Parts of a batch and a cluster go in, the best plan comes out.

    arrangements --estimate--> promising ones --simulate--> finalists --search--> the best --search--> Choice
    op placement ------------------------------------------^

Estimates are made from one replica, and cheap; steps are simulated in whole with constructive places; a search is
given to the best few, first in one replica, whose places are mapped to all, then in the whole step.
"""

import threading
from collections.abc import Callable
from dataclasses import dataclass, field, replace

import numpy as np

from gdp.arrays import I64
from gdp.bounds.layout_bound import layout_bound
from gdp.bounds.lower_bound import lower_bound
from gdp.budget import Budget, Clock
from gdp.cluster import Cluster
from gdp.cluster.changes import only
from gdp.errors import InputError
from gdp.parallel.layout import Layout
from gdp.parallel.step import Step
from gdp.search.auto import auto
from gdp.search.candidate import Candidate
from gdp.search.layouts.arrangement import Arrangement, arrangements, forced, more_microbatches
from gdp.search.layouts.dispatch import as_candidate, best_dispatch
from gdp.search.layouts.estimate import Estimate, Estimator, with_less_memory
from gdp.search.layouts.parts import Parts
from gdp.search.local_search import LocalSearch
from gdp.search.place import plan_of
from gdp.search.question import Question
from gdp.simulator.constraints import Constraints
from gdp.simulator.plan import Baseline, Plan, Search
from gdp.simulator.problem import Problem

ESTIMATE_SHARE, SCREEN_SHARE = 0.15, 0.35  # of the budget: later no further arrangement is estimated, or simulated
FINAL_SHARES = (0.4, 0.5)  # of the time left, for the first finalists; the best of all has what is left then
MOST_SIMULATED = 10  # arrangements
FAR = 1.3  # times the best: what is slower than that at least is neither placed nor simulated
_SEARCHED_OPS = 120_000  # larger steps are not searched in whole
OK, DOES_NOT_FIT, NOT_ALLOWED, ESTIMATED = "ok", "does not fit", "not allowed", "estimated"


@dataclass(frozen=True, eq=False)
class Trial:
    """What became of an arrangement; the op placement of the whole step has none."""

    layout: Layout
    devices: tuple[tuple[int, ...], ...]  # [R][P]
    status: str  # OK, DOES_NOT_FIT, NOT_ALLOWED, or ESTIMATED for what was not simulated
    step_time_ns: int
    missing_bytes: int
    step: Step | None = None  # None: not simulated
    problem: Problem | None = None
    candidate: Candidate | None = None
    places: I64 | None = None  # [N] of a replica's ops

    @property
    def is_whole(self) -> bool:
        """True for op placement of the whole step."""
        return self.layout.is_whole

    @property
    def key(self) -> tuple[bool, int]:
        """What trials are compared by: those that fit first, then by time."""
        return self.missing_bytes > 0 or self.status == NOT_ALLOWED, self.step_time_ns


@dataclass(frozen=True, eq=False)
class Choice:
    """The best plan with its layout, and all layouts that were looked at, the best first."""

    plan: Plan
    trial: Trial
    trials: tuple[Trial, ...]
    layout_bound_ns: int  # no layout of this batch on these devices takes less


@dataclass(eq=False)
class _Search:
    """What all phases of a choice share."""

    parts: Parts
    cluster: Cluster
    constraints: Constraints
    clock: Clock
    seed: int
    num_threads: int | None
    tell: Callable[[Trial], None]
    estimator: Estimator = field(init=False)

    def __post_init__(self) -> None:
        self.estimator = Estimator(self.parts, self.cluster, self.constraints)


def choose(
    parts: Parts,
    cluster: Cluster | str,
    constraints: Constraints | None = None,
    *,
    layout: Layout | None = None,
    budget: Budget | str | float = "30s",
    seed: int = 0,
    num_threads: int | None = None,
    on_progress: Callable[[Trial], None] | None = None,
    stop: threading.Event | None = None,
) -> Choice:
    """Returns the best plan over layouts of the batch of `parts` on `cluster`; with `layout`, the best of that one.

    Op placement of the whole step is one of the layouts; the answer is never slower than the best that was tried, and
    fits if any of them does. InputError for a layout that the batch or the devices do not allow.
    """
    cluster = Cluster.of(cluster)
    clock = Clock(Budget.of(budget), stop=stop)
    search = _Search(
        parts, cluster, constraints or Constraints(), clock, seed, num_threads, on_progress or (lambda trial: None)
    )
    estimates = _estimates(search, layout)
    trials = _simulated(search, estimates)
    finalists = _finalists(search, trials, layout)
    searched = [
        _searched(search, trial, clock.part(share)) for trial, share in zip(finalists, FINAL_SHARES, strict=False)
    ]
    best = min([*searched, *trials], key=lambda trial: trial.key)
    if best.candidate is None:
        raise InputError(f"--parallel: no layout of {parts.exact(1).name!r} can be placed on {cluster.name!r}")
    best = _searched(search, best, clock.part(1.0))
    return _choice(search, best, [*searched, *trials], estimates)


def _estimates(search: _Search, layout: Layout | None) -> list[Estimate]:
    """Returns estimates of all arrangements, those that fit first, the quicker ones first."""
    estimator, batch_size = search.estimator, search.parts.batch_size
    machine = estimator.machine
    if layout is not None:
        search.parts.check(layout.num_parts)
        ways = [] if layout.is_whole else forced(machine, layout, batch_size)
        return sorted(map(estimator.estimate, ways), key=_promise)
    num_devices = len(machine.usable)
    for count in range(num_devices, 1, -1):  # what is interpolated from, with the whole batch
        if search.parts.divides(count):
            search.parts.exact(count)
            break
    found: list[Estimate] = []
    for arrangement in sorted(arrangements(machine, batch_size), key=lambda way: way.num_places):
        least = estimator.least(arrangement)
        best_ns = min((each.step_time_ns for each in found if not each.missing_bytes), default=least.step_time_ns)
        if least.step_time_ns > FAR * best_ns or (found and search.clock.share_spent > ESTIMATE_SHARE):
            found.append(least)
        else:
            found += _with_variants(search, arrangement)
    return sorted(found, key=_promise)


def _with_variants(search: _Search, arrangement: Arrangement) -> list[Estimate]:
    """Returns the estimate of an arrangement and, where it does not fit, of some that take less memory."""
    estimator = search.estimator
    found = [estimator.estimate(arrangement)]
    if arrangement.layout.data > 1:
        zero = replace(arrangement, layout=replace(arrangement.layout, zero=1))
        found.append(estimator.estimate(zero))
    narrow: Arrangement | None = arrangement
    while narrow is not None and all(estimate.missing_bytes for estimate in found):
        base = estimator.estimate(narrow)
        found += [base, *map(estimator.estimate, with_less_memory(base))]
        narrow = more_microbatches(narrow, search.parts.batch_size) if narrow.num_places == 1 else None
    return found


def _promise(estimate: Estimate) -> tuple[bool, int]:
    return estimate.missing_bytes > 0, estimate.step_time_ns


def _simulated(search: _Search, estimates: list[Estimate]) -> list[Trial]:
    """Simulates the promising arrangements in whole, with constructive places."""
    trials: list[Trial] = []
    for estimate in estimates[: 2 * MOST_SIMULATED]:
        fits = [trial for trial in trials if not trial.key[0]]
        best_ns = min((trial.step_time_ns for trial in fits), default=0)
        is_enough = len(trials) >= MOST_SIMULATED or search.clock.share_spent > SCREEN_SHARE
        if fits and (is_enough or estimate.step_time_ns > FAR * best_ns):
            break
        if not len(estimate.places):
            continue
        if search.clock.stop.is_set() and trials:
            break
        trials.append(_trial(search, estimate.arrangement, estimate.places))
    return trials


def _trial(search: _Search, arrangement: Arrangement, places: I64) -> Trial:
    """Returns the step of an arrangement, simulated with these places of a replica's ops."""
    graph = search.parts.exact(arrangement.layout.num_parts)
    if len(places) != graph.num_ops:  # a sample alone may have other ops
        estimator = Estimator(search.parts, search.cluster, search.constraints)
        places = estimator.estimate(arrangement).places
    layout, devices = arrangement.layout, arrangement.devices
    step = Step.of(graph, layout, places=places if arrangement.num_places > 1 else None)
    problem = Problem.build(step.graph, search.cluster, search.constraints)
    placement = step.placement(places, devices)
    search.clock.spend(1)
    if problem.broken_constraints(placement):
        trial = Trial(layout, devices, NOT_ALLOWED, 0, 0)
    else:
        candidate = as_candidate(best_dispatch(problem, step, placement))
        trial = _with_candidate(Trial(layout, devices, OK, 0, 0, step, problem, None, places), candidate)
    search.tell(trial)
    return trial


def _with_candidate(trial: Trial, candidate: Candidate) -> Trial:
    missing = int(candidate.replay.missing_bytes.max())
    return replace(
        trial,
        status=DOES_NOT_FIT if missing else OK,
        step_time_ns=candidate.step_time_ns,
        missing_bytes=missing,
        candidate=candidate,
    )


def _finalists(search: _Search, trials: list[Trial], layout: Layout | None) -> list[Trial]:
    """Returns what is searched: the best trial, and op placement unless its bound says that it cannot win."""
    best = min(trials, key=lambda trial: trial.key, default=None)
    chosen = [] if best is None or best.candidate is None else [best]
    if layout is None or layout.is_whole:
        problem = Problem.build(search.parts.exact(1), search.cluster, search.constraints)
        bound_ns = lower_bound(problem)
        if best is None or best.key[0] or bound_ns < best.step_time_ns:
            step = Step.of(problem.graph, Layout())
            whole = Trial(Layout(), (tuple(search.estimator.machine.usable),), OK, bound_ns, 0, step, problem)
            chosen.append(whole)
    return chosen


def _searched(search: _Search, trial: Trial, clock: Clock) -> Trial:
    """Returns `trial` after a search of one replica, and of the whole step in the time left."""
    assert trial.problem is not None
    assert trial.step is not None
    if clock.is_up and trial.candidate is not None:
        return trial
    if trial.is_whole and trial.candidate is None:
        question = Question.about(
            trial.problem, bound_ns=trial.step_time_ns, seed=search.seed, num_threads=search.num_threads
        )
        solution = auto(question, clock)
        if solution.best is None:
            return replace(trial, status=NOT_ALLOWED)
        best = solution.best
        found = _with_candidate(trial, replace(as_candidate(best.replay), order=best.order))
        search.tell(found)
        return found
    if len(trial.devices[0]) > 1 and len(trial.devices) > 1:
        trial = _with_replica_searched(search, trial, clock.part(0.5))
    return _with_whole_searched(search, trial, clock)


def _with_replica_searched(search: _Search, trial: Trial, clock: Clock) -> Trial:
    """Returns `trial` with places from a search in one replica, if they are better for all."""
    assert trial.places is not None
    layout, devices = trial.layout, trial.devices[0]
    graph = search.parts.exact(layout.num_parts)
    step = Step.of(graph, Layout((layout.microbatches[0],), recompute=layout.recompute))
    limits = {search.cluster.devices[d].name: int(search.estimator.limits_bytes[d]) for d in devices}
    problem = Problem.build(step.graph, only(search.cluster, devices), Constraints(max_memory_bytes=limits))
    start = as_candidate(best_dispatch(problem, step, step.placement(trial.places, [range(len(devices))])))
    found = _refined(search, problem, start, clock)
    places = np.empty_like(trial.places)
    places[step.origin[::-1]] = found.placement[::-1]  # the first micro-batch's, which all have
    if np.array_equal(places, trial.places):
        return trial
    other = _trial(search, Arrangement(layout, trial.devices), places)
    return min(trial, other, key=lambda each: each.key)


def _with_whole_searched(search: _Search, trial: Trial, clock: Clock) -> Trial:
    assert trial.problem is not None
    assert trial.candidate is not None
    if clock.is_up or trial.problem.num_ops > _SEARCHED_OPS:
        return trial
    found = _refined(search, trial.problem, trial.candidate, clock)
    better = _with_candidate(trial, found)
    search.tell(better)
    return min(trial, better, key=lambda each: each.key)


def _refined(search: _Search, problem: Problem, start: Candidate, clock: Clock) -> Candidate:
    """Returns the best that a local search finds from `start`."""
    question = Question.about(problem, seed=search.seed, num_threads=search.num_threads)
    reduction = question.reduction
    local = LocalSearch(reduction.problem, clock, seed=search.seed, num_threads=search.num_threads)
    priority = None if start.priority is None else reduction.restrict(start.priority)
    local.start([Candidate(reduction.restrict(start.placement), priority=priority, order=start.order)], num_more=0)
    local.run()
    return min(start, as_candidate(question.replay(local.best).replay))


def _choice(search: _Search, best: Trial, trials: list[Trial], estimates: list[Estimate]) -> Choice:
    assert best.candidate is not None
    assert best.problem is not None
    clock = search.clock
    simulation = best.candidate.replay
    whole = next((trial for trial in trials if trial.is_whole and trial.candidate is not None), None)
    record = Search(
        seconds=clock.seconds,
        simulations=clock.simulations,
        baselines={} if whole is None else {"op placement": Baseline(whole.status, whole.step_time_ns, 0.0)},
        busy_fraction=simulation.busy_fraction,
        missing_bytes=simulation.missing_bytes,
        interrupted=clock.stop.is_set(),
        order=best.candidate.order,
    )
    plan = plan_of(simulation, lower_bound(best.problem), "auto", search.seed, record)
    known = {(trial.layout, trial.devices) for trial in trials}
    others = [
        Trial(e.arrangement.layout, e.arrangement.devices, ESTIMATED, e.step_time_ns, e.missing_bytes)
        for e in estimates
        if (e.arrangement.layout, e.arrangement.devices) not in known
    ]
    distinct = {(trial.layout, trial.devices): trial for trial in sorted([best, *trials], key=lambda t: t.key)[::-1]}
    ranked = sorted(distinct.values(), key=lambda trial: trial.key)
    return Choice(plan, best, (*ranked, *others), layout_bound(search.parts.read, search.cluster))
