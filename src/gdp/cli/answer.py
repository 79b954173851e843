"""From a request to `gdp place` to its answer: found, live, or kept from before, then written and shown."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gdp.budget import Clock
from gdp.cli.advice import advise_on_units, find_advice, find_remedies, search_budget
from gdp.cli.open_request import OpenRequest
from gdp.cli.plan_files import PlanFiles
from gdp.cli.request import PlaceRequest
from gdp.cli.requests import prompt_of, requests_of
from gdp.cli.shared import BAD_INPUT, FOUND_BEFORE, INTERRUPTED, NOTHING_FITS, OK, fail, log, print_json, show
from gdp.errors import InputError
from gdp.export.export_target import ExportTarget
from gdp.export.exportable_plan import ExportablePlan, best_for
from gdp.models.serving import Requests
from gdp.parallel.step import BatchStream
from gdp.planning import plan_cache
from gdp.planning.layout_answer import LayoutAnswer
from gdp.planning.plan_cache import KeptAnswer
from gdp.planning.remedies import Remedy
from gdp.report import batches_answer, console, documents, layouts, progress, sentences
from gdp.report.tables import format_ms
from gdp.search.candidate import Candidate
from gdp.search.place import Progress, answer, best_so_far
from gdp.simulator.plan import Plan
from gdp.simulator.simulate import Simulation, replay
from gdp.stop import Stop

if TYPE_CHECKING:
    from rich.console import RenderableType


def find_plan(opened: OpenRequest, stop: Stop) -> KeptAnswer:
    """Returns the best plan within the budget, with advice.

    InputError where there is none; `stop.has_answer` becomes true with the first plan."""
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
        return KeptAnswer(plan, advice, tuple(progress.improvements(line.history)), notes=solution.notes)
    return KeptAnswer(plan, advice, layouts=LayoutAnswer.of(solution, question.parts))


def _in_words(candidate: Candidate) -> str:
    """Returns a candidate that cuts the batch, or serves several, with its time."""
    if candidate.cut is not None and isinstance(candidate.cut.step, BatchStream):
        return f"{batches_answer.layout_in_words(candidate)}, {format_ms(candidate.step_time_ns)} per batch"
    return f"{candidate.named_layout} {layouts.state(candidate)}"


def _plan_for(target: ExportTarget, opened: OpenRequest, stop: Stop) -> KeptAnswer:
    """Returns the best plan that `target` can express, and says how much slower that is."""
    request, question = opened.request, opened.question
    line = progress.SearchLine(f"{question.graph.name} on {request.cluster.name}")

    def tell(news: Progress) -> None:
        stop.has_answer = True
        line(news)

    with progress.live(line):
        placed = best_for(target, question, Clock(search_budget(request), stop=stop), on_progress=tell)
    notes = tuple(_export_notes(placed, is_for_servers=request.is_for_servers))
    stop.has_answer = True
    plan, advice = placed.plan, None
    has_advice = request.with_advice and plan.num_ranks == 1 and not opened.is_offloaded(plan)
    if has_advice and plan.status == "ok" and not stop.is_set():
        plan, advice = advise_on_units(opened, placed, stop)
    return KeptAnswer(plan, advice, tuple(progress.improvements(line.history)), notes=notes)


def _export_notes(placed: ExportablePlan, *, is_for_servers: bool) -> Iterator[str]:
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


@dataclass(frozen=True, eq=False)
class Answer:
    """A plan with its advice, simulated, and what became of its files."""

    found: KeptAnswer
    simulation: Simulation
    files: PlanFiles
    remedies: Sequence[Remedy] = ()  # changes with which a plan would fit, where none does
    requests: Requests | None = None  # to a decoder, where MODEL says their prompt
    failure: InputError | None = None  # that ended writing

    @property
    def plan(self) -> Plan:
        """The plan."""
        return self.found.plan

    @property
    def fits(self) -> bool:
        """True if the plan respects memory."""
        return self.plan.status == "ok"

    @property
    def plan_path(self) -> Path | None:
        """The plan file; None: not written."""
        return self.files.plan if self.files.plan in self.files.written else None

    @property
    def shown_paths(self) -> str:
        """The files that the user reads, in words."""
        return " and ".join(str(path) for path in self.files.shown)


def respond(request: PlaceRequest) -> int:
    """Answers a request: finds the plan, writes its files and shows it; returns the exit status."""
    opened = OpenRequest.of(request)
    with progress.live("looking for a plan found before"):
        entry = opened.cache_entry()
        kept = plan_cache.load(entry, opened.problem_of)
    if kept is None:
        opened = opened.prepared()
    else:
        log(FOUND_BEFORE)
    with progress.stop_on_interrupt(has_answer=kept is not None) as stop:
        try:
            with request.named():
                found = kept or find_plan(opened, stop)
                for note in found.notes:
                    log(f"gdp: note: {note}")
                found = replace(found, plan=replace(found.plan, asked=request.asked))
        except InputError:
            if stop.is_set():  # before there was any plan
                return INTERRUPTED
            raise
        answer = _written(opened, found, stop)
        if answer.fits and kept is None and not stop.is_set() and not opened.is_offloaded(found.plan):
            plan_cache.store(entry, found)
        return _told(opened, answer, stop)


def _written(opened: OpenRequest, found: KeptAnswer, stop: Stop) -> Answer:
    """Returns the answer with its files; one that does not fit has none, but changes with which one would."""
    problem = found.plan.problem
    assert problem is not None
    simulation = replay(problem, found.plan)
    files = opened.files_of(found.plan, problem.graph).suited_to(problem)
    if found.plan.status == "ok":
        request, served = opened.request, opened.model.served
        failure = files.write(found, simulation, stop, request.latest_s, opened.amounts, served)
        requests = None
        if served is not None and prompt_of(request, served) is not None and not stop.is_set():
            try:
                requests = requests_of(request, served, opened.question.problem, found)
            except InputError as error:
                log(f"gdp: note: {request.model}: nothing is said of prompts: {error}")
        return Answer(found, simulation, files, failure=failure, requests=requests)
    remedies = [] if stop.is_set() else find_remedies(opened, found.plan, stop)
    return Answer(found, simulation, files, remedies)


def _told(opened: OpenRequest, answer: Answer, stop: Stop) -> int:
    """Prints an answer; returns the exit status."""
    request = opened.request
    of_cards = sentences.of_left_out(request.cluster, answer.simulation.problem.cluster)
    notes = (*_notes(request, answer), *of_cards, *sentences.of_exchanges(answer.simulation))
    for note in notes if answer.fits else ():
        log(f"gdp: note: {request.model}: {note}")
    if request.json:
        print_json(_document(opened, answer))
    elif answer.fits:
        show(_report(opened, answer))
    if answer.failure is not None:
        good = ", ".join(map(str, answer.files.written))
        return fail(f"error: {answer.failure}; {f'whole: {good}' if good else 'nothing was written'}", BAD_INPUT)
    if not answer.fits:
        samples = request.source.batch_size if request.can_split else None
        fail(
            console.nothing_fits(answer.simulation, answer.plan, opened.question, answer.remedies, samples),
            NOTHING_FITS,
        )
    return INTERRUPTED if stop.is_set() else OK if answer.fits else NOTHING_FITS


def _notes(request: PlaceRequest, answer: Answer) -> Sequence[str]:
    """Returns what a cut step does otherwise than the whole one."""
    layouts = answer.found.layouts
    if layouts is None:
        return ()
    if layouts.best.layout.num_parts > 1 and request.source.assumes_batch:
        return (f"parts of the batch are parts of inputs along their {request.reading.cut_dimension}", *layouts.notes)
    return layouts.notes


def _document(opened: OpenRequest, answer: Answer) -> dict[str, Any]:
    """Returns the answer of `--json`."""
    found, requests = answer.found, answer.requests
    asked = {} if requests is None else {"requests": requests.figures(opened.request.requests)}
    document = asked | documents.place_document(
        answer.simulation.problem.cluster,
        answer.plan,
        answer.simulation,
        answer.plan_path,
        advice=found.advice,
        remedies=answer.remedies,
        held_bytes=int(opened.question.graph.resident_bytes.sum()),
        served=None if found.batches else opened.model.served,
        amounts=opened.amounts,
    )
    if found.batches is not None:
        samples = opened.request.source.batch_size
        return document | batches_answer.batches_document(found.batches, samples, opened.model.served)
    return document if found.layouts is None else document | layouts.choice_document(found.layouts)


def _report(opened: OpenRequest, answer: Answer) -> "Iterable[RenderableType]":
    """Returns the answer in words."""
    found, served = answer.found, opened.model.served
    next_command = answer.files.next_command(opened.request, answer.plan) if answer.plan_path else ""
    serving = ""
    if served is not None and found.batches is None:
        serving = served.sentence(answer.plan.step_time_ns)
        if more := sentences.of_more_sequences(answer.simulation, served, opened.request.options_of_more_sequences):
            serving += f". {more}"
    prompt = prompt_of(opened.request, served)
    if answer.requests is not None and prompt is not None:
        serving = f"{serving}\n{answer.requests.sentence(prompt, opened.request.requests)}".lstrip()
    if found.batches is not None:
        samples = opened.request.source.batch_size
        return batches_answer.batches_report(found.batches, samples, answer.shown_paths, next_command, served, serving)
    report = console.place_report(
        answer.plan,
        answer.simulation,
        opened.model.unknown_costs,
        answer.shown_paths,
        next_command,
        found.advice,
        serving=serving,
        amounts=opened.amounts if served is None else {},
    )
    return report if found.layouts is None else layouts.choice_report(found.layouts, report)
