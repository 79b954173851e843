"""The command `gdp`: parse, call, print. Exit status: 0 done, 1 a run failed, 2 bad input, 3 nothing fits, 130
interrupted.
"""

import shlex
import signal
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from gdp.cli_bench import bench_app
from gdp.cli_devices import devices_app
from gdp.cli_run import run
from gdp.cli_shared import (
    BudgetOption,
    CheckpointOption,
    DevicesOption,
    JsonOption,
    ModelArgument,
    ThreadsOption,
    fail,
    log,
    print_json,
    print_text,
    quiet_pipe,
    show,
    warm_up,
)
from gdp.errors import InputError

if TYPE_CHECKING:
    from gdp.cluster import Cluster
    from gdp.sources import Model

OK, BAD_INPUT, NOTHING_FITS, INTERRUPTED = 0, 2, 3, 130

app = typer.Typer(
    help="Place the operators of a neural network on devices so that one step is as fast as possible within memory.",
    add_completion=False,
    no_args_is_help=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)
app.add_typer(devices_app, name="devices")
app.add_typer(bench_app, name="bench")
app.command()(run)

PinOption = Annotated[list[str] | None, typer.Option(metavar="REGEX=DEVICE", help="Where matching ops go. Repeatable.")]
MaxMemoryOption = Annotated[
    list[str] | None, typer.Option(metavar="DEVICE=SIZE", help="Use less of a device's memory. Repeatable.")
]
ReserveOption = Annotated[str, typer.Option(metavar="SHARE", help="Keep this share of each device's memory free.")]


def main(args: Sequence[str] | None = None) -> int:
    """Run the command line `args` (default: the process's own) and return the exit status."""
    try:
        status = int(app(args, prog_name="gdp", standalone_mode=False) or OK)
    except (InputError, typer.TyperException) as error:
        message = error.format_message() if isinstance(error, typer.TyperException) else str(error)
        status = fail(f"error: {' '.join(message.split())}", BAD_INPUT)
    except (KeyboardInterrupt, typer.Abort):
        status = INTERRUPTED
    if status == INTERRUPTED:
        if args is None:
            signal.signal(signal.SIGINT, signal.SIG_IGN)  # it is being done
        fail("interrupted", INTERRUPTED)
    with quiet_pipe():
        sys.stdout.flush()
    return status


@app.callback(invoke_without_command=True)
def gdp(
    context: typer.Context,
    version: Annotated[bool, typer.Option("--version", help="Print the version.")] = False,
) -> None:
    if version:
        from gdp import __version__

        print_text(f"gdp {__version__}")
        raise typer.Exit(OK)
    if context.invoked_subcommand is None:
        print_text(context.get_help())
        raise typer.Exit(OK)


@app.command()
def place(
    model: ModelArgument,
    devices: DevicesOption,
    placer: Annotated[str, typer.Option(help="auto: classical placers, then search.")] = "auto",
    budget: BudgetOption = "30s",
    seed: Annotated[int, typer.Option(min=0)] = 0,
    checkpoint: CheckpointOption = None,
    pin: PinOption = None,
    max_memory: MaxMemoryOption = None,
    reserve: ReserveOption = "0%",
    robust: Annotated[str, typer.Option(metavar="SHARE", help="Score means over op times that vary by it.")] = "0%",
    microbatches: Annotated[int, typer.Option(metavar="M", help="Only 1 in this version.")] = 1,
    times: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Op times that `gdp run --times` measured.")
    ] = None,
    threads: ThreadsOption = None,
    out: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Write plan.json, graph.json.gz and cluster.json there.")
    ] = None,
    json: JsonOption = False,
) -> int:
    """Find the best plan of MODEL on DEVICES within the budget, and write it to plan.json."""
    from gdp import options
    from gdp.budget import Budget
    from gdp.cluster import Cluster

    if microbatches != 1:
        raise InputError(f"--microbatches is {microbatches}; this version places one batch, only 1 is expected")
    limit = Budget.parse(budget)
    cluster = Cluster.parse(devices)
    constraints = _constraints(cluster, pin, max_memory, reserve)
    spread = options.parse_fraction(robust, "--robust")
    plan_path = (out or Path()) / "plan.json"
    # a graph with measured times is nowhere else
    graph_path = None if out is None and times is None else plan_path.with_name("graph.json.gz")
    cluster_path = None if out is None else out / "cluster.json"
    for path in filter(None, (plan_path, graph_path, cluster_path)):
        options.check_writable(path)
    _check_placers([placer])
    _check_checkpoint(checkpoint, [placer])

    source = _read(model) if times is None else _read_timed(model, times, cluster)
    warm_up()
    graph = source.graph
    from gdp.cost import unused_names
    from gdp.place import place as find_plan
    from gdp.problem import Problem
    from gdp.report import console, documents, progress
    from gdp.simulate import replay

    if devices.strip() == "local":
        log("gdp: note: devices as they are now; gdp devices detect shows them, and which figures are estimates")
    for sentence in unused_names(graph, cluster):
        log(f"gdp: note: {sentence}")
    if times is not None and not any(graph.times_ns):
        kinds = ", ".join(sorted({device.kind for device in cluster.devices}))
        log(f"gdp: note: {times} has no time of these ops on {kinds} with this PyTorch: all are by the roofline")
    line = progress.SearchLine(f"{graph.name} on {cluster.name}")
    with progress.stop_on_interrupt() as stop:
        try:
            with progress.live(line):
                plan = find_plan(
                    graph, cluster, placer=placer, budget=limit, seed=seed, robust=spread, checkpoint=checkpoint,
                    num_threads=threads, on_progress=line, stop=stop, **constraints,
                )  # fmt: skip
        except InputError as error:
            if stop.is_set():  # before there was any placement
                return INTERRUPTED
            raise InputError(f"{model} on {devices}: {error}") from None
        status = NOTHING_FITS if plan.status == "infeasible" else OK
        if status == OK:
            plan.save(plan_path)
            if graph_path is not None:
                graph.save(graph_path)
            if cluster_path is not None:
                cluster.save(cluster_path)
        interrupted = stop.is_set()
    if json:
        print_json(documents.place_document(graph, cluster, plan, plan_path if status == OK else None))
    elif status == OK:
        # what is local may have changed by then
        placed_on = str(cluster_path) if cluster_path is not None and devices.strip() == "local" else devices
        command = ["gdp", "simulate", str(graph_path or model), "--devices", placed_on, "--plan", str(plan_path)]
        simulation = replay(Problem.build(graph, cluster, **constraints), plan)
        show(console.place_report(plan, simulation, source.unknown_costs, str(plan_path), shlex.join(command)))
    if status == NOTHING_FITS:
        fail(console.nothing_fits(plan, cluster), NOTHING_FITS)
    return INTERRUPTED if interrupted else status


@app.command()
def compare(
    model: ModelArgument,
    devices: DevicesOption,
    placers: Annotated[str | None, typer.Option(metavar="A,B,...", help="Default: classical ones and auto.")] = None,
    budget: BudgetOption = "30s",
    seeds: Annotated[int, typer.Option(min=1, help="Runs of each placer.")] = 3,
    checkpoint: CheckpointOption = None,
    pin: PinOption = None,
    max_memory: MaxMemoryOption = None,
    reserve: ReserveOption = "0%",
    threads: ThreadsOption = None,
    json: JsonOption = False,
) -> int:
    """Run several placers on MODEL and DEVICES with several seeds, each with the whole budget."""
    from gdp.budget import Budget
    from gdp.cluster import Cluster

    limit = Budget.parse(budget)
    cluster = Cluster.parse(devices)
    constraints = _constraints(cluster, pin, max_memory, reserve)
    names = None if placers is None else [name.strip() for name in placers.split(",")]
    _check_placers(names or ())
    _check_checkpoint(checkpoint, names or ["auto"])

    source = _read(model)
    warm_up()
    from gdp.compare import DEFAULT_PLACERS
    from gdp.compare import compare as run
    from gdp.report import console, documents, progress

    with progress.stop_on_interrupt() as stop, progress.live(f"{source.graph.name} on {cluster.name}"):
        comparison = run(
            source.graph, cluster, placers=DEFAULT_PLACERS if names is None else names, budget=limit, num_seeds=seeds,
            checkpoint=checkpoint, num_threads=threads, stop=stop, **constraints,
        )  # fmt: skip
    if json:
        print_json(documents.compare_document(source.graph, cluster, comparison, str(limit)))
    else:
        show(console.compare_report(comparison))
    if comparison.interrupted:
        return INTERRUPTED
    if all(row.step_time_ns is None for row in comparison.rows):
        return fail("nothing fits in memory; `gdp place` says how much is missing", NOTHING_FITS)
    return OK


@app.command()
def simulate(
    graph: Annotated[str, typer.Argument(metavar="GRAPH", help="A gdp-graph file, or any other MODEL.")],
    devices: DevicesOption,
    plan: Annotated[Path, typer.Option(metavar="PLAN", help="A gdp-plan file.")],
    pin: PinOption = None,
    max_memory: MaxMemoryOption = None,
    reserve: ReserveOption = "0%",
    json: JsonOption = False,
) -> int:
    """Derive every figure of a plan anew. Status 2 if the plan's differ, 3 if it breaks memory or a constraint."""
    from gdp.bounds import lower_bound
    from gdp.cluster import Cluster
    from gdp.plan import Plan
    from gdp.problem import Problem

    cluster = Cluster.parse(devices)
    read = Plan.load(plan)
    constraints = _constraints(cluster, pin, max_memory, reserve)
    problem = Problem.build(_read(graph).graph, cluster, **constraints)
    from gdp.report import console, documents
    from gdp.simulate import replay, verify

    try:
        simulation = replay(problem, read)
        wrong = [text for text in verify(problem, read) if text not in simulation.reasons]
    except InputError as error:
        raise InputError(f"{plan}: {error}") from None
    bound_ns = lower_bound(problem)
    if not wrong and read.lower_bound_ns > bound_ns:
        wrong.append(f"lower_bound_ns is {read.lower_bound_ns}; the bound is {bound_ns}")
    if wrong:
        raise InputError(f"{plan}: the figures are not those of the plan: {', '.join(wrong)}; place the graph anew")
    if json:
        print_json(documents.simulate_document(read, simulation, bound_ns))
    else:
        show(console.simulate_report(read, simulation, bound_ns))
    return OK if simulation.feasible else fail(f"does not fit: {'; '.join(simulation.reasons)}", NOTHING_FITS)


@app.command()
def capture(
    model: ModelArgument,
    out: Annotated[Path, typer.Option(metavar="GRAPH.json.gz")],
    inference: Annotated[bool, typer.Option("--inference", help="Forward only, instead of a training step.")] = False,
    optimizer: Annotated[str, typer.Option(help="adam or sgd.")] = "adam",
    json: JsonOption = False,
) -> int:
    """Write the graph of one step of MODEL."""
    from gdp import options

    if not out.name.endswith((".json", ".json.gz")):
        raise InputError(f"--out {out}: a name that ends in .json or .json.gz is expected")
    options.check_writable(out)
    made = _read(model, training=not inference, optimizer=optimizer)
    if not made.is_captured:
        raise InputError(f"{model}: is a gdp-graph file already; name a workload or module:function")
    made.graph.save(out)
    from gdp.report import console, documents

    if json:
        unknown = dict(made.unknown_costs)
        print_json({**documents.graph_document(made.graph), "unknown_costs": unknown, "path": str(out)})
    else:
        show(console.capture_report(made.graph, made.unknown_costs, str(out)))
    return OK


@app.command()
def train(
    graphs: Annotated[
        list[str], typer.Argument(metavar="GRAPH...", help="gdp-graph files, MODELs, or training-set: all of gdp's.")
    ],
    out: Annotated[Path, typer.Option(metavar="CHECKPOINT", help="Where the policy goes, such as my.safetensors.")],
    devices: Annotated[
        list[str] | None,
        typer.Option(metavar="DEVICES", help="Each graph goes on each; default: those of a workload. Repeatable."),
    ] = None,
    hold_out: Annotated[
        list[str] | None, typer.Option(metavar="FAMILY", help="Leave it out, with families like it. Repeatable.")
    ] = None,
    resume: Annotated[bool, typer.Option("--resume", help="Go on where CHECKPOINT stands; same arguments.")] = False,
    start: Annotated[Path | None, typer.Option("--from", metavar="CHECKPOINT", help="Train on from this one.")] = None,
    policy: Annotated[str | None, typer.Option(help="default, or paper: GDP as published.")] = None,
    updates: Annotated[int, typer.Option(metavar="N", min=1, help="Over which the learning rate falls.")] = 500,
    budget: Annotated[str | None, typer.Option(metavar="TIME", help="End earlier, after 10m or 2h.")] = None,
    graphs_per_update: Annotated[int | None, typer.Option(metavar="G", min=1, help="Default: all, at most 8.")] = None,
    samples: Annotated[int, typer.Option(metavar="S", min=2, help="Placements of a graph in an update.")] = 16,
    learning_rate: Annotated[float | None, typer.Option(help="Of Adam; default: the policy's.")] = None,
    randomize: Annotated[bool, typer.Option("--randomize", help="Vary devices, links, memory and batch size.")] = False,
    validation: Annotated[
        list[str] | None, typer.Option(metavar="GRAPH", help="Keep the parameters that do best on it. Repeatable.")
    ] = None,
    save_every: Annotated[int, typer.Option(metavar="K", min=1, help="Write CHECKPOINT every K updates.")] = 10,
    seed: Annotated[int, typer.Option(min=0)] = 0,
    threads: ThreadsOption = None,
    tensorboard: Annotated[Path | None, typer.Option(metavar="DIR", help="Write TensorBoard scalars there.")] = None,
    json: JsonOption = False,
) -> int:
    """Train a policy on graphs; Ctrl-C saves. Under torchrun (-m gdp.cli train ...), processes share the graphs."""
    from gdp.cli_train import TrainOptions, run

    trained = run(
        TrainOptions(
            graphs=graphs, devices=devices or (), hold_out=hold_out or (), out=out, resume=resume, start=start,
            policy=policy, updates=updates, budget=budget, graphs_per_update=graphs_per_update, samples=samples,
            learning_rate=learning_rate, randomize=randomize, validation=validation or (), save_every=save_every,
            seed=seed, threads=threads, tensorboard=tensorboard, command=shlex.join(["gdp", *sys.argv[1:]]),
        ),
        warm_up,
    )  # fmt: skip
    if trained.is_first and json:
        print_json(trained.to_document())
    elif trained.is_first:
        print_text(trained.to_text())
    return INTERRUPTED if trained.interrupted else OK


@app.command()
def workloads(
    variants: Annotated[bool, typer.Option("--variants", help="Those to train policies on.")] = False,
    json: JsonOption = False,
) -> int:
    """The built-in models."""
    from gdp import workloads as built_in

    rows = [
        {
            "name": item.name, "family": item.family, "devices": item.cluster, "batch": item.batch_size,
            "description": item.description,
        }
        for item in map(built_in.get, built_in.variant_names() if variants else built_in.names())
    ]  # fmt: skip
    if json:
        print_json({"workloads": rows})
    else:
        from gdp.report import console

        show(console.rows_report(rows))
        if not variants:
            count = len(built_in.variant_names())
            print_text(f"\nMODEL may also be one of {count} smaller and larger variants: gdp workloads --variants")
    return OK


def _read_timed(text: str, times: Path, cluster: "Cluster") -> "Model":
    """MODEL with the measured times of its ops on the kinds of devices in `cluster`."""
    from gdp.measured_times import MeasuredTimes
    from gdp.report.progress import live
    from gdp.sources import read_timed_model

    known = MeasuredTimes(times)
    with live(f"capturing {text}"):
        return read_timed_model(text, known, [device.kind for device in cluster.devices])


def _read(text: str, *, training: bool = True, optimizer: str = "adam") -> "Model":
    from gdp.report.progress import live
    from gdp.sources import read_model

    with live(f"reading {text}"):
        return read_model(text, training=training, optimizer=optimizer)


def _constraints(
    cluster: "Cluster", pin: list[str] | None, max_memory: list[str] | None, reserve: str
) -> dict[str, Any]:
    """The constraints of `Problem.build` from their options."""
    from gdp import options

    return {
        "pins": options.parse_pins(pin or (), cluster),
        "max_memory_bytes": options.parse_max_memory(max_memory or (), cluster),
        "reserve": options.parse_fraction(reserve, "--reserve"),
    }


def _check_placers(names: Iterable[str]) -> None:
    from gdp.placers.portfolio import PLACERS

    for name in names:
        if name not in PLACERS:
            raise InputError(f"placer {name!r} is unknown; one of {', '.join(PLACERS)} is expected")


def _check_checkpoint(checkpoint: str | None, placers: Sequence[str]) -> None:
    """A bad file is better known now than after the graph's capture."""
    if checkpoint is None:
        return
    from gdp.placers.portfolio import WITH_POLICY

    if not set(placers) & set(WITH_POLICY):
        raise InputError(
            f"--checkpoint: {', '.join(placers)} asks no policy; use it with --placer {' or '.join(WITH_POLICY)}"
        )
    if "guided" in placers:
        from gdp.policy.pretrained import read_constructor

        read_constructor(checkpoint)
    else:
        from gdp.policy.checkpoint import load_checkpoint

        load_checkpoint(checkpoint)


if __name__ == "__main__":
    sys.exit(main())
