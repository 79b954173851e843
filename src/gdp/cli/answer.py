"""From a question of `gdp place` to its answer: found, or kept from before, then written and shown."""

from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gdp.cli.plan_files import PlanFiles
from gdp.cli.request import PlaceRequest
from gdp.cli.shared import BAD_INPUT, FOUND_BEFORE, INTERRUPTED, NOTHING_FITS, OK, fail, log, print_json, show
from gdp.errors import InputError

if TYPE_CHECKING:
    from rich.console import RenderableType

    from gdp.planning.plan_cache import KeptAnswer
    from gdp.simulator.plan import Plan
    from gdp.simulator.problem import Problem
    from gdp.simulator.simulate import Simulation
    from gdp.stop import Stop


@dataclass(frozen=True, eq=False)
class Answer:
    """A plan with its advice, simulated, and what became of its files."""

    kept: "KeptAnswer"
    simulation: "Simulation"
    files: PlanFiles
    would_fit: Sequence[str] = ()  # changes with which a plan would fit, where none does
    failure: InputError | None = None  # that ended writing

    @property
    def plan(self) -> "Plan":
        """The plan."""
        return self.kept.plan

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


class PlaceQuestion(ABC):
    """A question of `gdp place`, about a model that was read: what its answers do not have in common."""

    def __init__(self, request: PlaceRequest, files: PlanFiles) -> None:
        self.request = request
        self.files = files

    def cache_entry(self) -> Path | None:
        """Returns the file that keeps the answer; None: it is not kept."""
        return None

    @abstractmethod
    def get_ready(self) -> PlaceRequest:
        """Does what a search needs before its clock begins; returns the request with the budget that is left."""

    @abstractmethod
    def find(self, request: PlaceRequest, stop: "Stop") -> "tuple[KeptAnswer, Problem]":
        """Returns the answer, and the problem that its plan solves.

        InputError where there is none; `stop.has_answer` becomes true with the first plan.
        """

    @abstractmethod
    def problem_of(self, plan: "Plan") -> "Problem":
        """Returns the problem that a plan kept from before solves."""

    def may_be_kept(self, problem: "Problem") -> bool:
        """Returns whether a plan of `problem` may answer the same question again."""
        return True

    def files_of(self, problem: "Problem") -> PlanFiles:
        """Returns the files for a plan of `problem`."""
        return self.files

    def changes_that_fit(self, request: PlaceRequest, plan: "Plan", stop: "Stop") -> list[str]:
        """Returns changes with which `plan`, which does not fit, would, in words."""
        return []

    def notes(self, answer: Answer) -> Sequence[str]:
        """Returns what the user may want to know of the answer, to be logged."""
        return ()

    @abstractmethod
    def document(self, answer: Answer) -> dict[str, Any]:
        """Returns the answer of `--json`."""

    @abstractmethod
    def report(self, answer: Answer, next_command: str) -> "Iterable[RenderableType]":
        """Returns the answer in words; `next_command` is "" where no plan was written."""


def respond(question: PlaceQuestion) -> int:
    """Answers a question: finds the plan, writes its files and shows it; returns the exit status."""
    from gdp.report import progress

    request = question.request
    with progress.live("looking for a plan found before"):
        from gdp.planning import plan_cache

        entry = question.cache_entry()
        kept = plan_cache.load(entry, lambda plan: question.problem_of(plan).graph, request.cluster)
    if kept is None:
        request = question.get_ready()
    else:
        log(FOUND_BEFORE)
    with progress.stop_on_interrupt(has_answer=kept is not None) as stop:
        try:
            with request.named():
                if kept is None:
                    found, problem = question.find(request, stop)
                else:
                    found, problem = kept, question.problem_of(kept.plan)
                found = replace(found, plan=replace(found.plan, asked=request.asked))
        except InputError:
            if stop.is_set():  # before there was any plan
                return INTERRUPTED
            raise
        answer = _written(question, request, found, problem, stop)
        if answer.fits and kept is None and not stop.is_set() and question.may_be_kept(problem):
            plan_cache.store(entry, found)
        return _told(question, answer, stop)


def _told(question: PlaceQuestion, answer: Answer, stop: "Stop") -> int:
    """Prints an answer; returns the exit status."""
    from gdp.report import console

    request = question.request
    for note in question.notes(answer) if answer.fits else ():
        log(f"gdp: note: {request.model}: {note}")
    if request.json:
        print_json(question.document(answer))
    elif answer.fits:
        show(question.report(answer, answer.files.next_command(request) if answer.plan_path else ""))
    if answer.failure is not None:
        good = ", ".join(map(str, answer.files.written))
        return fail(f"error: {answer.failure}; {f'whole: {good}' if good else 'nothing was written'}", BAD_INPUT)
    if not answer.fits:
        fail(console.nothing_fits(answer.plan, request.cluster, answer.would_fit), NOTHING_FITS)
    return INTERRUPTED if stop.is_set() else OK if answer.fits else NOTHING_FITS


def _written(
    question: PlaceQuestion, request: PlaceRequest, found: "KeptAnswer", problem: "Problem", stop: "Stop"
) -> Answer:
    """Returns the answer with its files; one that does not fit has none, but changes with which one would."""
    from gdp.simulator.simulate import replay

    simulation, files = replay(problem, found.plan), question.files_of(problem).suited_to(problem)
    if found.plan.status == "ok":
        return Answer(found, simulation, files, failure=files.write(found, simulation, stop, request.latest_s))
    would_fit = [] if stop.is_set() else question.changes_that_fit(request, found.plan, stop)
    return Answer(found, simulation, files, would_fit)
