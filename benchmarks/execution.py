"""Benchmark `execution`: plans that run on this machine's own devices, beside one device and beside predictions.

    measure devices -> measure ops -> place -> run beside one device -> run 20 placements, good, bad and random
                                                 speed-up                predicted against measured

Op times are measured on every device at once, each running the whole step by itself, since that is how a placed step
loads the machine. Nothing that is measured later flows back into a prediction.
"""

import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from scipy.stats import spearmanr

from benchmarks import process_execution
from benchmarks.benchmark import Benchmark, Say, pick
from benchmarks.figures import dot_plot
from benchmarks.op_times import measure_in_turn, op_times, with_op_times
from benchmarks.rows import Rows
from gdp.arrays import I64
from gdp.budget import Budget
from gdp.cluster import Cluster
from gdp.cluster.detect import detect
from gdp.errors import InputError
from gdp.execute.backends import Target, target_of
from gdp.execute.calibrate.calibrate import calibrate
from gdp.execute.executable import Executable
from gdp.execute.measurement import one_device_order
from gdp.execute.prediction import predict
from gdp.execute.run import OTHER_SUMS_TOLERANCE, PLACED, check_results, first_step
from gdp.models.papers import families
from gdp.models.papers.base import Example
from gdp.models.papers.workload import Workload
from gdp.models.pytorch import Program, capture
from gdp.placers import CLASSICAL
from gdp.search.place import place
from gdp.simulator.problem import Problem
from gdp.simulator.simulate import simulate

PROCESSES = "benchmarks.execution:inception_v3"  # is run with a process for each device as well
ONE_DEVICE = "one device"
_SEED = 0

_ANY = "2xp100-pcie-16g"  # workloads name the devices that they are usually placed on; here others take their place
SUBJECTS: Mapping[str, Workload] = {  # at sizes that a processor core does in about a second
    workload.name: workload
    for workload in (
        families.RNNLM.workload("rnnlm-2", _ANY, 256, num_steps=8, hidden=768, vocabulary=4000),
        families.GNMT.workload("gnmt-2", _ANY, 256, num_steps=6, hidden=512, vocabulary=4000),
        families.INCEPTION.workload("inception-v3", _ANY, 2),
        families.AMOEBANET.workload("amoebanet", _ANY, 4, cells_per_stack=1, filters=96),
    )
}


@dataclass(frozen=True, kw_only=True)
class ExecutionBenchmark(Benchmark):
    """Each workload placed and run on the devices of this machine."""

    name = "execution"
    budget: Budget = field(default_factory=lambda: Budget(seconds=10.0))
    workloads: tuple[str, ...] = tuple(SUBJECTS)
    repeats: int = 15  # steps of each arm
    placements: int = 20
    placement_rounds: int = 3  # of all placements, one after the other
    placement_repeats: int = 3  # steps of each in a round
    calibration_steps: int = 5
    quick: bool = False  # measure devices in seconds

    def check_workloads(self) -> None:
        pick(self.name, "workload", self.workloads, tuple(SUBJECTS))

    def measure(self, rows: Rows, say: Say) -> dict[str, Any]:
        devices = detect().devices
        if len(devices) < 2:
            raise InputError("execution: this machine has one device, so there is nothing to place")
        calibration = calibrate(devices, quick=self.quick, on_progress=lambda text: say(f"measuring {text}"))
        cluster, targets = calibration.cluster, tuple(map(target_of, devices))
        cluster.save(rows.directory / "cluster.json")
        config = asdict(self) | {"budget": str(self.budget), "workloads": None}
        settings = {"config": config, "kinds": [device.kind for device in devices]}
        placed = []
        for name in self.workloads:
            placed.append(rows.row(name, settings, partial(_measure, SUBJECTS[name], cluster, targets, self)))
            say(f"{name}: {placed[-1]['speedup']:.2f}x one device, median error {placed[-1]['median_error']:.0%}")
        with tempfile.TemporaryDirectory(prefix="gdp-bench-") as scratch:
            measure = partial(process_execution.measure, PROCESSES, str(self.budget), self.repeats, Path(scratch), say)
            processes = rows.row("processes", {"config": config}, measure)
        return {
            "rows": placed,
            "cluster": cluster.to_document(),
            "devices": [device.name for device in cluster.devices],
            "notes": list(calibration.notes),
            "has_gpu": torch.cuda.is_available(),
            "tolerance": OTHER_SUMS_TOLERANCE,
            "processes": processes,
        }

    def draw(self, measured: Mapping[str, Any]) -> bytes:
        dots = {
            row["workload"]: [item["predicted_ns"] / item["measured_ns"] for item in row["placements"]]
            for row in measured["rows"]
        }
        return dot_plot("Predicted step times", "predicted over measured; a dot for each placement", dots)


def inception_v3() -> Example:
    """Returns the model of that row, as `gdp run` takes it."""
    return SUBJECTS["inception-v3"].build()


def _measure(
    workload: Workload, cluster: Cluster, targets: Sequence[Target], config: ExecutionBenchmark
) -> dict[str, Any]:
    """Returns the row of a workload: its plan, one device and other placements, predicted and measured."""
    executable = _build(workload)
    program, content = executable.capture.program, executable.content()
    num_ops = program.graph.num_ops
    times = op_times({"": executable}, targets, config.calibration_steps)[""]
    graph = with_op_times(executable, cluster, times)
    problem = Problem.build(graph, cluster)
    plan = place(graph, cluster, budget=config.budget, seed=_SEED)
    alone = one_device_order(num_ops, int(np.argmin(times.sum(axis=0))), len(targets))
    results = first_step(program, plan.order, targets, content)
    equality, reference = check_results(executable, content, results, plan.order, targets)
    measurements = measure_in_turn(
        program, content, {PLACED: plan.order, ONE_DEVICE: alone}, targets, steps=config.repeats
    )
    placed, single = measurements[PLACED], measurements[ONE_DEVICE]
    ratios = np.divide(single.step_ns, placed.step_ns)
    prediction = predict(program, simulate(problem, plan.placement, order=plan.order), placed)
    placements = _placements(program, content, problem, plan.placement, targets, config)
    predicted, measured = ([item[key] for item in placements] for key in ("predicted_ns", "measured_ns"))
    errors = np.abs(np.divide(predicted, measured) - 1.0)
    return {
        "workload": workload.name,
        "description": workload.description,
        "batch_size": workload.batch_size,
        "num_ops": num_ops,
        "share_in_long_ops": float(times[times[:, 0] >= 300_000, 0].sum() / times[:, 0].sum()),
        "results": asdict(equality) | {"reference": reference},
        "placed_ns": placed.step_ns,
        "one_device_ns": single.step_ns,
        "speedup": float(np.median(ratios)),
        "speedup_quartiles": np.percentile(ratios, (25, 75)).tolist(),
        "predicted_ns": plan.step_time_ns,
        "predicted_one_device_ns": int(times.sum(axis=0).min()),
        "kinds": [asdict(row) for row in prediction.kinds],
        "hand_overs": [asdict(row) for row in prediction.hand_overs],
        "placements": placements,
        "rank_correlation": float(spearmanr(predicted, measured).statistic),
        "median_error": float(np.median(errors)),
        "largest_error": float(errors.max()),
    }


def _build(workload: Workload) -> Executable:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(_SEED)
        model, args, kwargs = workload.build()
    return Executable(capture(model, args, kwargs, name=workload.name), model, args, kwargs)


def _placements(
    program: Program,
    content: Mapping[int, Any],
    problem: Problem,
    best: I64,
    targets: Sequence[Target],
    config: ExecutionBenchmark,
) -> list[dict[str, Any]]:
    """Returns predicted and measured step times of placements of every quality.

    They take turns, since the machine's pace drifts and they are to be compared; not step by step, since a first step
    is slow and all need memory.
    """
    simulations = {name: simulate(problem, placement) for name, placement in _various(problem, best, config)}
    step_ns: dict[str, list[int]] = {name: [] for name in simulations}
    for _ in range(config.placement_rounds):
        for name, simulation in simulations.items():
            order = {name: simulation.order}
            measurements = measure_in_turn(program, content, order, targets, steps=config.placement_repeats)
            step_ns[name] += measurements[name].step_ns
    return [
        {"placement": name, "predicted_ns": simulation.step_time_ns, "measured_ns": int(np.median(step_ns[name]))}
        for name, simulation in simulations.items()
    ]


def _various(problem: Problem, best: I64, config: ExecutionBenchmark) -> list[tuple[str, I64]]:
    """Returns the search's answer and others near it, the classical placers', and random ones of ever finer grain."""
    random, num_ops, num_devices = np.random.default_rng(_SEED), problem.num_ops, problem.num_devices
    found: list[tuple[str, I64]] = [("auto", best)]
    for placer in CLASSICAL:
        plan = place(problem.graph, problem.cluster, placer=placer, budget=Budget(simulations=50), seed=_SEED)
        found.append((placer, plan.placement))
    share, grain = 0.05, num_ops
    while len(found) < config.placements:
        if len(found) % 2:
            moved = random.random(num_ops) < share
            placement = np.where(moved, random.integers(0, num_devices, num_ops), best)
            found.append((f"auto, {share:.0%} moved", _with_groups(problem, placement)))
            share *= 1.7
        else:
            grain = max(grain // 3, 1)
            blocks = random.integers(0, num_devices, num_ops // grain + 1)
            found.append((f"random, {grain} together", _with_groups(problem, blocks[np.arange(num_ops) // grain])))
    return found[: config.placements]


def _with_groups(problem: Problem, placement: I64) -> I64:
    """Returns `placement` with every group where its first op is."""
    groups = problem.graph.groups
    placement = placement.copy()
    for group in np.unique(groups[groups >= 0]):
        placement[groups == group] = placement[np.argmax(groups == group)]
    return placement
