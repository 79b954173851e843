"""Measurements of a program in several placements, step by step in turn, so that a busy machine slows all alike."""

import gc
import threading
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace

import numpy as np
import numpy.typing as npt
from torch import Tensor

from gdp.arrays import I64
from gdp.execute.backends import Target
from gdp.execute.host_executor import host_executor
from gdp.execute.plan_executor import DeviceRecord, ExecutionError, PlanExecutor, StepRecord
from gdp.models.pytorch import Program

Order = Sequence[npt.ArrayLike]  # [D] The ops of each device, in the order of their starts


@dataclass(eq=False)
class Measurement:
    """Times in ns of the steps of a program in one placement. N ops, S steps."""

    order: Order
    num_ops: int
    records: list[StepRecord] = field(default_factory=list)  # [S]

    def add(self, record: StepRecord) -> None:
        """Adds a step; the tensors that it made are not kept."""
        devices = tuple(replace(device, held={}) for device in record.devices)
        self.records.append(replace(record, devices=devices))

    def of_first_rank(self, num_ranks: int) -> "Measurement":
        """Returns the times of the first rank of each device of a plan; see `ShardedProgram` for its numbers."""

        def own(device: DeviceRecord) -> DeviceRecord:
            return replace(device, ops=[op // num_ranks for op in device.ops])

        order = [np.asarray(ops) // num_ranks for ops in self.order[::num_ranks]]
        records = [replace(each, devices=tuple(map(own, each.devices[::num_ranks]))) for each in self.records]
        return Measurement(order, self.num_ops // num_ranks, records)

    @property
    def step_ns(self) -> list[int]:
        """[S] Time of each step."""
        return [record.finish_ns - record.start_ns for record in self.records]

    @property
    def median_step_ns(self) -> int:
        return int(np.median(self.step_ns))

    @property
    def step_quartiles_ns(self) -> tuple[int, int]:
        """The first and the third quartile of the step times."""
        low, high = np.percentile(self.step_ns, (25, 75))
        return int(low), int(high)

    def op_ns(self) -> I64:
        """[S, 2, N] Returns the time of each op, and its wait for tensors from other devices."""
        times = [record.op_times_ns(self.num_ops) for record in self.records]
        return np.array([(finish - start, wait) for start, finish, wait in times])

    def op_medians_ns(self) -> tuple[I64, I64]:
        """[N] Returns the median time of each op, and its median wait."""
        times, waits = np.median(self.op_ns(), axis=0).astype(np.int64)
        return times, waits


@dataclass(frozen=True, eq=False)
class PlacedProgram:
    """A program in one placement; `content` is that of `Program.bind`, and is not changed."""

    program: Program
    content: Mapping[int, Tensor]
    order: Order


def measure_programs(
    programs: Mapping[str, PlacedProgram],
    targets: Sequence[Target],
    *,
    steps: int,
    warm_up_steps: int = 2,
    stop: threading.Event | None = None,
) -> dict[str, Measurement]:
    """Measures `steps` steps of each program, by name: in turn, or on GPUs one program after the other, as they would
    take each other's memory. Each has its own copy of the parameters. Garbage is collected between steps. `stop` ends
    it after a step of each at least. ExecutionError if an op fails; on GPUs a program after the first that lacks the
    memory is left out."""
    if len(programs) > 1 and any(target.device.type == "cuda" for target in targets):
        found: dict[str, Measurement] = {}
        for name, placed in programs.items():
            try:
                found |= measure_programs({name: placed}, targets, steps=steps, warm_up_steps=warm_up_steps, stop=stop)
            except ExecutionError as error:
                if not (found and error.is_out_of_memory):
                    raise
        return found
    measurements = {name: Measurement(placed.order, placed.program.graph.num_ops) for name, placed in programs.items()}
    with ExitStack() as stack:
        executors: dict[str, PlanExecutor] = {}
        for name, placed in programs.items():
            executor = executors[name] = host_executor(placed.program, placed.order, targets)
            stack.callback(executor.close)
            executor.load(placed.content)
        if gc.isenabled():
            stack.callback(gc.enable)
        gc.disable()
        for number in range(-warm_up_steps, steps):
            if stop is not None and stop.is_set() and number > 0:
                break
            for name, executor in executors.items():
                record = executor.step(programs[name].content, is_timed=True)
                if number >= 0:
                    measurements[name].add(record)
            gc.collect(0)
    return measurements


def one_device_order(num_ops: int, device: int, num_devices: int) -> list[I64]:
    """[D] Returns the order of all ops on one device, as they are numbered."""
    return [np.arange(num_ops if number == device else 0) for number in range(num_devices)]
