"""`gdp place`: the best plan, with advice on the machine."""

import shlex
import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from gdp.cli.inputs import (
    NO_RESERVE,
    DimOption,
    ForbidOption,
    FreeReplicasOption,
    InferenceOption,
    MaxMemoryOption,
    MicrobatchesOption,
    OpCostsOption,
    PinOption,
    ReserveOption,
    check_checkpoint,
    check_placers,
    constraints_of,
    limit_words,
    reading_of,
)
from gdp.cli.request import PlaceRequest
from gdp.cli.shared import (
    INTERRUPTED,
    NOTHING_FITS,
    OK,
    BudgetOption,
    CheckpointOption,
    DevicesOption,
    JsonOption,
    ModelArgument,
    ThreadsOption,
    fail,
    log,
    print_json,
    show,
    warm_up,
)
from gdp.cli.sweep import sweep_place
from gdp.errors import InputError

if TYPE_CHECKING:
    from gdp.advice import Advice
    from gdp.export.search import Placed
    from gdp.export.target import Target
    from gdp.graph import Graph
    from gdp.plan import Plan
    from gdp.plan_cache import Found
    from gdp.problem import Problem
    from gdp.simulate import Simulation

_ADVICE_SHARE = 0.2  # of the budget


def place(
    model: ModelArgument,
    devices: DevicesOption,
    placer: Annotated[str, typer.Option(help="auto: classical placers, then search.")] = "auto",
    budget: BudgetOption = "30s",
    seed: Annotated[int, typer.Option(min=0)] = 0,
    checkpoint: CheckpointOption = None,
    pin: PinOption = None,
    forbid: ForbidOption = None,
    max_memory: MaxMemoryOption = None,
    reserve: ReserveOption = NO_RESERVE,
    robust: Annotated[
        str | None,
        typer.Option(metavar="SHARE", help="Noise of op times to judge plans under. Default: as measured, or 2%."),
    ] = None,
    microbatches: MicrobatchesOption = 1,
    free_replicas: FreeReplicasOption = False,
    inference: InferenceOption = False,
    dim: DimOption = None,
    op_costs: OpCostsOption = None,
    sweep: Annotated[
        str | None, typer.Option(metavar="WHAT=1..8", help="A table over devices or microbatches, each with BUDGET.")
    ] = None,
    advice: Annotated[
        bool, typer.Option("--advice/--no-advice", help="Spend a fifth of BUDGET on what other machines would give.")
    ] = True,
    times: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Op times that `gdp run --times` measured.")
    ] = None,
    target: Annotated[
        str | None, typer.Option("--for", metavar="TARGET", help="Only what `gdp export --to TARGET` can express.")
    ] = None,
    threads: ThreadsOption = None,
    with_cache: Annotated[
        bool, typer.Option("--cache/--no-cache", help="Answer an identical question with the plan found before.")
    ] = True,
    out: Annotated[
        Path | None,
        typer.Option(metavar="DIR", help="Write plan.json, graph.json.gz, cluster.json, report.html."),
    ] = None,
    json: JsonOption = False,
) -> int:
    """Find the best plan of MODEL on DEVICES within the budget, and write it to plan.json."""
    from gdp import options
    from gdp.budget import Budget
    from gdp.cluster import Cluster
    from gdp.sweep import Sweep

    limit = Budget.parse(budget)
    asked = None if sweep is None else Sweep.parse(sweep)
    reading = reading_of(microbatches, free_replicas, inference, dim, op_costs)
    cluster = Cluster.parse(devices)
    constraints = constraints_of(cluster, pin, forbid, max_memory, reserve)
    spread = None if robust is None else options.parse_fraction(robust, "--robust", below=0.5)
    request = PlaceRequest(
        model, devices, cluster, limit, constraints, reading, times, placer, checkpoint, seed, spread, threads,
        with_cache, advice and placer == "auto" and target is None, out, json, _target(target, placer, sweep),
        tuple(limit_words(pin, forbid, max_memory, reserve)),
    )  # fmt: skip
    check_placers([placer])
    check_checkpoint(checkpoint, [placer])
    if asked is not None:
        asked.check(cluster)
        return sweep_place(request, asked)
    return _place(request)


def _target(name: str | None, placer: str, sweep: str | None) -> "Target | None":
    from gdp.export.targets import find_target

    if name is None:
        return None
    if placer != "auto" or sweep is not None:
        raise InputError("--for: places with auto, once; leave out --placer and --sweep")
    return find_target(name)


def _place(request: PlaceRequest) -> int:
    from gdp import plan_cache
    from gdp.report import console, documents, progress
    from gdp.simulate import replay

    files = _Files.of(request)
    files.check()
    source = request.read()
    graph = source.graph
    problem = _build(request, graph)  # bad constraints are better known now than after a search
    request = request.under_measured_noise(source.noise)
    request.say_notes(graph)
    entry = request.cache_entry(graph)
    known = plan_cache.load(entry, graph, request.cluster)
    if known is None:
        warm_up()
    else:
        log("gdp: note: found before, with the same graph, devices and options; --no-cache searches anew")
    would_fit: list[str] = []
    with progress.stop_on_interrupt() as stop:
        try:
            with request.named():
                found = known or _find(request, problem, stop)
        except InputError:
            if stop.is_set():  # before there was any placement
                return INTERRUPTED
            raise
        plan, simulation = found.plan, replay(problem, found.plan)
        fits = plan.status == "ok"
        if fits:
            files.write(found, simulation)
            if known is None and not stop.is_set():
                plan_cache.store(entry, found)
        elif not stop.is_set():
            would_fit = _would_fit(request, problem, plan, stop)
        interrupted = stop.is_set()
    if request.json:
        written = files.plan if fits else None
        print_json(
            documents.place_document(graph, request.cluster, plan, written, advice=found.advice, would_fit=would_fit)
        )
    elif fits:
        command = _next_command(request, files)
        show(console.place_report(plan, simulation, source.unknown_costs, files.told, command, found.advice))
    if not fits:
        fail(console.nothing_fits(plan, request.cluster, would_fit), NOTHING_FITS)
    return INTERRUPTED if interrupted else OK if fits else NOTHING_FITS


@dataclass(frozen=True)
class _Files:
    """What is written; None: not asked for."""

    plan: Path
    graph: Path | None
    cluster: Path | None
    report: Path | None

    @classmethod
    def of(cls, request: PlaceRequest) -> "_Files":
        out = request.out
        if out is None:
            # a graph with measured times, or costs of the user's, is nowhere else
            is_known = request.times is None and request.reading.op_costs is None
            return cls(Path("plan.json"), None if is_known else Path("graph.json.gz"), None, None)
        return cls(out / "plan.json", out / "graph.json.gz", out / "cluster.json", out / "report.html")

    def check(self) -> None:
        """InputError if one cannot be written."""
        from gdp import options

        for path in filter(None, (self.plan, self.graph, self.cluster, self.report)):
            options.check_writable(path)

    def write(self, found: "Found", simulation: "Simulation") -> None:
        """All of them."""
        from gdp.report.page import write_page
        from gdp.report.page_data import Told
        from gdp.report.progress import live

        problem = simulation.problem
        found.plan.save(self.plan)
        if self.graph is not None:
            problem.graph.save(self.graph)
        if self.cluster is not None:
            problem.cluster.save(self.cluster)
        if self.report is not None:
            with live(f"writing {self.report}"):
                write_page(self.report, Told(found.plan, simulation, found.progress, found.advice))

    @property
    def told(self) -> str:
        """What the user is told of."""
        return " and ".join(str(path) for path in (self.plan, self.report) if path is not None)


def _build(request: PlaceRequest, graph: "Graph") -> "Problem":
    from gdp.problem import Problem

    with request.named():
        problem = Problem.build(graph, request.cluster, **vars(request.constraints))
        if request.target is not None:
            request.target.read_units(problem)
    return problem


def _find(request: PlaceRequest, problem: "Problem", stop: threading.Event) -> "Found":
    from gdp.plan_cache import Found
    from gdp.report import progress

    line = progress.SearchLine(f"{problem.graph.name} on {problem.cluster.name}")
    with progress.live(line):
        plan = _search(request, problem.graph, line, stop)
    advice = None
    if request.with_advice and plan.status == "ok":
        advice = _advise(request, problem, plan, stop)
        plan = advice.plan
    return Found(plan, advice, tuple(progress.improvements(line.history)))


def _search(request: PlaceRequest, graph: "Graph", on_progress: Callable[..., None], stop: threading.Event) -> "Plan":
    from gdp.place import place as find_plan

    if request.target is not None:
        from gdp.export.search import place_for

        placed = place_for(
            request.target, graph, request.cluster, request.constraints,
            budget=request.budget, on_progress=on_progress, stop=stop, **request.keywords,
        )  # fmt: skip
        log(f"gdp: note: {_compared(placed)}")
        return placed.plan
    budget = request.budget.part(1 - _ADVICE_SHARE) if request.with_advice else request.budget
    return find_plan(
        graph, request.cluster, placer=request.placer, budget=budget, checkpoint=request.checkpoint,
        on_progress=on_progress, stop=stop, **request.keywords, **vars(request.constraints),
    )  # fmt: skip


def _compared(placed: "Placed") -> str:
    from gdp.report.tables import format_ms

    snapped, ordinary = placed.snapped, placed.ordinary
    fits = "" if not snapped.simulation.missing_bytes.any() else ", which does not fit"
    return (
        f"a plan of ops takes {format_ms(ordinary.step_time_ns)}, exported at {snapped.target.level} "
        f"{format_ms(snapped.step_time_ns)}{fits}; this one {format_ms(placed.plan.step_time_ns)}"
    )


def _advise(request: PlaceRequest, problem: "Problem", plan: "Plan", stop: threading.Event) -> "Advice":
    from gdp.advice import advise
    from gdp.report import progress
    from gdp.report.tables import format_ms
    from gdp.simulate import replay

    total, search = request.budget.seconds, plan.search
    is_over = total is not None and search is not None and search.seconds >= total
    budget = request.budget.part(0.0 if is_over else _ADVICE_SHARE)
    line = progress.CountdownLine()
    line.say(f"{format_ms(plan.step_time_ns)}; what other machines would give", budget.seconds)
    with progress.live(line):
        return advise(
            problem.graph, replay(problem, plan), plan, request.constraints,
            budget=budget, seed=request.seed, num_threads=request.threads, stop=stop,
        )  # fmt: skip


def _would_fit(request: PlaceRequest, problem: "Problem", plan: "Plan", stop: threading.Event) -> list[str]:
    from gdp.advice import changes_that_fit
    from gdp.export.snap import snap
    from gdp.report.progress import live

    found: list[str] = []
    if request.with_advice:
        count = request.reading.microbatching.count
        with live("nothing fits; looking for what would"):
            found = changes_that_fit(
                problem.graph, request.cluster, request.constraints,
                budget=request.budget.part(_ADVICE_SHARE),
                part_of=(lambda parts: request.read_split(count, parts)) if request.can_split else None,
                split_in=(lambda factor: request.read_split(count * factor)) if request.can_split else None,
                stop=stop,
            )  # fmt: skip
    target = request.target
    if target is not None and target.offload is not None and snap(problem, plan, target).simulation.feasible:
        found.append(f"weights left on a CPU, as gdp export --to {target.name} does without --for")
    return found


def _next_command(request: PlaceRequest, files: _Files) -> str:
    # what is local may have changed by then
    placed_on = str(files.cluster) if files.cluster is not None and request.is_local else request.devices
    model = str(files.graph or request.model)
    if request.target is None:
        command = ["gdp", "simulate", model, "--devices", placed_on, "--plan", str(files.plan)]
    else:
        command = ["gdp", "export", str(files.plan), "--to", request.target.name]
        command += [] if request.out is not None else ["--graph", model, "--devices", placed_on]
    command += request.limits
    if files.graph is None:
        reading = request.reading
        if reading.microbatching.count > 1:
            command += ["--microbatches", str(reading.microbatching.count)]
            command += ["--free-replicas"] * reading.microbatching.free_replicas
        command += ["--inference"] * (not reading.training)
        command += [part for name, size in reading.dims.items() for part in ("--dim", f"{name}={size}")]
    return shlex.join(command)
