"""`gdp bench search`: what `auto` finds in a short time on the papers' workloads, against every classical placer.

Each workload is placed on its own cluster, once for each seed. The classical placers run within those very runs, on the
same graph, costs, memory limits and simulator; each counts with its best seed. Every plan is saved, read back and
re-derived, as `gdp simulate` does; one that does not fit, or does not give its own figures again, ends the benchmark
with an error.
"""

import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from gdp.bench.comparison import WorkloadRow, best_baselines, classical_table
from gdp.bench.graphs import lstm_training_graph, workload_inputs
from gdp.bench.runs import require_verified, stored_problem
from gdp.bench.tables import (
    geometric_mean,
    machine,
    machine_line,
    markdown_table,
    mean_ratio,
    mean_sentence,
    milliseconds,
    write_figures,
)  # fmt: skip
from gdp.budget import Budget, Clock
from gdp.cluster import Cluster
from gdp.errors import InputError
from gdp.graph import Graph
from gdp.place import place
from gdp.placers import CLASSICAL
from gdp.placers.classical_runs import ClassicalRuns
from gdp.plan import Baseline
from gdp.problem import Problem
from gdp.workloads import paper_names

PAPER_WORKLOADS = paper_names()
TARGET_CLASSICAL, AIM_CLASSICAL = 0.85, 0.80  # times the best classical placer's step time, geometric mean
TARGET_EXPERT, AIM_EXPERT = 0.72, 0.62  # times the expert's

OnRow = Callable[[str], None]


@dataclass(frozen=True, kw_only=True)
class Row(WorkloadRow):
    """One workload: `auto` by seed, and the classical placers."""

    step_time_ns: tuple[int, ...]  # by seed
    simulations: tuple[int, ...]  # by seed
    seconds: tuple[float, ...]  # by seed

    @property
    def mean_ns(self) -> float:
        return float(np.mean(self.step_time_ns))

    @property
    def gap(self) -> float:
        """How far the mean step time can at most be from the optimum."""
        return self.mean_ns / self.lower_bound_ns - 1.0

    def ratio(self, placer: str | None) -> float | None:
        """Geometric mean over seeds of `auto`'s step time over that of `placer`; None without one that fits."""
        other_ns = self.baseline_ns(placer)
        return None if other_ns is None else geometric_mean(np.array(self.step_time_ns) / other_ns)

    def to_document(self) -> dict[str, Any]:
        return {
            "workload": self.workload,
            "cluster": self.cluster,
            "num_ops": self.num_ops,
            "step_time_ns": self.step_time_ns,
            "lower_bound_ns": self.lower_bound_ns,
            "gap": self.gap,
            "simulations": self.simulations,
            "seconds": self.seconds,
            "baselines": {name: asdict(baseline) for name, baseline in self.baselines.items()},
            "best_classical": self.best_classical,
            "best_expert": self.best_expert,
            "ratio_to_best_classical": self.ratio(self.best_classical),
            "ratio_to_expert": self.ratio(self.best_expert),
        }


def run(
    *, workloads: Sequence[str] = PAPER_WORKLOADS, budget: Budget, seeds: int, out: Path | None, on_row: OnRow
) -> dict[str, Any]:
    """Place each of `workloads` with `seeds` seeds within `budget` each.

    Returns the figures as a dictionary, with `markdown` made of them; both, and every graph, cluster and plan, are
    written to the directory `out` if there is one. `on_row` is called with a line as each workload ends.
    RuntimeError if a plan does not fit or does not verify.
    """
    if seeds < 1 or not workloads:
        raise InputError(
            f"bench search: {seeds} seeds and {len(workloads)} workloads; at least one of each is expected"
        )
    place(lstm_training_graph(2), Cluster.parse("2xp100-pcie-16g"), budget=Budget(simulations=200))  # compiles
    rows = []
    with tempfile.TemporaryDirectory(prefix="gdp-bench-") as scratch:
        for name in workloads:
            graph, cluster = workload_inputs(name)
            rows.append(_place_workload(name, graph, cluster, budget, seeds, out or Path(scratch)))
            on_row(_line(rows[-1]))
    figures: dict[str, Any] = {
        "command": f"gdp bench search --budget {budget} --seeds {seeds}",
        "machine": machine(),
        "budget": str(budget),
        "seeds": seeds,
        "rows": [row.to_document() for row in rows],
        "geometric_means": {
            "to_best_classical": mean_ratio([row.ratio(row.best_classical) for row in rows]),
            "to_expert": mean_ratio([row.ratio(row.best_expert) for row in rows]),
            "to_lower_bound": mean_ratio([1.0 + row.gap for row in rows]),
        },
    }
    if tuple(workloads) != PAPER_WORKLOADS:
        figures["command"] += f" --workloads {','.join(workloads)}"
    figures["markdown"] = _markdown(figures, rows)
    if out is not None:
        write_figures(out, "search", figures)
    return figures


def _place_workload(name: str, graph: Graph, cluster: Cluster, budget: Budget, seeds: int, out: Path) -> Row:
    stored = stored_problem(name, graph, cluster, out)
    plans = []
    for seed in range(seeds):
        plan = place(graph, cluster, placer="auto", budget=budget, seed=seed)
        path = out / f"{name}-seed{seed}.plan.json.gz"
        plan.save(path)
        require_verified(path, stored, plan.step_time_ns)
        plans.append(plan)
    searches = [plan.search for plan in plans if plan.search is not None]
    return Row(
        workload=name,
        cluster=cluster.name,
        num_ops=graph.num_ops,
        step_time_ns=tuple(plan.step_time_ns for plan in plans),
        lower_bound_ns=plans[0].lower_bound_ns,
        simulations=tuple(search.simulations for search in searches),
        seconds=tuple(search.seconds for search in searches),
        baselines=best_baselines([_run_classical(graph, cluster, seed) for seed in range(seeds)]),
    )


def _run_classical(graph: Graph, cluster: Cluster, seed: int) -> dict[str, Baseline]:
    """Every classical placer: a search skips slow ones where its budget is short."""
    runs = ClassicalRuns(Problem.build(graph, cluster), Clock(Budget(simulations=len(CLASSICAL))), seed)
    runs.run(tuple(CLASSICAL))
    return runs.baselines


def _line(row: Row) -> str:
    low, high = milliseconds(min(row.step_time_ns)), milliseconds(max(row.step_time_ns))
    parts = [f"{row.workload}: auto {milliseconds(row.mean_ns)} ms ({low} to {high}), gap {row.gap:.1%}"]
    for label, placer in (("best classical", row.best_classical), ("expert", row.best_expert)):
        ratio, time_ns = row.ratio(placer), row.baseline_ns(placer)
        if ratio is None or time_ns is None:
            parts.append(f"{label} OOM")
        else:
            parts.append(f"{ratio:.3f}x {label} ({placer}, {milliseconds(time_ns)})")
    return ", ".join(parts)


def _optional(row: Row, placer: str | None) -> tuple[str, str]:
    """(time and name of `placer`, ratio of `auto` to it)."""
    time_ns, ratio = row.baseline_ns(placer), row.ratio(placer)
    if time_ns is None or ratio is None:
        return "OOM", "-"
    return f"{milliseconds(time_ns)} ({placer})", f"{ratio:.3f}"


def _markdown(figures: Mapping[str, Any], rows: Sequence[Row]) -> str:
    means, seeds, budget = figures["geometric_means"], figures["seeds"], figures["budget"]
    main = [
        (
            row.workload, f"{row.num_ops:,}", row.cluster,
            milliseconds(row.mean_ns), milliseconds(min(row.step_time_ns)), milliseconds(max(row.step_time_ns)),
            milliseconds(row.lower_bound_ns), f"{row.gap:.1%}",
            *_optional(row, row.best_classical), *_optional(row, row.best_expert), row.baseline_cell("metis"),
            f"{np.mean(row.simulations):,.0f}", f"{np.mean(row.seconds):.1f}",
        )
        for row in rows
    ]  # fmt: skip
    header = (
        "workload", "ops", "cluster", "auto, mean", "min", "max", "bound", "gap",
        "best classical", "ratio", "expert", "ratio", "metis", "simulations", "seconds",
    )  # fmt: skip
    count = len(rows)
    sentences = (
        mean_sentence("`auto`", means["to_best_classical"], "the best classical plan", TARGET_CLASSICAL, AIM_CLASSICAL),
        mean_sentence("`auto`", means["to_expert"], "the expert plan", TARGET_EXPERT, AIM_EXPERT),
        f"`auto` takes {means['to_lower_bound']['ratio']:.3f}x the lower bound (over {count} workloads).",
    )
    parts = (
        "## Search",
        f"    {figures['command']}",
        f"{machine_line()}.",
        f"Step times in ms; {seeds} seeds, {budget} each, on all threads. Memory is enforced: OOM is a placer without "
        "a plan that fits. Each classical placer counts with its best seed. The best "
        "classical plan is chosen for each workload with hindsight. The expert "
        "plan is the better of layers or stages on all devices and of a single device. Ratios are `auto` over the "
        "other, geometric means over seeds. The bound is a lower bound of any plan's step time. All "
        f"{count * seeds} plans were saved, read back and replayed: each fits and gives its own figures again.",
        markdown_table(header, main),
        "Geometric means over workloads of the ratios of step times:",
        "\n".join(f"- {sentence}" for sentence in sentences),
        "### Classical placers",
        "Step times in ms, each placer's best run.",
        classical_table(rows),
    )
    return "\n\n".join(parts) + "\n"
