"""Asks for advice after a search, and shows what it is doing."""

import time
from dataclasses import replace
from threading import Event

from gdp.budget import Budget, Clock
from gdp.cli.open_request import OpenRequest
from gdp.cli.request import PlaceRequest
from gdp.export.adapt import can_run
from gdp.export.exportable_plan import ExportablePlan
from gdp.parallel.layout import NONE
from gdp.planning.advice import Advice, WhatIf, advise
from gdp.planning.layout_advice import advise_on_layouts, estimated_layout
from gdp.planning.remedies import Remedy, RemedySearch
from gdp.report import progress
from gdp.report.progress import StatusLine, live
from gdp.report.tables import format_ms
from gdp.search.place_question import PlaceQuestion
from gdp.search.question import Solution
from gdp.simulator.plan import Plan
from gdp.simulator.simulate import replay

_SHARE, _LEAST_SHARE = 0.2, 0.1  # of the budget; the least where the search took longer than it should
_REPLAYS = 30  # of the plan, that take as long as to prepare a search for another machine
_LAYOUT_SHARE = 0.7  # of it at most, for layouts beside op placement


def search_budget(request: PlaceRequest) -> Budget:
    """Returns the budget for the search before the advice, if that is asked for."""
    return request.budget.part(1 - _SHARE) if request.with_advice else request.budget


def _budget(request: PlaceRequest, seconds: float) -> Budget:
    """Returns the budget for advice after `seconds`: a share of the whole, or what is left of it if that is less."""
    total = request.budget.seconds
    if total is None:
        return request.budget.part(_SHARE)
    return Budget(seconds=min(_SHARE * total, max(total - seconds, _LEAST_SHARE * total)))


def find_advice(opened: OpenRequest, solution: Solution, search: Clock) -> tuple[Advice | None, Solution]:
    """Returns what other machines would give, tried after the `search`, and the solution, or one on fewer devices. The
    advice is None where a layout was asked for."""
    best, plan, question = solution.best, solution.plan, opened.question
    assert best is not None
    assert plan is not None
    # files of a cut step take longer than those that the budget was made for
    later_s = opened.files.written_s(len(plan.placement)) - opened.files.written_s(question.graph.num_ops)
    budget = _budget(opened.request, search.seconds + max(later_s, 0.0))
    if best.is_whole:
        advice = _advice_on_ops(opened, plan, budget, search.stop)
        return advice, solution._replace(plan=advice.plan)
    if question.parts is None or question.layout is not None:
        return None, solution
    text = f"{question.graph.name}: {format_ms(plan.step_time_ns)}; estimating other machines"
    clock = Clock(budget, stop=search.stop)
    with live(StatusLine(text, clock.seconds_left)):
        return advise_on_layouts(solution, question.parts, question.constraints, clock)


def _advice_on_ops(opened: OpenRequest, plan: Plan, budget: Budget, stop: Event) -> Advice:
    """Returns what changed machines would give, and after --parallel none what a layout would."""
    problem, options = opened.question.problem, opened.question.options
    clock = Clock(budget, stop=stop)
    layout = _best_layout(opened, clock.part(_LAYOUT_SHARE))
    budget = budget if clock.seconds_left is None else Budget(seconds=clock.seconds_left)
    text = f"{problem.graph.name}: {format_ms(plan.step_time_ns)}; trying other machines"
    with progress.live(progress.StatusLine(text, budget.seconds)):
        began = time.monotonic()
        simulation = replay(problem, plan)
        advice = advise(
            problem.graph,
            simulation,
            plan,
            opened.request.constraints,
            budget=budget,
            seed=options.seed,
            num_threads=options.num_threads,
            least_s=_REPLAYS * (time.monotonic() - began),
            stop=stop,
        )
    return advice if layout is None else replace(advice, what_ifs=(*advice.what_ifs, layout))


def advise_on_units(opened: OpenRequest, placed: ExportablePlan, stop: Event) -> tuple[Plan, Advice]:
    """Returns the plan of a target, or one of its on fewer devices, and what it would take on other machines."""
    plan, units = placed.plan, placed.adapted.units
    assert plan.search is not None
    coarse = units.coarse(opened.question.problem)
    own = replace(plan, graph=coarse.graph.fingerprint, problem=coarse)
    in_units = replace(opened, question=replace(opened.question, step=coarse))
    advice = _advice_on_ops(in_units, own, _budget(opened.request, plan.search.seconds), stop)
    devices = units.devices_of(advice.plan.placement)
    if advice.plan is own or devices is None or not can_run(units, devices):
        return plan, replace(advice, plan=plan)
    better = replace(advice.plan, graph=plan.graph, problem=placed.problem)
    return better, replace(advice, plan=better)


def _best_layout(opened: OpenRequest, clock: Clock) -> WhatIf | None:
    """Returns an estimate of the best layout of the batch; None where none is possible, or was not refused. None, too,
    where its graph was kept from an earlier command: building the model takes longer than its advice is worth."""
    request, model = opened.request, opened.model
    cluster, limits, options = request.cluster, request.constraints, opened.question.options
    if request.parallel != NONE or cluster.num_devices == 1 or not model.seconds:
        return None
    with live(StatusLine("reading the batch")):
        parts = PlaceQuestion.of(request.source, cluster, limits, None, None, options, model).parts
    if parts is None:
        return None
    with live(StatusLine("estimating layouts of the batch", clock.seconds_left)):
        return estimated_layout(parts, cluster, limits, clock)


def find_remedies(opened: OpenRequest, plan: Plan, stop: Event) -> list[Remedy]:
    """Returns changes with which a step would fit, where advice is asked for."""
    request, search = opened.request, plan.search
    if not request.with_advice:
        return []
    assert search is not None
    clock = Clock(_budget(request, search.seconds), stop=stop)
    own = request.source if request.can_split else None, opened.model, request.parallel, request.devices
    with live(StatusLine("nothing fits; looking for changes with which it would", clock.seconds_left)):
        return RemedySearch(opened.question, clock, *own, int(search.missing_bytes.max())).run()
