"""`gdp place`: the best plan, advice on the machine, sweeps."""

import hashlib
import shlex
import threading
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from gdp.cli_inputs import (
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
    read_graph,
    read_timed,
    reading_of,
)
from gdp.cli_shared import (
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
from gdp.errors import InputError

if TYPE_CHECKING:
    from gdp.advice import Advice
    from gdp.budget import Budget
    from gdp.cluster import Cluster
    from gdp.constraints import Constraints
    from gdp.export.search import Placed
    from gdp.export.target import Target
    from gdp.graph import Graph
    from gdp.plan import Plan
    from gdp.sources import Model, Reading
    from gdp.sweep import Sweep

_ADVICE_SHARE = 0.2  # of the budget


@dataclass(frozen=True, eq=False)
class _Request:
    """What is asked for, read and checked."""

    model: str
    devices: str
    cluster: "Cluster"
    budget: "Budget"
    constraints: "Constraints"
    reading: "Reading"
    times: Path | None
    placer: str
    checkpoint: str | None
    seed: int
    robust: float | None
    threads: int | None
    with_cache: bool
    out: Path | None
    json: bool
    target: "Target | None" = None

    def read(self) -> "Model":
        """The model's graph, with measured times if there are."""
        if self.times is None:
            return read_graph(self.model, self.reading)
        return read_timed(self.model, self.times, self.cluster, self.reading)

    def read_split(self, microbatches: int, samples_by: int = 1) -> "Graph":
        """The model's step of so many micro-batches, with one in `samples_by` of the samples."""
        from gdp.sources import read_part

        microbatching = replace(self.reading.microbatching, count=microbatches)
        return microbatching.apply(read_part(self.model, self.reading, microbatches * samples_by))

    def cache_entry(self, graph: "Graph", with_advice: bool) -> Path | None:
        """Where the answer is kept."""
        if not self.with_cache:
            return None
        from gdp import files, plan_cache
        from gdp.simulate import default_threads

        policy = None if self.checkpoint is None else hashlib.sha256(files.read_bytes(self.checkpoint)).hexdigest()
        options = {
            "placer": self.placer, "budget": str(self.budget), "policy": policy, "advice": with_advice,
            "target": None if self.target is None else self.target.name,
            "seed": self.seed, "robust": self.robust, "threads": self.threads or default_threads(),
        }  # fmt: skip
        return plan_cache.entry(graph, self.cluster, self.constraints, options)

    @property
    def keywords(self) -> dict[str, Any]:
        """What `place` and `sweep_...` both take."""
        return {"seed": self.seed, "robust": self.robust, "num_threads": self.threads}


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
    reserve: ReserveOption = "0%",
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
    request = _Request(
        model, devices, cluster, limit, constraints, reading, times, placer, checkpoint, seed, spread, threads,
        with_cache, out, json, _target(target, placer, sweep),
    )  # fmt: skip
    check_placers([placer])
    check_checkpoint(checkpoint, [placer])
    if asked is not None:
        asked.check(cluster)
        return _sweep(request, asked)
    return _place(request, advice and placer == "auto" and target is None)


def _target(name: str | None, placer: str, sweep: str | None) -> "Target | None":
    from gdp.export.targets import find_target

    if name is None:
        return None
    if placer != "auto" or sweep is not None:
        raise InputError("--for: places with auto, once; leave out --placer and --sweep")
    return find_target(name)


def _place(request: _Request, with_advice: bool) -> int:
    from gdp import options

    out, times = request.out, request.times
    plan_path = (out or Path()) / "plan.json"
    # a graph with measured times, or costs of the user's, is nowhere else
    is_known = times is None and request.reading.op_costs is None
    graph_path = None if out is None and is_known else plan_path.with_name("graph.json.gz")
    cluster_path = None if out is None else out / "cluster.json"
    report_path = None if out is None else out / "report.html"
    for path in filter(None, (plan_path, graph_path, cluster_path, report_path)):
        options.check_writable(path)
    from gdp.problem import Problem

    source = request.read()
    graph, cluster = source.graph, request.cluster
    try:
        problem = Problem.build(graph, cluster, **vars(request.constraints))  # bad ones are better known now
        if request.target is not None:
            request.target.read_units(problem)
    except InputError as error:
        raise InputError(f"{request.model} on {request.devices}: {error}") from None
    if request.robust is None and source.noise is not None:
        request = replace(request, robust=min(round(source.noise, 4), 0.49))
    from gdp import plan_cache
    from gdp.export.offload import can_offload
    from gdp.report import console, documents, progress
    from gdp.report.page import write_page
    from gdp.report.page_data import Told, improvements
    from gdp.simulate import replay

    _say_notes(request, graph)
    entry = request.cache_entry(graph, with_advice)
    known = plan_cache.load(entry, graph, cluster)
    if known is None:
        warm_up()
    else:
        log("gdp: note: found before, with the same graph, devices and options; --no-cache searches anew")
    line = progress.SearchLine(f"{graph.name} on {cluster.name}")
    found: Advice | None = None if known is None else known.advice
    would_fit: list[str] = []
    with progress.stop_on_interrupt() as stop:
        try:
            with progress.live(line):
                plan = _search(request, graph, with_advice, line, stop) if known is None else known.plan
                simulation = replay(problem, plan)
                if known is not None:
                    pass
                elif with_advice and plan.status == "ok":
                    found = _advise(request, graph, plan, simulation, stop)
                    plan = found.plan
                    simulation = replay(problem, plan)
                elif with_advice and not stop.is_set():
                    would_fit = _changes_that_fit(request, graph, stop)
        except InputError as error:
            if stop.is_set():  # before there was any placement
                return INTERRUPTED
            raise InputError(f"{request.model} on {request.devices}: {error}") from None
        status = NOTHING_FITS if plan.status == "infeasible" else OK
        if status == OK:
            plan.save(plan_path)
            if graph_path is not None:
                graph.save(graph_path)
            if cluster_path is not None:
                cluster.save(cluster_path)
            if report_path is not None:
                write_page(report_path, Told(plan, simulation, improvements(line.history), found))
            if known is None and not stop.is_set():
                plan_cache.store(entry, plan_cache.Found(plan, found))
        interrupted = stop.is_set()
    if request.json:
        written = plan_path if status == OK else None
        print_json(documents.place_document(graph, cluster, plan, written, advice=found, would_fit=would_fit))
    elif status == OK:
        command = _next_command(request, graph_path, cluster_path, plan_path)
        told = " and ".join(str(path) for path in (plan_path, report_path) if path is not None)
        show(console.place_report(plan, simulation, source.unknown_costs, told, command, found))
    if status == NOTHING_FITS:
        if request.target is not None and request.target.offload is not None and can_offload(problem):
            would_fit = [
                *would_fit,
                f"weights left on a CPU, as gdp export --to {request.target.name} does without --for",
            ]
        fail(console.nothing_fits(plan, cluster, would_fit), NOTHING_FITS)
    return INTERRUPTED if interrupted else status


def _search(
    request: _Request, graph: "Graph", with_advice: bool, on_progress: Callable[..., None], stop: threading.Event
) -> "Plan":
    from gdp.place import place as find_plan

    if request.target is not None:
        from gdp.export.search import place_for

        placed = place_for(
            request.target, graph, request.cluster, request.constraints,
            budget=request.budget, on_progress=on_progress, stop=stop, **request.keywords,
        )  # fmt: skip
        log(f"gdp: note: {_compared(placed)}")
        return placed.plan
    budget = request.budget.part(1 - _ADVICE_SHARE) if with_advice else request.budget
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


def _advise(request: _Request, graph: "Graph", plan: "Plan", simulation: Any, stop: threading.Event) -> "Advice":
    from gdp.advice import advise

    total, search = request.budget.seconds, plan.search
    is_over = total is not None and search is not None and search.seconds >= total
    budget = request.budget.part(0.0 if is_over else _ADVICE_SHARE)
    return advise(
        graph, simulation, plan, request.constraints,
        budget=budget, seed=request.seed, num_threads=request.threads, stop=stop,
    )  # fmt: skip


def _changes_that_fit(request: _Request, graph: "Graph", stop: threading.Event) -> list[str]:
    from gdp.advice import changes_that_fit
    from gdp.sources import has_samples

    can_split = has_samples(request.model) and request.times is None
    count = request.reading.microbatching.count
    return changes_that_fit(
        graph, request.cluster, request.constraints,
        budget=request.budget.part(_ADVICE_SHARE),
        part_of=(lambda parts: request.read_split(count, parts)) if can_split else None,
        split_in=(lambda factor: request.read_split(count * factor)) if can_split else None,
        stop=stop,
    )  # fmt: skip


def _sweep(request: _Request, sweep: "Sweep") -> int:
    from gdp import options
    from gdp.report import advice, progress
    from gdp.sources import has_samples
    from gdp.sweep import DEVICES, MICROBATCHES, SweepRow, sweep_devices, sweep_microbatches

    if request.placer != "auto" or request.times is not None:
        raise InputError("--sweep: places with auto and modelled op times; leave out --placer and --times")
    if sweep.what == MICROBATCHES and request.reading.microbatching.count > 1:
        count = request.reading.microbatching.count
        raise InputError(f"--sweep {MICROBATCHES}: --microbatches {count} contradicts it; drop one")
    if sweep.what == MICROBATCHES and not has_samples(request.model):
        raise InputError(f"--sweep {MICROBATCHES}: {request.model} has no batch to split; name the model itself")
    if request.out is not None:
        options.check_writable(request.out / f"{sweep.what}-{sweep.values[0]}" / "plan.json")
    common = {"budget": request.budget, **request.keywords}
    rows: list[SweepRow] = []
    with progress.stop_on_interrupt() as stop:
        if sweep.what == DEVICES:
            graph = request.read().graph
            warm_up()
            found = sweep_devices(graph, request.cluster, sweep.values, request.constraints, stop=stop, **common)
        else:
            warm_up()
            found = sweep_microbatches(
                request.read_split, request.cluster, sweep.values, request.constraints, stop=stop, **common
            )
        try:
            for row in found:
                rows.append(row)
                log(f"gdp: {advice.sweep_line(sweep.what, row)}")
                if request.out is not None and row.plan is not None and row.is_ok:
                    _save_row(request.out / f"{sweep.what}-{row.value}", row)
        except InputError:
            if not stop.is_set():  # if it is: there was no placement yet
                raise
        interrupted = stop.is_set()
    if not interrupted and all(row.plan is None for row in rows):
        raise InputError(f"--sweep: {rows[0].note}")
    if request.json:
        print_json(advice.sweep_document(sweep.what, rows, request.out))
    else:
        show(advice.sweep_report(sweep.what, rows))
    if interrupted:
        return INTERRUPTED
    if not any(row.is_ok for row in rows):
        return fail("nothing fits in memory for any value; without --sweep gdp says how much is missing", NOTHING_FITS)
    return OK


def _save_row(directory: Path, row: Any) -> None:
    row.plan.save(directory / "plan.json")
    row.graph.save(directory / "graph.json.gz")
    row.cluster.save(directory / "cluster.json")


def _say_notes(request: _Request, graph: "Graph") -> None:
    from gdp.cost import unused_names

    if request.devices.strip() == "local":
        log("gdp: note: devices as they are now; gdp devices detect shows them, and which figures are estimates")
    for sentence in unused_names(graph, request.cluster):
        log(f"gdp: note: {sentence}")
    if request.times is not None and not any(graph.times_ns):
        kinds = ", ".join(sorted({device.kind for device in request.cluster.devices}))
        log(f"gdp: note: {request.times} has no time of these ops on {kinds} with this PyTorch: the roofline gives all")


def _next_command(request: _Request, graph_path: Path | None, cluster_path: Path | None, plan_path: Path) -> str:
    # what is local may have changed by then
    placed_on = (
        str(cluster_path) if cluster_path is not None and request.devices.strip() == "local" else request.devices
    )
    model = str(graph_path or request.model)
    if request.target is None:
        command = ["gdp", "simulate", model, "--devices", placed_on, "--plan", str(plan_path)]
    else:
        command = ["gdp", "export", str(plan_path), "--to", request.target.name]
        if request.out is not None:
            return shlex.join(command)
        command += ["--graph", model, "--devices", placed_on]
    if graph_path is None:
        reading = request.reading
        if reading.microbatching.count > 1:
            command += ["--microbatches", str(reading.microbatching.count)]
            command += ["--free-replicas"] * reading.microbatching.free_replicas
        command += ["--inference"] * (not reading.training)
        command += [part for name, size in reading.dims.items() for part in ("--dim", f"{name}={size}")]
    return shlex.join(command)
