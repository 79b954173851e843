"""Parses, calls and prints: `gdp compare`."""

from pathlib import Path
from typing import Annotated

import typer

from gdp.cli.inputs import (
    check_checkpoint,
    check_placers,
    check_rivals,
    find_rivals,
    open_plan,
    read_graph,
    split_rivals,
)
from gdp.cli.options import (
    BudgetOption,
    CheckpointOption,
    ConstraintOptions,
    Given,
    JsonOption,
    PlacedDevicesOption,
    PlanOrModelArgument,
    ReadingOptions,
    ThreadsOption,
    group_of,
    with_options,
)
from gdp.cli.shared import INTERRUPTED, NOTHING_FITS, OK, fail, print_json, show, warm_up
from gdp.errors import InputError, prefixed


@with_options
def compare(
    plan_or_model: PlanOrModelArgument,
    devices: PlacedDevicesOption = None,
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
    given: Given,
    threads: ThreadsOption = None,
    json: JsonOption = False,
) -> int:
    """Run placers on what a plan was asked, or on MODEL and DEVICES, with several seeds, each with the whole budget."""
    from gdp.report import progress

    with progress.live("loading gdp"):
        from gdp.budget import Budget
        from gdp.cluster import Cluster
        from gdp.files import format_of
        from gdp.models.source import ModelSource
        from gdp.simulator.plan import FORMAT

        if format_of(plan_or_model) == FORMAT:
            planned = open_plan(Path(plan_or_model), given)
            budget = given.get("budget", planned.options.get("budget", budget))
            with prefixed(plan_or_model):
                source, options = planned.model, planned.options
                cluster = planned.cluster if devices is None else Cluster.parse(devices)
            limits = group_of(ConstraintOptions, options)
        elif devices is None:
            raise InputError(f"{plan_or_model}: is no plan; name the devices to place it on with --devices")
        else:
            source, cluster = ModelSource(plan_or_model, model_options.reading()), Cluster.parse(devices)
        limit, constraints = Budget.parse(budget), limits.constraints(cluster)
        names, rivals = split_rivals(source, placers)
        check_placers(names)
        check_checkpoint(checkpoint, names)
        check_rivals(rivals, source)
    read = read_graph(source)
    graph = read.graph
    title = f"{graph.name} on {cluster.name}"
    line, runs_left = progress.StatusLine(title), len(names) * seeds
    with progress.live(f"preparing {title}"):
        modes = find_rivals(rivals, source, cluster, constraints)
    warm_up(names)
    from gdp.planning.compare import compare as run
    from gdp.report import console, documents
    from gdp.search.place_question import PlaceQuestion, SearchOptions

    parts = None
    if "auto" in names:
        with progress.live(f"reading a part of the batch of {graph.name}"):
            question = PlaceQuestion.of(source, cluster, constraints, None, None, SearchOptions(), read)
            question.prepare()
            parts = question.parts

    def on_start(placer: str, seed: int) -> None:
        nonlocal runs_left
        seconds_left = None if limit.seconds is None else runs_left * limit.seconds
        line.say(f"{title}: {placer}, seed {seed}", seconds_left)
        runs_left -= 1

    with progress.stop_on_interrupt() as stop, progress.live(line):
        comparison = run(
            parts or graph,
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
        print_json(documents.compare_document(graph, cluster, comparison, str(limit), read.served))
    else:
        show(console.compare_report(comparison, read.served))
    if comparison.interrupted:
        return INTERRUPTED
    if all(row.step_time_ns is None for row in comparison.rows):
        return fail("nothing fits in memory; `gdp place` says how much is missing", NOTHING_FITS)
    return OK
