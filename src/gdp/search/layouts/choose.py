"""START HERE: which layout, and which placement of it. A batch and a cluster go in, the best plan comes out.

    arrangements --estimate--> promising ones --simulate--> finalists --search--> the best --search--> Solution
    op placement ------------------------------------------^

Estimates are made from one replica, and cheap; steps are simulated in whole with constructive places; a search is
given to the best few, first in one replica, whose places are mapped to all, then in the whole step. A phase takes
candidates, the best of which may be the answer, and returns more or better ones."""

from collections.abc import Sequence
from dataclasses import replace
from functools import partial

import numpy as np

from gdp.bounds.layout_bound import layout_bound
from gdp.bounds.lower_bound import lower_bound, quick_bound
from gdp.budget import Clock
from gdp.errors import InputError
from gdp.parallel.layout import NONE, Layout
from gdp.parallel.step import Step
from gdp.search.batch_parts import Parts
from gdp.search.candidate import ESTIMATED, Arrangement, BatchCut, Candidate, simplest
from gdp.search.layouts.dispatch import best_dispatch, preferred
from gdp.search.layouts.layout_search import LayoutSearch
from gdp.search.layouts.screening import Screening
from gdp.search.ops.annealing import is_too_wide
from gdp.search.ops.auto import auto, run_classical
from gdp.search.ops.classical import on_one_device
from gdp.search.ops.good_order import in_good_order, in_program_order
from gdp.search.ops.local_search import LocalSearch
from gdp.search.question import BatchQuestion, Question, Solution, plan_of, search_record
from gdp.simulator.plan import Baseline, Plan
from gdp.simulator.problem import Problem
from gdp.simulator.simulate import NEVER
from gdp.stop import skip_on_interrupt
from gdp.units.reduction import Reduction

OP_PLACEMENT, DATA_PARALLEL = "op placement", "data parallel"  # baselines


def choose_layout(question: BatchQuestion, clock: Clock, known: Solution | None = None) -> Solution:
    """Returns the best plan over layouts of the batch, or that of the layout that is asked for, and what was looked at.
    Op placement of the whole step is one of the layouts; the answer is the best that was tried, or a simpler one in a
    tie with it (see `simplest`), and fits if any of them does. What was simulated for an answer that is `known` takes
    part. InputError for a layout that batch or devices forbid."""
    layout, parts = question.layout, question.parts
    for num_parts in {1, 1 if layout is None else layout.num_parts}:
        parts.exact(num_parts)
    question = replace(question, parts=parts.within(clock))
    if layout is None:
        question.parts.read_ahead(question.cluster.num_devices, question.settings.large)
    search = LayoutSearch(question, clock)
    replicas: list[Candidate] = []
    estimates: list[Candidate] = []
    if known is not None:
        search.plain = known.baselines.get(DATA_PARALLEL)
        replicas = [each for each in known.looked_at if each.may_be_answer and each.fits and not each.is_whole]
        estimates = [each for each in known.looked_at if each.status == ESTIMATED and each.has_places]
    screening = Screening(search, _large_ops_placed(search), replicas, estimates)
    screening.run()
    simulated = _confirmed(search, screening.simulated)
    for others in (screening.of_read_parts, screening.with_least_memory):
        if not any(each.fits for each in simulated):  # there was no time to simulate what fitted as captured
            simulated = _confirmed(search, [*simulated, *others()])
    finalists = _finalists(search, simulated)
    looked_at = _finalists_searched(search, finalists, [*finalists, *simulated])
    best = min(filter(None, (*looked_at, search.best)), default=None)
    if best is None or best.simulation is None:
        asked = "no layout" if layout is None else f"no {layout}"
        raise InputError(
            f"--parallel: constraints let {asked} of {parts.exact(1).name!r} be placed on {question.cluster.name!r}; "
            "leave out pins and --forbid, or take another layout"
        )
    looked_at.insert(0, _searched(search, best, clock.part(1.0)))
    if layout is not None:
        return _solution(search, looked_at[0], looked_at, screening.estimates)
    looked_at += _on_one_device(search) if best.error else []
    return _solution(search, simplest(looked_at), looked_at, screening.estimates)


def search_further(question: BatchQuestion, known: Solution, clock: Clock) -> Solution:
    """Returns `known`, whose best is op placement of the whole step, after a search that begins from the fastest."""
    search = LayoutSearch(replace(question, parts=question.parts.within(clock)), clock)
    search.baselines = known.baselines
    others = [each for each in known.looked_at if each.may_be_answer]
    first = min(each for each in others if each.is_whole)
    assert first.cut is not None, "it is of a batch"
    best = _searched(search, replace(first, cut=replace(first.cut, is_searched=False)), clock.part(1.0))
    return _solution(search, simplest([best, *others]), [best, *others], known.looked_at)


def _on_one_device(search: LayoutSearch) -> list[Candidate]:
    """Returns the whole step on one device."""
    asked = search.question
    problem = Problem.build(search.parts.exact(1), asked.cluster, asked.constraints)
    everywhere = Arrangement(Layout(), (tuple(search.estimator.machine.usable),))
    cut = BatchCut(everywhere, Step.of(problem.graph, Layout()))
    return [replace(each, cut=cut) for each in on_one_device(Question(problem, Reduction.nothing(problem)))]


def _large_ops_placed(search: LayoutSearch) -> list[Candidate]:
    """Returns op placement of a large step, which comes first: to look at its layouts takes long."""
    layout, clock = search.question.layout, search.clock
    is_asked = layout is None or layout.is_whole
    if not is_asked or search.parts.exact(1).num_ops <= search.settings.large.estimated_ops:
        return []
    cluster = search.question.cluster  # on many devices, or on groups, one copy of the model hardly wins
    is_many = cluster.is_large or any(device.group for device in cluster.devices)
    return _ops_placed(search, clock.part(search.settings.layouts.quick_share) if is_many else clock)


def _confirmed(search: LayoutSearch, candidates: Sequence[Candidate]) -> list[Candidate]:
    """Returns `candidates`, of which those that may be searched are simulated as captured, while there is time."""
    candidates = [*candidates]
    while rough := [each for each in _worth_a_search(search, candidates) if not each.may_be_answer]:
        way, exact = rough[0].way, None
        if search.has_time(way) or not any(each.fits and each.may_be_answer for each in candidates):
            exact = search.attempt(partial(search.simulate, places=rough[0].places, is_captured=True), way)
        candidates = [each for each in candidates if each is not rough[0]] + ([] if exact is None else [exact])
    return candidates


def _finalists(search: LayoutSearch, candidates: Sequence[Candidate]) -> list[Candidate]:
    """Returns what is searched: `_promising` candidates, and op placement unless its bound says that it cannot win. Op
    placement is searched for a moment, which tells if the others have a chance."""
    layout = search.question.layout
    wholes = [each for each in candidates if each.is_whole]
    chosen = _promising(search, [each for each in candidates if not each.is_whole])
    best = chosen[0] if chosen else None
    limit_ns = best.step_time_ns if best is not None and best.fits else NEVER
    if wholes:
        wholes = [each for each in wholes if each.simulation is None or lower_bound(each.problem) < limit_ns]
    elif layout is None or layout.is_whole:
        has_time = best is None or search.clock.has(search.clock.effort.simulate.seconds(search.parts.exact(1).num_ops))
        clock = search.clock.part(search.settings.layouts.quick_share)
        wholes = _ops_placed(search, clock, limit_ns) if has_time else []
    return [*wholes, *chosen]


def _ops_placed(search: LayoutSearch, clock: Clock, limit_ns: int = NEVER) -> list[Candidate]:
    """Returns op placement of the whole step; none where its bound is not below `limit_ns`. Of a large step it is that
    of classical placers, from which a search goes on later."""
    asked = search.question
    problem = Problem.build(search.parts.exact(1), asked.cluster, asked.constraints)
    bound_ns = lower_bound(problem)
    if bound_ns >= limit_ns:
        return []
    everywhere = Arrangement(Layout(), (tuple(search.estimator.machine.usable),))
    question = in_good_order(asked.about(problem, bound_ns=bound_ns), clock)
    if problem.num_ops > search.settings.large.estimated_ops:
        classical = search.classical = run_classical(question, clock)
        solution = Solution(classical.best, classical.baselines)
    else:
        solution = auto(question, clock)
    if (best := solution.best) is None:
        return [Candidate.refused(BatchCut(everywhere))]
    search.baselines = solution.baselines
    cut = BatchCut(everywhere, Step.of(problem.graph, Layout()))
    candidate = replace(Candidate.of(best.replay, best.order), cut=cut)
    search.note(candidate)
    return [candidate]


def _worth_a_search(search: LayoutSearch, candidates: Sequence[Candidate]) -> list[Candidate]:
    """Returns the candidates that may be finalists, and the best, which may be the answer."""
    replicas = _promising(search, [each for each in candidates if not each.is_whole])
    return [*_promising(search, candidates), *(each for each in replicas if not _cannot_win(search, each, candidates))]


def _promising(search: LayoutSearch, candidates: Sequence[Candidate]) -> list[Candidate]:
    """Returns the best candidate, and the best with several devices a replica if it is near."""
    best = min(candidates, default=None)
    if best is None or best.simulation is None:
        return []
    if not best.fits or len(best.devices[0]) > 1:
        return [best]
    limit_ns = search.settings.layouts.gain_of_places * best.step_time_ns
    others = [each for each in candidates if len(each.devices[0]) > 1 and each.fits]
    return [best, *sorted(each for each in others if each.step_time_ns < limit_ns)[:1]]


def _cannot_win(search: LayoutSearch, candidate: Candidate, others: Sequence[Candidate]) -> bool:
    """Returns whether no search of `candidate` is likely to make it faster than the best of `others`."""
    best, settings = min(others, default=candidate), search.settings.layouts
    gain = settings.gain_of_replicas
    if len(candidate.devices[0]) > 1:
        gain = settings.gain_of_ops if _is_constructed(search, candidate) else settings.gain_of_places
    return best.fits and candidate.step_time_ns > gain * best.step_time_ns


def _is_constructed(search: LayoutSearch, candidate: Candidate) -> bool:
    """Returns whether only classical placers placed the ops of the whole step."""
    is_simulated = candidate.is_whole and candidate.simulation is not None and not _is_searched(candidate)
    return is_simulated and candidate.problem.num_ops > search.settings.large.estimated_ops


def _is_searched(candidate: Candidate) -> bool:
    return candidate.cut is not None and candidate.cut.is_searched


def _finalists_searched(
    search: LayoutSearch, finalists: Sequence[Candidate], looked_at: Sequence[Candidate]
) -> list[Candidate]:
    """Returns `looked_at` and finalists after a search, where there are several: each has a share of the time."""
    looked_at = [*looked_at]
    if sum(not _cannot_win(search, each, looked_at) for each in finalists) > 1:
        for each in finalists:
            if not _cannot_win(search, each, looked_at):
                looked_at.insert(0, _searched(search, each, search.clock.part(_share(search, each))))
    return looked_at


def _share(search: LayoutSearch, candidate: Candidate) -> float:
    """Returns the share of the time left for a finalist: replicas of one device each leave little to be found."""
    settings = search.settings.layouts
    if candidate.is_whole:
        return settings.large_share if _is_constructed(search, candidate) else settings.whole_share
    return settings.replicas_share if len(candidate.devices[0]) == 1 else settings.final_share


def _searched(search: LayoutSearch, candidate: Candidate, clock: Clock) -> Candidate:
    """Returns `candidate` after a search of one replica, and of the whole step in the time left."""
    # a search would move ops out of their stages, and activations away from the host
    is_kept = candidate.layout.stages is not None or candidate.layout.offload != NONE
    if candidate.simulation is None or is_kept:
        return candidate
    num_ops, way, settings = candidate.problem.num_ops, candidate.way, search.settings
    clock = clock.before(search.clock.effort.close.seconds(num_ops))
    if clock.is_up or not (candidate.is_whole or clock.has(search.seconds(way))):
        return candidate
    if len(way.devices[0]) > 1 and len(way.devices) > 1 and not _is_searched(candidate):
        share = settings.layouts.replica_share if num_ops <= settings.large.searched_ops else 1.0
        candidate = _replica_searched(search, candidate, clock.before(search.seconds(way)).part(share))
    return _whole_searched(search, candidate, clock)


def _replica_searched(search: LayoutSearch, candidate: Candidate, clock: Clock) -> Candidate:
    """Returns `candidate` with places from a search in one replica, if they are better for all."""
    layout, devices, known = candidate.layout, candidate.devices[0], candidate.places
    graph = search.parts.exact(layout.num_parts)
    step = Step.of(graph, Layout((layout.microbatches[0],), recompute=candidate.step.layout.recompute))
    problem = search.estimator.replicas.alone(step.graph, devices)
    placement = step.placement(known, [range(len(devices))])
    answer = _placed_from(search, problem, best_dispatch(problem, step, placement, large=search.settings.large), clock)
    places = np.empty_like(known)
    places[step.origin[::-1]] = answer.placement[::-1]  # the first micro-batch's, which all have
    if np.array_equal(places, known) or not search.has_time(candidate.way):
        return candidate
    other = search.attempt(partial(search.simulate, places=places, is_captured=True), candidate.way)
    return min(filter(None, (candidate, other)))


def _whole_searched(search: LayoutSearch, candidate: Candidate, clock: Clock) -> Candidate:
    """Returns `candidate` after a search of the whole step."""
    problem, cut = candidate.problem, candidate.cut
    assert cut is not None
    if clock.is_up or problem.num_ops > search.settings.large.searched_ops or is_too_wide(problem):
        return candidate
    if candidate.fits and candidate.step_time_ns <= search.settings.layouts.least_gain * quick_bound(problem):
        return replace(candidate, cut=replace(cut, is_searched=True))
    refine = _placed_from if candidate.layout.data == 1 and not cut.is_searched else _refined
    better = replace(refine(search, problem, candidate, clock), cut=cut)
    search.note(better)
    return replace(min(candidate, better), cut=replace(cut, is_searched=True))


def _placed_from(search: LayoutSearch, problem: Problem, start: Candidate, clock: Clock) -> Candidate:
    """Returns the best op placement that `auto` finds from its own starts and from `start`."""
    known = search.classical
    if known is not None and known.question.problem.simulator is problem.simulator:
        best = auto(replace(known.question, starts=(start,)), clock, known).best
    else:
        best = auto(in_good_order(search.question.about(problem, starts=(start,)), clock), clock).best
    return start if best is None else preferred([start, Candidate.of(best.replay, best.order)])


def _refined(search: LayoutSearch, problem: Problem, start: Candidate, clock: Clock) -> Candidate:
    """Returns the best that a local search finds from `start`, and for op placement from starts of its own."""
    question = search.question.about(problem)
    reduction = question.reduction
    local = LocalSearch.of(question, clock)
    priority = None if start.priority is None else reduction.restrict(start.priority)
    first = Candidate(reduction.restrict(start.placement), priority=priority, order=start.order)
    local.start([first], num_more=0 if problem.graph.is_collective.any() else None)
    local.run()
    return preferred([start, Candidate.of(question.replay(local.best).replay, start.order)])


def _solution(
    search: LayoutSearch, best: Candidate, looked_at: Sequence[Candidate], estimates: Sequence[Candidate]
) -> Solution:
    known = {each.way for each in looked_at}
    others = [each for each in estimates if each.way not in known]
    distinct = {each.way: each for each in sorted([best, *looked_at])[::-1]}
    refused = [Candidate.refused(BatchCut(way), reason) for way, reason in search.refused.items()]
    candidates = (*sorted(distinct.values()), *others, *refused)
    baselines = _baselines(search, best, looked_at)
    with search.clock.effort.close.measured(best.problem.num_ops, search.clock):
        bound_ns, plan = layout_bound(search.parts.read, search.question.cluster), layout_plan(search, best, baselines)
    return Solution(best, baselines, looked_at=candidates, bound_ns=bound_ns, plan=plan)


def layout_plan(search: LayoutSearch, best: Candidate, baselines: dict[str, Baseline]) -> Plan:
    """Returns the plan of `best`."""
    simulation = in_program_order(best.replay)
    bound_ns = _bound_ns(search, best.problem)
    record = search_record(simulation, search.clock, best.order, baselines)
    return in_layout(plan_of(simulation, bound_ns, "auto", search.question.seed, record), best, search.parts)


def in_layout(plan: Plan, candidate: Candidate, parts: Parts) -> Plan:
    """Returns the plan of `candidate`, of a batch in `parts`, with its layout."""
    if candidate.is_whole:
        return plan
    beside = {"batch": parts.batch_size, "whole": parts.exact(1).fingerprint}  # by which the plan is known again
    return replace(plan, layout=candidate.step.document() | beside)


def _bound_ns(search: LayoutSearch, problem: Problem) -> int:
    """Returns the lower bound of `problem`; of a large one after an interrupt, what the longest path and work say."""
    stop = search.clock.stop
    if problem.num_ops > search.settings.large.estimated_ops and stop.is_set():
        return quick_bound(problem)
    bound_ns = skip_on_interrupt(stop, partial(lower_bound, problem))
    return quick_bound(problem) if bound_ns is None else bound_ns


def _baselines(search: LayoutSearch, best: Candidate, looked_at: Sequence[Candidate]) -> dict[str, Baseline]:
    """Returns what the answer is compared with, where it was simulated: op placement, and plain data parallelism."""
    baselines: dict[str, Baseline] = {}
    if wholes := [each for each in looked_at if each.is_whole and each.simulation is not None]:
        baselines |= {**search.baselines, **({} if best.is_whole else {OP_PLACEMENT: min(wholes).baseline})}
    plain = [each for each in looked_at if each.layout == Layout((1,) * each.layout.data) and each.layout.data > 1]
    plain = [each for each in plain if each.simulation is not None and len(each.devices[0]) == 1]
    plain = [each for each in plain if not _is_searched(each)]
    if search.plain is not None:
        baselines[DATA_PARALLEL] = search.plain
    elif plain:  # as it was before a search
        baselines[DATA_PARALLEL] = max(plain, key=lambda each: (each.layout.data, each.step_time_ns)).baseline
    return baselines
