"""Finds the best plan, with advice on the machine: `gdp place`."""

import os
import time
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from gdp.cli import options
from gdp.errors import InputError, prefixed

if TYPE_CHECKING:
    from gdp.export.export_target import ExportTarget
    from gdp.simulator.plan import Asked

# of the answer, or, the runtime, part of DEVICES
_NOT_ASKED = "model", "devices", "runtime", "sweep", "prices", "requests", "advice", "with_cache", "out", "json"


@options.with_options
def place(
    model: options.ModelArgument,
    devices: options.DevicesOption = None,
    runtime: options.RuntimeOption = None,
    placer: Annotated[str, typer.Option(help="auto runs classical placers, then searches.")] = "auto",
    budget: options.BudgetOption = "30s",
    seed: Annotated[int, typer.Option(min=0, max=2**63 - 1, help="Seed of the search.")] = 0,
    checkpoint: options.CheckpointOption = None,
    *,
    limits: options.ConstraintOptions,
    robust: Annotated[
        str | None,
        typer.Option(
            metavar="SHARE", help="Noise of op times in the comparison of op placements. Default: as measured, or 2%."
        ),
    ] = None,
    model_options: options.ReadingOptions,
    parallel: Annotated[
        str | None,
        typer.Option(
            metavar="LAYOUT",
            help="How the step is cut: none, auto, or data=4,tensor=2,microbatches=8,zero=1,recompute=auto,stages=2. "
            "Default: auto to train a batch that can be split; forward passes try groups of cards.",
        ),
    ] = None,
    batches: options.BatchesOption = None,
    requests: Annotated[
        float | None,
        typer.Option(metavar="RATE", help="Times of a decoder with so many requests per second (?prompt=)."),
    ] = None,
    sweep: Annotated[
        str | None,
        typer.Option(
            metavar="WHAT=1..8",
            help="Print a table over devices=1..8, batch=1..256, microbatches=1..8 or machines=A,B, each with BUDGET.",
        ),
    ] = None,
    prices: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Dollars an hour and watts for --sweep, a line a kind of device in YAML."),
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
    target_options: options.TargetOptions,
    threads: options.ThreadsOption = None,
    with_cache: Annotated[
        bool,
        typer.Option("--cache/--no-cache", help="Answer an identical question with the plan that was found before."),
    ] = True,
    out: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Write plan.json, graph.json.gz, cluster.json, report.html.")
    ] = None,
    given: options.Given,
    json: options.JsonOption = False,
) -> int:
    """Find the best plan of MODEL on DEVICES within the budget, and write it to plan.json.

    A plan.json of another graph stays: the plan is plan-2.json then."""
    from gdp.report.progress import live

    with live("loading gdp"):
        from gdp.budget import Budget
        from gdp.cli.answer import respond
        from gdp.cli.inputs import check_checkpoint
        from gdp.cli.request import PlaceRequest
        from gdp.cli.sweep import sweep_place
        from gdp.cluster import Cluster
        from gdp.cluster.prices import Prices
        from gdp.cluster.quantities import parse_fraction
        from gdp.models.shards import WHOLE
        from gdp.models.source import ModelSource
        from gdp.parallel.layout import AUTO, NONE, Layout
        from gdp.planning.options import run_by
        from gdp.planning.sweep import MACHINES, Sweep
        from gdp.search.place_question import SearchOptions

        began_s, limit = time.monotonic(), Budget.parse(budget)
        table = None if sweep is None else Sweep.parse(sweep)
        if (table is not None and table.what == MACHINES) == (devices is not None):
            raise InputError(
                "--sweep machines: names the devices of each row; leave --devices out"
                if devices is not None
                else "--devices: name the devices to place it on, such as 2xrtx4090-24g+cpu-16core"
            )
        if prices is not None and table is None:
            raise InputError("--prices: the table of --sweep has them; add --sweep devices=1..8, for instance")
        known_prices = Prices() if prices is None else Prices.load(prices)
        if runtime is not None and devices is None:
            raise InputError("--runtime: write it behind each of --sweep machines, as in 4xa100-sxm-80g:compile")
        reading = model_options.reading()
        devices = run_by(devices or str(table.values[0] if table is not None else ""), runtime, reading.serving)
        cluster = Cluster.parse(devices)
        tool = _target(target, target_options, placer, sweep, checkpoint)
        if tool is not None and tool.reserve and "reserve" not in given:
            given["reserve"] = f"{tool.reserve:.0%}"
            limits = replace(limits, reserve=given["reserve"])
        row = f"--sweep {MACHINES}={devices}" if table is not None and table.what == MACHINES else None
        with nullcontext() if row is None else prefixed(row):
            constraints = limits.constraints(cluster)
        noise = None if robust is None else parse_fraction(robust, "--robust", below=0.5)
        search = SearchOptions(placer=placer, seed=seed, robust=noise, checkpoint=checkpoint, num_threads=threads)
        layout = parallel if parallel in (None, AUTO, NONE) else Layout.parse(parallel)
        source = ModelSource(model, reading)
        if isinstance(layout, Layout) and layout.shards != WHOLE:
            if layout.shards.shares and sweep is not None:
                raise InputError(f"--sweep: shares are those of known cards; leave it or {layout} out")
            cluster.grouped(layout.shards.num_ranks, layout.shards.shares)  # refused before the model is read
            source = source.sharded(layout.shards, cluster)
        request = PlaceRequest(
            source=source,
            devices=devices,
            cluster=cluster,
            constraints=constraints,
            parallel=layout,
            batches=batches,
            requests=requests,
            budget=limit,
            options=search,
            times=times,
            target=tool,
            with_cache=with_cache,
            with_advice=advice and placer == AUTO and target is None and batches is None,
            out=out,
            json=json,
            asked=_asked(model, devices, given, placer=placer, budget=budget, seed=seed),
            began_s=began_s,
        )
        check_checkpoint(checkpoint, [placer])
        request.check(sweep)
        if times is not None and table is None:
            from gdp.models.measured_times import MeasuredTimes

            request = replace(request, source=request.source.timed(MeasuredTimes(times), cluster))
    return respond(request) if table is None else sweep_place(request, table, limits, known_prices)


def _asked(model: str, devices: str, given: options.Given, **always: Any) -> "Asked":
    """Returns the question as it was typed, with the options that a plan depends on."""
    from gdp.simulator.plan import Asked

    asked = {name: value for name, value in given.items() if name not in _NOT_ASKED}
    return Asked(model, asked | always, devices, os.getcwd())


def _target(
    name: str | None, target: options.TargetOptions, placer: str, sweep: str | None, checkpoint: str | None
) -> "ExportTarget | None":
    if name is None:
        target.check_unused()
        return None
    if placer != "auto" or sweep is not None:
        raise InputError("--for: places with auto, once; leave out --placer and --sweep")
    if checkpoint is not None:
        raise InputError("--for: places without a policy; leave out --checkpoint")
    return target.target(name)
