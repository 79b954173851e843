"""Benchmark `short`: `auto` within 0.5 to 10 s, with the policy and without it.

The workloads of the papers, each on its own cluster, and larger steps: their layouts, cut to single ops. Both answers
have the same processor time, on one thread.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from benchmarks import graphs, methods
from benchmarks.benchmark import Benchmark, Say, require_seconds
from benchmarks.comparison import MeanRatio, WorkloadRow, compare, ratio_dots
from benchmarks.figures import dot_plot
from benchmarks.rows import Rows
from benchmarks.runs import WorkloadRuns
from benchmarks.search import PAPER_WORKLOADS
from benchmarks.workloads import model_of, workloads
from gdp.budget import Budget
from gdp.cluster import Cluster
from gdp.graph import Graph
from gdp.models.source import ModelSource
from gdp.parallel.layout import Layout
from gdp.parallel.step import Step
from gdp.planning.warm_up import warm_up

WITH, WITHOUT = "with", "without"
PAPERS, LARGE = "papers", "large steps"
BUDGETS = ("0.5s", "1s", "2s", "5s", "10s")
LARGE_STEPS = (
    "amoebanet:data=4",
    "transformer-xl-8:microbatches=4",
    "rnnlm-8:microbatches=2",
    "rnnlm-4:data=4",
    "gnmt-4:microbatches=2",
    "nasnet-a:microbatches=8",
    "hrnet-w32:data=8",
    "rnnlm-8:microbatches=8",
    "gnmt-8:microbatches=2",
    "gnmt-8:microbatches=4",
)
_EVEN = 0.002  # ratios nearer to 1 are neither better nor worse


@dataclass(frozen=True, slots=True)
class ShortMean:
    """The step times with the policy over those without it, over the problems of a part."""

    part: str
    budget: str
    ratio: MeanRatio
    num_better: int
    num_worse: int
    spent: tuple[float, float]  # processor time over the budget with the policy and without it, means over runs


@dataclass(frozen=True, kw_only=True)
class ShortBenchmark(Benchmark):
    """Each problem with each seed within each budget; a large step is called WORKLOAD:LAYOUT."""

    name = "short"
    seeds: int = 2
    workloads: tuple[str, ...] = (*PAPER_WORKLOADS, *LARGE_STEPS)
    budgets: tuple[str, ...] = BUDGETS

    def __post_init__(self) -> None:
        super().__post_init__()
        for text in self.budgets:
            require_seconds(self.name, Budget.parse_time(text), "0.5s")

    def check_workloads(self) -> None:
        for name in self.workloads:
            workload, _, layout = name.partition(":")
            workloads.get(workload)
            if layout:
                Layout.parse(layout)

    def measure(self, rows: Rows, say: Say) -> dict[str, Any]:
        """Returns [budget][problem] rows, and means over the problems of each part."""
        warm_up(("auto",))
        placed: dict[str, list[WorkloadRow]] = {budget: [] for budget in self.budgets}
        for name in self.workloads:
            runs = WorkloadRuns(name, rows, _inputs(name))
            for budget, some in placed.items():
                some.append(self._place(runs, budget))
                say(f"{budget}: {some[-1]}")
        parts = {PAPERS: PAPER_WORKLOADS, LARGE: [name for name in self.workloads if ":" in name]}
        return {
            "placed": placed,
            "rows": [row for some in placed.values() for row in some],
            "means": [
                _mean(part, budget, [row for row in some if row.workload in names])
                for part, names in parts.items()
                for budget, some in placed.items()
                if any(row.workload in names for row in some)
            ],
            "names": self.workloads,
        }

    def draw(self, measured: Mapping[str, Any]) -> bytes:
        dots = {budget: ratio_dots(some, WITH, WITHOUT) for budget, some in measured["placed"].items()}
        return dot_plot("Short budgets", "step time with the policy over that without it; a dot for each problem", dots)

    def _place(self, runs: WorkloadRuns, budget: str) -> WorkloadRow:
        found = {}
        for name in (WITH, WITHOUT):
            method = methods.auto(Budget.parse(budget), asks_policy=name == WITH, name=f"{name}-{budget}")
            found[name] = runs.of_seeds(method, self.seeds)
        return WorkloadRow(**runs.facts, baselines={}, runs=found)


def _inputs(name: str) -> tuple[Graph, Cluster]:
    workload, _, text = name.partition(":")
    if not text:
        return graphs.workload_inputs(workload)
    layout = Layout.parse(text)
    return Step.of(ModelSource(model_of(workload)).part(layout.num_parts).graph, layout).graph, Cluster.parse(
        workloads.get(workload).cluster
    )


def _mean(part: str, budget: str, rows: Sequence[WorkloadRow]) -> ShortMean:
    ratios, seconds = ratio_dots(rows, WITH, WITHOUT), require_seconds("short", Budget.parse(budget), "0.5s")
    spent = [sum(row.mean_of(name, "cpu_seconds") for row in rows) / len(rows) / seconds for name in (WITH, WITHOUT)]
    return ShortMean(
        part,
        budget,
        compare(rows, WITH, WITHOUT),
        sum(ratio < 1 - _EVEN for ratio in ratios),
        sum(ratio > 1 + _EVEN for ratio in ratios),
        (spent[0], spent[1]),
    )
