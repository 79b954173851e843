"""Finds the best plan, with advice on the machine: `gdp place`."""

import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from gdp.cli.advice import ADVICE_SHARE, find_advice, find_changes_that_fit
from gdp.cli.batches import place_in_flight
from gdp.cli.inputs import build_problem, check_checkpoint, check_placers
from gdp.cli.options import (
    BatchesOption,
    BudgetOption,
    CheckpointOption,
    ConstraintOptions,
    DevicesOption,
    JsonOption,
    ModelArgument,
    ReadingOptions,
    TargetOptions,
    ThreadsOption,
    with_options,
)
from gdp.cli.parallel import place_parallel
from gdp.cli.plan_files import PlanFiles
from gdp.cli.request import PlaceRequest
from gdp.cli.shared import BAD_INPUT, FOUND_BEFORE, INTERRUPTED, NOTHING_FITS, OK, fail, log, print_json, show, warm_up
from gdp.cli.sweep import sweep_place
from gdp.errors import InputError

if TYPE_CHECKING:
    from gdp.export.search import ExportablePlan
    from gdp.export.target import ExportTarget
    from gdp.graph import Graph
    from gdp.models.model import Model
    from gdp.planning.plan_cache import KeptAnswer
    from gdp.report.progress import Stop
    from gdp.search.place import Progress
    from gdp.simulator.plan import Plan
    from gdp.simulator.problem import Problem

_OTHERS = ("single", "expert")  # that a learned placer is compared with


@with_options
def place(
    model: ModelArgument,
    devices: DevicesOption,
    placer: Annotated[str, typer.Option(help="auto runs classical placers, then searches.")] = "auto",
    budget: BudgetOption = "30s",
    seed: Annotated[int, typer.Option(min=0, help="Seed of the search.")] = 0,
    checkpoint: CheckpointOption = None,
    *,
    limits: ConstraintOptions,
    robust: Annotated[
        str | None,
        typer.Option(
            metavar="SHARE", help="Noise of op times in the comparison of plans. Default: as measured, or 2%."
        ),
    ] = None,
    model_options: ReadingOptions,
    parallel: Annotated[
        str | None,
        typer.Option(
            metavar="LAYOUT",
            help="How the step is cut: none, auto, or data=4,microbatches=8,zero=1,recompute=auto,stages=2. "
            "Default: auto to train a model whose batch can be split, else none.",
        ),
    ] = None,
    batches: BatchesOption = None,
    sweep: Annotated[
        str | None,
        typer.Option(
            metavar="WHAT=1..8", help="Print a table over numbers of devices or microbatches, each with BUDGET."
        ),
    ] = None,
    advice: Annotated[
        bool, typer.Option("--advice/--no-advice", help="Spend a fifth of BUDGET on trying other machines.")
    ] = True,
    times: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Op times that `gdp run --times` measured.")
    ] = None,
    target: Annotated[
        str | None,
        typer.Option(
            "--for", metavar="TARGET", help="Search only for plans that `gdp export --to TARGET` can express."
        ),
    ] = None,
    target_options: TargetOptions,
    threads: ThreadsOption = None,
    with_cache: Annotated[
        bool,
        typer.Option("--cache/--no-cache", help="Answer an identical question with the plan that was found before."),
    ] = True,
    out: Annotated[
        Path | None,
        typer.Option(metavar="DIR", help="Write plan.json, graph.json.gz, cluster.json, report.html."),
    ] = None,
    json: JsonOption = False,
) -> int:
    """Find the best plan of MODEL on DEVICES within the budget, and write it to plan.json.

    A plan.json of another graph stays: the plan is plan-2.json then.
    """
    from gdp.report.progress import live

    with live("loading gdp"):
        from gdp.budget import Budget
        from gdp.cli import values
        from gdp.cluster import Cluster
        from gdp.planning.sweep import Sweep

        limit = Budget.parse(budget)
        table = None if sweep is None else Sweep.parse(sweep)
        reading = model_options.reading()
        cluster = Cluster.parse(devices)
        request = PlaceRequest(
            model=model,
            devices=devices,
            cluster=cluster,
            budget=limit,
            constraints=limits.constraints(cluster),
            reading=reading,
            times=times,
            placer=placer,
            checkpoint=checkpoint,
            seed=seed,
            robust=None if robust is None else values.parse_fraction(robust, "--robust", below=0.5),
            threads=threads,
            with_cache=with_cache,
            with_advice=advice and placer == "auto" and target is None,
            out=out,
            json=json,
            target=_target(target, target_options, placer, sweep, checkpoint),
            limits=limits,
        )
        check_placers([placer])
        check_checkpoint(checkpoint, [placer])
    if batches is not None:
        return place_in_flight(request, batches, parallel, sweep)
    if parallel not in (None, "none"):
        return place_parallel(request, parallel, sweep)
    if table is not None:
        table.check(cluster)
        return sweep_place(request, table)
    if parallel is None and request.may_be_cut:
        return place_parallel(request, "auto", None, otherwise=_place)
    return _place(request)


def _target(
    name: str | None, options: TargetOptions, placer: str, sweep: str | None, checkpoint: str | None
) -> "ExportTarget | None":
    if name is None:
        options.check_unused()
        return None
    if placer != "auto" or sweep is not None:
        raise InputError("--for: places with auto, once; leave out --placer and --sweep")
    if checkpoint is not None:
        raise InputError("--for: places without a policy; leave out --checkpoint")
    return options.target(name)


def _place(request: PlaceRequest, model: "Model | None" = None) -> int:
    """Answers with op placement; `model` is the one of `request`, if it was read before."""
    from gdp.report import progress

    files = PlanFiles.of(request)
    files.check()
    source = request.read() if model is None else model
    graph = source.graph
    files = files.sparing_others(graph)
    problem = _build(request, graph)  # bad constraints are better known now than after a search
    request = request.under_measured_noise(source.noise)
    request.say_notes(graph)
    with progress.live("looking for a plan found before"):
        from gdp.planning import plan_cache
        from gdp.report import console, documents
        from gdp.simulator.simulate import replay

        cut_too = source if model is None and request.may_be_cut else None  # whose layouts are estimated as well
        entry = request.cache_entry(graph, () if cut_too is None else [cut_too.is_captured])
        kept = plan_cache.load(entry, lambda plan: graph, request.cluster)
    if kept is None:
        compiled_s = warm_up((request.placer,), problem)
        request = request.within_budget(source, compiled_s, files.num_large)
    else:
        log(FOUND_BEFORE)
    would_fit: list[str] = []
    failure: InputError | None = None
    with progress.stop_on_interrupt(has_answer=kept is not None) as stop:
        try:
            with request.named():
                answer, placed = (kept, problem) if kept is not None else _find(request, problem, stop, cut_too)
        except InputError:
            if stop.is_set():  # before there was any placement
                return INTERRUPTED
            raise
        plan, simulation = answer.plan, replay(placed, answer.plan)
        fits = plan.status == "ok"
        if fits:
            if placed.graph is not graph:
                files = files.with_graph()
                log(f"gdp: note: {_offloaded(request, files)}")
            failure = files.write(answer, simulation, stop)
            if kept is None and not stop.is_set() and placed.graph is graph:
                plan_cache.store(entry, answer)
        elif not stop.is_set():
            would_fit = find_changes_that_fit(request, problem, stop)
        interrupted = stop.is_set()
    is_written = fits and files.plan in files.written
    if request.json:
        written = files.plan if is_written else None
        print_json(
            documents.place_document(
                placed.graph,
                request.cluster,
                plan,
                written,
                advice=answer.advice,
                would_fit=would_fit,
                served=source.served,
            )
        )
    elif fits:
        command = files.next_command(request) if is_written else ""
        shown = " and ".join(str(path) for path in files.shown)
        told = "" if source.served is None else source.served.sentence(plan.step_time_ns)
        unknown = source.unknown_costs
        show(console.place_report(plan, simulation, unknown, shown, command, answer.advice, serving=told))
    if failure is not None:
        good = ", ".join(map(str, files.written))
        return fail(f"error: {failure}; {f'whole: {good}' if good else 'nothing was written'}", BAD_INPUT)
    if not fits:
        fail(console.nothing_fits(plan, request.cluster, would_fit), NOTHING_FITS)
    return INTERRUPTED if interrupted else OK if fits else NOTHING_FITS


def _build(request: PlaceRequest, graph: "Graph") -> "Problem":
    with request.named():
        problem = build_problem(graph, request.cluster, request.constraints)
        if request.target is not None:
            request.target.read_units(problem)
    return problem


def _find(
    request: PlaceRequest, problem: "Problem", stop: "Stop", model: "Model | None"
) -> "tuple[KeptAnswer, Problem]":
    """Returns the answer, and the problem that its plan solves: of another graph where weights are offloaded.

    Layouts of the batch of `model` are estimated beside it, if there is one.
    """
    from gdp.planning.plan_cache import KeptAnswer
    from gdp.report import progress

    line = progress.SearchLine(f"{problem.graph.name} on {problem.cluster.name}")

    def tell(news: "Progress") -> None:
        stop.has_answer = True
        line(news)

    with progress.live(line):
        plan, placed = _search(request, problem, tell, stop)
    stop.has_answer = True
    advice = None
    if request.with_advice and plan.status == "ok" and placed is problem and not stop.is_set():
        advice = find_advice(request, problem, plan, stop, model)
        plan = advice.plan
    return KeptAnswer(plan, advice, tuple(progress.improvements(line.history))), placed


def _search(
    request: PlaceRequest, problem: "Problem", on_progress: Callable[..., None], stop: threading.Event
) -> "tuple[Plan, Problem]":
    from gdp.search.place import place as find_plan

    graph = problem.graph
    if request.target is not None:
        from gdp.export.search import place_for

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


def _offloaded(request: PlaceRequest, files: PlanFiles) -> str:
    assert request.target is not None
    return (
        f"weights that do not fit stay on a CPU, and {request.target.name} fetches them module by module; the plan is "
        f"of the graph that does so, {files.graph}"
    )


def _comparison(placed: "ExportablePlan") -> str:
    from gdp.report.tables import format_ms

    adapted, ordinary = placed.adapted, placed.ordinary
    fits = "" if not adapted.simulation.missing_bytes.any() else ", which does not fit"
    return (
        f"a plan of single ops takes {format_ms(ordinary.step_time_ns)}, and {format_ms(adapted.step_time_ns)} once "
        f"exported at {adapted.target.level}{fits}; this plan takes {format_ms(placed.plan.step_time_ns)}"
    )
