"""PlanExecutor: the scripts of a placed program, and the requests that its workers get; threads or processes run it. A
`Worker` carries out one device's script, step after step; a transport connects it with the others."""

import contextlib
import threading
import time
from abc import ABC, abstractmethod
from collections import defaultdict
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from queue import SimpleQueue
from types import MappingProxyType
from typing import Any, Protocol, Self

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from gdp.arrays import I64
from gdp.errors import InputError
from gdp.execute.backends import Backend, Content, Target
from gdp.execute.script import Script, scripts
from gdp.models.pytorch import Program, Replay

POLL_SECONDS = 0.2  # for which the main thread sleeps at most between looks at signals and failures
REMEDIED: Mapping[str, type[Exception]] = MappingProxyType(
    {"MemoryError": MemoryError, "OutOfMemoryError": MemoryError, "NotImplementedError": NotImplementedError}
)  # the kinds of causes that ExecutionError has a remedy for; others are RuntimeErrors in another process


class Transport(Protocol):
    """Hands tensors to other workers and takes theirs."""

    def begin(self) -> None:
        """Begins a step."""

    def send(self, tensor: int, content: Content, device: int) -> None:
        """Hands a tensor to the worker of `device`; returns before it is there."""

    def receive(self, tensor: int) -> Content:
        """Returns a tensor from another worker, waiting for it if need be."""

    def finish(self) -> None:
        """Returns when all sent tensors have left, so that they need not be held any longer."""
        return


@dataclass(frozen=True, slots=True)
class StepRequest:
    """A step that a worker is asked for."""

    inputs: Mapping[int, Tensor]  # by tensor number: the step's inputs, on the CPU
    seed: int  # added to those of the program's random numbers
    script: Script
    is_timed: bool = False
    owns_inputs: bool = False  # they are copies, which ops may overwrite


@dataclass(frozen=True, slots=True)
class DeviceRecord:
    """One device's part of a step. Times in ns of this host's `time.perf_counter_ns`."""

    held: Mapping[int, Tensor | None]  # by number: tensors that its script did not drop
    ops: Sequence[int] = ()
    start_ns: Sequence[int] = ()
    finish_ns: Sequence[int] = ()
    wait_ns: Sequence[int] = ()  # for tensors from other devices, before each op started; 0 if it takes none
    end_ns: int = 0  # when all was done
    issued_ns: Sequence[int] = ()  # when the host had launched each op; (): ops end when they return

    def shifted(self, offset_ns: int) -> "DeviceRecord":
        """Returns the record on a clock that is that much ahead."""
        start_ns, finish_ns, issued_ns = (
            tuple(ns + offset_ns for ns in times_ns) for times_ns in (self.start_ns, self.finish_ns, self.issued_ns)
        )
        end_ns = self.end_ns + offset_ns
        return replace(self, start_ns=start_ns, finish_ns=finish_ns, end_ns=end_ns, issued_ns=issued_ns)


class Stopped(BaseException):
    """Ends a worker, since another failed or the executor closes."""


@dataclass(slots=True, eq=False)
class ExecutionError(Exception):
    """An op, or a device, failed while a plan ran."""

    device: str
    what: str  # the op, or the action of the device
    cause: BaseException | None = None
    note: str = ""

    def __post_init__(self) -> None:
        Exception.__init__(self, str(self))

    def __reduce__(self) -> tuple[Any, ...]:
        """Makes it of a cause that other processes know, too."""
        kind, text = type(self.cause).__name__, str(self.cause or "")
        cause = REMEDIED.get(kind, RuntimeError)(text) if text else None
        return ExecutionError, (self.device, self.what, cause, self.note)

    @property
    def is_out_of_memory(self) -> bool:
        """Returns whether there was no memory left."""
        if isinstance(self.cause, (torch.OutOfMemoryError, MemoryError)):
            return True  # others come from the CPU's allocator, the driver, cuBLAS and cuDNN
        return any(words in str(self.cause) for words in ("can't allocate memory", "out of memory", "ALLOC_FAILED"))

    def __str__(self) -> str:
        remedy = self.note
        if not remedy and self.is_out_of_memory:
            remedy = "; place with --max-memory or --reserve, or a smaller batch"
        elif not remedy and isinstance(self.cause, NotImplementedError):
            remedy = "; pin the op to another device with --pin"
        lines = " ".join(str(self.cause).split()) if self.cause is not None else ""
        reason = "out of memory" if self.is_out_of_memory else lines[:200]
        return f"device {self.device!r}: {self.what}{': ' if reason else ''}{reason}{remedy}"


@dataclass(slots=True)
class Worker:
    """One device: its parameters, buffers and optimizer state, and the ops that it runs. `state` holds the memory of
    sources by tensor number, `private` optimizer state by op and value; both are on the device."""

    program: Program
    backend: Backend
    transport: Transport
    stop: threading.Event
    state: dict[int, Tensor] = field(default_factory=dict)
    private: dict[int, dict[int, Tensor]] = field(default_factory=lambda: defaultdict(dict))

    def load(self, tensor: int, memory: Tensor) -> None:
        """Copies a parameter or buffer to the device."""
        self.state[tensor] = self._on_device(tensor, memory)
        self.backend.settle_caller()

    def load_private(self, op: int, content: Mapping[int, Tensor]) -> None:
        """Copies optimizer state of an update, by value, to the device."""
        for value, memory in content.items():
            dtype, device = self.program.layouts[value].dtype, self.backend.target.device
            self.private[op][value] = torch.empty_like(memory, dtype=dtype, device=device).copy_(memory)
        self.backend.settle_caller()

    def step(self, request: StepRequest) -> DeviceRecord:
        """Carries out a step. ExecutionError names the op that failed."""
        try:
            return self._step(request)
        except BaseException:
            with contextlib.suppress(RuntimeError):
                self.backend.settle()  # tensors that its kernels still use are about to be freed
            raise

    def _step(self, request: StepRequest) -> DeviceRecord:
        program, transport, backend, stop = self.program, self.transport, self.backend, self.stop
        device = None if backend.target.device.type == "cpu" else backend.target.device
        held: dict[int, Any] = {}
        moments: list[Any] = []
        is_timed, seed, sources, private = request.is_timed, request.seed, program.sources, self.private
        transport.begin()
        if is_timed:
            moments.append(backend.now())
        for task in request.script:
            op = task.op
            if stop.is_set():
                raise Stopped
            try:
                for tensor in task.awaited:
                    held[tensor] = transport.receive(tensor)
                if is_timed:
                    moments.append(backend.now() if task.awaited else moments[-1])
                if op in sources:
                    held.update(program.parts(op, self._content(sources[op].tensor, request)))
                else:
                    held.update(program.routine(op, device).run(held, private[op], seed))
                for to, tensor in task.sends:
                    transport.send(tensor, held.get(tensor), to)
                for tensor in task.drops:
                    held.pop(tensor, None)
            except Exception as error:
                raise ExecutionError(backend.target.name, f"op {program.graph.op_names[op]!r}", error) from error
            if is_timed:
                moments.append(backend.now())
        transport.finish()
        backend.settle()
        end_ns = time.perf_counter_ns()
        if not is_timed:
            return DeviceRecord(held, end_ns=end_ns)
        times_ns = backend.times_ns(moments)
        starts, finishes = tuple(times_ns[1::2]), tuple(times_ns[2::2])
        waits = tuple(start - before for start, before in zip(starts, times_ns[0::2], strict=False))
        ops, issued = tuple(task.op for task in request.script), tuple(backend.issued_ns(moments[2::2]))
        return DeviceRecord(held, ops, starts, finishes, waits, end_ns, issued)

    def _content(self, tensor: int, request: StepRequest) -> Tensor:
        """Returns the content of a source: memory of the device, or a copy of an input."""
        content = self.state.get(tensor)
        if content is None:
            content = request.inputs[tensor]
            return content if request.owns_inputs else self._on_device(tensor, content)
        return content

    def _on_device(self, tensor: int, memory: Tensor) -> Tensor:
        return self.program.memory_for(tensor, self.backend.target.device).copy_(memory)


class WorkerThread(threading.Thread):
    """A thread that computes on a device: it answers `requests`, with its `number`, into `answers`. It ends with None
    for a request, or with an error, which it puts there, too."""

    def __init__(self, backend: Backend, answers: "SimpleQueue[tuple[int, Any]]", number: int) -> None:
        super().__init__(name=f"gdp-{backend.target.name}", daemon=True)
        self.requests: SimpleQueue[Callable[[], Any] | None] = SimpleQueue()
        self._backend, self._answers, self._number = backend, answers, number

    def run(self) -> None:
        try:
            with self._backend.active(), torch.no_grad():
                while (request := self.requests.get()) is not None:
                    self._answers.put((self._number, request()))
        except BaseException as error:  # whatever it is, the main thread must hear of it
            self._answers.put((self._number, error))


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
    this process, which keep the state. On ranks all make the same calls, with the same arguments."""

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
