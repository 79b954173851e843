"""Asks for advice after a search, and shows what it is doing."""

import contextlib
import threading
import time
from dataclasses import replace
from typing import TYPE_CHECKING

from gdp.cli.request import PlaceRequest
from gdp.errors import InputError

if TYPE_CHECKING:
    from gdp.budget import Budget, Clock
    from gdp.models.model import Model
    from gdp.planning.advice import Advice, WhatIf
    from gdp.search.batch_parts import Parts
    from gdp.simulator.plan import Plan
    from gdp.simulator.problem import Problem

ADVICE_SHARE = 0.2  # of the budget
_REPLAYS = 30  # of the plan, that take as long as to prepare a search for another machine
_LAYOUT_SHARE = 0.7  # of it at most, for layouts beside op placement


def advice_budget(request: PlaceRequest, seconds: float, written_s: float = 0.0) -> "Budget":
    """Returns the budget for advice after `seconds`: a share of the whole, or what is left of it if that is less.

    Files take `written_s` after it.
    """
    from gdp.budget import Budget

    total = request.budget.seconds
    if total is None:
        return request.budget.part(ADVICE_SHARE)
    return Budget(seconds=min(ADVICE_SHARE * total, max(total - seconds - written_s, 0.0)))


def find_advice(
    request: PlaceRequest, problem: "Problem", plan: "Plan", stop: threading.Event, model: "Model | None" = None
) -> "Advice":
    """Returns what other machines would give, tried in the share of the budget that is left for it.

    With `model`, of which `plan` places the ops, also what a layout of its batch would.
    """
    from gdp.budget import Budget, Clock
    from gdp.planning.advice import advise
    from gdp.report import progress
    from gdp.report.tables import format_ms
    from gdp.simulator.simulate import replay

    seconds = 0.0 if plan.search is None else plan.search.seconds
    budget = advice_budget(request, seconds)
    layout = None
    if model is not None and (parts := _parts(request, model)) is not None:
        clock = Clock(budget, stop=stop)
        layout = _layout_advice(request, parts, clock.part(_LAYOUT_SHARE))
        budget = budget if clock.seconds_left is None else Budget(seconds=clock.seconds_left)
    text = f"{problem.graph.name}: {format_ms(plan.step_time_ns)}; trying other machines"
    with progress.live(progress.StatusLine(text, budget.seconds)):
        began = time.monotonic()
        simulation = replay(problem, plan)
        least_s = _REPLAYS * (time.monotonic() - began)
        advice = advise(
            problem.graph,
            simulation,
            plan,
            request.constraints,
            budget=budget,
            seed=request.seed,
            num_threads=request.threads,
            least_s=least_s,
            stop=stop,
        )
    return advice if layout is None else replace(advice, what_ifs=(*advice.what_ifs, layout))


def _parts(request: PlaceRequest, model: "Model") -> "Parts | None":
    """Returns the parts of the batch of MODEL; None where it is not split, or op times were measured.

    None, too, where its graph was kept from an earlier command: building the model takes longer than its advice is
    worth.
    """
    from gdp.report.progress import StatusLine, live
    from gdp.search.batch_parts import Parts

    if any(model.graph.times_ns) or not model.seconds:
        return None
    with contextlib.suppress(InputError), live(StatusLine("reading the batch")):
        return Parts.of_source(request.source, model.graph, model.seconds)
    return None


def _layout_advice(request: PlaceRequest, parts: "Parts", clock: "Clock") -> "WhatIf | None":
    """Returns an estimate of the best layout of the batch; None where there is none, or no time."""
    from gdp.planning.layout_advice import estimated_layout
    from gdp.report.progress import StatusLine, live

    with live(StatusLine("estimating layouts of the batch", clock.seconds_left)):
        return estimated_layout(parts, request.cluster, request.constraints, clock)


def find_changes_that_fit(request: PlaceRequest, problem: "Problem", stop: threading.Event) -> list[str]:
    """Returns changes with which the step would fit, where advice is asked for."""
    from gdp.budget import Clock
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
                clock=Clock(budget, stop=stop),
                part_of=(lambda parts: request.source.split(count, parts)) if request.can_split else None,
                split_in=(lambda factor: request.source.split(count * factor)) if can_accumulate else None,
            )
    return changes
