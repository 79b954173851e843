"""The executor of a plan on the devices of this host: forked processes for single cores, threads for others."""

import threading
from collections.abc import Callable, Collection, Mapping, Sequence
from queue import SimpleQueue

import numpy.typing as npt
import torch
from torch import Tensor

from gdp.execute.backends import Backend, Content, SentTensor, backend_of
from gdp.execute.forked.forked_executor import ForkedExecutor, may_fork
from gdp.execute.plan_executor import HostExecutor, StepRecord, held_tensors
from gdp.execute.targets import Target, find_targets
from gdp.execute.worker import DeviceRecord, ExecutionError, StepRequest, Stopped, Worker, WorkerThread
from gdp.models.pytorch import Program


class QueueTransport:
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

    def finish(self) -> None:
        pass


class ThreadExecutor(HostExecutor):
    """A program placed on `targets` [D], a worker thread for each from the first step to `close`.

    Parameters, buffers and optimizer state stay with the workers. The main thread requests a step of each, and waits
    until all are done or one has failed; then all stop.
    """

    def __init__(self, program: Program, order: Sequence[npt.ArrayLike], targets: Sequence[Target]) -> None:
        super().__init__(program, order, targets)
        backends = [backend_of(target, program.memory_for) for target in targets]
        self._inboxes: list[SimpleQueue[SentTensor | None]] = [SimpleQueue() for _ in targets]
        self._answers: SimpleQueue[tuple[int, DeviceRecord | BaseException]] = SimpleQueue()
        self._stop = threading.Event()
        self._workers = [
            Worker(program, backend, QueueTransport(number, backends, self._inboxes), self._stop)
            for number, backend in enumerate(backends)
        ]
        self._threads = [WorkerThread(worker, self._answers, number) for number, worker in enumerate(self._workers)]
        for thread in self._threads:
            thread.start()

    @property
    def is_closed(self) -> bool:
        return not self._threads

    def load(self, content: Mapping[int, Tensor]) -> None:
        self._load(content, dict(enumerate(self._workers)))

    def _step(
        self, inputs: Mapping[int, Tensor], *, is_timed: bool, retain: bool, seed: int
    ) -> tuple[DeviceRecord, ...]:
        scripts = self._chosen_scripts(retain=retain)
        for thread, script in zip(self._threads, scripts, strict=True):
            thread.requests.put(StepRequest(inputs, seed, script, is_timed))
        records: dict[int, DeviceRecord] = {}
        while len(records) < len(scripts):
            number, answer = self._answers.get()
            if isinstance(answer, DeviceRecord):
                records[number] = answer
            elif isinstance(answer, ExecutionError):
                raise answer
            else:
                raise ExecutionError(self.targets[number].name, "its worker", answer) from answer
        return tuple(records[number] for number in range(len(scripts)))

    def _held(self, tensors: Collection[int], record: StepRecord) -> dict[int, Tensor]:
        return held_tensors(record) | self.state()

    def load_private(self, content: Mapping[int, Mapping[int, Tensor]]) -> None:
        for op, values in content.items():
            self._workers[self._home[op]].load_private(op, values)

    def state(self, *, everywhere: bool = True) -> dict[int, Tensor]:
        return {tensor: memory for worker in self._workers for tensor, memory in worker.state.items()}

    def private(self, *, everywhere: bool = True) -> dict[int, dict[int, Tensor]]:
        return {op: values for worker in self._workers for op, values in worker.private.items() if values}

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
        self._threads = []


def host_executor(program: Program, order: Sequence[npt.ArrayLike], targets: Sequence[Target]) -> HostExecutor:
    """Makes an executor of the program on `targets` [D].

    PyTorch with CUDA has threads for gradients after a capture, and then no forked process of it computes any.
    """
    if may_fork(targets) and torch.version.cuda is None:
        return ForkedExecutor(program, order, targets)
    return ThreadExecutor(program, order, targets)


class HostRunner:
    """Runs a training on the devices of this host; `on` as in `find_targets`."""

    is_alone = is_first = True

    def __init__(self, names: Sequence[str], on: Sequence[str] | None) -> None:
        self._targets = find_targets(names, on)
        self._executor: HostExecutor | None = None

    def start(
        self, program: Program, order: Sequence[npt.ArrayLike], _start: Mapping[str, Tensor], _settings: object
    ) -> HostExecutor:
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
