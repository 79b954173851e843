"""Benchmark `execution-against`: gdp's plan beside the ways to train that users have, on two processor cores.

    measure devices -> measure ops of all parts -> choose a layout -> train in turn with the arms of `rival_steps`
                                                                   -> run other layouts, predicted and measured

All arms train the same model from the same parameters with the same batch, and have the losses of one process. Their
processes stay alive and take turns, step by step.
"""

import gc
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field
from functools import cache, partial
from typing import Any

import numpy as np
import numpy.typing as npt

from benchmarks.benchmark import Benchmark, Say, pick
from benchmarks.figures import dot_plot
from benchmarks.layout_predictions import predictions
from benchmarks.own_steps import MeasuredSubject, OwnSteps
from benchmarks.page import geometric_mean
from benchmarks.rival_processes import RivalError, RivalProcesses, TrainedStep
from benchmarks.rival_stages import balanced_cut
from benchmarks.rival_steps import ARMS, EAGER, NUM_PROCESSES, RivalSetting
from benchmarks.rows import Rows
from benchmarks.training_subjects import SUBJECTS, Subject
from gdp.budget import Budget
from gdp.cluster.detect import Detected, detect
from gdp.errors import InputError
from gdp.execute.backends import Target, target_of
from gdp.execute.calibrate.calibrate import Calibration, calibrate
from gdp.graph.layers import LayerPaths
from gdp.search.place import place
from gdp.simulator.problem import Problem

RIVALS = tuple(name for name in ARMS if name != EAGER)
_OWN = "gdp"
_CHECKED = 3  # steps whose losses are compared: two updates lie between them
_TOLERANCE = 1e-3  # of the largest loss: sums are added in another order, and Adam's first steps follow signs
_SEED = 0

ArmSteps = Mapping[tuple[str, str], Callable[[], TrainedStep]]
"""Steps by arm and variant."""


@dataclass(frozen=True, kw_only=True)
class ExecutionAgainstBenchmark(Benchmark):
    """Each subject trained by gdp's plan and by the arms of `against`, in turn."""

    name = "execution-against"
    against: tuple[str, ...] = RIVALS
    budget: Budget = field(default_factory=lambda: Budget(seconds=10.0))
    workloads: tuple[str, ...] = tuple(SUBJECTS)
    repeats: int = 15  # steps of each arm
    placements: int = 20  # layouts and placements, predicted and measured
    placement_rounds: int = 3  # of all, one after the other
    placement_repeats: int = 2  # steps of each in a round
    calibration_steps: int = 5
    only_devices: bool = False  # ops are not measured: what was measured of the devices predicts them
    quick: bool = False  # measure devices in seconds

    def __post_init__(self) -> None:
        super().__post_init__()
        pick(self.name, "arm", self.against, RIVALS)

    def check_workloads(self) -> None:
        pick(self.name, "workload", self.workloads, tuple(SUBJECTS))

    def measure(self, rows: Rows, say: Say) -> dict[str, Any]:
        devices = two_cores(self.name)
        targets = tuple(map(target_of, devices))

        def measure() -> Calibration:
            return calibrate(devices, quick=self.quick, on_progress=lambda text: say(f"measuring {text}"))

        # once where ops are measured too, or else before each model: a machine that others share drifts
        measured_devices = measure if self.only_devices else cache(measure)
        config = asdict(self) | {"budget": str(self.budget), "workloads": None}
        settings = {"config": config, "kinds": [device.kind for device in devices]}
        measured = []
        for name in self.workloads:
            row = rows.row(name, settings, partial(_measure, SUBJECTS[name], measured_devices, targets, self))
            measured.append(row)
            best = f"{row['speedup']:.2f}x {row['best']}" if row["best"] else "no other arm"
            say(f"{name}: {best} under {row['layout']}, median error {row['predictions']['median_error']:.0%}")
        ratios = [row["speedup"] for row in measured if row["best"]]
        return {
            "rows": measured,
            "devices": [device.name for device in devices],
            "notes": sorted({note for row in measured for note in row["notes"]}),
            "mean_speedup": geometric_mean(ratios) if ratios else None,
            "median_error": float(np.median(np.abs(_predicted_over_measured(measured) - 1))),
            "ratio_range": np.percentile(1 / _predicted_over_measured(measured), (10, 90)).tolist(),
        }

    def draw(self, measured: Mapping[str, Any]) -> bytes:
        dots = {row["workload"]: _predicted_over_measured([row]).tolist() for row in measured["rows"]}
        return dot_plot("Predicted step times", "predicted over measured; a dot for each layout and placement", dots)


def two_cores(bench: str) -> list[Detected]:
    """Returns two processor cores that are devices of their own; InputError where this machine has none to give."""
    devices = [device for device in detect().devices if len(target_of(device).cores) == 1][:NUM_PROCESSES]
    if len(devices) < NUM_PROCESSES:
        raise InputError(
            f"{bench}: two processor cores are needed as devices of their own, and this machine "
            "has none to give; where it has GPUs, hide them with CUDA_VISIBLE_DEVICES="
        )
    return devices


def _predicted_over_measured(rows: Sequence[Mapping[str, Any]]) -> npt.NDArray[np.float64]:
    """Returns the ratio of each layout and placement of all rows."""
    items = [item for row in rows for item in row["predictions"]["items"]]
    return np.array([item["predicted_ns"] / item["measured_ns"] for item in items])


def _measure(
    subject: Subject,
    measured_devices: Callable[[], Calibration],
    targets: Sequence[Target],
    config: ExecutionAgainstBenchmark,
) -> dict[str, Any]:
    """Returns the row of a subject."""
    calibration = measured_devices()
    cluster = calibration.cluster
    num_steps = 0 if config.only_devices else config.calibration_steps
    measured = MeasuredSubject(subject, cluster, targets, num_steps=num_steps)
    plan = place(measured.parts, cluster, budget=config.budget, seed=_SEED, robust=0.0)
    step = measured.step(plan)
    program = measured.program(step)
    cores = [target.cores for target in targets]
    own = OwnSteps(program, plan.order, measured.content(program), targets)
    arms = train_in_turn(rival_setting(measured), config.against, own, step.layout.num_parts, cores, config.repeats)
    best = min(
        (name for name in config.against if arms[name]["step_ns"]),
        key=lambda name: float(np.median(arms[name]["step_ns"])),
        default="",
    )
    own_ns = arms[_OWN]["step_ns"]
    ratios = np.divide(arms[best]["step_ns"] if best else own_ns, own_ns)
    return {
        "workload": subject.name,
        "kind": subject.kind,
        "description": subject.workload.description,
        "batch_size": subject.batch_size,
        "num_ops": program.graph.num_ops,
        "cluster": cluster.to_document(),
        "notes": list(calibration.notes),
        "layout": str(step.layout),
        "predicted_ns": plan.step_time_ns,
        "arms": arms,
        "best": best,
        "speedup": float(np.median(ratios)),
        "speedup_quartiles": np.percentile(ratios, (25, 75)).tolist(),
        "predictions": predictions(
            measured, plan, count=config.placements, rounds=config.placement_rounds, repeats=config.placement_repeats
        ),
    }


def rival_setting(measured: MeasuredSubject) -> RivalSetting:
    """Returns the layers that FSDP shards, and the cut of two stages that measured times balance."""
    graph = measured.parts.exact(NUM_PROCESSES)
    layers = LayerPaths.of(graph)
    paths = tuple(path for path, of_list in zip(layers.names, layers.lists, strict=True) if of_list)
    times_ns = Problem.build(graph, measured.cluster).op_time_ns[:, 0]
    return RivalSetting(subject=measured.subject, layers=paths, cut=balanced_cut(graph, times_ns))


def train_in_turn(
    setting: RivalSetting,
    against: Sequence[str],
    own: OwnSteps,
    own_parts: int,
    cores: Sequence[Sequence[int]],
    repeats: int,
) -> dict[str, dict[str, Any]]:
    """Trains `repeats` steps by each arm, step by step in turn, after warm-up steps whose losses are compared.

    Returns for each arm the times of its fastest variant and of all, or the reason why it does not train the model.
    RuntimeError if the losses of gdp's own arm are not those of one process.
    """
    reasons: dict[tuple[str, str], str] = {}
    differences: dict[tuple[str, str], float] = {}
    step_ns: dict[tuple[str, str], list[int]] = {}
    with ExitStack() as stack:
        turns: dict[tuple[str, str], Callable[[], TrainedStep]] = {(_OWN, ""): stack.enter_context(own).step}
        num_parts = {(_OWN, ""): own_parts}
        for name in (EAGER, *against):
            processes = stack.enter_context(RivalProcesses(name, setting, cores))
            for variant in ARMS[name].variants:
                turns[name, variant] = partial(processes.step, variant)
                num_parts[name, variant] = ARMS[name].num_parts(variant)
        first: dict[tuple[str, str], list[float]] = {key: [] for key in turns}
        for _ in range(_CHECKED):
            for key, step in _round(turns, reasons):
                first[key].append(step.loss)
        known = _losses_of_one_process(setting, cores, {num_parts[key] for key in turns if key not in reasons})
        for key, found in first.items():
            if key in reasons:
                continue
            count = num_parts[key]
            differences[key] = float(np.max(np.abs(np.subtract(found, known[count]))) / np.max(np.abs(known[count])))
            if not differences[key] <= _TOLERANCE:
                what = f"losses {found}, and {known[count]} in one process"
                if key[0] == _OWN:
                    raise RuntimeError(f"{setting.subject.name}: {what}")
                reasons[key] = what
        if gc.isenabled():  # garbage is collected between steps, as the other processes do
            stack.callback(gc.enable)
        gc.disable()
        for _ in range(repeats):
            for key, step in _round(turns, reasons):
                step_ns.setdefault(key, []).append(step.time_ns)
            gc.collect(0)
    return {name: _arm(name, reasons, differences, step_ns) for name in (_OWN, EAGER, *against)}


def _round(turns: ArmSteps, reasons: dict[tuple[str, str], str]) -> list[tuple[tuple[str, str], TrainedStep]]:
    """Returns a step of each arm; one that fails is left out from then on, and its reason kept."""
    steps = []
    for key, take_step in turns.items():
        if key not in reasons:
            try:
                steps.append((key, take_step()))
            except RivalError as error:
                reasons[key] = str(error)
    return steps


def _losses_of_one_process(
    setting: RivalSetting, cores: Sequence[Sequence[int]], counts: Iterable[int]
) -> dict[int, list[float]]:
    """Returns the losses of the first steps, by the number of parts of the batch."""
    with RivalProcesses(EAGER, setting, cores) as process:
        return {count: [process.step(str(count)).loss for _ in range(_CHECKED)] for count in counts}


def _arm(
    name: str,
    reasons: Mapping[tuple[str, str], str],
    differences: Mapping[tuple[str, str], float],
    step_ns: Mapping[tuple[str, str], list[int]],
) -> dict[str, Any]:
    failed = {variant: reason for (arm, variant), reason in reasons.items() if arm == name}
    variants = {variant: times for (arm, variant), times in step_ns.items() if arm == name and variant not in failed}
    best = min(variants, key=lambda variant: float(np.median(variants[variant])), default="")
    return {
        "reason": "" if variants else next(iter(failed.values())),
        "variant": best,
        "step_ns": variants.get(best, []),
        "variants": variants,
        "failed": failed,
        "loss_difference": max((differences[name, variant] for variant in variants), default=None),
    }
