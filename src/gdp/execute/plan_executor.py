"""PlanExecutor: the scripts of a placed program, and the requests that its workers get; threads or processes run it."""

import contextlib
from abc import ABC, abstractmethod
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Self

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

    @classmethod
    def of_host(cls, devices: Sequence[DeviceRecord], start_ns: int) -> "StepRecord":
        """Makes the record of a step that ended when the last device was done."""
        return cls(tuple(devices), start_ns, max(record.end_ns for record in devices))

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
    """A program placed on `targets` [D] that run its ops in `order` [D]; a context manager. `load` gives it parameters
    and buffers, `step` runs one step on them. After an ExecutionError it is closed. `workers`, by device, are those of
    this process, which keep parameters, buffers and optimizer state. On ranks all make the same calls, with the same
    arguments."""

    is_first = True  # of the processes that make the same calls: it gets results

    def __init__(self, program: Program, order: Sequence[npt.ArrayLike], targets: Sequence[Target]) -> None:
        self.program, self.order, self.targets = program, order, tuple(targets)
        self.num_steps, self.is_closed = 0, False  # closed: also after a step that failed, with its effects half there
        self.workers: Mapping[int, Worker] = {}
        self._scripts = scripts(program, order)
        self._retaining_scripts: tuple[Script, ...] = ()
        self._home = {task.op: device for device, script in enumerate(self._scripts) for task in script}
        self._latest: StepRecord | None = None
        self._threads_before = torch.get_num_threads()
        check_dropout(program, self._home, [target.device for target in targets])

    def __enter__(self) -> Self:
        return self

    def __exit__(self, _kind: object, error: BaseException | None, _trace: object) -> None:
        if error is None:
            self.close()
        else:
            self.leave(error)

    @contextlib.contextmanager
    def _ending(self, _doing: str) -> Iterator[None]:
        """Ends the workers after an error, also an interrupt: half a step cannot go on."""
        if self.is_closed:
            raise ExecutionError("all", "the executor is closed")
        try:
            yield
        except BaseException as error:
            self.leave(error)
            raise

    def load(self, content: Mapping[int, Tensor]) -> None:
        """Copies parameters and buffers, by tensor number as `Program.bind` gives them, to their devices."""
        with self._ending("loading"):
            for op, source in self.program.sources.items():
                worker = self.workers.get(self._home[op])
                if worker is not None and source.kind != "input" and source.tensor in content:
                    try:
                        worker.load(source.tensor, content[source.tensor])
                    except RuntimeError as error:
                        doing = f"loading {self.program.graph.op_names[op]!r}"
                        raise ExecutionError(worker.backend.target.name, doing, error) from error

    def load_private(self, content: Mapping[int, Mapping[int, Tensor]]) -> None:
        """Copies optimizer state, by update and value, to the devices of the updates."""
        with self._ending("loading optimizer state"):
            for op, values in content.items():
                if (worker := self.workers.get(self._home[op])) is not None:
                    worker.load_private(op, values)

    def step(
        self, inputs: Mapping[int, Tensor], *, is_timed: bool = False, retain: bool = False, seed: int | None = None
    ) -> StepRecord:
        """Runs one step on `inputs`, by tensor number as `Program.bind` gives them, and returns its record. `retain`
        keeps outputs and gradients for `results`; random numbers differ from step to step unless `seed` is given.
        ExecutionError if an op fails."""
        own_seed = self.num_steps * self.program.num_draws if seed is None else seed
        with self._ending("running a step"):
            self._latest = self._step(inputs, is_timed=is_timed, retain=retain, seed=own_seed)
        self.num_steps += 1
        return self._latest

    @abstractmethod
    def _step(self, inputs: Mapping[int, Tensor], *, is_timed: bool, retain: bool, seed: int) -> StepRecord:
        """Runs one step and returns its record; see `step`."""

    @abstractmethod
    def _held(self, tensors: Collection[int], record: StepRecord, *, everywhere: bool = True) -> dict[int, Tensor]:
        """Returns at least these tensors, which a step has left; on ranks all of them, or the first, get copies."""

    def results(self, record: StepRecord) -> Replay | None:
        """Returns the results that a step retained, and the state after it; on ranks, on the first one, on the CPU."""
        held = self._held(self.program.result_tensors | self.program.state_tensors, record, everywhere=False)
        return self.program.results(held) if self.is_first else None

    def loss(self, record: StepRecord) -> Tensor | None:
        """Returns the loss of a step, retained or not; a copy on the CPU."""
        loss = self.program.loss_of(self._held(self.program.loss_tensors, record))
        return None if loss is None else loss.detach().to("cpu", copy=True)

    def outputs(self, record: StepRecord) -> Mapping[str, Tensor]:
        """Returns the outputs that a step retained, by name; tensors are on their devices, on ranks on the CPU."""
        return self.program.named_outputs(self._held(self.program.result_tensors, record))

    def kept(self, record: StepRecord, tensor: int) -> Tensor:
        """Returns a tensor that the graph keeps after a step; a copy on the CPU."""
        return self._held({tensor}, record)[tensor].to("cpu", copy=True)

    def state(self, *, everywhere: bool = True) -> dict[int, Tensor]:
        """Returns parameters and buffers now, by tensor number; `everywhere`, or on the first rank."""
        return {tensor: memory for worker in self.workers.values() for tensor, memory in worker.state.items()}

    def private(self, *, everywhere: bool = True) -> dict[int, dict[int, Tensor]]:
        """Returns optimizer state now, by update and value; `everywhere`, or on the first rank."""
        return {op: values for worker in self.workers.values() for op, values in worker.private.items() if values}

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


def check_dropout(program: Program, home: Mapping[int, int], devices: Sequence[torch.device]) -> None:
    """Raises InputError if the passes of an attention with dropout are on a CPU and a GPU, which draw other numbers.
    `home` is the number of each op's device."""
    names = program.graph.op_names
    for op, forward in program.redrawn_attention():
        here, there = (devices[home[number]].type for number in (op, forward))
        if here != there:
            raise InputError(
                f"{names[op]}: attention with dropout draws again what {names[forward]} drew, but is on {here} and "
                f"that on {there}, which draws other numbers; pin both to one device"
            )
