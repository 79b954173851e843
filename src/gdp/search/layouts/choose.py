"""START HERE: which layout, and which placement of it. Parts of a batch and a cluster go in, the best plan comes out.

    arrangements --estimate--> promising ones --simulate--> finalists --search--> the best --search--> Choice
    op placement ------------------------------------------^

Estimates are made from one replica, and cheap; steps are simulated in whole with constructive places; a search is
given to the best few, first in one replica, whose places are mapped to all, then in the whole step.
"""

import contextlib
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TypeVar

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
from gdp.search.layouts.arrangement import Arrangement, forced, replicated_ways
from gdp.search.layouts.dispatch import as_candidate, best_dispatch
from gdp.search.layouts.estimate import Estimate, Estimator, with_less_memory
from gdp.search.layouts.parts import Parts
from gdp.search.local_search import LocalSearch
from gdp.search.place import plan_of
from gdp.search.question import Question
from gdp.simulator.constraints import Constraints
from gdp.simulator.plan import Baseline, Plan, Search
from gdp.simulator.problem import Problem

SCREEN_SHARE = 0.35  # of the budget: later no further arrangement is simulated
# of the time left, for op placement, then for replicas of one device each, and for others
WHOLE_SHARE, REPLICAS_SHARE, FINAL_SHARE = 0.5, 0.15, 0.4
NEAR, NEARLY = 1.3, 1.08  # times the best: as much may replicas of several devices, and of one, gain in a search
MOST_SIMULATED = 10  # arrangements
FAR = 1.1  # times the best: what is slower than that at least is neither placed nor simulated
_SEARCHED_OPS = 120_000  # larger steps are not searched in whole
_T = TypeVar("_T")
OP_PLACEMENT, DATA_PARALLEL = "op placement", "data parallel"  # baselines
OK, DOES_NOT_FIT, NOT_ALLOWED, ESTIMATED = "ok", "does not fit", "not allowed", "estimated"


@dataclass(frozen=True, eq=False)
class Trial:
    """The fate of an arrangement, or of op placement of the whole step."""

    layout: Layout
    devices: tuple[tuple[int, ...], ...]  # [R][P]
    status: str  # OK, DOES_NOT_FIT, NOT_ALLOWED, or ESTIMATED for what was not simulated
    step_time_ns: int
    missing_bytes: int
    step: Step | None = None  # None: not simulated
    problem: Problem | None = None
    candidate: Candidate | None = None
    places: I64 | None = None  # [N] of a replica's ops
    reason: str = ""  # why it is not allowed; "": by a constraint
    baselines: Mapping[str, Baseline] = field(default_factory=dict)  # of op placement: the placers it began from

    @property
    def is_whole(self) -> bool:
        """True for op placement of the whole step."""
        return self.layout.is_whole

    @property
    def key(self) -> tuple[int, int, int]:
        """Figures to compare trials by: those that fit first, by time; then by what is missing; the impossible last."""
        rank = 2 if self.status == NOT_ALLOWED else int(self.missing_bytes > 0)
        return rank, self.missing_bytes, self.step_time_ns


@dataclass(frozen=True, eq=False)
class Choice:
    """The best plan with its layout, and all layouts that were looked at, the best first."""

    plan: Plan
    trial: Trial
    trials: tuple[Trial, ...]
    layout_bound_ns: int  # no layout of this batch on these devices takes less


@dataclass(eq=False)
class _Choosing:
    """Holds the question and the means that all phases of a choice share."""

    parts: Parts
    cluster: Cluster
    constraints: Constraints
    clock: Clock
    seed: int
    num_threads: int | None
    tell: Callable[[Trial], None]
    refused: dict[Arrangement, str] = field(default_factory=dict)  # and why
    estimator: Estimator = field(init=False)

    def __post_init__(self) -> None:
        self.estimator = Estimator(self.parts, self.cluster, self.constraints)

    def attempt(self, action: Callable[[], _T], way: Arrangement, layout: Layout | None) -> _T | None:
        """Returns what `action` does; None where the model has no such part or cannot be cut so.

        With a `layout`, which is asked for, the InputError goes on.
        """
        try:
            return action()
        except InputError as error:
            if layout is not None:
                raise
            self.refused[way] = str(error)
            return None


def choose_layout(
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
    _read_ahead(parts, cluster, layout)
    clock = Clock(Budget.of(budget), stop=stop)
    search = _Choosing(
        parts, cluster, constraints or Constraints(), clock, seed, num_threads, on_progress or (lambda trial: None)
    )
    trials, estimates = _screened(search, layout)
    searched: list[Trial] = []
    for trial in _finalists(search, trials, layout):
        if not _is_hopeless(trial, [*searched, *trials]):
            searched.append(_searched(search, trial, clock.part(_share(trial))))
    best = min([*searched, *trials], key=lambda trial: trial.key)
    if best.candidate is None:
        asked = "no layout" if layout is None else f"no {layout}"
        raise InputError(
            f"--parallel: constraints let {asked} of {parts.exact(1).name!r} be placed on {cluster.name!r}; "
            "leave out pins and --forbid, or take another layout"
        )
    best = _searched(search, best, clock.part(1.0))
    return _choice(search, best, [*searched, *trials], estimates)


def _read_ahead(parts: Parts, cluster: Cluster, layout: Layout | None) -> None:
    """Reads the steps that are needed in any case: reading a model is no search. InputError as `Parts.check` says."""
    parts.exact(1)
    if layout is not None:
        parts.exact(layout.num_parts)
        return
    for count in range(cluster.num_devices, 1, -1):  # what is interpolated from, with the whole batch
        if parts.divides(count):
            with contextlib.suppress(InputError):  # a layer may fail with so few samples
                parts.exact(count)
                return


def _screened(search: _Choosing, layout: Layout | None) -> tuple[list[Trial], list[Estimate]]:
    """Simulates the promising arrangements in whole; returns these, and estimates of the others.

    The most promising one goes on by one step: from arithmetic to an estimate, from an estimate to a simulation. One
    that does not fit makes room for others of its kind that take less memory.
    """
    queue = _arithmetic(search, layout)
    seen = {each.arrangement for each in queue}
    trials: list[Trial] = []
    while queue:
        fitting_ns = min((trial.step_time_ns for trial in trials if not trial.key[0]), default=None)
        is_over = len(trials) >= MOST_SIMULATED or search.clock.share_spent > SCREEN_SHARE
        next_one = min(queue, key=_promise)
        is_far = fitting_ns is not None and (next_one.missing_bytes or next_one.step_time_ns > FAR * fitting_ns)
        if is_far or (is_over and fitting_ns is not None) or (trials and search.clock.stop.is_set()):
            break
        if next_one.missing_bytes and len(trials) >= MOST_SIMULATED:
            break
        queue.remove(next_one)
        way = next_one.arrangement
        if len(next_one.places):
            trial = search.attempt(partial(_trial, search, way, next_one.places), way, layout)
            trials += [] if trial is None else [trial]
            continue
        estimate = search.attempt(partial(search.estimator.estimate, way), way, layout)
        if estimate is None:
            continue
        queue.append(estimate)
        others = with_less_memory(estimate, search.parts.batch_size) if estimate.missing_bytes and not layout else []
        queue += _least(search, [other for other in others if other not in seen], layout)
        seen.update(others)
    return trials, sorted(queue, key=_promise)


def _arithmetic(search: _Choosing, layout: Layout | None) -> list[Estimate]:
    """Returns what arithmetic says of all arrangements, or of those of `layout`."""
    machine, batch_size = search.estimator.machine, search.parts.batch_size
    if layout is not None:
        return [] if layout.is_whole else _least(search, forced(machine, layout, batch_size), layout)
    return _least(search, replicated_ways(machine, batch_size), layout)


def _least(search: _Choosing, ways: Sequence[Arrangement], layout: Layout | None) -> list[Estimate]:
    """Returns what arithmetic says of `ways`, but of those that the model does not allow."""
    estimates = [search.attempt(partial(search.estimator.least, way), way, layout) for way in ways]
    return [estimate for estimate in estimates if estimate is not None]


def _promise(estimate: Estimate) -> tuple[bool, int]:
    return estimate.missing_bytes > 0, estimate.step_time_ns


def _trial(search: _Choosing, arrangement: Arrangement, places: I64) -> Trial:
    """Returns the step of an arrangement, simulated with these places of a replica's ops."""
    graph = search.parts.exact(arrangement.layout.num_parts)
    if len(places) != graph.num_ops:  # few samples may have other ops than those that places were found for
        places = search.estimator.estimate(arrangement).places
    layout, devices = arrangement.layout, arrangement.devices
    hosts = search.estimator.machine.hosts_of(arrangement)
    trials = []
    for way in [None] if hosts is None else [None, hosts]:
        step = Step.of(graph, layout, places=places if arrangement.num_places > 1 else None, hosts=way)
        problem = Problem.build(step.graph, search.cluster, search.constraints)
        placement = step.placement(places, devices)
        search.clock.spend(1)
        if problem.broken_constraints(placement):
            trials.append(Trial(layout, devices, NOT_ALLOWED, 0, 0))
            break
        candidate = best_dispatch(problem, step, placement)
        trials.append(_with_candidate(Trial(layout, devices, OK, 0, 0, step, problem, None, places), candidate))
    trial = min(trials, key=lambda each: each.key)
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


def _finalists(search: _Choosing, trials: list[Trial], layout: Layout | None) -> list[Trial]:
    """Returns what is searched: the best trial, the best with several devices a replica if it is near, and op placement
    unless its bound says that it cannot win.
    """
    best = min(trials, key=lambda trial: trial.key, default=None)
    chosen = [] if best is None or best.candidate is None else [best]
    if best is not None and not best.key[0] and len(best.devices[0]) == 1:
        others = [trial for trial in trials if len(trial.devices[0]) > 1 and not trial.key[0]]
        near = [trial for trial in others if trial.step_time_ns < NEAR * best.step_time_ns]
        chosen += sorted(near, key=lambda trial: trial.key)[:1]
    if layout is None or layout.is_whole:
        problem = Problem.build(search.parts.exact(1), search.cluster, search.constraints)
        bound_ns = lower_bound(problem)
        if best is None or best.key[0] or bound_ns < best.step_time_ns:
            step = Step.of(problem.graph, Layout())
            whole = Trial(Layout(), (tuple(search.estimator.machine.usable),), OK, bound_ns, 0, step, problem)
            chosen.insert(0, whole)
    return chosen


def _is_hopeless(trial: Trial, others: list[Trial]) -> bool:
    """Returns whether no search of `trial` is likely to make it faster than the best of `others`."""
    best = min(others, key=lambda each: each.key, default=trial)
    gain = NEARLY if len(trial.devices[0]) == 1 else NEAR
    return not best.key[0] and trial.step_time_ns > gain * best.step_time_ns


def _share(trial: Trial) -> float:
    """Returns the share of the time left for a finalist: replicas of one device each leave little to be found."""
    if trial.is_whole:
        return WHOLE_SHARE
    return REPLICAS_SHARE if len(trial.devices[0]) == 1 else FINAL_SHARE


def _searched(search: _Choosing, trial: Trial, clock: Clock) -> Trial:
    """Returns `trial` after a search of one replica, and of the whole step in the time left."""
    assert trial.problem is not None
    assert trial.step is not None
    is_cut_in_stages = trial.layout.stages is not None  # a search would move ops out of their stages
    if trial.candidate is not None and (clock.is_up or is_cut_in_stages):
        return trial
    if trial.is_whole and trial.candidate is None:
        question = Question.about(
            trial.problem, bound_ns=trial.step_time_ns, seed=search.seed, num_threads=search.num_threads
        )
        solution = auto(question, clock)
        if solution.best is None:
            return replace(trial, status=NOT_ALLOWED)
        best = solution.best
        found = _with_candidate(trial, as_candidate(best.replay, best.order))
        found = replace(found, baselines=solution.baselines)
        search.tell(found)
        return found
    if len(trial.devices[0]) > 1 and len(trial.devices) > 1:
        trial = _with_replica_searched(search, trial, clock.part(0.5))
    return _with_whole_searched(search, trial, clock)


def _with_replica_searched(search: _Choosing, trial: Trial, clock: Clock) -> Trial:
    """Returns `trial` with places from a search in one replica, if they are better for all."""
    assert trial.places is not None
    layout, devices = trial.layout, trial.devices[0]
    graph = search.parts.exact(layout.num_parts)
    step = Step.of(graph, Layout((layout.microbatches[0],), recompute=layout.recompute))
    limits = {search.cluster.devices[d].name: int(search.estimator.limits_bytes[d]) for d in devices}
    problem = Problem.build(step.graph, only(search.cluster, devices), Constraints(max_memory_bytes=limits))
    start = best_dispatch(problem, step, step.placement(trial.places, [range(len(devices))]))
    found = _refined(search, problem, start, clock, is_alone=False)
    places = np.empty_like(trial.places)
    places[step.origin[::-1]] = found.placement[::-1]  # the first micro-batch's, which all have
    if np.array_equal(places, trial.places):
        return trial
    other = _trial(search, Arrangement(layout, trial.devices), places)
    return min(trial, other, key=lambda each: each.key)


def _with_whole_searched(search: _Choosing, trial: Trial, clock: Clock) -> Trial:
    assert trial.problem is not None
    assert trial.candidate is not None
    if clock.is_up or trial.problem.num_ops > _SEARCHED_OPS:
        return trial
    found = _refined(search, trial.problem, trial.candidate, clock, is_alone=not trial.is_whole)
    better = _with_candidate(trial, found)
    search.tell(better)
    return min(trial, better, key=lambda each: each.key)


def _refined(
    search: _Choosing, problem: Problem, start: Candidate, clock: Clock, *, is_alone: bool = True
) -> Candidate:
    """Returns the best that a local search finds from `start`; unless `is_alone`, from other starts too."""
    question = Question.about(problem, seed=search.seed, num_threads=search.num_threads)
    reduction = question.reduction
    local = LocalSearch(reduction.problem, clock, seed=search.seed, num_threads=search.num_threads)
    priority = None if start.priority is None else reduction.restrict(start.priority)
    first = Candidate(reduction.restrict(start.placement), priority=priority, order=start.order)
    local.start([first], num_more=0 if is_alone else None)
    local.run()
    return min(start, as_candidate(question.replay(local.best).replay, start.order))


def _choice(search: _Choosing, best: Trial, trials: list[Trial], estimates: list[Estimate]) -> Choice:
    assert best.candidate is not None
    assert best.problem is not None
    clock = search.clock
    simulation = best.candidate.replay
    record = Search(
        seconds=clock.seconds,
        simulations=clock.simulations,
        baselines=_baselines(best, trials),
        busy_fraction=simulation.busy_fraction,
        missing_bytes=simulation.missing_bytes,
        interrupted=clock.stop.is_set(),
        order=best.candidate.order,
    )
    assert best.step is not None
    plan = plan_of(simulation, lower_bound(best.problem), "auto", search.seed, record)
    if not best.is_whole:  # with the graph that is cut, by which the plan is known again
        plan = replace(plan, layout=best.step.document() | {"whole": search.parts.exact(1).fingerprint})
    known = {(trial.layout, trial.devices) for trial in trials}
    others = [
        Trial(e.arrangement.layout, e.arrangement.devices, ESTIMATED, e.step_time_ns, e.missing_bytes)
        for e in estimates
        if (e.arrangement.layout, e.arrangement.devices) not in known
    ]
    distinct = {(trial.layout, trial.devices): trial for trial in sorted([best, *trials], key=lambda t: t.key)[::-1]}
    ranked = sorted(distinct.values(), key=lambda trial: trial.key)
    refused = [
        Trial(way.layout, way.devices, NOT_ALLOWED, 0, 0, reason=reason) for way, reason in search.refused.items()
    ]
    return Choice(plan, best, (*ranked, *others, *refused), layout_bound(search.parts.read, search.cluster))


def _baselines(best: Trial, trials: list[Trial]) -> dict[str, Baseline]:
    """Returns what the answer is compared with, where it was simulated: op placement, and plain data parallelism."""
    found: dict[str, Baseline] = {}
    for trial in trials:
        if trial.is_whole and trial.candidate is not None:
            own = {} if best.is_whole else {OP_PLACEMENT: _baseline(trial)}
            found |= {**trial.baselines, **own}
    plain = [trial for trial in trials if trial.layout == Layout((1,) * trial.layout.data) and trial.layout.data > 1]
    plain = [trial for trial in plain if trial.candidate is not None and len(trial.devices[0]) == 1]
    if plain:  # as it was before a search
        found[DATA_PARALLEL] = _baseline(max(plain, key=lambda trial: (trial.layout.data, trial.step_time_ns)))
    return found


def _baseline(trial: Trial) -> Baseline:
    return Baseline("infeasible" if trial.missing_bytes else "ok", trial.step_time_ns, 0.0)
