"""Finds the best layout and its plan: `gdp place --parallel`."""

from typing import TYPE_CHECKING

from gdp.cli.plan_files import PlanFiles
from gdp.cli.request import PlaceRequest
from gdp.cli.shared import BAD_INPUT, INTERRUPTED, NOTHING_FITS, OK, fail, log, print_json, show, warm_up
from gdp.errors import InputError

if TYPE_CHECKING:
    from gdp.search.layouts.trial import Trial


def place_parallel(request: PlaceRequest, text: str, sweep: str | None) -> int:
    """Answers `gdp place --parallel text`, which is not "none"; returns the exit status."""
    from gdp.parallel.layout import Layout
    from gdp.search.layouts.parts import Parts

    layout = None if text == "auto" else Layout.parse(text)
    _check(request, sweep)
    files = PlanFiles.of(request)
    files.check()
    model = request.read()
    request.say_notes(model.graph)
    with request.named():
        parts = Parts.of_model(request.model, request.reading, model.graph)
        if layout is not None:
            parts.check(layout.num_parts)
    from gdp.cli.inputs import build_problem

    warm_up(("auto",), build_problem(model.graph, request.cluster, request.constraints))
    from gdp.planning.plan_cache import KeptAnswer
    from gdp.report import console, documents, layouts, progress

    with progress.stop_on_interrupt() as stop:
        line = progress.StatusLine(f"{model.graph.name} on {request.cluster.name}: looking at layouts")

        def tell(trial: "Trial") -> None:
            line.say(f"{model.graph.name}: {trial.layout} {layouts.state(trial)}")

        with progress.live(line), request.named():
            from gdp.search.layouts.choose import choose_layout

            choice = choose_layout(
                parts,
                request.cluster,
                request.constraints,
                layout=layout,
                budget=request.budget,
                seed=request.seed,
                num_threads=request.threads,
                on_progress=tell,
                stop=stop,
            )
        plan, trial = choice.plan, choice.trial
        assert trial.candidate is not None
        simulation = trial.candidate.replay
        fits = plan.status == "ok"
        failure = None
        if fits:
            files = files.sparing_others(simulation.problem.graph)
            failure = files.write(KeptAnswer(plan, None, ()), simulation, choice)
        interrupted = stop.is_set()
    if ":" in request.model and trial.layout.num_parts > 1:
        log(f"gdp: note: {request.model}: parts of the batch are parts of inputs along their first dimension")
    for note in layouts.notes(trial, parts):
        log(f"gdp: note: {request.model}: {note}")
    written = files.plan if fits and files.plan in files.written else None
    if request.json:
        document = documents.place_document(
            simulation.problem.graph, request.cluster, plan, written, advice=None, would_fit=()
        )
        print_json(document | layouts.choice_document(choice))
    elif fits:
        shown = " and ".join(str(path) for path in files.shown)
        command = files.next_command(request) if written else ""
        show(layouts.choice_report(choice, console.place_report(plan, simulation, model.unknown_costs, shown, command)))
    if failure is not None:
        return fail(f"error: {failure}", BAD_INPUT)
    if not fits:
        fail(console.nothing_fits(plan, request.cluster), NOTHING_FITS)
    return INTERRUPTED if interrupted else OK if fits else NOTHING_FITS


def _check(request: PlaceRequest, sweep: str | None) -> None:
    """Raises InputError for options that say something else than --parallel."""
    reading = request.reading
    from gdp.models.read import has_samples

    if (has_samples(request.model) and reading.microbatching.count > 1) or reading.microbatching.free_replicas:
        raise InputError("--microbatches: --parallel has a number of its own; write --parallel microbatches=M")
    if not reading.training or reading.serving.has_cache:
        raise InputError(
            "--parallel: layouts cut training steps; leave --inference and --phase out, or serve with --batches N"
        )
    others = {
        "--placer": request.placer != "auto",
        "--for": request.target is not None,
        "--sweep": sweep is not None,
        "--times": request.times is not None,
    }
    for name, is_given in others.items():
        if is_given:
            raise InputError(f"{name}: does not go with --parallel; leave one of them out")
