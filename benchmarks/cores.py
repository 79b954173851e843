"""Benchmark `cores`: steps predicted by what was measured of processor cores, beside measured ones.

Both cores train a copy of the model at the same time, each in a process of its own, op by op.
"""

from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

import numpy as np
import torch

from benchmarks import core_models
from benchmarks.benchmark import Benchmark, Say, pick
from benchmarks.execution_against import two_cores
from benchmarks.rows import Rows
from gdp.cluster import Cluster
from gdp.costs.kernels import CLASSES, Kernels
from gdp.costs.op_times import op_times, step_kernels
from gdp.costs.rates import kernel_times
from gdp.execute.backends import Target, target_of
from gdp.execute.calibrate.calibrate import calibrate
from gdp.execute.measurement import PlacedProgram, measure_programs
from gdp.graph import Graph
from gdp.models.pytorch import capture

_SEED, _WARM_UP_STEPS = 0, 4
_SHOWN = 3  # classes of kernels, those that are off the most
_CLOSE = 0.2  # of the measured time


@dataclass(frozen=True, kw_only=True)
class CoresBenchmark(Benchmark):
    """Each model on two cores, after `gdp devices measure`."""

    name = "cores"
    models: tuple[str, ...] = tuple(core_models.MODELS)
    steps: int = 7

    def __post_init__(self) -> None:
        super().__post_init__()
        pick(self.name, "model", self.models, tuple(core_models.MODELS))

    def measure(self, rows: Rows, say: Say) -> dict[str, Any]:
        """Returns a row for each model, and the cluster that predicts."""
        devices = two_cores(self.name)
        calibration = calibrate(devices, on_progress=lambda text: say(f"measuring {text}"))
        targets = [target_of(device) for device in devices]
        settings = {"steps": self.steps, "cluster": calibration.cluster.fingerprint}
        found = []
        for name in self.models:
            make = partial(predicted_and_measured, name, calibration.cluster, targets, self.steps)
            found.append(rows.row(name, settings, make))
            say(f"{name}: {found[-1]['predicted_ns'] / 1e6:.1f} ms, measured {found[-1]['measured_ns'] / 1e6:.1f} ms")
        ratios = np.array([row["predicted_ns"] / row["measured_ns"] for row in found])
        return {
            "rows": found,
            "ratio": float(np.median(ratios)),
            "error": float(np.median(np.abs(ratios - 1))),
            "num_close": int((np.abs(ratios - 1) < _CLOSE).sum()),
            "close": _CLOSE,
        }


def predicted_and_measured(name: str, cluster: Cluster, targets: list[Target], steps: int) -> dict[str, Any]:
    """Returns what a step of a model takes on each of two cores at once, and what it is predicted to take."""
    torch.manual_seed(_SEED)
    model, inputs = core_models.MODELS[name]()
    captured = capture(model, inputs, name=name)
    graph = captured.graph
    content = captured.program.bind(model, inputs, {})
    placed = PlacedProgram(captured.program, content, [np.arange(graph.num_ops)])

    def measured(target: Target) -> tuple[Any, int]:
        found = measure_programs({"": placed}, [target], steps=steps, warm_up_steps=_WARM_UP_STEPS)[""]
        return found.op_medians_ns()[0], found.median_step_ns

    with ThreadPoolExecutor(len(targets)) as pool:
        both = list(pool.map(measured, targets))
    predicted_ns = op_times(graph, cluster)[:, 0]
    classes = _by_class(graph, cluster, predicted_ns, np.mean([ops for ops, _ in both], axis=0))
    return {
        "model": name,
        "num_ops": graph.num_ops,
        "predicted_ns": int(predicted_ns.sum()),
        "measured_ns": int(np.mean([step for _, step in both])),
        "classes": [asdict(each) for each in classes],
    }


@dataclass(frozen=True, slots=True)
class ClassTimes:
    """The ops whose longest kernel is of one class."""

    name: str
    predicted_ns: float
    measured_ns: float


def _by_class(graph: Graph, cluster: Cluster, predicted_ns: Any, measured_ns: Any) -> list[ClassTimes]:
    """Returns the classes whose ops are off the most."""
    device = cluster.devices[0]
    kernels = step_kernels(graph, device.runtime)
    class_of = _longest(kernels, kernel_times(kernels, device))
    classes = [
        ClassTimes(name, float(predicted_ns[own].sum()), float(measured_ns[own].sum()))
        for number, name in enumerate(CLASSES)
        if (own := class_of[kernels.ops] == number).any()
    ]
    return sorted(classes, key=lambda each: -abs(each.predicted_ns - each.measured_ns))[:_SHOWN]


def _longest(kernels: Kernels, times_ns: Any) -> Any:
    """Returns the class of the longest kernel of each row; -1: it has none."""
    found = np.full(len(kernels.offsets) - 1, -1)
    for row, (begin, end) in enumerate(zip(kernels.offsets, kernels.offsets[1:], strict=False)):
        if end > begin:
            found[row] = kernels.kinds[begin + int(np.argmax(times_ns[begin:end]))]
    return found
