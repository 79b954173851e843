"""START HERE: which layout, and which placement of it. Parts of a batch and a cluster go in, the best plan comes out.

    arrangements --estimate--> promising ones --simulate--> finalists --search--> the best --search--> Choice
    op placement ------------------------------------------^

Estimates are made from one replica, and cheap; steps are simulated in whole with constructive places; a search is
given to the best few, first in one replica, whose places are mapped to all, then in the whole step.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial

import numpy as np

from gdp.bounds.layout_bound import layout_bound
from gdp.bounds.lower_bound import lower_bound, quick_bound
from gdp.budget import Budget, Clock
from gdp.cluster import Cluster
from gdp.errors import InputError
from gdp.graph import Graph
from gdp.parallel.layout import NONE, Layout
from gdp.parallel.step import Step
from gdp.search.candidate import Candidate
from gdp.search.layouts.batch_parts import Parts
from gdp.search.layouts.dispatch import as_candidate, best_dispatch, preferred
from gdp.search.layouts.estimate import Estimate
from gdp.search.layouts.screening import Screening
from gdp.search.layouts.trial import ESTIMATED, NOT_ALLOWED, OK, Choosing, Trial
from gdp.search.ops.annealing import is_too_wide
from gdp.search.ops.auto import auto, run_classical
from gdp.search.ops.good_order import in_good_order, in_program_order
from gdp.search.ops.local_search import LocalSearch
from gdp.search.place import plan_of
from gdp.search.solution import Solution
from gdp.simulator.constraints import Constraints
from gdp.simulator.plan import Baseline, Plan, Search
from gdp.simulator.problem import Problem
from gdp.simulator.simulate import NEVER
from gdp.stop import skip_on_interrupt

OP_PLACEMENT, DATA_PARALLEL = "op placement", "data parallel"  # baselines


@dataclass(frozen=True, eq=False)
class Choice:
    """The best plan with its layout, and all layouts that were looked at, the best first."""

    plan: Plan
    trial: Trial
    trials: tuple[Trial, ...]
    layout_bound_ns: int  # no layout of this batch on these devices takes less


def choose_layout(
    parts: Parts | Graph | str,
    cluster: Cluster | str,
    constraints: Constraints | None = None,
    *,
    layout: Layout | None = None,
    budget: Clock | Budget | str | float = "30s",
    seed: int = 0,
    checkpoint: str | None = None,
    num_threads: int | None = None,
    on_progress: Callable[[Trial], None] | None = None,
) -> Choice:
    """Returns the best plan over layouts of the batch of `parts` on `cluster`; with `layout`, the best of that one.

    `parts` may be a MODEL, as the command line takes it, and `layout` is made by `Layout.parse`.
    Op placement of the whole step is one of the layouts; the answer is never slower than the best that was tried, and
    fits if any of them does. Ops are placed by `auto`, with the policy `checkpoint`. The budget begins once the step
    and one part of it are read; a clock has begun.
    InputError for a layout that the batch or the devices do not allow.
    """
    cluster, parts = Cluster.of(cluster), Parts.of(parts)
    if layout is not None and not isinstance(layout, Layout):
        raise InputError(f"layout is {layout!r}; Layout.parse('data=4,zero=1') makes one")
    for num_parts in {1, 1 if layout is None else layout.num_parts}:
        parts.exact(num_parts)
    if layout is None and not isinstance(budget, Clock):
        parts.read_ahead(cluster.num_devices)
    clock = Clock.of(budget)
    parts = parts.within(clock)
    if layout is None:
        parts.read_ahead(cluster.num_devices)
    tell, constraints = on_progress or (lambda trial: None), constraints or Constraints()
    search = Choosing(parts, cluster, constraints, clock, seed, num_threads, tell, layout, checkpoint)
    first: list[Trial] = []
    if parts.exact(1).num_ops > search.settings.large.estimated_ops and (layout is None or layout.is_whole):
        is_many = cluster.is_large  # on which one copy of the model hardly wins
        first = _ops_placed(search, clock.part(search.settings.layouts.quick_share) if is_many else clock)
    screening = Screening(search, first)
    screening.run()
    trials = _confirmed(search, screening.trials)
    if not any(trial.fits for trial in trials):  # there was no time to simulate what fitted by an estimate as captured
        trials += screening.with_least_memory()
    finalists = _finalists(search, trials)
    trials = [*finalists, *trials]
    if sum(not _is_hopeless(search, trial, trials) for trial in finalists) > 1:
        for trial in finalists:
            if not _is_hopeless(search, trial, trials):
                trials.insert(0, _searched(search, trial, clock.part(_share(search, trial))))
    best = min(filter(None, (*trials, search.best)), key=lambda trial: trial.key)
    if best.candidate is None:
        asked = "no layout" if layout is None else f"no {layout}"
        raise InputError(
            f"--parallel: constraints let {asked} of {parts.exact(1).name!r} be placed on {cluster.name!r}; "
            "leave out pins and --forbid, or take another layout"
        )
    best = _searched(search, best, clock.part(1.0))
    return _choice(search, best, trials, screening.estimates)


def _confirmed(search: Choosing, trials: list[Trial]) -> list[Trial]:
    """Returns `trials`, of which those that may be searched are simulated as captured, while there is time."""
    while rough := [trial for trial in _worth_a_search(search, trials) if not trial.is_captured]:
        places = rough[0].places
        assert places is not None
        way = rough[0].way
        exact = None
        if search.has_time(way) or not any(trial.fits for trial in trials if trial.is_captured):
            exact = search.attempt(partial(search.simulate, places=places, is_captured=True), way)
        trials = [trial for trial in trials if trial is not rough[0]] + ([] if exact is None else [exact])
    return trials


def _finalists(search: Choosing, trials: list[Trial]) -> list[Trial]:
    """Returns what is searched: `_promising` trials, and op placement unless its bound says that it cannot win.

    Op placement is searched for a moment, which tells if the others have a chance.
    """
    wholes = [trial for trial in trials if trial.is_whole]
    chosen = _promising(search, [trial for trial in trials if not trial.is_whole])
    best = chosen[0] if chosen else None
    limit_ns = best.step_time_ns if best is not None and best.fits else NEVER
    if wholes:
        wholes = [trial for trial in wholes if trial.problem is None or lower_bound(trial.problem) < limit_ns]
    elif search.layout is None or search.layout.is_whole:
        has_time = best is None or search.clock.has(search.simulation.seconds(search.parts.exact(1).num_ops))
        wholes = (
            _ops_placed(search, search.clock.part(search.settings.layouts.quick_share), limit_ns) if has_time else []
        )
    return [*wholes, *chosen]


def _ops_placed(search: Choosing, clock: Clock, limit_ns: int = NEVER) -> list[Trial]:
    """Returns op placement of the whole step; none where its bound is not below `limit_ns`.

    Of a large step it is that of classical placers, from which a search goes on later.
    """
    problem = Problem.build(search.parts.exact(1), search.cluster, search.constraints)
    bound_ns = lower_bound(problem)
    if bound_ns >= limit_ns:
        return []
    step = Step.of(problem.graph, Layout())
    trial = Trial(Layout(), (tuple(search.estimator.machine.usable),), OK, bound_ns, 0, step, problem)
    question = in_good_order(search.question(problem, bound_ns=bound_ns), clock)
    if problem.num_ops > search.settings.large.estimated_ops:
        classical = search.classical = run_classical(question, clock)
        solution = Solution(classical.best, classical.baselines)
    else:
        solution = auto(question, clock)
    if (best := solution.best) is None:
        return [replace(trial, status=NOT_ALLOWED)]
    trial = replace(trial.with_candidate(as_candidate(best.replay, best.order)), baselines=solution.baselines)
    search.note(trial)
    return [trial]


def _worth_a_search(search: Choosing, trials: list[Trial]) -> list[Trial]:
    """Returns the trials that may be finalists, and the best, which may be the answer."""
    replicas = _promising(search, [trial for trial in trials if not trial.is_whole])
    return [*_promising(search, trials), *(trial for trial in replicas if not _is_hopeless(search, trial, trials))]


def _promising(search: Choosing, trials: list[Trial]) -> list[Trial]:
    """Returns the best trial, and the best with several devices a replica if it is near."""
    best = min(trials, key=lambda trial: trial.key, default=None)
    if best is None or best.candidate is None:
        return []
    if not best.fits or len(best.devices[0]) > 1:
        return [best]
    others = [trial for trial in trials if len(trial.devices[0]) > 1 and trial.fits]
    near = [
        trial for trial in others if trial.step_time_ns < search.settings.layouts.gain_of_places * best.step_time_ns
    ]
    return [best, *sorted(near, key=lambda trial: trial.key)[:1]]


def _is_hopeless(search: Choosing, trial: Trial, others: list[Trial]) -> bool:
    """Returns whether no search of `trial` is likely to make it faster than the best of `others`."""
    best = min(others, key=lambda each: each.key, default=trial)
    gain = (
        search.settings.layouts.gain_of_replicas
        if len(trial.devices[0]) == 1
        else search.settings.layouts.gain_of_ops
        if _is_constructed(search, trial)
        else search.settings.layouts.gain_of_places
    )
    return best.fits and trial.step_time_ns > gain * best.step_time_ns


def _is_constructed(search: Choosing, trial: Trial) -> bool:
    """Returns whether only classical placers placed the ops of the whole step."""
    return (
        trial.is_whole
        and trial.problem is not None
        and trial.problem.num_ops > search.settings.large.estimated_ops
        and not trial.is_searched
    )


def _share(search: Choosing, trial: Trial) -> float:
    """Returns the share of the time left for a finalist: replicas of one device each leave little to be found."""
    if trial.is_whole:
        return (
            search.settings.layouts.large_share
            if _is_constructed(search, trial)
            else search.settings.layouts.whole_share
        )
    return search.settings.layouts.replicas_share if len(trial.devices[0]) == 1 else search.settings.layouts.final_share


def _searched(search: Choosing, trial: Trial, clock: Clock) -> Trial:
    """Returns `trial` after a search of one replica, and of the whole step in the time left."""
    # a search would move ops out of their stages, and activations away from the host
    is_kept = trial.layout.stages is not None or trial.layout.offload != NONE
    if trial.candidate is None or trial.problem is None or is_kept:
        return trial
    clock = clock.before(search.closing_s(trial.problem.num_ops))
    if clock.is_up or not (trial.is_whole or clock.has(search.seconds(trial.way))):
        return trial
    if len(trial.devices[0]) > 1 and len(trial.devices) > 1 and not trial.is_searched:
        share = (
            search.settings.layouts.replica_share
            if trial.problem.num_ops <= search.settings.large.searched_ops
            else 1.0
        )
        trial = _with_replica_searched(search, trial, clock.before(search.seconds(trial.way)).part(share))
    return _with_whole_searched(search, trial, clock)


def _with_replica_searched(search: Choosing, trial: Trial, clock: Clock) -> Trial:
    """Returns `trial` with places from a search in one replica, if they are better for all."""
    assert trial.places is not None
    assert trial.step is not None
    layout, devices = trial.layout, trial.devices[0]
    graph = search.parts.exact(layout.num_parts)
    step = Step.of(graph, Layout((layout.microbatches[0],), recompute=trial.step.layout.recompute))
    problem = search.estimator.alone(step.graph, devices)
    start = best_dispatch(
        problem, step, step.placement(trial.places, [range(len(devices))]), large=search.settings.large
    )
    found = _placed_from(search, problem, start, clock)
    places = np.empty_like(trial.places)
    places[step.origin[::-1]] = found.placement[::-1]  # the first micro-batch's, which all have
    if np.array_equal(places, trial.places) or not search.has_time(trial.way):
        return trial
    other = search.attempt(partial(search.simulate, places=places, is_captured=True), trial.way)
    return min(filter(None, (trial, other)), key=lambda each: each.key)


def _with_whole_searched(search: Choosing, trial: Trial, clock: Clock) -> Trial:
    assert trial.problem is not None
    assert trial.candidate is not None
    if clock.is_up or trial.problem.num_ops > search.settings.large.searched_ops or is_too_wide(trial.problem):
        return trial
    refine = _placed_from if trial.layout.data == 1 and not trial.is_searched else _refined
    better = trial.with_candidate(refine(search, trial.problem, trial.candidate, clock))
    search.note(better)
    return replace(min(trial, better, key=lambda each: each.key), is_searched=True)


def _placed_from(search: Choosing, problem: Problem, start: Candidate, clock: Clock) -> Candidate:
    """Returns the best op placement that `auto` finds from its own starts and from `start`."""
    known = search.classical
    if known is not None and known.question.problem.simulator is problem.simulator:
        best = auto(replace(known.question, starts=(start,)), clock, known).best
    else:
        best = auto(in_good_order(search.question(problem, starts=(start,)), clock), clock).best
    return start if best is None else preferred([start, as_candidate(best.replay, best.order)])


def _refined(search: Choosing, problem: Problem, start: Candidate, clock: Clock) -> Candidate:
    """Returns the best that a local search finds from `start`, and for op placement from starts of its own."""
    question = search.question(problem)
    reduction = question.reduction
    local = LocalSearch(
        reduction.problem,
        clock,
        seed=search.seed,
        settings=search.settings.local_search,
        num_threads=search.num_threads,
    )
    priority = None if start.priority is None else reduction.restrict(start.priority)
    first = Candidate(reduction.restrict(start.placement), priority=priority, order=start.order)
    local.start([first], num_more=0 if problem.graph.is_collective.any() else None)
    local.run()
    return preferred([start, as_candidate(question.replay(local.best).replay, start.order)])


def _choice(search: Choosing, best: Trial, trials: list[Trial], estimates: list[Estimate]) -> Choice:
    assert best.candidate is not None
    assert best.problem is not None
    clock = search.clock
    simulation = in_program_order(best.candidate.replay)
    bound_ns = _bound_ns(search, best.problem)
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
    plan = plan_of(simulation, bound_ns, "auto", search.seed, record)
    if not best.is_whole:  # with the graph that is cut, by which the plan is known again
        beside = {"batch": search.parts.batch_size, "whole": search.parts.exact(1).fingerprint}
        plan = replace(plan, layout=best.step.document() | beside)
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


def _bound_ns(search: Choosing, problem: Problem) -> int:
    """Returns the lower bound of `problem`; of a large one after an interrupt, what the longest path and work say."""
    if problem.num_ops > search.settings.large.estimated_ops and search.clock.stop.is_set():
        return quick_bound(problem)
    bound_ns = skip_on_interrupt(search.clock.stop, partial(lower_bound, problem))
    return quick_bound(problem) if bound_ns is None else bound_ns


def _baselines(best: Trial, trials: list[Trial]) -> dict[str, Baseline]:
    """Returns what the answer is compared with, where it was simulated: op placement, and plain data parallelism."""
    found: dict[str, Baseline] = {}
    wholes = [trial for trial in trials if trial.is_whole and trial.candidate is not None]
    if wholes:
        whole = min(wholes, key=lambda trial: trial.key)
        found |= {**whole.baselines, **({} if best.is_whole else {OP_PLACEMENT: _baseline(whole)})}
    plain = [trial for trial in trials if trial.layout == Layout((1,) * trial.layout.data) and trial.layout.data > 1]
    plain = [trial for trial in plain if trial.candidate is not None and len(trial.devices[0]) == 1]
    if plain:  # as it was before a search
        found[DATA_PARALLEL] = _baseline(max(plain, key=lambda trial: (trial.layout.data, trial.step_time_ns)))
    return found


def _baseline(trial: Trial) -> Baseline:
    return Baseline("infeasible" if trial.missing_bytes else "ok", trial.step_time_ns, 0.0)
