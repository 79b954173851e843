"""ProcessExecutor: a plan on the devices of one host or many, a process for each, started by torchrun.

Rank r runs the script of device r; `connections.py` moves the tensors. The end of one rank ends all: the rank that
fails, or first notices that another is gone, writes the cause into the store, where all find it. A process that dies
is noticed by its closed connections; one that hangs, or a host that is lost, by its missing heartbeats.
"""

import contextlib
import hashlib
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
from gdp.execute.worker import DeviceRecord, ExecutionError, StepRequest, Stopped, Worker, WorkerThread
from gdp.models.pytorch import Program, Replay

WINDOW_BYTES = 256 << 20  # enough to keep any link busy while an op runs

_NOTICE_SECONDS = 0.5  # for a failure to be noticed that led to an interrupt


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
        self._answers: SimpleQueue[tuple[int, DeviceRecord | BaseException]] = SimpleQueue()
        self._latest: ProcessRecord | None = None
        self.error: RankError | None = None  # that closed it
        self._is_closed = False
        self._thread = WorkerThread(self._worker, self._answers, self._rank, has_low_priority=True)
        self._thread.start()

    def load(self, content: Mapping[int, Tensor]) -> None:
        """Copies this device's parameters and buffers out of all, by tensor number as `Program.bind` gives them."""
        with self._ending("loading"):
            self._load(content, {self._rank: self._worker})

    def step(
        self, inputs: Mapping[int, Tensor], *, is_timed: bool = False, retain: bool = False, seed: int | None = None
    ) -> ProcessRecord:
        """Runs one step on `inputs`, as `PlanExecutor.step`; all ranks begin it at once.

        Times are on the first rank's clock: the same on one host; across hosts they are set by messages sent back
        and forth before each timed step, and right to half of the shortest such trip.
        """
        script = self._chosen_scripts(retain=retain)[self._rank]
        with self._ending("running a step"):
            offsets_ns = self._communicator.clock_offsets_ns(self.ranks.hosts) if is_timed else None
            self._communicator.plan_step(STEP + is_timed + 2 * retain)
            self._thread.requests.put(StepRequest(inputs, self._seed(seed), script, is_timed))
            record = self._record(self._answer(), offsets_ns)
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
        return super().outputs(record)

    def _held(self, tensors: Collection[int], record: ProcessRecord) -> dict[int, Tensor]:
        return self._collect(tensors, record, everywhere=True)

    def load_private(self, content: Mapping[int, Mapping[int, Tensor]]) -> None:
        """Copies this device's optimizer state out of all, by update and value."""
        with self._ending("loading optimizer state"):
            for op, values in content.items():
                if self._home[op] == self._rank:
                    self._worker.load_private(op, values)

    def state(self, *, everywhere: bool = True) -> dict[int, Tensor]:
        """Returns copies on the CPU of all that `Program.state_by_name` reads; `everywhere`, or on the first rank."""
        return self._collect(self.program.state_tensors, everywhere=everywhere)

    def private(self, *, everywhere: bool = True) -> dict[int, dict[int, Tensor]]:
        """Returns all optimizer state now, by update and value; `everywhere`, or on the first rank."""
        own = {(op, value): item for op, values in self._worker.private.items() for value, item in values.items()}
        with self._ending("collecting optimizer state"), torch.no_grad():
            items = self._communicator.collect(own, everywhere=everywhere)
        state: dict[int, dict[int, Tensor]] = {}
        for (op, value), tensor in items.items():
            state.setdefault(op, {})[value] = tensor
        return state

    def act_once(self, act: Callable[[], None]) -> None:
        """Acts on the first rank, while the others wait; an InputError of the act is raised on all."""
        with self._ending("writing"):
            text, *_ = self._communicator.collect_values(message_of(act) if self.ranks.is_first else "")
        if text:
            raise InputError(text)

    @property
    def is_closed(self) -> bool:
        """Returns whether `close` was called, or a rank has failed, with the effects of a step half there."""
        return self._is_closed

    def close(self) -> None:
        """Ends the executor on all ranks; each waits for the others to close it, too."""
        if self._is_closed:
            return
        with self._ending("closing"):
            self._communicator.begin_collective(CLOSE, None)
            self._communicator.finish()
        self._is_closed = True
        self._communicator.close()
        self._thread.requests.put(None)
        self._thread.join()
        torch.set_num_threads(self._threads_before)

    def _answer(self) -> DeviceRecord:
        patience = time.monotonic() + SILENT_SECONDS
        while True:
            try:
                _, answer = self._answers.get(timeout=POLL_SECONDS)
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
        held, own = {**({} if record is None else record.devices[self._rank].held), **self._worker.state}, {}
        for tensor in sorted(tensors):
            if self._holder(tensor) == self._rank and (content := held[tensor]) is not None:
                own[tensor] = content
        with self._ending("collecting state" if record is None else "collecting results"), torch.no_grad():
            return self._communicator.collect(own, everywhere=everywhere)

    # -- the record ------------------------------------------------------------------------------------------------

    def _record(self, own: DeviceRecord, offsets_ns: Sequence[int] | None) -> ProcessRecord:
        communicator = self._communicator
        communicator.finish_step()
        start_ns = communicator.began_ns
        finish_ns = time.perf_counter_ns() if self.ranks.is_first else own.end_ns
        devices = [DeviceRecord({})] * len(self._scripts)
        devices[self._rank] = own
        if offsets_ns is None:
            return ProcessRecord(tuple(devices), start_ns, finish_ns)
        queued, arrivals = ([[*key, times] for key, times in of.items()] for of in communicator.transfer_times_ns())
        gathered = communicator.collect_values(
            [own.ops, own.start_ns, own.finish_ns, own.wait_ns, own.end_ns, queued, arrivals]
        )
        if not self.ranks.is_first:
            return ProcessRecord(tuple(devices), start_ns, finish_ns)
        sent: dict[tuple[int, int], tuple[int, int]] = {}
        arrived: dict[tuple[int, int], int] = {}
        for rank, ((ops, starts_ns, ends_ns, waits_ns, end_ns, queued, arrivals), offset_ns) in enumerate(
            zip(gathered, offsets_ns, strict=True)
        ):
            held = own.held if rank == self._rank else {}
            devices[rank] = DeviceRecord(
                held, tuple(ops), tuple(starts_ns), tuple(ends_ns), tuple(waits_ns), end_ns
            ).shifted(offset_ns)
            sent |= {
                (tensor, to): (put_ns + offset_ns, turn_ns + offset_ns) for tensor, to, (put_ns, turn_ns) in queued
            }
            arrived |= {(tensor, to): arrival_ns + offset_ns for tensor, to, arrival_ns in arrivals}
        sizes = self.program.graph.tensor_bytes.tolist()
        transfers = [
            Transfer(tensor, sizes[tensor], source, to, *sent[tensor, to], arrived[tensor, to])
            for (source, to), tensors in self._traffic.items()
            for tensor in tensors
        ]
        transfers.sort(key=lambda transfer: transfer.start_ns)
        return ProcessRecord(tuple(devices), start_ns, max(record.end_ns for record in devices), tuple(transfers))

    # -- the end ---------------------------------------------------------------------------------------------------

    def _check_open(self) -> None:
        if self.error is not None:
            raise self.error
        if self._is_closed:
            raise ExecutionError("all", "the executor is closed")

    def _check_latest(self, record: ProcessRecord) -> None:
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
        self._check_open()
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
        if error is self.error or self._is_closed:
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
        if self.error is not None:
            return self.error
        self._stop.set()
        self._thread.requests.put(None)
        torch.set_num_threads(self._threads_before)
        error = self.ranks.error_of(failure)
        self._communicator.cut(CAUSE_SECONDS)
        self._thread.join(CAUSE_SECONDS)
        self.error, self._is_closed = error, True
        return error
