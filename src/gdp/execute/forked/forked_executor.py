"""ForkedExecutor: a plan on processor cores of this host, a forked process for each.

Threads of one process take turns in Python; processes do not. They have the program from the start, since they are
forked; parameters, buffers and the inputs of a step are in memory that all share, and so is what they hand over:

    this process   inputs -> "step" to all                                 records of all -> loss, state
    cpu0                      mm   mm -- a -->  mm ...  record
    cpu1                      mm ......... mm on a ...  record

A process that fails, or ends, ends all; they end with this process, too.
"""

import gc
import os
import signal
import sys
import time
import warnings
from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from multiprocessing import connection as pipes
from multiprocessing import current_process, get_context
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from threading import Event
from typing import Any, NamedTuple, NoReturn

import numpy.typing as npt
import torch
from torch import Tensor

from gdp.execute.backends import CpuBackend
from gdp.execute.forked.processes import SharedMemory, keep_freed_memory, receive_tensors, send_tensors, start
from gdp.execute.forked.shared_slots import SharedSlots
from gdp.execute.plan_executor import POLL_SECONDS, HostExecutor, StepRecord
from gdp.execute.ranks.ranks import REMEDIED
from gdp.execute.script import traffic_of
from gdp.execute.targets import Target
from gdp.execute.worker import DeviceRecord, ExecutionError, StepRequest, Worker
from gdp.models.pytorch import Program

_END_SECONDS = 2.0  # for a process that was told to end

STEP, COLLECT, PRIVATE, LOAD_PRIVATE, END = range(5)  # requests


class Failed(NamedTuple):
    """The failure of a process, as it tells it."""

    what: str
    kind: str  # of the exception
    text: str
    note: str

    def error(self, device: str) -> ExecutionError:
        """Makes the error of it."""
        cause = REMEDIED.get(self.kind, RuntimeError)(self.text) if self.text else None
        return ExecutionError(device, self.what, cause, self.note)


def may_fork(targets: Sequence[Target]) -> bool:
    """Returns whether processes can be forked for these targets: for single cores, before PyTorch uses a GPU.

    A process whose kernels have threads of their own cannot be forked, and a daemon may not have children.
    """
    return (
        sys.platform == "linux"
        and not torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
        and not current_process().daemon
        and all(target.device.type == "cpu" and target.num_threads == 1 for target in targets)
    )


class ForkedExecutor(HostExecutor):
    """A program placed on `targets` [D], single cores; `may_fork` says if this process can have one."""

    def __init__(self, program: Program, order: Sequence[npt.ArrayLike], targets: Sequence[Target]) -> None:
        super().__init__(program, order, targets)
        self._latest: StepRecord | None = None
        self._keywords = dict(program.changed_keywords)
        memory = SharedMemory()
        self._state: dict[int, Tensor] = {}
        self._inputs: dict[int, Tensor] = {}
        for source in program.sources.values():
            memories = self._inputs if source.kind == "input" else self._state
            memories[source.tensor] = memory.like(program.memory_for(source.tensor))
        self._children: list[BaseProcess] = []
        self._connections: list[Connection] = []
        for op in range(program.graph.num_ops):  # once for all processes
            if op in self._home and op not in program.sources:
                program.routine(op)
        self._fork(memory)

    def _fork(self, memory: SharedMemory) -> None:
        context, traffic, program = get_context("fork"), traffic_of(self._scripts), self.program
        sent = {tensor for tensors in traffic.values() for tensor in tensors if program.tensor_values[tensor] >= 0}
        slots = {tensor: memory.like(_slot(program, tensor)) for tensor in sorted(sent)}
        semaphores = {pair: context.Semaphore(0) for pair, tensors in traffic.items() if tensors}
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # of threads: kernels here have none
            warnings.filterwarnings("ignore", r"os\.fork\(\) was called", RuntimeWarning)  # of JAX, which no child uses
            for number, target in enumerate(self.targets):
                here, there = context.Pipe()
                transport = SharedSlots(number, traffic, slots, semaphores)
                worker = Worker(program, CpuBackend(target, program.memory_for), transport, Event())
                worker.state = {source.tensor: self._state[source.tensor] for source in self._sources_of(number)}
                self._connections.append(here)
                child = context.Process(target=self._serve, args=(number, worker, there), daemon=True)
                child.name = f"gdp-{target.name}"
                self._children.append(child)
                start(child)
                there.close()

    def _sources_of(self, number: int) -> list[Any]:
        sources = self.program.sources.items()
        return [source for op, source in sources if self._home.get(op) == number and source.kind != "input"]

    @property
    def is_closed(self) -> bool:
        return not self._children

    def load(self, content: Mapping[int, Tensor]) -> None:
        for tensor, memory in self._state.items():
            if tensor in content:
                memory.copy_(content[tensor])

    def step(
        self, inputs: Mapping[int, Tensor], *, is_timed: bool = False, retain: bool = False, seed: int | None = None
    ) -> StepRecord:
        self._check_open()
        keywords = self.program.changed_keywords
        changed = [(*key, value) for key, value in keywords.items() if self._keywords.get(key, _NONE) != value]
        self._keywords.update(keywords)
        start_ns = time.perf_counter_ns()
        for tensor, memory in self._inputs.items():
            memory.copy_(inputs[tensor])
        try:
            self._send_all((STEP, self._seed(seed), retain, is_timed, changed))
            records = self._answers()
        except BaseException:  # also an interrupt: half a step cannot go on
            self._end_now()
            raise
        self.num_steps += 1
        record = StepRecord(tuple(records), start_ns, max(device.end_ns for device in records))
        self._latest = record
        return record

    def _retained(self, record: StepRecord) -> dict[int, Tensor]:
        return self._collect(self.program.result_tensors, record)

    def kept(self, record: StepRecord, tensor: int) -> Tensor:
        return self._collect({tensor}, record)[tensor]

    def state(self, *, everywhere: bool = True) -> dict[int, Tensor]:
        return dict(self._state)

    def private(self, *, everywhere: bool = True) -> dict[int, dict[int, Tensor]]:
        state: dict[int, dict[int, Tensor]] = defaultdict(dict)
        for (op, value), tensor in self._ask(dict.fromkeys(range(len(self.targets)), (PRIVATE,))).items():
            state[op][value] = tensor
        return dict(state)

    def load_private(self, content: Mapping[int, Mapping[int, Tensor]]) -> None:
        by_device: dict[int, dict[tuple[int, int], Tensor]] = defaultdict(dict)
        for op, values in content.items():
            for value, tensor in values.items():
                by_device[self._home[op]][op, value] = tensor.detach().cpu()
        self._ask(dict.fromkeys(by_device, (LOAD_PRIVATE,)), by_device)

    def close(self) -> None:
        """Ends the processes."""
        for connection in self._connections:
            try:
                connection.send((END,))
            except OSError:
                continue
        until = time.monotonic() + _END_SECONDS
        for child in self._children:
            child.join(max(until - time.monotonic(), 0.0))
        self._end_now()

    def leave(self, _error: BaseException) -> None:
        """Ends the processes after an error in the script."""
        self._end_now()

    # -- this process ------------------------------------------------------------------------------------------------

    def _end_now(self) -> None:
        for child in self._children:
            if child.exitcode is None:
                child.kill()
        for child, connection in zip(self._children, self._connections, strict=True):
            child.join()
            child.close()
            connection.close()
        self._children, self._connections = [], []

    def _collect(self, tensors: Collection[int], record: StepRecord) -> dict[int, Tensor]:
        """Returns tensors that the latest step has left."""
        self._check_open()
        if record is not self._latest:
            raise ValueError("record is not of the latest step")
        program = self.program
        wanted: dict[int, list[int]] = defaultdict(list)
        for tensor in sorted(tensors):
            if tensor not in self._state:
                wanted[self._home[program.keepers.get(tensor, int(program.graph.producers[tensor]))]].append(tensor)
        return self._ask({number: (COLLECT, wanted[number]) for number in wanted})

    def _ask(
        self, requests: Mapping[int, tuple[Any, ...]], content: Mapping[int, Mapping[Any, Tensor]] | None = None
    ) -> dict[Any, Tensor]:
        """Returns tensors of processes, by their keys."""
        self._check_open()
        tensors: dict[Any, Tensor] = {}
        for number, request in requests.items():
            connection = self._connections[number]
            try:
                connection.send(request)
                if content is not None:
                    send_tensors(connection, content[number])
                tensors |= receive_tensors(connection)
            except (EOFError, OSError):
                error = self._gone(number)
                self._end_now()
                raise error from None
        return tensors

    def _send_all(self, request: tuple[Any, ...]) -> None:
        for number, connection in enumerate(self._connections):
            try:
                connection.send(request)
            except OSError:
                raise self._gone(number) from None

    def _answers(self) -> list[DeviceRecord]:
        """[D] Returns the records of a step. ExecutionError if a process fails or ends."""
        waiting: dict[Any, int] = {connection: number for number, connection in enumerate(self._connections)}
        records: dict[int, DeviceRecord] = {}
        while waiting:
            for ready in pipes.wait(list(waiting), POLL_SECONDS):
                number = waiting.pop(ready)
                connection = self._connections[number]
                try:
                    answer = connection.recv()
                    if isinstance(answer, Failed):
                        raise answer.error(self.targets[number].name)
                    records[number] = DeviceRecord(receive_tensors(connection), *answer)
                except (EOFError, OSError):
                    raise self._gone(number) from None
        return [records[number] for number in range(len(self.targets))]

    def _gone(self, number: int) -> ExecutionError:
        child = self._children[number]
        child.join(_END_SECONDS)
        code = child.exitcode
        how = f"by {signal.Signals(-code).name}" if code is not None and code < 0 else f"with status {code}"
        return ExecutionError(self.targets[number].name, f"its process, {child.pid}, was ended {how}")

    # -- a forked process --------------------------------------------------------------------------------------------

    def _serve(self, number: int, worker: Worker, connection: Connection) -> NoReturn:
        """Serves requests until the other end is closed."""
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # the other process gets it, too, and ends this one
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        for other in self._connections:
            other.close()  # or this process would not see that they are
        gc.freeze()
        gc.disable()
        keep_freed_memory()
        parent = os.getppid()
        status = 0
        try:
            with worker.backend.active(), torch.no_grad():
                held: Mapping[int, Tensor | None] = {}
                while True:
                    while not connection.poll(POLL_SECONDS):
                        if os.getppid() != parent:
                            os._exit(1)
                    kind, *request = connection.recv()
                    if kind == END:
                        break
                    if kind == STEP:
                        held = {}
                        held = self._serve_step(number, worker, connection, request)
                        gc.collect(0)
                    elif kind == COLLECT:
                        wanted = {tensor: held[tensor] for tensor in request[0]}
                        send_tensors(connection, {key: item for key, item in wanted.items() if item is not None})
                    elif kind == PRIVATE:
                        private = worker.private.items()
                        send_tensors(
                            connection, {(op, value): item for op, by in private for value, item in by.items()}
                        )
                    else:
                        for (op, value), item in receive_tensors(connection).items():
                            worker.load_private(op, {value: item})
                        send_tensors(connection, {})
        except (EOFError, OSError):
            status = 1
        except BaseException:
            import traceback

            traceback.print_exc()
            status = 1
        os._exit(status)

    def _serve_step(
        self, number: int, worker: Worker, connection: Connection, request: Sequence[Any]
    ) -> Mapping[int, Tensor | None]:
        """Runs a step, answers with its record and the loss, and returns the tensors that its script kept."""
        seed, retain, is_timed, changed = request
        for op, keyword, value in changed:
            self.program.set_keyword(op, keyword, value)
        script = self._chosen_scripts(retain=retain)[number]
        try:
            record = worker.step(StepRequest(self._inputs, seed, script, is_timed, owns_inputs=True))
        except ExecutionError as error:
            cause = error.cause
            connection.send(Failed(error.what, type(cause).__name__, str(cause) if cause else "", error.note))
            return {}
        held = {tensor: item for tensor, item in record.held.items() if tensor in self.program.loss_tensors}
        connection.send((record.ops, record.start_ns, record.finish_ns, record.wait_ns, record.end_ns))
        send_tensors(connection, {tensor: item for tensor, item in held.items() if item is not None})
        return record.held


def _slot(program: Program, tensor: int) -> Tensor:
    """Returns memory like that of a tensor; a part has the strides that it has in the whole.

    Some kernels, such as that of batch normalisation, add in another order in a compact copy.
    """
    part = program.tensor_layouts[tensor]
    if part is None:
        return program.memory_for(tensor)
    return torch.empty_strided(part.size, part.stride, dtype=part.dtype)


_NONE = object()
