"""Benchmark `generalization`: the policy on families that it was not trained on, zero-shot and after a minute.

    zero-shot    192 to 2,048 simulations         |  each by the checkpoint in a directory that holds
    fine-tuned   below 50 updates, 60 s          |  the workload's family out (`held_out.py`)
    search       classical placers, then the search without a policy, with fine-tuning's processor time

Each classical placer counts with its best seed, and the best of them is chosen for each workload with hindsight.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks import methods
from benchmarks.benchmark import Benchmark, Say
from benchmarks.comparison import BEST_CLASSICAL, EXPERT, WorkloadRow, compare, ratio_dots
from benchmarks.figures import dot_plot
from benchmarks.held_out import HeldOut, checkpoints_in, choose
from benchmarks.rows import Rows
from benchmarks.runs import WorkloadRuns
from benchmarks.workloads import workloads
from gdp.budget import Budget
from gdp.models.papers import PAPERS
from gdp.search.settings import DEFAULTS

MAX_UPDATES = 49  # of fine-tuning: the GDP paper's "fewer than 50"
LARGEST = "gnmt-8"

ZERO_SHOT, FINE_TUNED, SEARCH = "zero-shot", "fine-tuned", "search"
_PAIRS = (
    (ZERO_SHOT, BEST_CLASSICAL),
    (FINE_TUNED, BEST_CLASSICAL),
    (SEARCH, BEST_CLASSICAL),
    (ZERO_SHOT, EXPERT),
    (FINE_TUNED, EXPERT),
    (FINE_TUNED, SEARCH),
)


@dataclass(frozen=True, kw_only=True)
class GeneralizationBenchmark(Benchmark):
    """Each workload with each seed, by a policy that has not seen its family."""

    name = "generalization"
    checkpoints: Path
    seeds: int = 3
    fine_tune_budget: Budget = field(default_factory=lambda: Budget(seconds=60.0))
    workloads: tuple[str, ...] = workloads.names()

    def measure(self, rows: Rows, say: Say) -> dict[str, Any]:
        checkpoints = checkpoints_in(self.checkpoints)
        asked = {name: choose(checkpoints, name, self.checkpoints) for name in self.workloads}
        methods.warm_up()
        placed = []
        for name in self.workloads:
            placed.append(self._place(WorkloadRuns(name, rows), asked[name]))
            say(str(placed[-1]))
        parts = _parts(placed)
        return {
            "rows": placed,
            "policies": {name: checkpoint.to_document() for name, checkpoint in asked.items()},
            "means": {
                part: {f"{name} to {other}": compare(some, name, other) for name, other in _PAIRS}
                for part, some in parts.items()
            },
            "as_good": {part: sum(map(_is_as_good, some)) / len(some) for part, some in parts.items()},
            "numbers": {part: len(some) for part, some in parts.items()},
            "largest": next((row for row in placed if row.workload == LARGEST), None),
            "limits": {
                "fewest": DEFAULTS.policy.fewest_simulations,
                "most": DEFAULTS.policy.most_simulations,
                "simulated_ops": DEFAULTS.policy.simulated_ops,
                "updates": MAX_UPDATES,
            },
            "num_faster": sum(
                all(_is_faster(row, FINE_TUNED, other) for other in (ZERO_SHOT, SEARCH)) for row in placed
            ),
        }

    def draw(self, measured: Mapping[str, Any]) -> bytes:
        dots = {name: ratio_dots(measured["rows"], name, BEST_CLASSICAL) for name in (ZERO_SHOT, FINE_TUNED, SEARCH)}
        label = "step time over the best classical placer's; a dot for each workload"
        return dot_plot("Families that the policy was not trained on", label, dots)

    def _place(self, runs: WorkloadRuns, checkpoint: HeldOut) -> WorkloadRow:
        at_once = methods.zero_shot(checkpoint.path)
        trained = methods.fine_tuned(checkpoint.path, self.fine_tune_budget, max_updates=MAX_UPDATES)
        fine_tuned = runs.of_seeds(trained, self.seeds)
        budgets = [Budget(seconds=run.cpu_seconds) for run in fine_tuned]
        search = tuple(runs.run(methods.plain_search(budget), seed) for seed, budget in enumerate(budgets))
        zero_shot = runs.of_seeds(at_once, self.seeds)
        return WorkloadRow(
            **runs.facts,
            baselines=methods.classical_baselines(runs, self.seeds),
            runs={ZERO_SHOT: zero_shot, FINE_TUNED: fine_tuned, SEARCH: search},
        )


def _parts(rows: list[WorkloadRow]) -> dict[str, list[WorkloadRow]]:
    """Returns the rows of the papers' workloads, of the further ones, and all; empty parts are left out."""
    papers = [row for row in rows if row.workload in PAPERS.names()]
    further = [row for row in rows if row not in papers]
    parts = {"the papers'": papers, "further": further, "all": rows}
    return {name: some for name, some in parts.items() if some}


def _is_as_good(row: WorkloadRow) -> bool:
    """True if zero-shot is at least as good as the best classical placer; False where neither has a plan that fits."""
    ratio = row.ratio(ZERO_SHOT, BEST_CLASSICAL)
    return row.times_ns(ZERO_SHOT) is not None and (ratio is None or ratio <= 1.0)


def _is_faster(row: WorkloadRow, name: str, other: str) -> bool:
    """True if the method takes less time than the other, as geometric means over seeds; or it alone has plans."""
    ratio = row.ratio(name, other)
    return row.times_ns(name) is not None and (ratio is None or ratio < 1.0)
