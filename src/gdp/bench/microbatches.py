"""`gdp bench microbatches`: pipelines that placement and simulation find, against stages, at the same number of
micro-batches.

Stages are contiguous: of equal layer counts, balanced by time, and by exact dynamic programming over compute, transfers
and memory. Each is run in the best of the same orders (1F1B, zero-bubble, GPipe, b-level) under the same simulator; the
last also without the zero-bubble order, as pipelines are mostly run.
"""

import re
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from gdp.bench import methods
from gdp.bench.runs import Method, Outcome, Run, WorkloadRuns
from gdp.bench.tables import (
    counted,
    geometric_mean,
    machine,
    machine_line,
    markdown_table,
    milliseconds,
    verdict,
    write_figures,
)  # fmt: skip
from gdp.budget import Budget, Clock
from gdp.capture import capture_fn
from gdp.cluster import Cluster
from gdp.coarsen import Reduction
from gdp.devices import suggest
from gdp.errors import InputError
from gdp.microbatches import accumulated
from gdp.pipelines import ZERO_BUBBLE
from gdp.placers.base import UnitArrays
from gdp.placers.contiguous import contiguous
from gdp.placers.dp_stages import dp_stages
from gdp.placers.expert import layer_ranges
from gdp.placers.memory_repair import fit_memory, held_bytes
from gdp.placers.noise import Candidate
from gdp.plan import Plan
from gdp.problem import Placement, Problem
from gdp.simulate import replay
from gdp.workloads import Workload, families

MODELS: Mapping[str, Workload] = {
    "bert": families.BERT.workload("bert-24-layers", "4xp100-pcie-16g", 32),
    "llama": families.LLAMA.workload(
        "llama-16-layers", "4xp100-pcie-16g", 16, num_layers=16, hidden=1024, num_steps=1024, inner=2816
    ),
    "gnmt": families.GNMT.workload("gnmt-4-layers", "4xp100-pcie-16g", 256, num_layers=4, num_steps=20),
}
DEVICES = (4, 8)
COUNTS = (1, 2, 4, 8, 16)
EQUAL, BALANCED, EXACT, AUTO = "equal layers", "balanced by time", "exact DP", "auto"
PUBLISHED = "exact DP, GPipe or 1F1B"  # without the zero-bubble order
STAGES = (EQUAL, BALANCED, EXACT, PUBLISHED)
TARGET_EQUAL, TARGET_EXACT = 0.90, 0.97  # of the stages' step time, geometric mean

OnRow = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class Answer:
    """A method's plan with one seed."""

    status: str
    step_time_ns: int | None
    bubble: float | None  # share of the step in which devices that hold ops wait, on average
    peak_bytes: int | None  # of the fullest device


@dataclass(frozen=True, kw_only=True)
class Row:
    """A model on so many devices in so many micro-batches."""

    model: str
    num_devices: int
    count: int
    num_ops: int
    lower_bound_ns: int
    answers: Mapping[str, tuple[Answer, ...]]  # by method, then by seed

    def time_ns(self, method: str) -> float | None:
        """Geometric mean over seeds; None if a seed has no plan that fits."""
        times = [x.step_time_ns for x in self.answers[method] if x.status == "ok" and x.step_time_ns is not None]
        return geometric_mean(times) if len(times) == len(self.answers[method]) else None

    def ratio(self, method: str) -> float | None:
        """`auto` over that method; None without either."""
        mine, other = self.time_ns(AUTO), self.time_ns(method)
        return None if mine is None or other is None else mine / other

    def cell(self, method: str) -> str:
        """Step time and bubble share."""
        time_ns, bubbles = self.time_ns(method), [answer.bubble for answer in self.answers[method]]
        if time_ns is None:
            return "OOM"
        return f"{milliseconds(time_ns)} ({np.mean([bubble for bubble in bubbles if bubble is not None]):.0%})"


def run(
    *,
    models: Sequence[str] | None = None,
    counts: Sequence[int] = COUNTS,
    budget: Budget,
    seeds: int,
    out: Path | None,
    on_row: OnRow,
) -> dict[str, Any]:
    """Place each of `models` (None: all) on 4 and 8 devices, with `budget` of processor time for `auto`.

    Returns the figures with `markdown` made of them. RuntimeError if a plan does not give its figures again, or its
    schedule does not hold the memory that the simulator says.
    """
    chosen = tuple(MODELS) if models is None else tuple(models)
    for name in chosen:
        if name not in MODELS:
            raise InputError(f"bench microbatches: no model {name!r}; {suggest(name, list(MODELS))}")
    if budget.seconds is None or seeds < 1:
        raise InputError(f"bench microbatches: {seeds} seeds and a budget of {budget}; seeds and a time are expected")
    methods.warm_up()
    rows = []
    with tempfile.TemporaryDirectory(prefix="gdp-bench-") as scratch:
        directory = out / "runs" if out else Path(scratch)
        for model in chosen:
            for num_devices in DEVICES:
                for count in counts:
                    row = _place(model, num_devices, count, budget.seconds, seeds, directory, resume=out is not None)
                    rows.append(row)
                    on_row(_line(row))
    figures: dict[str, Any] = {
        "command": f"gdp bench microbatches --budget {budget} --seeds {seeds}"
        + ("" if models is None else f" --models {','.join(chosen)}"),
        "machine": machine(),
        "budget": str(budget),
        "seeds": seeds,
        "rows": [asdict(row) for row in rows],
        "means": {method: _mean(rows, method) for method in STAGES},
    }
    figures["markdown"] = _markdown(figures, rows)
    if out is not None:
        write_figures(out, "microbatches", figures)
    return figures


def _place(
    model: str, num_devices: int, count: int, seconds: float, seeds: int, directory: Path, *, resume: bool
) -> Row:
    workload = MODELS[model]
    part = workload.batch_size // count
    captured = capture_fn(lambda: workload.build(part), name=workload.name).graph
    graph, cluster = accumulated(captured, count), Cluster.parse(f"{num_devices}xp100-pcie-16g")
    runs = WorkloadRuns(f"{model}-{num_devices}x-m{count}", directory, resume=resume, inputs=(graph, cluster))
    asked = {AUTO: methods.auto(seconds), **{name: _stages(name, placer) for name, placer in _PLACERS.items()}}
    answers = {
        name: tuple(_answer(runs, method, seed) for seed in range(seeds if name == AUTO else 1))
        for name, method in asked.items()
    }
    return Row(
        model=model, num_devices=num_devices, count=count, num_ops=graph.num_ops, lower_bound_ns=runs.lower_bound_ns,
        answers=answers,
    )  # fmt: skip


def _equal_layers(problem: Problem, seed: int = 0) -> Placement | None:
    """Contiguous ranges of equally many layers, repaired if they do not fit."""
    layers = layer_ranges(problem, problem.num_devices)
    if layers is None:
        return None
    units = UnitArrays.of(problem)
    return fit_memory(problem, units.place(layers[units.first_op]))


_PLACERS: Mapping[str, Callable[[Problem, int], Placement | None]] = {
    EQUAL: _equal_layers, BALANCED: contiguous, EXACT: dp_stages, PUBLISHED: dp_stages,
}  # fmt: skip


def _stages(name: str, placer: Callable[[Problem, int], Placement | None]) -> Method:
    """Stages in the best of the orders, which the placer judges them in as well."""

    def run(reduction: Reduction, clock: Clock, seed: int) -> Outcome:
        original = reduction.original
        orders = [order for order in original.orders if name != PUBLISHED or order != ZERO_BUBBLE]
        found = []
        for order in orders:
            placement = placer(original.in_order(order), seed)
            if placement is not None:
                found.append(Candidate.of(original, placement, None, orders))
        best = min(found, key=lambda candidate: candidate.key, default=None)
        return Outcome(None if best is None else best.simulation, len(found))

    return Method(re.sub("[^a-zA-Z0-9]+", "-", name), run, Budget(simulations=1))


def _answer(runs: WorkloadRuns, method: Method, seed: int) -> Answer:
    made: Run = runs.run(method, seed)
    if made.status != "ok":
        return Answer(made.status, None, None, None)
    simulation = replay(runs.problem, Plan.load(runs.plan_path(method, seed)))
    for device, peak in enumerate(simulation.peak_memory_bytes.tolist()):
        held = int(held_bytes(simulation, device).sum())
        if held != peak:
            raise RuntimeError(f"{runs.name}: the schedule holds {held} bytes on device {device}, its peak is {peak}")
    busy = simulation.busy_fraction[np.unique(simulation.placement)]
    return Answer("ok", made.step_time_ns, 1.0 - float(busy.mean()), int(simulation.peak_memory_bytes.max()))


def _mean(rows: Sequence[Row], method: str) -> dict[str, Any]:
    ratios = [ratio for row in rows if (ratio := row.ratio(method)) is not None]
    return {
        "ratio": geometric_mean(ratios) if ratios else None,
        "worst": max(ratios, default=None),
        "num_rows": len(ratios),
    }


def _line(row: Row) -> str:
    cells = ", ".join(f"{name} {row.cell(name)}" for name in (AUTO, *STAGES))
    return f"{row.model} on {row.num_devices} devices, {row.count} micro-batch{'' if row.count == 1 else 'es'}: {cells}"


def _markdown(figures: Mapping[str, Any], rows: Sequence[Row]) -> str:
    targets = {EQUAL: TARGET_EQUAL, EXACT: TARGET_EXACT}
    sentences = []
    for method, mean in figures["means"].items():
        if mean["ratio"] is None:
            continue
        judged = f"; {verdict(mean['ratio'], targets[method])}" if method in targets else ""
        sentences.append(
            f"`auto` takes **{mean['ratio']:.3f}x** the step time of stages, {method} (over {mean['num_rows']} rows, "
            f"at worst {mean['worst']:.3f}x{judged})."
        )
    table = markdown_table(
        ("model", "devices", "micro-batches", "ops", "bound", AUTO, *STAGES, "to equal", "to exact DP"),
        [
            (
                row.model, str(row.num_devices), str(row.count), f"{row.num_ops:,}", milliseconds(row.lower_bound_ns),
                *(row.cell(name) for name in (AUTO, *STAGES)),
                *("-" if (ratio := row.ratio(name)) is None else f"{ratio:.3f}" for name in (EQUAL, EXACT)),
            )
            for row in rows
        ],
    )  # fmt: skip
    parts = (
        "## Micro-batches", f"    {figures['command']}", f"{machine_line()}.",
        "Step times in ms with the bubble, the share of the step in which devices that hold ops wait; "
        f"{counted(figures['seeds'], 'seed')}, {figures['budget']} of processor time on one thread for `auto`, 4 or 8 "
        "P100s with 16 GiB on PCIe. Every plan was saved, read back and derived anew, and the memory in flight was "
        "summed up from its schedule a second way: the peaks were equal.",
        "\n".join(f"- {sentence}" for sentence in sentences), table,
    )  # fmt: skip
    return "\n\n".join(parts) + "\n"
