"""Benchmark `ecosystem`: `auto` against the device maps of Hugging Face's accelerate, on Transformers models.

accelerate is asked for its maps itself (`accelerate_maps`), with several limits of memory each; their steps are
simulated from the same graph and cluster, memory enforced.
"""

import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks import methods, model_configs
from benchmarks.benchmark import Benchmark, Say, pick, require_seconds
from benchmarks.comparison import BEST_CLASSICAL, MeanRatio, WorkloadRow, compare, ratio_dots
from benchmarks.figures import dot_plot
from benchmarks.machines import INFERENCE, TRAINING, BenchMachine, preset, small_gpus
from benchmarks.rows import Rows
from benchmarks.runs import WorkloadRuns
from gdp.budget import Budget
from gdp.export import accelerate_maps
from gdp.export.accelerate_maps import MODES
from gdp.models.model import Reading
from gdp.models.source import ModelSource
from gdp.planning.warm_up import warm_up
from gdp.simulator.plan import Baseline

NAMES = (
    "bert-base",
    "t5-base",
    "vit-base",
    "swin-tiny",
    "whisper-small",
    "clip-vit-b-32",
    "detr-resnet-50",
    "sam-vit-base",
    "llama-7b",
    "mixtral-8x7b",
    "mamba-130m",
    "efficientnet-b0",
)
DISTINCT_MODES = tuple(mode for mode in MODES if mode != "balanced")  # which is the same as accelerate's `auto`
GDP = "gdp"  # the method; accelerate has a mode `auto`, too
BEST_MODE = BEST_CLASSICAL  # of the baselines of a row, which are the modes here

MACHINES = (
    preset("2-equal", "2xv100-sxm-32g"),
    preset("4-equal", "4xp100-pcie-16g"),
    preset("fast-and-slow", "rtx4090-24g+l4-24g"),
    # accelerate trains nothing that it has put on a CPU
    BenchMachine("gpu-and-cpu", "p100 of 60 % of the memory + cpu-16core", small_gpus, steps=(INFERENCE,)),
    BenchMachine(
        "2-gpus-and-cpu",
        "2 p100 of 30 % of the memory each + cpu-16core",
        lambda graph: small_gpus(graph, share=0.3, count=2),
        steps=(INFERENCE,),
    ),
)


@dataclass(frozen=True, kw_only=True)
class EcosystemRow(WorkloadRow):
    """A step of a model on a machine; the baselines are accelerate's modes."""

    machine: str
    model: str
    step: str


@dataclass(frozen=True, kw_only=True)
class EcosystemBenchmark(Benchmark):
    """Each model on each machine with each seed, within `budget` of processor time."""

    name = "ecosystem"
    budget: Budget = field(default_factory=lambda: Budget(seconds=10.0))
    seeds: int = 1
    models: tuple[str, ...] = NAMES
    machines: tuple[str, ...] = tuple(machine.name for machine in MACHINES)

    def __post_init__(self) -> None:
        super().__post_init__()
        pick(self.name, "machine", self.machines, [machine.name for machine in MACHINES])
        require_seconds(self.name, self.budget, "10s")

    def measure(self, rows: Rows, say: Say) -> dict[str, Any]:
        warm_up()
        chosen = [machine for machine in MACHINES if machine.name in self.machines]
        placed = []
        with tempfile.TemporaryDirectory(prefix="gdp-configs-") as directory:
            for name in self.models:
                model = model_configs.write_model(name, Path(directory))
                for step in (INFERENCE, TRAINING):
                    machines = [machine for machine in chosen if step in machine.steps]
                    if not machines:
                        continue
                    source = ModelSource(model, Reading(training=step == TRAINING))
                    graph, module = source.whole().graph, accelerate_maps.module_of(source)
                    for machine in machines:
                        runs = WorkloadRuns(f"{name}-{step}-on-{machine.name}", rows, (graph, machine.cluster(graph)))
                        placed.append(self._place(runs, machine=machine.name, model=name, step=step, module=module))
                        say(str(placed[-1]))
        parts = [(step, machine) for step in (INFERENCE, TRAINING) for machine in chosen if step in machine.steps]
        return {
            "rows": placed,
            "modes": {mode: compare(placed, GDP, mode) for mode in MODES},
            "distinct_modes": MeanRatio.of([row.ratios(GDP, mode) for row in placed for mode in DISTINCT_MODES]),
            "best_mode": compare(placed, GDP, BEST_MODE),
            "worst": max((ratio for mode in MODES for ratio in ratio_dots(placed, GDP, mode)), default=None),
            "parts": [
                {
                    "step": step,
                    "machine": machine.name,
                    "devices": machine.devices,
                    "means": [
                        compare([row for row in placed if (row.step, row.machine) == (step, machine.name)], GDP, mode)
                        for mode in (*MODES, BEST_MODE)
                    ],
                }
                for step, machine in parts
            ],
        }

    def draw(self, measured: Mapping[str, Any]) -> bytes:
        dots = {
            f"accelerate's {mode}": [1 / ratio for ratio in ratio_dots(measured["rows"], GDP, mode)]
            for mode in DISTINCT_MODES
        }
        label = "times as fast as accelerate's device map; a dot for each step and machine"
        return dot_plot("Ecosystem", label, dots, logarithmic=True)

    def _place(self, runs: WorkloadRuns, *, machine: str, model: str, step: str, module: Any) -> EcosystemRow:
        modes = {}
        for mode in MODES:
            best = accelerate_maps.best_step(module, runs.problem, mode)
            status = "failed" if best is None else "ok" if best.feasible else "infeasible"
            modes[mode] = Baseline(status, None if best is None else best.step_time_ns, 0.0)
        method = methods.auto(self.budget)
        return EcosystemRow(
            **runs.facts,
            baselines=modes,
            runs={GDP: runs.of_seeds(method, self.seeds)},
            machine=machine,
            model=model,
            step=step,
        )
