"""`gdp bench`: parses, calls, prints. A benchmark is imported when it runs."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from gdp.cli.options import BudgetOption, JsonOption
from gdp.cli.shared import log, print_json, print_text

if TYPE_CHECKING:
    from gdp.bench.benchmark import Benchmark

bench_app = typer.Typer(help="Reproduce a page of docs/results.", rich_markup_mode=None)

CheckpointsOption = Annotated[
    Path, typer.Option(metavar="DIR", help="Checkpoints of `gdp train training-set --hold-out FAMILY`.")
]
CpuBudgetOption = Annotated[str, typer.Option(metavar="TIME", help="Of processor, for each search.")]
FineTuneOption = Annotated[str, typer.Option(metavar="TIME", help="Training on a workload.")]
MachinesOption = Annotated[str | None, typer.Option(metavar="A,B,...", help="Default: all.")]
OutOption = Annotated[
    Path | None, typer.Option(metavar="PAGE|DIR", help="Write the page (.md) there; into a directory, all figures too.")
]
RowsOption = Annotated[
    Path | None, typer.Option(metavar="DIR", help="Keep runs there; those found there are not made again.")
]
SeedsOption = Annotated[int, typer.Option(min=1, help="Runs of each workload.")]
WorkloadsOption = Annotated[str | None, typer.Option(metavar="A,B,...", help="Default: the papers' fourteen.")]


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

    names = _workloads(workloads, PAPER_WORKLOADS)
    benchmark = SearchBenchmark(budget=Budget.parse(budget), seeds=seeds, workloads=names)
    return _answer(benchmark, out, rows, json)


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

    names = _names(workloads, ShortBenchmark().workloads)
    return _answer(ShortBenchmark(seeds=seeds, workloads=names, budgets=_names(budgets, BUDGETS)), out, rows, json)


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
        budget=Budget.parse(budget),
        seeds=seeds,
        workloads=_workloads(workloads, NAMES),
        machines=_names(machines, tuple(machine.name for machine in MACHINES)),
    )
    return _answer(benchmark, out, rows, json)


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
        budget=Budget.parse(budget),
        seeds=seeds,
        models=_names(models, NAMES),
        machines=_names(machines, tuple(machine.name for machine in MACHINES)),
    )
    return _answer(benchmark, out, rows, json)


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

    names = _names(models, tuple(MODELS))
    return _answer(MicrobatchesBenchmark(budget=Budget.parse(budget), seeds=seeds, models=names), out, rows, json)


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

    benchmark = ScaleBenchmark(budget=Budget.parse(budget), devices=_names(devices, DEVICES))
    return _answer(benchmark, out, rows, json)


@bench_app.command("simulator")
def bench_simulator(
    out: OutOption = None,
    compilation: Annotated[bool, typer.Option("--compilation", help="Seconds that each kernel compiles.")] = False,
    json: JsonOption = False,
) -> int:
    """Simulations per second, against the plain-Python reference and against the size of the graph."""
    from gdp.bench.compilation import CompilationBenchmark
    from gdp.bench.simulator import SimulatorBenchmark

    return _answer(CompilationBenchmark() if compilation else SimulatorBenchmark(), out, None, json)


@bench_app.command("capture")
def bench_capture(
    models: Annotated[str | None, typer.Option(metavar="A,B,...", help="Default: all.")] = None,
    out: OutOption = None,
    rows: RowsOption = None,
    json: JsonOption = False,
) -> int:
    """Ops, seconds and memory of captured steps of published models, from their configs."""
    from gdp.bench.capture import NAMES, CaptureBenchmark

    return _answer(CaptureBenchmark(models=_names(models, NAMES)), out, rows, json)


@bench_app.command("paper")
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
        workloads=_workloads(workloads, paper_names()),
    )
    return _answer(benchmark, out, rows, json)


@bench_app.command("published")
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
        workloads=_workloads(workloads, WORKLOADS),
        methods=_names(methods, tuple(METHODS)),
    )
    return _answer(benchmark, out, rows, json)


@bench_app.command("published-batch")
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
        choices=_names(choices, CHOICES),
        workloads=_workloads(workloads, WORKLOADS),
    )
    return _answer(benchmark, out, rows, json)


@bench_app.command("generalization")
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
        workloads=_workloads(workloads, built_in.names()),
    )
    return _answer(benchmark, out, rows, json)


@bench_app.command("trained")
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
        budget=Budget.parse(budget),
        seeds=seeds,
        workloads=_workloads(workloads, built_in.names()),
    )
    return _answer(benchmark, out, rows, json)


@bench_app.command("ablation")
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
    return _answer(AblationBenchmark(budget=Budget.parse(budget), seeds=seeds, hold_out=families), out, rows, json)


@bench_app.command("convergence")
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
        budget=Budget.parse(budget),
        seeds=seeds,
        workloads=_workloads(workloads, WORKLOADS),
        checkpoints=checkpoints,
        checkpoint=checkpoint,
    )
    return _answer(benchmark, out, rows, json)


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
            against=_names(against, ()),
            budget=Budget.parse(budget),
            workloads=_names(workloads, tuple(training_subjects.SUBJECTS)),
            repeats=repeats,
            placements=placements,
        )
        return _answer(beside, out, rows, json)
    from gdp.bench.execution import SUBJECTS, ExecutionBenchmark

    benchmark = ExecutionBenchmark(
        budget=Budget.parse(budget),
        workloads=_names(workloads, tuple(SUBJECTS)),
        repeats=repeats,
        placements=placements,
    )
    return _answer(benchmark, out, rows, json)


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
        models=MODELS if models == ALL else _names(models, default.models),
        devices=DEVICES if devices == ALL else _names(devices, default.devices),
    )
    return _answer(benchmark, out, rows, json)


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

    chosen = _names(devices, LayoutMemoryBenchmark().devices)
    return _answer(LayoutMemoryBenchmark(budget=Budget.parse(budget), devices=chosen), out, rows, json)


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

    return _answer(MeasuredBenchmark(runs=runs, card=card), out, rows, json)


def _names(text: str | None, default: tuple[str, ...]) -> tuple[str, ...]:
    """Returns the names in `A,B,...`."""
    return default if text is None else tuple(name.strip() for name in text.split(","))


def _workloads(text: str | None, default: tuple[str, ...]) -> tuple[str, ...]:
    """Returns the workloads in `A,B,...`. InputError for an unknown one."""
    from gdp.models import workloads

    return tuple(workloads.get(name).name for name in _names(text, default))


def _answer(benchmark: "Benchmark", out: Path | None, rows: Path | None, json: bool) -> int:
    figures = benchmark.run(out=out, rows=rows, say=log)
    if json:
        print_json(figures)
    else:
        print_text(figures["markdown"].rstrip())
    return 0
