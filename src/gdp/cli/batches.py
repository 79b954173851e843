"""Finds the layout that serves batches in flight fastest: `gdp place --batches`."""

from typing import TYPE_CHECKING

from gdp.cli.plan_files import PlanFiles
from gdp.cli.request import PlaceRequest
from gdp.cli.shared import BAD_INPUT, INTERRUPTED, NOTHING_FITS, OK, fail, print_json, show, warm_up
from gdp.errors import InputError

if TYPE_CHECKING:
    from gdp.search.layouts.place_batches import ServedLayout
    from gdp.search.layouts.throughput import Throughput
    from gdp.simulator.plan import Plan
    from gdp.simulator.problem import Problem
    from gdp.simulator.simulate import Simulation


def place_in_flight(request: PlaceRequest, num_batches: int, parallel: str | None, sweep: str | None) -> int:
    """Answers `gdp place --batches num_batches`; returns the exit status."""
    _check(request, parallel, sweep)
    files = PlanFiles.of(request)
    files.check()
    model = request.read()
    request.say_notes(model.graph)
    from gdp.cli.inputs import build_problem
    from gdp.models.read import batch_size
    from gdp.parallel.batches import check_batches

    with request.named():
        check_batches(model.graph, num_batches)
    samples = batch_size(request.model, request.reading)
    warm_up(("auto",), build_problem(model.graph, request.cluster, request.constraints))
    from gdp.planning.plan_cache import KeptAnswer
    from gdp.report import batches, console, documents, progress
    from gdp.report.tables import format_ms

    with progress.stop_on_interrupt() as stop:
        line = progress.StatusLine(f"{model.graph.name} on {request.cluster.name}: looking at layouts")

        def tell(served: "ServedLayout") -> None:
            time = format_ms(served.throughput.time_per_batch_ns)
            line.say(f"{model.graph.name}: {batches.layout_in_words(served)}, {time} per batch")

        with progress.live(line), request.named():
            from gdp.search.layouts.place_batches import place_batches

            choice = place_batches(
                model.graph,
                request.cluster,
                num_batches,
                request.constraints,
                budget=request.budget,
                seed=request.seed,
                num_threads=request.threads,
                on_progress=tell,
                stop=stop,
            )
        plan, simulation = choice.plan, choice.best.candidate.replay
        fits = plan.status == "ok"
        failure = None
        if fits:
            files = files.sparing_others(simulation.problem.graph)
            failure = files.write(KeptAnswer(plan, None, ()), simulation)
        interrupted = stop.is_set()
    written = files.plan if fits and files.plan in files.written else None
    if request.json:
        document = documents.place_document(
            simulation.problem.graph, request.cluster, plan, written, advice=None, would_fit=()
        )
        print_json(document | batches.batches_document(choice, samples))
    elif fits:
        shown = " and ".join(str(path) for path in files.shown)
        show(batches.batches_report(choice, samples, shown, files.next_command(request) if written else ""))
    if failure is not None:
        return fail(f"error: {failure}", BAD_INPUT)
    if not fits:
        fail(console.nothing_fits(plan, request.cluster), NOTHING_FITS)
    return INTERRUPTED if interrupted else OK if fits else NOTHING_FITS


def throughput_of(
    problem: "Problem", plan: "Plan", simulation: "Simulation", num_batches: int | None
) -> "Throughput | None":
    """Returns the throughput of a plan of batches in flight, or of `num_batches` in flight in a plan of one batch.

    None for other plans where no number is asked for.
    """
    from gdp.parallel.batches import in_flight, layout_in_flight
    from gdp.search.layouts.throughput import Throughput, throughput_of_plan

    if not in_flight(plan.layout):
        return None if num_batches is None else throughput_of_plan(problem, plan, num_batches)
    assert plan.layout is not None
    layout = layout_in_flight(plan.layout)
    if num_batches not in (None, layout.num_parts):
        raise InputError(f"--batches: the plan has {layout.num_parts} in flight; leave the option out")
    return Throughput.of(simulation, layout)


def _check(request: PlaceRequest, parallel: str | None, sweep: str | None) -> None:
    """Raises InputError for options that say something else than --batches."""
    reading = request.reading
    if reading.serving.has_cache:
        raise InputError(
            "--batches: in prefill and decode each batch has a cache of its own, and a token waits for the one before; "
            "leave --phase out, or place one step with more sequences (hf:DIR?batch=N)"
        )
    if reading.microbatching.count > 1:
        raise InputError("--microbatches: accumulates gradients, and --batches serves; leave one of them out")
    others = {
        "--parallel": parallel not in (None, "none"),
        "--placer": request.placer != "auto",
        "--checkpoint": request.checkpoint is not None,
        "--for": request.target is not None,
        "--sweep": sweep is not None,
    }
    for name, is_given in others.items():
        if is_given:
            raise InputError(f"{name}: does not go with --batches; leave one of them out")
