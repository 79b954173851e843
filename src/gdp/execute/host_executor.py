"""The executor of a plan on the devices of this host: forked processes for single cores, threads for others."""

import threading
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from queue import SimpleQueue
from typing import Any

import numpy.typing as npt
import torch
from torch import Tensor

from gdp.execute.backends import Backend, Content, SentTensor, Target, backend_of, find_targets
from gdp.execute.forked.forked_executor import ForkedExecutor, may_fork
from gdp.execute.plan_executor import (
    DeviceRecord,
    ExecutionError,
    PlanExecutor,
    StepRecord,
    StepRequest,
    Stopped,
    Transport,
    Worker,
    WorkerThread,
    held_tensors,
)
from gdp.models.pytorch import Program


class QueueTransport(Transport):
    """The transport of worker `number`: a queue that all others put their tensors into."""

    def __init__(
        self, number: int, backends: Sequence[Backend], queues: "Sequence[SimpleQueue[SentTensor | None]]"
    ) -> None:
        self._queues, self._own, self._backend = queues, queues[number], backends[number]
        self._places = [backend.target.device for backend in backends]
        self._here: dict[int, SentTensor] = {}

    def begin(self) -> None:
        self._here.clear()

    def send(self, tensor: int, content: Content, device: int) -> None:
        self._queues[device].put(self._backend.pack(tensor, content, self._places[device]))

    def receive(self, tensor: int) -> Content:
        while tensor not in self._here:
            sent = self._own.get()
            if sent is None:
                raise Stopped
            self._here[sent.tensor] = sent
        return self._backend.unpack(self._here.pop(tensor))


class ThreadExecutor(PlanExecutor):
    """A program placed on `targets` [D], a worker thread for each from the first step to `close`. The main thread
    requests a step of each, and waits until all are done or one has failed; then all stop."""

    def __init__(self, program: Program, order: Sequence[npt.ArrayLike], targets: Sequence[Target]) -> None:
        super().__init__(program, order, targets)
        backends = [backend_of(target, program.memory_for) for target in targets]
        self._inboxes: list[SimpleQueue[SentTensor | None]] = [SimpleQueue() for _ in targets]
        self._answers: SimpleQueue[tuple[int, Any]] = SimpleQueue()
        self._stop = threading.Event()
        self.workers = {
            number: Worker(program, backend, QueueTransport(number, backends, self._inboxes), self._stop)
            for number, backend in enumerate(backends)
        }
        self._threads = [WorkerThread(backend, self._answers, number) for number, backend in enumerate(backends)]
        for thread in self._threads:
            thread.start()

    def _step(self, inputs: Mapping[int, Tensor], *, is_timed: bool, retain: bool, seed: int) -> StepRecord:
        start_ns = time.perf_counter_ns()
        for number, script in enumerate(self._chosen_scripts(retain=retain)):
            request = StepRequest(inputs, seed, script, is_timed)
            self._threads[number].requests.put(partial(self.workers[number].step, request))
        records: dict[int, DeviceRecord] = {}
        while len(records) < len(self.targets):
            number, answer = self._answers.get()
            if isinstance(answer, ExecutionError):
                raise answer
            if isinstance(answer, BaseException):
                raise ExecutionError(self.targets[number].name, "its worker", answer) from answer
            records[number] = answer
        return StepRecord.of_host([records[number] for number in range(len(records))], start_ns)

    def _held(self, tensors: Collection[int], record: StepRecord, *, everywhere: bool = True) -> dict[int, Tensor]:
        return held_tensors(record) | self.state()

    def close(self) -> None:
        """Ends the workers, at once if they are in a step."""
        self._stop.set()
        for thread, inbox in zip(self._threads, self._inboxes, strict=False):
            thread.requests.put(None)
            inbox.put(None)
        for thread in self._threads:
            thread.join()
        if self._threads:
            torch.set_num_threads(self._threads_before)
        self._threads, self.is_closed = [], True


def host_executor(program: Program, order: Sequence[npt.ArrayLike], targets: Sequence[Target]) -> PlanExecutor:
    """Makes an executor of the program on `targets` [D]. PyTorch with CUDA has threads for gradients after a capture,
    and then no forked process of it computes any."""
    if may_fork(targets) and torch.version.cuda is None:
        return ForkedExecutor(program, order, targets)
    return ThreadExecutor(program, order, targets)


class HostRunner:
    """Runs a training on the devices of this host; `on` as in `find_targets`."""

    is_alone = is_first = True

    def __init__(self, names: Sequence[str], on: Sequence[str] | None) -> None:
        self._targets = find_targets(names, on)
        self._executor: PlanExecutor | None = None

    def start(
        self, program: Program, order: Sequence[npt.ArrayLike], _start: Mapping[str, Tensor], _settings: object
    ) -> PlanExecutor:
        """Makes an executor."""
        self._executor = host_executor(program, order, self._targets)
        return self._executor

    def write_once(self, write: Callable[[], None]) -> None:
        """Writes."""
        write()

    def error_of_all(self, what: str, note: str) -> ExecutionError:
        """Returns the error."""
        return ExecutionError("all", what, note=note)

    def leave(self, _error: BaseException) -> None:
        """Ends the executor."""
        self.close()

    def close(self) -> None:
        """Ends the executor."""
        if self._executor is not None:
            self._executor.close()
