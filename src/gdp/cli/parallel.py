"""Chooses how the batch of a training step is cut: `gdp place`, where the batch can be split."""

import time
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gdp.cli.advice import ADVICE_SHARE, advice_budget, find_advice
from gdp.cli.answer import Answer, PlaceQuestion
from gdp.cli.inputs import build_problem
from gdp.cli.plan_files import PlanFiles
from gdp.cli.request import PlaceRequest
from gdp.cli.shared import refuse_beside, warm_up
from gdp.errors import InputError

if TYPE_CHECKING:
    from rich.console import RenderableType

    from gdp.budget import Clock
    from gdp.models.model import Model
    from gdp.parallel.layout import Layout
    from gdp.planning.advice import Advice
    from gdp.planning.plan_cache import KeptAnswer
    from gdp.report.layout_answer import LayoutAnswer
    from gdp.search.batch_parts import Parts
    from gdp.search.candidate import Candidate
    from gdp.search.question import BatchQuestion
    from gdp.search.solution import Solution
    from gdp.simulator.plan import Plan
    from gdp.simulator.problem import Problem
    from gdp.stop import Stop

AUTO = "auto"


class LayoutChoice(PlaceQuestion):
    """Asks how the batch is cut, and where the ops of that step go."""

    def __init__(
        self, request: PlaceRequest, files: PlanFiles, model: "Model", parts: "Parts", layout: "Layout | None" = None
    ) -> None:
        """`layout` is the one that is asked for; None: any."""
        super().__init__(request, files.sparing_others(model.graph))
        self.model, self.parts, self.layout = model, parts, layout
        with request.named():
            self.whole = build_problem(model.graph, request.cluster, request.constraints)
        request.say_notes(model.graph)

    @classmethod
    def of(cls, request: PlaceRequest, files: PlanFiles, model: "Model", layout: "Layout | None") -> "LayoutChoice":
        """Returns the question of this layout, or of any. InputError where the batch cannot be split so."""
        parts = _parts(request, model)
        if layout is not None:
            with request.named():
                parts.check(layout.num_parts)
        return cls(request, files, model, parts, layout)

    @classmethod
    def if_split(cls, request: PlaceRequest, files: PlanFiles, model: "Model") -> "LayoutChoice | None":
        """Returns the question of any layout; None where the batch cannot be split."""
        if any(model.graph.times_ns):  # measured times say nothing about parts of ops
            return None
        try:
            parts = _parts(request, model)
        except InputError:
            return None
        return cls(request, files, model, parts)

    def cache_entry(self) -> Path | None:
        """See `PlaceQuestion`."""
        text = AUTO if self.layout is None else str(self.layout)
        return self.request.cache_entry(self.model.graph, [text, self.parts.batch_size])

    def get_ready(self) -> PlaceRequest:
        """See `PlaceQuestion`."""
        from gdp.report.progress import live

        began, num_parts = time.monotonic(), 1 if self.layout is None else self.layout.num_parts
        if self.layout is None:
            with live(f"reading a part of the batch of {self.model.graph.name}"):
                self.parts.read_ahead(self.request.cluster.num_devices)
        read_s = time.monotonic() - began
        compiled_s = warm_up((AUTO,), self.whole)
        written_s = self.files.written_s(self.whole.num_ops * num_parts)
        return self.request.later(read_s + compiled_s).within_budget(written_s)

    def find(self, request: PlaceRequest, stop: "Stop") -> "tuple[KeptAnswer, Problem]":
        """See `PlaceQuestion`."""
        from gdp.budget import Clock
        from gdp.planning.plan_cache import KeptAnswer
        from gdp.report.layout_answer import LayoutAnswer
        from gdp.search.place import completed
        from gdp.search.settings import DEFAULTS

        parts, clock = self.parts, Clock(request.budget, stop=stop)
        solution, advice = self._solution(request, clock, stop), None
        best, plan = solution.best, solution.plan
        assert best is not None
        assert plan is not None
        problem = best.problem
        if not stop.is_set():
            noise_share = DEFAULTS.noise.spread if request.robust is None else request.robust
            plan = completed(self._asked(request), solution, clock, noise_share)
        if request.with_advice and plan.status == "ok":
            if best.is_whole:
                advice = find_advice(request, problem, plan, stop)
                plan = advice.plan
            elif self.layout is None:
                advice = self._advice(request, solution, clock, problem.num_ops)
        return KeptAnswer(plan, advice, (), LayoutAnswer.of(solution, parts).document()), problem

    def _asked(self, request: PlaceRequest) -> "BatchQuestion":
        from gdp.search.question import BatchQuestion

        return BatchQuestion(
            self.parts,
            request.cluster,
            request.constraints,
            self.layout,
            seed=request.seed,
            checkpoint=request.checkpoint,
            num_threads=request.threads,
        )

    def _solution(self, request: PlaceRequest, clock: "Clock", stop: "Stop") -> "Solution":
        """Returns the layout, and shows those that are looked at."""
        from gdp.report import layouts, progress

        name = self.model.graph.name
        line = progress.StatusLine(f"{name} on {request.cluster.name}: looking at layouts")

        def tell(candidate: "Candidate") -> None:
            stop.has_answer |= candidate.may_be_answer
            line.say(f"{name}: {candidate.layout} {layouts.state(candidate)}")

        with progress.live(line):
            from gdp.search.layouts.choose import choose_layout

            part = clock.part(1 - ADVICE_SHARE) if request.with_advice else clock
            solution = choose_layout(replace(self._asked(request), on_progress=tell), part)
            assert solution.best is not None
            tell(solution.best)
        return solution

    def _advice(self, request: PlaceRequest, solution: "Solution", search: "Clock", num_ops: int) -> "Advice":
        """Returns what layouts on other machines would give after the `search`; files of `num_ops` come after it."""
        from gdp.budget import Clock
        from gdp.planning.layout_advice import advise_on_layouts
        from gdp.report.progress import StatusLine, live
        from gdp.report.tables import format_ms

        assert solution.plan is not None
        last_s = self.files.written_s(num_ops)
        clock = Clock(advice_budget(request, search.seconds, last_s), stop=search.stop)
        text = f"{self.model.graph.name}: {format_ms(solution.plan.step_time_ns)}; estimating other machines"
        with live(StatusLine(text, clock.seconds_left)):
            return advise_on_layouts(solution, self.parts, request.constraints, clock)

    def problem_of(self, plan: "Plan") -> "Problem":
        """See `PlaceQuestion`: of the step that the layout of `plan` cuts."""
        from gdp.parallel.step import Step
        from gdp.simulator.problem import Problem

        graph = self.parts.exact(1) if plan.layout is None else Step.of_document(self.parts.exact, plan.layout).graph
        return Problem.build(graph, self.request.cluster, self.request.constraints)

    def changes_that_fit(self, request: PlaceRequest, plan: "Plan", stop: "Stop") -> list[str]:
        """See `PlaceQuestion`; those that a layout of its own choice would fit with."""
        from gdp.budget import Clock
        from gdp.planning.layout_advice import changes_that_fit_a_layout
        from gdp.report.progress import StatusLine, live

        if self.layout is not None or not request.with_advice:
            return []
        assert plan.search is not None
        clock = Clock(advice_budget(request, plan.search.seconds), stop=stop)
        with live(StatusLine("nothing fits; looking for changes with which it would", clock.seconds_left)):
            return changes_that_fit_a_layout(self.parts, request.cluster, request.constraints, clock)

    def notes(self, answer: Answer) -> Sequence[str]:
        """See `PlaceQuestion`."""
        looked_at = _looked_at(answer)
        if ":" in self.request.model and looked_at.best.layout.num_parts > 1:
            return ["parts of the batch are parts of inputs along their first dimension", *looked_at.notes]
        return looked_at.notes

    def document(self, answer: Answer) -> dict[str, Any]:
        """See `PlaceQuestion`."""
        from gdp.report import documents

        document = documents.place_document(
            answer.simulation.problem.graph,
            self.request.cluster,
            answer.plan,
            answer.plan_path,
            advice=answer.kept.advice,
            would_fit=answer.would_fit,
        )
        return document | _looked_at(answer).document()

    def report(self, answer: Answer, next_command: str) -> "Iterable[RenderableType]":
        """See `PlaceQuestion`."""
        from gdp.report import console, layouts

        report = console.place_report(
            answer.plan,
            answer.simulation,
            self.model.unknown_costs,
            answer.shown_paths,
            next_command,
            answer.kept.advice,
        )
        return layouts.choice_report(_looked_at(answer), report)


def check_parallel_alone(request: PlaceRequest, sweep: str | None) -> None:
    """Raises InputError for options that say something else than --parallel."""
    reading = request.reading
    if (not request.source.is_file and reading.microbatching.count > 1) or reading.microbatching.free_replicas:
        raise InputError("--microbatches: --parallel has a number of its own; write --parallel microbatches=M")
    if not reading.training or reading.serving.has_cache:
        raise InputError(
            "--parallel: layouts cut training steps; leave --inference and --phase out, or serve with --batches N"
        )
    refuse_beside(
        "--parallel",
        {
            "--placer": request.placer != "auto",
            "--for": request.target is not None,
            "--sweep": sweep is not None,
            "--times": request.times is not None,
        },
    )


def _looked_at(answer: Answer) -> "LayoutAnswer":
    """Returns the layouts that were looked at."""
    from gdp.report.layout_answer import LayoutAnswer

    assert answer.kept.layouts is not None
    return LayoutAnswer.of_document(answer.kept.layouts)


def _parts(request: PlaceRequest, model: "Model") -> "Parts":
    """Returns the parts of the batch. InputError where it has none."""
    from gdp.search.batch_parts import Parts

    with request.named():
        return Parts.of_source(request.source, model.graph, model.captured_s)
