"""Parses, calls and prints: the command `gdp`.

Exit status: 0 done, 1 a run failed, 2 bad input, 3 nothing fits, 130 interrupted.
"""

import os
import shlex
import signal
import sys
import threading
import traceback
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Annotated

import typer

from gdp.cli.architectures import architectures
from gdp.cli.bench import bench_app
from gdp.cli.devices import devices_app
from gdp.cli.export import export
from gdp.cli.inputs import (
    build_problem,
    check_checkpoint,
    check_placers,
    check_rivals,
    find_rivals,
    read_graph,
    read_planned,
    split_rivals,
)
from gdp.cli.options import (
    BatchesOption,
    BudgetOption,
    CheckpointOption,
    ConstraintOptions,
    DevicesOption,
    JsonOption,
    ModelArgument,
    ReadingOptions,
    ThreadsOption,
    with_options,
)
from gdp.cli.place import place
from gdp.cli.report import report
from gdp.cli.run import run
from gdp.cli.shared import (
    BAD_INPUT,
    INTERRUPTED,
    NOTHING_FITS,
    OK,
    fail,
    log,
    print_json,
    print_text,
    quiet_pipe,
    show,
    warm_up,
)
from gdp.errors import InputError

_TRACEBACK = "--traceback"
_GRAPH_FILES = (".json", ".json.gz", ".safetensors")
_REPEATED_S = 0.01  # after which the callback is over

app = typer.Typer(
    help="Place the operators of a neural network on devices so that one step is as fast as possible within memory.",
    add_completion=False,
    no_args_is_help=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)
app.add_typer(devices_app, name="devices")
app.add_typer(bench_app, name="bench")
app.command()(place)
app.command()(run)
app.command()(export)
app.command()(report)
app.command()(architectures)


def main(args: Sequence[str] | None = None) -> int:
    """Runs the command line `args` (default: the process's own) and returns the exit status.

    A SIGTERM, as batch systems and `timeout` send it, is like Ctrl-C. `--traceback` may stand anywhere.
    """
    words = list(sys.argv[1:] if args is None else args)
    shows_traceback = _TRACEBACK in words
    words = [word for word in words if word != _TRACEBACK]
    is_alone = args is None and "TORCHELASTIC_RUN_ID" not in os.environ  # processes of torchrun have their own handlers
    interrupts: list[int] = []

    def interrupt(number: int, _frame: FrameType | None) -> None:
        interrupts.append(number)
        raise KeyboardInterrupt

    if is_alone:
        signal.signal(signal.SIGTERM, interrupt)
        if signal.getsignal(signal.SIGINT) is signal.default_int_handler:  # a shell's background job ignores it
            signal.signal(signal.SIGINT, interrupt)
        sys.unraisablehook = repeat_interrupt
    try:
        status = int(app(words, prog_name="gdp", standalone_mode=False) or OK)
        with quiet_pipe():
            sys.stdout.flush()
    except (InputError, typer.TyperException) as error:
        if shows_traceback:
            log("".join(traceback.format_exception(error)).rstrip())
        message = error.format_message() if isinstance(error, typer.TyperException) else str(error)
        status = fail(f"error: {' '.join(message.split())}", BAD_INPUT)
    except (KeyboardInterrupt, typer.Abort):
        status = INTERRUPTED
    except Exception:
        if not interrupts:
            raise
        status = INTERRUPTED  # an import that an interrupt cuts short may fail with an error of its own
    if is_alone or (args is None and status == INTERRUPTED):
        for number in (signal.SIGINT, signal.SIGTERM):  # the answer is out, and a second one changes nothing
            signal.signal(number, signal.SIG_IGN)
    if status == INTERRUPTED:
        fail("interrupted", INTERRUPTED)
    return status


def repeat_interrupt(unraisable: "sys.UnraisableHookArgs") -> None:
    """Repeats a Ctrl-C that came in a callback of compiled code, as when kernels are loaded, which Python ignores."""
    if issubclass(unraisable.exc_type, KeyboardInterrupt):
        threading.Timer(_REPEATED_S, os.kill, (os.getpid(), signal.SIGINT)).start()
    else:
        sys.__unraisablehook__(unraisable)


@app.callback(invoke_without_command=True)
def gdp(
    context: typer.Context,
    version: Annotated[bool, typer.Option("--version", help="Print the version.")] = False,
    _traceback: Annotated[
        bool, typer.Option(_TRACEBACK, help="Print where an error comes from; may follow any command.")
    ] = False,
) -> None:
    if version:
        from gdp import __version__

        print_text(f"gdp {__version__}")
        raise typer.Exit(OK)
    if context.invoked_subcommand is None:
        print_text(context.get_help())
        raise typer.Exit(OK)


@app.command()
@with_options
def compare(
    model: ModelArgument,
    devices: DevicesOption,
    placers: Annotated[
        str | None,
        typer.Option(
            metavar="A,B,...",
            help="Placers, and ddp, zero1, fsdp, megatron: MODEL as users train it on all accelerators. Default: the "
            "classical placers, auto, and for hf:DIR the modes of accelerate.",
        ),
    ] = None,
    budget: BudgetOption = "30s",
    seeds: Annotated[int, typer.Option(min=1, help="Runs of each placer.")] = 3,
    checkpoint: CheckpointOption = None,
    *,
    limits: ConstraintOptions,
    model_options: ReadingOptions,
    threads: ThreadsOption = None,
    json: JsonOption = False,
) -> int:
    """Run several placers on MODEL and DEVICES with several seeds, each with the whole budget."""
    from gdp.report import progress

    with progress.live("loading gdp"):
        from gdp.budget import Budget
        from gdp.cluster import Cluster

        limit, reading = Budget.parse(budget), model_options.reading()
        cluster = Cluster.parse(devices)
        constraints = limits.constraints(cluster)
        names, rivals = split_rivals(model, placers, model_options.microbatches)
        check_placers(names)
        check_checkpoint(checkpoint, names)
        check_rivals(rivals, model, reading)
    source = read_graph(model, reading)
    graph = source.graph
    title = f"{graph.name} on {cluster.name}"
    line, runs_left = progress.StatusLine(title), len(names) * seeds
    with progress.live(f"preparing {title}"):
        modes = find_rivals(rivals, model, reading, cluster, constraints)
    warm_up(names)
    from gdp.planning.compare import compare as run
    from gdp.report import console, documents

    def on_start(placer: str, seed: int) -> None:
        nonlocal runs_left
        seconds_left = None if limit.seconds is None else runs_left * limit.seconds
        line.say(f"{title}: {placer}, seed {seed}", seconds_left)
        runs_left -= 1

    with progress.stop_on_interrupt() as stop, progress.live(line):
        comparison = run(
            graph,
            cluster,
            constraints,
            placers=names,
            rivals=modes,
            budget=limit,
            seeds=seeds,
            checkpoint=checkpoint,
            num_threads=threads,
            on_start=on_start,
            stop=stop,
        )
    if json:
        print_json(documents.compare_document(graph, cluster, comparison, str(limit), source.served))
    else:
        show(console.compare_report(comparison, source.served))
    if comparison.interrupted:
        return INTERRUPTED
    if all(row.step_time_ns is None for row in comparison.rows):
        return fail("nothing fits in memory; `gdp place` says how much is missing", NOTHING_FITS)
    return OK


@app.command()
@with_options
def simulate(
    graph: Annotated[str, typer.Argument(metavar="GRAPH", help="A gdp-graph file, or any other MODEL.")],
    devices: DevicesOption,
    plan: Annotated[Path, typer.Option(metavar="PLAN", help="A gdp-plan file.")],
    *,
    limits: ConstraintOptions,
    model_options: ReadingOptions,
    batches: BatchesOption = None,
    json: JsonOption = False,
) -> int:
    """Derive every figure of a plan anew.

    Exit status 2 if the plan has other figures, 3 if it exceeds memory or breaks a constraint.
    """
    from gdp.cluster import Cluster
    from gdp.simulator.plan import Plan

    reading = model_options.reading()
    cluster = Cluster.parse(devices)
    read = Plan.load(plan)
    constraints = limits.constraints(cluster)
    source = read_planned(graph, reading, read)
    problem = build_problem(source.graph, cluster, constraints)
    warm_up(())
    from gdp.report import console, documents, sentences
    from gdp.report.progress import live

    with live(f"deriving the figures of {plan}"):
        from gdp.bounds.lower_bound import lower_bound
        from gdp.cli.batches import throughput_of
        from gdp.simulator.simulate import replay, verify

        try:
            simulation = replay(problem, read)
            wrong = [text for text in verify(problem, read) if text not in simulation.reasons]
        except InputError as error:
            raise InputError(f"{plan}: {error}") from None
        bound_ns = lower_bound(problem)
        throughput = throughput_of(problem, read, simulation, batches)
    if not wrong and read.lower_bound_ns > bound_ns:
        wrong.append(f"lower_bound_ns is {read.lower_bound_ns}; the bound is {bound_ns}")
    if wrong:
        raise InputError(f"{plan}: the figures are not those of the plan: {', '.join(wrong)}; place the graph anew")
    if json:
        figures = {} if throughput is None else {"throughput": throughput.document()}
        print_json(documents.simulate_document(read, simulation, bound_ns, source.served) | figures)
    else:
        show(console.simulate_report(read, simulation, bound_ns, source.served, throughput))
    if throughput is not None and simulation.feasible and throughput.missing_bytes.any():
        lacking = sentences.lacking(cluster, throughput.missing_bytes)
        return fail(f"{batches} batches in flight do not fit: {lacking}", NOTHING_FITS)
    return OK if simulation.feasible else fail(f"does not fit: {'; '.join(simulation.reasons)}", NOTHING_FITS)


@app.command()
@with_options
def capture(
    model: ModelArgument,
    out: Annotated[
        Path, typer.Option(metavar="GRAPH.json.gz", help="The file to write: .json, .json.gz or .safetensors.")
    ],
    *,
    model_options: ReadingOptions,
    json: JsonOption = False,
) -> int:
    """Write the graph of one step of MODEL."""
    from gdp.cli import values

    if not out.name.endswith(_GRAPH_FILES):
        raise InputError(f"--out {out}: a name that ends in .json, .json.gz or .safetensors is expected")
    reading = model_options.reading()
    values.check_writable(out)
    source = read_graph(model, reading)
    is_like_it = model.endswith(".safetensors") == out.name.endswith(".safetensors")  # else a file in the other form
    if model.endswith(_GRAPH_FILES) and is_like_it and model_options.microbatches == 1:
        raise InputError(f"{model}: is a gdp-graph file already; name a workload or module:function")
    from gdp.report.progress import live

    with live(f"writing {out}"):
        source.graph.save(out)
        from gdp.report import console, documents

    if json:
        unknown = dict(source.unknown_costs)
        print_json({**documents.graph_document(source.graph), "unknown_costs": unknown, "path": str(out)})
    else:
        show(console.capture_report(source.graph, source.unknown_costs, str(out)))
    return OK


@app.command()
def train(
    graphs: Annotated[
        list[str],
        typer.Argument(
            metavar="GRAPH...",
            help="gdp-graph files, MODELs, directories of gdp architectures, or training-set: all built-in graphs.",
        ),
    ],
    out: Annotated[Path, typer.Option(metavar="CHECKPOINT", help="The file to write, such as my.safetensors.")],
    devices: Annotated[
        list[str] | None,
        typer.Option(
            metavar="DEVICES",
            help="Every graph is placed on every one. Default: the usual devices of a workload. Repeatable.",
        ),
    ] = None,
    hold_out: Annotated[
        list[str] | None,
        typer.Option(metavar="FAMILY", help="Leave out this family of models and similar ones. Repeatable."),
    ] = None,
    resume: Annotated[bool, typer.Option("--resume", help="Continue CHECKPOINT, with the same arguments.")] = False,
    start: Annotated[
        Path | None, typer.Option("--from", metavar="CHECKPOINT", help="Start from the parameters in this file.")
    ] = None,
    policy: Annotated[str | None, typer.Option(help="default, or paper: GDP as published.")] = None,
    styles: Annotated[
        int | None,
        typer.Option(
            metavar="H", min=1, help="Learn which styles suit a problem, by H numbers a layer; N is of problems."
        ),
    ] = None,
    updates: Annotated[
        int, typer.Option(metavar="N", min=1, help="Number of updates, over which the learning rate falls.")
    ] = 500,
    budget: Annotated[str | None, typer.Option(metavar="TIME", help="Stop earlier, such as after 10m or 2h.")] = None,
    graphs_per_update: Annotated[
        int | None, typer.Option(metavar="G", min=1, help="Graphs in an update. Default: all, at most 8.")
    ] = None,
    samples: Annotated[
        int | None,
        typer.Option(
            metavar="S",
            min=2,
            help="Placements of a graph in an update. Default: 16; with --styles 192, a multiple of 8.",
        ),
    ] = None,
    learning_rate: Annotated[float | None, typer.Option(help="Learning rate of Adam. Default: the policy's.")] = None,
    randomize: Annotated[bool, typer.Option("--randomize", help="Vary devices, links, memory and batch size.")] = False,
    validation: Annotated[
        list[str] | None,
        typer.Option(metavar="GRAPH", help="Keep the parameters that are best on this graph. Repeatable."),
    ] = None,
    validation_family: Annotated[
        list[str] | None,
        typer.Option(metavar="FAMILY", help="Of directories, keep this family to validate on. Repeatable."),
    ] = None,
    validate_every: Annotated[
        int | None, typer.Option(metavar="K", min=1, help="Validate every K updates. Default: 20.")
    ] = None,
    pool: Annotated[
        int | None,
        typer.Option(
            metavar="P",
            min=0,
            help="Problems kept, for 32 updates each; 0: all new ones. Default: at most 128.",
        ),
    ] = None,
    save_every: Annotated[
        int | None, typer.Option(metavar="K", min=1, help="Write CHECKPOINT every K updates. Default: 10.")
    ] = None,
    seed: Annotated[int, typer.Option(min=0, max=2**63 - 1, help="Seed of the training.")] = 0,
    threads: ThreadsOption = None,
    tensorboard: Annotated[Path | None, typer.Option(metavar="DIR", help="Write TensorBoard scalars there.")] = None,
    json: JsonOption = False,
) -> int:
    """Train a policy on graphs; Ctrl-C saves. Under torchrun (-m gdp train ...), processes share the graphs."""
    from gdp.cli.train import TrainOptions, run

    trained = run(
        TrainOptions(
            graphs=graphs,
            devices=devices or (),
            hold_out=hold_out or (),
            out=out,
            resume=resume,
            start=start,
            policy=policy,
            styles=styles,
            updates=updates,
            budget=budget,
            graphs_per_update=graphs_per_update,
            samples=samples,
            learning_rate=learning_rate,
            randomize=randomize,
            validation=validation or (),
            validation_families=validation_family or (),
            validate_every=validate_every,
            pool=pool,
            save_every=save_every,
            seed=seed,
            threads=threads,
            tensorboard=tensorboard,
            command=shlex.join(["gdp", *sys.argv[1:]]),
        ),
        partial(warm_up, ("gdp-zero-shot",)),
    )
    if trained.is_first and json:
        print_json(trained.to_document())
    elif trained.is_first:
        print_text(trained.to_text())
    return INTERRUPTED if trained.interrupted else OK


@app.command()
def workloads(
    variants: Annotated[
        bool, typer.Option("--variants", help="List the variants for training policies instead.")
    ] = False,
    json: JsonOption = False,
) -> int:
    """List the built-in models."""
    from gdp.models import workloads as built_in

    rows = [
        {
            "name": item.name,
            "family": item.family,
            "devices": item.cluster,
            "batch": item.batch_size,
            "description": item.description,
        }
        for item in map(built_in.get, built_in.variant_names() if variants else built_in.names())
    ]
    if json:
        print_json({"workloads": rows})
    else:
        from gdp.report import listings

        show(listings.rows_report(rows))
        if not variants:
            count = len(built_in.variant_names())
            print_text(f"\nMODEL may also be one of {count} smaller and larger variants: gdp workloads --variants")
    return OK
