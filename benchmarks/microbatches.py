"""Benchmark `microbatches`: pipelines that placement and simulation find, and stages with as many micro-batches.

Stages are contiguous: of equal layer counts, balanced by time, and by exact dynamic programming over compute, transfers
and memory. Each is run in the best of the same orders (1F1B, zero-bubble, GPipe, b-level) under the same simulator; the
last also without the zero-bubble order, as pipelines are mostly run.
"""

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from benchmarks import methods
from benchmarks.benchmark import Benchmark, Say, pick, require_seconds
from benchmarks.comparison import WorkloadRow, compare, ratio_dots
from benchmarks.figures import dot_plot
from benchmarks.models import families
from benchmarks.rows import Rows
from benchmarks.runs import Method, WorkloadRuns
from gdp.budget import Budget, Clock
from gdp.cluster import Cluster
from gdp.graph.accumulation import accumulated
from gdp.models.papers import Workload
from gdp.models.papers.families import GNMT
from gdp.models.pytorch import capture_fn
from gdp.placers.contiguous import contiguous
from gdp.placers.dp_stages import dp_stages
from gdp.placers.expert import layer_ranges
from gdp.placers.memory_repair import fit_memory, held_bytes
from gdp.planning.warm_up import warm_up
from gdp.search.question import Question, Solution
from gdp.simulator.orders import ZERO_BUBBLE
from gdp.simulator.problem import Placement, Problem
from gdp.simulator.simulate import replay
from gdp.units.units import Units

MODELS: Mapping[str, Workload] = {
    "bert": families.BERT.workload("bert-24-layers", "4xp100-pcie-16g", 32),
    "llama": families.LLAMA.workload(
        "llama-16-layers", "4xp100-pcie-16g", 16, num_layers=16, hidden=1024, num_steps=1024, inner=2816
    ),
    "gnmt": GNMT.workload("gnmt-4-layers", "4xp100-pcie-16g", 256, num_layers=4, num_steps=20),
}
DEVICES = (4, 8)
AUTO = "auto"
EQUAL, BALANCED, EXACT = "equal layers", "balanced by time", "exact DP"
PUBLISHED = "exact DP, GPipe or 1F1B"  # without the zero-bubble order
STAGES = (EQUAL, BALANCED, EXACT, PUBLISHED)


@dataclass(frozen=True, kw_only=True)
class MicrobatchRow(WorkloadRow):
    """A model on a number of devices in a number of micro-batches."""

    model: str
    num_devices: int
    count: int
    bubbles: Mapping[str, float]  # by method: share of the step in which devices that hold ops wait, on average

    def bubble_cell(self, name: str) -> str:
        """Returns the step time with the bubble."""
        return f"{self.time_cell(name)}, {self.bubbles[name]:.0%}" if self.times_ns(name) else "OOM"


@dataclass(frozen=True, kw_only=True)
class MicrobatchesBenchmark(Benchmark):
    """Each model on 4 and 8 devices with each seed, within `budget` of processor time for `auto`."""

    name = "microbatches"
    budget: Budget = field(default_factory=lambda: Budget(seconds=20.0))
    seeds: int = 1
    models: tuple[str, ...] = tuple(MODELS)
    counts: tuple[int, ...] = (1, 2, 4, 8, 16)

    def __post_init__(self) -> None:
        super().__post_init__()
        pick(self.name, "model", self.models, tuple(MODELS))
        require_seconds(self.name, self.budget, "20s")

    def measure(self, rows: Rows, say: Say) -> dict[str, Any]:
        warm_up()
        placed = []
        for model in self.models:
            for num_devices in DEVICES:
                for count in self.counts:
                    placed.append(self._place(model, num_devices, count, rows))
                    say(str(placed[-1]))
        return {
            "rows": placed,
            "stages": STAGES,
            "means": {method: compare(placed, AUTO, method) for method in STAGES},
            "worst": {method: max(ratio_dots(placed, AUTO, method), default=None) for method in STAGES},
        }

    def draw(self, measured: Mapping[str, Any]) -> bytes:
        dots = {method: ratio_dots(measured["rows"], AUTO, method) for method in STAGES}
        return dot_plot("Micro-batches", "step time of auto over that of the stages; a dot for each row", dots)

    def _place(self, model: str, num_devices: int, count: int, rows: Rows) -> MicrobatchRow:
        workload = MODELS[model]
        part = workload.batch_size // count
        captured = capture_fn(lambda: workload.build(part), name=workload.name).graph
        inputs = accumulated(captured, count), Cluster.parse(f"{num_devices}xp100-pcie-16g")
        runs = WorkloadRuns(f"{model}-{num_devices}x-m{count}", rows, inputs)
        by_name = {AUTO: methods.auto(self.budget)} | {name: _stages(name) for name in STAGES}
        found = {name: runs.of_seeds(method, self.seeds if name == AUTO else 1) for name, method in by_name.items()}
        bubbles = {
            name: float(np.mean([_bubble(runs, by_name[name], seed) for seed in range(len(found[name]))]))
            for name in found
            if all(run.status == "ok" for run in found[name])
        }
        return MicrobatchRow(
            **runs.facts, baselines={}, runs=found, model=model, num_devices=num_devices, count=count, bubbles=bubbles
        )


def _equal_layers(problem: Problem, seed: int = 0) -> Placement | None:
    """Returns contiguous ranges of equally many layers, repaired if they do not fit."""
    layers = layer_ranges(problem, problem.num_devices)
    if layers is None:
        return None
    units = Units.of(problem)
    return fit_memory(problem, units.place_allowed(layers[units.first_op]))


_PLACERS: Mapping[str, Callable[[Problem, int], Placement | None]] = {
    EQUAL: _equal_layers,
    BALANCED: contiguous,
    EXACT: dp_stages,
    PUBLISHED: dp_stages,
}


def _stages(name: str) -> Method:
    """Returns the method of stages in the best of the orders, in each of which the placer also judges them."""

    def run(question: Question, clock: Clock) -> Solution:
        problem = question.problem
        orders = [order for order in problem.orders if name != PUBLISHED or order != ZERO_BUBBLE]
        placements = [_PLACERS[name](problem.in_order(order), question.seed) for order in orders]
        candidates = [question.try_orders(placement, orders) for placement in placements if placement is not None]
        clock.spend(len(candidates))
        return Solution(min(candidates, default=None))

    return Method(re.sub("[^a-zA-Z0-9]+", "-", name), run, Budget(simulations=1))


def _bubble(runs: WorkloadRuns, method: Method, seed: int) -> float:
    """Returns the bubble of a plan; RuntimeError if its schedule does not hold the memory that the simulator says."""
    simulation = replay(runs.problem, runs.plan(method, seed))
    for device, peak in enumerate(simulation.peak_memory_bytes.tolist()):
        held = int(held_bytes(simulation, device).sum())
        if held != peak:
            raise RuntimeError(f"{runs.name}: the schedule holds {held} bytes on device {device}, its peak is {peak}")
    return 1.0 - float(simulation.busy_fraction[np.unique(simulation.placement)].mean())
