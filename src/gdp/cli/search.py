"""Finds the plan that `gdp place` is asked for, and shows how far the search is."""

from collections.abc import Iterator

from gdp.budget import Clock
from gdp.cli.advice import advise_on_units, find_advice, search_budget
from gdp.cli.open_request import OpenRequest
from gdp.cli.shared import log
from gdp.export.export_target import ExportTarget
from gdp.export.exportable_plan import ExportablePlan, best_for
from gdp.parallel.batches import BatchStream
from gdp.planning.layout_answer import LayoutAnswer
from gdp.planning.plan_cache import KeptAnswer
from gdp.report import batches_answer, layouts, progress
from gdp.report.tables import format_ms
from gdp.search.candidate import Candidate
from gdp.search.place import Progress, answer, best_so_far
from gdp.stop import Stop


def find_plan(opened: OpenRequest, stop: Stop) -> KeptAnswer:
    """Returns the best plan within the budget, with advice.

    InputError where there is none; `stop.has_answer` becomes true with the first plan.
    """
    request, question = opened.request, opened.question
    if request.target is not None:
        return _plan_for(request.target, opened, stop)
    title, clock = f"{question.graph.name} on {request.cluster.name}", Clock(search_budget(request), stop=stop)
    line = progress.SearchLine(title)
    if question.parts is not None:
        line.say(f"{title}: looking at layouts")
    with progress.live(line):
        show_best = best_so_far(line, question, clock) if question.parts is None else None

        def tell(candidate: Candidate) -> None:
            stop.has_answer |= question.parts is None or candidate.may_be_answer
            if show_best is not None:
                show_best(candidate)
            else:
                line.say(f"{question.graph.name}: {_in_words(candidate)}")

        solution = answer(question, clock, tell)
    stop.has_answer = True
    assert solution.plan is not None
    if question.num_batches:
        return KeptAnswer(solution.plan, batches=solution)
    plan, advice = solution.plan, None
    if request.with_advice and plan.status == "ok" and not stop.is_set() and plan.num_ranks == 1:
        advice, solution = find_advice(opened, solution, clock)
        plan = plan if solution.plan is None else solution.plan
    if question.parts is None:
        for note in solution.notes:
            log(f"gdp: note: {note}")
        return KeptAnswer(plan, advice, tuple(progress.improvements(line.history)))
    return KeptAnswer(plan, advice, layouts=LayoutAnswer.of(solution, question.parts))


def _in_words(candidate: Candidate) -> str:
    """Returns a candidate that cuts the batch, or serves several, with its time."""
    if candidate.cut is not None and isinstance(candidate.cut.step, BatchStream):
        return f"{batches_answer.layout_in_words(candidate)}, {format_ms(candidate.step_time_ns)} per batch"
    return f"{candidate.layout} {layouts.state(candidate)}"


def _plan_for(target: ExportTarget, opened: OpenRequest, stop: Stop) -> KeptAnswer:
    """Returns the best plan that `target` can express, and says how much slower that is."""
    request, question = opened.request, opened.question
    line = progress.SearchLine(f"{question.graph.name} on {request.cluster.name}")

    def tell(news: Progress) -> None:
        stop.has_answer = True
        line(news)

    with progress.live(line):
        placed = best_for(target, question, Clock(search_budget(request), stop=stop), on_progress=tell)
    for note in _notes(placed, is_for_servers=request.is_for_servers):
        log(f"gdp: note: {note}")
    stop.has_answer = True
    plan, advice = placed.plan, None
    has_advice = request.with_advice and plan.num_ranks == 1 and not opened.is_offloaded(plan)
    if has_advice and plan.status == "ok" and not stop.is_set():
        plan, advice = advise_on_units(opened, placed, stop)
    return KeptAnswer(plan, advice, tuple(progress.improvements(line.history)))


def _notes(placed: ExportablePlan, *, is_for_servers: bool) -> Iterator[str]:
    """Yields what the target costs against a plan of single ops, and, where it was asked for, what is assumed of it."""
    adapted, ordinary, time_ns = placed.adapted, placed.ordinary, placed.plan.step_time_ns
    if is_for_servers:
        if ordinary.status == "ok" and ordinary.step_time_ns < time_ns and placed.plan.num_ranks == 1:
            yield (
                f"an op-by-op placement would take {format_ms(ordinary.step_time_ns)}, and no server runs it "
                f"(--parallel none has it); this plan takes {adapted.target.level}, as {adapted.target.name} does"
            )
        return
    if ordinary.step_time_ns != time_ns:
        yield _comparison(placed)
    yield from placed.notes


def _comparison(placed: ExportablePlan) -> str:
    adapted, ordinary = placed.adapted, placed.ordinary
    fits = "" if not adapted.simulation.missing_bytes.any() else ", which does not fit"
    return (
        f"a plan of single ops takes {format_ms(ordinary.step_time_ns)}, and {format_ms(adapted.step_time_ns)} once "
        f"exported at {adapted.target.level}{fits}; this plan takes {format_ms(placed.plan.step_time_ns)}"
    )
