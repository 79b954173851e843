"""`gdp bench`: parses, calls, prints. A benchmark is imported when it runs."""

from pathlib import Path
from typing import Annotated

import typer

from gdp.cli.bench_learned import learned_app
from gdp.cli.bench_shared import (
    CpuBudgetOption,
    MachinesOption,
    OutOption,
    RowsOption,
    SeedsOption,
    WorkloadsOption,
    names_in,
    show_page,
    workloads_in,
)
from gdp.cli.options import BudgetOption, JsonOption

bench_app = typer.Typer(help="Reproduce a page of docs/results.", rich_markup_mode=None)
bench_app.add_typer(learned_app)


@bench_app.command("search")
def bench_search(
    workloads: WorkloadsOption = None,
    budget: BudgetOption = "30s",
    seeds: SeedsOption = 3,
    out: OutOption = None,
    rows: RowsOption = None,
    json: JsonOption = False,
) -> int:
    """`auto` on the workloads of the papers, against the best classical placer and the expert."""
    from gdp.bench.search import PAPER_WORKLOADS, SearchBenchmark
    from gdp.budget import Budget

    names = workloads_in(workloads, PAPER_WORKLOADS)
    benchmark = SearchBenchmark(budget=Budget.parse(budget), seeds=seeds, workloads=names)
    return show_page(benchmark, out, rows, json)


@bench_app.command("short")
def bench_short(
    workloads: Annotated[
        str | None, typer.Option(metavar="A,B,...", help="WORKLOAD or WORKLOAD:LAYOUT each. Default: 24.")
    ] = None,
    budgets: Annotated[str | None, typer.Option(metavar="A,B,...", help="Of processor time. Default: five.")] = None,
    seeds: SeedsOption = 2,
    out: OutOption = None,
    rows: RowsOption = None,
    json: JsonOption = False,
) -> int:
    """`auto` within 0.5 to 10 s, with the policy and without it."""
    from gdp.bench.short import BUDGETS, ShortBenchmark

    names = names_in(workloads, ShortBenchmark().workloads)
    return show_page(ShortBenchmark(seeds=seeds, workloads=names, budgets=names_in(budgets, BUDGETS)), out, rows, json)


@bench_app.command("machines")
def bench_machines(
    workloads: Annotated[str | None, typer.Option(metavar="A,B,...", help="Default: twenty.")] = None,
    machines: MachinesOption = None,
    budget: CpuBudgetOption = "10s",
    seeds: SeedsOption = 1,
    out: OutOption = None,
    rows: RowsOption = None,
    json: JsonOption = False,
) -> int:
    """`auto` on unequal devices, several hosts and pairs of cards, against every classical placer."""
    from gdp.bench.machines import MACHINES, NAMES, MachinesBenchmark
    from gdp.budget import Budget

    benchmark = MachinesBenchmark(
        budget=Budget.parse_time(budget),
        seeds=seeds,
        workloads=workloads_in(workloads, NAMES),
        machines=names_in(machines, tuple(machine.name for machine in MACHINES)),
    )
    return show_page(benchmark, out, rows, json)


@bench_app.command("ecosystem")
def bench_ecosystem(
    models: Annotated[str | None, typer.Option(metavar="A,B,...", help="Default: twelve of `bench capture`.")] = None,
    machines: MachinesOption = None,
    budget: CpuBudgetOption = "10s",
    seeds: SeedsOption = 1,
    out: OutOption = None,
    rows: RowsOption = None,
    json: JsonOption = False,
) -> int:
    """`auto` against the device maps of Hugging Face's accelerate, on Transformers models."""
    from gdp.bench.ecosystem import MACHINES, NAMES, EcosystemBenchmark
    from gdp.budget import Budget

    benchmark = EcosystemBenchmark(
        budget=Budget.parse_time(budget),
        seeds=seeds,
        models=names_in(models, NAMES),
        machines=names_in(machines, tuple(machine.name for machine in MACHINES)),
    )
    return show_page(benchmark, out, rows, json)


@bench_app.command("microbatches")
def bench_microbatches(
    models: Annotated[str | None, typer.Option(metavar="A,B,...", help="Default: bert,llama,gnmt.")] = None,
    budget: CpuBudgetOption = "20s",
    seeds: SeedsOption = 1,
    out: OutOption = None,
    rows: RowsOption = None,
    json: JsonOption = False,
) -> int:
    """Pipelines of 1 to 16 micro-batches on 4 and 8 devices, against contiguous stages."""
    from gdp.bench.microbatches import MODELS, MicrobatchesBenchmark
    from gdp.budget import Budget

    names = names_in(models, tuple(MODELS))
    return show_page(
        MicrobatchesBenchmark(budget=Budget.parse_time(budget), seeds=seeds, models=names), out, rows, json
    )


@bench_app.command("scale")
def bench_scale(
    budget: BudgetOption = "30s",
    devices: Annotated[str | None, typer.Option(metavar="A,B,...", help="DEVICES each.")] = None,
    out: OutOption = None,
    rows: RowsOption = None,
    json: JsonOption = False,
) -> int:
    """Seconds of each phase for steps of 50,000 to a million ops, and whether budgets are kept."""
    from gdp.bench.scale import DEVICES, ScaleBenchmark
    from gdp.budget import Budget

    benchmark = ScaleBenchmark(budget=Budget.parse_time(budget), devices=names_in(devices, DEVICES))
    return show_page(benchmark, out, rows, json)


@bench_app.command("simulator")
def bench_simulator(
    out: OutOption = None,
    compilation: Annotated[bool, typer.Option("--compilation", help="Seconds that each kernel compiles.")] = False,
    json: JsonOption = False,
) -> int:
    """Simulations per second, against the plain-Python reference and against the size of the graph."""
    from gdp.bench.compilation import CompilationBenchmark
    from gdp.bench.simulator import SimulatorBenchmark

    return show_page(CompilationBenchmark() if compilation else SimulatorBenchmark(), out, None, json)


@bench_app.command("capture")
def bench_capture(
    models: Annotated[str | None, typer.Option(metavar="A,B,...", help="Default: all.")] = None,
    out: OutOption = None,
    rows: RowsOption = None,
    json: JsonOption = False,
) -> int:
    """Ops, seconds and memory of captured steps of published models, from their configs."""
    from gdp.bench.capture import NAMES, CaptureBenchmark

    return show_page(CaptureBenchmark(models=names_in(models, NAMES)), out, rows, json)


@bench_app.command("execution")
def bench_execution(
    workloads: Annotated[str | None, typer.Option(metavar="A,B,...", help="Default: all.")] = None,
    repeats: Annotated[int, typer.Option(min=1, help="Steps of the plan, and of one device.")] = 15,
    placements: Annotated[int, typer.Option(min=1, help="Predicted and measured.")] = 20,
    against: Annotated[
        str | None,
        typer.Option(metavar="A,B,...", help="Train beside these on two cores: ddp, fsdp, pipelining of PyTorch."),
    ] = None,
    budget: BudgetOption = "10s",
    out: OutOption = None,
    rows: RowsOption = None,
    json: JsonOption = False,
) -> int:
    """Plans run on this machine's own devices: faster than one device, and as predicted?"""
    from gdp.budget import Budget

    if against is not None:
        from gdp.bench import training_subjects
        from gdp.bench.execution_against import ExecutionAgainstBenchmark

        beside = ExecutionAgainstBenchmark(
            against=names_in(against, ()),
            budget=Budget.parse(budget),
            workloads=names_in(workloads, tuple(training_subjects.SUBJECTS)),
            repeats=repeats,
            placements=placements,
        )
        return show_page(beside, out, rows, json)
    from gdp.bench.execution import SUBJECTS, ExecutionBenchmark

    benchmark = ExecutionBenchmark(
        budget=Budget.parse(budget),
        workloads=names_in(workloads, tuple(SUBJECTS)),
        repeats=repeats,
        placements=placements,
    )
    return show_page(benchmark, out, rows, json)


@bench_app.command("parallel")
def bench_parallel(
    models: Annotated[
        str | None, typer.Option(metavar="A,B,...", help="Workloads and hf:CONFIG, or all thirty. Default: three.")
    ] = None,
    devices: Annotated[
        str | None, typer.Option(metavar="A,B,...", help="DEVICES each, or all eight. Default: two.")
    ] = None,
    budget: BudgetOption = "30s",
    out: OutOption = None,
    rows: RowsOption = None,
    json: JsonOption = False,
) -> int:
    """Our choice of a layout against op placement, DDP, ZeRO 1, FSDP and Megatron's grids."""
    from gdp.bench.parallel import ALL, DEVICES, MODELS, ParallelBenchmark
    from gdp.budget import Budget

    default = ParallelBenchmark()
    benchmark = ParallelBenchmark(
        budget=Budget.parse(budget),
        models=MODELS if models == ALL else names_in(models, default.models),
        devices=DEVICES if devices == ALL else names_in(devices, default.devices),
    )
    return show_page(benchmark, out, rows, json)


@bench_app.command("layout-memory")
def bench_layout_memory(
    devices: Annotated[
        str | None, typer.Option(metavar="A,B,...", help="DEVICES each. Default: 8 cards of 24 and 40 GB.")
    ] = None,
    budget: BudgetOption = "10s",
    out: OutOption = None,
    rows: RowsOption = None,
    json: JsonOption = False,
) -> int:
    """The largest Llama that trains on a set of cards: our choice against DDP, ZeRO 1, FSDP and Megatron's grids."""
    from gdp.bench.layout_memory import LayoutMemoryBenchmark
    from gdp.budget import Budget

    chosen = names_in(devices, LayoutMemoryBenchmark().devices)
    return show_page(LayoutMemoryBenchmark(budget=Budget.parse(budget), devices=chosen), out, rows, json)


@bench_app.command("measured")
def bench_measured(
    runs: Annotated[Path, typer.Option(metavar="CSV", help="Measured steps: sizes, ways to be parallel, a time.")],
    card: Annotated[str, typer.Option(metavar="KIND", help="The cards that they ran on.")] = "a100-sxm-40g",
    out: OutOption = None,
    rows: RowsOption = None,
    json: JsonOption = False,
) -> int:
    """Step times of GPT in given layouts, against those that others measured."""
    from gdp.bench.measured import MeasuredBenchmark

    return show_page(MeasuredBenchmark(runs=runs, card=card), out, rows, json)
