"""Asks for advice after a search, and shows what it is doing."""

import threading
from typing import TYPE_CHECKING

from gdp.cli.request import PlaceRequest

if TYPE_CHECKING:
    from gdp.budget import Budget
    from gdp.planning.advice import Advice
    from gdp.simulator.plan import Plan
    from gdp.simulator.problem import Problem

ADVICE_SHARE = 0.2  # of the budget


def advice_budget(request: PlaceRequest, seconds: float) -> "Budget":
    """Returns the budget for advice after `seconds`: a share of the whole, or what is left of it if that is less."""
    from gdp.budget import Budget

    total = request.budget.seconds
    if total is None:
        return request.budget.part(ADVICE_SHARE)
    return Budget(seconds=min(ADVICE_SHARE * total, max(total - seconds, 0.0)))


def find_advice(request: PlaceRequest, problem: "Problem", plan: "Plan", stop: threading.Event) -> "Advice":
    """Returns what other machines would give, tried in the share of the budget that is left for it."""
    from gdp.planning.advice import advise
    from gdp.report import progress
    from gdp.report.tables import format_ms
    from gdp.simulator.simulate import replay

    seconds = 0.0 if plan.search is None else plan.search.seconds
    budget = advice_budget(request, seconds)
    text = f"{problem.graph.name}: {format_ms(plan.step_time_ns)}; trying other machines"
    with progress.live(progress.StatusLine(text, budget.seconds)):
        return advise(
            problem.graph,
            replay(problem, plan),
            plan,
            request.constraints,
            budget=budget,
            seed=request.seed,
            num_threads=request.threads,
            stop=stop,
        )


def find_changes_that_fit(request: PlaceRequest, problem: "Problem", stop: threading.Event) -> list[str]:
    """Returns changes with which the step would fit, where advice is asked for."""
    from gdp.planning.advice import changes_that_fit
    from gdp.report.progress import StatusLine, live

    changes: list[str] = []
    if request.with_advice:
        count = request.reading.microbatching.count
        can_accumulate = request.can_split and request.reading.training
        budget = request.budget.part(ADVICE_SHARE)
        with live(StatusLine("nothing fits; looking for changes with which it would", budget.seconds)):
            changes = changes_that_fit(
                problem.graph,
                request.cluster,
                request.constraints,
                budget=budget,
                part_of=(lambda parts: request.read_split(count, parts)) if request.can_split else None,
                split_in=(lambda factor: request.read_split(count * factor)) if can_accumulate else None,
                stop=stop,
            )
    return changes
