"""PlanExecutor: the scripts of a placed program, and the requests that its workers get; threads or processes run it."""

import time
from abc import ABC, abstractmethod
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Self

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from gdp.arrays import I64
from gdp.errors import InputError
from gdp.execute.script import Script, scripts
from gdp.execute.targets import Target
from gdp.execute.worker import DeviceRecord, ExecutionError, Worker
from gdp.models.pytorch import Program, Replay

POLL_SECONDS = 0.2  # for which the main thread sleeps at most between looks at signals and failures


@dataclass(frozen=True, slots=True)
class StepRecord:
    """One step: the record of each device [D], and when the step began and ended."""

    devices: tuple[DeviceRecord, ...]
    start_ns: int
    finish_ns: int

    def op_times_ns(self, num_ops: int) -> tuple[I64, I64, I64]:
        """[N] Returns the start and the finish of each op, and its wait for tensors from other devices."""
        start, finish, wait = np.zeros((3, num_ops), np.int64)
        for device in self.devices:
            ops = list(device.ops)
            start[ops], finish[ops], wait[ops] = device.start_ns, device.finish_ns, device.wait_ns
        return start, finish, wait


def held_tensors(record: StepRecord) -> dict[int, Tensor]:
    """Returns the tensors with content that devices hold after a step, by number."""
    tensors = (item for device in record.devices for item in device.held.items())
    return {tensor: content for tensor, content in tensors if content is not None}


class PlanExecutor(ABC):
    """A program placed on `devices` [D] that run its ops in `order` [D]; a context manager.

    `load` gives it parameters and buffers, `step` runs one step on them. After an ExecutionError it is closed. On ranks
    all make the same calls, with the same arguments.
    """

    def __init__(self, program: Program, order: Sequence[npt.ArrayLike], devices: Sequence[torch.device]) -> None:
        self.program, self.order = program, order
        self.num_steps = 0
        self._scripts = scripts(program, order)
        self._retaining_scripts: tuple[Script, ...] = ()
        self._home = {task.op: device for device, script in enumerate(self._scripts) for task in script}
        self._threads_before = torch.get_num_threads()
        check_dropout(program, self._home, devices)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, _kind: object, error: BaseException | None, _trace: object) -> None:
        if error is None:
            self.close()
        else:
            self.leave(error)

    @property
    @abstractmethod
    def is_closed(self) -> bool:
        """Returns whether `close` was called, or a step failed or was interrupted, with its effects half there."""

    @abstractmethod
    def load(self, content: Mapping[int, Tensor]) -> None:
        """Copies parameters and buffers, by tensor number as `Program.bind` gives them, to their devices."""

    @abstractmethod
    def load_private(self, content: Mapping[int, Mapping[int, Tensor]]) -> None:
        """Copies optimizer state, by update and value, to the devices of the updates."""

    @abstractmethod
    def step(
        self, inputs: Mapping[int, Tensor], *, is_timed: bool = False, retain: bool = False, seed: int | None = None
    ) -> StepRecord:
        """Runs one step on `inputs`, by tensor number as `Program.bind` gives them, and returns its record.

        `retain` keeps outputs and gradients for `results`; random numbers differ from step to step unless `seed` is
        given. ExecutionError if an op fails.
        """

    @abstractmethod
    def _held(self, tensors: Collection[int], record: Any) -> dict[int, Tensor]:
        """Returns at least these tensors, which a step has left; on ranks all of them get copies on the CPU."""

    def loss(self, record: Any) -> Tensor | None:
        """Returns the loss of a step, retained or not; a copy on the CPU."""
        loss = self.program.loss_of(self._held(self.program.loss_tensors, record))
        return None if loss is None else loss.detach().to("cpu", copy=True)

    def outputs(self, record: Any) -> Mapping[str, Tensor]:
        """Returns the outputs that a step retained, by name; tensors are on their devices, on ranks on the CPU."""
        return self.program.named_outputs(self._held(self.program.result_tensors, record))

    def kept(self, record: Any, tensor: int) -> Tensor:
        """Returns a tensor that the graph keeps after a step; a copy on the CPU."""
        return self._held({tensor}, record)[tensor].to("cpu", copy=True)

    @abstractmethod
    def state(self, *, everywhere: bool = True) -> dict[int, Tensor]:
        """Returns parameters and buffers now, by tensor number; `everywhere`, or on the first rank."""

    @abstractmethod
    def private(self, *, everywhere: bool = True) -> dict[int, dict[int, Tensor]]:
        """Returns optimizer state now, by update and value; `everywhere`, or on the first rank."""

    @abstractmethod
    def close(self) -> None:
        """Ends its workers."""

    def leave(self, _error: BaseException) -> None:
        """Ends its workers after an error in the script."""
        self.close()

    def _chosen_scripts(self, *, retain: bool) -> tuple[Script, ...]:
        """[D] Returns the scripts of a step, which may retain results."""
        if retain and not self._retaining_scripts:
            self._retaining_scripts = scripts(self.program, self.order, self.program.result_tensors)
        return self._retaining_scripts if retain else self._scripts

    def _holder(self, tensor: int) -> int:
        """Returns the device that holds a tensor after a step."""
        return self._home[self.program.keepers.get(tensor, int(self.program.graph.producers[tensor]))]

    def _seed(self, seed: int | None) -> int:
        """Returns the seed of the next step, where none is given another one than before."""
        return self.num_steps * self.program.num_draws if seed is None else seed

    def _load(self, content: Mapping[int, Tensor], workers: Mapping[int, Worker]) -> None:
        """Copies the parameters and buffers of these workers, by device, to them."""
        for op, source in self.program.sources.items():
            worker = workers.get(self._home[op])
            if worker is not None and source.kind != "input" and source.tensor in content:
                try:
                    worker.load(source.tensor, content[source.tensor])
                except RuntimeError as error:
                    doing = f"loading {self.program.graph.op_names[op]!r}"
                    raise ExecutionError(worker.backend.target.name, doing, error) from error


def check_dropout(program: Program, home: Mapping[int, int], devices: Sequence[torch.device]) -> None:
    """Raises InputError if the passes of an attention with dropout are on a CPU and a GPU, which draw other numbers.

    `home` is the number of each op's device.
    """
    names = program.graph.op_names
    for op, forward in program.redrawn_attention():
        here, there = (devices[home[number]].type for number in (op, forward))
        if here != there:
            raise InputError(
                f"{names[op]}: attention with dropout draws again what {names[forward]} drew, but is on {here} and "
                f"that on {there}, which draws other numbers; pin both to one device"
            )


class HostExecutor(PlanExecutor):
    """A plan on the devices of one host, whose results this process can read."""

    def __init__(self, program: Program, order: Sequence[npt.ArrayLike], targets: Sequence[Target]) -> None:
        super().__init__(program, order, [target.device for target in targets])
        self.targets = tuple(targets)
        self._latest: StepRecord | None = None

    def step(
        self, inputs: Mapping[int, Tensor], *, is_timed: bool = False, retain: bool = False, seed: int | None = None
    ) -> StepRecord:
        self._check_open()
        start_ns = time.perf_counter_ns()
        try:
            devices = self._step(inputs, is_timed=is_timed, retain=retain, seed=self._seed(seed))
        except BaseException as error:  # also an interrupt: half a step cannot go on
            self.leave(error)
            raise
        self.num_steps += 1
        self._latest = StepRecord(devices, start_ns, max(record.end_ns for record in devices))
        return self._latest

    @abstractmethod
    def _step(
        self, inputs: Mapping[int, Tensor], *, is_timed: bool, retain: bool, seed: int
    ) -> tuple[DeviceRecord, ...]:
        """[D] Runs one step and returns the record of each device; see `step`."""

    def results(self, record: StepRecord) -> Replay:
        """Returns the results that a step retained, and the state after it; tensors are on their devices."""
        return self.program.results(self._held(self.program.result_tensors, record) | self.state())

    def _check_open(self) -> None:
        if self.is_closed:
            raise ExecutionError("all", "the executor is closed")
