"""`place_for`: searches the placements that a target can express, so that the export loses nothing.

ops ---> ordinary plan ---> adapted to units --.
                                               +--> search over units, or over stages ---> a plan of the ops
units as groups of the graph ------------------'"""

from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from gdp.bounds.lower_bound import lower_bound
from gdp.budget import Clock
from gdp.errors import InputError
from gdp.export.adapt import AdaptedPlan, adapt_within, arranged, order_of, simulated
from gdp.export.export_target import ExportTarget
from gdp.export.stage_search import StageSearch, balanced_stages
from gdp.export.targets_by_name import serving_target
from gdp.search.candidate import Candidate, Figures
from gdp.search.place import place
from gdp.search.place_question import PlaceQuestion
from gdp.search.question import Solution, plan_of, search_record
from gdp.search.shards import over_degrees
from gdp.simulator.plan import Plan
from gdp.simulator.problem import Problem
from gdp.simulator.simulate import Simulation, simulate

_ORDINARY_SHARE = 0.4  # of the budget, for the plan of ops that is adapted
_STARTS, _SIMULATIONS = 12, 3000  # of descents, at most


@dataclass(frozen=True, eq=False)
class ExportablePlan:
    """A plan that a target can express, and the ordinary one from which its search began."""

    plan: Plan
    ordinary: Plan
    adapted: AdaptedPlan  # the ordinary plan as the target would run it
    notes: list[str]  # what is assumed of the target
    problem: Problem  # that the plan answers: of another order of ops where weights are offloaded


def place_for(target: ExportTarget, question: PlaceQuestion, clock: Clock, **options: Any) -> ExportablePlan:
    """Returns the best plan of the step of `question` that `target` can express. It is never worse than the ordinary
    plan that is found in a part of the budget and then adapted. `options` are further ones of `place`: `on_progress`.
    InputError where the target cannot run the graph."""
    own, original = question.options, question.problem
    graph, cluster, constraints = question.graph, question.cluster, question.constraints
    options |= {"seed": own.seed, "robust": own.robust, "num_threads": own.num_threads, "stop": clock.stop}
    units = target.read_units(original)
    problem = target.with_room(original)
    ordinary = place(problem.graph, cluster, constraints, budget=clock.rest.part(_ORDINARY_SHARE), **options)
    adapted = adapt_within(problem, ordinary, target, units, graph=graph, may_offload=False)
    assert ordinary.search is not None
    clock.spend(ordinary.search.simulations)
    best = adapted.simulation
    baselines, under_noise = ordinary.search.baselines, None
    if clock.stop.is_set():  # a search that has no time for any placement has no answer
        pass
    elif units.is_chain:
        best = _best_stages(problem, adapted, clock)
        baselines = {name: each for name, each in baselines.items() if name == "single"}  # others cut layers
    else:
        coarse = replace(problem.graph, groups=units.index.copy())
        unused = np.flatnonzero(~units.allowed.any(axis=0)).tolist()
        also = [("", cluster.devices[device].name) for device in unused]  # "" matches every kind
        restricted = replace(constraints, forbid=[*constraints.forbid, *also])
        answer = place(coarse, cluster, restricted, budget=clock.rest, starts=[Candidate.start(best)], **options)
        assert answer.search is not None
        best = simulate(problem, answer.placement, order=answer.order)
        clock.spend(answer.search.simulations)
        baselines, under_noise = answer.search.baselines, answer.search.under_noise
    devices = units.devices_of(best.placement)
    assert devices is not None, "units are groups there"
    best = arranged(problem, target, units, devices, best)[1]
    if Figures.of(adapted.simulation) < Figures.of(best):
        best, under_noise = adapted.simulation, None
    is_offloaded = False
    if best.missing_bytes.any() and target.offload is not None and not clock.stop.is_set():
        offloaded = target.offload(problem, units, adapted.devices)
        if offloaded is not None:
            best, under_noise, is_offloaded = offloaded[1], None, True
    search = search_record(best, clock, order_of(best.problem, best.placement), baselines)
    search = replace(search, under_noise=under_noise)
    # the plan is of the graph without the target's own memory
    step = best if problem is original or is_offloaded else simulate(original, best.placement, order=best.order)
    devices = None if is_offloaded else units.devices_of(step.placement)
    notes = adapted.notes if devices is None else target.notes(problem, units, devices)
    plan = plan_of(step, lower_bound(step.problem), "auto", own.seed, search)
    return ExportablePlan(plan, ordinary, adapted, notes, step.problem)


def best_for(target: ExportTarget, question: PlaceQuestion, clock: Clock, **options: Any) -> ExportablePlan:
    """Returns the best plan that `target` can express, or that servers run on groups of cards where these may win."""
    found: list[ExportablePlan] = []

    def solve(asked: PlaceQuestion, part: Clock) -> Solution:
        tool = target if asked is question else serving_target(asked.problem)
        if tool is None:
            raise InputError("no server runs it on groups of cards")
        found.append(placed := place_for(tool, asked, part, **options))
        return Solution(None, plan=placed.plan)

    best = over_degrees(question, clock, solve)
    assert best.plan is not None
    placed = next(each for each in found if each.plan.placement is best.plan.placement)
    return replace(placed, plan=best.plan)


def answer_for(target: ExportTarget, question: PlaceQuestion, clock: Clock) -> Solution:
    """Returns the plan of `best_for`, as an answer of `place`."""
    return Solution(None, plan=best_for(target, question, clock).plan)


def _best_stages(problem: Problem, adapted: AdaptedPlan, clock: Clock) -> Simulation:
    """Returns the best step that descents from the adapted stages, and from balanced ones, find."""
    search = StageSearch(problem.in_order(order_of(problem, adapted.simulation.placement)), adapted.units)
    starts = [adapted.devices, *balanced_stages(adapted.units)]
    stages = search.run(starts, clock.at_most(_SIMULATIONS), num_starts=_STARTS)
    clock.spend(search.num_simulations)
    return simulated(problem, adapted.units.place(stages))
