"""Worker: carries out one device's script, step after step; a transport connects it with the others."""

import contextlib
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from queue import SimpleQueue
from types import MappingProxyType
from typing import Any, Protocol

import torch
from torch import Tensor

from gdp.execute.backends import Backend, Content
from gdp.execute.script import Script
from gdp.models.pytorch import Program

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

    def shifted(self, offset_ns: int) -> "DeviceRecord":
        """Returns the record on a clock that is that much ahead."""
        start_ns, finish_ns = (tuple(ns + offset_ns for ns in times_ns) for times_ns in (self.start_ns, self.finish_ns))
        return replace(self, start_ns=start_ns, finish_ns=finish_ns, end_ns=self.end_ns + offset_ns)


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
        return DeviceRecord(held, tuple(task.op for task in request.script), starts, finishes, waits, end_ns)

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
