"""Parses, calls and prints: `gdp compare`."""

from pathlib import Path
from typing import Annotated, Any

import typer

from gdp.cli import options
from gdp.cli.shared import INTERRUPTED, NOTHING_FITS, OK, fail, log, print_json, show, warm_up
from gdp.errors import InputError, prefixed


@options.with_options
def compare(
    plan_or_model: options.PlanOrModelArgument,
    devices: options.PlacedDevicesOption = None,
    runtime: options.RuntimeOption = None,
    placers: Annotated[
        str | None,
        typer.Option(
            metavar="A,B,...",
            help="Placers, and ddp, zero1, fsdp, megatron, fsdp-tp, vllm: MODEL as users run it on all accelerators. "
            "Default: the classical placers, auto, and for hf:DIR the modes of accelerate.",
        ),
    ] = None,
    budget: options.BudgetOption = "30s",
    seeds: Annotated[int, typer.Option(min=1, help="Runs of each placer.")] = 3,
    checkpoint: options.CheckpointOption = None,
    *,
    limits: options.ConstraintOptions,
    model_options: options.ReadingOptions,
    given: options.Given,
    threads: options.ThreadsOption = None,
    json: options.JsonOption = False,
) -> int:
    """Run placers on what a plan was asked, or on MODEL and DEVICES, with several seeds, each with the whole budget."""
    from gdp.report import progress

    with progress.live("loading gdp"):
        from gdp.budget import Budget
        from gdp.cli import inputs
        from gdp.cli.request import PlaceRequest
        from gdp.cluster import Cluster
        from gdp.cluster.device import split_runtime
        from gdp.cluster.quantities import parse_fraction
        from gdp.files import format_of
        from gdp.models.measured_times import MeasuredTimes, check_runtimes
        from gdp.models.source import ModelSource
        from gdp.parallel.layout import AUTO, NONE, Layout
        from gdp.planning.options import run_by
        from gdp.search.place_question import SearchOptions
        from gdp.simulator.plan import FORMAT, Asked

        asked: dict[str, Any] = {}  # of a plan: `auto` answers what it was asked
        if format_of(plan_or_model) == FORMAT:
            planned = inputs.open_plan(Path(plan_or_model), given)
            with prefixed(plan_or_model):
                planned.plan.check_runnable("compared")
            budget = given.get("budget", planned.options.get("budget", budget))
            with prefixed(plan_or_model):
                source, asked = planned.model, planned.resolved
                checkpoint = given.get("checkpoint", asked.get("checkpoint"))
                own = runtime or split_runtime(devices or "")[1] or split_runtime(planned.plan.question.cluster)[1]
                if devices is not None:
                    cluster = Cluster.parse(run_by(devices, own, source.reading.serving))
                else:
                    cluster = planned.cluster if runtime is None else planned.cluster.run_by(runtime)
                if (times := asked.get("times")) is not None:
                    check_runtimes(cluster, is_trained=source.reading.training)
                    source = source.timed(MeasuredTimes(times), cluster)
            limits = options.group_of(options.ConstraintOptions, asked)
        elif devices is None:
            raise InputError(f"{plan_or_model}: is no plan; name the devices to place it on with --devices")
        else:
            source = ModelSource(plan_or_model, model_options.reading())
            cluster = Cluster.parse(run_by(devices, runtime, source.reading.serving))
        parallel, target, robust, times, batches = map(asked.get, ("parallel", "target", "robust", "times", "batches"))
        request = PlaceRequest(
            source=source,
            devices=cluster.name,
            cluster=cluster,
            constraints=limits.constraints(cluster),
            parallel=parallel if parallel in (None, AUTO, NONE) else Layout.parse(parallel),
            batches=batches,
            budget=Budget.parse(budget),
            options=SearchOptions(
                robust=None if robust is None else parse_fraction(robust, "--robust", below=0.5),
                checkpoint=checkpoint,
                num_threads=threads,
            ),
            times=None if times is None else Path(times),
            target=None if target is None else options.group_of(options.TargetOptions, asked).target(target),
            asked=Asked(),
        )
        names, rivals = inputs.split_rivals(source, (placers or AUTO) if batches else placers)
        inputs.check_placers(names)
        inputs.check_checkpoint(given.get("checkpoint"), names)
        inputs.check_rivals(rivals, source)
    read = request.read()
    graph = read.graph
    title = f"{graph.name} on {cluster.name}"
    line, runs_left, limit = progress.StatusLine(title), len(names) * seeds, request.budget
    with progress.live(f"preparing {title}"):
        modes = inputs.find_rivals(rivals, source, cluster, request.constraints)
    warm_up(names)
    from gdp.planning.compare import compare_answers
    from gdp.report import console, documents

    request, question = request.opened(read)
    if request.target is not None and AUTO in names:
        log(f"gdp: note: auto places {request.target.level}, as {request.target.name} does; other placers single ops")
    if AUTO in names:
        with progress.live(f"reading a part of the batch of {graph.name}"):
            question.prepare()

    def on_start(placer: str, seed: int) -> None:
        nonlocal runs_left
        seconds_left = None if limit.seconds is None else runs_left * limit.seconds
        line.say(f"{title}: {placer}, seed {seed}", seconds_left)
        runs_left -= 1

    with progress.stop_on_interrupt() as stop, progress.live(line):
        comparison = compare_answers(
            question, names, limit, seeds, request.find, rivals=modes, on_start=on_start, stop=stop
        )
    served = None if batches else read.served
    if json:
        print_json(documents.compare_document(graph, cluster, comparison, str(limit), served))
    else:
        show(console.compare_report(comparison, served))
    if comparison.interrupted:
        return INTERRUPTED
    if all(row.step_time_ns is None for row in comparison.rows):
        return fail("nothing fits in memory; `gdp place` says how much is missing", NOTHING_FITS)
    return OK
