"""ProcessExecutor: a plan on the devices of one host or many, a process for each, started by torchrun.

Rank r runs the script of device r; `connections.py` moves the tensors. The end of one rank ends all: the rank that
fails, or first notices that another is gone, writes the cause into the store, where all find it. A process that dies
is noticed by its closed connections; one that hangs, or a host that is lost, by its missing heartbeats.
"""

import contextlib
import hashlib
import itertools
import os
import threading
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from queue import Empty, SimpleQueue

import numpy.typing as npt
import torch
from torch import Tensor

from gdp.errors import InputError
from gdp.execute.backends import backend_of
from gdp.execute.plan_executor import POLL_SECONDS, PlanExecutor, StepRecord
from gdp.execute.ranks.communicator import CLOSE, STEP, Communicator
from gdp.execute.ranks.ranks import CAUSE_SECONDS, INTERRUPTED, SILENT_SECONDS, Failure, RankError, Ranks, message_of
from gdp.execute.script import traffic_of
from gdp.execute.worker import DeviceRecord, ExecutionError, StepRequest, Stopped, Worker
from gdp.models.pytorch import Program, Replay

WINDOW_BYTES = 256 << 20  # enough to keep any link busy while an op runs

_NOTICE_SECONDS = 0.5  # for a failure to be noticed that led to an interrupt
_NICE = 10  # of a thread that computes; others of the process have 0


@dataclass(frozen=True, slots=True)
class Transfer:
    """A tensor that went from one device to another; times on the first rank's clock."""

    tensor: int
    num_bytes: int
    source: int
    destination: int
    handed_ns: int  # its op was done
    start_ns: int  # all before it on the same connection had left
    arrival_ns: int


@dataclass(frozen=True, slots=True)
class ProcessRecord(StepRecord):
    """A step, whole on the first rank, elsewhere the rank's own part; `transfers` are recorded in timed steps."""

    transfers: tuple[Transfer, ...] = ()


def lower_priority() -> None:
    """Lowers the priority of this thread, which computes all the time, below those that send and receive."""
    if hasattr(os, "setpriority"):
        with contextlib.suppress(OSError):
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _NICE)


class ProcessExecutor(PlanExecutor):
    """A program placed on the devices of `ranks` [D].

    All ranks make the same calls on it, with the same arguments. RankError on all if one fails, dies, is silent, or
    keeps another waiting for `timeout_seconds`; the executor is closed then.

    window_bytes: of tensors received ahead of their use, except those before an awaited one on its connection.
    """

    def __init__(
        self,
        program: Program,
        order: Sequence[npt.ArrayLike],
        ranks: Ranks,
        *,
        timeout_seconds: float = 600.0,
        window_bytes: int = WINDOW_BYTES,
    ) -> None:
        super().__init__(program, order, [target.device for target in ranks.targets])
        self.ranks, self._rank = ranks, ranks.rank
        self._check_same()
        self._traffic = traffic_of(self._scripts)
        backend = backend_of(ranks.target, program.memory_for)
        self._communicator = Communicator(
            program,
            self._home,
            self._traffic,
            ranks,
            backend,
            timeout_seconds=timeout_seconds,
            window_bytes=window_bytes,
        )
        self._stop = threading.Event()
        self._worker = Worker(program, backend, self._communicator, self._stop)
        self._queue: SimpleQueue[StepRequest | None] = SimpleQueue()
        self._answers: SimpleQueue[DeviceRecord | BaseException] = SimpleQueue()
        self._latest: ProcessRecord | None = None
        self._error: RankError | None = None
        self._is_closed = False
        self._thread = threading.Thread(target=self._work, name=f"gdp-{ranks.target.name}", daemon=True)
        self._thread.start()

    def load(self, content: Mapping[int, Tensor]) -> None:
        """Copies this device's parameters and buffers out of all, by tensor number as `Program.bind` gives them."""
        self._check_open()
        with self._ending("loading"):
            for op in self.program.sources:
                if self._home[op] == self._rank:
                    self._load(op, content, self._worker)

    def step(
        self, inputs: Mapping[int, Tensor], *, is_timed: bool = False, retain: bool = False, seed: int | None = None
    ) -> ProcessRecord:
        """Runs one step on `inputs`, as `PlanExecutor.step`; all ranks begin it at once.

        Times are on the first rank's clock: the same on one host; across hosts they are set by messages sent back
        and forth before each timed step, and right to half of the shortest such trip.
        """
        self._check_open()
        request = self._requests(inputs, is_timed=is_timed, retain=retain, seed=seed)[self._rank]
        with self._ending("running a step"):
            offsets_ns = self._communicator.clock_offsets_ns(self.ranks.hosts) if is_timed else None
            self._communicator.plan_step(
                STEP + is_timed + 2 * retain, self._record_size if is_timed else lambda _rank: 2
            )
            self._queue.put(request)
            record = self._gather(self._answer(), offsets_ns)
        self.num_steps += 1
        self._latest = record if retain else None
        return record

    def results(self, record: ProcessRecord) -> Replay | None:
        """Returns on the first rank the results that the latest step retained, and the state after it, on the CPU."""
        self._check_latest(record)
        program = self.program
        held = self._collect(program.state_tensors | program.result_tensors, record)
        return program.results(held) if self.ranks.is_first else None

    def outputs(self, record: ProcessRecord) -> Mapping[str, Tensor]:
        """Returns on all ranks the outputs that the latest step retained, by name, on the CPU."""
        self._check_latest(record)
        return self.program.named_outputs(self._collect(self.program.result_tensors, record, everywhere=True))

    def loss(self, record: ProcessRecord) -> Tensor | None:
        """Returns on all ranks the loss of a step, retained or not; a copy on the CPU."""
        self._check_open()
        return self.program.loss_of(self._collect(self.program.loss_tensors, record, everywhere=True))

    def kept(self, record: ProcessRecord, tensor: int) -> Tensor:
        """Returns on all ranks a tensor that the graph keeps after a step; a copy on the CPU."""
        self._check_open()
        return self._collect({tensor}, record, everywhere=True)[tensor]

    def load_private(self, content: Mapping[int, Mapping[int, Tensor]]) -> None:
        """Copies this device's optimizer state out of all, by update and value."""
        self._check_open()
        with self._ending("loading optimizer state"):
            for op, values in content.items():
                if self._home[op] == self._rank:
                    self._worker.load_private(op, values)

    def state(self, *, everywhere: bool = True) -> dict[int, Tensor]:
        """Returns copies on the CPU of all that `Program.state_by_name` reads; `everywhere`, or on the first rank."""
        self._check_open()
        return self._collect(self.program.state_tensors, everywhere=everywhere)

    def private(self, *, everywhere: bool = True) -> dict[int, dict[int, Tensor]]:
        """Returns all optimizer state now, by update and value; `everywhere`, or on the first rank."""
        self._check_open()
        own = {f"{op} {value}": item for op, values in self._worker.private.items() for value, item in values.items()}
        with self._ending("collecting optimizer state"), torch.no_grad():
            items = self._communicator.collect_items(own, everywhere=everywhere)
        state: dict[int, dict[int, Tensor]] = {}
        for key, tensor in items.items():
            op, value = map(int, key.split())
            state.setdefault(op, {})[value] = tensor
        return state

    def act_once(self, act: Callable[[], None]) -> None:
        """Acts on the first rank, while the others wait; an InputError of the act is raised on all."""
        self._check_open()
        with self._ending("writing"):
            text, *_ = self._communicator.collect_texts(message_of(act) if self.ranks.is_first else "")
        if text:
            raise InputError(text)

    @property
    def is_closed(self) -> bool:
        """Returns whether `close` was called, or a rank has failed, with the effects of a step half there."""
        return self._is_closed

    @property
    def error(self) -> RankError | None:
        """The failure that closed it."""
        return self._error

    def close(self) -> None:
        """Ends the executor on all ranks; each waits for the others to close it, too."""
        if self._is_closed:
            return
        with self._ending("closing"):
            self._communicator.begin_collective(CLOSE, None)
            self._communicator.finish()
        self._is_closed = True
        self._communicator.close()
        self._queue.put(None)
        self._thread.join()
        torch.set_num_threads(self._threads_before)

    def _work(self) -> None:
        worker = self._worker
        with worker.backend.active(), torch.no_grad():
            lower_priority()
            while (request := self._queue.get()) is not None:
                try:
                    self._answers.put(worker.step(request))
                except BaseException as error:  # whatever it is, the main thread must hear of it
                    self._answers.put(error)

    def _answer(self) -> DeviceRecord:
        patience = time.monotonic() + SILENT_SECONDS
        while True:
            try:
                answer = self._answers.get(timeout=POLL_SECONDS)
            except Empty:
                if self._communicator.transfers.failure is None:
                    patience = time.monotonic() + SILENT_SECONDS
                elif time.monotonic() > patience:  # it is in an op that does not end
                    raise Stopped from None
                continue
            if isinstance(answer, BaseException):
                raise answer
            return answer

    def _collect(
        self, tensors: Collection[int], record: ProcessRecord | None = None, *, everywhere: bool = False
    ) -> dict[int, Tensor]:
        """Returns `tensors` of a step or of the state, on the first rank or everywhere."""
        program, doing = self.program, "collecting state" if record is None else "collecting results"
        wanted: dict[int, list[int]] = {rank: [] for rank in range(len(self._scripts))}
        pieces: dict[int, list[int]] = {rank: [] for rank in range(len(self._scripts))}
        for tensor in sorted(tensors):
            keeper = program.keepers.get(tensor, int(program.graph.producers[tensor]))
            (pieces if tensor in program.piece_tensors else wanted)[self._home[keeper]].append(tensor)
        own = {**({} if record is None else record.devices[self._rank].held), **self._worker.state}
        with self._ending(doing), torch.no_grad():
            collected = self._communicator.collect(own, wanted, everywhere=everywhere)
            if any(pieces.values()):
                held = {str(tensor): own[tensor] for tensor in pieces[self._rank]}
                filled = {name: piece for name, piece in held.items() if piece is not None and piece.numel()}
                items = self._communicator.collect_items(filled, everywhere=everywhere)
                collected |= {int(tensor): piece for tensor, piece in items.items()}
        return collected

    # -- the record ------------------------------------------------------------------------------------------------

    def _record_size(self, rank: int) -> int:
        """Returns the number of integers that `rank` sends to the first after a timed step, as `_gather` reads them."""
        ends = [(rank == source, rank == to, len(tensors)) for (source, to), tensors in self._traffic.items()]
        return 2 + 3 * len(self._scripts[rank]) + sum((2 * sends + receives) * count for sends, receives, count in ends)

    def _gather(self, own: DeviceRecord, offsets_ns: Sequence[int] | None) -> ProcessRecord:
        start_ns, finish_ns = self._communicator.began_ns, own.end_ns
        numbers = [start_ns, finish_ns]
        if offsets_ns is not None:
            numbers += [*own.start_ns, *own.finish_ns, *own.wait_ns, *self._communicator.transfer_times_ns()]
        gathered = self._communicator.gather(numbers)
        devices = [DeviceRecord({})] * len(self._scripts)
        devices[self._rank] = own
        if not self.ranks.is_first:
            return ProcessRecord(tuple(devices), start_ns, finish_ns)
        if offsets_ns is None:
            return ProcessRecord(tuple(devices), start_ns, time.perf_counter_ns())
        sent: dict[tuple[int, int], tuple[int, int]] = {}
        arrived: dict[tuple[int, int], int] = {}
        finishes: list[int] = []
        for rank, (items, offset_ns) in enumerate(zip(gathered, offsets_ns, strict=True)):
            read, ops = iter(items), tuple(task.op for task in self._scripts[rank])
            on_first = (item + offset_ns for item in read)  # takes items from `read`
            finishes.append((next(on_first), next(on_first))[1])
            starts, ends = (tuple(itertools.islice(on_first, len(ops))) for _ in range(2))
            waits = tuple(itertools.islice(read, len(ops)))
            devices[rank] = DeviceRecord(own.held if rank == self._rank else {}, ops, starts, ends, waits)
            others = [peer for peer in range(len(gathered)) if peer != rank]
            for peer in others:
                sent |= {(tensor, peer): (next(on_first), next(on_first)) for tensor in self._traffic[rank, peer]}
            for peer in others:
                arrived |= {(tensor, rank): next(on_first) for tensor in self._traffic[peer, rank]}
        sizes = self.program.graph.tensor_bytes.tolist()
        transfers = [
            Transfer(tensor, sizes[tensor], source, to, *sent[tensor, to], arrived[tensor, to])
            for (source, to), tensors in self._traffic.items()
            for tensor in tensors
        ]
        transfers.sort(key=lambda transfer: transfer.start_ns)
        return ProcessRecord(tuple(devices), start_ns, max(finishes), tuple(transfers))

    # -- the end ---------------------------------------------------------------------------------------------------

    def _check_open(self) -> None:
        if self._error is not None:
            raise self._error
        if self._is_closed:
            raise ExecutionError("all", "the executor is closed")

    def _check_latest(self, record: ProcessRecord) -> None:
        self._check_open()
        if record is not self._latest:
            raise ValueError("record is not of the latest step, or that retained nothing; use step(retain=True)")

    def _check_same(self) -> None:
        """Raises InputError unless all ranks have the same program and plan."""
        program = self.program
        content = repr((self._scripts, program.tensor_layouts, sorted(program.layouts.items())))
        digest = hashlib.sha256(content.encode()).hexdigest()
        what = "its process has another model or plan than others have; give all the same"
        number = self.ranks.num_executors
        self.ranks.num_executors += 1
        self.ranks.check_alike(f"plan/{number}", digest, what)

    @contextlib.contextmanager
    def _ending(self, doing: str) -> Iterator[None]:
        """Tells the others of a failure or an interrupt here, or learns of one there, and raises it."""
        try:
            yield
        except KeyboardInterrupt as interrupt:
            self.leave(interrupt)
            raise
        except Stopped:
            raise self._end() from None
        except ExecutionError as error:
            self._communicator.transfers.fail(Failure(self._rank, error.what, error.cause, error.note, is_own=True))
            raise self._end() from error
        except BaseException as error:
            self._communicator.transfers.fail(Failure(self._rank, doing, error, is_own=True))
            raise self._end() from error

    def leave(self, error: BaseException) -> None:
        """Tells the others that `error` ends this rank, or raises the failure elsewhere that led to an interrupt."""
        if error is self._error or self._is_closed:
            return
        transfers, is_interrupt = self._communicator.transfers, isinstance(error, KeyboardInterrupt)
        if not (is_interrupt and transfers.is_failing(_NOTICE_SECONDS)):
            transfers.fail(Failure.left(self._rank, error))
        end = self._end()
        if is_interrupt and end.what != INTERRUPTED:
            raise end from None

    def _end(self) -> RankError:
        """Stops, agrees with the others on the cause, and makes the error of it."""
        failure = self._communicator.transfers.failure
        assert failure is not None
        if self._error is not None:
            return self._error
        self._stop.set()
        self._queue.put(None)
        torch.set_num_threads(self._threads_before)
        error = self.ranks.error_of(failure)
        self._communicator.cut(CAUSE_SECONDS)
        self._thread.join(CAUSE_SECONDS)
        self._error, self._is_closed = error, True
        return error
