"""`gdp bench paper`: the table of the GDP paper (arXiv 1910.01578) on simulated P100s, with baselines that it lacks.

fine-tuned, zero-shot    the default policy, by the checkpoint that holds the workload's family out
gdp-batch                the default policy that comes with gdp, trained on graphs of all families, at once
gdp-one, gdp-published   from scratch on the workload: the default policy, and GDP as published
hdp                      the learned baseline, with a multiple of the processor time of fine-tuning
search                   classical placers and the search without a policy, with fine-tuning's processor time
expert, metis, ...       the classical placers, each with its best seed; and METIS blind to memory
"""

import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from gdp import workloads
from gdp.bench import methods
from gdp.bench.comparison import BEST_CLASSICAL, EXPERT, MethodsRow, best_baselines, classical_table, compare, mean_cell
from gdp.bench.held_out import HeldOut, checkpoints_in, choose
from gdp.bench.plot import dot_plot
from gdp.bench.runs import Method, Run, WorkloadRuns
from gdp.bench.tables import counted, machine, machine_line, markdown_table, mean_sentence, milliseconds, write_figures
from gdp.budget import Budget
from gdp.errors import InputError
from gdp.placers.learned import shipped
from gdp.policy.checkpoint import load_checkpoint

# the paper's claims: 16 % faster than the expert, 9.2 % faster than HDP; aim: 1.5 times as fast as the expert
TARGET_EXPERT, AIM_EXPERT, TARGET_HDP = 1 / 1.16, 1 / 1.5, 1 / 1.092
CLAIM = "fine-tuned"

LEARNED = ("hdp", "gdp-published", "gdp-one", "gdp-batch", "zero-shot", CLAIM)
METHODS = ("metis-blind", *LEARNED, "search")  # in the order of the table, after the classical placers
CLASSICAL_COLUMNS = (EXPERT, "metis", BEST_CLASSICAL)

OnRow = Callable[[str], None]


@dataclass(frozen=True, kw_only=True)
class PaperBenchConfig:
    """Budgets; the defaults are those of docs/results.md."""

    checkpoints: Path  # a directory with families held out
    batch: Path | None = None  # the checkpoint of gdp-batch; None: the one that comes with gdp
    seeds: int = 3
    fine_tune_budget: Budget = field(default_factory=lambda: Budget(seconds=60.0))
    one_budget: Budget = field(default_factory=lambda: Budget(seconds=120.0))  # of gdp-one and gdp-published
    hdp_factor: float = 15.0  # times the processor time of fine-tuning; the paper searches 15 times as fast as HDP

    def __post_init__(self) -> None:
        if self.seeds < 1:
            raise InputError(f"seeds is {self.seeds}; at least 1 is expected")
        if not 0 < self.hdp_factor < 1e6:
            raise InputError(f"hdp_factor is {self.hdp_factor}; a factor above 0 is expected")

    def command(self, names: Sequence[str]) -> str:
        """The command line that has these options."""
        parts = [f"gdp bench paper --checkpoints {self.checkpoints} --seeds {self.seeds}"]
        default = PaperBenchConfig(checkpoints=self.checkpoints)
        for option, name in (
            ("--fine-tune-budget", "fine_tune_budget"),
            ("--one-budget", "one_budget"),
            ("--hdp-factor", "hdp_factor"),
            ("--batch", "batch"),
        ):
            value = getattr(self, name)
            if value != getattr(default, name):
                parts.append(f"{option} {value:g}" if isinstance(value, float) else f"{option} {value}")
        if tuple(names) != workloads.paper_names():
            parts.append(f"--workloads {','.join(names)}")
        return " ".join(parts)


def run(
    config: PaperBenchConfig, *, names: Sequence[str] | None = None, out: Path | None, on_row: OnRow
) -> dict[str, Any]:
    """Place each of the workloads `names` (None: the papers').

    Returns the figures as a dictionary, with `markdown` made of them. They, a plot, and every run with its plan are
    written to the directory `out` if there is one, and runs that it has from before are not made again. `on_row` is
    called with a line as each run and each workload ends. InputError where a checkpoint is missing or bad, RuntimeError
    if a plan does not give its figures again.
    """
    chosen = workloads.paper_names() if names is None else tuple(names)
    if not chosen:
        raise InputError("bench paper: no workloads; at least one is expected")
    found = checkpoints_in(config.checkpoints)
    asked = {name: choose(found, name, config.checkpoints) for name in chosen}
    batch = config.batch or Path(shipped())
    load_checkpoint(batch)  # a bad file is better known now than after hours
    methods.warm_up()
    rows = []
    with tempfile.TemporaryDirectory(prefix="gdp-bench-") as scratch:
        for name in chosen:
            runs = WorkloadRuns(name, out / "runs" if out else Path(scratch), resume=out is not None)
            rows.append(_place(runs, asked[name].path, batch, config, on_row))
            on_row(_line(rows[-1]))
    figures: dict[str, Any] = {
        "command": config.command(chosen),
        "machine": machine(),
        "seeds": config.seeds,
        "fine_tune_budget": str(config.fine_tune_budget),
        "one_budget": str(config.one_budget),
        "hdp_factor": config.hdp_factor,
        "rows": [row.to_document() for row in rows],
        "checkpoints": {name: str(checkpoint.path) for name, checkpoint in asked.items()},
        "batch": None if config.batch is None else str(config.batch),
        "to_expert": {name: compare(rows, name, EXPERT) for name in (BEST_CLASSICAL, "metis", *METHODS)},
        "fine_tuned_to": {name: compare(rows, CLAIM, name) for name in (*CLASSICAL_COLUMNS, *METHODS) if name != CLAIM},
    }
    figures["markdown"] = _markdown(figures, rows, asked)
    if out is not None:
        write_figures(out, "paper", figures, _plot(rows))
    return figures


def _place(runs: WorkloadRuns, checkpoint: Path, batch: Path, config: PaperBenchConfig, on_row: OnRow) -> MethodsRow:
    found: dict[str, list[Run]] = {name: [] for name in METHODS}

    def make(method: Method, seed: int) -> Run:
        run = runs.run(method, seed)
        time = "nothing fits" if run.status != "ok" else f"{milliseconds(run.step_time_ns or 0)} ms"
        on_row(f"{runs.name}, seed {seed}, {method.name}: {time} after {run.seconds:.1f} s")
        found[method.name].append(run)
        return run

    for seed in range(config.seeds):
        cpu_seconds = make(methods.fine_tuned(checkpoint, config.fine_tune_budget), seed).cpu_seconds
        make(methods.zero_shot(checkpoint), seed)
        make(methods.zero_shot(batch, name="gdp-batch"), seed)
        make(methods.from_scratch(config.one_budget), seed)
        make(methods.published(config.one_budget), seed)
        make(methods.blind_metis(), seed)
        make(methods.plain_search(cpu_seconds), seed)
        make(methods.hdp(config.hdp_factor * cpu_seconds), seed)
    return MethodsRow(
        workload=runs.name,
        cluster=runs.cluster.name,
        num_ops=runs.graph.num_ops,
        lower_bound_ns=runs.lower_bound_ns,
        baselines=best_baselines([runs.run(methods.classical(), seed).baselines for seed in range(config.seeds)]),
        runs={name: tuple(seeds) for name, seeds in found.items()},
    )


def _line(row: MethodsRow) -> str:
    parts = [f"{name} {row.time_cell(name)}" for name in (EXPERT, "hdp", "zero-shot", CLAIM, "search")]
    return f"{row.workload}: {'; '.join(parts)}; in ms"


def _claims(figures: Mapping[str, Any]) -> list[str]:
    """The paper's claims, whether they hold here, and what else it should be compared with."""
    means, more = figures["fine_tuned_to"], f"{figures['hdp_factor']:g} times its processor time"
    what = "Fine-tuned, it"
    return [
        mean_sentence(what, means[EXPERT], "the expert plan", TARGET_EXPERT, AIM_EXPERT)
        + " The target is the paper's 16 %.",
        mean_sentence(what, means["hdp"], f"HDP's, which had {more}", TARGET_HDP) + " The target is the paper's 9.2 %.",
        mean_sentence(what, means["search"], "the plain search with equal processor time"),
        mean_sentence(what, means[BEST_CLASSICAL], "the best classical plan"),
        mean_sentence("At once, it", figures["to_expert"]["zero-shot"], "the expert plan", 1.0)
        + " The paper claims slightly better.",
    ]


def _markdown(figures: Mapping[str, Any], rows: Sequence[MethodsRow], asked: Mapping[str, HeldOut]) -> str:
    columns = (*CLASSICAL_COLUMNS, *METHODS)
    num_plans = sum(run.status == "ok" for row in rows for runs in row.runs.values() for run in runs)
    times = [
        (row.workload, f"{row.num_ops:,}", row.cluster, milliseconds(row.lower_bound_ns), *map(row.time_cell, columns))
        for row in rows
    ]
    to_bound = [(row.workload, *(_ratio(row.to_bound(name)) for name in columns)) for row in rows]
    seconds = [
        (
            row.workload, _classical_seconds(row),
            *(f"{row.mean_of(name, 'seconds'):.1f} ({row.mean_of(name, 'cpu_seconds'):.1f})" for name in METHODS),
        )
        for row in rows
    ]  # fmt: skip
    updates = [(row.workload, *(f"{row.mean_of(name, 'updates'):,.0f}" for name in LEARNED[1:3])) for row in rows]
    means = [
        (name, mean_cell(mean), str(mean["num_workloads"]), _optional(figures["fine_tuned_to"].get(name)))
        for name, mean in figures["to_expert"].items()
    ]
    hours = {checkpoint.path.name: checkpoint.cpu_hours for checkpoint in asked.values()}
    trained = "; ".join(f"{name} {hour:.2f}" for name, hour in hours.items())
    parts = (
        "## The paper's table",
        f"    {figures['command']}",
        f"{machine_line()}.",
        f"Step times in ms on simulated P100s: mean over {counted(figures['seeds'], 'seed')}, range in brackets. OOM: "
        "a seed found no plan that fits. Expert is the better of layers or stages on all devices and of a single "
        "device. Classical placers count with their best seeds; the best one is "
        "chosen for each workload with hindsight. metis-blind is METIS as the paper used it, blind to memory. "
        "gdp-published is the paper's network, reward and training, gdp-one gdp's own policy, both untrained at the "
        f"start, for {figures['one_budget']} of processor time on the workload itself. gdp-batch is the policy that "
        "comes with gdp, trained on graphs of all families, without training on the workload; zero-shot and fine-tuned "
        f"({figures['fine_tune_budget']}) the one whose training held the workload's family out, and those like it. "
        f"HDP had {figures['hdp_factor']:g} times the processor time that fine-tuning took with the same seed, the "
        "search (the classical placers and the local search, no policy) as much. "
        f"All {num_plans} plans were saved, read back and replayed: each fits and gives its own figures again.",
        markdown_table(("workload", "ops", "cluster", "bound", *columns), times),
        "Geometric means over workloads of the ratios of step times, range over seeds in brackets:",
        markdown_table(("method", "to the expert", "workloads", "fine-tuned to it"), means),
        "\n".join(f"- {claim}" for claim in _claims(figures)),
        "![The paper's table](paper.svg)",
        "### Above the lower bound",
        "Step time over the lower bound, geometric means over seeds.",
        markdown_table(("workload", *columns), to_bound),
        "### Seconds of search",
        "From the graph in memory to the placement, mean over seeds; processor time of all threads in brackets. What "
        f"training the held-out policies cost is not in them, in CPU hours: {trained}.",
        markdown_table(("workload", "classical, all", *METHODS), seconds),
        "### Updates",
        "Of the policies trained on the workload, mean over seeds.",
        markdown_table(("workload", *LEARNED[1:3]), updates),
        "### Classical placers",
        "Step times in ms, each placer's best run.",
        classical_table(rows),
    )
    return "\n\n".join(parts) + "\n"


def _ratio(ratio: float | None) -> str:
    return "-" if ratio is None else f"{ratio:.3f}"


def _optional(mean: Mapping[str, Any] | None) -> str:
    return "-" if mean is None else mean_cell(mean)


def _classical_seconds(row: MethodsRow) -> str:
    return f"{sum(baseline.seconds for baseline in row.baselines.values()):.1f}"


def _plot(rows: Sequence[MethodsRow]) -> str:
    dots = []
    for name in (BEST_CLASSICAL, *METHODS):
        dots.append((name, [ratio for row in rows if (ratio := row.ratio(name, EXPERT)) is not None]))
    label = "step time over the expert's; a dot for each workload"
    return dot_plot("The paper's workloads", label, dots, logarithmic=True)
