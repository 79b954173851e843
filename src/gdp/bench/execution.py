"""`gdp bench execution`: do plans run as fast as predicted, and faster than one device? On this machine's own devices.

    measure devices -> measure ops -> place -> run beside one device -> run 20 placements, good, bad and random
                                                 speed-up                predicted against measured

Op times are measured on every device at once, each running the whole step by itself, since that is how a placed step
loads the machine. Nothing that is measured later flows back into a prediction.
"""

import tempfile
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from gdp.bench import process_execution
from gdp.bench.plot import dot_plot
from gdp.bench.rows import Rows
from gdp.bench.tables import machine, machine_line, markdown_table, milliseconds, verdict, write_figures
from gdp.budget import Budget
from gdp.capture import Program, capture
from gdp.cluster import Cluster
from gdp.errors import InputError
from gdp.execute.arms import on_one_device, run_arms
from gdp.execute.calibration import calibrate
from gdp.execute.local_devices import detect_local
from gdp.execute.prediction import predict, rank_correlation
from gdp.execute.run import OTHER_SUMS_TOLERANCE, PLACED, Executable, check_results, first_step
from gdp.execute.targets import Target
from gdp.graph import I64
from gdp.measured_times import with_times
from gdp.place import place
from gdp.placers import CLASSICAL
from gdp.problem import Problem
from gdp.simulate import simulate
from gdp.workloads import families
from gdp.workloads.base import Example
from gdp.workloads.workload import Workload

PROCESSES = "gdp.bench.execution:inception_v3"  # is run with a process for each device as well
RECURRENT, CONVOLUTIONAL = "recurrent", "convolutional"
TARGET_SPEEDUP = {RECURRENT: 1.4, CONVOLUTIONAL: 1.2}
TARGET_CORRELATION, TARGET_ERROR = 0.9, 0.15
ONE_DEVICE = "one device"

OnRow = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class Subject:
    """A workload at a size that a processor core does in about a second."""

    workload: Workload
    kind: str


_ANY = "2xp100-pcie-16g"  # workloads name the devices that they are usually placed on; here others take their place
SUBJECTS = {
    subject.workload.name: subject
    for subject in (
        Subject(families.RNNLM.workload("rnnlm-2", _ANY, 256, num_steps=8, hidden=768, vocabulary=4000), RECURRENT),
        Subject(families.GNMT.workload("gnmt-2", _ANY, 256, num_steps=6, hidden=512, vocabulary=4000), RECURRENT),
        Subject(families.INCEPTION.workload("inception-v3", _ANY, 2), CONVOLUTIONAL),
        Subject(families.AMOEBANET.workload("amoebanet", _ANY, 4, cells_per_stack=1, filters=96), CONVOLUTIONAL),
    )
}


@dataclass(frozen=True, slots=True, kw_only=True)
class ExecutionConfig:
    """How much is measured."""

    repeats: int = 15  # steps of each arm
    placements: int = 20
    placement_rounds: int = 3  # all placements one after the other, so often
    placement_repeats: int = 3  # steps of each in a round
    calibration_steps: int = 5
    budget: Budget = field(default_factory=partial(Budget, seconds=10.0))
    seed: int = 0

    def __post_init__(self) -> None:
        for name in ("repeats", "placements", "placement_rounds", "placement_repeats", "calibration_steps"):
            if getattr(self, name) < 1:
                raise InputError(f"bench execution: {name} is {getattr(self, name)}; at least 1 is expected")


def run(
    config: ExecutionConfig, *, names: Sequence[str] | None, quick: bool, out: Path | None, on_row: OnRow
) -> dict[str, Any]:
    """Place and run each workload on the devices of this machine.

    Returns the figures as a dictionary, with `markdown` made of them; they, a plot and the measured cluster are written
    to the directory `out` if there is one, and rows found there are not measured again.
    """
    chosen = list(SUBJECTS) if names is None else list(names)
    for name in chosen:
        if name not in SUBJECTS:
            raise InputError(f"bench execution: workload {name!r}; {', '.join(SUBJECTS)} are there")
    devices = detect_local()
    if len(devices) < 2:
        raise InputError("bench execution: this machine has one device, so there is nothing to place")
    calibration = calibrate(devices, quick=quick, on_progress=lambda text: on_row(f"measuring {text}"))
    cluster, targets = calibration.cluster, tuple(device.target for device in devices)
    if out is not None:
        cluster.save(out / "cluster.json")
    rows = Rows(None if out is None else out / "rows")
    found = []
    for name in chosen:
        settings = {"config": asdict(config) | {"budget": str(config.budget)}, "kinds": [item.kind for item in devices]}
        found.append(rows.row(name, settings, lambda name=name: _measure(SUBJECTS[name], cluster, targets, config)))  # type: ignore[misc]
        on_row(_line(found[-1]))
    with tempfile.TemporaryDirectory(prefix="gdp-bench-") as scratch:
        processes = rows.row(
            "processes",
            {"config": asdict(config) | {"budget": str(config.budget)}},
            lambda: process_execution.measure(
                PROCESSES, str(config.budget), config.repeats, Path(scratch), lambda text: on_row(f"measuring {text}")
            ),
        )
    figures: dict[str, Any] = {
        "command": "gdp bench execution" + ("" if names is None else f" --workloads {','.join(chosen)}"),
        "machine": machine(),
        "cluster": cluster.to_document(),
        "notes": list(calibration.notes),
        "has_gpu": torch.cuda.is_available(),
        "rows": found,
        "processes": processes,
    }
    figures["markdown"] = _markdown(figures, config, cluster)
    if out is not None:
        dots = [
            (row["workload"], [item["predicted_ns"] / item["measured_ns"] for item in row["placements"]])
            for row in found
        ]
        plot = dot_plot("Predicted step times", "predicted over measured; a dot for each placement", dots)
        write_figures(out, "execution", figures, plot)
    return figures


def inception_v3() -> Example:
    """The model of that row, as `gdp run` takes it."""
    return SUBJECTS["inception-v3"].workload.build()


def _measure(subject: Subject, cluster: Cluster, targets: Sequence[Target], config: ExecutionConfig) -> dict[str, Any]:
    executable = _build(subject, config.seed)
    program, content = executable.capture.program, executable.content()
    num_ops = program.graph.num_ops
    times = _op_times(executable, targets, config.calibration_steps)
    graph = with_times(
        program.graph,
        [{device.name: int(times[op, d]) for d, device in enumerate(cluster.devices)} for op in range(num_ops)],
    )
    problem = Problem.build(graph, cluster)
    plan = place(graph, cluster, budget=config.budget, seed=config.seed)
    alone = on_one_device(num_ops, int(np.argmin(times.sum(axis=0))), len(targets))
    results = first_step(program, plan.order, targets, content)
    equality, reference = check_results(executable, content, results, plan.order, targets)
    arms = run_arms(program, content, {PLACED: plan.order, ONE_DEVICE: alone}, targets, steps=config.repeats)
    placed, single = arms[PLACED], arms[ONE_DEVICE]
    ratios = np.divide(single.step_ns, placed.step_ns)
    prediction = predict(program, simulate(problem, plan.placement, order=plan.order), placed)
    return {
        "workload": subject.workload.name,
        "description": subject.workload.description,
        "batch_size": subject.workload.batch_size,
        "kind": subject.kind,
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
        "placements": _placements(program, content, problem, plan.placement, targets, config),
    }


def _build(subject: Subject, seed: int) -> Executable:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model, args, kwargs = subject.workload.build()
    return Executable(capture(model, args, kwargs, name=subject.workload.name), model, args, kwargs)


def _op_times(executable: Executable, targets: Sequence[Target], steps: int) -> I64:
    """int64[N, D]: the median time of each op on each device, while all devices run the whole step."""
    program, content = executable.capture.program, executable.content()
    num_ops = program.graph.num_ops

    def measure(target: Target) -> I64:
        return run_arms(program, content, {"": on_one_device(num_ops, 0, 1)}, [target], steps=steps)[""].median_op_ns()

    with ThreadPoolExecutor(len(targets)) as pool:
        return np.stack(list(pool.map(measure, targets)), axis=1)


def _placements(
    program: Program, content: Mapping[int, Any], problem: Problem, best: I64, targets: Sequence[Target],
    config: ExecutionConfig,
) -> list[dict[str, Any]]:  # fmt: skip
    """Predicted and measured step times of placements of every quality. They take turns, since the machine's pace
    drifts and what counts is how they compare; not step by step, since a first step is slow and all need memory."""
    simulations = {name: simulate(problem, placement) for name, placement in _various(problem, best, config)}
    step_ns: dict[str, list[int]] = {name: [] for name in simulations}
    for _ in range(config.placement_rounds):
        for name, simulation in simulations.items():
            order = {name: simulation.order}
            arms = run_arms(program, content, order, targets, steps=config.placement_repeats, warm_up_steps=1)
            step_ns[name] += arms[name].step_ns
    return [
        {"placement": name, "predicted_ns": simulation.step_time_ns, "measured_ns": int(np.median(step_ns[name]))}
        for name, simulation in simulations.items()
    ]


def _various(problem: Problem, best: I64, config: ExecutionConfig) -> list[tuple[str, I64]]:
    """The search's answer and others near it, the classical placers', and random ones of ever finer grain."""
    random, num_ops, num_devices = np.random.default_rng(config.seed), problem.num_ops, problem.num_devices
    found: list[tuple[str, I64]] = [("auto", best)]
    for placer in CLASSICAL:
        plan = place(problem.graph, problem.cluster, placer=placer, budget=Budget(simulations=50), seed=config.seed)
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
    """Every group where its first op is."""
    groups = problem.graph.groups
    placement = placement.copy()
    for group in np.unique(groups[groups >= 0]):
        placement[groups == group] = placement[np.argmax(groups == group)]
    return placement


def _ratios(row: Mapping[str, Any]) -> list[float]:
    return [item["predicted_ns"] / item["measured_ns"] for item in row["placements"]]


def _errors(row: Mapping[str, Any]) -> list[float]:
    return [abs(ratio - 1.0) for ratio in _ratios(row)]


def _correlation(row: Mapping[str, Any]) -> float:
    items = row["placements"]
    return rank_correlation([item["predicted_ns"] for item in items], [item["measured_ns"] for item in items])


def _line(row: Mapping[str, Any]) -> str:
    low, high = row["speedup_quartiles"]
    return (
        f"{row['workload']}: {milliseconds(np.median(row['placed_ns']))} ms, {row['speedup']:.2f}x one device "
        f"({low:.2f} to {high:.2f}); {len(row['placements'])} placements: rank correlation {_correlation(row):.2f}, "
        f"median error {np.median(_errors(row)):.0%}"
    )


def _markdown(figures: Mapping[str, Any], config: ExecutionConfig, cluster: Cluster) -> str:
    rows, names = figures["rows"], [device.name for device in cluster.devices]
    header = (
        "workload", "batch", "ops", "in ops of 0.3 ms", "one device", "plan", "quartiles", "speed-up", "quartiles",
        "predicted", "error",
    )  # fmt: skip
    main = [
        (
            row["workload"], f"{row['batch_size']}", f"{row['num_ops']:,}", f"{row['share_in_long_ops']:.0%}",
            milliseconds(np.median(row["one_device_ns"])), milliseconds(np.median(row["placed_ns"])),
            " to ".join(map(milliseconds, np.percentile(row["placed_ns"], (25, 75)))),
            f"{row['speedup']:.2f}", f"{row['speedup_quartiles'][0]:.2f} to {row['speedup_quartiles'][1]:.2f}",
            milliseconds(row["predicted_ns"]), f"{row['predicted_ns'] / np.median(row['placed_ns']) - 1:+.0%}",
        )
        for row in rows
    ]  # fmt: skip
    predictions = [
        (
            row["workload"], f"{len(row['placements'])}", f"{_correlation(row):.3f}", f"{np.median(_errors(row)):.1%}",
            f"{max(_errors(row)):.0%}",
        )
        for row in rows
    ]  # fmt: skip
    sentences = []
    for row in rows:
        judged = verdict(row["speedup"], TARGET_SPEEDUP[row["kind"]], at_least=True)
        if figures["has_gpu"]:
            judged = "no target: that of this workload is for two processor cores"
        sentences.append(f"{row['workload']}: **{row['speedup']:.2f}x** one device ({judged}).")
        judged = verdict(_correlation(row), TARGET_CORRELATION, at_least=True)
        error = float(np.median(_errors(row)))
        off = verdict(error, TARGET_ERROR, text=lambda value: f"{value:.0%}")
        sentences.append(
            f"{row['workload']}: rank correlation **{_correlation(row):.2f}** ({judged}); "
            f"median error **{error:.0%}** ({off})."
        )
    num_equal = sum(row["results"]["num_equal"] == row["results"]["num_tensors"] for row in rows)
    num_close = sum(row["results"]["largest_difference"] <= OTHER_SUMS_TOLERANCE for row in rows)
    close = f", within {OTHER_SUMS_TOLERANCE:.1%} of a tensor's largest for {num_close}" if figures["has_gpu"] else ""
    placements = [
        (row["workload"], item["placement"], milliseconds(item["predicted_ns"]), milliseconds(item["measured_ns"]))
        for row in rows
        for item in row["placements"]
    ]
    gpu = "" if figures["has_gpu"] else " There is no GPU on this machine, so there are no rows with one."
    parts = (
        "## Execution",
        f"    {figures['command']}",
        f"{machine_line()}.",
        f"Measured step times in ms on {', '.join(names)} of this machine, {config.repeats} steps of each arm in turn; "
        f"medians. The plan is what `auto` finds in {config.budget} with measured op times; one device is the faster "
        "one. Speed-ups are ratios of steps that followed each other. Loss, outputs, gradients and buffers were, bit "
        "for bit, those of PyTorch's own step, or, with random numbers, of the same program on one core, for "
        f"{num_equal} of {len(rows)} workloads{close}.{gpu}",
        markdown_table(header, main),
        f"Predicted against measured over {config.placements} placements: the search's, the classical placers', those "
        "with ops moved at random, and random ones.",
        markdown_table(("workload", "placements", "rank correlation", "median error", "largest error"), predictions),
        "\n".join(f"- {sentence}" for sentence in sentences),
        "![Execution](execution.svg)",
        "Devices and routes, measured beforehand: " + "; ".join(figures["notes"]) + ".",
        process_execution.markdown(figures["processes"]),
        "### What explains the errors",
        "What explains most of the error of the plan's step, sums over the ops of a kind in ms:",
        markdown_table(
            ("workload", "kind", "ops", "predicted", "measured"),
            [
                (
                    row["workload"], kind["name"], f"{kind['num_ops']}", milliseconds(kind["predicted_ns"]),
                    milliseconds(kind["measured_ns"]),
                )
                for row in rows
                for kind in row["kinds"][:3]
            ],
        ),
        "The placements:",
        markdown_table(("workload", "placement", "predicted", "measured"), placements),
    )  # fmt: skip
    return "\n\n".join(parts) + "\n"
