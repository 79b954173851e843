"""Benchmark `paper`: the table of the GDP paper (arXiv 1910.01578) on simulated P100s, with baselines that it lacks.

fine-tuned, zero-shot    the default policy, by the checkpoint that holds the workload's family out
gdp-batch                the default policy that comes with gdp, trained on graphs of all families, at once
gdp-one, gdp-published   from scratch on the workload: the default policy, and GDP as published
hdp                      the learned baseline, with a multiple of the processor time of fine-tuning
search                   classical placers and the search without a policy, with fine-tuning's processor time
expert, metis, ...       the classical placers, each with its best seed; and METIS blind to memory
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks import methods
from benchmarks.benchmark import Benchmark, Say
from benchmarks.comparison import BEST_CLASSICAL, EXPERT, WorkloadRow, compare, ratio_dots
from benchmarks.figures import dot_plot
from benchmarks.held_out import checkpoints_in, choose
from benchmarks.rows import Rows
from benchmarks.runs import Run, WorkloadRuns
from gdp.budget import Budget
from gdp.errors import InputError
from gdp.models.papers import PAPERS
from gdp.policy.checkpoint import load_checkpoint
from gdp.policy.pretrained import shipped

FINE_TUNED = "fine-tuned"
METHODS = ("metis-blind", "hdp", "gdp-published", "gdp-one", "gdp-batch", "zero-shot", FINE_TUNED, "search")
TRAINED = ("gdp-published", "gdp-one")  # from scratch on the workload
CLASSICAL_COLUMNS = (EXPERT, "metis", BEST_CLASSICAL)


@dataclass(frozen=True, kw_only=True)
class PaperBenchmark(Benchmark):
    """Every method on each workload with each seed."""

    name = "paper"
    checkpoints: Path  # a directory with families held out
    seeds: int = 3
    fine_tune_budget: Budget = field(default_factory=lambda: Budget(seconds=60.0))
    one_budget: Budget = field(default_factory=lambda: Budget(seconds=120.0))  # of gdp-one and gdp-published
    hdp_factor: float = 15.0  # times the processor time of fine-tuning; the paper searches 15 times as fast as HDP
    batch: Path | None = None  # the checkpoint of gdp-batch; None: the one that comes with gdp
    workloads: tuple[str, ...] = PAPERS.names()

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.hdp_factor >= 1e6:
            raise InputError(f"paper: hdp_factor is {self.hdp_factor}; a factor below 10^6 is expected")

    def measure(self, rows: Rows, say: Say) -> dict[str, Any]:
        checkpoints = checkpoints_in(self.checkpoints)
        asked = {name: choose(checkpoints, name, self.checkpoints) for name in self.workloads}
        load_checkpoint(self.batch or Path(shipped()))  # a bad file is better known now than after hours
        methods.warm_up()
        placed = []
        for name in self.workloads:
            placed.append(self._place(WorkloadRuns(name, rows), asked[name].path, say))
            say(str(placed[-1]))
        fine_tuned_to = {name: compare(placed, FINE_TUNED, name) for name in (*CLASSICAL_COLUMNS, *METHODS)}
        return {
            "rows": placed,
            "policies": {name: checkpoint.to_document() for name, checkpoint in asked.items()},
            "cpu_hours": {checkpoint.path.name: checkpoint.cpu_hours for checkpoint in asked.values()},
            "columns": (*CLASSICAL_COLUMNS, *METHODS),
            "methods": METHODS,
            "trained": TRAINED,
            "to_expert": {name: compare(placed, name, EXPERT) for name in (BEST_CLASSICAL, "metis", *METHODS)},
            "fine_tuned_to": {name: mean for name, mean in fine_tuned_to.items() if name != FINE_TUNED},
        }

    def draw(self, measured: Mapping[str, Any]) -> bytes:
        dots = {name: ratio_dots(measured["rows"], name, EXPERT) for name in (BEST_CLASSICAL, *METHODS)}
        label = "step time over the expert's; a dot for each workload"
        return dot_plot("The paper's workloads", label, dots, logarithmic=True)

    def _place(self, runs: WorkloadRuns, checkpoint: Path, say: Say) -> WorkloadRow:
        found: dict[str, list[Run]] = {name: [] for name in METHODS}
        for seed in range(self.seeds):
            fine_tuned = methods.fine_tuned(checkpoint, self.fine_tune_budget)
            cpu_seconds = runs.run(fine_tuned, seed).cpu_seconds
            for method in (
                fine_tuned,
                methods.zero_shot(checkpoint),
                methods.zero_shot(self.batch or Path(shipped()), name="gdp-batch"),
                methods.from_scratch(self.one_budget),
                methods.published(self.one_budget),
                methods.blind_metis(),
                methods.plain_search(Budget(seconds=cpu_seconds)),
                methods.hdp(Budget(seconds=self.hdp_factor * cpu_seconds)),
            ):
                found[method.name].append(runs.run(method, seed))
                run = found[method.name][-1]
                say(f"{runs.name}, seed {seed}, {method.name}: {run.status} after {run.seconds:.1f} s")
        baselines = methods.classical_baselines(runs, self.seeds)
        return WorkloadRow(
            **runs.facts, baselines=baselines, runs={name: tuple(seeds) for name, seeds in found.items()}
        )
