"""PlanExecutor: the scripts of a placed program, and the requests that its workers get; threads or processes run it."""

from collections.abc import Mapping, Sequence
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
from gdp.execute.worker import DeviceRecord, ExecutionError, StepRequest, Worker
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


class PlanExecutor:
    """A program placed on `devices` [D] that run its ops in `order` [D]; a context manager.

    `load` gives it parameters and buffers, `step` runs one step on them. After an ExecutionError it is closed. On ranks
    all make the same calls, with the same arguments.

    InputError if the two passes of an attention with dropout are on a CPU and a GPU, which draw other numbers.
    """

    def __init__(self, program: Program, order: Sequence[npt.ArrayLike], devices: Sequence[torch.device]) -> None:
        self.program, self.order = program, order
        self.num_steps = 0
        self._scripts = scripts(program, order)
        self._retaining_scripts: tuple[Script, ...] = ()
        self._home = {task.op: device for device, script in enumerate(self._scripts) for task in script}
        self._threads_before = torch.get_num_threads()
        self._check_dropout(devices)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, _kind: object, error: BaseException | None, _trace: object) -> None:
        if error is None:
            self.close()
        else:
            self.leave(error)

    @property
    def is_closed(self) -> bool:
        """Returns whether `close` was called, or a step failed or was interrupted, with its effects half there."""
        raise NotImplementedError

    def load(self, content: Mapping[int, Tensor]) -> None:
        """Copies parameters and buffers, by tensor number as `Program.bind` gives them, to their devices."""
        raise NotImplementedError

    def load_private(self, content: Mapping[int, Mapping[int, Tensor]]) -> None:
        """Copies optimizer state, by update and value, to the devices of the updates."""
        raise NotImplementedError

    def step(
        self, inputs: Mapping[int, Tensor], *, is_timed: bool = False, retain: bool = False, seed: int | None = None
    ) -> StepRecord:
        """Runs one step on `inputs`, by tensor number as `Program.bind` gives them, and returns its record.

        `retain` keeps outputs and gradients for `results`; random numbers differ from step to step unless `seed` is
        given. ExecutionError if an op fails.
        """
        raise NotImplementedError

    def loss(self, record: Any) -> Tensor | None:
        """Returns the loss of a step; a copy on the CPU."""
        raise NotImplementedError

    def outputs(self, record: Any) -> Mapping[str, Tensor]:
        """Returns the outputs that a step retained, by name."""
        raise NotImplementedError

    def kept(self, record: Any, tensor: int) -> Tensor:
        """Returns a tensor that the graph keeps after a step; a copy on the CPU."""
        raise NotImplementedError

    def state(self, *, everywhere: bool = True) -> dict[int, Tensor]:
        """Returns parameters and buffers now, by tensor number; `everywhere`, or on the first rank."""
        raise NotImplementedError

    def private(self, *, everywhere: bool = True) -> dict[int, dict[int, Tensor]]:
        """Returns optimizer state now, by update and value; `everywhere`, or on the first rank."""
        raise NotImplementedError

    def close(self) -> None:
        """Ends its workers."""
        raise NotImplementedError

    def leave(self, _error: BaseException) -> None:
        """Ends its workers after an error in the script."""
        self.close()

    def _check_dropout(self, devices: Sequence[torch.device]) -> None:
        names = self.program.graph.op_names
        for op, forward in self.program.redrawn_attention():
            here, there = (devices[self._home[number]].type for number in (op, forward))
            if here != there:
                raise InputError(
                    f"{names[op]}: attention with dropout draws again what {names[forward]} drew, but is on {here} and "
                    f"that on {there}, which draws other numbers; pin both to one device"
                )

    def _requests(
        self, inputs: Mapping[int, Tensor], *, is_timed: bool, retain: bool, seed: int | None
    ) -> list[StepRequest]:
        """[D] Makes the requests of the next step; see `step`."""
        seed = self._seed(seed)
        return [StepRequest(inputs, seed, script, is_timed) for script in self._chosen_scripts(retain=retain)]

    def _chosen_scripts(self, *, retain: bool) -> tuple[Script, ...]:
        """[D] Returns the scripts of a step, which may retain results."""
        if retain and not self._retaining_scripts:
            self._retaining_scripts = scripts(self.program, self.order, self.program.result_tensors)
        return self._retaining_scripts if retain else self._scripts

    def _seed(self, seed: int | None) -> int:
        """Returns the seed of the next step, where none is given another one than before."""
        return self.num_steps * self.program.num_draws if seed is None else seed

    def _load(self, op: int, content: Mapping[int, Tensor], worker: Worker) -> None:
        """Copies the content of a source, if it is a parameter or buffer with one, to its worker."""
        source = self.program.sources[op]
        if source.kind != "input" and source.tensor in content:
            try:
                worker.load({source.tensor: content[source.tensor]})
            except RuntimeError as error:
                doing = f"loading {self.program.graph.op_names[op]!r}"
                raise ExecutionError(worker.backend.target.name, doing, error) from error


class HostExecutor(PlanExecutor):
    """A plan on the devices of one host, whose results this process can read."""

    def __init__(self, program: Program, order: Sequence[npt.ArrayLike], targets: Sequence[Target]) -> None:
        super().__init__(program, order, [target.device for target in targets])
        self.targets = tuple(targets)

    def results(self, record: StepRecord) -> Replay:
        """Returns the results that a step retained, and the state after it; tensors are on their devices."""
        return self.program.results(self._retained(record) | self.state())

    def outputs(self, record: StepRecord) -> Mapping[str, Tensor]:
        """Returns the outputs that a step retained, by name; tensors are on their devices."""
        return self.program.named_outputs(self._retained(record) | self.state())

    def loss(self, record: StepRecord) -> Tensor | None:
        """Returns the loss of a step, retained or not; a copy on the CPU."""
        loss = self.program.loss_of(held_tensors(record))
        return None if loss is None else loss.detach().to("cpu", copy=True)

    def _retained(self, record: StepRecord) -> dict[int, Tensor]:
        """Returns the tensors that a step has retained."""
        return held_tensors(record)

    def _check_open(self) -> None:
        if self.is_closed:
            raise ExecutionError("all", "the executor is closed")
