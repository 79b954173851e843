"""Finds the layout that serves batches in flight fastest: `gdp place --batches`."""

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from gdp.cli.answer import Answer, PlaceQuestion
from gdp.cli.inputs import build_problem
from gdp.cli.plan_files import PlanFiles
from gdp.cli.request import PlaceRequest
from gdp.cli.shared import refuse_beside, warm_up
from gdp.errors import InputError

if TYPE_CHECKING:
    from rich.console import RenderableType

    from gdp.models.model import Model
    from gdp.planning.plan_cache import KeptAnswer
    from gdp.search.candidate import Candidate
    from gdp.search.solution import Solution
    from gdp.simulator.plan import Plan
    from gdp.simulator.problem import Problem
    from gdp.simulator.simulate import Simulation
    from gdp.simulator.throughput import Throughput
    from gdp.stop import Stop


class BatchesInFlight(PlaceQuestion):
    """Asks which copies and stages serve a number of batches at a time; answers are not kept."""

    def __init__(self, request: PlaceRequest, files: PlanFiles, model: "Model", num_batches: int) -> None:
        from gdp.parallel.batches import check_batches

        super().__init__(request, files)
        self.graph, self.num_batches = model.graph, num_batches
        self.solution: Solution  # once it is found
        request.say_notes(model.graph)
        with request.named():
            check_batches(model.graph, num_batches)
            self.problem = build_problem(model.graph, request.cluster, request.constraints)
        self.samples = request.source.batch_size

    def get_ready(self) -> PlaceRequest:
        """See `PlaceQuestion`."""
        compiled_s = warm_up(("auto",), self.problem)
        return self.request.later(compiled_s).within_budget(self.files.written_s(self.problem.num_ops))

    def find(self, request: PlaceRequest, stop: "Stop") -> "tuple[KeptAnswer, Problem]":
        """See `PlaceQuestion`."""
        from gdp.planning.plan_cache import KeptAnswer
        from gdp.report import batches_answer, progress
        from gdp.report.tables import format_ms

        name = self.graph.name
        line = progress.StatusLine(f"{name} on {request.cluster.name}: looking at layouts")

        def tell(candidate: "Candidate") -> None:
            stop.has_answer = True
            time = format_ms(candidate.step_time_ns)
            line.say(f"{name}: {batches_answer.layout_in_words(candidate)}, {time} per batch")

        with progress.live(line):
            from gdp.budget import Clock
            from gdp.search.batch_parts import Parts
            from gdp.search.batches.place_batches import place_batches
            from gdp.search.question import BatchQuestion

            question = BatchQuestion(
                Parts(lambda num_parts: self.graph, 1, self.graph),
                request.cluster,
                request.constraints,
                num_batches=self.num_batches,
                seed=request.seed,
                num_threads=request.threads,
                on_progress=tell,
            )
            self.solution = place_batches(question, Clock(request.budget, stop=stop))
        stop.has_answer = True
        assert self.solution.plan is not None
        assert self.solution.best is not None
        return KeptAnswer(self.solution.plan, None, ()), self.solution.best.problem

    def problem_of(self, plan: "Plan") -> "Problem":
        """See `PlaceQuestion`."""
        return self.problem

    def files_of(self, problem: "Problem") -> PlanFiles:
        """See `PlaceQuestion`; a plan of all batches is of another graph than that of one."""
        return self.files.sparing_others(problem.graph)

    def document(self, answer: Answer) -> dict[str, Any]:
        """See `PlaceQuestion`."""
        from gdp.report import batches_answer, documents

        graph, cluster = answer.simulation.problem.graph, self.request.cluster
        document = documents.place_document(
            graph, cluster, answer.plan, answer.plan_path, advice=None, would_fit=answer.would_fit
        )
        return document | batches_answer.batches_document(self.solution, self.samples)

    def report(self, answer: Answer, next_command: str) -> "Iterable[RenderableType]":
        """See `PlaceQuestion`."""
        from gdp.report import batches_answer

        return batches_answer.batches_report(self.solution, self.samples, answer.shown_paths, next_command)


def throughput_of(
    problem: "Problem", plan: "Plan", simulation: "Simulation", num_batches: int | None
) -> "Throughput | None":
    """Returns the throughput of a plan of batches in flight, or of `num_batches` in flight in a plan of one batch.

    None for other plans where no number is asked for.
    """
    from gdp.parallel.batches import in_flight, layout_in_flight
    from gdp.simulator.throughput import Throughput, throughput_of_plan

    if not in_flight(plan.layout):
        return None if num_batches is None else throughput_of_plan(problem, plan, num_batches)
    assert plan.layout is not None
    layout = layout_in_flight(plan.layout)
    if num_batches not in (None, layout.num_parts):
        raise InputError(f"--batches: the plan has {layout.num_parts} in flight; leave the option out")
    return Throughput.of(simulation, layout)


def check_batches_alone(request: PlaceRequest, parallel: str | None, sweep: str | None) -> None:
    """Raises InputError for options that say something else than --batches."""
    reading = request.reading
    if reading.serving.has_cache:
        raise InputError(
            "--batches: in prefill and decode each batch has a cache of its own, and a token waits for the one before; "
            "leave --phase out, or place one step with more sequences (hf:DIR?batch=N)"
        )
    if reading.microbatching.count > 1:
        raise InputError("--microbatches: accumulates gradients, and --batches serves; leave one of them out")
    refuse_beside(
        "--batches",
        {
            "--parallel": parallel not in (None, "none"),
            "--placer": request.placer != "auto",
            "--checkpoint": request.checkpoint is not None,
            "--for": request.target is not None,
            "--sweep": sweep is not None,
        },
    )
