"""ThreadExecutor: a plan on the devices of one host, a worker thread for each.

Workers live from the first step to `close`; parameters, buffers and optimizer state stay with them. The main thread
gives out orders for a step, and waits until all are done or one has failed; then all stop.
"""

import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from queue import Empty, SimpleQueue
from types import TracebackType
from typing import Any

import numpy.typing as npt
import torch
from torch import Tensor

from gdp.capture import Program, Replay
from gdp.execute.lanes import Lane, Parcel, lane_of
from gdp.execute.script import Script, scripts
from gdp.execute.targets import Target
from gdp.execute.worker import DeviceRecord, ExecutionError, Orders, Stopped, Worker

_POLL_SECONDS = 0.2  # how long the main thread sleeps at most between looks at signals


@dataclass(frozen=True, slots=True)
class StepRecord:
    """What one step did: [D] what each device did; the step began at `start_ns` and ended at `finish_ns`."""

    devices: tuple[DeviceRecord, ...]
    start_ns: int
    finish_ns: int


class _Inboxes:
    """The mailbox of worker `number`: a queue that all others put their parcels into."""

    def __init__(self, number: int, lanes: Sequence[Lane], queues: "Sequence[SimpleQueue[Parcel | None]]") -> None:
        self._queues, self._own, self._lane = queues, queues[number], lanes[number]
        self._places = [lane.target.device for lane in lanes]
        self._here: dict[int, Parcel] = {}

    def begin(self) -> None:
        self._here.clear()

    def send(self, tensor: int, content: Tensor | None, device: int) -> None:
        self._queues[device].put(self._lane.pack(tensor, content, self._places[device]))

    def receive(self, tensor: int) -> Tensor | None:
        while tensor not in self._here:
            parcel = self._own.get()
            if parcel is None:
                raise Stopped
            self._here[parcel.tensor] = parcel
        return self._lane.unpack(self._here.pop(tensor))

    def finish(self) -> None:
        pass


class ThreadExecutor:
    """A program placed on `targets`, ops of each device in `order` [D]; a context manager.

    `load` gives it parameters and buffers, `step` runs one step on them. After an ExecutionError it is closed.
    """

    def __init__(self, program: Program, order: Sequence[npt.ArrayLike], targets: Sequence[Target]) -> None:
        self.program, self.order, self.targets = program, order, tuple(targets)
        self.num_steps = 0
        lanes = [lane_of(target, program.memory_for) for target in targets]
        self._inboxes: list[SimpleQueue[Parcel | None]] = [SimpleQueue() for _ in targets]
        self._orders: list[SimpleQueue[Orders | None]] = [SimpleQueue() for _ in targets]
        self._answers: SimpleQueue[tuple[int, DeviceRecord | BaseException]] = SimpleQueue()
        self._stop = threading.Event()
        self._workers = [
            Worker(program, lane, _Inboxes(number, lanes, self._inboxes), self._stop)
            for number, lane in enumerate(lanes)
        ]
        self._scripts = scripts(program, order)
        self._home = {task.op: number for number, script in enumerate(self._scripts) for task in script}
        self._retaining: tuple[Script, ...] | None = None
        self._threads_before = torch.get_num_threads()
        self._threads = [
            threading.Thread(target=self._work, args=(number,), name=f"gdp-{target.name}", daemon=True)
            for number, target in enumerate(self.targets)
        ]
        for thread in self._threads:
            thread.start()

    def __enter__(self) -> "ThreadExecutor":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    @property
    def is_closed(self) -> bool:
        """No more steps: `close` was called, or a step failed or was interrupted, and its effects are half there."""
        return not self._threads

    def load(self, content: Mapping[int, Tensor]) -> None:
        """Copy parameters and buffers, by tensor number as `Program.bind` gives them, to their devices."""
        for op, source in self.program.sources.items():
            if source.kind != "input" and source.tensor in content:
                worker = self._workers[self._home[op]]
                try:
                    worker.load({source.tensor: content[source.tensor]})
                except RuntimeError as error:
                    what = f"loading {self.program.graph.op_names[op]!r}"
                    raise ExecutionError(worker.lane.target.name, what, error) from error

    def step(
        self, inputs: Mapping[int, Tensor], *, is_timed: bool = False, retain: bool = False, seed: int | None = None
    ) -> StepRecord:
        """One step on `inputs`, by tensor number as `Program.bind` gives them.

        `retain` keeps outputs and gradients for `results`; random numbers differ from step to step unless `seed` is
        given. ExecutionError if an op fails.
        """
        if self.is_closed:
            raise ExecutionError("all", "the executor is closed")
        if retain and self._retaining is None:
            self._retaining = scripts(self.program, self.order, self.program.result_tensors)
        chosen = self._retaining if retain and self._retaining is not None else self._scripts
        seed = self.num_steps * self.program.num_draws if seed is None else seed
        start_ns = time.perf_counter_ns()
        for queue, script in zip(self._orders, chosen, strict=True):
            queue.put(Orders(inputs, seed, script, is_timed))
        records: list[DeviceRecord | None] = [None] * len(self.targets)
        try:
            while None in records:
                number, answer = self._next_answer()
                if isinstance(answer, BaseException):
                    raise answer
                records[number] = answer
        except BaseException:  # also an interrupt: a step that is not whole cannot go on
            self.close()
            raise
        self.num_steps += 1
        done = tuple(record for record in records if record)
        return StepRecord(done, start_ns, max(record.end_ns for record in done))

    def results(self, record: StepRecord) -> Replay:
        """What a step that retained it gave, and the state after it; tensors are on their devices."""
        held: dict[int, Tensor] = {}
        for worker, device in zip(self._workers, record.devices, strict=True):
            held.update({tensor: content for tensor, content in device.held.items() if content is not None})
            held.update(worker.state)
        return self.program.results(held)

    def loss(self, record: StepRecord) -> Tensor | None:
        """The loss of a step, retained or not; a copy on the CPU."""
        held = {tensor: content for device in record.devices for tensor, content in device.held.items()}
        found = self.program.loss_of({tensor: content for tensor, content in held.items() if content is not None})
        return None if found is None else found.detach().to("cpu", copy=True)

    def load_private(self, content: Mapping[int, Tensor]) -> None:
        """Copy optimizer state, by value, to the devices of its parameters."""
        for op, values in self.program.private.items():
            given = {value: content[value] for value in values if value in content}
            self._workers[self._home[op]].load_private(given)

    def state(self) -> dict[int, Tensor]:
        """Parameters and buffers now, by tensor number, where they are."""
        return {tensor: memory for worker in self._workers for tensor, memory in worker.state.items()}

    def private(self) -> dict[int, Tensor]:
        """Optimizer state now, by value, where it is."""
        return {value: memory for worker in self._workers for value, memory in worker.private.items()}

    def close(self) -> None:
        """End the workers, at once if they are in a step."""
        self._stop.set()
        for orders, inbox in zip(self._orders, self._inboxes, strict=True):
            orders.put(None)
            inbox.put(None)
        for thread in self._threads:
            thread.join()
        if self._threads:
            torch.set_num_threads(self._threads_before)
        self._threads = []

    def _next_answer(self) -> tuple[int, Any]:
        while True:
            try:
                return self._answers.get(timeout=_POLL_SECONDS)
            except Empty:
                continue

    def _work(self, number: int) -> None:
        worker = self._workers[number]
        try:
            with worker.lane.active(), torch.no_grad():
                while (orders := self._orders[number].get()) is not None:
                    self._answers.put((number, worker.step(orders)))
        except Stopped:
            pass
        except ExecutionError as error:
            self._answers.put((number, error))
        except BaseException as error:  # whatever it is, the main thread must hear of it
            self._answers.put((number, ExecutionError(worker.lane.target.name, "its worker", error)))
