"""ForkedExecutor: a plan on processor cores of this host, a forked process for each.

Threads of one process take turns in Python; processes do not. They have the program from the start, since they are
forked; parameters, buffers and the inputs of a step are in memory that all share, and so is what they hand over:

    this process   inputs -> "step" to all                                 records of all -> loss, state
    cpu0                      mm   mm -- a -->  mm ...  record
    cpu1                      mm ......... mm on a ...  record

A process that fails, or ends, ends all; they end with this process, too.

Each tensor that goes to another device has a slot in shared memory, into which its device copies it. Readers use it
there. A semaphore for each pair of devices counts the tensors that are ready, which go in the order of the sender's
script:

    cpu0   mm -> copy into the slot of a, release   mm -> copy into the slot of b, release
    cpu1                         acquire, op on a                      acquire, op on b

A slot is written again in the next step, which begins when all devices have done this one."""

import ctypes
import gc
import mmap
import os
import signal
import sys
import threading
import time
import warnings
from collections import defaultdict
from collections.abc import Collection, Hashable, Mapping, Sequence
from dataclasses import replace
from multiprocessing import connection as pipes
from multiprocessing import current_process, get_context
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from multiprocessing.synchronize import Semaphore
from pathlib import Path
from threading import Event
from typing import Any, NoReturn

import numpy.typing as npt
import torch
from torch import Tensor

from gdp.execute.backends import Content, CpuBackend, ExchangedRows, Target
from gdp.execute.plan_executor import (
    POLL_SECONDS,
    ExecutionError,
    PlanExecutor,
    StepRecord,
    StepRequest,
    Transport,
    Worker,
    held_tensors,
)
from gdp.execute.script import Traffic, traffic_of
from gdp.models.pytorch import Program
from gdp.models.pytorch.strides import bytes_of, fill

_END_SECONDS = 2.0  # for a process that was told to end

STEP, COLLECT, PRIVATE, LOAD_PRIVATE, END = range(5)  # requests
_SPINS = 3000  # looks at a semaphore before the process sleeps, about 1 ms: to wake it up again takes 0.1 ms
_POLL_SECONDS = 0.5  # for which it sleeps at most between looks at its parent


class SharedSlots(Transport):
    """The transport of device `number`. `slots` has a tensor in shared memory for each tensor of `traffic` with
    content, `semaphores` one for each pair."""

    def __init__(
        self,
        number: int,
        traffic: Traffic,
        slots: Mapping[int, Tensor],
        semaphores: Mapping[tuple[int, int], Semaphore],
    ) -> None:
        self._slots = slots
        self._to = {to: semaphore for (source, to), semaphore in semaphores.items() if source == number}
        self._from = {source: semaphore for (source, to), semaphore in semaphores.items() if to == number}
        own = [(source, tensors) for (source, to), tensors in traffic.items() if to == number]
        self._places = {tensor: (source, place) for source, tensors in own for place, tensor in enumerate(tensors)}
        self._num_arrived: dict[int, int] = {}
        self._copied: set[int] = set()
        self._parent = os.getpid()

    def begin(self) -> None:
        self._num_arrived = dict.fromkeys(self._from, 0)
        self._copied.clear()

    def send(self, tensor: int, content: Content, device: int) -> None:
        if content is not None and tensor not in self._copied:
            self._copied.add(tensor)
            if isinstance(content, ExchangedRows):
                content.copy_to(self._slots[tensor])
            else:
                fill(self._slots[tensor], content)
        self._to[device].release()

    def receive(self, tensor: int) -> Content:
        source, place = self._places[tensor]
        while self._num_arrived[source] <= place:
            self._await(self._from[source])
            self._num_arrived[source] += 1
        return self._slots.get(tensor)

    def _await(self, semaphore: Semaphore) -> None:
        for _ in range(_SPINS):
            if semaphore.acquire(False):
                return
            os.sched_yield()
        while not semaphore.acquire(True, _POLL_SECONDS):
            if os.getppid() != self._parent:
                os._exit(1)


def may_fork(targets: Sequence[Target]) -> bool:
    """Returns whether processes can be forked for these targets: for single cores, before PyTorch uses a GPU. A process
    whose kernels have threads of their own cannot be forked, and a daemon may not have children."""
    return (
        sys.platform == "linux"
        and not torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
        and not current_process().daemon
        and all(target.device.type == "cpu" and target.num_threads == 1 for target in targets)
    )


class ForkedExecutor(PlanExecutor):
    """A program placed on `targets` [D], single cores; `may_fork` says if this process can have one."""

    def __init__(self, program: Program, order: Sequence[npt.ArrayLike], targets: Sequence[Target]) -> None:
        super().__init__(program, order, targets)
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

    def _fork(self, memory: "SharedMemory") -> None:
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

    def load(self, content: Mapping[int, Tensor]) -> None:
        for tensor, memory in self._state.items():
            if tensor in content:
                memory.copy_(content[tensor])

    def _step(self, inputs: Mapping[int, Tensor], *, is_timed: bool, retain: bool, seed: int) -> StepRecord:
        start_ns, keywords = time.perf_counter_ns(), self.program.changed_keywords
        changed = [(*key, value) for key, value in keywords.items() if self._keywords.get(key, _NONE) != value]
        self._keywords.update(keywords)
        for tensor, memory in self._inputs.items():
            memory.copy_(inputs[tensor])
        answers = self._ask(dict.fromkeys(range(len(self.targets)), (STEP, seed, retain, is_timed, changed)))
        devices = [replace(record, held=tensors) for _, (record, tensors) in sorted(answers.items())]
        return StepRecord.of_host(devices, start_ns)

    def state(self, *, everywhere: bool = True) -> dict[int, Tensor]:
        return dict(self._state)

    def private(self, *, everywhere: bool = True) -> dict[int, dict[int, Tensor]]:
        state: dict[int, dict[int, Tensor]] = defaultdict(dict)
        for _, tensors in self._ask(dict.fromkeys(range(len(self.targets)), (PRIVATE,))).values():
            for (op, value), tensor in tensors.items():
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
        self._children, self._connections, self.is_closed = [], [], True

    def _held(self, tensors: Collection[int], record: StepRecord, *, everywhere: bool = True) -> dict[int, Tensor]:
        found = held_tensors(record) | self._state
        wanted: dict[int, list[int]] = defaultdict(list)
        for tensor in sorted(set(tensors) - found.keys()):
            wanted[self._holder(tensor)].append(tensor)
        if wanted and record is not self._latest:
            raise ValueError("record is not of the latest step")
        answers = self._ask({number: (COLLECT, wanted[number]) for number in wanted}) if wanted else {}
        return {tensor: item for _, tensors in answers.values() for tensor, item in tensors.items()} | found

    def _ask(
        self, requests: Mapping[int, tuple[Any, ...]], content: Mapping[int, Mapping[Any, Tensor]] | None = None
    ) -> dict[int, tuple[Any, dict[Any, Tensor]]]:
        """Returns the answers of processes: an object and tensors by key. ExecutionError, and all end, if one fails."""
        answers: dict[int, tuple[Any, dict[Any, Tensor]]] = {}
        number = -1
        with self._ending("asking"):  # an interrupt, too: an answer would be taken for that of the next request
            try:
                for number, request in requests.items():
                    self._connections[number].send(request)
                    if content is not None:
                        send_tensors(self._connections[number], content[number])
                waiting: dict[Any, int] = {self._connections[number]: number for number in requests}
                while waiting:
                    for ready in pipes.wait(list(waiting), POLL_SECONDS):
                        number = waiting.pop(ready)
                        answer = self._connections[number].recv()
                        if isinstance(answer, ExecutionError):
                            raise answer
                        answers[number] = answer, receive_tensors(self._connections[number])
            except (EOFError, OSError):
                raise self._gone(number) from None
        return answers

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
                    answer: Any = None
                    tensors: Mapping[Any, Tensor | None] = {}
                    if kind == STEP:
                        held = {}
                        answer, held = self._serve_step(number, worker, request)
                        tensors = {tensor: held[tensor] for tensor in self.program.loss_tensors & held.keys()}
                    elif kind == COLLECT:
                        tensors = {tensor: held[tensor] for tensor in request[0]}
                    elif kind == PRIVATE:
                        private = worker.private.items()
                        tensors = {(op, value): item for op, by in private for value, item in by.items()}
                    else:
                        for (op, value), item in receive_tensors(connection).items():
                            worker.load_private(op, {value: item})
                    connection.send(answer)
                    send_tensors(connection, {key: item for key, item in tensors.items() if item is not None})
                    gc.collect(0)
        except (EOFError, OSError):
            status = 1
        except BaseException:
            import traceback

            traceback.print_exc()
            status = 1
        os._exit(status)

    def _serve_step(
        self, number: int, worker: Worker, request: Sequence[Any]
    ) -> tuple[Any, Mapping[int, Tensor | None]]:
        """Runs a step, and returns its record, or its error, and the tensors that its script kept."""
        seed, retain, is_timed, changed = request
        for op, keyword, value in changed:
            self.program.set_keyword(op, keyword, value)
        script = self._chosen_scripts(retain=retain)[number]
        try:
            record = worker.step(StepRequest(self._inputs, seed, script, is_timed, owns_inputs=True))
        except ExecutionError as error:
            return error, {}
        return replace(record, held={}), record.held


def _slot(program: Program, tensor: int) -> Tensor:
    """Returns memory like that of a tensor; a part has the strides that it has in the whole. Some kernels, such as that
    of batch normalisation, add in another order in a compact copy."""
    part = program.tensor_layouts[tensor]
    if part is None:
        return program.memory_for(tensor)
    return torch.empty_strided(part.size, part.stride, dtype=part.dtype)


_NONE = object()


_TASKS = Path("/proc/self/task")
_LONGEST_S = 1.0  # until a process is forked although others run; a thread holds such a lock for a microsecond
_LOOK_S = 0.0005


def start(child: BaseProcess) -> None:
    """Forks a process while no other thread runs; Ctrl-C waits, or the child would tell of it before it ignores it."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        await_other_threads()
        child.start()
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def await_other_threads() -> None:
    """Waits until no other thread of this process runs, including threads that Python takes for ended. MKL frees a
    thread's memory as the thread ends, under a lock without an owner: a child forked then would wait for ever."""
    until = time.monotonic() + _LONGEST_S
    while _others_run() and time.monotonic() < until:
        time.sleep(_LOOK_S)


def _others_run() -> bool:
    own = str(threading.get_native_id())
    return any(_state(task) in "RD" for task in os.listdir(_TASKS) if task != own)


def _state(task: str) -> str:
    """Returns the letter of a thread's state in the kernel; X if it has ended."""
    try:
        return (_TASKS / task / "stat").read_text().rpartition(")")[2].split()[0]
    except FileNotFoundError:
        return "X"


_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3  # M_TRIM_THRESHOLD, M_MMAP_THRESHOLD of glibc's malloc.h
_MAX_BYTES = (1 << 31) - 1


def keep_freed_memory() -> None:
    """Keeps glibc from giving memory back to the system, which would map it anew, page by page, in each step."""
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)  # other libraries have none
    if mallopt is not None:
        mallopt(_TRIM_THRESHOLD, _MAX_BYTES)
        mallopt(_MMAP_THRESHOLD, _MAX_BYTES)


_BLOCK_BYTES = 64 << 20  # of addresses; the memory is there when it is first written
_ALIGNMENT = 64  # of the processor's cache lines


class SharedMemory:
    """Makes tensors before processes are forked."""

    def __init__(self) -> None:
        self._block = mmap.mmap(-1, _BLOCK_BYTES)
        self._next = 0

    def like(self, template: Tensor) -> Tensor:
        """Returns zeros with the layout of `template`, in storage of their own."""
        num_bytes = template.untyped_storage().nbytes()
        if not num_bytes:
            return torch.zeros_like(template)
        if self._next + num_bytes > len(self._block):
            self._block, self._next = mmap.mmap(-1, max(num_bytes, _BLOCK_BYTES)), 0
        count = num_bytes // template.element_size()
        memory = torch.frombuffer(self._block, dtype=template.dtype, count=count, offset=self._next)
        self._next += -(-num_bytes // _ALIGNMENT) * _ALIGNMENT
        return memory.as_strided(template.shape, template.stride(), template.storage_offset())


def send_tensors(connection: Connection, tensors: Mapping[Any, Tensor]) -> None:
    """Sends tensors of the CPU by key."""
    connection.send([(key, item.dtype, tuple(item.shape), item.stride()) for key, item in tensors.items()])
    for item in tensors.values():
        if item.numel():
            connection.send_bytes(bytes_of(item.detach()).numpy().data)


def receive_tensors(connection: Connection) -> dict[Any, Tensor]:
    """Receives the tensors of `send_tensors`, in memory of their own."""
    tensors: dict[Hashable, Tensor] = {}
    for key, dtype, size, stride in connection.recv():
        tensors[key] = memory = torch.empty_strided(size, stride, dtype=dtype)
        if memory.numel():
            connection.recv_bytes_into(bytes_of(memory).numpy().data)
    return tensors
