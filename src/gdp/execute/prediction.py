"""Prediction: what the machine model said of a plan beside what was measured, and what explains the difference.

step time      predicted by the replay of the plan      measured: median over the steps
device         sum of its ops' times                    sum of its ops' medians, and how long it waited
hand-over      from an op's finish to the arrival       from its finish to the start of an op that waited for it
"""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from gdp.capture import Program
from gdp.execute.arms import Arm
from gdp.execute.processes import ProcessRecord
from gdp.execute.script import scripts
from gdp.execute.threads import StepRecord
from gdp.graph import I64
from gdp.simulate import Simulation


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
    """Ops of one kind, or one op: sums of predicted and measured times in ns."""

    name: str
    num_ops: int
    predicted_ns: int
    measured_ns: int

    @property
    def error_ns(self) -> int:
        """Predicted less measured."""
        return self.predicted_ns - self.measured_ns


@dataclass(frozen=True, slots=True)
class HandOver:
    """Tensors that went from one device to another: medians of predicted and measured times in ns.

    Between threads those that an op waited for, from the end of their op on; between processes all, from when the
    route was free.
    """

    source: str
    destination: str
    num_tensors: int
    predicted_ns: int
    measured_ns: int
    median_error: float  # of predicted over measured times - 1, without sign


@dataclass(frozen=True, slots=True)
class Prediction:
    """Predicted beside measured; ops and kinds are those that explain most of the error, largest first."""

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


def predict(program: Program, simulation: Simulation, arm: Arm, *, num_listed: int = 6) -> Prediction:
    """What `simulation` said of the steps that `arm` measured."""
    graph, problem = program.graph, simulation.problem
    names = [device.name for device in problem.cluster.devices]
    measured, waited = arm.median_op_ns(), np.asarray(np.median(arm.op_wait_ns, axis=0), np.int64)
    predicted = simulation.op_finish_ns - simulation.op_start_ns
    devices = []
    for number, name in enumerate(names):
        here = simulation.placement == number
        devices.append(
            DevicePrediction(
                name, int(here.sum()), int(predicted[here].sum()), int(measured[here].sum()), int(waited[here].sum())
            )
        )
    by_kind: dict[str, list[int]] = defaultdict(list)
    for op, kind in enumerate(graph.kinds):
        by_kind[kind].append(op)
    kinds = [_sum(kind, ops, predicted, measured) for kind, ops in by_kind.items()]
    worst = np.argsort(-np.abs(predicted - measured), kind="stable")[:num_listed].tolist()
    return Prediction(
        simulation.step_time_ns,
        arm.median_step_ns,
        tuple(devices),
        tuple(sorted(kinds, key=lambda row: -abs(row.error_ns))[:num_listed]),
        tuple(_sum(graph.op_names[op], [op], predicted, measured) for op in worst),
        tuple(_hand_overs(program, simulation, arm, names)),
    )


def rank_correlation(predicted: Sequence[float], measured: Sequence[float]) -> float:
    """Spearman's: 1 if both order all placements alike; NaN if one of them does not vary."""
    from scipy import stats

    return float(stats.spearmanr(predicted, measured).statistic)


def _sum(name: str, ops: list[int], predicted: I64, measured: I64) -> OpPrediction:
    return OpPrediction(name, len(ops), int(predicted[ops].sum()), int(measured[ops].sum()))


def _hand_overs(program: Program, simulation: Simulation, arm: Arm, names: Sequence[str]) -> list[HandOver]:
    """By pair of devices."""
    found: dict[tuple[int, int], list[tuple[int, int]]] = defaultdict(list)
    for record in arm.records:
        if isinstance(record, ProcessRecord):
            _add_transfers(found, simulation, record)
        else:
            _add_waits(found, program, simulation, arm, record)
    rows = []
    for (source, destination), times in sorted(found.items()):
        predicted, measured = np.array(times, np.float64).T
        error = float(np.median(np.abs(predicted / np.maximum(measured, 1) - 1.0)))
        medians = int(np.median(predicted)), int(np.median(measured))
        rows.append(HandOver(names[source], names[destination], len(times), *medians, error))
    return rows


def _add_transfers(
    found: dict[tuple[int, int], list[tuple[int, int]]], simulation: Simulation, record: ProcessRecord
) -> None:
    """What each transfer took, waits for earlier ones on its route left out."""
    spans_ns = simulation.transfer_arrival_ns - simulation.transfer_start_ns
    took_ns = dict(zip(_transfers(simulation), spans_ns.tolist(), strict=True))
    for item in record.transfers:
        measured_ns = item.arrival_ns - item.start_ns
        found[item.source, item.destination].append((took_ns[item.tensor, item.destination], measured_ns))


def _add_waits(
    found: dict[tuple[int, int], list[tuple[int, int]]], program: Program, simulation: Simulation, arm: Arm,
    record: StepRecord,
) -> None:  # fmt: skip
    """From an op's end to the start of one that waited for it: an op that did not wait says nothing of arrivals."""
    producers, placement = program.graph.producers.tolist(), simulation.placement.tolist()
    sent_ns = simulation.op_finish_ns[program.graph.producers[simulation.transfer_tensors]]
    took_ns = dict(zip(_transfers(simulation), (simulation.transfer_arrival_ns - sent_ns).tolist(), strict=True))
    finish, start, wait = (np.zeros(program.graph.num_ops, np.int64) for _ in range(3))
    for device in record.devices:
        ops = list(device.ops)
        finish[ops], start[ops], wait[ops] = device.finish_ns, device.start_ns, device.wait_ns
    for number, script in enumerate(scripts(program, arm.order)):
        for task in script:
            if task.awaited:
                last = max(task.awaited, key=lambda tensor: finish[producers[tensor]])
                measured_ns = int(start[task.op] - finish[producers[last]])
                if 0 <= measured_ns <= wait[task.op]:
                    found[placement[producers[last]], number].append((took_ns[last, number], measured_ns))


def _transfers(simulation: Simulation) -> list[tuple[int, int]]:
    """[R] (tensor, destination)."""
    return list(zip(simulation.transfer_tensors.tolist(), simulation.transfer_destinations.tolist(), strict=True))
