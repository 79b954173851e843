"""ProcessExecutor: a plan on the devices of one host or many, a process for each, started by torchrun. Rank r runs the
script of device r; `messages.py` moves the tensors. The end of one rank ends all: the rank that fails, or first notices
that another is gone, writes the cause into the store, where all find it. A process that dies is noticed by its closed
connections; one that hangs, or a host that is lost, by its missing heartbeats.

A `RankRunner` is this process's part in a training that torchrun started, with the messages at its end. An error on one
rank ends the script on all, and one rank prints it in one line, behind the traceback of one that is none of gdp's."""

import atexit
import contextlib
import hashlib
import signal
import sys
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from queue import Empty, SimpleQueue
from types import TracebackType
from typing import Any

import numpy.typing as npt
import torch
import torch.distributed as dist
from torch import Tensor

from gdp.errors import InputError
from gdp.execute.backends import backend_of
from gdp.execute.plan_executor import (
    POLL_SECONDS,
    DeviceRecord,
    ExecutionError,
    PlanExecutor,
    StepRecord,
    StepRequest,
    Stopped,
    Worker,
    WorkerThread,
)
from gdp.execute.ranks.messages import Messages, RankTransport
from gdp.execute.ranks.ranks import CAUSE_SECONDS, RankError, Ranks, join_or_leave, message_of
from gdp.execute.script import traffic_of
from gdp.models.pytorch import Program
from gdp.models.pytorch.strides import bytes_of

WINDOW_BYTES = 256 << 20  # enough to keep any link busy while an op runs
CONNECT, CLOSE, COLLECT, ACT, STEP = range(5)  # what ranks do together; to STEP add 1 if it is timed, 2 if it retains
_JOIN_SECONDS = 600.0  # for scripts that load data before they place a model


class RankRunner:
    """Runs a training with a process for each of the devices `names`; `on` as in `find_targets`."""

    is_alone = False

    def __init__(self, names: Sequence[str], on: Sequence[str] | None) -> None:
        self._ranks = join_or_leave(names, on, timeout_seconds=_JOIN_SECONDS, in_script=True)
        self._ranks.__enter__()
        self.is_first = self._ranks.is_first
        self._executor: ProcessExecutor | None = None
        self._has_left = False
        self._previous_hook = sys.excepthook
        sys.excepthook = self._tell
        atexit.register(self._close_at_exit)

    def start(
        self, program: Program, order: Sequence[npt.ArrayLike], start: Mapping[str, Tensor], settings: object
    ) -> "ProcessExecutor":
        """Makes an executor. InputError unless all ranks start from the same."""
        digest = hashlib.sha256(repr(settings).encode())
        for name in sorted(start):
            digest.update(name.encode())
            digest.update(bytes_of(start[name].detach().cpu().contiguous()).numpy().data)
        what = (
            "its process has other parameters, options or another batch than others have; call torch.manual_seed alike "
            "on all ranks before the model is made, and give each the whole batch"
        )
        self._ranks.check_alike(digest.hexdigest(), what)
        timeout_seconds = dist.default_pg_timeout.total_seconds()  # a rank may evaluate, or write, for long
        self._executor = ProcessExecutor(program, order, self._ranks, timeout_seconds=timeout_seconds)
        return self._executor

    def write_once(self, write: Callable[[], None]) -> None:
        """Writes on the first rank, while the others wait; an InputError is raised on all."""
        try:
            (self._executor or self._ranks).act_once(write)
        except InputError:
            raise
        except BaseException as error:
            self.leave(error)
            raise

    def error_of_all(self, what: str, note: str) -> RankError:
        """Returns the error that all ranks raise alike, which the first one prints."""
        return RankError("all", what, note=note, is_reporter=self.is_first)

    def leave(self, error: BaseException) -> None:
        """Ends the run on all ranks for `error`, or raises the failure elsewhere that led to an interrupt."""
        if self._has_left:
            return
        try:
            try:
                self._ranks.leave(error)
            except KeyboardInterrupt:  # by torchrun, while it ends
                self._ranks.leave(error)
        finally:
            self._has_left = True
            self._ranks.close()

    def close(self) -> None:
        """Ends the executor, together with all ranks, and leaves the group of processes."""
        if self._has_left:
            return
        self._has_left = True
        try:
            if self._executor is not None:
                self._executor.close()
        finally:
            self._ranks.close()
            atexit.unregister(self._close_at_exit)
            if self._ranks.error is None and sys.excepthook == self._tell:
                sys.excepthook = self._previous_hook

    def _tell(self, kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        """Prints an error that nobody has caught, on one rank, and ends all."""
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        is_told = False
        if isinstance(error, InputError | ExecutionError) and not isinstance(error, RankError):
            with contextlib.suppress(RuntimeError):  # while there is a store: it may end with the first rank
                is_told = not self._ranks.is_first_to_say(str(error))
        try:
            self.leave(error)
        except RankError as failure:
            error = failure
        if isinstance(error, KeyboardInterrupt) and self._ranks.error is not None:
            error = self._ranks.error
        if isinstance(error, RankError):
            _print_line(error)
        elif isinstance(error, InputError | ExecutionError):
            if not is_told:
                print(f"gdp: error: {error}", file=sys.stderr, flush=True)
        else:
            self._previous_hook(kind, error, trace)
            if self._ranks.error is not None:
                _print_line(self._ranks.error)

    def _close_at_exit(self) -> None:
        """Closes it for a script that has not."""
        try:
            self.close()
        except RankError as error:
            _print_line(error)


def _print_line(error: RankError) -> None:
    if error.is_reporter:
        print(f"gdp: error: {error}", file=sys.stderr, flush=True)


class ProcessExecutor(PlanExecutor):
    """A program placed on the devices of `ranks` [D]. RankError on all if one fails, dies, is silent, or keeps another
    waiting for `timeout_seconds`; the executor is closed then. window_bytes: of tensors received ahead of their use,
    except those before an awaited one of the same rank."""

    def __init__(
        self,
        program: Program,
        order: Sequence[npt.ArrayLike],
        ranks: Ranks,
        *,
        timeout_seconds: float = 600.0,
        window_bytes: int = WINDOW_BYTES,
    ) -> None:
        super().__init__(program, order, ranks.targets)
        self.ranks, self._rank, self.is_first = ranks, ranks.rank, ranks.is_first
        self._check_same()
        backend, traffic = backend_of(ranks.target, program.memory_for), traffic_of(self._scripts)
        self._messages = Messages(ranks, timeout_seconds)
        script = self._scripts[ranks.rank]
        self._transport = RankTransport(program, script, traffic, self._messages, backend, window_bytes)
        self._worker = Worker(program, backend, self._transport, ranks.monitor.failed)
        self.workers = {ranks.rank: self._worker}
        self._answers: SimpleQueue[tuple[int, Any]] = SimpleQueue()
        self._thread = WorkerThread(backend, self._answers, ranks.rank)
        self._thread.start()
        ranks.ends.append(self._cut)
        if not ranks.monitor.is_alive():
            ranks.monitor.start()
        self._together(CONNECT, partial(self._messages.connect, traffic), "connecting")

    def _together(self, kind: int, act: Callable[[], Any], doing: str) -> Any:
        """Has the worker's thread act as soon as all ranks do the same; returns its answer."""

        def meet_and_act() -> Any:
            self._messages.meet(kind)
            return act()

        with self._ending(doing):
            self._thread.requests.put(meet_and_act)
            while True:
                with contextlib.suppress(Empty):
                    _, answer = self._answers.get(timeout=POLL_SECONDS)
                    if isinstance(answer, BaseException):
                        raise answer
                    return answer
                if self.ranks.monitor.failure is not None:
                    raise Stopped

    def _step(self, inputs: Mapping[int, Tensor], *, is_timed: bool, retain: bool, seed: int) -> StepRecord:
        """Runs one step, which all ranks begin at once. Times are on the first rank's clock: the same on one host;
        across hosts they are set by messages sent back and forth before each timed step, and right to half of the
        shortest such trip."""
        request = StepRequest(inputs, seed, self._chosen_scripts(retain=retain)[self._rank], is_timed)
        kind = STEP + is_timed + 2 * retain
        record: StepRecord = self._together(kind, partial(self._measured, kind, request), "running a step")
        return record

    def _measured(self, kind: int, request: StepRequest) -> StepRecord:
        offsets_ns: Sequence[int] = ()
        if request.is_timed:
            offsets_ns = self._messages.clock_offsets_ns()
            self._messages.meet(kind)
        start_ns, own = time.perf_counter_ns(), self._worker.step(request)
        devices = [DeviceRecord({})] * len(self.targets)
        if request.is_timed:
            gathered = self._messages.gather(replace(own, held={}))
            pairs = zip(gathered, offsets_ns, strict=True)
            devices = [DeviceRecord(**record).shifted(by_ns) for record, by_ns in pairs]
            own = replace(devices[self._rank], held=own.held)
        devices[self._rank] = own
        return StepRecord.of_host(devices, start_ns)

    def _held(self, tensors: Collection[int], record: StepRecord, *, everywhere: bool = True) -> dict[int, Tensor]:
        if record is not self._latest:
            raise ValueError("record is not of the latest step")
        return self._collected(tensors, record.devices[self._rank].held, everywhere=everywhere)

    def state(self, *, everywhere: bool = True) -> dict[int, Tensor]:
        """Returns copies on the CPU of all that `Program.state_by_name` reads; `everywhere`, or on the first rank."""
        return self._collected(self.program.state_tensors, {}, everywhere=everywhere)

    def _collected(
        self, tensors: Collection[int], held: Mapping[int, Tensor | None], *, everywhere: bool
    ) -> dict[int, Tensor]:
        here, own = {**held, **self._worker.state}, dict[int, Tensor]()
        for tensor in sorted(tensors):
            if self._holder(tensor) == self._rank and (content := here[tensor]) is not None:
                own[tensor] = content
        return self._collect(own, everywhere=everywhere)

    def private(self, *, everywhere: bool = True) -> dict[int, dict[int, Tensor]]:
        """Returns all optimizer state now, by update and value; `everywhere`, or on the first rank."""
        own = {(op, value): item for op, values in self._worker.private.items() for value, item in values.items()}
        state: dict[int, dict[int, Tensor]] = {}
        for (op, value), tensor in self._collect(own, everywhere=everywhere).items():
            state.setdefault(op, {})[value] = tensor
        return state

    def _collect(self, own: Mapping[Any, Tensor], *, everywhere: bool) -> dict[Any, Tensor]:
        """Returns the tensors of all ranks by key, on the first rank or everywhere."""
        collect = partial(self._messages.collect, own, everywhere=everywhere)
        tensors: dict[Any, Tensor] = self._together(COLLECT, collect, "collecting tensors")
        return tensors

    def act_once(self, act: Callable[[], None]) -> None:
        """Acts on the first rank, while the others wait; an InputError of the act is raised on all."""
        with self._ending("writing"):
            text = message_of(act) if self.is_first else ""
        text, *_ = self._together(ACT, partial(self._messages.gather, text), "writing")
        if text:
            raise InputError(text)

    def close(self) -> None:
        """Ends the executor on all ranks; each waits for the others to close it, too."""
        if self.is_closed:
            return
        self._together(CLOSE, lambda: None, "closing")
        self._end_threads()

    def _check_same(self) -> None:
        """Raises InputError unless all ranks have the same program and plan."""
        program = self.program
        content = repr((self._scripts, program.tensor_layouts, sorted(program.layouts.items())))
        digest = hashlib.sha256(content.encode()).hexdigest()
        what = "its process has another model or plan than others have; give all the same"
        self.ranks.check_alike(digest, what)

    @contextlib.contextmanager
    def _ending(self, doing: str) -> Iterator[None]:
        """Ends the run of all ranks after a failure or an interrupt on one."""
        with self.ranks.ending(doing):
            if self.is_closed:
                raise ExecutionError("all", "the executor is closed")
            yield

    def leave(self, error: BaseException) -> None:
        """Tells the others that `error` ends this rank, or raises the failure elsewhere that led to an interrupt."""
        if not self.is_closed:
            self.ranks.leave(error)

    def _cut(self) -> None:
        """Ends the threads, and the others' wait for this rank, after a failure."""
        if not self.is_closed:
            self._messages.cut()
            self._end_threads()

    def _end_threads(self) -> None:
        """Ends the threads; after a failure, one may be in an op that does not end."""
        self.is_closed = True
        self._thread.requests.put(None)
        self._transport.sent.put(None)
        until = time.monotonic() + CAUSE_SECONDS
        for thread in (self._thread, self._transport.thread):
            thread.join(max(until - time.monotonic(), 0))
        torch.set_num_threads(self._threads_before)
