"""`gdp bench ecosystem`: `auto` against the device maps of Hugging Face's accelerate, on Transformers models.

accelerate is asked for its maps itself (`accelerate_maps`), with several limits of memory each; what they do is
simulated from the same graph and cluster, memory enforced.
"""

import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from gdp import accelerate_maps
from gdp.accelerate_maps import MODES
from gdp.bench import methods, model_configs
from gdp.bench.comparison import MethodsRow, compare
from gdp.bench.machines import choose, require_time, small_gpus
from gdp.bench.runs import WorkloadRuns
from gdp.bench.tables import (
    counted,
    machine,
    machine_line,
    markdown_table,
    mean_ratio,
    milliseconds,
    write_figures,
)
from gdp.budget import Budget
from gdp.cluster import Cluster
from gdp.graph import Graph
from gdp.plan import Baseline
from gdp.sources import Reading, read_model

NAMES = (
    "bert-base", "t5-base", "vit-base", "swin-tiny", "whisper-small", "clip-vit-b-32", "detr-resnet-50",
    "sam-vit-base", "llama-7b", "mixtral-8x7b", "mamba-130m", "efficientnet-b0",
)  # fmt: skip
TARGET = 1 / 1.3  # of the step time with accelerate's maps, geometric mean
AUTO, BEST_MODE = "auto", "best mode"
INFERENCE, TRAINING = "inference", "training"


@dataclass(frozen=True, slots=True)
class Machine:
    """A kind of machine: the cluster for a graph, and which steps run on it."""

    name: str
    text: str  # what the table calls it
    cluster: Callable[[Graph], Cluster]
    steps: tuple[str, ...] = (INFERENCE, TRAINING)


def _preset(name: str, preset: str) -> Machine:
    return Machine(name, preset, lambda graph: Cluster.parse(preset))


def _two_small_gpus(graph: Graph) -> Cluster:
    return small_gpus(graph, share=0.3, count=2)


MACHINES = (
    _preset("2-equal", "2xv100-sxm-32g"),
    _preset("4-equal", "4xp100-pcie-16g"),
    _preset("fast-and-slow", "rtx4090-24g+l4-24g"),
    # accelerate trains nothing that it has put on a CPU
    Machine("gpu-and-cpu", "p100 of 60 % of the memory + cpu-16core", small_gpus, (INFERENCE,)),
    Machine("2-gpus-and-cpu", "2 p100 of 30 % of the memory each + cpu-16core", _two_small_gpus, (INFERENCE,)),
)

OnRow = Callable[[str], None]


@dataclass(frozen=True, kw_only=True)
class Row(MethodsRow):
    """A step of a model on a machine; the baselines are accelerate's modes."""

    machine: str
    model: str
    step: str

    def mode_ns(self) -> int | None:
        """The fastest of accelerate's modes that fits."""
        times = [time_ns for mode in MODES if (time_ns := self.baseline_ns(mode)) is not None]
        return min(times, default=None)

    def to_mode(self, mode: str) -> float | None:
        """The step time of `auto` over that of a mode or of the best one."""
        mine, other = self.times_ns(AUTO), self.mode_ns() if mode == BEST_MODE else self.baseline_ns(mode)
        return None if mine is None or other is None else float(np.exp(np.mean(np.log(mine))) / other)


def run(
    *,
    names: Sequence[str] | None = None,
    machines: Sequence[str] | None = None,
    budget: Budget,
    seeds: int,
    out: Path | None,
    on_row: OnRow,
) -> dict[str, Any]:
    """Place the models `names` on `machines` (None: all) with `seeds` seeds, each within `budget` of processor time.

    Returns the figures with `markdown` made of them, as the other benchmarks do. RuntimeError if a plan does not fit or
    does not give its figures again.
    """
    chosen = choose("ecosystem", MACHINES, machines)
    seconds = require_time("ecosystem", budget, seeds)
    methods.warm_up()
    rows: list[Row] = []
    with tempfile.TemporaryDirectory(prefix="gdp-bench-") as scratch:
        directory = out / "runs" if out else Path(scratch)
        for name in NAMES if names is None else names:
            model = model_configs.write_model(name, Path(scratch))
            for step in (INFERENCE, TRAINING):
                here = [item for item in chosen if step in item.steps]
                if not here:
                    continue
                reading = Reading(training=step == TRAINING)
                graph = read_model(model, reading).graph
                module = accelerate_maps.module_of(model, training=reading.training)
                for item in here:
                    rows.append(_place(item, name, step, graph, module, seconds, seeds, directory, out is not None))
                    on_row(_line(rows[-1]))
    command = f"gdp bench ecosystem --budget {budget} --seeds {seeds}"
    command += "" if names is None else f" --models {','.join(names)}"
    command += "" if machines is None else f" --machines {','.join(machines)}"
    figures: dict[str, Any] = {
        "command": command,
        "machine": machine(),
        "budget": str(budget),
        "seeds": seeds,
        "rows": [row.to_document() for row in rows],
        "modes": {mode: compare(rows, AUTO, mode) for mode in MODES},
        "distinct_modes": mean_ratio([row.to_mode(mode) for row in rows for mode in MODES if mode != "balanced"]),
        "best_mode": mean_ratio([row.to_mode(BEST_MODE) for row in rows]),
    }
    figures["markdown"] = _markdown(figures, rows, chosen)
    if out is not None:
        write_figures(out, "ecosystem", figures)
    return figures


def _place(
    item: Machine, name: str, step: str, graph: Graph, module: Any, seconds: float, seeds: int, directory: Path,
    resume: bool,
) -> Row:  # fmt: skip
    cluster = item.cluster(graph)
    runs = WorkloadRuns(f"{name}-{step}-on-{item.name}", directory, resume=resume, inputs=(graph, cluster))
    modes = {}
    for mode in MODES:
        found = accelerate_maps.best_step(module, runs.problem, mode)
        status = "failed" if found is None else "ok" if found.feasible else "infeasible"
        modes[mode] = Baseline(status, None if found is None else found.step_time_ns, 0.0)
    search = methods.auto(seconds)
    return Row(
        workload=runs.name,
        machine=item.name,
        model=name,
        step=step,
        cluster=cluster.name,
        num_ops=graph.num_ops,
        lower_bound_ns=runs.lower_bound_ns,
        baselines=modes,
        runs={AUTO: tuple(runs.run(search, seed) for seed in range(seeds))},
    )


def _line(row: Row) -> str:
    modes = ", ".join(f"{mode} {row.baseline_cell(mode)}" for mode in MODES if mode != "balanced")
    return f"{row.workload}: step times in ms: auto {row.time_cell(AUTO)}; accelerate: {modes}"


def _mean_cell(rows: Sequence[Row], mode: str) -> str:
    ratio = mean_ratio([row.to_mode(mode) for row in rows])["ratio"]
    return "-" if ratio is None else f"{1 / ratio:.3f}"


def _markdown(figures: Mapping[str, Any], rows: Sequence[Row], chosen: Sequence[Machine]) -> str:
    best, every = figures["best_mode"]["ratio"], figures["distinct_modes"]["ratio"]
    ratios = [ratio for row in rows for mode in MODES if (ratio := row.to_mode(mode)) is not None]
    fit_mine = [row for row in rows if row.times_ns(AUTO) is not None]
    fit_theirs = [row for row in rows if row.mode_ns() is not None]
    fit_both = sum(row in fit_mine for row in fit_theirs)
    sentences = [
        f"`auto` has a plan that fits in {len(fit_mine)} of {len(rows)} rows, accelerate in {len(fit_theirs)}; where "
        f"accelerate has one, `auto` has one in {fit_both}."
    ]
    if best is not None and every is not None:
        reached = "reached" if every <= TARGET else "missed"
        sentences = [
            f"A step is **{1 / every:.3f}** times as fast as with accelerate's modes (geometric mean over rows and "
            f"modes whose plans fit, `auto` and `balanced`, which are one, counted once; target 1.3: {reached}).",
            f"It is {1 / best:.3f} times as fast as with the best mode of each row ({len(fit_theirs)} rows).",
            f"It takes at worst {max(ratios):.3f} times as long as with any mode.",
            *sentences,
        ]
    overview = markdown_table(
        ("step", "machine", "devices", *(f"to {mode}" for mode in MODES), "to the best mode"),
        [
            (step, item.name, item.text, *(_mean_cell(part, mode) for mode in (*MODES, BEST_MODE)))
            for step in (INFERENCE, TRAINING)
            for item in chosen
            if step in item.steps
            for part in [[row for row in rows if row.machine == item.name and row.step == step]]
        ],
    )
    main = markdown_table(
        ("model", "step", "machine", "ops", "gdp", "bound", *MODES, "times as fast as the best"),
        [
            (
                row.model, row.step, row.machine, f"{row.num_ops:,}", row.time_cell(AUTO),
                milliseconds(row.lower_bound_ns), *(row.baseline_cell(mode) for mode in MODES),
                "-" if (ratio := row.to_mode(BEST_MODE)) is None else f"{1 / ratio:.3f}",
            )
            for row in rows
        ],
    )  # fmt: skip
    parts = (
        "## Ecosystem", f"    {figures['command']}", f"{machine_line()}.",
        f"Step times in ms; {counted(figures['seeds'], 'seed')}, {figures['budget']} of processor time each, on one "
        "thread, in which op times vary by 2 % as by default. The models are published configs with default sizes "
        "(`gdp bench capture`). accelerate's own library made the maps, each mode with ten limits of memory, of which "
        "the fastest that fits counts; what it puts on the CPU is fetched at once or, as its hooks do, when the op "
        "before has ended, whichever is faster. Memory is enforced: OOM is a mode without a plan that fits.",
        "\n".join(f"- {sentence}" for sentence in sentences),
        "How many times as fast as accelerate's modes, geometric means:", overview, main,
    )  # fmt: skip
    return "\n\n".join(parts) + "\n"
