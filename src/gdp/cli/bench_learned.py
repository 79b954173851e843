"""`gdp bench` for the learned placers: parses, calls, prints. A benchmark is imported when it runs."""

from pathlib import Path
from typing import Annotated

import typer

from gdp.cli.bench_shared import (
    CheckpointsOption,
    FineTuneOption,
    OutOption,
    RowsOption,
    SeedsOption,
    WorkloadsOption,
    names_in,
    show_page,
    workloads_in,
)
from gdp.cli.options import JsonOption

learned_app = typer.Typer(rich_markup_mode=None)


@learned_app.command("paper")
def bench_paper(
    checkpoints: CheckpointsOption,
    batch: Annotated[Path | None, typer.Option(metavar="FILE", help="Of gdp-batch; default: gdp's own policy.")] = None,
    workloads: WorkloadsOption = None,
    seeds: SeedsOption = 3,
    fine_tune_budget: FineTuneOption = "60s",
    one_budget: Annotated[str, typer.Option(metavar="TIME", help="Training from scratch.")] = "2m",
    hdp_factor: Annotated[float, typer.Option(help="HDP's processor time over that of fine-tuning.")] = 15.0,
    out: OutOption = None,
    rows: RowsOption = None,
    json: JsonOption = False,
) -> int:
    """The GDP paper's table on simulated P100s; takes hours, and with --rows goes on where it was stopped."""
    from gdp.bench.paper import PaperBenchmark
    from gdp.budget import Budget
    from gdp.models.workloads import paper_names

    benchmark = PaperBenchmark(
        checkpoints=checkpoints,
        seeds=seeds,
        fine_tune_budget=Budget.parse(fine_tune_budget),
        one_budget=Budget.parse(one_budget),
        hdp_factor=hdp_factor,
        batch=batch,
        workloads=workloads_in(workloads, paper_names()),
    )
    return show_page(benchmark, out, rows, json)


@learned_app.command("published")
def bench_published(
    evaluations: Annotated[int, typer.Option(min=1, help="Placements that a run simulates.")] = 20_000,
    patience: Annotated[int, typer.Option(min=1, help="In a row that bring nothing, and a run ends.")] = 3_000,
    workloads: Annotated[str | None, typer.Option(metavar="A,B,...", help="Default: six.")] = None,
    methods: Annotated[str | None, typer.Option(metavar="A,B,...", help="Default: all seven.")] = None,
    seeds: SeedsOption = 2,
    out: OutOption = None,
    rows: RowsOption = None,
    json: JsonOption = False,
) -> int:
    """GDP as published and HDP until they are flat, and what the paper's parts are worth."""
    from gdp.bench.published import METHODS, WORKLOADS, PublishedBenchmark

    benchmark = PublishedBenchmark(
        evaluations=evaluations,
        patience=patience,
        seeds=seeds,
        workloads=workloads_in(workloads, WORKLOADS),
        methods=names_in(methods, tuple(METHODS)),
    )
    return show_page(benchmark, out, rows, json)


@learned_app.command("published-batch")
def bench_published_batch(
    updates: Annotated[int, typer.Option(min=1, help="Of each training and fine-tuning.")] = 20,
    workloads: Annotated[str | None, typer.Option(metavar="A,B,...", help="Default: six.")] = None,
    choices: Annotated[str | None, typer.Option(metavar="A,B", help="Default: module,op.")] = None,
    seeds: Annotated[int, typer.Option(min=1, help="Runs of each training.")] = 1,
    out: OutOption = None,
    rows: RowsOption = None,
    json: JsonOption = False,
) -> int:
    """GDP as published, trained on several workloads, and on workloads that it has not seen."""
    from gdp.bench.published import WORKLOADS
    from gdp.bench.published_batch import CHOICES, PublishedBatchBenchmark

    benchmark = PublishedBatchBenchmark(
        updates=updates,
        seeds=seeds,
        choices=names_in(choices, CHOICES),
        workloads=workloads_in(workloads, WORKLOADS),
    )
    return show_page(benchmark, out, rows, json)


@learned_app.command("generalization")
def bench_generalization(
    checkpoints: CheckpointsOption,
    workloads: Annotated[str | None, typer.Option(metavar="A,B,...", help="Default: all that are built in.")] = None,
    seeds: SeedsOption = 3,
    fine_tune_budget: FineTuneOption = "60s",
    out: OutOption = None,
    rows: RowsOption = None,
    json: JsonOption = False,
) -> int:
    """The policy on families that it was not trained on, zero-shot and fine-tuned."""
    from gdp.bench.generalization import GeneralizationBenchmark
    from gdp.budget import Budget
    from gdp.models import workloads as built_in

    benchmark = GeneralizationBenchmark(
        checkpoints=checkpoints,
        seeds=seeds,
        fine_tune_budget=Budget.parse(fine_tune_budget),
        workloads=workloads_in(workloads, built_in.names()),
    )
    return show_page(benchmark, out, rows, json)


@learned_app.command("trained")
def bench_trained(
    checkpoint: Annotated[
        list[Path],
        typer.Option(metavar="FILE", help="The trained policy. Repeatable: others of its kind, to compare with."),
    ],
    drawn: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Drawn graphs too, of other seeds than it was trained on.")
    ] = None,
    graphs: Annotated[int, typer.Option(min=1, help="Number of them.")] = 26,
    workloads: Annotated[str | None, typer.Option(metavar="A,B,...", help="Default: all that are built in.")] = None,
    budget: Annotated[str, typer.Option(metavar="TIME", help="Processor time of a run.")] = "3s",
    seeds: SeedsOption = 2,
    out: OutOption = None,
    rows: RowsOption = None,
    json: JsonOption = False,
) -> int:
    """A trained policy against the untrained one, at equal simulations and at equal time."""
    from gdp.bench.trained import TrainedBenchmark
    from gdp.budget import Budget
    from gdp.models import workloads as built_in

    benchmark = TrainedBenchmark(
        checkpoint=tuple(checkpoint),
        drawn=drawn,
        graphs=graphs,
        budget=Budget.parse_time(budget),
        seeds=seeds,
        workloads=workloads_in(workloads, built_in.names()),
    )
    return show_page(benchmark, out, rows, json)


@learned_app.command("ablation")
def bench_ablation(
    budget: Annotated[str, typer.Option(metavar="TIME", help="Processor time of each training.")] = "10m",
    seeds: Annotated[int, typer.Option(min=1, help="Trainings of each variant.")] = 3,
    hold_out: Annotated[
        list[str] | None, typer.Option(metavar="FAMILY", help="Place it, with families like it. Repeatable.")
    ] = None,
    out: OutOption = None,
    rows: RowsOption = None,
    json: JsonOption = False,
) -> int:
    """The worth of each part of the policy: trained without it, and placed beside controls that learnt nothing."""
    from gdp.bench.ablation import HOLD_OUT, AblationBenchmark
    from gdp.budget import Budget

    families = tuple(hold_out or HOLD_OUT)
    return show_page(
        AblationBenchmark(budget=Budget.parse_time(budget), seeds=seeds, hold_out=families), out, rows, json
    )


@learned_app.command("convergence")
def bench_convergence(
    checkpoints: Annotated[Path | None, typer.Option(metavar="DIR", help="Of `gdp train --hold-out FAMILY`.")] = None,
    checkpoint: Annotated[Path | None, typer.Option(metavar="FILE", help="One policy for all workloads.")] = None,
    workloads: Annotated[
        str | None, typer.Option(metavar="A,B,...", help="Default: one of each papers' family.")
    ] = None,
    budget: Annotated[str, typer.Option(metavar="TIME", help="Processor time of a run.")] = "60s",
    seeds: SeedsOption = 5,
    out: OutOption = None,
    rows: RowsOption = None,
    json: JsonOption = False,
) -> int:
    """The best step time against processor time: the policy, HDP and the search, side by side."""
    from gdp.bench.convergence import WORKLOADS, ConvergenceBenchmark
    from gdp.budget import Budget

    benchmark = ConvergenceBenchmark(
        budget=Budget.parse_time(budget),
        seeds=seeds,
        workloads=workloads_in(workloads, WORKLOADS),
        checkpoints=checkpoints,
        checkpoint=checkpoint,
    )
    return show_page(benchmark, out, rows, json)
