"""`gdp bench`: parse, call, print. What a command needs is imported when it runs."""

from pathlib import Path
from typing import Annotated, Any

import typer

from gdp.cli.shared import BudgetOption, JsonOption, log, print_json, print_text

bench_app = typer.Typer(help="Reproduce a table of docs/results.md.", rich_markup_mode=None)

CheckpointsOption = Annotated[
    Path, typer.Option(metavar="DIR", help="Checkpoints of `gdp train training-set --hold-out FAMILY`.")
]
FineTuneOption = Annotated[str, typer.Option(metavar="TIME", help="Training on a workload.")]
OutOption = Annotated[Path | None, typer.Option(metavar="DIR", help="Write figures, and plans if any, there.")]
ResumableOption = Annotated[
    Path | None, typer.Option(metavar="DIR", help="Write figures and plans there; runs found there are not made again.")
]
SeedsOption = Annotated[int, typer.Option(min=1, help="Runs of each workload.")]
WorkloadsOption = Annotated[str | None, typer.Option(metavar="A,B,...", help="Default: the papers' fourteen.")]


@bench_app.command("search")
def bench_search(
    workloads: WorkloadsOption = None,
    budget: BudgetOption = "30s",
    seeds: SeedsOption = 3,
    out: OutOption = None,
    json: JsonOption = False,
) -> int:
    """How much faster `auto` is than the best classical placer and the expert, on the papers' workloads."""
    from gdp.bench import search
    from gdp.budget import Budget

    limit = Budget.parse(budget)
    names = _names(workloads) or search.PAPER_WORKLOADS
    return _answer(search.run(workloads=names, budget=limit, seeds=seeds, out=out, on_row=log), json)


@bench_app.command("machines")
def bench_machines(
    workloads: Annotated[str | None, typer.Option(metavar="A,B,...", help="Default: twenty.")] = None,
    machines: Annotated[str | None, typer.Option(metavar="A,B,...", help="Default: all seven.")] = None,
    budget: Annotated[str, typer.Option(metavar="TIME", help="Of processor, for each search.")] = "10s",
    seeds: SeedsOption = 1,
    out: ResumableOption = None,
    json: JsonOption = False,
) -> int:
    """`auto` on unequal devices, several hosts and pairs of cards, against every classical placer."""
    from gdp.bench import machines as bench
    from gdp.budget import Budget

    limit = Budget.parse(budget)
    names, chosen = _names(workloads), None if machines is None else [name.strip() for name in machines.split(",")]
    return _answer(bench.run(names=names, machines=chosen, budget=limit, seeds=seeds, out=out, on_row=log), json)


@bench_app.command("ecosystem")
def bench_ecosystem(
    models: Annotated[str | None, typer.Option(metavar="A,B,...", help="Default: twelve of `bench capture`.")] = None,
    machines: Annotated[str | None, typer.Option(metavar="A,B,...", help="Default: all.")] = None,
    budget: Annotated[str, typer.Option(metavar="TIME", help="Of processor, for each search.")] = "10s",
    seeds: SeedsOption = 1,
    out: ResumableOption = None,
    json: JsonOption = False,
) -> int:
    """`auto` against the device maps of Hugging Face's accelerate, on Transformers models."""
    from gdp.bench import ecosystem as bench
    from gdp.bench import model_configs
    from gdp.budget import Budget

    limit = Budget.parse(budget)
    names = None if models is None else [model_configs.get(name.strip()).name for name in models.split(",")]
    chosen = None if machines is None else [name.strip() for name in machines.split(",")]
    return _answer(bench.run(names=names, machines=chosen, budget=limit, seeds=seeds, out=out, on_row=log), json)


@bench_app.command("microbatches")
def bench_microbatches(
    models: Annotated[str | None, typer.Option(metavar="A,B,...", help="Default: bert,llama,gnmt.")] = None,
    budget: Annotated[str, typer.Option(metavar="TIME", help="Of processor, for each search.")] = "20s",
    seeds: SeedsOption = 1,
    out: ResumableOption = None,
    json: JsonOption = False,
) -> int:
    """Pipelines of 1 to 16 micro-batches on 4 and 8 devices, against contiguous stages."""
    from gdp.bench import microbatches as bench
    from gdp.budget import Budget

    limit, chosen = Budget.parse(budget), None if models is None else [name.strip() for name in models.split(",")]
    return _answer(bench.run(models=chosen, budget=limit, seeds=seeds, out=out, on_row=log), json)


@bench_app.command("simulator")
def bench_simulator(out: OutOption = None, json: JsonOption = False) -> int:
    """Simulations per second, against the plain-Python reference and against the size of the graph."""
    from gdp.bench import simulator

    return _answer(simulator.run(out=out, on_row=log), json)


@bench_app.command("capture")
def bench_capture(
    models: Annotated[str | None, typer.Option(metavar="A,B,...", help="Default: all fifteen.")] = None,
    out: OutOption = None,
    json: JsonOption = False,
) -> int:
    """Ops, seconds and memory of captures of published models from their configs."""
    from gdp.bench import capture

    chosen = None if models is None else [name.strip() for name in models.split(",")]
    return _answer(capture.run(names=chosen, out=out, on_row=log), json)


@bench_app.command("paper")
def bench_paper(
    checkpoints: CheckpointsOption,
    batch: Annotated[Path | None, typer.Option(metavar="FILE", help="Of gdp-batch; default: gdp's own policy.")] = None,
    workloads: WorkloadsOption = None,
    seeds: SeedsOption = 3,
    fine_tune_budget: FineTuneOption = "60s",
    one_budget: Annotated[str, typer.Option(metavar="TIME", help="Training from scratch.")] = "2m",
    hdp_factor: Annotated[float, typer.Option(help="HDP's processor time over that of fine-tuning.")] = 15.0,
    out: ResumableOption = None,
    json: JsonOption = False,
) -> int:
    """The GDP paper's table on simulated P100s; takes hours, and with --out goes on where it was stopped."""
    from gdp.bench import paper
    from gdp.budget import Budget

    config = paper.PaperBenchConfig(
        checkpoints=checkpoints,
        batch=batch,
        seeds=seeds,
        fine_tune_budget=Budget.parse(fine_tune_budget),
        one_budget=Budget.parse(one_budget),
        hdp_factor=hdp_factor,
    )
    return _answer(paper.run(config, names=_names(workloads), out=out, on_row=log), json)


@bench_app.command("generalization")
def bench_generalization(
    checkpoints: CheckpointsOption,
    workloads: Annotated[str | None, typer.Option(metavar="A,B,...", help="Default: all that are built in.")] = None,
    seeds: SeedsOption = 3,
    fine_tune_budget: FineTuneOption = "60s",
    out: ResumableOption = None,
    json: JsonOption = False,
) -> int:
    """The policy on families that it was not trained on, zero-shot and fine-tuned."""
    from gdp.bench import generalization
    from gdp.budget import Budget

    limit, names = Budget.parse(fine_tune_budget), _names(workloads)
    return _answer(
        generalization.run(
            checkpoints=checkpoints, names=names, seeds=seeds, fine_tune_budget=limit, out=out, on_row=log
        ),
        json,
    )


@bench_app.command("ablation")
def bench_ablation(
    budget: Annotated[str, typer.Option(metavar="TIME", help="Processor time of each training.")] = "10m",
    seeds: Annotated[int, typer.Option(min=1, help="Trainings of each variant.")] = 3,
    hold_out: Annotated[
        list[str] | None, typer.Option(metavar="FAMILY", help="Place it, with families like it. Repeatable.")
    ] = None,
    out: ResumableOption = None,
    json: JsonOption = False,
) -> int:
    """What each part of the policy is worth: trained without it, and placed beside controls that learnt nothing."""
    from gdp.bench import ablation
    from gdp.budget import Budget

    limit, families = Budget.parse(budget), hold_out or ablation.HOLD_OUT
    return _answer(ablation.run(budget=limit, seeds=seeds, hold_out=families, out=out, on_row=log), json)


@bench_app.command("convergence")
def bench_convergence(
    checkpoints: Annotated[Path | None, typer.Option(metavar="DIR", help="Of `gdp train --hold-out FAMILY`.")] = None,
    checkpoint: Annotated[Path | None, typer.Option(metavar="FILE", help="One policy for all workloads.")] = None,
    workloads: Annotated[
        str | None, typer.Option(metavar="A,B,...", help="Default: one of each papers' family.")
    ] = None,
    budget: Annotated[str, typer.Option(metavar="TIME", help="Processor time of a run.")] = "60s",
    seeds: SeedsOption = 5,
    out: ResumableOption = None,
    json: JsonOption = False,
) -> int:
    """The best step time against processor time: the policy, HDP and the search, side by side."""
    from gdp.bench import convergence
    from gdp.budget import Budget

    limit, names = Budget.parse(budget), _names(workloads)
    return _answer(
        convergence.run(
            names=names, budget=limit, seeds=seeds, checkpoints=checkpoints, checkpoint=checkpoint, out=out, on_row=log
        ),
        json,
    )


def _names(text: str | None) -> tuple[str, ...] | None:
    """The workloads of `A,B,...`. InputError for what is none."""
    from gdp import workloads

    return None if text is None else tuple(workloads.get(name.strip()).name for name in text.split(","))


@bench_app.command("execution")
def bench_execution(
    workloads: Annotated[str | None, typer.Option(metavar="A,B,...", help="Default: all.")] = None,
    repeats: Annotated[int, typer.Option(min=1, help="Steps of the plan, and of one device.")] = 15,
    placements: Annotated[int, typer.Option(min=1, help="Predicted and measured.")] = 20,
    budget: BudgetOption = "10s",
    out: ResumableOption = None,
    json: JsonOption = False,
) -> int:
    """Plans run on this machine's own devices: faster than one device, and as predicted?"""
    from gdp.bench import execution
    from gdp.budget import Budget

    config = execution.ExecutionConfig(repeats=repeats, placements=placements, budget=Budget.parse(budget))
    names = None if workloads is None else _names(workloads)
    return _answer(execution.run(config, names=names, quick=False, out=out, on_row=log), json)


def _answer(figures: dict[str, Any], json: bool) -> int:
    if json:
        print_json(figures)
    else:
        print_text(figures["markdown"])
    return 0
