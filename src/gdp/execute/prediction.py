"""Prediction: the machine model's times of a plan beside measured times, and the ops that explain the difference.

step time      predicted by the replay of the plan      measured: median over the steps
device         sum of its ops' times                    sum of its ops' medians, and how long it waited
hand-over      from an op's finish to the arrival       from its finish to the start of an op that waited for it"""

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from gdp.arrays import I64
from gdp.execute.measurement import Measurement
from gdp.execute.plan_executor import StepRecord
from gdp.execute.script import scripts
from gdp.models.pytorch import Program
from gdp.simulator.simulate import Simulation


@dataclass(frozen=True, slots=True)
class DevicePrediction:
    """A device's step, predicted and measured, in ns."""

    name: str
    num_ops: int
    predicted_busy_ns: int
    busy_ns: int
    wait_ns: int


@dataclass(frozen=True, slots=True)
class OpPrediction:
    """Sums of predicted and measured times in ns, of the ops of one kind, or of one op."""

    name: str
    num_ops: int
    predicted_ns: int
    measured_ns: int

    @property
    def error_ns(self) -> int:
        """Predicted time less measured time."""
        return self.predicted_ns - self.measured_ns


@dataclass(frozen=True, slots=True)
class HandOver:
    """Tensors that went from one device to another: medians of predicted and measured times in ns. They are the tensors
    that an op waited for, and times begin at the end of their op."""

    source: str
    destination: str
    num_tensors: int
    predicted_ns: int
    measured_ns: int
    median_error: float  # of predicted over measured times - 1, without sign


@dataclass(frozen=True, slots=True)
class Prediction:
    """Predicted beside measured times, with the ops and kinds that explain most of the error, largest first."""

    predicted_step_ns: int
    measured_step_ns: int
    devices: tuple[DevicePrediction, ...]
    kinds: tuple[OpPrediction, ...]
    ops: tuple[OpPrediction, ...]
    hand_overs: tuple[HandOver, ...]

    @property
    def error(self) -> float:
        """Relative error of the predicted step time: positive if the step was faster than predicted."""
        return self.predicted_step_ns / self.measured_step_ns - 1.0


def predict(program: Program, simulation: Simulation, measurement: Measurement, *, num_listed: int = 6) -> Prediction:
    """Compares the times of `simulation` with those of the steps measured."""
    graph, devices = program.graph, simulation.problem.cluster.devices
    measured, waited = measurement.op_medians_ns()
    predicted = simulation.op_finish_ns - simulation.op_begin_ns
    rows = [np.flatnonzero(simulation.placement == number) for number in range(len(devices))]
    by_kind: dict[str, list[int]] = defaultdict(list)
    for op, kind in enumerate(graph.kinds):
        by_kind[kind].append(op)
    kinds = [_sum(kind, ops, predicted, measured) for kind, ops in by_kind.items()]
    worst = np.argsort(-np.abs(predicted - measured), kind="stable")[:num_listed].tolist()
    return Prediction(
        simulation.step_time_ns,
        measurement.median_step_ns,
        tuple(
            DevicePrediction(device.name, len(ops), *(int(times[ops].sum()) for times in (predicted, measured, waited)))
            for device, ops in zip(devices, rows, strict=True)
        ),
        tuple(sorted(kinds, key=lambda row: -abs(row.error_ns))[:num_listed]),
        tuple(_sum(graph.op_names[op], [op], predicted, measured) for op in worst),
        tuple(_hand_overs(program, simulation, measurement)),
    )


def _sum(name: str, ops: list[int], predicted: I64, measured: I64) -> OpPrediction:
    return OpPrediction(name, len(ops), int(predicted[ops].sum()), int(measured[ops].sum()))


def _hand_overs(program: Program, simulation: Simulation, measurement: Measurement) -> list[HandOver]:
    """Summarizes the hand-overs of each pair of devices."""
    names = [device.name for device in simulation.problem.cluster.devices]
    times_ns: dict[tuple[int, int], list[tuple[int, int]]] = defaultdict(list)
    for record in measurement.records:
        for pair, predicted_ns, measured_ns in _wait_times(program, simulation, measurement, record):
            times_ns[pair].append((predicted_ns, measured_ns))
    rows = []
    for (source, destination), pairs in sorted(times_ns.items()):
        predicted, measured = np.array(pairs, np.float64).T
        error = float(np.median(np.abs(predicted / np.maximum(measured, 1) - 1.0)))
        medians = int(np.median(predicted)), int(np.median(measured))
        rows.append(HandOver(names[source], names[destination], len(pairs), *medians, error))
    return rows


def _wait_times(
    program: Program, simulation: Simulation, measurement: Measurement, record: StepRecord
) -> Iterator[tuple[tuple[int, int], int, int]]:
    """Yields ((source, destination), predicted ns, measured ns) from an op's end to the start that waited for it."""
    graph, placement = program.graph, simulation.placement.tolist()
    producers, tensors = graph.producers.tolist(), simulation.transfer_tensors
    routed_ns = simulation.transfer_arrival_ns - simulation.op_finish_ns[graph.producers[tensors]]
    transfers = zip(tensors.tolist(), simulation.transfer_destinations.tolist(), strict=True)
    predicted_ns = dict(zip(transfers, routed_ns.tolist(), strict=True))
    start, finish, wait = record.op_times_ns(graph.num_ops)
    for number, script in enumerate(scripts(program, measurement.order)):
        for task in script:
            if task.awaited:
                last = max(task.awaited, key=lambda tensor: finish[producers[tensor]])
                measured_ns = int(start[task.op] - finish[producers[last]])
                if 0 <= measured_ns <= wait[task.op]:
                    yield (placement[producers[last]], number), predicted_ns[last, number], measured_ns
