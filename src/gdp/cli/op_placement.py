"""Places the ops of one step, one by one: `gdp place` where no layout is asked for, or none is possible."""

import threading
from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gdp.cli.advice import ADVICE_SHARE, find_advice, find_changes_that_fit
from gdp.cli.answer import Answer, PlaceQuestion
from gdp.cli.inputs import build_problem
from gdp.cli.plan_files import PlanFiles
from gdp.cli.request import PlaceRequest
from gdp.cli.shared import log, warm_up
from gdp.errors import InputError

if TYPE_CHECKING:
    from rich.console import RenderableType

    from gdp.export.exportable_plan import ExportablePlan
    from gdp.graph import Graph
    from gdp.models.model import Model
    from gdp.planning.plan_cache import KeptAnswer
    from gdp.search.place import Progress
    from gdp.simulator.plan import Plan
    from gdp.simulator.problem import Problem
    from gdp.stop import Stop

_OTHERS = ("single", "expert")  # that a learned placer is compared with


class OpPlacement(PlaceQuestion):
    """Asks where each op of a step goes."""

    def __init__(self, request: PlaceRequest, files: PlanFiles, model: "Model", *, has_layouts: bool) -> None:
        """With `has_layouts`, the advice tells what a layout of the batch would give."""
        super().__init__(request.under_measured_noise(model.noise), files.sparing_others(model.graph))
        self.model = model
        self.cut_too = model if has_layouts else None
        with request.named():  # bad constraints are better known now than after a search
            self.problem = build_problem(model.graph, request.cluster, request.constraints)
            if request.target is not None:
                request.target.read_units(self.problem)
        self.request.say_notes(model.graph)

    def cache_entry(self) -> Path | None:
        """See `PlaceQuestion`."""
        return self.request.cache_entry(self.model.graph, [] if self.cut_too is None else [self.model.is_captured])

    def get_ready(self) -> PlaceRequest:
        """See `PlaceQuestion`."""
        compiled_s = warm_up((self.request.placer,), self.problem)
        written_s = self.files.written_s(self.problem.num_ops)
        return self.request.later(compiled_s).within_budget(written_s)

    def find(self, request: PlaceRequest, stop: "Stop") -> "tuple[KeptAnswer, Problem]":
        """See `PlaceQuestion`; the problem is of another graph where weights are offloaded."""
        from gdp.planning.plan_cache import KeptAnswer
        from gdp.report import progress

        problem = self.problem
        line = progress.SearchLine(f"{problem.graph.name} on {problem.cluster.name}")

        def tell(news: "Progress") -> None:
            stop.has_answer = True
            line(news)

        with progress.live(line):
            plan, placed = _search(request, problem, tell, stop)
        stop.has_answer = True
        advice = None
        if request.with_advice and plan.status == "ok" and placed is problem and not stop.is_set():
            advice = find_advice(request, problem, plan, stop, self.cut_too)
            plan = advice.plan
        return KeptAnswer(plan, advice, tuple(progress.improvements(line.history))), placed

    def problem_of(self, plan: "Plan") -> "Problem":
        """See `PlaceQuestion`."""
        return self.problem

    def may_be_kept(self, problem: "Problem") -> bool:
        """See `PlaceQuestion`."""
        return problem.graph is self.model.graph

    def files_of(self, problem: "Problem") -> PlanFiles:
        """See `PlaceQuestion`; an offloaded graph is nowhere else."""
        if problem.graph is self.model.graph or self.request.target is None:
            return self.files
        files = self.files.with_graph()
        log(
            "gdp: note: weights that do not fit stay on a CPU, and "
            f"{self.request.target.name} fetches them module by module; the plan is of the graph that does so, "
            f"{files.graph}"
        )
        return files

    def changes_that_fit(self, request: PlaceRequest, plan: "Plan", stop: "Stop") -> list[str]:
        """See `PlaceQuestion`."""
        return find_changes_that_fit(request, self.problem, stop)

    def document(self, answer: Answer) -> dict[str, Any]:
        """See `PlaceQuestion`."""
        from gdp.report import documents

        return documents.place_document(
            answer.simulation.problem.graph,
            self.request.cluster,
            answer.plan,
            answer.plan_path,
            advice=answer.kept.advice,
            would_fit=answer.would_fit,
            served=self.model.served,
        )

    def report(self, answer: Answer, next_command: str) -> "Iterable[RenderableType]":
        """See `PlaceQuestion`."""
        from gdp.report import console

        served = self.model.served
        return console.place_report(
            answer.plan,
            answer.simulation,
            self.model.unknown_costs,
            answer.shown_paths,
            next_command,
            answer.kept.advice,
            serving="" if served is None else served.sentence(answer.plan.step_time_ns),
        )


def fits_alone(request: PlaceRequest, graph: "Graph") -> bool:
    """Returns whether all of `graph` fits on the first device."""
    from gdp.search.place import fits_alone

    with request.named():
        return fits_alone(build_problem(graph, request.cluster, request.constraints))


def _search(
    request: PlaceRequest, problem: "Problem", on_progress: Callable[..., None], stop: threading.Event
) -> "tuple[Plan, Problem]":
    from gdp.search.place import place as find_plan

    graph = problem.graph
    if request.target is not None:
        from gdp.export.exportable_plan import place_for

        placed = place_for(
            request.target,
            graph,
            request.cluster,
            request.constraints,
            budget=request.budget,
            on_progress=on_progress,
            stop=stop,
            **request.keywords,
        )
        for note in (_comparison(placed), *placed.notes):
            log(f"gdp: note: {note}")
        return placed.plan, problem if placed.problem.graph is graph else placed.problem
    budget = request.budget.part(1 - ADVICE_SHARE) if request.with_advice else request.budget
    plan = find_plan(
        problem,
        request.cluster,
        placer=request.placer,
        budget=budget,
        checkpoint=request.checkpoint,
        on_progress=on_progress,
        stop=stop,
        **request.keywords,
    )
    return _beside_others(request, graph, plan), problem


def _beside_others(request: PlaceRequest, graph: "Graph", plan: "Plan") -> "Plan":
    """Adds single and expert as baselines to the plan of a learned placer, which runs no other one."""
    from gdp.search.place import place as find_plan
    from gdp.search.solvers import solver_of
    from gdp.simulator.plan import Baseline

    if not solver_of(request.placer).is_learned or plan.search is None or plan.search.baselines:
        return plan
    baselines = {}
    for name in _OTHERS:
        try:
            other = find_plan(
                graph, request.cluster, request.constraints, placer=name, budget="1sims", seed=request.seed
            )
        except InputError:  # the placer found none
            baselines[name] = Baseline("failed", None, 0.0)
            continue
        assert other.search is not None
        baselines[name] = Baseline(other.status, other.step_time_ns, other.search.seconds)
    return replace(plan, search=replace(plan.search, baselines=baselines))


def _comparison(placed: "ExportablePlan") -> str:
    from gdp.report.tables import format_ms

    adapted, ordinary = placed.adapted, placed.ordinary
    fits = "" if not adapted.simulation.missing_bytes.any() else ", which does not fit"
    return (
        f"a plan of single ops takes {format_ms(ordinary.step_time_ns)}, and {format_ms(adapted.step_time_ns)} once "
        f"exported at {adapted.target.level}{fits}; this plan takes {format_ms(placed.plan.step_time_ns)}"
    )
