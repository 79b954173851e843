"""ThreadExecutor: a plan on the devices of one host, a worker thread for each.

Workers live from the first step to `close`; parameters, buffers and optimizer state stay with them. The main thread
gives each worker a request for a step, and waits until all are done or one has failed; then all stop.
"""

import contextlib
import threading
import time
from collections.abc import Mapping, Sequence
from queue import Empty, SimpleQueue
from typing import Any

import numpy.typing as npt
import torch
from torch import Tensor

from gdp.execute.backends import Backend, SentTensor, backend_of
from gdp.execute.exchanged_rows import Content
from gdp.execute.plan_executor import POLL_SECONDS, HostExecutor, StepRecord, held_tensors
from gdp.execute.targets import Target
from gdp.execute.worker import DeviceRecord, ExecutionError, StepRequest, Stopped, Worker
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
    """A program placed on `targets` [D], a thread for each."""

    def __init__(self, program: Program, order: Sequence[npt.ArrayLike], targets: Sequence[Target]) -> None:
        super().__init__(program, order, targets)
        backends = [backend_of(target, program.memory_for) for target in targets]
        self._inboxes: list[SimpleQueue[SentTensor | None]] = [SimpleQueue() for _ in targets]
        self._queues: list[SimpleQueue[StepRequest | None]] = [SimpleQueue() for _ in targets]
        self._answers: SimpleQueue[tuple[int, DeviceRecord | BaseException]] = SimpleQueue()
        self._stop = threading.Event()
        self._workers = [
            Worker(program, backend, QueueTransport(number, backends, self._inboxes), self._stop)
            for number, backend in enumerate(backends)
        ]
        self._threads = [
            threading.Thread(target=self._work, args=(number,), name=f"gdp-{target.name}", daemon=True)
            for number, target in enumerate(self.targets)
        ]
        for thread in self._threads:
            thread.start()

    @property
    def is_closed(self) -> bool:
        return not self._threads

    def load(self, content: Mapping[int, Tensor]) -> None:
        for op in self.program.sources:
            self._load(op, content, self._workers[self._home[op]])

    def step(
        self, inputs: Mapping[int, Tensor], *, is_timed: bool = False, retain: bool = False, seed: int | None = None
    ) -> StepRecord:
        self._check_open()
        requests = self._requests(inputs, is_timed=is_timed, retain=retain, seed=seed)
        start_ns = time.perf_counter_ns()
        for queue, request in zip(self._queues, requests, strict=True):
            queue.put(request)
        records: dict[int, DeviceRecord] = {}
        try:
            while len(records) < len(self.targets):
                number, answer = self._next_answer()
                if isinstance(answer, BaseException):
                    raise answer
                records[number] = answer
        except BaseException:  # also an interrupt: half a step cannot go on
            self.close()
            raise
        self.num_steps += 1
        devices = tuple(records[number] for number in range(len(self.targets)))
        return StepRecord(devices, start_ns, max(record.end_ns for record in devices))

    def kept(self, record: StepRecord, tensor: int) -> Tensor:
        return held_tensors(record)[tensor].to("cpu", copy=True)

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
        for requests, inbox in zip(self._queues, self._inboxes, strict=True):
            requests.put(None)
            inbox.put(None)
        for thread in self._threads:
            thread.join()
        if self._threads:
            torch.set_num_threads(self._threads_before)
        self._threads = []

    def _next_answer(self) -> tuple[int, Any]:
        while True:
            with contextlib.suppress(Empty):
                return self._answers.get(timeout=POLL_SECONDS)

    def _work(self, number: int) -> None:
        worker = self._workers[number]
        try:
            with worker.backend.active(), torch.no_grad():
                while (request := self._queues[number].get()) is not None:
                    self._answers.put((number, worker.step(request)))
        except Stopped:
            pass
        except ExecutionError as error:
            self._answers.put((number, error))
        except BaseException as error:  # whatever it is, the main thread must hear of it
            self._answers.put((number, ExecutionError(worker.backend.target.name, "its worker", error)))
