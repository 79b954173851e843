"""Finds the best layout and its plan: `gdp place`, where the batch can be split."""

import contextlib
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING

from gdp.cli.advice import ADVICE_SHARE, advice_budget, find_advice
from gdp.cli.plan_files import PlanFiles
from gdp.cli.request import PlaceRequest
from gdp.cli.shared import (
    BAD_INPUT,
    FOUND_BEFORE,
    INTERRUPTED,
    NOTHING_FITS,
    OK,
    fail,
    log,
    print_json,
    show,
    warm_up,
)
from gdp.errors import InputError

if TYPE_CHECKING:
    from gdp.budget import Clock
    from gdp.models.model import Model
    from gdp.parallel.layout import Layout
    from gdp.planning.plan_cache import KeptAnswer
    from gdp.search.layouts.parts import Parts
    from gdp.search.layouts.trial import Trial
    from gdp.simulator.plan import Plan
    from gdp.simulator.problem import Problem

OtherAnswer = Callable[[PlaceRequest, "Model"], int]


def place_parallel(request: PlaceRequest, text: str, sweep: str | None, *, otherwise: OtherAnswer | None = None) -> int:
    """Answers `gdp place --parallel text`, which is not "none"; returns the exit status.

    Where the batch of MODEL cannot be split, `otherwise` answers if there is one.
    """
    from gdp.parallel.layout import Layout

    layout = None if text == "auto" else Layout.parse(text)
    _check(request, sweep)
    files = PlanFiles.of(request)
    files.check()
    model = request.read()
    parts = _parts(request, model, layout, is_asked=otherwise is None)
    if parts is None:
        assert otherwise is not None
        return otherwise(request, model)
    files = files.sparing_others(model.graph)
    from gdp.cli.inputs import build_problem

    with request.named():
        whole = build_problem(model.graph, request.cluster, request.constraints)
    request.say_notes(model.graph)
    from gdp.budget import Clock
    from gdp.planning import plan_cache
    from gdp.report import console, documents, layouts, progress
    from gdp.report.layout_answer import LayoutAnswer
    from gdp.simulator.simulate import replay

    with progress.live("looking for a plan found before"):
        entry = request.cache_entry(model.graph, [text, parts.batch_size])
        kept = plan_cache.load(entry, lambda plan: _problem_of(request, plan, parts).graph, request.cluster)
    if kept is None:
        if layout is None:
            with progress.live(f"reading a part of the batch of {model.graph.name}"):
                parts.read_ahead(request.cluster.num_devices)
        request = request.within_budget(model, warm_up(("auto",), whole), files.num_large)
    else:
        log(FOUND_BEFORE)
    would_fit: list[str] = []
    failure: InputError | None = None
    with progress.stop_on_interrupt(has_answer=kept is not None) as stop:
        try:
            with request.named():
                clock = Clock(request.budget, stop=stop)
                answer, problem = (kept, None) if kept else _find(request, parts, layout, clock, files.num_large)
        except InputError:
            if stop.is_set():  # before there was any plan
                return INTERRUPTED
            raise
        plan = answer.plan
        simulation = replay(problem or _problem_of(request, plan, parts), plan)
        assert answer.layouts is not None
        looked_at = LayoutAnswer.of_document(answer.layouts)
        fits = plan.status == "ok"
        if fits:
            failure = files.write(answer, simulation, stop)
            if kept is None and not stop.is_set():
                plan_cache.store(entry, answer)
        elif not stop.is_set() and layout is None:
            would_fit = _changes_that_fit(request, parts, clock)
        interrupted = stop.is_set()
    if ":" in request.model and looked_at.best.layout.num_parts > 1:
        log(f"gdp: note: {request.model}: parts of the batch are parts of inputs along their first dimension")
    for note in looked_at.notes:
        log(f"gdp: note: {request.model}: {note}")
    written = files.plan if fits and files.plan in files.written else None
    if request.json:
        graph, advice = simulation.problem.graph, answer.advice
        document = documents.place_document(graph, request.cluster, plan, written, advice=advice, would_fit=would_fit)
        print_json(document | looked_at.document())
    elif fits:
        shown = " and ".join(str(path) for path in files.shown)
        command = files.next_command(request) if written else ""
        report = console.place_report(plan, simulation, model.unknown_costs, shown, command, answer.advice)
        show(layouts.choice_report(looked_at, report))
    if failure is not None:
        good = ", ".join(map(str, files.written))
        return fail(f"error: {failure}; {f'whole: {good}' if good else 'nothing was written'}", BAD_INPUT)
    if not fits:
        fail(console.nothing_fits(plan, request.cluster, would_fit), NOTHING_FITS)
    return INTERRUPTED if interrupted else OK if fits else NOTHING_FITS


def _parts(request: PlaceRequest, model: "Model", layout: "Layout | None", *, is_asked: bool) -> "Parts | None":
    """Returns the parts of the batch; None where there are none and layouts are not asked for."""
    from gdp.search.layouts.parts import Parts

    if not is_asked and any(model.graph.times_ns):  # measured times say nothing about parts of ops
        return None
    try:
        with request.named():
            parts = Parts.of_model(request.model, request.reading, model.graph, model.captured_s)
            if layout is not None:
                parts.check(layout.num_parts)
    except InputError:
        if is_asked:
            raise
        return None
    return parts


def _problem_of(request: PlaceRequest, plan: "Plan", parts: "Parts") -> "Problem":
    """Returns the problem that `plan` solves: of the step that its layout cuts."""
    from gdp.parallel.step import Step
    from gdp.simulator.problem import Problem

    graph = parts.exact(1) if plan.layout is None else Step.of_document(parts.exact, plan.layout).graph
    return Problem.build(graph, request.cluster, request.constraints)


def _find(
    request: PlaceRequest, parts: "Parts", layout: "Layout | None", clock: "Clock", num_files: int
) -> "tuple[KeptAnswer, Problem]":
    """Returns the answer, and the problem that its plan solves; `num_files` large files are written after it."""
    from gdp.budget import Clock
    from gdp.planning.fixed_time import written_s
    from gdp.planning.layout_advice import advise_on_layouts
    from gdp.planning.plan_cache import KeptAnswer
    from gdp.report import layouts, progress
    from gdp.report.layout_answer import LayoutAnswer
    from gdp.report.tables import format_ms

    name, stop = parts.exact(1).name, clock.stop
    line = progress.StatusLine(f"{name} on {request.cluster.name}: looking at layouts")

    def tell(trial: "Trial") -> None:
        if isinstance(stop, progress.Stop):
            stop.has_answer = True
        line.say(f"{name}: {trial.layout} {layouts.state(trial)}")

    with progress.live(line):
        from gdp.search.layouts.choose import choose_layout

        choice = choose_layout(
            parts,
            request.cluster,
            request.constraints,
            layout=layout,
            budget=clock.part(1 - ADVICE_SHARE) if request.with_advice else clock,
            seed=request.seed,
            checkpoint=request.checkpoint,
            num_threads=request.threads,
            on_progress=tell,
        )
        assert choice.trial.candidate is not None
        tell(choice.trial)
        simulation = choice.trial.candidate.replay
        problem, plan = simulation.problem, _beside_single(request, parts, _under_noise(request, choice.plan, clock))
    advice = None
    if request.with_advice and plan.status == "ok":
        if choice.trial.is_whole:
            advice = find_advice(request, problem, plan, clock.stop)
            plan = advice.plan
        elif layout is None:
            last_s = written_s(problem.num_ops, num_files)
            clock = Clock(advice_budget(request, clock.seconds, last_s), stop=clock.stop)
            text = f"{name}: {format_ms(plan.step_time_ns)}; estimating other machines"
            with progress.live(progress.StatusLine(text, clock.seconds_left)):
                advice = advise_on_layouts(choice, parts, request.constraints, clock)
    return KeptAnswer(plan, advice, (), LayoutAnswer.of(choice, parts).document()), problem


def _changes_that_fit(request: PlaceRequest, parts: "Parts", clock: "Clock") -> list[str]:
    """Returns changes with which a layout would fit, where advice is asked for; `clock` is that of the search."""
    from gdp.budget import Clock
    from gdp.planning.layout_advice import changes_that_fit_a_layout
    from gdp.report.progress import StatusLine, live

    if not request.with_advice:
        return []
    clock = Clock(advice_budget(request, clock.seconds), stop=clock.stop)
    with live(StatusLine("nothing fits; looking for changes with which it would", clock.seconds_left)):
        return changes_that_fit_a_layout(parts, request.cluster, request.constraints, clock)


def _under_noise(request: PlaceRequest, plan: "Plan", clock: "Clock") -> "Plan":
    """Returns `plan` with its step times when op times vary, if there is time to replay it."""
    from gdp.search.noise import DEFAULT_NOISE, step_times_under_noise
    from gdp.search.place import RECORD_S
    from gdp.simulator.simulate import replay

    share = DEFAULT_NOISE if request.robust is None else request.robust
    assert plan.search is not None
    assert plan.problem is not None
    if not share or plan.search.interrupted:
        return plan
    simulation = replay(plan.problem, plan)
    noisy = step_times_under_noise(simulation, share, request.seed + 1, clock.at_least(RECORD_S))
    return replace(plan, search=replace(plan.search, under_noise=noisy))


def _beside_single(request: PlaceRequest, parts: "Parts", plan: "Plan") -> "Plan":
    """Adds the best single device as a baseline, where op placement was not searched."""
    from gdp.search.place import place as find_plan
    from gdp.simulator.plan import Baseline

    search = plan.search
    if search is None or search.interrupted or "single" in search.baselines:
        return plan
    with contextlib.suppress(InputError):  # constraints allow none
        single = find_plan(parts.exact(1), request.cluster, request.constraints, placer="single", budget="1sims")
        assert single.search is not None
        time_ns = None if single.status != "ok" else single.step_time_ns
        found = {"single": Baseline(single.status, time_ns, single.search.seconds), **search.baselines}
        return replace(plan, search=replace(search, baselines=found))
    return plan


def _check(request: PlaceRequest, sweep: str | None) -> None:
    """Raises InputError for options that say something else than --parallel."""
    from gdp.models.read import has_samples

    reading = request.reading
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
