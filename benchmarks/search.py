"""Benchmark `search`: the plans of `auto` after a short time on the papers' workloads, and every classical placer.

Each workload is placed on its own cluster, once for each seed, on all threads.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from benchmarks import methods
from benchmarks.benchmark import Benchmark, Say
from benchmarks.comparison import BEST_CLASSICAL, EXPERT, MeanRatio, WorkloadRow, compare, ratio_dots
from benchmarks.figures import dot_plot
from benchmarks.rows import Rows
from benchmarks.runs import WorkloadRuns
from gdp.budget import Budget
from gdp.models.papers import PAPERS
from gdp.planning.warm_up import warm_up

AUTO = "auto"
PAPER_WORKLOADS = PAPERS.names()


@dataclass(frozen=True, kw_only=True)
class SearchBenchmark(Benchmark):
    """Each workload with each seed within `budget`."""

    name = "search"
    budget: Budget = field(default_factory=lambda: Budget(seconds=30.0))
    seeds: int = 3
    workloads: tuple[str, ...] = PAPER_WORKLOADS

    def measure(self, rows: Rows, say: Say) -> dict[str, Any]:
        warm_up()
        placed = []
        for name in self.workloads:
            runs = WorkloadRuns(name, rows)
            method = methods.auto(self.budget, counts_cpu=False)
            found = runs.of_seeds(method, self.seeds)
            baselines = methods.classical_baselines(runs, self.seeds)
            placed.append(WorkloadRow(**runs.facts, baselines=baselines, runs={AUTO: found}))
            say(str(placed[-1]))
        bounds = [row.to_bound(AUTO) for row in placed]
        return {
            "rows": placed,
            "geometric_means": {
                "to_best_classical": compare(placed, AUTO, BEST_CLASSICAL),
                "to_expert": compare(placed, AUTO, EXPERT),
                "to_lower_bound": MeanRatio.of([None if bound is None else [bound] for bound in bounds]),
            },
        }

    def draw(self, measured: Mapping[str, Any]) -> bytes:
        dots = {name: ratio_dots(measured["rows"], name, BEST_CLASSICAL) for name in (AUTO, "metis", EXPERT)}
        return dot_plot("Search", "step time over the best classical placer's; a dot for each workload", dots)
